"""Sizing at full scale: monotone in capacity, and within two layers of what validation accepts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import pytest

from residency.offload.cards import custom_card, find_card
from residency.offload.device import FreeFloor
from residency.offload.simulated.card import SimulatedCard
from residency.phases.component import ResidencyMode, declare
from residency.phases.diffusers.families import find_family
from residency.phases.diffusers.host import DiffusersHost
from residency.phases.diffusers.pipeline import DiffusersPipeline
from residency.phases.shape import Shape
from residency.planner.baseline import Baseline
from residency.planner.choosing.choose import Chosen, choose
from residency.planner.choosing.model import Choice, copied_bytes
from residency.planner.choosing.prices import Pricing
from residency.planner.dry_run import MARGIN_BYTES, PlanRequest, plan
from residency.planner.loop import Outcome, run_loop
from residency.planner.plan import Report
from residency.planner.proof import Settings, Transaction
from residency.planner.verdict import Verdict, judge

GIB = 1 << 30
UNLIMITED = 1 << 50
OTHERS = (
    ("qwen-image", "1328x1328"),
    ("flux.1-dev", "1024x1024"),
    ("wan2.1-t2v-14b", "832x480x81"),
)


@contextmanager
def settled(family: str, shape: str, card: SimulatedCard, **settings) -> Iterator[Outcome]:
    found = find_family(family)
    pipeline = DiffusersPipeline(found.build(), name=family, request=found.request)
    declared = declare(pipeline.components, {}, {})
    layerwise = ResidencyMode.LAYERWISE_OFFLOAD
    sized = frozenset(name for name, each in declared.items() if each.mode is layerwise)
    pricing = Pricing.assumed(find_card("RTX 4090"))
    given = Settings(MARGIN_BYTES, pricing, **settings)
    with card:
        host = DiffusersHost(pipeline, card, [Shape.parse(shape)], declared, sized=sized)
        outcome = run_loop(host, given)
        yield outcome
        if outcome.failure is None:
            outcome.close()


@cache
def measured(family: str, shape: str) -> Baseline:
    """On a card without a limit: what other cards have less of is shifted, not measured again."""
    card = SimulatedCard(custom_card(UNLIMITED), virtual=True)
    with settled(family, shape, card, measure_only=True) as outcome:
        assert outcome.baseline is not None
        return outcome.baseline


each_pipeline = pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("qwen-image-2.1", "1024x1024"),
        *(pytest.param(*each, marks=pytest.mark.long) for each in OTHERS),
    ],
)


@pytest.mark.scale
@each_pipeline
def test_seconds_and_bytes_never_rise_from_8_to_96_gib(family, shape):
    plans = []
    for capacity in range(8, 97):
        instance = measured(family, shape).rooms(capacity * GIB - UNLIMITED)
        chosen = choose(instance)
        if isinstance(chosen, Chosen):
            parts = zip(instance.parts, chosen.choice, strict=True)
            copied = sum(copied_bytes(p, c, u) for p, c in parts for u in range(len(p.uses)))
            plans.append((chosen.seconds, copied))
        else:
            assert not plans, f"{capacity} GiB doesn't fit, and less did"
    assert len(plans) > 80
    assert plans == sorted(plans, reverse=True)
    assert [copied for _, copied in plans] == sorted((c for _, c in plans), reverse=True)
    assert plans[0][0] > plans[-1][0] == 0


@pytest.mark.scale
@each_pipeline
def test_a_room_that_was_shifted_is_the_one_that_is_measured_on_that_card(family, shape):
    card = SimulatedCard(custom_card(48 * GIB), virtual=True)
    with settled(family, shape, card, measure_only=True) as outcome:
        assert outcome.failure is None
        shifted = measured(family, shape).rooms(48 * GIB - UNLIMITED)
        assert outcome.baseline.rooms(0) == shifted
        assert outcome.baseline.instance == shifted


def back_to_baseline(outcome: Outcome) -> None:
    Transaction(outcome.host, outcome.host.baseline).apply()


def accepts(outcome: Outcome, choice: Choice) -> bool:
    """Whether validation accepts `choice` when it is applied to the baseline."""
    host, baseline = outcome.host, outcome.baseline
    transaction = Transaction(host, baseline.schedule(choice))
    transaction.apply()
    with FreeFloor(host, every_s=None) as floor:
        sweep = host.sweep()
    verdict = judge(sweep, baseline.sweep, floor, margin_bytes=MARGIN_BYTES).verdict
    del sweep
    transaction.rollback()
    return verdict is Verdict.ACCEPTED


def with_more(outcome: Outcome, component: str, layers: int) -> Choice | None:
    """The committed choice with so many layers more retained of one component's running class."""
    choice = list(outcome.baseline.choice_of(outcome.committed))
    number = next(n for n, p in enumerate(outcome.baseline.parts) if p.component == component)
    part, chosen = outcome.baseline.parts[number], choice[number]
    (running,) = (c for c, each in enumerate(part.classes) if all(each.runs))
    retained = [*chosen.retained[0]]
    retained[running] += layers
    if retained[running] > part.classes[running].count:
        return None
    resident = [max(a, b) for a, b in zip(chosen.resident[0], retained, strict=True)]
    choice[number] = replace(
        chosen, resident=(tuple(resident),), retained=(tuple(retained),), retains=(True,)
    )
    return tuple(choice)


