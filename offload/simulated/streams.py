"""The streams of a simulated card, and the order of work on them: what has to come after what, and
whether it was made to.

Each stream has a vector clock, as in a detector of data races: its own operations counted, and for
each other stream how many of that stream's operations are known to be done. Recording an event
keeps the clock, waiting for one merges it, and so does the host when it waits. Kernels run in the
order in which they were issued, so a run on the simulated card is right; what is looked for is
whether a real card could have run them in another.

    device memory   a read comes after the last write, a write after the last write and all reads.
                    Storages are told apart, parts of one are not.
    reused memory   the allocator may give any memory that was freed on a stream to the next
                    allocation there: so that has to come after whoever used the memory, but for
                    streams that `record_stream` told the allocator of
    host memory     what a copy that doesn't block writes may be read once the host has waited for
                    it; what it reads, from pinned memory, may be written then. Pinned memory may
                    be freed: the allocator of it keeps the events. From pageable memory the
                    driver has taken the bytes when the call returns."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..device import Event
from ..errors import OrderError
from .storage import Buffer, buffer_of, on_card
from .work import BusCopy, Timeline, Work, describe, tensors_in, traits_of

VectorClock: TypeAlias = dict[int, int]
"""How many operations of each stream are known to be done."""


@dataclass(frozen=True, slots=True)
class Access:
    """The `tick`-th operation of a stream, which read or wrote."""

    stream: int
    tick: int
    op: str
    writes: bool
    nbytes: int

    def __str__(self) -> str:
        verb = "writes" if self.writes else "reads"
        return f"{self.op}, which {verb} {self.nbytes} bytes on stream {self.stream}"


class History:
    """Who touched one piece of memory last, and who its memory before it had this owner."""

    __slots__ = ("before", "nbytes", "reads", "recorded", "stream", "write")

    def __init__(self, nbytes: int, stream: int, before: dict[int, Access]) -> None:
        self.nbytes = nbytes
        self.stream = stream
        self.before = before
        self.write: Access | None = None
        self.reads: dict[int, Access] = {}
        self.recorded: set[int] = set()

    def accesses(self) -> list[Access]:
        """The last of each kind and stream."""
        last = [*self.before.values(), *self.reads.values()]
        return last if self.write is None else [*last, self.write]


class Ordering:
    """Raises OrderError where work isn't ordered after what it depends on."""

    def __init__(self) -> None:
        self._clocks: dict[int, VectorClock] = {}
        self._host: VectorClock = {}
        self._freed: dict[int, dict[int, Access]] = {}
        self._on_host: dict[int, History] = {}

    def recorded(self, stream: int) -> VectorClock:
        """The clock of an event recorded now."""
        return dict(self._clock(stream))

    def wait(self, stream: int, clock: VectorClock) -> None:
        """Work on `stream` from now on comes after what `clock` counts."""
        _merge(self._clock(stream), clock)

    def host_waits(self, clock: VectorClock) -> None:
        _merge(self._host, clock)

    def host_waits_for_all(self) -> None:
        for clock in self._clocks.values():
            _merge(self._host, clock)

    def is_done(self, clock: VectorClock) -> bool:
        """Whether the host has waited for what `clock` counts."""
        return all(ticks <= self._host.get(stream, 0) for stream, ticks in clock.items())

    def allocate(self, nbytes: int, stream: int) -> History:
        """Memory for work on `stream`. Raises OrderError where it may be in use still."""
        before = self._freed.get(stream, {})
        clock = self._clock(stream)
        for access in before.values():
            if not _done(access, clock):
                raise OrderError(
                    f"{nbytes} bytes are allocated on stream {stream} while {access} that were "
                    "freed since, may still be running: they may be the same memory",
                    hint=f"before the memory is freed, make stream {stream} wait for an event "
                    f"recorded on stream {access.stream} after {access.op}, or record_stream",
                )
        return History(nbytes, stream, dict(before))

    def free(self, history: History) -> None:
        """The memory of `history` may be given to the next allocation on its stream."""
        freed = self._freed.setdefault(history.stream, {})
        for access in history.accesses():
            known = freed.get(access.stream)
            if access.stream not in history.recorded and (
                known is None or known.tick < access.tick
            ):
                freed[access.stream] = access

    def record_stream(self, buffer: Buffer, stream: int) -> None:
        """Once freed, the memory isn't given out before what `stream` was given so far is done."""
        history = self._history(buffer)
        if history is not None:
            history.recorded.add(stream)

    def run(self, work: Work, stream: int, *, pinned: bool) -> None:
        """`work` goes to `stream`; `pinned`: the host tensor of its copy is page-locked."""
        clock = self._clock(stream)
        tick = clock[stream] = clock.get(stream, 0) + 1
        for buffer in work.reads:
            self._read(self._history(buffer), Access(stream, tick, work.name, False, buffer.nbytes))
        for buffer in work.writes:
            self._write(self._history(buffer), Access(stream, tick, work.name, True, buffer.nbytes))
        if work.copy is not None:
            self._touch_host(work.name, work.copy, stream, tick, pinned=pinned)
        if work.joins:
            self.host_waits(clock)

    def host_touches(self, tensor: torch.Tensor, op: str, *, writes: bool) -> None:
        """The host reads or writes a tensor of its own."""
        history = self._on_host.get(tensor.untyped_storage().data_ptr())
        if history is None:
            return
        pending = history.accesses() if writes else [history.write] if history.write else []
        for access in pending:
            if not _done(access, self._host):
                raise OrderError(
                    f"the host {'writes' if writes else 'reads'} {history.nbytes} bytes of its "
                    f"own memory in {op} while {access} may still be running",
                    hint="synchronize with an event recorded behind the copy first",
                )

    @property
    def has_copies_in_flight(self) -> bool:
        """Whether host memory is known that copies may not be done with."""
        return bool(self._on_host)

    def _touch_host(self, op: str, copy: BusCopy, stream: int, tick: int, *, pinned: bool) -> None:
        if copy.to_card and not pinned:
            self.host_touches(copy.host, op, writes=False)
            return
        storage = copy.host.untyped_storage()
        pointer = storage.data_ptr()
        history = self._on_host.get(pointer)
        if history is None:
            history = self._on_host[pointer] = History(storage.nbytes(), stream, {})
            weakref.finalize(storage, self._on_host.pop, pointer, None).atexit = False
        access = Access(stream, tick, op, not copy.to_card, storage.nbytes())
        (self._read if copy.to_card else self._write)(history, access)

    def _read(self, history: History | None, access: Access) -> None:
        if history is None:
            return
        if history.write is not None:
            self._require(history.write, access)
        history.reads[access.stream] = access

    def _write(self, history: History | None, access: Access) -> None:
        if history is None:
            return
        for earlier in history.accesses():
            self._require(earlier, access)
        history.write = access
        history.reads = {}
        history.before = {}

    def _require(self, earlier: Access, access: Access) -> None:
        if earlier.stream != access.stream and not _done(earlier, self._clocks[access.stream]):
            raise OrderError(
                f"{access}, doesn't wait for {earlier}",
                hint=f"make stream {access.stream} wait for an event recorded on stream "
                f"{earlier.stream} after {earlier.op}",
            )

    @staticmethod
    def _history(buffer: Buffer) -> History | None:
        return getattr(buffer.charge, "history", None)

    def _clock(self, stream: int) -> VectorClock:
        """What is known to be done before the next work of `stream`: the host issues it."""
        clock = self._clocks.setdefault(stream, {})
        _merge(clock, self._host)
        return clock


