"""A rank that settles, for tests of how ranks settle together.

    torchrun settling_ranks_program.py SCENARIO FOLDER BYTES,...   one rank, started by torchrun
    settling_ranks_program.py                                      reads lines of SCENARIO FOLDER
                                                                   BYTES,... and starts the ranks

BYTES are the capacities of the ranks' cards. Each rank that lives writes what it came to.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
from settling_program import SHAPE, built

from residency.offload.cards import custom_card
from residency.offload.simulated.card import SimulatedCard
from residency.phases.diffusers.pipeline import DiffusersPipeline
from residency.phases.diffusers.undo import Residue
from residency.phases.shape import Shape
from residency.planner import Options, settle
from residency.planner.plan import Plan
from residency.planner.ranks.rendezvous import meet
from residency.planner.verdict import Step

DEADLINE_S = 20.0
SILENCE_S = 5.0
PATIENCE_S = 30.0
SLEPT_S = 3.0
"""The patience where others wait for one that sleeps."""
SLEEPS_S = 600.0


def come_to(scenario: str, capacity_bytes: int, pipeline: DiffusersPipeline) -> dict[str, object]:
    rank = int(os.environ["RANK"])
    what, _, of = scenario.partition("-")
    is_chosen = of == str(rank)
    if what == "no_vae" and is_chosen:
        decode_nothing(pipeline.pipeline)
    card = SimulatedCard(custom_card(capacity_bytes), allocator="exact", context_bytes=0)

    tries = []

    def listen(event):
        if event.step is not Step.TRYING or not is_chosen:
            return
        tries.append(event)
        if what == "oom" and len(tries) == 1:
            card.faults.at_allocation(200)
        if what == "raises":
            raise ValueError("the copy engine is on fire")
        if what == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "sleeps":
            time.sleep(SLEEPS_S)

    with card:
        agreement = meet(deadline_s=DEADLINE_S, silence_s=SILENCE_S)
        with agreement:
            settlement = settle(
                pipeline,
                device=card,
                envelope=[SHAPE],
                options=Options(
                    margin_bytes=0,
                    attempts=3,
                    least_patience_s=SLEPT_S if what == "sleeps" else PATIENCE_S,
                ),
                listen=listen,
                agreement=agreement,
            )
        residue = Residue(pipeline)  # what a request leaves on a pipeline is its own
        with settlement.guard(SHAPE):
            image = pipeline.run(Shape.parse(SHAPE)).value.cpu()
        found = {
            "status": settlement.status,
            "retained": retained(settlement.plan),
            "verdicts": [attempt.verdict for attempt in settlement.plan.attempts],
            "details": [attempt.detail for attempt in settlement.plan.attempts],
            "warnings": settlement.warnings,
            "served": list(image.shape),
        }
        del image
        residue.restore()
        settlement.close()
        found["left_bytes"] = card.read().allocated_bytes
    return found


def retained(plan: Plan) -> list[list[object]]:
    return [
        [use.phase, use.component, *use.retained_set]
        for use in plan.schedule.uses
        if use.retain_resident_layers
    ]


def decode_nothing(pipe) -> None:
    """As on a rank whose latents another one decodes."""
    pipe.vae.decode = lambda latents, **asked: (torch.zeros(1, 3, 1, 32, 32),)


def main(scenario: str, folder: Path, capacities: list[int], pipeline: DiffusersPipeline) -> None:
    rank = int(os.environ["RANK"])
    try:
        found = come_to(scenario, capacities[rank], pipeline)
    except Exception as error:
        found = {"raised": f"{type(error).__name__}: {error}"}
    (folder / f"{rank}.json").write_text(json.dumps(found))


def start(scenario: str, folder: Path, capacities: list[int], pipeline: DiffusersPipeline) -> None:
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
                main(scenario, folder, capacities, pipeline)
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
    torch.set_grad_enabled(False)
    ours = built()
    if len(sys.argv) > 1:
        main(*arguments(sys.argv[1:]), ours)
    else:
        gc.collect()
        gc.freeze()
        for line in sys.stdin:
            start(*arguments(line.split()), ours)
            print("done", flush=True)