def most_accepted(outcome: Outcome, component: str) -> int:
    """By bisection, how many layers more than committed validation accepts of a component."""
    accepted, refused = 0, 1
    while (more := with_more(outcome, component, refused)) and accepts(outcome, more):
        accepted, refused = refused, refused * 2
    while refused - accepted > 1:
        middle = (accepted + refused) // 2
        more = with_more(outcome, component, middle)
        if more and accepts(outcome, more):
            accepted = middle
        else:
            refused = middle
    return accepted


CARDS = ("RTX 5080", "RTX 4080", "L4", "RTX 5090", "A100 40GB", "RTX 6000 Ada", "A100 80GB")


@pytest.mark.scale
@pytest.mark.parametrize(
    "card",
    ["RTX 4090", *(pytest.param(card, marks=pytest.mark.long) for card in (*CARDS, "H100 80GB"))],
)
def test_sized_plans_are_within_two_layers_of_what_validation_accepts_in_three_sweeps(card):
    """Of the component whose layers save the most a byte: the denoiser, and where it is whole,
    the text encoder."""
    device = SimulatedCard(find_card(card), virtual=True)
    with settled("qwen-image-2.1", "720x720", device) as outcome:
        assert 1 <= len(outcome.tries) <= 3
        assert outcome.tries[-1].judgement.verdict is Verdict.ACCEPTED
        back_to_baseline(outcome)
        assert accepts(outcome, outcome.baseline.choice_of(outcome.committed))
        for component in ("transformer", "text_encoder"):
            if with_more(outcome, component, 1) is not None:
                assert most_accepted(outcome, component) <= 2
                break


def sets(report: Report) -> list[tuple[object, ...]]:
    (made,) = report.plans
    return [(u.component, u.resident_set, u.retained_set, u.prefetch) for u in made.schedule.uses]


@pytest.mark.scale
@pytest.mark.long
def test_a_plan_stays_while_only_the_reading_of_free_memory_wobbles():
    mib = 1 << 20
    request = PlanRequest(
        "qwen-image-2.1",
        (find_card("RTX 4090"),),
        (Shape(720, 720),),
        {"dit": "resident"},
        size="auto",
        others_bytes=500 * mib,
    )
    first = plan(request)
    assert any(retained for _, _, retained, _ in sets(first))
    for wobble in (-64 * mib, 64 * mib):
        again = replace(request, others_bytes=500 * mib + wobble, previous=first)
        assert sets(plan(again)) == sets(first)
    far = replace(request, others_bytes=2000 * mib, previous=first)
    assert sets(plan(far)) != sets(first)


@pytest.mark.scale
@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("flux.1-dev", "1024x1024"),
        ("qwen-image", "1328x1328"),
        ("wan2.1-t2v-14b", "832x480x81"),
    ],
)
@pytest.mark.parametrize("card", ["RTX 4090", "RTX 5090", "A100 40GB", "H100 80GB"])
def test_other_pipelines_are_sized_in_three_sweeps_and_copy_less(family, shape, card):
    device = SimulatedCard(find_card(card), virtual=True)
    with settled(family, shape, device) as outcome:
        assert 1 <= len(outcome.tries) <= 3
        assert outcome.committed is not None
        instance = outcome.baseline.instance
        committed = instance.seconds(outcome.baseline.choice_of(outcome.committed))
        assert committed < instance.seconds(outcome.baseline.choice)
