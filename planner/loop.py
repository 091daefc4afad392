"""The loop: measure, propose, apply, validate, and commit or roll back and propose again."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..offload.errors import JournalError, OffloadError, RankError
from ..offload.memory_errors import cut_off
from ..phases.graph import Headroom
from ..phases.host import REQUESTS, Failure, Host, Sweep
from ..phases.limit import Limit
from ..phases.schedule import Schedule
from .baseline import Baseline, exposures
from .choosing.choose import Chosen, choose, kept
from .choosing.joint import Proposal, joined
from .choosing.model import Choice, Instance, Shortage
from .choosing.unfit import Unfit
from .plan import Status
from .proof import Proof, Prover, Settings, Transaction
from .verdict import Comparison, Event, Judgement, Listener, Step, Verdict, ignore

UNLIMITED_BYTES = 1 << 50


@dataclass(frozen=True, slots=True)
class Try:
    """A candidate that was proved, and what came of it."""

    schedule: Schedule
    shortage: Shortage | None
    """What the model said was missing."""
    judgement: Judgement
    shortfall_bytes: int | None
    """What was missing where it failed: by the model, and at least what was seen."""
    rolled_back: bool
    comparisons: tuple[Comparison, ...] = ()
    """With the baseline's time; empty where the device has no clock, or it failed before."""


@dataclass(slots=True)
class Outcome:
    """What the loop came to. The host is open, with a schedule in effect, until `close`.

    `failure` is set where the baseline doesn't run; then the host is closed, and all but it is
    empty.
    """

    host: Host
    failure: Failure | None = None
    baseline: Baseline | None = None
    planned: Sweep | None = None
    """With what was committed applied; the baseline's where nothing was."""
    instance: Instance | None = None
    """What is left to choose from, after all refutations."""
    chosen: Chosen | None = None
    """The last choice: what was committed or proposed, or the baseline."""
    tries: list[Try] = field(default_factory=list)
    committed: Schedule | None = None
    proposed: Schedule | None = None
    """The best by the model, where nothing was to be applied."""
    stopped: str | None = None
    """Why no more was tried, where more could have been: the attempts or the time were used up."""

    @property
    def schedule(self) -> Schedule | None:
        """What is retained, or would be; None: nothing."""
        return self.committed or self.proposed

    @property
    def status(self) -> Status:
        if self.failure is not None:
            return Status.INFEASIBLE
        if self.proposed is not None:
            return Status.PROPOSED
        return Status.BASELINE_ONLY if self.committed is None else Status.COMMITTED

    @property
    def headrooms(self) -> tuple[Headroom, ...]:
        """Of each phase at each shape; empty where the baseline wasn't measured."""
        return () if self.baseline is None else self.baseline.headrooms

    def close(self) -> None:
        """Put the pipeline back as it was given. Raises RollbackError."""
        self.host.close()

    def resume(self, schedule: Schedule) -> None:
        """After `close`, as it was before it, with `schedule` in effect. Raises OffloadError where
        not even the baseline comes up any more."""
        failure = self.host.open()
        if failure is not None:
            self.host.close()
            raise OffloadError(
                f"what was served before doesn't come up any more: {failure.detail}",
                hint="settle again when there is room",
            )
        Transaction(self.host, schedule).apply()


def run_loop(host: Host, settings: Settings, *, listen: Listener = ignore) -> Outcome:
    """Open the host and run the loop on it.

    Each refutation excludes what was refuted and all that is at least as large, so the loop ends.
    After an error that ends it, the host is closed.
    Raises InputError where the pipeline refuses a shape, OffloadError where a component can't be
    placed as declared, StoppedError where the limit ends it before the baseline is measured,
    RollbackError where an undo failed.
    """
    host.limit = settings.limit
    outcome = Outcome(host)
    search = _Search(outcome, settings, listen)
    try:
        if search.opens():
            for schedule in search.schedules():
                proof = search.prover.prove(schedule)
                if search.ends_with(schedule, proof):
                    break
    except (RankError, JournalError) as error:
        cut_off(error)
        settings.agreement.fail(error)
        search.give_up(error)
    except BaseException as error:
        cut_off(error)
        settings.agreement.fail(error)
        host.close()
        raise
    if outcome.failure is not None:
        host.close()
    host.limit = Limit()  # the given one isn't of the requests that follow
    return outcome


