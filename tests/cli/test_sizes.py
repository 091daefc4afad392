import pytest

from residency.cli.arguments import parse_size
from residency.cli.render.words import format_bytes, format_exact, format_rate, format_seconds
from residency.offload.errors import InputError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("376MiB", 376 << 20),
        ("2GiB", 2 << 30),
        ("2gib", 2 << 30),
        (" 22 GiB ", 22 << 30),
        ("24GB", 24 * 1000**3),
        ("1.5KiB", 1536),
        ("23.52GiB", round(23.52 * (1 << 30))),
        ("1TB", 1000**4),
        ("0", 0),
        ("25254686720", 25254686720),
        ("7B", 7),
    ],
)
def test_a_size_is_read_with_its_unit(text: str, size: int):
    assert parse_size("--margin", text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "lots", "-1GiB", "1.5", "1e9", "22G", "1GiB 2", "٣GiB", "9" * 40, "inf"]
)
def test_what_is_no_size_is_refused_with_the_option_and_the_text(text: str):
    with pytest.raises(InputError) as caught:
        parse_size("--margin", text)
    assert "--margin" in caught.value.message
    assert repr(text) in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1000, "1000 B"),
        (1536, "1.5 KiB"),
        (376 << 20, "376 MiB"),
        (-(376 << 20), "-376 MiB"),
        (4_718_592, "4.5 MiB"),
        ((1 << 30) - 1, "1.00 GiB"),
        (1 << 30, "1.00 GiB"),
        (round(12.94 * (1 << 30)), "12.94 GiB"),
        (3 << 40, "3.00 TiB"),
    ],
)
def test_bytes_are_written_in_the_unit_that_suits(size: int, text: str):
    assert format_bytes(size) == text


@pytest.mark.parametrize("shift", [10, 20, 30, 40])
def test_no_size_is_written_as_1024_of_a_unit(shift: int):
    for less in (1, 10, 100, 400, 511, 600):
        assert "1024" not in format_bytes((1 << shift) - less * (1 << shift) // 2**20)


def test_a_change_of_bytes_has_a_sign_unless_it_is_none():
    assert format_bytes(1 << 30, signed=True) == "+1.00 GiB"
    assert format_bytes(-(1 << 30), signed=True) == "-1.00 GiB"
    assert format_bytes(0, signed=True) == "0 B"


def test_exact_bytes_stand_beside_the_rounded_ones():
    assert format_exact(1_288_490_189) == "1.20 GiB (1,288,490,189 bytes)"


def test_seconds_below_a_tenth_are_milliseconds():
    assert [format_seconds(s) for s in (0, 0.0123, 0.43, 14.1)] == [
        "0.00 s",
        "12 ms",
        "0.43 s",
        "14.10 s",
    ]


def test_seconds_are_never_in_exponents_and_float_noise_is_none():
    assert [format_seconds(s) for s in (0.0996, 1e-16, -1e-16)] == ["0.10 s", "0.00 s", "0.00 s"]


def test_signed_seconds_say_more_or_less():
    assert [format_seconds(s, signed=True) for s in (0.05, 0.5, 0, -0.5)] == [
        "+50 ms",
        "+0.50 s",
        "0.00 s",
        "-0.50 s",
    ]


def test_rates_are_decimal():
    assert format_rate(25.2e9) == "25.2 GB/s"
