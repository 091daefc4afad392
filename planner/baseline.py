"""The measured baseline in numbers: the parts of the choice, their prices, and what a choice for
them is as a schedule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ..offload.errors import UnknownNameError
from ..phases.graph import ComponentUse, Headroom
from ..phases.host import ComponentBytes, Host, Sweep
from ..phases.schedule import Hold, Schedule
from ..phases.shape import Shape
from .choosing.model import (
    Choice,
    Fixed,
    Instance,
    LayerClass,
    Mode,
    Part,
    PartChoice,
    Place,
    Room,
    UseSpan,
    nothing_retained,
)
from .choosing.prices import Pricing
from .plan import PhasePlan
from .verdict import Judgement, Verdict


class MeasuredPart:
    """One component, with the layers behind each class of the choice."""

    def __init__(
        self,
        component: ComponentBytes,
        uses: Sequence[ComponentUse],
        layers_run: Mapping[tuple[str, str], frozenset[int]],
    ) -> None:
        self.bytes = component
        self.component = component.name
        self.uses = tuple(uses)
        self.sized = component.sized
        self.stays = component.stays
        self.classes: list[LayerClass] = []
        self.layers: list[tuple[int, ...]] = []
        """For each class, the layers in it, in order."""
        self._classify(layers_run)

    def _classify(self, layers_run: Mapping[tuple[str, str], frozenset[int]]) -> None:
        alike: dict[tuple[str, int, int, tuple[bool, ...]], list[int]] = defaultdict(list)
        for i, layer in enumerate(self.bytes.layers):
            # Which layers run is seen where they are streamed; of others all are taken to.
            runs = tuple(self.stays or i in layers_run[use.at] for use in self.uses)
            alike[layer.group, layer.buffer_bytes, layer.copy_bytes, runs].append(i)
        for (group, buffer_bytes, copy_bytes, runs), layers in alike.items():
            self.classes.append(LayerClass(group, len(layers), buffer_bytes, copy_bytes, runs))
            self.layers.append(tuple(layers))

    @property
    def rest_bytes(self) -> int:
        """Device bytes that come and go with the component: those of no layer, or of all of it
        where it isn't streamed. What the baseline keeps is part of its peaks instead."""
        if self.bytes.keeps_rest:
            return 0
        return self.bytes.non_layer_bytes if self.classes else self.bytes.weight_bytes

    @property
    def rest_copy_bytes(self) -> int:
        if self.bytes.keeps_rest or (self.stays and not self.classes):
            return 0
        return self.bytes.non_layer_copy_bytes if self.classes else self.bytes.copy_bytes

    @property
    def fixed(self) -> Fixed:
        if self.sized:
            return Fixed()
        counts = self.counts(self.bytes.declared)
        return Fixed(resident=counts, retained=counts, retains=True if self.stays else None)

    @property
    def left_out(self) -> bool:
        """Whether layers that run aren't among those declared."""
        declared = self.counts(self.bytes.declared)
        return any(
            any(each.runs) and count < each.count
            for each, count in zip(self.classes, declared, strict=True)
        )

    def counts(self, layers: frozenset[int]) -> tuple[int, ...]:
        """How many of each class are among `layers`."""
        return tuple(len(layers.intersection(members)) for members in self.layers)

    def resident(self, chosen: PartChoice, use: int) -> frozenset[int]:
        """The layers to hold in a use."""
        if not self.sized:
            return self.bytes.declared
        return self._pick(chosen.resident[use])

    def retained(self, chosen: PartChoice, use: int) -> frozenset[int]:
        """The layers to hold across the gap behind a use."""
        resident = self.resident(chosen, use)
        return resident if not self.sized else self._pick(chosen.retained[use], of=resident)

    def _pick(self, counts: Sequence[int], of: frozenset[int] | None = None) -> frozenset[int]:
        """As many layers of each class as `counts` says, spread evenly over those in `of`: so
        between two streamed layers there is compute for a copy to hide behind."""
        picked: set[int] = set()
        for members, count in zip(self.layers, counts, strict=True):
            pool = [i for i in members if of is None or i in of]
            picked.update(pool[(2 * j + 1) * len(pool) // (2 * count)] for j in range(count))
        return frozenset(picked)

    def holds(self, chosen: PartChoice) -> Iterator[Hold]:
        """What each use holds by a choice; nothing is said of what never leaves."""
        if self.stays:
            return
        for u, use in enumerate(self.uses):
            retains = chosen.retains[u]
            # A declared set is held in a use that runs once where it retains, else it isn't.
            held = self.resident(chosen, u) if any(chosen.resident[u]) or retains else frozenset()
            yield Hold(
                phase=use.phase,
                component=self.component,
                retain_resident_layers=retains,
                resident_set=tuple(sorted(held)),
                retained_set=tuple(sorted(self.retained(chosen, u))) if retains else (),
                prefetch=chosen.mode.prefetch,
                pinned=chosen.mode.pinned,
            )

    def recalled(self, schedule: Schedule, modes: Sequence[Mode]) -> PartChoice | None:
        """The choice that `schedule` is for this component; None where it says nothing of a use,
        or streams it in a way that isn't among `modes`."""
        holds = [schedule.hold(*use.at) for use in self.uses]
        found = [each for each in holds if each is not None]
        if len(found) < len(holds) or not found:
            return None
        way = (found[0].prefetch, found[0].pinned)
        mode = next((m for m in modes if (m.prefetch, m.pinned) == way), None)
        if mode is None:
            return None
        return PartChoice(
            tuple(self.counts(frozenset(each.resident_set)) for each in found),
            tuple(self.counts(frozenset(each.retained_set)) for each in found),
            tuple(each.retain_resident_layers for each in found),
            mode,
        )


class Baseline:
    """What a sweep of the baseline says of the choice.

    In each place the room for weights is the headroom, and what the baseline had there of them.
    Raises UnknownNameError where a price is said of a phase that isn't there.
    """

    def __init__(
        self, host: Host, sweep: Sweep, headrooms: Sequence[Headroom], pricing: Pricing
    ) -> None:
        self.host = host
        self.sweep = sweep
        self.headrooms = tuple(headrooms)
        self.pricing = pricing
        for phase in pricing.exposures:
            if phase not in host.graph.phases:
                raise UnknownNameError("phase", phase, host.graph.phases)
        self._passes = {shape: host.passes(shape) for shape in host.shapes}
        self._served = {shape: host.served_passes(shape) for shape in host.shapes}
        self._layers_run: dict[tuple[str, str], frozenset[int]] = defaultdict(frozenset)
        for run in sweep.runs:
            for trace in run.traces:
                for at, layers in trace.layers_run.items():
                    self._layers_run[at] |= layers
        self.parts = [
            MeasuredPart(component, uses, self._layers_run)
            for component in host.components()
            if (uses := [use for use in host.graph.uses if use.component == component.name])
        ]
        self._numbers = tuple(map(self._part, self.parts))
        self.choice: Choice = tuple(map(self._nothing, self._numbers))
        """Nothing retained but what stays."""
        self._fragmentation = [
            run.fragmentation_bytes(phase) for run in sweep.runs for phase in host.graph.phases
        ]
        self.instance = self._instance()

    def _instance(self) -> Instance:
        given = self.rooms(0)
        places = tuple(
            replace(room, room_bytes=max(room.room_bytes, self._least(place)))
            for place, room in enumerate(given.places)
        )
        return replace(given, places=places)

    def _least(self, place: Place) -> int:
        """What the baseline takes in a place. It was seen to run, though it may leave less than
        the margin, so no room is less."""
        return Instance((), self._numbers).device_bytes(self.choice, place)

    def rooms(self, more_bytes: int) -> Instance:
        """The instance on a card of so many bytes more, or fewer, by the headroom alone."""
        places = tuple(
            Room(
                headroom.phase,
                str(headroom.shape),
                headroom.headroom_bytes + more_bytes + self._least(place),
            )
            for place, headroom in enumerate(self.headrooms)
        )
        return Instance(
            places,
            self._numbers,
            self.pricing.host_budget_bytes,
            pinned_on_card=self.host.traits.pins_on_card,
        )

    def _part(self, part: MeasuredPart) -> Part:
        return Part(
            part.component,
            part.rest_bytes,
            part.rest_copy_bytes,
            tuple(part.classes),
            tuple(self._span(use) for use in part.uses),
            tuple(self._modes(part)),
            part.fixed,
            holds_always=part.bytes.holds_always,
        )

    def _span(self, use: ComponentUse) -> UseSpan:
        gap = self.host.graph.gap(use)
        places = [p for p, at in enumerate(self.headrooms) if at.phase == use.phase]
        shapes = [self.headrooms[place].shape for place in places]
        return UseSpan(
            use.phase,
            tuple(places),
            tuple(self._passes[shape][use.at] for shape in shapes),
            max(self._served[shape][use.at] for shape in shapes),
            tuple(p for p, at in enumerate(self.headrooms) if at.phase in gap.phases),
            self.pricing.exposure(use.phase),
        )

    def _modes(self, part: MeasuredPart) -> Iterator[Mode]:
        """As declared first. To fetch nothing ahead is a choice only where it is said what
        fetching ahead hides: otherwise it would seem to cost nothing."""
        uses = self.host.baseline.uses
        own = [each.prefetch for each in uses if each.component == part.component]
        first = next(iter(own or [each.prefetch for each in uses]), 0)
        depths = [first]
        if part.sized and first and any(u.phase in self.pricing.exposures for u in part.uses):
            depths.append(0)
        cost = 1 / self.pricing.bytes_per_s
        for depth in depths:
            if self.pricing.host_budget_bytes is None or part.stays:
                yield Mode(depth, True, cost, 0)
            else:
                yield Mode(depth, True, cost, part.bytes.pinned_charge_bytes)
                yield Mode(depth, False, cost * self.pricing.pageable_factor, 0)

    def _nothing(self, numbers: Part) -> PartChoice:
        """What is declared is held in uses of several passes, and nothing is retained.

        With a host budget the baseline is priced as pageable: what pinning saves is the plan's.
        """
        first = numbers.modes[0].prefetch
        mode = min(numbers.modes, key=lambda m: (m.prefetch != first, m.pinned))
        return nothing_retained(numbers, mode)

    def schedule(self, choice: Choice) -> Schedule:
        """What `choice` says of each use of a component that can leave the device."""
        return Schedule(
            uses=tuple(
                hold
                for part, chosen in zip(self.parts, choice, strict=True)
                for hold in part.holds(chosen)
            )
        )

    def recalled(self, schedule: Schedule) -> Choice | None:
        """The choice that a schedule is, in the classes of this measurement; None where components
        or uses differ."""
        choice = []
        for part, numbers, nothing in zip(self.parts, self._numbers, self.choice, strict=True):
            chosen = nothing if part.stays else part.recalled(schedule, numbers.modes)
            if chosen is None:
                return None
            choice.append(chosen)
        return tuple(choice)

    def choice_of(self, schedule: Schedule) -> Choice:
        """Of a schedule that was made from a choice here."""
        choice = self.recalled(schedule)
        assert choice is not None, "it isn't one of these components"
        return choice

    def h2d_bytes(self, shape: Shape, swept_bytes: int, schedule: Schedule) -> int:
        """Bytes of a request at `shape`, from those of a sweep's request, which has fewer steps
        and ran under `schedule`."""
        more = 0
        for part in self.parts:
            if part.stays:
                continue
            ran = frozenset().union(*(self._layers_run[use.at] for use in part.uses))
            for use in part.uses:
                passes, served = self._passes[shape][use.at], self._served[shape][use.at]
                held = _held(part, schedule.hold(*use.at), passes)
                a_pass = sum(part.bytes.layers[i].copy_bytes for i in ran - held)
                more += a_pass * (served - passes)
        return swept_bytes + more

    def learnt(self, phases: Sequence[PhasePlan]) -> Instance:
        """The instance with what an earlier start's refutations taught of the same places."""
        instance = self.instance
        losses = {(each.name, each.shape): each.learnt_bytes for each in phases}
        for place, room in enumerate(instance.places):
            lost = losses.get((room.phase, room.shape), 0)
            instance = self._lowered(instance, place, room.room_bytes - lost)
        return instance

    def _lowered(self, instance: Instance, place: Place, room_bytes: int) -> Instance:
        return instance.lowered(place, max(room_bytes, self._least(place)))

    def describe(self, choice: Choice) -> str:
        """What a choice holds, in a few words."""
        told = []
        for part, chosen in zip(self.parts, choice, strict=True):
            if part.stays:
                continue
            for u in range(len(part.uses)):
                retained, resident = len(part.retained(chosen, u)), len(part.resident(chosen, u))
                if chosen.retains[u]:
                    layers = f" ({retained} layers)" if part.sized else ""
                    told.append(f"to retain {part.component}{layers}")
                if part.sized and resident > retained:
                    told.append(f"to hold {resident} layers of {part.component}")
        return ", ".join(told) or "nothing retained"

    def refuted(
        self, instance: Instance, choice: Choice, judgement: Judgement, *, again: bool
    ) -> Instance:
        """`instance` without `choice` and all that takes as much where it was refuted.

        After it ran out of memory, what was missing is taken off there, and a whole layer at
        least: less can't be enough, and a candidate that differs by a few bytes isn't worth a
        sweep. `again`: another one ran out before; then peaks of allocated bytes are too hopeful
        for this pipeline, and every phase is given what it was seen to lose to fragmentation.
        """
        place = None if judgement.place is None else self._place(judgement.place)
        taken = 0 if place is None else instance.device_bytes(choice, place)
        if place is None or taken <= self._least(place):
            return instance.without(choice)
        off = max(judgement.shortfall_bytes or 0, 1)
        if judgement.verdict is Verdict.OOM:
            moved = (part for part in self.parts if not part.stays)
            off = max([off, *(each.layer_bytes for part in moved for each in part.classes)])
        lowered = self._lowered(instance, place, taken - off)
        return self._cautious(lowered) if again else lowered

    def _cautious(self, instance: Instance) -> Instance:
        """What each phase was seen to lose to fragmentation is taken off its room, as far as the
        margin doesn't hold it already."""
        for place, (headroom, lost) in enumerate(
            zip(self.headrooms, self._fragmentation, strict=True)
        ):
            room = self.instance.places[place].room_bytes - max(lost - headroom.margin_bytes, 0)
            instance = self._lowered(instance, place, room)
        return instance

    def missing_bytes(self, choice: Choice, judgement: Judgement) -> int | None:
        """What was missing where a choice failed: by the model, with the margin aside, and at
        least what was seen."""
        if judgement.verdict is not Verdict.OOM or judgement.place is None:
            return judgement.shortfall_bytes
        place = self._place(judgement.place)
        room = self.instance.places[place].room_bytes + self.headrooms[place].margin_bytes
        missing = self.instance.device_bytes(choice, place) - room
        return max(judgement.shortfall_bytes or 0, missing)

    def _place(self, at: tuple[str, Shape]) -> Place:
        places = [(headroom.phase, headroom.shape) for headroom in self.headrooms]
        return places.index(at)


def _held(part: MeasuredPart, hold: Hold | None, passes: int) -> frozenset[int]:
    if hold is None:
        return frozenset()
    if passes > 1 or hold.retain_resident_layers or part.bytes.holds_always:
        return frozenset(hold.resident_set)
    return frozenset()


def exposures(sweep: Sweep, bytes_per_s: float) -> dict[str, float]:
    """By phase: the share of the time of its copies, at that rate, that compute stood still for,
    0 to 1. Of the request in the steady state that stood still the longest; phases in which nothing
    was timed or copied are left out."""
    worst: dict[str, float] = {}
    for run in sweep.runs:
        stall_s: dict[str, float] = defaultdict(float)
        copied: dict[str, int] = defaultdict(int)
        for (phase, _), use in run.traces[-1].use_times.items():
            stall_s[phase] += use.stall_s
            copied[phase] += use.copy_bytes
        for phase, nbytes in copied.items():
            if nbytes:
                share = min(max(stall_s[phase] * bytes_per_s / nbytes, 0.0), 1.0)
                worst[phase] = max(worst.get(phase, 0.0), share)
    return worst