@dataclass(slots=True)
class _Search:
    outcome: Outcome
    settings: Settings
    listen: Listener
    prover: Prover = field(init=False)
    tried: int = 0
    explored: int = 0
    is_verifying: bool = False
    trying: Chosen | None = None
    """What the schedule that is being proved was made from."""
    start: Choice | None = None
    """Where the search for the next one begins."""

    def __post_init__(self) -> None:
        self.prover = Prover(self.outcome.host, self.settings, self.tell)

    def tell(self, step: Step, doing: str) -> None:
        self.listen(Event(step, doing))

    def agreed(self, step: str, failure: Failure | None) -> bool:
        """Whether no rank has failed: all fail where one does. Raises RankError."""
        agreement, outcome = self.settings.agreement, self.outcome
        said = agreement.exchange(step, None if failure is None else failure.detail)
        outcome.failure = failure
        for rank, detail in enumerate(said):
            if outcome.failure is None and detail is not None:
                outcome.failure = Failure(None, None, False, None, f"rank {rank}: {detail}")
        return outcome.failure is None

    def give_up(self, error: RankError | JournalError) -> None:
        """Another rank is gone or failed, or a try can't be written down: the baseline is what
        stays, where it runs."""
        outcome = self.outcome
        outcome.stopped = error.message
        if self.is_verifying and outcome.planned is None:
            outcome.failure = self.measured(outcome.host.measure())
        elif outcome.planned is None and outcome.failure is None:
            outcome.failure = Failure(None, None, False, None, error.message)
        self.tell(Step.BASELINE, f"nothing is retained: {error.message}")

    def opens(self) -> bool:
        self.tell(Step.PLACING, "placing components and finding the phases")
        began = time.monotonic()
        failure = self.outcome.host.open()
        self.prover.sweep_s = REQUESTS * (time.monotonic() - began)
        return self.agreed("placed", failure)

    def schedules(self) -> Iterator[Schedule]:
        """What to prove next, until nothing is left or one holds: first the plan that is known,
        then, with the baseline measured, the best by the model."""
        known = self._known()
        if known is not None:
            self.is_verifying = True
            self.tell(Step.VERIFYING, "verifying the plan that is known")
            yield known
            self.is_verifying = False
        self.tell(Step.MEASURING, "measuring the baseline")
        began = time.monotonic()
        with self.prover.floor():
            sweep = self.outcome.host.measure()
        self.prover.sweep_s = time.monotonic() - began
        if not self.agreed("measured", self.measured(sweep)) or self.settings.measure_only:
            return
        baseline = self.outcome.baseline
        assert baseline is not None
        while (choice := self._next()) is not None:
            self.tell(Step.TRYING, f"trying {baseline.describe(choice)}")
            yield baseline.schedule(choice)

    def _known(self) -> Schedule | None:
        """What an earlier start committed, where all ranks know the same and it is of this
        pipeline."""
        known = self.settings.verify
        if known is not None and (self.settings.has_crashed(known) or not self._fits_uses(known)):
            known = None
        mine = None if known is None else known.key
        keys = self.settings.agreement.exchange("verifying", mine)
        return known if {*keys} == {mine} else None

    def _fits_uses(self, known: Schedule) -> bool:
        """Whether it says something of the uses there are, and of layers that are there."""
        host = self.outcome.host
        layers = {each.name: len(each.layers) for each in host.components()}
        return {use.at for use in known.uses} == {use.at for use in host.baseline.uses} and all(
            layer < layers[use.component] for use in known.uses for layer in use.resident_set
        )

    def measured(self, sweep: Sweep) -> Failure | None:
        """Take the sweep of the baseline for what candidates are compared with."""
        outcome, settings, host = self.outcome, self.settings, self.outcome.host
        if sweep.failure is not None:
            return sweep.failure
        outcome.planned = sweep
        reading = host.read()
        self.prover.measured(sweep, reading)
        headrooms = tuple(
            Headroom(
                phase,
                run.asked,
                reading.total_bytes,
                reading.others_bytes,
                reading.context_bytes,
                run.peak_bytes(phase),
                settings.margin_bytes,
            )
            for run in sweep.runs
            for phase in host.graph.phases
        )
        pricing = settings.pricing.exposed(exposures(sweep, settings.pricing.bytes_per_s))
        baseline = outcome.baseline = Baseline(host, sweep, headrooms, pricing)
        instance = baseline.instance
        if settings.previous is not None:
            instance = baseline.learnt(settings.previous.phases)
        known = [each.schedule for each in outcome.tries]  # it was verified, and didn't hold
        for schedule in (*settings.crashed, *known):
            if (choice := baseline.recalled(schedule)) is not None:
                instance = instance.without(choice)
            elif schedule in known:
                outcome.tries.clear()  # it is of another pipeline, and nothing to be told of
        outcome.instance = instance
        return None

    def _next(self) -> Choice | None:
        """The choice to prove; None where the baseline is what stays, or it is only proposed."""
        outcome, settings, baseline = self.outcome, self.settings, self.outcome.baseline
        assert baseline is not None
        start = self.start or baseline.choice
        is_over = False
        if self.tried < settings.attempts:
            instance = self._left()
            proposal = Proposal(instance, baseline.choice, start, settings.limit.is_over)
            proposals = settings.agreement.exchange("proposing", proposal)
            is_over = any(each.is_over for each in proposals)
        if self.tried >= settings.attempts or is_over:
            outcome.chosen = None
            if settings.attempts:
                used_up = "the time is" if is_over else f"{self.tried} attempts are"
                outcome.stopped = f"{used_up} used up"
            why = f", since {outcome.stopped}" if outcome.stopped else ""
            self.tell(Step.BASELINE, f"nothing is retained{why}")
            return None
        chosen, is_baseline = self._chosen(proposals)
        outcome.chosen = self.trying = chosen
        self.start = start = baseline.choice if chosen is None else chosen.choice
        if self.explored < settings.explore and len(proposals) == 1:
            self.explored += 1
            beyond = choose(self._unlimited(instance))
            if isinstance(beyond, Chosen) and beyond.choice != start:
                self.trying = beyond
                return beyond.choice
            self.explored = settings.explore  # nothing is better than what fits
        if chosen is None or is_baseline:
            self.tell(Step.BASELINE, "nothing is retained")
            return None
        if settings.propose_only:
            outcome.proposed = baseline.schedule(chosen.choice)
            return None
        self.tried += 1
        return chosen.choice

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

    def _left(self) -> Instance:
        """What is left to choose from, on the card as it is now: others may have grown."""
        instance = self.outcome.instance
        assert instance is not None
        with self.prover.floor() as now:
            pass
        return instance.shifted(-self.prover.grown_bytes(now))

    def _recalled(self, chosen: Chosen | Unfit) -> Chosen | None:
        """The choice of the last start, where it is to be kept instead of `chosen`."""
        known, baseline = self.settings.previous, self.outcome.baseline
        assert baseline is not None
        previous = None if known is None else baseline.recalled(known.schedule)
        if known is None or previous is None or isinstance(chosen, Unfit):
            return None
        instance = baseline.learnt(known.phases)
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
        baseline = self.outcome.baseline
        assert baseline is not None
        places = tuple(
            now if now.room_bytes < given.room_bytes else replace(given, room_bytes=UNLIMITED_BYTES)
            for now, given in zip(instance.places, baseline.instance.places, strict=True)
        )
        return replace(instance, places=places)

    def ends_with(self, schedule: Schedule, proof: Proof) -> bool:
        """Note what came of a schedule, and learn from its refutation. Whether it holds."""
        outcome, baseline, judgement = self.outcome, self.outcome.baseline, proof.judgement
        shortage = shortfall = choice = None
        if baseline is not None:
            choice = baseline.choice_of(schedule)
            if self.settings.has_crashed(schedule) and outcome.instance is not None:
                outcome.instance = outcome.instance.without(choice)
                return False  # it wasn't tried
            shortage = baseline.instance.shortage(choice)
            shortfall = baseline.missing_bytes(choice, judgement)
        outcome.tries.append(
            Try(schedule, shortage, judgement, shortfall, not proof.holds, proof.comparisons)
        )
        if proof.holds:
            outcome.planned, outcome.committed, outcome.chosen = proof.sweep, schedule, self.trying
            self.tell(Step.COMMITTED, "committed")
            return True
        self.tell(Step.REFUTED, f"refuted: {judgement.verdict}")
        if baseline is not None and choice is not None and judgement.rank is None:
            self._learn(baseline, choice, judgement)
        return False

    def _learn(self, baseline: Baseline, choice: Choice, judgement: Judgement) -> None:
        outcome = self.outcome
        assert outcome.instance is not None
        if judgement.verdict is Verdict.HOST_MEMORY:
            # Where the driver charges pins to the card, one that failed makes others fail.
            poisoned = outcome.host.traits.pins_on_card
            less = 0 if poisoned else baseline.instance.host_bytes(choice) - 1
            outcome.instance = replace(outcome.instance, host_budget_bytes=less)
        elif not judgement.neighbour_bytes:
            earlier = outcome.tries[:-1]
            again = any(each.judgement.verdict is Verdict.OOM for each in earlier)
            outcome.instance = baseline.refuted(outcome.instance, choice, judgement, again=again)
