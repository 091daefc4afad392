"""A server with requests of random shapes, beside a neighbour that grows and shrinks."""

import random
from dataclasses import dataclass, field, replace

import pytest
import torch
from serving import Served, sample, settled

from residency.offload.errors import OutsideEnvelopeError
from residency.phases.shape import Shape
from residency.planner.serving.guard import Guard, GuardState, OutsidePolicy
from residency.planner.serving.metrics import Served as Ending

SPARE_BYTES = 64 << 10
"""What pipelines keep for each shape that they have run, such as tables of positions."""


@dataclass
class Neighbour:
    """Takes and gives back what the baseline doesn't need, between requests and within them."""

    served: Served
    dice: random.Random
    at_call: int | None = None
    calls: int = 0
    moves: int = field(default=0)

    def move(self) -> None:
        least = self.served.baseline_peak + SPARE_BYTES
        most = self.served.planned_peak + 4 * SPARE_BYTES
        self.served.leave(self.dice.choice([least, self.dice.randint(least, most), most]))
        self.moves += 1

    def plan(self) -> None:
        """One request in four meets it in the middle, as a layer of the denoiser begins."""
        self.calls = 0
        self.at_call = self.dice.randrange(12) if self.dice.random() < 0.25 else None
        if self.dice.random() < 0.5:
            self.move()

    def __call__(self, module, args) -> None:
        if self.calls == self.at_call:
            self.move()
        self.calls += 1


def shapes(dice: random.Random, largest: Shape) -> Shape:
    """Inside as a rule; one in eight is outside."""
    shape = replace(
        largest,
        width=dice.choice([32, 64]),
        height=dice.choice([32, 64]),
        tokens=dice.choice([7, 16]),
        steps=dice.choice([2, 3]),
    )
    if dice.random() < 1 / 8:
        return replace(shape, **dice.choice([{"width": 80}, {"tokens": 17}, {"frames": 5}]))
    return shape


def settle_again(served: Served, guard: Guard) -> None:
    with guard.exclusive():
        guard.close()
        served.card.others_bytes = 0
        served.outcome.close()
        served.outcome = served.test.loop()
        guard.renew(served.outcome)


@pytest.mark.parametrize("requests", [20, pytest.param(100, marks=pytest.mark.long)])
def test_no_request_inside_the_envelope_fails_and_none_outside_runs(requests):
    dice = random.Random(requests)
    with settled() as served:
        guard = served.guard(max_ooms=5, oom_window=40)
        neighbour = Neighbour(served, dice)
        blocks = served.pipeline.pipeline.transformer.transformer_blocks
        handles = [block.register_forward_pre_hook(neighbour) for block in blocks]
        inside = outside = demoted = 0
        for _ in range(requests):
            shape, seed = shapes(dice, served.shape), dice.randrange(2)
            if not guard.envelope.covering(served.pipeline.completed(shape)):
                with pytest.raises(OutsideEnvelopeError):
                    guard.serve(shape, lambda: pytest.fail("it ran"))
                outside += 1
                continue
            neighbour.at_call, others = None, served.card.others_bytes
            served.card.others_bytes = 0
            expected = served.baseline(shape, seed=seed)
            served.card.others_bytes = others
            neighbour.plan()
            assert torch.equal(guard.serve(shape, served.call(shape, seed=seed)), expected)
            inside += 1
            if guard.state is GuardState.BASELINE:
                demoted += 1
                settle_again(served, guard)
                assert guard.state is GuardState.PLANNED

        for handle in handles:
            handle.remove()
        count = {each: sample(guard.metrics, "requests_total", outcome=each) for each in Ending}
        ran = (Ending.PLANNED, Ending.BASELINE, Ending.RETRIED)
        assert sum(count[each] for each in ran) == inside
        assert count[Ending.OUTSIDE] == outside > 0
        assert (
            sample(guard.metrics, "outside_envelope_total", policy=OutsidePolicy.REFUSE) == outside
        )
        assert all(count[each] > 0 for each in ran)
        assert count[Ending.OOM] == count[Ending.ERROR] == 0
        assert sample(guard.metrics, "demotions_total") == demoted

        settle_again(served, guard)
        expected = served.baseline()
        assert torch.equal(guard.serve(served.shape, served.call()), expected)
        assert guard.state is GuardState.PLANNED
        assert guard.check().holds
        served.card.check_integrity()
