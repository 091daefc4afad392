"""A host: who runs the requests and moves the weights. The planner is written against this.

Our own offload under a diffusers pipeline is one (`phases/diffusers/`), a server's own managers
another. What a host says of a run is plain data, which other processes can be told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ..offload.device import Identity, Reading, Traits, Transfers
from ..offload.errors import RollbackError
from ..offload.memory_errors import Shortfall, cut_off
from .schedule import NOTHING, Schedule
from .shape import Shape

if TYPE_CHECKING:
    from ..offload.clocks import UseTime
    from ..offload.layers import Layer
    from .graph import PhaseGraph
    from .identity import HostIdentity
    from .limit import Limit

Passes = Mapping[tuple[str, str], int]
"""How often the component of each use is called, by phase and component."""


@dataclass(frozen=True, slots=True)
class ComponentBytes:
    """A component in numbers, and what is declared of it."""

    name: str
    residency: str
    """As declared, in the words of the flag."""
    layers: tuple[Layer, ...]
    """Groups one behind another; empty where the component is moved in one piece."""
    weight_bytes: int
    """On the device."""
    non_layer_bytes: int
    """Of which in no layer."""
    copy_bytes: int
    """What loading all of it copies."""
    non_layer_copy_bytes: int
    pinned_charge_bytes: int
    """What pinning its masters takes of host memory."""
    declared: frozenset[int]
    """The resident set that was declared."""
    total_layers: int
    resident_layers: int
    stays: bool = False
    """It never leaves the device: there is nothing to retain."""
    sized: bool = False
    """Its sets are the planner's to choose; else only whether the declared one is retained."""
    fixed: str | None = None
    """What of this the user fixed, as `dit=resident`."""
    holds_always: bool = False
    """The baseline holds the resident set in every use; else only where its layers run again
    before the use ends."""
    keeps_rest: bool = False
    """Non-layer weights are on the device also where nothing is retained."""


@dataclass(frozen=True, slots=True)
class PhaseReading:
    """Read where a phase ends, before its uses finish; peaks are since it began."""

    phase: str
    reading: Reading
    transfers: Transfers


@dataclass(slots=True)
class RequestTrace:
    """What one request did. `phase` is the one under way, or the one that an error ended."""

    phase: str | None = None
    readings: list[PhaseReading] = field(default_factory=list)
    transfers: Transfers = field(default_factory=Transfers)
    layers_run: dict[tuple[str, str], frozenset[int]] = field(default_factory=dict)
    """By phase and component, of components that are streamed."""
    use_times: dict[tuple[str, str], UseTime] = field(default_factory=dict)
    """By phase and component, of components that are timed."""
    seconds: float | None = None
    """Of the device, from first to last; None where it has no clock."""


class Output(Protocol):
    """What a request made, kept on the host."""

    def apart(self, other: Output) -> float:
        """How far the two differ at the most; 0 where they are the same."""

    def difference(self, other: Output, *, near: float) -> str | None:
        """In words, where they are further apart than `near`."""


@dataclass(frozen=True, slots=True)
class Made:
    """What one request made, and at which shape: pipelines round to multiples of their own."""

    trace: RequestTrace
    shape: Shape
    output: Output | None
    """None where there are no values, only shapes."""


@dataclass(frozen=True, slots=True)
class ShapeRun:
    """What a sweep saw at one shape."""

    asked: Shape
    run: Shape
    traces: tuple[RequestTrace, ...]
    """Of the requests, in order."""
    output: Output | None
    deviation: float = 0.0
    """How far the outputs of its requests, which ask for the same, are apart at the most."""

    @classmethod
    def of(cls, asked: Shape, requests: Sequence[Made]) -> ShapeRun:
        last = requests[-1].output
        outputs = [each.output for each in requests if each.output is not None]
        apart = max((each.apart(last) for each in outputs if last is not None), default=0.0)
        traces = tuple(each.trace for each in requests)
        return cls(asked, requests[-1].shape, traces, last, apart)

    @property
    def seconds(self) -> float | None:
        """Of a request in the steady state: the last. None where the device has no clock."""
        return self.traces[-1].seconds

    def peak_bytes(self, phase: str) -> int:
        """The most that tensors held in `phase`, over all requests."""
        return max(each.peak_allocated_bytes for each in self._readings(phase))

    def fragmentation_bytes(self, phase: str) -> int:
        """The most that was reserved in `phase` beyond what was allocated: about what is lost.

        Under pressure the allocator releases what is cached, and may lose less or more.
        """
        return max(
            each.peak_reserved_bytes - each.peak_allocated_bytes for each in self._readings(phase)
        )

    def _readings(self, phase: str) -> list[Reading]:
        return [at.reading for trace in self.traces for at in trace.readings if at.phase == phase]

    @property
    def retries(self) -> int:
        """How often the allocator ran out and tried again, in a request of the steady state."""
        last, before = self.traces[-1].readings, self.traces[-2].readings
        return last[-1].reading.alloc_retries - before[-1].reading.alloc_retries

    @property
    def h2d_bytes(self) -> int:
        """Of a request in the steady state: the last."""
        return self.traces[-1].transfers.h2d_bytes


