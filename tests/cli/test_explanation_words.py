"""What each part of an explanation says, and that what isn't known is said too."""

import io
from collections.abc import Mapping

import pytest
from canned import COMMITTED, SHAPE, encoder_use, report, uses
from canned_flux import HOST_MEMORY_BINDS
from canned_sized import EVERYTHING_FITS, FIXED_BINDS, ONE_PHASE_BINDS, encoder_stop

from residency.cli.render.explanation import explanation_view
from residency.cli.screen import rendered
from residency.planner.plan import FixedCost, HostPlan, Plan, Reason, Stop, Worth

LIMIT: Mapping[str, object] = {
    "limiting_phase": "denoise",
    "limiting_shape": SHAPE,
    "step_bytes": 367 << 20,
    "short_bytes": 5 << 20,
}


def explain(plan: Plan, **changes: object) -> str:
    assert plan.explanation is not None
    explanation = plan.explanation.model_copy(update=changes)
    changed = plan.model_copy(update={"explanation": explanation})
    return rendered(explanation_view(report(changed)), io.StringIO())


def told(text: str, label: str) -> str:
    (line,) = (line for line in text.splitlines() if line.startswith(f"{label}  "))
    return line.removeprefix(label).strip()


@pytest.mark.parametrize("stop", Stop)
@pytest.mark.parametrize("limit", [{}, LIMIT], ids=["without numbers", "with numbers"])
def test_every_stop_has_words(stop: Stop, limit: Mapping[str, object]):
    text = explain(ONE_PHASE_BINDS, stops=(encoder_stop(stop, 10, **limit),))
    sentence = told(text, "text_encoder")
    assert "retains 10 of" in sentence
    assert "None" not in text
    if limit and stop is not Stop.WHOLE and stop is not Stop.FIXED:
        assert "(367 MiB)" in sentence
    if limit and stop in (Stop.ROOM, Stop.REFUTED):
        assert sentence.endswith(f" in denoise at {SHAPE}, short by 5 MiB")


def test_a_first_layer_brings_the_weights_in_no_layer():
    plan = ONE_PHASE_BINDS.model_copy(update={"uses": uses(encoder_use(Reason.NO_HEADROOM, 0.1))})
    text = explain(plan, stops=(encoder_stop(Stop.ROOM, 0, **LIMIT),))
    assert "retains nothing: a first layer with the weights in no layer (367 MiB) doesn't" in text


def test_a_declared_set_is_stopped_as_a_whole():
    plan = COMMITTED.model_copy(
        update={
            "explanation": ONE_PHASE_BINDS.explanation,
            "uses": uses(encoder_use(Reason.NO_HEADROOM, 0.1)),
        }
    )
    text = explain(plan, stops=(encoder_stop(Stop.ROOM, 0, **LIMIT),), fixed=())
    assert "retains nothing: what is declared (367 MiB) doesn't fit in denoise" in text


def test_a_stop_of_a_use_that_the_plan_lacks_is_told_all_the_same():
    plan = ONE_PHASE_BINDS.model_copy(update={"uses": ()})
    assert "one more layer (367 MiB) doesn't fit in vae_decode" in explain(plan)


def test_a_use_without_a_stop_is_told_to_have_none():
    assert "10 of 66 layers: what stopped it is not known" in explain(ONE_PHASE_BINDS, stops=())


@pytest.mark.parametrize(
    ("changes", "label", "text"),
    [
        ({"binding_phase": None}, "binding phase", "no phase is known to bind"),
        (
            {"left_bytes": None},
            "binding phase",
            f"vae_decode at {SHAPE}; what the plan leaves there is not known",
        ),
        ({"one_more_gib": None}, "one more GiB", "what it would change is not known"),
        (
            {"one_more_gib": Worth(layers=1, seconds=0.2)},
            "one more GiB",
            "would hold 1 more layer and save 0.20 s a request",
        ),
        (
            {"one_more_gib": Worth(layers=-2, seconds=0.2)},
            "one more GiB",
            "would hold 2 fewer layers and save 0.20 s a request",
        ),
        (
            {"one_more_gib": Worth(layers=0, seconds=0.2)},
            "one more GiB",
            "would hold as many layers, but others, and save 0.20 s a request",
        ),
        ({"fixed": ()}, "what is fixed", "nothing"),
        (
            {"fixed": (FixedCost(component="transformer", fixed="dit=resident", seconds=0.3),)},
            "what is fixed",
            "dit=resident (for transformer) costs 0.30 s a request: the best plan without it saves "
            "so much more",
        ),
        (
            {
                "host": HostPlan(
                    budget_bytes=3 << 30,
                    charged_bytes=0,
                    wanted_bytes=38 << 30,
                    pinned=(),
                    pageable=(),
                )
            },
            "host memory",
            "3.00 GiB budget, 3.00 GiB left; nothing pinned; nothing pageable",
        ),
        (
            {"copy_s": 0.65, "baseline_copy_s": 0.65},
            "copies",
            "0.65 s a request, as in the baseline",
        ),
        (
            {"copy_s": 1.0, "bound_s": 0.995},
            "proof",
            "proven under the model: no plan that fits copies for less than 0.99 s, 5 ms (0.5%) "
            "below this one",
        ),
        (
            {"copy_s": 1.0, "bound_s": 0.9, "proven": False},
            "proof",
            "not proven best under the model, the solver's time was up: no plan that fits copies "
            "for less than 0.90 s, 0.10 s (10.0%) below this one",
        ),
    ],
)
def test_a_fact_is_one_line(changes: dict[str, object], label: str, text: str):
    assert told(explain(ONE_PHASE_BINDS, **changes), label) == text


def test_no_frontier_is_told():
    text = explain(ONE_PHASE_BINDS, frontier=())
    assert text.endswith("What is best at other capacities is not known.\n")


def test_the_plans_own_row_is_marked_once():
    for plan in (EVERYTHING_FITS, ONE_PHASE_BINDS, FIXED_BINDS, HOST_MEMORY_BINDS):
        (row,) = (line for line in explain(plan).splitlines() if "this card" in line)
        assert plan.card in row
        assert "  0.00 s  " in row
