"""How PyTorch's caching allocator divides a card's memory, byte by byte and without a card.

The rules and constants are those of the native backend of `CUDACachingAllocator` with its default
settings, apart from `expandable_segments`. Left out: rounding to powers of two, the garbage
collection threshold, `max_split_size`, private pools of CUDA graphs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TypeAlias

from ..errors import DeviceIntegrityError
from .base import Allocator, AllocatorFull, Block, State

__all__ = ["Allocator", "AllocatorFull", "Block", "CachingAllocator"]

_MIB = 1 << 20
_ROUNDING_BYTES = 512
_SMALL_MAX_BYTES = 1 * _MIB
_SMALL_SEGMENT_BYTES = 2 * _MIB
_LARGE_SEGMENT_BYTES = 20 * _MIB
_OWN_SEGMENT_MIN_BYTES = 10 * _MIB
_OWN_SEGMENT_ROUNDING_BYTES = 2 * _MIB

# An expandable segment's addresses: whole pages of both pools, and more than a run can use up.
_ADDRESS_SPACE_BYTES = _LARGE_SEGMENT_BYTES << 30

# Local names, since looking a member up in its Enum costs as much as the rest of a comparison.
_FREE = State.FREE
_UNMAPPED = State.UNMAPPED

_Entry: TypeAlias = "tuple[int, int, _Chunk]"


def _round_up(nbytes: int, unit_bytes: int) -> int:
    return -(-nbytes // unit_bytes) * unit_bytes


class CachingAllocator(Allocator):
    """PyTorch's allocator: segments come from the card, are split into blocks, and stay cached.

    Each stream has a small and a large pool, which share nothing. A block is the smallest free one
    that fits, in its pool; a new segment is taken if there is none. A segment goes back whole, once
    nothing in it is in use.

    With `expandable_segments`, a pool has one segment of unlimited addresses. Memory is mapped into
    it in pages of 2 MiB (small pool) or 20 MiB (large pool), at the lowest addresses where the
    request fits, and every page without a block in it is unmapped on release. Where a request
    needs several unmapped ranges and the limit is reached between them, those mapped stay cached,
    as PyTorch leaves them.
    """

    def __init__(self, limit_bytes: int, *, expandable_segments: bool = False) -> None:
        super().__init__(limit_bytes)
        self.expandable_segments = expandable_segments
        self._pools: dict[tuple[int, bool], _Pool] = {}
        # The span of each segment by its first chunk, which splits and merges never replace.
        self._segments: dict[_Chunk, int] = {}
        self._next_address = 0

    def _take(self, nbytes: int, stream: int, *, reuse: bool) -> Block | None:
        size_bytes = _round_up(nbytes, _ROUNDING_BYTES)
        small = size_bytes <= _SMALL_MAX_BYTES
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = _Pool(stream, small)
        # PyTorch doesn't look at the cache again after it has released it, so neither does a retry.
        chunk = pool.pop_best_fit(size_bytes) if reuse else None
        if chunk is None:
            grow = self._expand if self.expandable_segments else self._new_segment
            chunk = grow(pool, size_bytes)
            if chunk is None:
                return None
        rest_bytes = chunk.size_bytes - size_bytes
        if small or self.expandable_segments:
            split = rest_bytes >= _ROUNDING_BYTES
        else:
            split = rest_bytes > _SMALL_MAX_BYTES
        if split:
            pool.add(chunk.split(size_bytes, _FREE))
        return chunk

    def _recycle(self, block: Block) -> None:
        assert isinstance(block, _Chunk), "the block is from another allocator"
        self._settle(block, _FREE)

    def _release(self) -> None:
        for pool in self._pools.values():
            for _, _, chunk in pool.free.copy():
                if self.expandable_segments:
                    self._unmap(chunk)
                elif chunk.prev is None and chunk.next is None:
                    pool.remove(chunk)
                    self.reserved_bytes -= self._segments.pop(chunk)

    def _check(self) -> None:
        in_use: list[Block] = []
        idle: dict[tuple[_Pool, State], list[_Entry]] = {}
        reserved_bytes = 0
        for first, span_bytes in self._segments.items():
            for chunk in self._walk(first, span_bytes):
                if chunk.state is not _UNMAPPED:
                    reserved_bytes += chunk.size_bytes
                if chunk.state in (_FREE, _UNMAPPED):
                    idle.setdefault((chunk.pool, chunk.state), []).append(chunk.entry())
                else:
                    in_use.append(chunk)
        self._check_books(in_use, reserved_bytes)
        for pool in self._pools.values():
            for state in (_FREE, _UNMAPPED):
                there = sorted(idle.get((pool, state), []), key=lambda entry: entry[:2])
                listed = pool.list_of(state)
                if listed != there:
                    raise DeviceIntegrityError(
                        f"{len(listed)} chunks of stream {pool.stream} are listed as "
                        f"{state.value} and {len(there)} are, or in another order"
                    )

    def _settle(self, chunk: _Chunk, state: State) -> _Chunk:
        """Makes `chunk` idle, in one with its idle neighbours of that `state`."""
        pool = chunk.pool
        chunk.state = state
        before, after = chunk.prev, chunk.next
        if before is not None and before.state is state:
            pool.remove(before)
            before.absorb_next()
            chunk = before
        if after is not None and after.state is state:
            pool.remove(after)
            chunk.absorb_next()
        pool.add(chunk)
        return chunk

    def _new_segment(self, pool: _Pool, size_bytes: int) -> _Chunk | None:
        if size_bytes < _OWN_SEGMENT_MIN_BYTES:
            span_bytes = pool.page_bytes
        else:
            span_bytes = _round_up(size_bytes, _OWN_SEGMENT_ROUNDING_BYTES)
        return self._segment(pool, span_bytes, _FREE) if self._reserve(span_bytes) else None

    def _segment(self, pool: _Pool, span_bytes: int, state: State) -> _Chunk:
        chunk = _Chunk(span_bytes, self._next_address, pool, state)
        self._next_address += span_bytes
        self._segments[chunk] = span_bytes
        return chunk

    def _expand(self, pool: _Pool, size_bytes: int) -> _Chunk | None:
        """A free chunk that is in no list, after mapping what it lacks."""
        chunk = next((c for _, _, hole in pool.unmapped if (c := hole.room(size_bytes))), None)
        if chunk is None:
            chunk = self._segment(pool, _ADDRESS_SPACE_BYTES, _UNMAPPED)
            pool.add(chunk)
        have_bytes = 0 if chunk.state is _UNMAPPED else chunk.size_bytes
        while have_bytes < size_bytes:
            hole = chunk.next if have_bytes else chunk
            assert hole is not None, "room() counted what lies behind"
            mapped = self._map(hole, size_bytes - have_bytes)
            if mapped is None:
                return None
            chunk, have_bytes = mapped, mapped.size_bytes
        pool.remove(chunk)
        return chunk

    def _map(self, hole: _Chunk, nbytes: int) -> _Chunk | None:
        pool = hole.pool
        mapped_bytes = min(_round_up(nbytes, pool.page_bytes), hole.size_bytes)
        if not self._reserve(mapped_bytes):
            return None
        pool.remove(hole)
        if mapped_bytes < hole.size_bytes:
            pool.add(hole.split(mapped_bytes, _UNMAPPED))
        return self._settle(hole, _FREE)

    def _unmap(self, chunk: _Chunk) -> None:
        pool = chunk.pool
        end = chunk.address + chunk.size_bytes
        first_page = _round_up(chunk.address, pool.page_bytes)
        pages_bytes = end // pool.page_bytes * pool.page_bytes - first_page
        if pages_bytes <= 0:
            return
        pool.remove(chunk)
        hole = chunk
        if first_page > chunk.address:
            hole = chunk.split(first_page - chunk.address, _FREE)
            pool.add(chunk)
        if pages_bytes < hole.size_bytes:
            pool.add(hole.split(pages_bytes, _FREE))
        self.reserved_bytes -= pages_bytes
        self._settle(hole, _UNMAPPED)

    @staticmethod
    def _walk(first: _Chunk, span_bytes: int) -> list[_Chunk]:
        """The chunks of a segment in order. Raises DeviceIntegrityError unless they tile it."""
        chunks: list[_Chunk] = []
        previous: _Chunk | None = None
        chunk: _Chunk | None = first
        address = first.address
        while chunk is not None:
            size_bytes, state = chunk.size_bytes, chunk.state
            if chunk.address != address or chunk.prev is not previous or size_bytes < 1:
                raise DeviceIntegrityError(
                    f"a chunk of {size_bytes} bytes at {chunk.address} follows one that ends at "
                    f"{address}"
                )
            if previous and previous.state is state and state in (_FREE, _UNMAPPED):
                raise DeviceIntegrityError(
                    f"neighbours of {previous.size_bytes} and {size_bytes} bytes at {address} "
                    f"are both {state.value}"
                )
            chunks.append(chunk)
            address += size_bytes
            previous, chunk = chunk, chunk.next
        if address != first.address + span_bytes:
            raise DeviceIntegrityError(
                f"a segment of {span_bytes} bytes holds chunks of {address - first.address} bytes"
            )
        return chunks


class _Chunk(Block):
    """A block in its place: a range of a segment, in use or idle, between its neighbours."""

    __slots__ = ("address", "next", "pool", "prev")

    def __init__(self, size_bytes: int, address: int, pool: _Pool, state: State) -> None:
        super().__init__(size_bytes, pool.stream, state)
        self.address = address
        self.pool = pool
        self.prev: _Chunk | None = None
        self.next: _Chunk | None = None

    def entry(self) -> _Entry:
        """What the list of its state holds: free chunks go by size, unmapped ones by address."""
        return (self.size_bytes if self.state is _FREE else 0, self.address, self)

    def split(self, size_bytes: int, rest_state: State) -> _Chunk:
        """Keeps the first `size_bytes` and returns the rest. Neither may be listed meanwhile."""
        rest = _Chunk(
            self.size_bytes - size_bytes, self.address + size_bytes, self.pool, rest_state
        )
        rest.prev, rest.next = self, self.next
        if self.next is not None:
            self.next.prev = rest
        self.next = rest
        self.size_bytes = size_bytes
        return rest

    def absorb_next(self) -> None:
        gone = self.next
        assert gone is not None
        self.size_bytes += gone.size_bytes
        self.next = gone.next
        if gone.next is not None:
            gone.next.prev = self

    def room(self, size_bytes: int) -> _Chunk | None:
        """For an unmapped chunk: where `size_bytes` of addresses begin that aren't in use, here or
        at the free chunk before. None if there are fewer."""
        begin = self.prev if self.prev is not None and self.prev.state is _FREE else self
        chunk: _Chunk | None = begin
        while chunk is not None and size_bytes > 0 and chunk.state in (_FREE, _UNMAPPED):
            size_bytes -= chunk.size_bytes
            chunk = chunk.next
        return begin if size_bytes <= 0 else None

    def extent_bytes(self) -> int:
        """How large this free chunk can become where it is."""
        after = self.next
        if after is None or after.state is not _UNMAPPED:
            return self.size_bytes
        return self.size_bytes + after.size_bytes


class _Pool:
    """The idle chunks of one stream that are of one kind, small or large."""

    __slots__ = ("free", "page_bytes", "stream", "unmapped")

    def __init__(self, stream: int, small: bool) -> None:
        self.stream = stream
        self.page_bytes = _SMALL_SEGMENT_BYTES if small else _LARGE_SEGMENT_BYTES
        self.free: list[_Entry] = []
        self.unmapped: list[_Entry] = []

    def list_of(self, state: State) -> list[_Entry]:
        return self.free if state is _FREE else self.unmapped

    def add(self, chunk: _Chunk) -> None:
        insort(self.list_of(chunk.state), chunk.entry())

    def remove(self, chunk: _Chunk) -> None:
        entries = self.list_of(chunk.state)
        entry = entries.pop(bisect_left(entries, chunk.entry()[:2]))
        assert entry[2] is chunk, "the list is out of order"

    def pop_best_fit(self, size_bytes: int) -> _Chunk | None:
        """The smallest that fits, where a chunk with unmapped addresses behind counts with them."""
        free = self.free
        index = bisect_left(free, (size_bytes,))
        if index == len(free):
            return None
        if self.unmapped:
            while (
                index + 1 < len(free)
                and free[index + 1][2].extent_bytes() < free[index][2].extent_bytes()
            ):
                index += 1
        return free.pop(index)[2]
