"""The loop: measure, propose, apply, validate, and commit or roll back and propose again."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch

from ..offload.device import Device
from ..offload.errors import JournalError, RankError
from ..offload.frames import cut_off
from ..phases.diffusers import DiffusersPipeline
from ..phases.headroom import Headroom
from ..phases.limit import Limit
from ..phases.warmup import REQUESTS, Failure
from .candidate import Candidate
from .choosing.choice import Chosen, choose
from .choosing.instance import Choice, Instance
from .choosing.joint import Proposal, joined
from .choosing.stability import kept
from .choosing.unfit import Unfit
from .event import Event, Listener, Step, ignore
from .exposure import exposures, timed
from .installation import Installation
from .journal.record import record_of
from .measured import Measured
from .outcome import Outcome, Try
from .plan import Verdict
from .proof import Prover
from .settings import Settings
from .streaming import Streaming, operations
from .transaction import Transaction
from .validation import Judgement

LOAD = "load"
"""Where a failure is said to be that came before any phase: resident weights didn't fit."""

UNLIMITED_BYTES = 1 << 50


def run_loop(
    pipeline: DiffusersPipeline,
    device: Device,
    settings: Settings,
    *,
    listen: Listener = ignore,
) -> Outcome:
    """Run the loop on `device`; the pipeline's components have to be on the host.

    Each refutation excludes what was refuted and all that is at least as large, so the loop ends.
    After an error that ends it, the pipeline is as it was given.
    Raises InputError where the pipeline refuses a shape, OffloadError where a component can't be
    placed as declared, StoppedError where the limit ends it before the baseline is measured,
    RollbackError where an undo failed.
    """
    shapes = pipeline.largest(settings.shapes)
    installation = Installation(
        pipeline, device, settings.declarations, shapes, prefetch=settings.prefetch
    )
    installation.conductor.limit = settings.limit
    transaction = installation.transaction()
    outcome = Outcome(installation, transaction)
    loop = _Loop(outcome, settings, listen)
    try:
        outcome.failure = loop.agreed("placed", loop.place() or loop.discover())
        if outcome.failure is None and not loop.verify():
            outcome.failure = loop.agreed("measured", loop.measure())
            if outcome.failure is None and not settings.measure_only:
                loop.propose()
    except (RankError, JournalError) as error:
        cut_off(error)
        settings.agreement.fail(error)
        loop.give_up(error)
    except BaseException as error:
        cut_off(error)
        settings.agreement.fail(error)
        transaction.rollback()
        raise
    if outcome.failure is not None:
        transaction.rollback()
    installation.conductor.limit = Limit()  # the given one isn't of the requests that follow
    return outcome


