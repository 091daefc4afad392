"""Starts of a server: in the test's own process, or in processes that end before their time.

    settling_program.py     reads lines of JSON, each a start (see `Job`), and begins each at once

What a start comes to is appended to its file `told`, a line of JSON for each thing, before the
start goes on: so it can be read whenever the process ends. Its exit status is the last.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from errno import ENOSPC
from functools import wraps
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from pipeline_image import image_of

from residency.offload.cards import custom_card
from residency.offload.errors import ResidencyError
from residency.offload.simulated.card import SimulatedCard, driver_error
from residency.phases import limit as limits
from residency.phases.diffusers.families import Family, find_family
from residency.phases.diffusers.pipeline import DiffusersPipeline
from residency.phases.diffusers.undo import Residue
from residency.phases.limit import Limit
from residency.phases.shape import Shape
from residency.planner import Options, Settlement, settle
from residency.planner.journal.journal import Journal
from residency.planner.verdict import Event, Step

LIVES_S = 120
"""No start lives longer, whatever becomes of the test."""
CALLS = 40
"""Fewer than it takes to apply a candidate, or to roll it back."""
SHAPE = "32x32:tokens=16,guidance=1"


@dataclass(frozen=True)
class Job:
    told: str
    journal: str | None = None
    mode: str = "verify"
    appends: int = 0
    """At so many records, counted from 1, something happens."""
    where: str = "after"
    """The process is killed `before` the record is written, in the middle of it (`torn`), `after`
    it is durable, at the first `allocation` behind it, or some `calls` of functions later.
    `sigint`: there is one before. `full`: the disk is, in the middle of it and from then on."""
    allocation: int = 0
    """The process is killed at so many allocations, counted from 1."""
    refuted: bool = False
    """The first candidate fails in its sweep."""
    act: str = ""
    """What happens in the first sweep of a candidate: see `Acts`."""
    at: str = ""
    """The step, by name, at whose first event there is a SIGINT."""
    limit_s: float | None = None
    """What is left from the first candidate on."""
    options: dict[str, Any] = field(default_factory=dict)
    serving: bool = False
    """It serves until it is killed."""
    resettles: bool = False
    """Once it has served, it is settled again and serves once more."""
    waits_at: str = ""
    """The step, by name, at whose first event it waits to be killed."""


def family() -> Family:
    """Of few layers, so that a start is short."""
    given = find_family("qwen-image-2.1", tiny=True).model_dump(by_alias=True)
    components = {name: each["config"] for name, each in given["components"].items()}
    components["text_encoder"]["text_config"]["num_hidden_layers"] = 2
    components["text_encoder"]["vision_config"] |= {"depth": 1, "deepstack_visual_indexes": []}
    components["transformer"]["num_layers"] = 1
    components["vae"] |= {"dim_mult": [1], "temperal_downsample": []}
    given["request"] = {"width": 32, "height": 32, "tokens": 16, "steps": 2, "guidance": 1.0}
    return Family(**given)


@dataclass
class Start:
    job: Job
    pipeline: DiffusersPipeline
    limit: Limit = field(default_factory=Limit)
    stack: ExitStack = field(default_factory=ExitStack)
    """What is patched, until the start is over."""
    has_tried: bool = False
    is_armed: bool = False
    appended: int = 0
    allocations: int = 0
    seen: set[Step] = field(default_factory=set)

    def tell(self, what: str, **said: object) -> None:
        line = json.dumps({"what": what, "at": time.monotonic(), **said}) + "\n"
        file = os.open(self.job.told, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.write(file, line.encode())
        os.close(file)

    def run(self) -> None:
        card = SimulatedCard(custom_card(1 << 30), allocator="exact", context_bytes=0)
        before = image_of(self.pipeline.pipeline)
        with self.stack, card:
            self._patch(card)
            self.tell("begun", pid=os.getpid())
            try:
                settlement = settle(
                    self.pipeline,
                    device=card,
                    envelope=[SHAPE],
                    journal=self.job.journal,
                    mode=self.job.mode,
                    options=Options(margin_bytes=0, **self._options()),
                    limit=self.limit,
                    listen=lambda event: self._listen(event, card),
                )
            except (ResidencyError, KeyboardInterrupt) as error:
                said = error.message if isinstance(error, ResidencyError) else ""
                self.tell("raised", error=type(error).__name__, message=said)
            else:
                self.is_armed = False
                self.limit.cancel()  # which is none of the requests'
                self.tell(
                    "settled",
                    status=settlement.status,
                    verified=settlement.verified,
                    warnings=settlement.warnings,
                    verdicts=[each.verdict for each in settlement.plan.attempts],
                    retained=sorted(
                        use.component for use in settlement.plan.uses if use.retain_resident_layers
                    ),
                    allocations=self.allocations,
                )
                self._serve(settlement, card)
                while self.job.serving:
                    self._serve(settlement, card)
                if self.job.resettles:
                    settlement.resettle()
                    self._serve(settlement, card)
                settlement.close()
            self.tell(
                "put back",
                differences=image_of(self.pipeline.pipeline).differences(before),
                allocated=card.read().allocated_bytes,
            )

    def _options(self) -> dict[str, Any]:
        paths = {"lock_folder", "plan"}
        return {
            name: Path(value) if name in paths else value
            for name, value in self.job.options.items()
        }

    def _serve(self, settlement: Settlement, card: SimulatedCard) -> None:
        shape = Shape.parse(SHAPE)
        residue = Residue(self.pipeline)  # what a request leaves on a pipeline is its own
        try:
            image = settlement.serve(shape, lambda: self.pipeline.run(shape).value.cpu())
        finally:
            residue.restore()
        digest = sha256(image.numpy().tobytes()).hexdigest()
        self.tell("served", image=digest, allocated=card.read().allocated_bytes)

    def _listen(self, event: Event, card: SimulatedCard) -> None:
        is_first = event.step not in self.seen
        self.seen.add(event.step)
        self.tell("event", step=event.step.name, doing=event.doing)
        if event.step in (Step.TRYING, Step.VERIFYING) and not self.has_tried:
            self.has_tried = self.is_armed = True
            if self.job.limit_s is not None:
                self.stack.enter_context(self.limit.within(self.job.limit_s))
            if self.job.refuted:
                card.faults.at_copy(1, driver_error)
        if event.step.name == self.job.at and is_first:
            signal.raise_signal(signal.SIGINT)
        if event.step.name == self.job.waits_at and is_first:
            self.tell("waiting", pid=os.getpid())
            time.sleep(LIVES_S)

    def _patch(self, card: SimulatedCard) -> None:
        """What is killed, and what hangs, while this start lasts."""
        # Where the tests were started with `nohup`, SIGINT is ignored.
        self.stack.callback(
            signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler)
        )
        self._replace(Journal, "append", self._appending(Journal.append))
        self._replace(card, "allocate", self._allocating(card.allocate))
        if not self.job.act:
            return
        parts = self.pipeline.pipeline.components
        if self.job.act == "hang_in_component":
            owner, name = type(parts["transformer"]), "forward"
        else:
            owner, name = type(parts["scheduler"]), "step"
        method, act = getattr(owner, name), getattr(Acts(self), self.job.act)

        @wraps(method)
        def acting(*given: object, **named: object) -> object:
            if self.is_armed:
                self.is_armed = False
                self.tell("acting")
                act(lambda: method(*given, **named))
            return method(*given, **named)

        self._replace(owner, name, acting)

    def _replace(self, owner: object, name: str, replaced: object) -> None:
        self.stack.enter_context(patch.object(owner, name, replaced))

    def _appending(self, append: Callable[..., None]) -> Callable[..., None]:
        def appending(journal: Journal, record: object) -> None:
            self.appended += 1
            where = self.job.where if self.appended == self.job.appends else ""
            if where == "before":
                _die()
            if where == "sigint":
                signal.raise_signal(signal.SIGINT)
            if where in ("torn", "full"):
                self._tear(full=where == "full")
            append(journal, record)
            self.tell("appended", line=journal.path.read_text().splitlines()[-1])
            if where == "after":
                _die()
            if where == "calls":
                left = iter(range(CALLS))
                sys.setprofile(lambda *event: None if next(left, None) is not None else _die())

        return appending

    def _allocating(
        self, allocate: Callable[[int], Callable[[], None]]
    ) -> Callable[[int], Callable[[], None]]:
        def allocating(nbytes: int) -> Callable[[], None]:
            self.allocations += 1
            is_behind = self.job.where == "allocation" and self.appended == self.job.appends
            if is_behind or self.allocations == self.job.allocation:
                _die()
            return allocate(nbytes)

        return allocating

    def _tear(self, *, full: bool) -> None:
        write = os.write
        torn_file: int | None = None

        def torn(file: int, data: bytes) -> int:
            nonlocal torn_file
            inode = os.fstat(file).st_ino
            if inode == torn_file:
                raise OSError(ENOSPC, os.strerror(ENOSPC))
            if torn_file is not None or not bytes(data[:20]).startswith(b'{"format_version":'):
                return write(file, data)
            written = write(file, bytes(data)[: len(data) // 2])
            if not full:
                _die()
            torn_file = inode
            return written

        self._replace(os, "write", torn)


@dataclass
class Acts:
    """Each is given what would be done. Those that return let it be done."""

    start: Start

    def sigint(self, method: Callable[[], object]) -> None:
        signal.raise_signal(signal.SIGINT)

    def sigterm(self, method: Callable[[], object]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def sigterm_handled(self, method: Callable[[], object]) -> None:
        """As servers do it that want to end in good order."""
        signal.signal(signal.SIGTERM, lambda number, frame: self.start.limit.cancel())
        os.kill(os.getpid(), signal.SIGTERM)

    def hang(self, method: Callable[[], object]) -> None:
        """In Python, where no component is entered."""
        while True:
            time.sleep(0.01)

    def hang_stubbornly(self, method: Callable[[], object]) -> None:
        """In a loop that takes any error for one of its own."""
        limits.AGAIN_S = 0.1
        for _ in range(3):
            try:
                self.hang(method)
            except Exception:
                self.start.tell("ignored")
        self.hang(method)

    def hang_in_component(self, method: Callable[[], object]) -> None:
        while True:
            method()
            time.sleep(0.01)

    def hang_in_c(self, method: Callable[[], object]) -> None:
        time.sleep(10 * LIVES_S)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def supervise(job: Job, pipeline: DiffusersPipeline) -> None:
    """One start in a process of its own, and how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    start = Start(job, pipeline)
    pid = os.fork()
    if pid == 0:
        signal.alarm(LIVES_S)
        status = 1
        try:
            start.run()
            status = 0
        except BaseException:
            start.tell("broken", error=traceback.format_exc())
        finally:
            sys.stderr.flush()
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    start.tell("ended", status=os.waitstatus_to_exitcode(status))


def built() -> DiffusersPipeline:
    made = family()
    return DiffusersPipeline(made.build(), name=made.name, request=made.request)


def serve() -> None:
    pipeline = built()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        job = Job(**json.loads(line))
        if os.fork() == 0:
            try:
                supervise(job, pipeline)
            finally:
                os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    serve()
