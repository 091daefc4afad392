"""The interface of a device memory allocator, and what its implementations share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from enum import Enum

from ..errors import DeviceIntegrityError


class AllocatorFull(Exception):
    """An allocation that fails after everything cached has been given back.

    The numbers are those at the failure; the allocator goes on as if it had not been asked.
    """

    def __init__(
        self, *, requested_bytes: int, limit_bytes: int, allocated_bytes: int, reserved_bytes: int
    ) -> None:
        super().__init__(
            f"{requested_bytes} bytes were asked for; of a limit of {limit_bytes} bytes, "
            f"{reserved_bytes} are reserved and {allocated_bytes} allocated"
        )
        self.requested_bytes = requested_bytes
        self.limit_bytes = limit_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes


class State(Enum):
    LIVE = "live"
    PENDING = "pending"
    """Freed, but a foreign stream may still use it."""
    FREE = "free"
    UNMAPPED = "unmapped"
    """A range of addresses without memory."""


class Block:
    """What `allocate` returns, for its caller to hold until `free`."""

    __slots__ = ("requested_bytes", "size_bytes", "state", "stream", "used_by")

    def __init__(self, size_bytes: int, stream: int, state: State) -> None:
        self.size_bytes = size_bytes
        self.requested_bytes = 0
        self.stream = stream
        self.state = state
        self.used_by: set[int] | None = None
        """The foreign streams recorded and not yet known to be done."""


class Allocator(ABC):
    """Memory that is taken and given back in blocks, and the statistics of it.

    `limit_bytes` is the most that may be reserved. It may be set at any time, also below what is
    reserved already: then nothing grows until enough has been released.

    `allocated_bytes` is what live blocks take, after rounding; `reserved_bytes` what has been taken
    from the card for them, for pending blocks and for the cache. `requested_bytes` is what was
    asked for, without rounding; as in PyTorch, it counts a pending block until its memory can be
    used again. `alloc_retries` counts the allocations that had to release the cache, whether or
    not they got their memory then.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.requested_bytes = self.peak_requested_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.alloc_retries = 0
        self.live_blocks = 0
        self._pending: list[Block] = []
        # A tensor's end may come at any time: where Python's garbage collection runs inside one of
        # the methods here, `free` is called there too. It then waits until the method is through.
        self._busy = False
        self._freed: list[Block] = []

    def allocate(self, nbytes: int, stream: int = 0) -> Block:
        """A block of at least `nbytes` for work on `stream`. Zero bytes take nothing.

        Raises AllocatorFull.
        """
        if nbytes <= 0:
            if nbytes < 0:
                raise ValueError(f"{nbytes} bytes can't be allocated")
            return Block(0, stream, State.LIVE)
        self._busy = True
        try:
            block = self._take(nbytes, stream, reuse=True)
            if block is None:
                self.alloc_retries += 1
                self._process_events(None)
                self._release()
                block = self._take(nbytes, stream, reuse=False)
                if block is None:
                    raise AllocatorFull(
                        requested_bytes=nbytes,
                        limit_bytes=self.limit_bytes,
                        allocated_bytes=self.allocated_bytes,
                        reserved_bytes=self.reserved_bytes,
                    )
            block.state = State.LIVE
            block.requested_bytes = nbytes
            self.live_blocks += 1
            self.requested_bytes += nbytes
            self.allocated_bytes += block.size_bytes
            if self.requested_bytes > self.peak_requested_bytes:
                self.peak_requested_bytes = self.requested_bytes
            if self.allocated_bytes > self.peak_allocated_bytes:
                self.peak_allocated_bytes = self.allocated_bytes
            return block
        finally:
            self._leave()

    def free(self, block: Block) -> None:
        """Ends `block`. Its memory is pending if foreign streams were recorded, else reusable.

        Raises DeviceIntegrityError for a block that isn't live.
        """
        self._freed.append(block)
        if not self._busy:
            self._busy = True
            self._leave()

    def record_stream(self, block: Block, stream: int) -> None:
        """Work on `stream` uses `block` too: once freed, it waits for `process_events`.

        The wait is for a call after the free. PyTorch may reuse the block sooner, when the work on
        `stream` happens to be done; here that depends on the calls alone, and never on time.
        """
        self._require_live(block, "used by another stream")
        if stream != block.stream:
            if block.used_by is None:
                block.used_by = set()
            block.used_by.add(stream)

    def process_events(self, streams: Iterable[int] | None = None) -> None:
        """The work on `streams` (None: on all) is done: what was pending for it alone is free."""
        self._busy = True
        try:
            self._process_events(None if streams is None else set(streams))
        finally:
            self._leave()

    def reset_peaks(self) -> None:
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_requested_bytes = self.requested_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def release_cache(self) -> None:
        """Gives back to the card what no block needs, after waiting for all streams."""
        self._busy = True
        try:
            self._process_events(None)
            self._release()
        finally:
            self._leave()

    def check_integrity(self) -> None:
        """Raises DeviceIntegrityError if the books and the blocks disagree. Walks all blocks."""
        self._busy = True
        try:
            self._check()
        finally:
            self._leave()

    @abstractmethod
    def _take(self, nbytes: int, stream: int, *, reuse: bool) -> Block | None:
        """A block for the caller to book, from the cache if `reuse` allows it, else from the card.

        None if the limit is in the way.
        """

    @abstractmethod
    def _recycle(self, block: Block) -> None:
        """Makes the memory of `block`, which is booked out already, reusable."""

    @abstractmethod
    def _release(self) -> None:
        """Gives back what is cached and in no block's way."""

    @abstractmethod
    def _check(self) -> None: ...

    def _leave(self) -> None:
        """Ends a method: frees what was freed meanwhile."""
        try:
            while self._freed:
                self._end(self._freed.pop(0))
        finally:
            self._busy = False

    def _end(self, block: Block) -> None:
        self._require_live(block, "freed")
        if not block.size_bytes:
            block.state = State.FREE
            return
        self.live_blocks -= 1
        self.allocated_bytes -= block.size_bytes
        if block.used_by:
            block.state = State.PENDING
            self._pending.append(block)
        else:
            self.requested_bytes -= block.requested_bytes
            self._recycle(block)

    def _process_events(self, done: set[int] | None) -> None:
        if not self._pending:
            return
        waiting: list[Block] = []
        for block in self._pending:
            block.used_by = block.used_by - done if done is not None and block.used_by else None
            if block.used_by:
                waiting.append(block)
            else:
                self.requested_bytes -= block.requested_bytes
                self._recycle(block)
        self._pending = waiting

    def _reserve(self, nbytes: int) -> bool:
        if self.reserved_bytes + nbytes > self.limit_bytes:
            return False
        self.reserved_bytes += nbytes
        if self.reserved_bytes > self.peak_reserved_bytes:
            self.peak_reserved_bytes = self.reserved_bytes
        return True

    def _require_live(self, block: Block, verb: str) -> None:
        if block.state is not State.LIVE:
            raise DeviceIntegrityError(
                f"a block of {block.requested_bytes} bytes on stream {block.stream} was {verb} "
                f"when it was {block.state.value}"
            )

    def _check_books(self, blocks: Iterable[Block], reserved_bytes: int) -> None:
        """`blocks` are all that are live or pending, `reserved_bytes` what was counted up."""
        blocks = list(blocks)
        live = [block for block in blocks if block.state is State.LIVE]
        pending = {block for block in blocks if block.state is State.PENDING}
        for name, booked, counted in (
            ("allocated bytes", self.allocated_bytes, sum(block.size_bytes for block in live)),
            ("requested bytes", self.requested_bytes, sum(b.requested_bytes for b in blocks)),
            ("reserved bytes", self.reserved_bytes, reserved_bytes),
            ("live blocks", self.live_blocks, len(live)),
            ("pending blocks", len(self._pending), len(pending.intersection(self._pending))),
            ("pending blocks", len(self._pending), len(pending)),
        ):
            if booked != counted:
                raise DeviceIntegrityError(f"{booked} {name} are booked, {counted} are there")


class ExactAllocator(Allocator):
    """No rounding and no cache: what is reserved is what live and pending blocks asked for."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        self._blocks: set[Block] = set()

    def _take(self, nbytes: int, stream: int, *, reuse: bool) -> Block | None:
        if not self._reserve(nbytes):
            return None
        block = Block(nbytes, stream, State.LIVE)
        self._blocks.add(block)
        return block

    def _recycle(self, block: Block) -> None:
        block.state = State.FREE
        self._blocks.remove(block)
        self.reserved_bytes -= block.size_bytes

    def _release(self) -> None:
        pass

    def _check(self) -> None:
        self._check_books(self._blocks, sum(block.size_bytes for block in self._blocks))
