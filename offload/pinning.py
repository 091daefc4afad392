"""The blocks that host memory is pinned in, and what they are charged."""

from __future__ import annotations

from collections.abc import Iterator

LEAST_CHUNK_BYTES = 256 << 10
"""What is left below it is one block: its copy would take no longer than its launch."""

LARGEST_CHUNK_BYTES = 1 << 30
"""Drivers refuse a large block though as many bytes in small ones can be had."""


def pinned_charge_bytes(nbytes: int) -> int:
    """What one pinned block takes: PyTorch's host allocator rounds it up to a power of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def chunked_charge_bytes(nbytes: int) -> int:
    """What pinning takes in `chunks`: less than half of `LEAST_CHUNK_BYTES` more than `nbytes`."""
    left = nbytes % LEAST_CHUNK_BYTES
    return nbytes - left + pinned_charge_bytes(left)


def chunks(nbytes: int) -> Iterator[int]:
    """The sizes, largest first, of the blocks that `nbytes` are pinned in.

    All but the last are powers of two, and the last rounds up to one, so that together they are
    charged `chunked_charge_bytes`, and are the fewest blocks that are: up to 13, and one more for
    each `LARGEST_CHUNK_BYTES`. Where the allocator is set not to round, they take no more.
    """
    charge, left = chunked_charge_bytes(nbytes), nbytes
    while left:
        block = min(1 << (charge.bit_length() - 1), LARGEST_CHUNK_BYTES)
        yield min(block, left)
        charge -= block
        left -= min(block, left)
