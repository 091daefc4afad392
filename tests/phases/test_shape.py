from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from residency.offload.errors import ShapeError
from residency.phases.shape import Shape, largest_shapes

counts = st.integers(1, 10**8)
guidances = st.none() | st.floats(0, 1000, exclude_max=True)
shapes = st.builds(
    Shape,
    width=counts,
    height=counts,
    frames=counts,
    batch=counts,
    tokens=counts,
    steps=st.none() | counts,
    guidance=guidances,
)
few = st.integers(1, 3)
small_shapes = st.builds(
    Shape,
    width=few,
    height=few,
    frames=few,
    batch=few,
    tokens=few,
    steps=st.none() | few,
    guidance=st.sampled_from([None, 0.0, 1.0, 3.0, 5.0]),
)


@given(shapes)
def test_a_shape_reads_back_as_it_is_written(shape):
    assert Shape.parse(str(shape)) == shape


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("1024x768", Shape(1024, 768)),
        ("1024X768", Shape(1024, 768)),
        (" 1024x768 ", Shape(1024, 768)),
        ("1280x720x81", Shape(1280, 720, 81)),
        ("64x64:steps=40", Shape(64, 64, steps=40)),
        ("64x64x1: steps=40, guidance=5", Shape(64, 64, steps=40, guidance=5.0)),
        ("64x64:batch=2,tokens=9,guidance=3.5", Shape(64, 64, batch=2, tokens=9, guidance=3.5)),
    ],
)
def test_a_shape_is_read(text, shape):
    assert Shape.parse(text) == shape


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        (Shape(64, 32), "64x32"),
        (Shape(64, 32, 5), "64x32x5"),
        (Shape(64, 32, steps=2, guidance=5.0), "64x32:steps=2,guidance=5"),
        (Shape(64, 32, tokens=1234567), "64x32:tokens=1234567"),
        (Shape(64, 32, guidance=3.1234567), "64x32:guidance=3.1234567"),
    ],
)
def test_a_shape_is_written_in_short(shape, text):
    assert str(shape) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1024",
        "1024x",
        "x1024",
        "1024x768x",
        "1024x768x81x2",
        "-64x64",
        "64.5x64",
        "64 x 64",
        "64*64",
        "large",
        ":steps=2",
        "0x64",
        "64x0",
        "64x64x0",
        "9" * 5000 + "x64",
        "64x64:steps",
        "64x64:=2",
        "64x64:width=2",
        "64x64:frames=2",
        "64x64:speed=2",
        "64x64:steps=",
        "64x64:steps=2.5",
        "64x64:steps=two",
        "64x64:steps=0",
        "64x64:steps=-1",
        "64x64:steps=2,steps=3",
        "64x64:steps=2:batch=3",
        "64x64:steps=" + "9" * 5000,
        "64x64:batch=0",
        "64x64:tokens=0",
        "64x64:guidance=high",
        "64x64:guidance=-1",
        "64x64:guidance=nan",
        "64x64:guidance=inf",
        "64x64:guidance=1000",
    ],
)
def test_a_malformed_shape_is_refused_with_a_hint(text):
    with pytest.raises(ShapeError) as caught:
        Shape.parse(text)
    assert caught.value.hint


@given(st.text(max_size=20) | st.text("0123456789x:=,. stepguidanc", max_size=30))
def test_any_text_is_a_shape_or_a_shape_error(text):
    try:
        shape = Shape.parse(text)
    except ShapeError:
        return
    assert Shape.parse(str(shape)) == shape


def test_an_unknown_option_names_those_that_there_are():
    with pytest.raises(ShapeError, match="'speed=2' in shape '64x64:speed=2' is no option") as e:
        Shape.parse("64x64:speed=2")
    assert e.value.hint == "options are key=value with a key of batch, tokens, steps, guidance"


def test_only_what_a_shape_leaves_open_is_completed():
    default = Shape(8, 8, tokens=9, batch=2, steps=50, guidance=4.0)
    assert Shape(64, 64).completed(default) == Shape(64, 64, steps=50, guidance=4.0)
    assert Shape(64, 64, steps=3).completed(default) == Shape(64, 64, steps=3, guidance=4.0)
    full = Shape(64, 64, steps=3, guidance=1.0)
    assert full.completed(default) == full


def test_a_completed_shape_may_stay_open():
    assert Shape(64, 64).completed(Shape(8, 8)) == Shape(64, 64)


@pytest.mark.parametrize(
    ("guidance", "scale", "guided"),
    [(None, 1.0, False), (0.0, 0.0, False), (1.0, 1.0, False), (1.5, 1.5, True)],
)
def test_guidance_above_one_is_on(guidance, scale, guided):
    shape = Shape(64, 64, guidance=guidance)
    assert (shape.cfg_scale, shape.guided) == (scale, guided)


@pytest.mark.parametrize("name", ["width", "height", "frames", "batch", "tokens"])
def test_a_shape_covers_what_is_smaller_in_any_extent(name):
    shape = Shape(8, 8, 8, 8, 8)
    assert shape.covers(replace(shape, **{name: 7}))
    assert not shape.covers(replace(shape, **{name: 9}))


def test_steps_take_no_memory_but_one_alone_holds_no_resident_set():
    assert Shape(8, 8, steps=2).covers(Shape(8, 8, steps=50))
    assert Shape(8, 8).covers(Shape(8, 8, steps=50))
    assert not Shape(8, 8, steps=1).covers(Shape(8, 8, steps=50))
    assert Shape(8, 8, steps=50).covers(Shape(8, 8, steps=1))


def test_guidance_takes_memory_when_it_is_on_and_the_scale_takes_none():
    off, on, more = Shape(8, 8), Shape(8, 8, guidance=2.0), Shape(8, 8, guidance=9.0)
    assert on.covers(off)
    assert not off.covers(on)
    assert on.covers(more)
    assert more.covers(on)


def test_the_largest_shapes_stand_in_the_order_given():
    wide, high, small = Shape(9, 5), Shape(5, 9), Shape(5, 5)
    assert largest_shapes([small, wide, high, wide]) == (wide, high)
    assert largest_shapes([high, small, wide]) == (high, wide)


def test_of_shapes_that_cover_one_another_the_first_is_kept():
    first, second = Shape(8, 8, steps=2, guidance=3.0), Shape(8, 8, steps=9, guidance=4.0)
    assert largest_shapes([first, second]) == (first,)
    assert largest_shapes([second, first]) == (second,)


def test_no_shapes_have_no_largest():
    assert largest_shapes([]) == ()


@given(st.lists(small_shapes, max_size=8))
def test_each_shape_is_covered_by_a_largest_one_and_no_largest_one_by_another(given_shapes):
    largest = largest_shapes(given_shapes)
    assert all(any(one.covers(shape) for one in largest) for shape in given_shapes)
    assert not any(one.covers(two) for one in largest for two in largest if one is not two)
    assert all(one in given_shapes for one in largest)
