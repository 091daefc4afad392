"""A host of plain numbers: no torch, no pipeline, and its own sum of what a phase takes."""

from contextlib import nullcontext
from types import SimpleNamespace

from residency.offload.device import Identity, Reading, Traits, Transfers
from residency.offload.memory_errors import Shortfall
from residency.phases import host as said
from residency.phases.graph import ComponentUse, Phase, PhaseGraph
from residency.phases.identity import HostIdentity
from residency.phases.limit import Limit
from residency.phases.schedule import NOTHING, Hold, Schedule
from residency.phases.shape import Shape


class NumberHost(said.Host):
    """`phases`: the bytes that each takes besides weights, and passes by component; `layers`: how
    many of how many bytes each has, all declared resident; `unseen`: what a phase takes more while
    anything is retained, which no model knows; `act`: called with the schedule in each request."""

    name, identity, traits = "numbers", Identity("numbers", "N-0"), Traits(simulated=True)
    graph, schedule, is_open = None, NOTHING, False

    def __init__(self, phases, layers, capacity, shapes=None, unseen=None, act=None):
        uses = {p: [ComponentUse(p, c, n) for c, n in by.items()] for p, (_, by) in phases.items()}
        self.graph = PhaseGraph(Phase(name, tuple(each)) for name, each in uses.items())
        self.phases, self.layers, self.capacity = phases, layers, capacity
        self.shapes, self.unseen, self.act = shapes or (Shape(64, 64),), unseen or {}, act or id
        self.others, self.left, self.limit = 0, {}, Limit()

    def read(self, peak=0):
        total, others, held = self.capacity, self.others, sum(self.held_bytes().values())
        return Reading(total, total - others - held, others, 0, held, held, peak, peak, 0)

    def portrait(self):
        none = dict.fromkeys(("libraries", "components", "adapters", "declarations"), ())
        return HostIdentity(pipeline="N", envelope=tuple(map(str, self.shapes)), prefetch=0, **none)

    def components(self):
        for name, (count, size) in self.layers.items():
            layer = SimpleNamespace(group="blocks", buffer_bytes=size, copy_bytes=size)
            sums = (count * size, 0, count * size, 0, 0, frozenset(range(count)), count, count)
            yield said.ComponentBytes(name, "layerwise-offload", (layer,) * count, *sums)

    def open(self):
        way = {"retain_resident_layers": False, "retained_set": (), "prefetch": 0, "pinned": False}
        holds = (
            Hold(phase=use.phase, component=use.component, resident_set=held, **way)
            for use in self.graph.uses
            for held in [tuple(range(self.layers[use.component][0] * (use.passes > 1)))]
        )
        self.baseline = self.schedule = Schedule(uses=tuple(holds))
        self.is_open = True

    def close(self):
        self.left, self.is_open = {}, False

    def steps(self, schedule):
        to = [lambda s=s: vars(self).update(schedule=s, left={}) for s in (schedule, self.schedule)]
        return [SimpleNamespace(apply=to[0], revert=to[1])]

    def release(self):
        self.left = {}

    def run(self, shape):
        self.limit.check()
        trace, copied = said.RequestTrace(), 0
        for phase, (peak, uses) in self.phases.items():
            peak += self.unseen.get(phase, 0) * bool(self.schedule.retaining)
            peak += sum(n for c, n in self.held_bytes().items() if c not in uses)
            for name, passes in uses.items():
                (count, size), hold = self.layers[name], self.schedule.hold(phase, name)
                kept = {*hold.resident_set} if passes > 1 or hold.retained_set else set()
                came, streamed = self.left.pop(name, set()), count - len(kept)
                peak += size * (len(kept | came) + min(1, streamed))
                copied += size * (len(kept - came) + streamed * passes)
                self.left[name] = {*hold.retained_set}
                trace.layers_run[phase, name] = frozenset(range(count))
            if peak > (free := self.capacity - self.others):
                return said.Failure(phase, shape, True, Shortfall(peak, free), "out of memory")
            trace.readings.append(said.PhaseReading(phase, self.read(peak), Transfers(copied)))
        try:
            self.act(self.schedule)
        except RuntimeError as error:
            return said.Failure(phase, shape, False, None, str(error))
        trace.transfers = Transfers(copied)
        return said.Made(trace, shape, None)

    def request(self, asked, like):
        return nullcontext(self.run(like).trace)

    def passes(self, shape):
        return self.graph.passes

    def held_bytes(self):
        return {c: len(self.left.get(c, ())) * size for c, (_, size) in self.layers.items()}
