from dataclasses import replace

from residency.phases.graph import Headroom
from residency.phases.shape import Shape

GIB = 1 << 30
DECODE = Headroom("vae_decode", Shape(720, 720), 32 * GIB, 2 * GIB, 1 * GIB, 20 * GIB, 3 * GIB)


def test_headroom_is_what_the_card_has_beyond_everything_else():
    assert DECODE.headroom_bytes == 6 * GIB


def test_headroom_falls_by_each_byte_that_something_else_takes():
    for name in ("others_bytes", "context_bytes", "peak_bytes", "margin_bytes"):
        more = replace(DECODE, **{name: getattr(DECODE, name) + 1})
        assert more.headroom_bytes == DECODE.headroom_bytes - 1
    assert replace(DECODE, capacity_bytes=32 * GIB + 1).headroom_bytes == 6 * GIB + 1


def test_headroom_below_zero_says_how_much_is_missing():
    assert replace(DECODE, peak_bytes=30 * GIB).headroom_bytes == -4 * GIB
