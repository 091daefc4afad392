"""What an out-of-memory error says: how much was asked for, how much was free, and whose it is; and
what its frames keep alive."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from enum import StrEnum
from types import FrameType

from .device import GIB, MIB, Reading

_UNITS = {"B": 1, "bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB|B)"
# The second of each is how the cudaMallocAsync backend says it.
_ASKED = re.compile(rf"(?:[Tt]ried to allocate|Requested\s*:) {_SIZE}")
_FREE = re.compile(rf"(?:of which|Free \(according to CUDA\):) {_SIZE}")
_ALLOCATED = re.compile(rf"(?:Of the allocated memory|Currently allocated\s*:) {_SIZE}")

_DEVICE_TEXTS = ("out of memory", "_STATUS_ALLOC_FAILED")
_HOST_TEXTS = ("DefaultCPUAllocator", "Cannot allocate memory")
_PIN_TEXTS = ("out of memory", "invalid argument")
"""Drivers call a block that is too large for them an invalid argument."""
_ASSERT = re.compile(r"INTERNAL ASSERT FAILED.*CUDACachingAllocator", re.DOTALL)
_LIMITED = re.compile(rf"{_SIZE} allowed;")

PLENTY = 2
"""Times what was asked for: with so much free, the card wasn't full."""
_PLENTY_BYTES = 256 * MIB
"""And this much more than was asked for: drivers keep and round."""
_HOST_LOW_BYTES = 2 * GIB
"""With less than this available beyond what was asked for, the host is short."""


@dataclass(frozen=True, slots=True)
class Shortfall:
    """The allocation that failed. Another may have failed later: a lower bound of what is short."""

    requested_bytes: int
    free_bytes: int

    @property
    def short_bytes(self) -> int:
        return max(self.requested_bytes - self.free_bytes, 0)

    @classmethod
    def of(cls, error: BaseException) -> Shortfall | None:
        """Exact from a simulated card; from CUDA's text, to two decimals; None if it has none."""
        given = getattr(error, "shortfall", None)
        if isinstance(given, cls):
            return given
        asked, free = _ASKED.search(str(error)), _FREE.search(str(error))
        if asked is None or free is None:
            return None
        return cls(_bytes(asked), _bytes(free))


def _bytes(match: re.Match[str]) -> int:
    return round(float(match[1]) * _UNITS[match[2]])


class OomKind(StrEnum):
    """Whose memory it was that an allocation didn't find."""

    DEVICE = "device"
    """The card is full: what is on it is too much."""
    FRAGMENTED = "fragmented"
    """The bytes would do, and aren't in one piece: more is lost to fragmentation than was reckoned
    with."""
    HOST = "host"
    """Host memory is short. More on the card relieves it, less on the card makes it worse."""
    TRANSIENT = "transient"
    """The card wasn't full: the driver or the allocator failed. Synchronize and try once more."""
    NOT_MEMORY = "not memory"
    """Another error."""


def classify(
    error: BaseException,
    reading: Reading | None = None,
    *,
    pinning: bool = False,
    host_available_bytes: int | None = None,
) -> OomKind:
    """Whose memory was short, by what the error says and, where it says nothing, by the reading.

    `pinning`: the error came from page-locking host memory, which CUDA reports as its own.
    `reading` is taken to be later than the error: of what it says only what was free in the
    driver, and the peak of what was allocated, still hold.
    """
    import torch

    text = str(error)
    if isinstance(error, MemoryError) or any(each in text for each in _HOST_TEXTS):
        return OomKind.HOST
    if pinning:
        short = isinstance(error, torch.OutOfMemoryError) or any(t in text for t in _PIN_TEXTS)
        return OomKind.HOST if short else OomKind.NOT_MEMORY
    if _ASSERT.search(text):
        return OomKind.DEVICE
    if not isinstance(error, torch.OutOfMemoryError) and not any(t in text for t in _DEVICE_TEXTS):
        return OomKind.NOT_MEMORY
    if _LIMITED.search(text):
        return OomKind.DEVICE
    shortfall = Shortfall.of(error)
    if _is_plenty(shortfall, reading):
        asked = 0 if shortfall is None else shortfall.requested_bytes
        low = host_available_bytes is not None and host_available_bytes < asked + _HOST_LOW_BYTES
        return OomKind.HOST if low else OomKind.TRANSIENT
    return OomKind.FRAGMENTED if _is_in_pieces(text, shortfall, reading) else OomKind.DEVICE


def _is_plenty(shortfall: Shortfall | None, reading: Reading | None) -> bool:
    if shortfall is not None:
        asked, free = shortfall.requested_bytes, shortfall.free_bytes
        return free >= PLENTY * asked and free - asked >= _PLENTY_BYTES
    return reading is not None and reading.free_bytes * 2 > reading.total_bytes


def _is_in_pieces(text: str, shortfall: Shortfall | None, reading: Reading | None) -> bool:
    if shortfall is None or reading is None:
        return False
    said = _ALLOCATED.search(text)
    allocated = reading.peak_allocated_bytes if said is None else _bytes(said)
    return reading.usable_bytes - allocated >= shortfall.requested_bytes


def cut_off(error: BaseException) -> None:
    """Cut off the frames that `error`, and what led to it, came through and that have ended: what
    their variables hold is free while the error is still held. A note of the error tells them.
    Frames that still run stay in its traceback.

    To clear the frames' variables isn't enough: a frame keeps its function, and with it what that
    closes over, such as the arguments of a module that has hooks.
    """
    told = "".join(traceback.format_exception(error)).rstrip()
    seen: set[int] = set()
    errors: list[BaseException | None] = [error]
    while errors:
        each = errors.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            _cut(each)
            errors += [each.__context__, each.__cause__]
    error.add_note(f"The frames of the run that failed are gone. They were:\n{told}")


def _cut(error: BaseException) -> None:
    running, at = None, error.__traceback__
    while at is not None and _runs(at.tb_frame):
        running, at = at, at.tb_next
    traceback.clear_frames(at)
    if running is None:
        error.__traceback__ = None
    else:
        running.tb_next = None


def _runs(frame: FrameType) -> bool:
    try:
        frame.clear()
    except RuntimeError:
        return True
    return False
