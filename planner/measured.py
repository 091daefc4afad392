"""From measurement to numbers and back: the instance of a measured pipeline, and what a choice
says of each use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..offload.errors import UnknownNameError
from ..phases.headroom import Headroom
from ..phases.shape import Shape
from ..phases.use import ComponentUse
from ..phases.warmup import Sweep
from .candidate import Candidate
from .choosing.instance import Choice, Instance, Room
from .choosing.part import Mode, Part, PartChoice, Place, UseSpan, nothing_retained
from .installation import Installation
from .journal.record import UseRecord
from .measured_part import MeasuredPart
from .plan import PhasePlan, UsePlan, Verdict
from .pricing import Pricing
from .validation import Judgement


class Measured:
    """What a baseline sweep says of the choice.

    In each place the room for weights is the headroom, and what the baseline had there of them.
    """

    def __init__(
        self,
        installation: Installation,
        baseline: Sweep,
        headrooms: Sequence[Headroom],
        pricing: Pricing,
        sized: frozenset[str],
    ) -> None:
        self.installation = installation
        self.headrooms = tuple(headrooms)
        self.pricing = pricing
        for phase in pricing.exposures:
            if phase not in installation.graph.phases:
                raise UnknownNameError("phase", phase, installation.graph.phases)
        layers_run: dict[tuple[str, str], frozenset[int]] = defaultdict(frozenset)
        for run in baseline.runs:
            for trace in run.traces:
                for at, layers in trace.layers_run.items():
                    layers_run[at] |= layers
        self.parts = [
            MeasuredPart(name, placement, uses, layers_run, sized=name in sized)
            for name, placement in installation.placements.items()
            if (uses := [*self._uses_of(name)])
        ]
        self._numbers = tuple(map(self._part, self.parts))
        self.baseline: Choice = tuple(map(self._baseline, self._numbers))
        self._fragmentation = [
            run.fragmentation_bytes(phase)
            for run in baseline.runs
            for phase in installation.graph.phases
        ]
        self.instance = self._instance()

    def pin(self, part: MeasuredPart) -> str | None:
        """What of a component the user fixed, in the words of the flag."""
        return self.installation.declarations[part.component].pin

    def _uses_of(self, component: str) -> Iterator[ComponentUse]:
        return (use for use in self.installation.graph.uses if use.component == component)

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
        return Instance((), self._numbers).device_bytes(self.baseline, place)

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
            pinned_on_card=self.installation.device.traits.pins_on_card,
        )

    def _part(self, part: MeasuredPart) -> Part:
        return Part(
            part.component,
            part.fixed_bytes,
            part.fixed_copy_bytes,
            tuple(part.classes),
            tuple(self._span(part, use) for use in part.uses),
            tuple(self._modes(part)),
            part.pins,
        )

    def _span(self, part: MeasuredPart, use: ComponentUse) -> UseSpan:
        gap = self.installation.graph.gap(use)
        places = [p for p, at in enumerate(self.headrooms) if at.phase == use.phase]
        at_use = (use.phase, use.component)
        shapes = [self.headrooms[place].shape for place in places]
        return UseSpan(
            use.phase,
            tuple(places),
            tuple(self.installation.warmup.passes(shape)[at_use] for shape in shapes),
            max(self.installation.served_passes(shape)[at_use] for shape in shapes),
            tuple(p for p, at in enumerate(self.headrooms) if at.phase in gap.phases),
            self.pricing.exposure(use.phase),
        )

    def _modes(self, part: MeasuredPart) -> Iterator[Mode]:
        """As declared first. To fetch nothing ahead is a choice only where it is said what
        fetching ahead hides: otherwise it would seem to cost nothing."""
        depths = [self.installation.prefetch]
        if part.sized and depths[0] and any(u.phase in self.pricing.exposures for u in part.uses):
            depths.append(0)
        cost = 1 / self.pricing.bytes_per_s
        for depth in depths:
            if self.pricing.host_budget_bytes is None or part.stays:
                yield Mode(depth, True, cost, 0)
            else:
                yield Mode(depth, True, cost, part.placement.pinned_charge_bytes)
                yield Mode(depth, False, cost * self.pricing.pageable_factor, 0)

    def _baseline(self, numbers: Part) -> PartChoice:
        """Nothing retained but what stays; what is declared is held in uses of several passes.

        With a host budget the baseline is priced as pageable: what pinning saves is the plan's.
        """
        mode = min(
            numbers.modes, key=lambda m: (m.prefetch != self.installation.prefetch, m.pinned)
        )
        return nothing_retained(numbers, mode)

    def uses(self, choice: Choice) -> Iterator[ComponentUse]:
        """Each use of a component that can retain, as the choice has it."""
        for part, chosen in zip(self.parts, choice, strict=True):
            if part.stays:
                continue
            for u, use in enumerate(part.uses):
                yield replace(
                    use,
                    retain_resident_layers=chosen.retains[u],
                    resident_layers=part.resident(chosen, u) if part.sized else None,
                    retained_layers=part.retained(chosen, u) if part.sized else None,
                )

    def recalled(self, planned: Sequence[UsePlan | UseRecord]) -> Choice | None:
        """The choice that an earlier plan made, in the classes of this measurement; None where
        components or uses differ."""
        plans = {(each.phase, each.component): each for each in planned}
        choice = []
        for part, numbers, baseline in zip(
            self.parts, self.instance.parts, self.baseline, strict=True
        ):
            if part.stays:
                choice.append(baseline)
                continue
            found = [plans.get((use.phase, use.component)) for use in part.uses]
            if any(each is None for each in found):
                return None
            uses = [each for each in found if each is not None]
            pinned = {each.pinned for each in uses}
            prefetch = {each.prefetch for each in uses}
            modes = (m for m in numbers.modes if {m.pinned} == pinned and {m.prefetch} == prefetch)
            mode = next(modes, None)
            if mode is None:
                return None
            choice.append(
                PartChoice(
                    tuple(part.counts(frozenset(each.resident_set)) for each in uses),
                    tuple(part.counts(frozenset(each.retained_set)) for each in uses),
                    tuple(each.retain_resident_layers for each in uses),
                    mode,
                )
            )
        return tuple(choice)

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
        self, instance: Instance, candidate: Candidate, judgement: Judgement, *, again: bool
    ) -> Instance:
        """`instance` without the candidate and all that takes as much where it was refuted.

        After it ran out of memory, what was missing is taken off there, and a whole layer at
        least: less can't be enough, and a candidate that differs by a few bytes isn't worth a
        sweep. `again`: another one ran out before; then peaks of allocated bytes are too hopeful
        for this pipeline, and every phase is given what it was seen to lose to fragmentation.
        """
        place = None if judgement.place is None else self._place(judgement.place)
        taken = 0 if place is None else instance.device_bytes(candidate.choice, place)
        if place is None or taken <= self._least(place):
            return instance.without(candidate.choice)
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

    def missing_bytes(self, candidate: Candidate, judgement: Judgement) -> int | None:
        """What was missing where the candidate failed: by the model, with the margin aside, and
        at least what was seen."""
        if judgement.verdict is not Verdict.OOM or judgement.place is None:
            return judgement.shortfall_bytes
        place = self._place(judgement.place)
        room = self.instance.places[place].room_bytes + self.headrooms[place].margin_bytes
        missing = self.instance.device_bytes(candidate.choice, place) - room
        return max(judgement.shortfall_bytes or 0, missing)

    def _place(self, at: tuple[str, Shape]) -> Place:
        places = [(headroom.phase, headroom.shape) for headroom in self.headrooms]
        return places.index(at)
