"""A rank that settles, for tests of how ranks settle together.

    torchrun settling_ranks_program.py SCENARIO FOLDER BYTES,...   one rank, started by torchrun
    settling_ranks_program.py                                      reads lines of SCENARIO FOLDER
                                                                   BYTES,... and starts the ranks

BYTES are the capacities of the ranks' cards. Each rank that lives writes what it came to.
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
from bench_card import bench, tiny

from residency.planner import Options, settle
from residency.planner.event import Step
from residency.planner.ranks.rendezvous import meet

FAMILY = "qwen-image-2.1"
DEADLINE_S = 20.0
SILENCE_S = 5.0
SLEEPS_S = 600.0


def come_to(scenario: str, capacity_bytes: int) -> dict[str, object]:
    rank = int(os.environ["RANK"])
    what, _, of = scenario.partition("-")
    is_chosen = of == str(rank)
    pipeline = tiny(FAMILY)
    if what == "no_vae" and is_chosen:
        decode_nothing(pipeline.pipeline)
    with bench(FAMILY, capacity_bytes=capacity_bytes, pipeline=pipeline) as test:

        def listen(event):
            if event.step is not Step.TRYING or not is_chosen:
                return
            if what == "oom":
                test.card.faults.at_allocation(200)
            if what == "raises":
                raise ValueError("the copy engine is on fire")
            if what == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "sleeps":
                time.sleep(SLEEPS_S)

        agreement = meet(deadline_s=DEADLINE_S, silence_s=SILENCE_S)
        with agreement:
            settlement = settle(
                test.pipeline,
                device=test.card,
                envelope=[test.shape],
                options=Options(margin_bytes=0, attempts=3, least_patience_s=1.0),
                listen=listen,
                agreement=agreement,
            )
        with settlement.guard(test.shape):
            image = test.pipeline.run(test.shape).value.cpu()
        found = {
            "status": settlement.status,
            "retained": [
                [use.phase, use.component, *use.retained_set]
                for use in settlement.plan.uses
                if use.retain_resident_layers
            ],
            "verdicts": [attempt.verdict for attempt in settlement.plan.attempts],
            "details": [attempt.detail for attempt in settlement.plan.attempts],
            "warnings": settlement.warnings,
            "served": list(image.shape),
        }
        del image
        settlement.close()
        found["left_bytes"] = test.card.read().allocated_bytes
    return found


def decode_nothing(pipe) -> None:
    """As on a rank whose latents another one decodes."""
    pipe.vae.decode = lambda latents, **asked: (torch.zeros(1, 3, 1, 64, 64),)


def main(scenario: str, folder: Path, capacities: list[int]) -> None:
    rank = int(os.environ["RANK"])
    began = time.monotonic()
    try:
        found = come_to(scenario, capacities[rank])
    except Exception as error:
        found = {"raised": f"{type(error).__name__}: {error}"}
    found["seconds"] = time.monotonic() - began
    (folder / f"{rank}.json").write_text(json.dumps(found))


def start(scenario: str, folder: Path, capacities: list[int]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(len(capacities)):
        child = os.fork()
        if child == 0:
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(len(capacities)),
                "LOCAL_WORLD_SIZE": str(len(capacities)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            try:
                main(scenario, folder, capacities)
            finally:
                os._exit(0)
        children.append(child)
    what, _, of = scenario.partition("-")
    sleeper = children.pop(int(of)) if what == "sleeps" else None
    for child in children:
        os.waitpid(child, 0)
    if sleeper is not None:
        os.kill(sleeper, signal.SIGKILL)
        os.waitpid(sleeper, 0)


def arguments(words: list[str]) -> tuple[str, Path, list[int]]:
    scenario, folder, capacities = words
    return scenario, Path(folder), [int(each) for each in capacities.split(",")]


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        main(*arguments(sys.argv[1:]))
    else:
        for line in sys.stdin:
            start(*arguments(line.split()))
            print("done", flush=True)