def _done(access: Access, clock: VectorClock) -> bool:
    return access.tick <= clock.get(access.stream, 0)


def _merge(clock: VectorClock, other: VectorClock) -> None:
    for stream, ticks in other.items():
        if ticks > clock.get(stream, 0):
            clock[stream] = ticks


@dataclass(frozen=True, slots=True)
class SimulatedEvent:
    """A point in a stream. Where nobody watches, the work before it was done when it was recorded.

    `clock` is what is done at it, where order is checked; `at_s` when it is, on a card with a
    clock.
    """

    stream: SimulatedStream
    clock: VectorClock | None = field(default=None, compare=False)
    at_s: float | None = None

    def synchronize(self) -> None:
        """Block the host until the work before the event is done."""
        self.stream.card.host_waits(self)


@dataclass(frozen=True, slots=True)
class SimulatedStream:
    """Kernels and copies end when they return: who doesn't wait sees the same bytes, and only a
    checker of order tells that a real card might not have."""

    number: int
    card: Streams = field(repr=False, compare=False)

    def record_event(self) -> SimulatedEvent:
        return self.card.record(self)

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, SimulatedEvent), "the event is from another device"
        self.card.wait(self, event)

    def synchronize(self) -> None:
        self.record_event().synchronize()


class Charge:
    """What a storage has of a card, until it is called."""

    __slots__ = ("_give_back", "history", "spilled")

    def __init__(
        self, give_back: Callable[[], None], history: History | None, *, spilled: bool
    ) -> None:
        self._give_back = give_back
        self.history = history
        self.spilled = spilled

    def __call__(self) -> None:
        self._give_back()


