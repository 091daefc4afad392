"""NVML's account of a simulated card, at NVML's C boundary."""

from __future__ import annotations

import os
from typing import Any

from residency.offload.simulated.card import SimulatedCard
from tests.offload.cuda.fake_nvml import Board, FakeNvml

_OTHER_PID = 1


class SimulatedNvml(FakeNvml):
    """What the card's others hold is one process's, and the rest this one's."""

    def __init__(self, card: SimulatedCard) -> None:
        self._card = card
        super().__init__(
            Board(f"GPU-{card.identity.uuid}", card.card.total_bytes), driver="simulated"
        )

    def _called(self, name: str, board: Board | None = None) -> Any:
        if board is not None:
            reading = self._card.read()
            board.used_bytes = reading.total_bytes - reading.free_bytes
            board.compute = [(os.getpid(), reading.context_bytes + reading.reserved_bytes)]
            if reading.others_bytes:
                board.compute.append((_OTHER_PID, reading.others_bytes))
        super()._called(name, board)
