"""Two counts that share no code: the card's allocator, and PyTorch's MemTracker on fake tensors.

Neither rounds (the tracker does for CUDA only, the exact allocator never), both run the same fused
attention, and both free a tensor when its last reference goes. So they agree to the byte.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.scale

PROGRAM = Path(__file__).with_name("component_peak.py")
MIB = 1 << 20


def peaks(counter: str) -> dict[str, int]:
    program = [sys.executable, PROGRAM, counter]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def both() -> tuple[dict[str, int], dict[str, int]]:
    return peaks("card"), peaks("tracker")


@pytest.mark.parametrize(
    ("component", "about_mib"),
    # Weights, inputs, and the peak above them that FINDINGS A5 has: 383.1 and 3459.3 MiB.
    [("denoiser", 1373.6 + 4.0 + 383.1), ("decoder", 242.0 + 0.5 + 3459.3)],
    ids=["denoiser", "decoder"],
)
def test_the_card_and_mem_tracker_count_the_same_peak(both, component: str, about_mib: float):
    card, tracker = (peak[component] for peak in both)
    assert card == tracker
    assert abs(card / MIB - about_mib) < 1
