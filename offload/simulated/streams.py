"""The streams of a simulated card, and who watches what they are given."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..device import Event
from .clock import Timeline
from .ordering import History, Ordering, VectorClock
from .storage import buffer_of
from .work import describe


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
