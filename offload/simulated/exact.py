"""An allocator that takes what is asked for, to the byte.

For pipelines so small that 2 and 20 MiB segments would hide what they allocate.
"""

from __future__ import annotations

from .base import Allocator, Block, State


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
