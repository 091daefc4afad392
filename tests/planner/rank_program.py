"""A rank that goes through steps, for tests of how ranks agree.

    torchrun rank_program.py SCENARIO FOLDER       one rank, which torchrun has started
    rank_program.py                                reads lines of SCENARIO FOLDER RANKS WORLD, and
                                                   for each starts ranks 0 to RANKS - 1 of WORLD

Each rank that lives writes what it came to into FOLDER.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from residency.offload.errors import RankError
from residency.planner.ranks.agreement import Agreement
from residency.planner.ranks.rendezvous import meet

SAID_BYTES = 400_000
LIVES_S = 3.0
"""Past it a rank without a beat is dead, where a scenario is about that."""
PATIENT_S = 40.0


def steps(agreement: Agreement, scenario: str) -> dict[str, object]:
    """What this rank heard. The scenario says what happens, and to which rank."""
    rank = agreement.rank
    what, _, of = scenario.partition("-")
    is_chosen = of == str(rank)
    heard = agreement.exchange("measured", {"rank": rank, "text": str(rank) * SAID_BYTES})
    assert [each["text"] for each in heard] == [
        str(each) * SAID_BYTES for each in range(agreement.world_size)
    ]
    applied = agreement.exchange("applied", rank * 10)
    if is_chosen and what == "raises":
        raise ValueError("the copy engine is on fire")
    if is_chosen and what == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if is_chosen and what == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    if is_chosen and what == "leaves":
        return {"heard": [*applied]}
    if is_chosen and what == "sleeps":
        time.sleep(4)
    if is_chosen and what == "fills":
        agreement.exchange("judged", "x" * (7 << 20))
    step = "swept" if is_chosen and what == "differs" else "judged"
    if what == "slow":
        time.sleep(rank * 0.5)
    judged = agreement.exchange(step, rank, deadline_s=2 if what == "sleeps" else None)
    return {"heard": [*applied, *judged]}


def reduced(group: dist.ProcessGroup | None = None) -> int:
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return int(total)


def run(scenario: str) -> dict[str, object]:
    group = None
    if scenario in ("server", "server-absent", "subgroup"):
        dist.init_process_group("gloo")
        if scenario == "server-absent" and dist.get_rank() == 2:
            time.sleep(5)  # while the others wait
            return {"rank": 2}
        if scenario == "subgroup":
            group = dist.new_group([1, 2])
            if dist.get_rank() == 0:
                reduced()
                return {"rank": 0, "world": 0}
    brief = scenario.split("-")[0] in ("dies", "stops")
    absent = scenario.endswith("absent")
    told: dict[str, object] = {"rank": int(os.environ["RANK"])}
    try:
        with meet(
            group,
            rendezvous_s=3 if absent else 60,
            deadline_s=PATIENT_S,
            silence_s=LIVES_S if brief else PATIENT_S,
        ) as agreement:
            told |= {"world": agreement.world_size, "local": agreement.local_ranks}
            told |= {"within": agreement.rank}
            told |= steps(agreement, scenario)
            if scenario == "again":
                agreement.fail(ValueError("it is over"))
                with meet(rendezvous_s=60) as second:
                    told["again"] = [second.exchange("measured", second.rank) for _ in range(6)]
    except RankError as error:
        told |= {"error": error.message, "ranks": error.ranks, "hint": error.hint}
    except Exception as error:
        told["raised"] = f"{type(error).__name__}: {error}"
    if scenario == "after":
        dist.init_process_group("gloo")
    if dist.is_initialized() and not absent:
        told["reduced"] = reduced()
        dist.destroy_process_group()
    return told


def one_rank(scenario: str, folder: Path) -> None:
    told = run(scenario)
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(told))


def started(scenario: str, folder: Path, ranks: int, world_size: int) -> list[int]:
    """Process ids. Torch is imported already, so that they start at once."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ |= {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            os.environ["RANK"] = str(rank)
            one_rank(scenario, folder)
            sys.stderr.flush()
            os._exit(0)
        pids.append(pid)
    return pids


def serve() -> None:
    for line in sys.stdin:
        scenario, folder, ranks, world_size = line.split()
        pids = started(scenario, Path(folder), int(ranks), int(world_size))
        what, _, of = scenario.partition("-")
        stopped = pids.pop(int(of)) if what == "stops" else None
        for pid in pids:
            os.waitpid(pid, 0)
        if stopped is not None:
            os.kill(stopped, signal.SIGKILL)
            os.waitpid(stopped, 0)
        print("done", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        one_rank(sys.argv[1], Path(sys.argv[2]))
    else:
        serve()
