"""Whether what a plan was validated under still holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ...offload.device import Reading
from ...offload.errors import BaselineError
from ...phases.host import ShapeRun
from ...phases.schedule import Value
from ...phases.shape import Shape
from ..fingerprint import Fingerprint
from ..loop import Outcome
from .metrics import Metrics

LEFT_BEHIND_BYTES = 64 << 20
"""What requests may leave on the device for the next: schedulers their tensors, libraries their
workspaces. The validated peaks have it in them."""


class Ground(StrEnum):
    """What speaks against a plan. For people and alerts: nothing is decided by it."""

    NEIGHBOUR = "neighbour"
    """Other processes, or the driver for this one, take more than a phase has to spare."""
    PROCESS = "process"
    """This process holds more on the device, besides the components, than a phase has to spare."""
    ADAPTER = "adapter"
    """One came or went, or another one is active."""
    STRUCTURE = "structure"
    """Anything else in the fingerprint is another: a component's parameters, the driver."""
    OUTSIDE = "outside"
    """Requests outside the envelope ran as planned."""
    OOM = "oom"
    """A request inside the envelope ran out of memory. That it then went through with nothing
    retained says nothing for the plan."""


class Doubt(Value):
    ground: Ground
    detail: str
    phase: str | None = None
    shape: str | None = None
    short_bytes: int | None = None
    """What that phase lacks at its peak."""


class Evidence(Value):
    holds: bool
    reasons: tuple[Doubt, ...]
    """Why it doesn't; empty where it holds."""

    @classmethod
    def of(cls, reasons: Iterable[Doubt]) -> Evidence:
        found = tuple(reasons)
        return cls(holds=not found, reasons=found)


@dataclass(frozen=True, slots=True)
class Need:
    """What one phase took at one largest shape when the plan was validated."""

    phase: str
    shape: Shape
    """As it was asked for."""
    peak_bytes: int
    needed_bytes: int
    """Of what this process may use. Half of the margin is for others; the other half is for what
    the phase was seen to lose to fragmentation."""
    margin_bytes: int


@dataclass(frozen=True, slots=True)
class Shortage:
    need: Need
    short_bytes: int


@dataclass(frozen=True, slots=True)
class Validated:
    """What the evidence for a plan was taken under."""

    needs: tuple[Need, ...]
    outside_bytes: int
    """What others and the context took, at the most."""
    rest_bytes: int
    """What this process had on the device besides the components."""
    fingerprint: Fingerprint

    @classmethod
    def of(
        cls,
        outcome: Outcome,
        fingerprint: Fingerprint,
        *,
        margin_bytes: int,
        rest_bytes: int,
    ) -> Validated:
        """Raises BaselineError where the outcome is a failure."""
        if outcome.planned is None:
            detail = "" if outcome.failure is None else f": {outcome.failure.detail}"
            raise BaselineError(
                f"nothing was validated{detail}",
                hint="settle with smaller shapes, or with less resident, before serving",
            )
        runs = outcome.planned.runs
        phases = outcome.host.graph.phases
        readings = [at.reading for run in runs for trace in run.traces for at in trace.readings]
        return cls(
            tuple(_need(run, phase, margin_bytes) for run in runs for phase in phases),
            max(each.others_bytes + each.context_bytes for each in readings),
            rest_bytes,
            fingerprint,
        )

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple(dict.fromkeys(need.shape for need in self.needs))

    def usable_bytes(self, reading: Reading, rest_bytes: int) -> int:
        """What the components and requests may take, if this process has `rest_bytes` besides."""
        return reading.usable_bytes - max(rest_bytes - self.rest_bytes - LEFT_BEHIND_BYTES, 0)

    def shortages(self, usable_bytes: int, shape: Shape) -> Iterator[Shortage]:
        """What each phase lacks at a largest shape, where it lacks anything."""
        for need in self.needs:
            if need.shape == shape and need.needed_bytes > usable_bytes:
                yield Shortage(need, need.needed_bytes - usable_bytes)


