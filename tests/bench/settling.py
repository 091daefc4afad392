"""How long a server waits for `settle`: searching, and verifying what the last start committed."""

import statistics
import tempfile
import time
from pathlib import Path

from rich.table import Table

from residency.offload.cards import find_card
from residency.offload.simulated.card import SimulatedCard
from residency.phases.diffusers.families import find_family
from residency.phases.diffusers.host import DiffusersHost
from residency.phases.diffusers.pipeline import DiffusersPipeline
from residency.planner import Mode, Options, settle

CASES = (
    ("qwen-image-2.1", "RTX 4090", "720x720", {"transformer": "resident"}),
    ("qwen-image-2.1", "RTX 5090", "720x720", {"transformer": "resident"}),
    ("flux.1-dev", "RTX 4090", "1024x1024", {}),
)
ROUNDS = 3


def table() -> Table:
    made = Table(title=f"Seconds from the call to ready, full scale simulated, medians of {ROUNDS}")
    for column in ("pipeline", "card", "one sweep", "search", "sweeps", "verify", "sweeps"):
        made.add_column(column, justify="left" if column in ("pipeline", "card") else "right")
    for case in CASES:
        made.add_row(*_row(*case))
    return made


def _row(name: str, card_name: str, shape: str, residency: dict[str, str]) -> tuple[str, ...]:
    family, card = find_family(name), find_card(card_name)
    pipeline = DiffusersPipeline(family.build(), name=name, request=family.request)
    taken: dict[Mode, list[float]] = {Mode.SEARCH: [], Mode.VERIFY: []}
    sweeps: dict[Mode, int] = {}
    one: list[float] = []
    with tempfile.TemporaryDirectory() as folder, _counted() as counted:
        for round_ in range(ROUNDS):
            for mode, seconds in taken.items():
                counted.clear()
                with SimulatedCard(card, virtual=True) as device:
                    began = time.perf_counter()
                    settlement = settle(
                        pipeline,
                        device=device,
                        envelope=[shape],
                        journal=Path(folder) / f"journal-{round_}",
                        mode=mode,
                        options=Options(component_residency=residency),
                    )
                    seconds.append(time.perf_counter() - began)
                    settlement.close()
                sweeps[mode] = len(counted)
                one.extend(counted)
    return (
        name,
        card_name,
        f"{statistics.median(one):.1f}",
        f"{statistics.median(taken[Mode.SEARCH]):.1f}",
        str(sweeps[Mode.SEARCH]),
        f"{statistics.median(taken[Mode.VERIFY]):.1f}",
        str(sweeps[Mode.VERIFY]),
    )


class _counted:
    """Inside, the seconds of each warmup sweep are in the list that it gives."""

    def __enter__(self) -> list[float]:
        self._sweep = sweep = DiffusersHost.sweep
        seconds: list[float] = []

        def timed(host: DiffusersHost):
            began = time.perf_counter()
            try:
                return sweep(host)
            finally:
                seconds.append(time.perf_counter() - began)

        DiffusersHost.sweep = timed
        return seconds

    def __exit__(self, *_: object) -> None:
        DiffusersHost.sweep = self._sweep
