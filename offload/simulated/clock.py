"""Time on a simulated card: each stream has a cursor, and work moves it on."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..errors import InputError
from .work import Work


@dataclass(frozen=True, slots=True)
class Clock:
    """How long work takes. All of it is assumed, none measured.

    A copy over the bus takes its bytes at the rate of its direction; one from or to pageable
    memory takes them at `pageable_bytes_per_s`, and the host waits for it. There is one copy engine
    for each direction. Any other operation takes `op_s`, and the bytes of its tensors at
    `bytes_per_s`, the rate of the card's own memory. The host takes `issue_s` to issue one.
    """

    h2d_bytes_per_s: float
    pageable_bytes_per_s: float
    op_s: float = 0.0
    bytes_per_s: float = float("inf")
    d2h_bytes_per_s: float | None = None
    """None: as the other direction."""
    issue_s: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_rate = field.name.endswith("bytes_per_s")
            if value is not None and not (value > 0 if is_rate else value >= 0):
                raise InputError(
                    f"{field.name} of a clock is {value}",
                    hint="a rate is above 0" if is_rate else "a time is 0 or more",
                )

    def rate(self, *, to_card: bool, pinned: bool) -> float:
        if not pinned:
            return self.pageable_bytes_per_s
        if to_card or self.d2h_bytes_per_s is None:
            return self.h2d_bytes_per_s
        return self.d2h_bytes_per_s


class Timeline:
    """How far each stream, each copy engine and the host have come, in seconds.

    `spill_factor`: how much longer an operation takes on memory that the card has spilled.
    """

    def __init__(self, clock: Clock, *, spill_factor: float = 1.0) -> None:
        self.clock = clock
        self.spill_factor = spill_factor
        self.host_s = 0.0
        self._streams_s: dict[int, float] = {}
        self._engines_s = {True: 0.0, False: 0.0}

    def now(self, stream: int) -> float:
        """When the work that `stream` has so far is done, or the host would issue more."""
        return max(self._streams_s.get(stream, 0.0), self.host_s)

    def wait(self, stream: int, until_s: float) -> None:
        self._streams_s[stream] = max(self.now(stream), until_s)

    def host_waits(self, until_s: float) -> None:
        self.host_s = max(self.host_s, until_s)

    def host_waits_for_all(self) -> None:
        self.host_s = max(self.host_s, *self._streams_s.values(), *self._engines_s.values())

    def run(self, work: Work, stream: int, *, pinned: bool) -> None:
        clock, copy = self.clock, work.copy
        self.host_s += clock.issue_s
        start_s = self.now(stream)
        if copy is None:
            duration_s = clock.op_s + work.nbytes / clock.bytes_per_s
        else:
            start_s = max(start_s, self._engines_s[copy.to_card])
            duration_s = copy.nbytes / clock.rate(to_card=copy.to_card, pinned=pinned)
        if any(getattr(each.charge, "spilled", False) for each in (*work.reads, *work.writes)):
            duration_s *= self.spill_factor
        end_s = self._streams_s[stream] = start_s + duration_s
        if copy is not None:
            self._engines_s[copy.to_card] = end_s
        if work.joins or (copy is not None and not pinned):
            self.host_s = end_s
