"""What the exact choice takes on pipelines of full scale."""

import statistics
import time

from rich.table import Table

from residency.planner.choosing.choose import Chosen, choose
from residency.planner.choosing.joint import joined
from residency.planner.choosing.model import Instance, LayerClass, Mode, Part, Room, UseSpan

MIB = 1 << 20
GIB = 1 << 30
ROUNDS = 7
SECONDS_PER_GIB = {False: 1 / 6, True: 1 / 24}
"""Of copies from pageable and from pinned masters."""

Stack = tuple[int, float]
"""Layers, and MiB of each."""


def part(
    component: str,
    phases: list[str],
    phase: int,
    shapes: int,
    *,
    stacks: list[Stack],
    rest_mib: float,
    passes: int = 1,
    exposure: float = 1.0,
) -> Part:
    """A component that is used in one phase of a request."""
    weights = round((rest_mib + sum(n * mib for n, mib in stacks)) * MIB)
    places = range(len(phases) * shapes)
    return Part(
        component,
        round(rest_mib * MIB) // 512 * 512,
        round(rest_mib * MIB) // 512 * 512,
        tuple(
            LayerClass(f"layers{i}", n, round(mib * MIB) // 512 * 512, round(mib * MIB), (True,))
            for i, (n, mib) in enumerate(stacks)
        ),
        (
            UseSpan(
                phases[phase],
                tuple(place for place in places if place // shapes == phase),
                (passes,) * shapes,
                passes,
                tuple(place for place in places if place // shapes != phase),
                exposure,
            ),
        ),
        tuple(
            Mode(prefetch, pinned, seconds * (1 - prefetch / 100) / GIB, weights * pinned)
            for pinned, seconds in SECONDS_PER_GIB.items()
            for prefetch in (0, 1, 2)
        ),
    )


def instance(parts: list[tuple[str, dict[str, object]]], rooms_gib: list[list[float]]) -> Instance:
    """One phase for each part, in order; rooms by phase and shape."""
    phases = [name for name, _ in parts]
    shapes = len(rooms_gib[0])
    return Instance(
        tuple(
            Room(phase, f"shape{s}", round(gib * GIB))
            for phase, row in zip(phases, rooms_gib, strict=True)
            for s, gib in enumerate(row)
        ),
        tuple(
            part(name, phases, i, shapes, **told)  # type: ignore[arg-type]
            for i, (name, told) in enumerate(parts)
        ),
        fixed_seconds=12.0,
    )


QWEN_ENCODER = {"stacks": [(28, 444.5), (32, 37.6)], "rest_mib": 2167.0}
UMT5 = {"stacks": [(24, 368.0)], "rest_mib": 2003.0}
T5 = {"stacks": [(24, 368.0)], "rest_mib": 64.0}
CLIP = {"stacks": [(12, 13.5)], "rest_mib": 72.0}


def denoiser(stacks: list[Stack], rest_mib: float, passes: int) -> dict[str, object]:
    return {"stacks": stacks, "rest_mib": rest_mib, "passes": passes, "exposure": 0.4}


def vae(mib: float) -> dict[str, object]:
    return {"stacks": [], "rest_mib": mib}


PIPELINES: dict[str, Instance] = {
    "60-layer DiT, encoder 28 + 32, VAE": instance(
        [
            ("text_encoder", QWEN_ENCODER),
            ("dit", denoiser([(60, 648.2)], 77.0, 50)),
            ("vae", vae(242.0)),
        ],
        [[29.3, 29.1], [28.9, 28.6], [26.2, 23.7]],
    ),
    "two 40-layer DiTs, encoder 24, VAE": instance(
        [
            ("text_encoder", UMT5),
            ("high_noise", denoiser([(40, 670.2)], 445.0, 20)),
            ("low_noise", denoiser([(40, 670.2)], 445.0, 30)),
            ("vae", vae(484.0)),
        ],
        [[29.3, 29.2], [26.3, 21.7], [26.3, 21.7], [22.1, 12.2]],
    ),
    "DiT 19 + 38, T5 24, CLIP 12, VAE": instance(
        [
            ("clip", CLIP),
            ("t5", T5),
            ("dit", denoiser([(19, 648.2), (38, 270.1)], 122.0, 28)),
            ("vae", vae(160.0)),
        ],
        [[21.9, 21.9], [21.8, 21.8], [21.4, 21.1], [20.4, 19.3]],
    ),
}


def with_budget(whole: Instance, share: float) -> Instance:
    """A host budget for `share` of what pinning everything takes."""
    most = sum(max(mode.host_bytes for mode in each.modes) for each in whole.parts)
    return Instance(whole.places, whole.parts, round(most * share), whole.fixed_seconds)


def of_ranks(whole: Instance, count: int) -> Instance:
    """Rank r has r times 137 MiB less than rank 0 in every place, and in one place more so."""
    ranks = []
    for rank in range(count):
        less = whole.shifted(-137 * MIB * rank)
        place = rank % len(whole.places)
        ranks.append(less.lowered(place, less.places[place].room_bytes - 211 * MIB * rank))
    return joined(ranks).instance


def table() -> Table:
    """In one process, taking turns; building the program is counted, HiGHS has one thread."""
    made = Table(title="The exact choice: milliseconds for all four steps, medians")
    made.add_column("pipeline")
    made.add_column("host budget")
    for column in ("ranks", "ms", "slowest", "gap", "proven"):
        made.add_column(column, justify="right")
    cases = {
        (name, budget, ranks): of_ranks(with_budget(whole, share), ranks)
        for name, whole in PIPELINES.items()
        for budget, share in (("slack", 1.0), ("binding", 0.6))
        for ranks in (1, 8)
    }
    seconds: dict[tuple[str, str, int], list[float]] = {case: [] for case in cases}
    found: dict[tuple[str, str, int], Chosen] = {}
    for _ in range(ROUNDS):
        for case, whole in cases.items():
            start = time.perf_counter()
            chosen = choose(whole)
            seconds[case].append(time.perf_counter() - start)
            assert isinstance(chosen, Chosen), str(chosen)
            found[case] = chosen
    for (name, budget, ranks), times in seconds.items():
        chosen = found[name, budget, ranks]
        made.add_row(
            name,
            budget,
            str(ranks),
            f"{statistics.median(times) * 1e3:.0f}",
            f"{max(times) * 1e3:.0f}",
            f"{chosen.gap:.0e}",
            "yes" if chosen.proven else "no",
        )
    return made
