"""Small instances for the exact choice, drawn or made by hand."""

from __future__ import annotations

from hypothesis import strategies as st

from residency.planner.choosing.model import Fixed, Instance, LayerClass, Mode, Part, Room, UseSpan

PAGEABLE = Mode(1, False, 0.02, 0)


def part(
    *classes: tuple[int, int],
    phase: int = 0,
    places: int = 2,
    passes: int = 4,
    rest_bytes: int = 0,
    modes: tuple[Mode, ...] = (PAGEABLE,),
    fixed: Fixed | None = None,
    component: str = "dit",
) -> Part:
    """Used in one phase, which is a place; `classes` are counts and bytes."""
    return Part(
        component,
        rest_bytes,
        rest_bytes,
        tuple(LayerClass(f"g{i}", n, size, size, (True,)) for i, (n, size) in enumerate(classes)),
        (UseSpan(f"phase{phase}", (phase,), (passes,), passes, _others(phase, places), 1.0),),
        modes,
        fixed or Fixed(),
    )


def instance(*parts: Part, rooms: tuple[int, ...], host: int | None = None) -> Instance:
    return Instance(tuple(Room(f"phase{i}", "large", n) for i, n in enumerate(rooms)), parts, host)


def _others(phase: int, places: int) -> tuple[int, ...]:
    return tuple(place for place in range(places) if place != phase)


@st.composite
def instances(draw: st.DrawFn) -> Instance:
    """2 to 4 phases at 1 or 2 shapes, and 1 or 2 components of 1 or 2 uses; some fit nothing."""
    phases, shapes = draw(st.integers(2, 4)), draw(st.integers(1, 2))
    parts = tuple(
        draw(_parts(f"c{i}", phases, shapes, large=i == 0)) for i in range(draw(st.integers(1, 2)))
    )
    return Instance(
        tuple(
            Room(f"phase{phase}", f"shape{shape}", draw(st.integers(0, 150)))
            for phase in range(phases)
            for shape in range(shapes)
        ),
        parts,
        draw(st.none() | st.integers(0, 80)),
        draw(st.sampled_from((0.0, 1.0))),
        pinned_on_card=draw(st.booleans()),
    )


@st.composite
def _parts(draw: st.DrawFn, component: str, phases: int, shapes: int, *, large: bool) -> Part:
    used = sorted(draw(st.sets(st.integers(0, phases - 1), min_size=1, max_size=1 + large)))
    kinds = draw(st.integers(0, 2))
    most = 3 if len(used) == 1 else 3 - kinds
    classes = tuple(
        LayerClass(
            f"g{i}",
            draw(st.integers(1, most)),
            draw(st.integers(1, 30)),
            draw(st.integers(1, 30)),
            tuple(draw(st.booleans()) or draw(st.booleans()) for _ in used),
        )
        for i in range(kinds)
    )
    modes = tuple(
        Mode(prefetch, pinned, seconds / (1 + pinned), host * pinned)
        for prefetch in draw(st.sets(st.integers(0, 2), min_size=1, max_size=2))
        for pinned in sorted(draw(st.sets(st.booleans(), min_size=1)))
        for seconds in (draw(st.sampled_from((0.01, 0.013, 0.02))),)
        for host in (draw(st.integers(10, 50)),)
    )
    uses = tuple(draw(_spans(used, i, phases, shapes)) for i in range(len(used)))
    counts = st.tuples(*(st.integers(0, layers.count) for layers in classes))
    fixed = Fixed()
    if draw(st.integers(0, 3)) == 0:
        fixed = Fixed(
            draw(st.none() | counts),
            draw(st.none() | counts),
            draw(st.none() | st.booleans()),
            draw(st.none() | st.sampled_from(modes)),
        )
    rest_bytes = draw(st.sampled_from((0, 0, 5, 10)))
    return Part(component, rest_bytes, draw(st.integers(0, 10)), classes, uses, modes, fixed)


@st.composite
def _spans(draw: st.DrawFn, used: list[int], use: int, phases: int, shapes: int) -> UseSpan:
    phase, following = used[use], used[(use + 1) % len(used)]
    length = (following - phase - 1) % phases
    between = [(phase + 1 + step) % phases for step in range(length)]
    passes = tuple(draw(st.integers(1, 4)) for _ in range(shapes))
    return UseSpan(
        f"phase{phase}",
        tuple(phase * shapes + shape for shape in range(shapes)),
        passes,
        passes[-1],
        tuple(phase * shapes + shape for phase in between for shape in range(shapes)),
        draw(st.sampled_from((1.0, 0.5, 0.37))),
    )
