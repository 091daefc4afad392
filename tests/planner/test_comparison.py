import pytest

from residency.phases.shape import Shape
from residency.planner.verdict import Comparison, Verdict, judge_time

SHAPE = Shape(64, 64)


def comparison(baseline, candidate):
    return Comparison(SHAPE, tuple(baseline), tuple(candidate))


@pytest.mark.parametrize(
    ("baseline", "candidate", "slower"),
    [
        ((10, 10, 10), (10, 10, 10), False),
        ((10, 10, 10), (9, 9, 9), False),
        ((10, 10, 10), (10.09, 10.09, 10.09), False),  # below 1 %
        ((10, 10, 10), (10.11, 10.11, 10.11), True),
        ((10, 10.5, 10), (10.4, 10.4, 10.4), False),  # the baseline wanders by as much
        ((10, 10, 10), (10.4, 10.4, 11), False),  # the candidate does
        ((10, 10.2, 10.1), (11, 11.1, 11), True),
        ((10, 10, 30), (10, 10, 10), False),  # one outlier doesn't move a median
        ((1, 1, 1), (8, 8, 8), True),  # a card that spills
    ],
)
def test_slower_is_what_the_medians_differ_by_beyond_the_noise_that_was_measured(
    baseline, candidate, slower
):
    found = comparison(baseline, candidate)
    assert found.is_slower is slower
    verdict = judge_time([comparison((5, 5, 5), (5, 5, 5)), found]).verdict
    assert verdict is (Verdict.SLOWER if slower else Verdict.ACCEPTED)


def test_a_slower_shape_is_named_with_its_numbers():
    judgement = judge_time([comparison((1, 1, 1), (2, 2, 2))])
    assert judgement.shape == "64x64"
    assert judgement.detail == (
        "2.0000 s a request, 1.0000 s in the baseline, with 0.0100 s of noise"
    )
