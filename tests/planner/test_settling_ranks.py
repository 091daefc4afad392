"""Ranks that settle together, in processes of their own."""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from settling_program import SHAPE
from settling_ranks_program import retained

from residency.offload.cards import custom_card
from residency.offload.simulated.card import SimulatedCard
from residency.phases.diffusers.pipeline import DiffusersPipeline
from residency.planner import Options, settle

PROGRAM = Path(__file__).with_name("settling_ranks_program.py")
LARGE = 1 << 30
ENDS_S = 600
"""No scenario takes longer, whatever the machine; a rank left waiting would."""
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def alone(pipeline: DiffusersPipeline, capacity_bytes: int) -> tuple[list[list[object]], int]:
    """What a card of this size retains on its own, and what the plan takes at the most."""
    with SimulatedCard(custom_card(capacity_bytes), allocator="exact", context_bytes=0) as card:
        settlement = settle(
            pipeline,
            device=card,
            envelope=[SHAPE],
            options=Options(margin_bytes=0, attempts=3),
        )
        settlement.close()
    plan = settlement.plan
    return retained(plan), max(each.peak_bytes + each.retained_bytes for each in plan.phases)


@pytest.fixture(scope="module")
def small(settling) -> tuple[int, list[list[object]]]:
    """A card on which not everything fits, and what it retains."""
    pipeline = settling.here.pipeline
    everything, peak = alone(pipeline, LARGE)
    held, _ = alone(pipeline, peak - 1)
    assert held
    assert held != everything
    return peak - 1, held


def environment() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if name not in LAUNCHER}


def ended(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):  # where all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read(folder: Path) -> dict[int, dict[str, object]]:
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.fixture(scope="module")
def program():
    process = subprocess.Popen(
        [sys.executable, "-W", "error", str(PROGRAM)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    yield process
    ended(process)
    process.stdin.close()
    process.stdout.close()


@pytest.fixture
def run(program, tmp_path):
    def run(scenario: str, *capacities: int) -> dict[int, dict[str, object]]:
        overtime = threading.Timer(ENDS_S, ended, [program])
        overtime.start()
        try:
            sizes = ",".join(map(str, capacities))
            program.stdin.write(f"{scenario} {tmp_path} {sizes}\n")
            program.stdin.flush()
            assert program.stdout.readline() == "done\n", f"{scenario} had no end"
        finally:
            overtime.cancel()
        return read(tmp_path)

    return run


def same(told, field):
    first, *others = (each[field] for each in told.values())
    assert all(other == first for other in others), told
    return first


def check_all_retain(told, held) -> None:
    assert same(told, "status") == "committed"
    assert same(told, "retained") == held
    assert {each["left_bytes"] for each in told.values()} == {0}


def test_all_ranks_retain_what_the_smallest_card_can(run, small):
    small_bytes, held = small
    check_all_retain(run("even", LARGE, small_bytes), held)


@pytest.mark.long
def test_under_torchrun_all_retain_what_the_smallest_card_can(tmp_path, small):
    ranks = 2
    small_bytes, held = small
    sizes = [LARGE] * ranks
    sizes[ranks - 1] = small_bytes
    launcher = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(ranks), str(PROGRAM)),
            *("even", str(tmp_path), ",".join(map(str, sizes))),
        ],
        env=environment() | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = launcher.communicate(timeout=ENDS_S)
    finally:
        ended(launcher)
    told = read(tmp_path)
    assert len(told) == ranks, said
    check_all_retain(told, held)


def test_what_runs_out_of_memory_on_one_rank_is_refuted_on_all(run):
    told = run("oom-1", LARGE, LARGE)
    assert same(told, "verdicts") == ["oom", "accepted"]
    assert told[0]["details"][0].startswith("rank 1: ")
    assert same(told, "status") == "committed"
    assert same(told, "retained")
    assert {each["left_bytes"] for each in told.values()} == {0}


def test_an_exception_on_one_rank_leaves_the_others_at_the_baseline(run):
    told = run("raises-1", LARGE, LARGE)
    assert told[1]["raised"] == "ValueError: the copy engine is on fire"
    assert (told[0]["status"], told[0]["retained"]) == ("baseline_only", [])
    assert "rank 1 failed" in told[0]["warnings"][-1]
    assert "the copy engine is on fire" in told[0]["warnings"][-1]
    assert told[0]["left_bytes"] == 0


@pytest.mark.parametrize("dies", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_rank_that_is_killed_while_it_validates_is_named_and_nobody_waits(run, dies):
    told = run(f"dies-{dies}", LARGE, LARGE, LARGE)
    assert {*told} == {0, 1, 2} - {dies}
    for each in told.values():
        assert (each["status"], each["retained"]) == ("baseline_only", [])
        assert f"rank {dies}" in each["warnings"][-1]
        assert each["left_bytes"] == 0


def test_a_rank_that_sleeps_is_named_and_nobody_waits_for_it(run):
    told = run("sleeps-0", LARGE, LARGE)
    assert {*told} == {1}, "the other one sleeps"
    assert (told[1]["status"], told[1]["retained"]) == ("baseline_only", [])
    assert "rank 0 said nothing for" in told[1]["warnings"][-1]


def test_ranks_of_which_one_decodes_are_planned_together(run, small):
    small_bytes, _ = small
    told = run("no_vae-1", small_bytes, LARGE)
    assert same(told, "status") == "committed"
    held = same(told, "retained")
    assert held
    assert {component for _, component, *_ in held} <= {"text_encoder", "transformer"}
