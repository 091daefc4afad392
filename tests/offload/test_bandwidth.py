import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from residency.offload.cards import custom_card, find_card
from residency.offload.clocks import BandwidthCache, measure_bandwidth, user_cache_path
from residency.offload.errors import DeviceError, InputError
from residency.offload.simulated.card import SimulatedCard
from residency.offload.simulated.work import Clock

CLOCK = Clock(h2d_bytes_per_s=24e9, pageable_bytes_per_s=6e9, op_s=1e-5)
NBYTES = 1 << 20


@pytest.fixture
def card() -> Iterator[SimulatedCard]:
    with SimulatedCard(find_card("RTX 4090"), clock=CLOCK) as card:
        yield card


@pytest.mark.parametrize(("pinned", "rate"), [(True, 24e9), (False, 6e9)])
def test_the_rate_is_that_of_the_bus(card, pinned: bool, rate: float):
    assert measure_bandwidth(card, NBYTES, pinned=pinned) == pytest.approx(rate)
    assert card.transfers.h2d_bytes == 6 * NBYTES
    assert card.read().allocated_bytes == card.pinned_bytes == 0


def test_one_slow_copy_in_five_and_the_first_do_not_count(card, monkeypatch):
    seconds = iter([100.0, 1.0, 2.0, 9.0, 4.0, 5.0])
    monkeypatch.setattr(card, "seconds", lambda since, until: next(seconds))
    assert measure_bandwidth(card, NBYTES, pinned=True) == NBYTES / 4


def test_what_can_not_be_measured_is_an_error(card):
    with pytest.raises(InputError, match="a copy of 0 bytes has no rate"):
        measure_bandwidth(card, 0, pinned=True)


def test_copies_that_take_no_time_have_no_rate(card, monkeypatch):
    monkeypatch.setattr(card, "seconds", lambda since, until: 0.0)
    with pytest.raises(DeviceError, match="take no time"):
        measure_bandwidth(card, NBYTES, pinned=True)


def test_a_device_without_a_clock_is_an_error():
    with (
        SimulatedCard(custom_card(1 << 30)) as card,
        pytest.raises(DeviceError, match="has no clock"),
    ):
        measure_bandwidth(card, NBYTES, pinned=False)


def copies(card: SimulatedCard, cache: BandwidthCache, *, pinned: bool = True) -> int:
    before = card.transfers.h2d_copies
    rate = cache.bytes_per_s(card, pinned=pinned, nbytes=NBYTES)
    assert rate == pytest.approx(24e9 if pinned else 6e9)
    return card.transfers.h2d_copies - before


def test_a_card_is_measured_once_for_each_kind_of_memory(card):
    cache = BandwidthCache()
    assert [copies(card, cache, pinned=p) for p in (True, True, False, False)] == [6, 0, 6, 0]
    assert copies(card, BandwidthCache()) == 6


def test_the_next_process_finds_it_in_the_file(card, tmp_path: Path):
    path = tmp_path / "new" / "bandwidth.json"
    assert copies(card, BandwidthCache(path, driver="575.57")) == 6
    assert copies(card, BandwidthCache(path, driver="575.57")) == 0
    assert copies(card, BandwidthCache(path, driver="580.1")) == 6
    assert copies(card, BandwidthCache(path, driver="575.57"), pinned=False) == 6
    held = json.loads(path.read_text())
    assert held["format"] == 1
    assert sorted(held["bytes_per_s"]) == [
        "SIM-RTX-4090 575.57 pageable",
        "SIM-RTX-4090 575.57 pinned",
        "SIM-RTX-4090 580.1 pinned",
    ]
    assert [each.name for each in path.parent.iterdir()] == ["bandwidth.json"]


def test_another_card_is_measured_for_itself(tmp_path: Path):
    path = tmp_path / "bandwidth.json"
    for name in ("RTX 4090", "RTX 5090"):
        with SimulatedCard(find_card(name), clock=CLOCK) as card:
            assert copies(card, BandwidthCache(path)) == 6


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format": 2, "bytes_per_s": {"SIM-RTX-4090  pinned": 1.0}}',
        '{"format": 1}',
        '{"format": 1, "bytes_per_s": {"SIM-RTX-4090  pinned": "fast"}}',
        '{"format": 1, "bytes_per_s": {"SIM-RTX-4090  pinned": -1}}',
        '{"format": 1, "bytes_per_s": {"SIM-RTX-4090  pinned": Infinity}}',
        b"\xff\xfe",
    ],
)
def test_a_file_that_is_something_else_is_written_anew(card, tmp_path: Path, text: str | bytes):
    path = tmp_path / "bandwidth.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert copies(card, BandwidthCache(path)) == 6
    assert copies(card, BandwidthCache(path)) == 0


def test_a_write_that_fails_leaves_the_file_as_it_was_and_is_told(
    card, tmp_path: Path, monkeypatch, caplog
):
    path = tmp_path / "bandwidth.json"
    copies(card, BandwidthCache(path))
    before = path.read_bytes()

    def refuse(self: Path, target: Path) -> Path:
        raise OSError("the disk is full (injected)")

    monkeypatch.setattr(Path, "replace", refuse)
    cache = BandwidthCache(path)
    assert [copies(card, cache, pinned=False) for _ in range(2)] == [6, 0]
    assert "injected" in caplog.text
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["bandwidth.json"]


def test_a_file_that_can_not_be_read_or_written_is_told_and_the_rate_measured(
    card, tmp_path: Path, caplog
):
    (tmp_path / "file").write_text("no folder")
    for path in (tmp_path, tmp_path / "file" / "bandwidth.json"):
        caplog.clear()
        assert copies(card, BandwidthCache(path)) == 6
        assert "measures the copy rate again" in caplog.text


def test_the_users_cache_is_where_xdg_says(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache_path() == tmp_path / "residency" / "bandwidth.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache_path() == tmp_path / ".cache" / "residency" / "bandwidth.json"


def test_virtual_memory_is_measured_as_well():
    with SimulatedCard(find_card("RTX 4090"), clock=CLOCK, virtual=True) as card:
        assert measure_bandwidth(card, NBYTES, pinned=True) == pytest.approx(24e9)
        assert torch.zeros(1, device=card.torch_device).item() == 0
