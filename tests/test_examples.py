import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str) -> str:
    command = [sys.executable, "-W", "error", str(EXAMPLES / name)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_a_pipeline_of_ones_own_is_settled_and_serves():
    told = run("own_pipeline.py")
    assert "retained between requests: text_encoder" in told
    assert "served (1, 3, 64, 64) on simgpu:0" in told


@pytest.mark.long
@pytest.mark.scale
def test_the_two_cards_decide_the_opposite_through_the_library():
    told = run("two_cards.py").splitlines()
    assert told[0] == "RTX 4090: baseline_only, retains nothing"
    assert "RTX 5090: committed, retains text_encoder" in told


def test_the_two_cards_take_less_than_forty_lines():
    assert len((EXAMPLES / "two_cards.py").read_text().splitlines()) < 40