def _need(run: ShapeRun, phase: str, margin_bytes: int) -> Need:
    peak = run.peak_bytes(phase)
    lost = min(run.fragmentation_bytes(phase), margin_bytes // 2)
    return Need(phase, run.asked, peak, peak + lost, margin_bytes)


def check(
    validated: Validated,
    reading: Reading,
    *,
    rest_bytes: int,
    now: Fingerprint,
    ooms: int = 0,
    outside: int = 0,
) -> Evidence:
    """What speaks against the plan now.

    `rest_bytes`: what this process has on the device besides the components. `ooms`, `outside`:
    how many requests ran out of memory, and how many ran as planned outside the envelope.
    """
    reasons = [*_space(validated, reading, rest_bytes), *_changed(validated.fingerprint, now)]
    if outside:
        detail = f"{outside} requests outside the envelope ran as planned"
        reasons.append(Doubt(ground=Ground.OUTSIDE, detail=detail))
    if ooms:
        detail = f"{ooms} requests that were validated ran out of memory"
        reasons.append(Doubt(ground=Ground.OOM, detail=detail))
    return Evidence.of(reasons)


def _space(validated: Validated, reading: Reading, rest_bytes: int) -> Iterator[Doubt]:
    rest = max(rest_bytes - validated.rest_bytes, 0)
    outside = max(reading.others_bytes + reading.context_bytes - validated.outside_bytes, 0)
    for shape in validated.shapes:
        for short in validated.shortages(validated.usable_bytes(reading, rest_bytes), shape):
            yield Doubt(
                ground=Ground.PROCESS if rest > outside else Ground.NEIGHBOUR,
                detail=f"since it was validated, others and the context take {outside} bytes more, "
                f"and this process {rest} besides its components",
                phase=short.need.phase,
                shape=str(shape),
                short_bytes=short.short_bytes,
            )


def _changed(before: Fingerprint, now: Fingerprint) -> Iterator[Doubt]:
    if before.adapters != now.adapters:
        yield Doubt(
            ground=Ground.ADAPTER,
            detail=f"adapters were {_listed(before)}, are {_listed(now)}",
        )
    difference = before.model_copy(update={"adapters": now.adapters}).first_difference(now)
    if difference is not None:
        yield Doubt(ground=Ground.STRUCTURE, detail=str(difference))


def _listed(fingerprint: Fingerprint) -> str:
    adapters = (f"{a.name} of {a.component} ({a.text})" for a in fingerprint.adapters)
    return "; ".join(adapters) or "none"


class Premises:
    """Taken when the plan was committed. `measure` reads the device anew, into the gauges too.

    Raises BaselineError where `outcome` is a failure.
    """

    def __init__(self, outcome: Outcome, *, margin_bytes: int, metrics: Metrics) -> None:
        self._host = outcome.host
        self._margin_bytes = margin_bytes
        self._metrics = metrics
        self._rest_bytes = self._rest(self._host.read(), self._host.held_bytes())
        self.validated = Validated.of(
            outcome,
            self._fingerprint(),
            margin_bytes=margin_bytes,
            rest_bytes=self._rest_bytes,
        )

    def _fingerprint(self) -> Fingerprint:
        return Fingerprint.of(self._host, margin_bytes=self._margin_bytes)

    def _rest(self, reading: Reading, held: Mapping[str, int]) -> int:
        """What is allocated besides components: for a request under way, an adapter, another
        model, a leak."""
        return reading.allocated_bytes - sum(held.values())

    def measure(self) -> int:
        """What components and a request may take of the device. For when no request runs: what
        one has there would count as this process's own."""
        reading, held = self._host.read(), self._host.held_bytes()
        self._rest_bytes = self._rest(reading, held)
        usable = self.validated.usable_bytes(reading, self._rest_bytes)
        self._metrics.free_bytes.set(reading.free_bytes)
        self._metrics.retained_bytes.replace(
            {(each.name,): held[each.name] for each in self._host.components() if not each.stays}
        )
        self._metrics.headroom_bytes.replace(
            {
                (need.phase, str(need.shape)): usable - need.peak_bytes - need.margin_bytes
                for need in self.validated.needs
            }
        )
        return usable

    def short_bytes(self, shapes: Sequence[Shape]) -> int:
        """What the plan lacks now at the one of `shapes` that it fits best; 0 where it fits."""
        usable = self.measure()
        return min(
            max((s.short_bytes for s in self.validated.shortages(usable, shape)), default=0)
            for shape in shapes
        )

    def evidence(self, *, ooms: int, outside: int) -> Evidence:
        """While a request runs, what this process has on the device besides its components is
        what `measure` read last."""
        return check(
            self.validated,
            self._host.read(),
            rest_bytes=self._rest_bytes,
            now=self._fingerprint(),
            ooms=ooms,
            outside=outside,
        )