@dataclass(frozen=True, slots=True)
class Failure:
    """The error that ended a run, and where. Holds none of the error's tensors."""

    phase: str | None
    shape: Shape | None
    is_oom: bool
    shortfall: Shortfall | None
    detail: str

    @classmethod
    def of(cls, error: BaseException, phase: str | None, shape: Shape | None) -> Failure:
        """What `error` says; its frames let go of what they hold."""
        import torch

        is_oom = isinstance(error, torch.OutOfMemoryError)
        kind = "" if is_oom else f"{type(error).__name__}: "
        shortfall = Shortfall.of(error) if is_oom else None
        failure = cls(phase, shape, is_oom, shortfall, f"{kind}{error}")
        cut_off(error)
        return failure


@dataclass(frozen=True, slots=True)
class Sweep:
    """Each largest shape, as often as it takes for the gap into the next request to count; up to
    the first failure."""

    runs: tuple[ShapeRun, ...]
    failure: Failure | None = None


class Change(Protocol):
    """A change. It knows its inverse when it is built; both may be called from any state."""

    def apply(self) -> None: ...

    def revert(self) -> None: ...


def undo(steps: list[Change]) -> list[Exception]:
    """Revert `steps`, the last one first, until none is left. What one raises doesn't keep the
    others from it."""
    errors: list[Exception] = []
    while steps:
        try:
            steps[-1].revert()
        except Exception as error:
            errors.append(error)
        steps.pop()  # what is interrupted is still there to be undone
    return errors


def check_undone(errors: Sequence[Exception], found: Iterable[str]) -> None:
    """Raises RollbackError where anything was raised or `found`."""
    told = [*(f"{type(error).__name__}: {error}" for error in errors), *found]
    if told:
        shown = "; ".join(told[:5]) + (f"; and {len(told) - 5} more" if told[5:] else "")
        raise RollbackError(
            f"after the rollback {len(told)} things aren't as they should be: {shown}",
            hint="don't serve with this process: start again with retention off",
        )


REQUESTS = 2
"""In a sweep of one shape: in the second the gap into the next request counts."""


class Host(Protocol):
    """What the loop asks of a host. Where a method has a body, that is what it usually is."""

    name: str
    identity: Identity
    traits: Traits
    driver: str | None = None
    shapes: tuple[Shape, ...]
    """The largest of what will be served, as they were asked for."""
    baseline: Schedule = NOTHING
    """Nothing retained; known once it was opened, as is the graph."""
    limit: Limit
    """Checked wherever a component is entered."""

    @property
    def schedule(self) -> Schedule:
        """The one in effect."""

    @property
    def graph(self) -> PhaseGraph: ...

    @property
    def is_open(self) -> bool: ...

    def read(self) -> Reading:
        """Device memory now."""

    def portrait(self) -> HostIdentity:
        """What a plan holds for, as it is now."""

    def completed(self, shape: Shape) -> Shape:
        """`shape` with what it leaves open."""
        return shape

    def components(self) -> Sequence[ComponentBytes]: ...

    def passes(self, shape: Shape) -> Passes:
        """Of a request of a sweep at one of `shapes`."""

    def served_passes(self, shape: Shape) -> Passes:
        """Of a request with all its steps, where a sweep's has fewer."""
        return self.passes(shape)

    def open(self) -> Failure | None:
        """Take the weights over, with the baseline in effect, and find the phases. Whatever it
        says or raises, `close` undoes it."""

    def close(self) -> None:
        """Take off all that `open` and steps put on; what others did meanwhile stays. More than
        once is nothing. Raises RollbackError."""

    def steps(self, schedule: Schedule) -> Sequence[Change]:
        """From the schedule in effect to `schedule`."""

    def release(self) -> None:
        """Off the device with all that isn't there for good, from whatever state."""

    def check_restored(self) -> None:
        """Raises RollbackError unless what we put on is as the schedule in effect has it."""

    def measure(self) -> Sweep:
        """A sweep of the baseline in which layers are timed, where the device has a clock."""
        return self.sweep()

    def sweep(self) -> Sweep:
        """Raises StoppedError where `limit` ends it, InputError where a shape is refused."""
        runs: list[ShapeRun] = []
        for shape in self.shapes:
            done: list[Made] = []
            for _ in range(REQUESTS):
                result = self.run(shape)
                if isinstance(result, Failure):
                    return Sweep(tuple(runs), result)
                done.append(result)
            runs.append(ShapeRun.of(shape, done))
        return Sweep(tuple(runs))

    def run(self, shape: Shape) -> Made | Failure:
        """One request of a sweep."""

    def request(self, asked: Shape, like: Shape) -> AbstractContextManager[RequestTrace]:
        """Inside, the caller runs one request at `asked`, which is most like `like` of `shapes`."""

    def held_bytes(self) -> Mapping[str, int]:
        """Device bytes that the weights of each component that can leave have now."""

    def reclaim(self) -> None:
        """Give back to the card what nothing holds any more. Not inside `except`: what the error
        there holds is held."""