class Streams:
    """All streams of one card. `ordering` and `timeline` are None where nobody asked for them."""

    def __init__(self, ordering: Ordering | None, timeline: Timeline | None) -> None:
        self.ordering = ordering
        self.timeline = timeline
        self.current = SimulatedStream(0, self)
        self._count = 1
        self._pinned: set[int] = set()

    @property
    def are_watched(self) -> bool:
        return self.ordering is not None or self.timeline is not None

    def new(self) -> SimulatedStream:
        self._count += 1
        return SimulatedStream(self._count - 1, self)

    @contextmanager
    def on(self, stream: SimulatedStream) -> Iterator[None]:
        outer, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = outer

    def record(self, stream: SimulatedStream) -> SimulatedEvent:
        ordering, timeline = self.ordering, self.timeline
        return SimulatedEvent(
            stream,
            None if ordering is None else ordering.recorded(stream.number),
            None if timeline is None else timeline.now(stream.number),
        )

    def wait(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        if self.ordering is not None and event.clock is not None:
            self.ordering.wait(stream.number, event.clock)
        if self.timeline is not None and event.at_s is not None:
            self.timeline.wait(stream.number, event.at_s)

    def host_waits(self, event: SimulatedEvent) -> None:
        if self.ordering is not None and event.clock is not None:
            self.ordering.host_waits(event.clock)
        if self.timeline is not None and event.at_s is not None:
            self.timeline.host_waits(event.at_s)

    def synchronize(self) -> None:
        if self.ordering is not None:
            self.ordering.host_waits_for_all()
        if self.timeline is not None:
            self.timeline.host_waits_for_all()

    def pin(self, host: torch.Tensor) -> None:
        """`host` is page-locked as long as its storage lives."""
        storage = host.untyped_storage()
        pointer = storage.data_ptr()
        if pointer not in self._pinned:
            self._pinned.add(pointer)
            weakref.finalize(storage, self._pinned.discard, pointer).atexit = False

    def is_pinned(self, host: torch.Tensor) -> bool:
        return host.untyped_storage().data_ptr() in self._pinned

    def ran(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """The current stream was given `op`. Raises OrderError."""
        work = describe(op, args, kwargs, result)
        if work is None:
            return
        pinned = work.copy is not None and self.is_pinned(work.copy.host)
        if self.timeline is not None:
            self.timeline.run(work, self.current.number, pinned=pinned)
        if self.ordering is not None:
            self.ordering.run(work, self.current.number, pinned=pinned)

    def record_stream(self, tensor: torch.Tensor, stream: int) -> None:
        if self.ordering is not None:
            self.ordering.record_stream(buffer_of(tensor), stream)


# They read the bytes without an operation.
_READS = {"tolist", "numpy"}


class HostWatch(TorchFunctionMode):
    """Tells `ordering` of host tensors that are read and written, through torch's functions."""

    def __init__(self, ordering: Ordering) -> None:
        super().__init__()
        self._ordering = ordering

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._ordering.has_copies_in_flight:
            return func(*args, **kwargs)
        given = [*tensors_in(args), *tensors_in(kwargs.values())]
        if not given or any(on_card(tensor) for tensor in given):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _READS:
            self._ordering.host_touches(given[0], name, writes=False)
            return func(*args, **kwargs)
        with _Operations(self._ordering):
            return func(*args, **kwargs)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, ordering: Ordering) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ordering = ordering

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        traits = traits_of(func)
        if not traits.is_view:
            written = [args[i] for i in traits.writes if i < len(args)]
            written += [kwargs[name] for name in traits.writes_by_name if name in kwargs]
            for tensor in tensors_in((*args, *kwargs.values())):
                if not on_card(tensor):
                    writes = any(tensor is each for each in tensors_in(written))
                    self._ordering.host_touches(tensor, func._schema.name, writes=writes)
        return func(*args, **kwargs)
