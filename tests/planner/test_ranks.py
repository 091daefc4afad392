"""Ranks in processes of their own: they hear one another, and all end when one doesn't."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from residency.offload.errors import InputError
from residency.planner.ranks.rendezvous import meet

long = pytest.mark.long
PROGRAM = Path(__file__).with_name("rank_program.py")
ENDS_S = 600
"""A step that has no end would take longer."""

Told = dict[int, dict[str, Any]]
Run = Callable[..., Told]


def read(folder: Path) -> Told:
    """What each rank that lived came to."""
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}


def alone() -> dict[str, str]:
    """The environment, without that of a launcher."""
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: text for name, text in os.environ.items() if name not in ours}


@pytest.fixture(scope="module")
def program() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-W", "error", str(PROGRAM)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=alone(),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        kill_all(process)


def kill_all(process: subprocess.Popen[str]) -> None:
    """With all that it has started."""
    with suppress(ProcessLookupError):  # where all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


@pytest.fixture
def run(program: subprocess.Popen[str], tmp_path: Path) -> Run:
    def run(scenario: str, ranks: int, world_size: int | None = None) -> Told:
        assert program.stdin is not None
        assert program.stdout is not None
        overtime = threading.Timer(ENDS_S, os.killpg, (program.pid, signal.SIGKILL))
        overtime.start()
        try:
            program.stdin.write(f"{scenario} {tmp_path} {ranks} {world_size or ranks}\n")
            program.stdin.flush()
            assert program.stdout.readline() == "done\n", f"{scenario} had no end in {ENDS_S} s"
        finally:
            overtime.cancel()
        return read(tmp_path)

    return run


def all_end(told: Told, at_fault: int, message: str) -> None:
    """Every rank that lived, but the one at fault, names it."""
    assert told
    for rank, each in told.items():
        if rank != at_fault or "raised" not in each:
            assert message in each["error"], each
            assert each["ranks"] == [at_fault]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=long)])
def test_every_rank_hears_all_in_order_however_late_they_come(run: Run, ranks: int) -> None:
    told = run("slow", ranks)
    heard = [*(rank * 10 for rank in range(ranks)), *range(ranks)]
    assert {rank: each.get("heard") for rank, each in told.items()} == dict.fromkeys(
        range(ranks), heard
    ), told
    assert all(each["world"] == each["local"] == ranks for each in told.values())


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=long)])
def test_all_learn_which_rank_failed_and_why(run: Run, ranks: int) -> None:
    told = run("raises-1", ranks)
    assert told[1]["raised"] == "ValueError: the copy engine is on fire"
    assert len(told) == ranks
    all_end(told, 1, "rank 1 failed after `applied`: ValueError: the copy engine is on fire")


def test_a_failure_of_the_rank_that_holds_the_store_is_told_before_it_leaves(run: Run) -> None:
    all_end(run("raises-0", 3), 0, "rank 0 failed after `applied`: ValueError")


def test_a_rank_that_sleeps_is_named_and_learns_of_it_when_it_wakes_up(run: Run) -> None:
    told = run("sleeps-1", 3)
    assert len(told) == 3
    all_end(told, 1, "rank 1 said nothing for 2 s at `judged`, last seen after `applied`")
    assert told[0]["hint"] == (
        "the log of that rank says why; if the step takes so long, give it more time"
    )


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=long)])
def test_a_rank_that_is_killed_is_named_long_before_its_time_is_up(run: Run, ranks: int) -> None:
    told = run("dies-1", ranks)
    assert {*told} == {*range(ranks)} - {1}
    all_end(told, 1, "rank 1 gave no sign of life for 3 s, last seen after `applied`")


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=long), 3])
def test_without_the_rank_that_holds_the_store_the_others_end(run: Run, ranks: int) -> None:
    told = run("dies-0", ranks)
    assert {*told} == {*range(1, ranks)}
    all_end(told, 0, "rank 0, which holds what ranks say, doesn't answer")


def test_a_store_that_is_there_and_never_answers_holds_nobody_up(run: Run) -> None:
    told = run("stops-0", 3)
    assert {*told} == {1, 2}
    all_end(told, 0, "rank 0, which holds what ranks say, doesn't answer")


def test_a_rank_that_leaves_early_is_not_waited_for(run: Run) -> None:
    told = run("leaves-1", 2)
    assert told[0]["error"] == "rank 1 left after `applied`, and rank 0 is at `judged`"
    assert told[1]["heard"] == [0, 10]


def test_ranks_that_are_at_different_steps_are_told(run: Run) -> None:
    all_end(run("differs-1", 2), 1, "rank 1 is at `swept` where rank 0 is at `judged`")


def test_what_is_too_much_for_the_store_is_not_sent(run: Run) -> None:
    told = run("fills-1", 2)
    assert "at most 8388608 can be" in told[1]["raised"]
    all_end(told, 1, "rank 1 failed after `applied`: InputError: rank 1 has 9786")


def test_a_rank_that_never_comes_is_named(run: Run) -> None:
    told = run("absent", 2, 3)
    assert {*told} == {0, 1}
    all_end(told, 2, "rank 2 said nothing for 3 s at `meeting`, last seen never")


def test_ranks_can_meet_again_when_one_has_failed(run: Run) -> None:
    assert [each.get("again") for each in run("again", 2).values()] == [[[0, 1]] * 6] * 2


def test_in_a_server_the_ranks_are_those_of_its_group(run: Run) -> None:
    told = run("server", 3)
    assert [each.get("heard") for each in told.values()] == [[0, 10, 20, 0, 1, 2]] * 3, told
    assert [each["reduced"] for each in told.values()] == [3, 3, 3]


def test_some_ranks_of_a_server_agree_without_the_others(run: Run) -> None:
    told = run("subgroup", 3)
    assert {rank: each.get("within") for rank, each in told.items()} == {0: None, 1: 0, 2: 1}, told
    assert all(told[rank]["heard"] == [0, 10, 0, 1] for rank in (1, 2))


def test_a_rank_of_a_server_that_never_comes_is_named(run: Run) -> None:
    told = run("server-absent", 3)
    assert told.pop(2) == {"rank": 2}
    all_end(told, 2, "rank 2 didn't come within 3 s")


def test_a_server_can_start_its_own_group_afterwards(run: Run) -> None:
    told = run("after", 3)
    assert [(each.get("error"), each["reduced"]) for each in told.values()] == [(None, 3)] * 3


@long
@pytest.mark.parametrize(("ranks", "scenario"), [(2, "slow"), (4, "raises-1")])
def test_ranks_of_torchrun_agree(tmp_path: Path, ranks: int, scenario: str) -> None:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(ranks), str(PROGRAM), scenario, str(tmp_path)),
        ],
        env=alone() | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        assert process.wait(ENDS_S) == 0
    finally:
        kill_all(process)
    told = read(tmp_path)
    assert len(told) == ranks
    if scenario == "slow":
        assert [each["heard"] for each in told.values()] == [[0, 10, 0, 1]] * 2
    else:
        all_end(told, 1, "rank 1 failed after `applied`: ValueError")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"WORLD_SIZE": "2", "MASTER_PORT": "29500"}, "RANK is None"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "MASTER_PORT is None"),
        ({"WORLD_SIZE": "2", "RANK": "1", "MASTER_PORT": "29500"}, "MASTER_ADDR None"),
        (
            {"WORLD_SIZE": "2", "RANK": "2", "MASTER_PORT": "29500", "MASTER_ADDR": "a"},
            "RANK is 2, WORLD_SIZE 2",
        ),
    ],
)
def test_an_environment_that_no_launcher_makes_is_refused(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], message: str
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(InputError, match=message):
        meet()


def test_a_port_that_is_taken_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        for name, text in (environment | {"MASTER_PORT": port}).items():
            monkeypatch.setenv(name, text)
        with pytest.raises(InputError, match=rf"rank 0 can't listen at 127.0.0.1:{port}"):
            meet()
