"""What a failed test leaves on the card is no other test's."""

import importlib.util
from pathlib import Path

import pytest

FAILS = """
import pytest, torch
from residency.offload.cards import custom_card
from residency.offload.simulated.card import SimulatedCard

def put_in():
    return SimulatedCard(custom_card(1 << 30), allocator="exact", context_bytes=0)

def test_that_fails_with_a_card_in_its_slot():
    card = put_in()
    card.__enter__()
    kept = torch.ones(3).to(card.torch_device)
    raise ValueError

@pytest.fixture
def card():
    with put_in() as card:
        yield card

def test_that_follows(card):
    assert card.read().allocated_bytes == 0

def test_that_fails_in_a_block():
    with put_in() as card:
        kept = torch.ones(3).to(card.torch_device)
        raise ValueError

def test_that_follows_that(card):
    assert card.read().allocated_bytes == 0
"""


@pytest.mark.parametrize("teardown", [True, False])
def test_a_failed_test_does_not_make_the_next_one_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], teardown: bool
) -> None:
    """Without the teardown of `conftest.py` it does."""
    tests = tmp_path / "test_inner.py"
    tests.write_text(FAILS)
    plugins = []
    if teardown:
        spec = importlib.util.spec_from_file_location(
            "ours", Path(__file__).with_name("conftest.py")
        )
        assert spec is not None
        assert spec.loader is not None
        plugins = [importlib.util.module_from_spec(spec)]
        spec.loader.exec_module(plugins[0])
    pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(tests)], plugins=plugins)
    printed = capsys.readouterr().out
    assert ("2 failed, 2 passed" in printed) == teardown, printed