@dataclass(slots=True)
class _Loop:
    outcome: Outcome
    settings: Settings
    listen: Listener
    prover: Prover = field(init=False)

    def __post_init__(self) -> None:
        self.prover = Prover(self.outcome.installation, self.settings, self.tell)

    def agreed(self, step: str, failure: Failure | None) -> Failure | None:
        """`failure`, or that of another rank: all fail where one does. Raises RankError."""
        agreement = self.settings.agreement
        said = agreement.exchange(step, None if failure is None else failure.detail)
        if failure is not None:
            return failure
        for rank, detail in enumerate(said):
            if detail is not None:
                return Failure(None, None, False, None, f"rank {rank}: {detail}")
        return None

    def give_up(self, error: RankError | JournalError) -> None:
        """Another rank is gone or failed, or a try can't be written down: the baseline is what
        stays, where it runs."""
        outcome = self.outcome
        outcome.stopped = error.message
        if outcome.planned is None and outcome.failure is None:
            outcome.failure = Failure(None, None, False, None, error.message)
        self.tell(Step.BASELINE, f"nothing is retained: {error.message}")

    def place(self) -> Failure | None:
        self.tell(Step.PLACING, "placing components")
        try:
            self.outcome.transaction.apply()
        except torch.OutOfMemoryError as error:
            return Failure.of(error, LOAD, None)
        return None

    def discover(self) -> Failure | None:
        self.tell(Step.DISCOVERING, "finding the phases")
        began = time.monotonic()
        failure = self.outcome.installation.warmup.discover()
        self.prover.sweep_s = REQUESTS * (time.monotonic() - began)
        return failure

    def measure(self) -> Failure | None:
        outcome, settings = self.outcome, self.settings
        installation = outcome.installation
        self.tell(Step.MEASURING, "measuring the baseline")
        began = time.monotonic()
        with self.prover.floor(), timed([*installation.placements.values()], installation.device):
            baseline = installation.warmup.sweep()
        self.prover.sweep_s = time.monotonic() - began
        if baseline.failure is not None:
            return baseline.failure
        outcome.baseline = outcome.planned = baseline
        reading = installation.device.read()
        self.prover.measured(baseline, reading)
        outcome.headrooms = tuple(
            Headroom(
                phase,
                run.asked,
                reading.total_bytes,
                reading.others_bytes,
                reading.context_bytes,
                run.peak_bytes(phase),
                settings.margin_bytes,
            )
            for run in baseline.runs
            for phase in installation.graph.phases
        )
        pricing = settings.pricing.exposed(exposures(baseline, settings.pricing.bytes_per_s))
        measured = outcome.measured = Measured(
            installation, baseline, outcome.headrooms, pricing, settings.sized
        )
        instance = measured.instance
        if settings.previous is not None:
            instance = measured.learnt(settings.previous.phases)
        for crashed in settings.crashed:
            if (choice := measured.recalled(crashed.uses)) is not None:
                instance = instance.without(choice)
        if outcome.tries and settings.verify is not None:
            choice = measured.recalled(settings.verify.uses)
            if choice is None:
                outcome.tries.clear()
            else:
                verified = replace(outcome.tries[0].candidate, choice=choice)
                outcome.tries[0] = replace(outcome.tries[0], candidate=verified)
                instance = instance.without(choice)
        outcome.instance = instance
        return None

    def verify(self) -> bool:
        """Sweep once what an earlier start committed. Whether it holds, and is committed again."""
        record = self.settings.verify
        agreement = self.settings.agreement
        if record is not None and record.key in {each.key for each in self.settings.crashed}:
            record = None
        keys = agreement.exchange("verifying", None if record is None else record.key)
        if record is None or {*keys} != {record.key}:
            return False
        self.tell(Step.VERIFYING, "verifying the plan that is known")
        uses = tuple(use.component_use() for use in record.uses)
        placements = self.outcome.installation.placements
        streaming = {
            use.component: Streaming(placements[use.component], use.prefetch, use.pinned)
            for use in record.uses
        }
        candidate = Candidate((), uses)
        try:
            return self._try(candidate, streaming)
        except (RankError, JournalError) as error:
            cut_off(error)
            agreement.fail(error)
            self.outcome.failure = self.measure()  # it is what stays
            raise

    def propose(self) -> None:
        outcome, settings, measured = self.outcome, self.settings, self.outcome.measured
        assert measured is not None
        explored = tried = 0
        start = measured.baseline
        is_over = False
        while tried < settings.attempts:
            instance = self._instance()
            proposal = Proposal(instance, measured.baseline, start, settings.limit.is_over)
            proposals = settings.agreement.exchange("proposing", proposal)
            is_over = any(each.is_over for each in proposals)
            if is_over:
                break
            chosen, is_baseline = self._chosen(proposals)
            outcome.chosen = chosen
            start = measured.baseline if chosen is None else chosen.choice
            if explored < settings.explore and len(proposals) == 1:
                explored += 1
                beyond = choose(self._unlimited(instance))
                if isinstance(beyond, Chosen) and beyond.choice != start:
                    if self._try_choice(beyond):
                        return
                    continue
                explored = settings.explore  # nothing is better than what fits
            if chosen is None or is_baseline:
                self.tell(Step.BASELINE, "nothing is retained")
                return
            if settings.propose_only:
                outcome.proposed = self._candidate(chosen.choice)
                return
            tried += 1
            if self._try_choice(chosen):
                return
        outcome.chosen = None
        if settings.attempts:
            used_up = "the time is" if is_over else f"{tried} attempts are"
            outcome.stopped = f"{used_up} used up"
        why = f", since {outcome.stopped}" if outcome.stopped else ""
        self.tell(Step.BASELINE, f"nothing is retained{why}")

    def _chosen(self, proposals: Sequence[Proposal]) -> tuple[Chosen | None, bool]:
        """This rank's share of the best choice for all, if anything fits; and whether that is
        what all are at."""
        agreement = self.settings.agreement
        joint = joined([each.instance for each in proposals])
        start = joint.together([each.start for each in proposals])
        # HiGHS may end at its time limit: what the first rank has found is what all take.
        found = agreement.exchange("chosen", choose(joint.instance, start=start))[0]
        if agreement.world_size == 1 and not self.outcome.tries:
            found = self._recalled(found) or found
        if isinstance(found, Unfit):
            return None, True
        shares = [joint.share(found.choice, rank) for rank in range(len(proposals))]
        is_baseline = shares == [each.baseline for each in proposals]
        return replace(found, choice=shares[agreement.rank]), is_baseline

    def _instance(self) -> Instance:
        """What is left to choose from, on the card as it is now: others may have grown."""
        instance = self.outcome.instance
        assert instance is not None
        with self.prover.floor() as now:
            pass
        return instance.shifted(-self.prover.grown_bytes(now))

    def _recalled(self, chosen: Chosen | Unfit) -> Chosen | None:
        """The choice of the last start, where it is to be kept instead of `chosen`."""
        known, measured = self.settings.previous, self.outcome.measured
        assert measured is not None
        previous = None if known is None else measured.recalled(known.uses)
        if known is None or previous is None or isinstance(chosen, Unfit):
            return None
        instance = measured.learnt(known.phases)
        choice = kept(instance, previous)
        if choice is None:
            return None
        return replace(
            chosen,
            choice=choice,
            seconds=instance.seconds(choice),
            held_bytes=instance.held_bytes(choice),
            host_bytes=instance.host_bytes(choice),
        )

    def _unlimited(self, instance: Instance) -> Instance:
        """The instance without the limits of the model, those that refutations taught aside."""
        measured = self.outcome.measured
        assert measured is not None
        places = tuple(
            now if now.room_bytes < given.room_bytes else replace(given, room_bytes=UNLIMITED_BYTES)
            for now, given in zip(instance.places, measured.instance.places, strict=True)
        )
        return replace(instance, places=places)

    def _candidate(self, choice: Choice) -> Candidate:
        measured = self.outcome.measured
        assert measured is not None
        return Candidate(choice, tuple(measured.uses(choice)))

    def _try_choice(self, chosen: Chosen) -> bool:
        """Apply, validate, and keep or undo. Whether it was kept."""
        outcome, measured = self.outcome, self.outcome.measured
        assert measured is not None
        candidate = self._candidate(chosen.choice)
        self.tell(Step.TRYING, f"trying {measured.describe(candidate.choice)}")
        streaming = {
            part.component: Streaming(part.placement, each.mode.prefetch, each.mode.pinned)
            for part, each in zip(measured.parts, candidate.choice, strict=True)
            if not part.stays
        }
        if self._try(candidate, streaming):
            outcome.chosen = chosen
            return True
        return False

    def _try(self, candidate: Candidate, streaming: Mapping[str, Streaming]) -> bool:
        outcome, settings = self.outcome, self.settings
        installation, measured = outcome.installation, outcome.measured
        declared = {name: installation.placements[name].resident_set for name in streaming}
        record = record_of(candidate.uses, streaming, declared)
        if record.key in {crashed.key for crashed in settings.crashed}:
            # Other ranks may not know, and wait for what this one says.
            self._joint_judgement(Judgement(Verdict.CRASH, detail="it ended an earlier process"))
            assert outcome.instance is not None
            outcome.instance = outcome.instance.without(candidate.choice)
            return False
        transaction = Transaction(
            installation.pipeline,
            installation.device,
            [*operations(installation, candidate, streaming, settings.pricing.host_budget_bytes)],
        )
        settings.log.intent(record)
        try:
            proof = self.prover.prove(transaction)
            judgement = self._joint_judgement(proof.judgement)
            settings.log.verdict(judgement)
            accepted = judgement.verdict is Verdict.ACCEPTED
            if accepted:
                settings.log.committed()
                settings.agreement.exchange("committed", None)
        except BaseException as error:
            cut_off(error)
            transaction.rollback()
            with suppress(JournalError):  # then the next start takes it for a crash: the safe side
                settings.log.rolled_back()
            raise
        shortage = shortfall = None
        if measured is not None:
            shortage = candidate.shortage(measured.instance)
            shortfall = measured.missing_bytes(candidate, judgement)
        outcome.tries.append(
            Try(candidate, shortage, judgement, shortfall, not accepted, proof.comparisons)
        )
        if accepted:
            outcome.planned, outcome.committed = proof.sweep, candidate
            self.tell(Step.COMMITTED, "committed")
            return True
        del proof
        transaction.rollback()
        settings.log.rolled_back()
        self.tell(Step.REFUTED, f"refuted: {judgement.verdict}")
        if measured is not None and judgement.rank is None:
            self._learn(measured, candidate, judgement)
        return False

    def _joint_judgement(self, mine: Judgement) -> Judgement:
        """Mine, unless only other ranks refuse. Raises RankError."""
        said = self.settings.agreement.exchange(
            "judged",
            (mine.verdict, mine.detail),
            deadline_s=self.prover.longest_s,
        )
        if mine.verdict is not Verdict.ACCEPTED:
            return mine
        for rank, (verdict, detail) in enumerate(said):
            if verdict is not Verdict.ACCEPTED:
                return Judgement(verdict, detail=f"rank {rank}: {detail}", rank=rank)
        return mine

    def _learn(self, measured: Measured, candidate: Candidate, judgement: Judgement) -> None:
        outcome = self.outcome
        assert outcome.instance is not None
        if judgement.verdict is Verdict.HOST_MEMORY:
            # Where the driver charges pins to the card, one that failed makes others fail.
            poisoned = self.outcome.installation.device.traits.pins_on_card
            less = 0 if poisoned else measured.instance.host_bytes(candidate.choice) - 1
            outcome.instance = replace(outcome.instance, host_budget_bytes=less)
        elif not judgement.neighbour_bytes:
            earlier = outcome.tries[:-1]
            again = any(each.judgement.verdict is Verdict.OOM for each in earlier)
            outcome.instance = measured.refuted(outcome.instance, candidate, judgement, again=again)

    def tell(self, step: Step, doing: str) -> None:
        self.listen(Event(step, doing))
