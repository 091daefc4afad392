"""How often a request is expected to run each of its uses."""

from __future__ import annotations

from ...phases.component import ComponentGroup
from ...phases.shape import Shape
from ..installation import Installation


def expected_passes(
    installation: Installation, asked: Shape, like: Shape
) -> dict[tuple[str, str], int]:
    """By phase and component, for a request at `asked` that is run as the validated `like`.

    The number itself only decides what is fetched ahead where a pass ends: where fewer or more run,
    a layer is copied in vain or waited for. Whether it is 1 decides whether the resident set is
    held, so it is 1 where nothing was held when `like` was validated, and else more.
    """
    swept = installation.warmup.steps(like)
    steps = installation.pipeline.steps(asked) or swept
    validated = installation.warmup.passes(like)
    expected = {}
    for use in installation.graph.uses:
        passes = served = validated[use.phase, use.component]
        if ComponentGroup.of(use.component) is ComponentGroup.DIT:
            served = passes * steps // swept
        is_held = passes > 1 or use.retain_resident_layers
        expected[use.phase, use.component] = max(served, min(passes, 2)) if is_held else 1
    return expected
