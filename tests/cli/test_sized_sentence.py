"""The verdict on plans whose sets were sized."""

import pytest
from canned import SHAPE, attempt, encoder_use, gib, plan, uses
from canned_flux import HOST_MEMORY_BINDS, sets
from canned_sized import EVERYTHING_FITS, FIXED_BINDS, ONE_PHASE_BINDS

from residency.cli.render.verdict import tried_sets, verdict
from residency.cli.render.words import reason
from residency.planner.plan import Plan, Reason, Status
from residency.planner.verdict import Verdict


def test_a_sized_set_is_told_against_the_layers_that_run():
    assert verdict(ONE_PHASE_BINDS) == (
        "Would retain text_encoder: 10 of 36 layers that run, 6.00 GiB across the gap; "
        "15.32 GiB -> 9.32 GiB copied a request, about 0.26 s saved (at 25.2 GB/s; assumed: "
        "80% of PCIe 4.0 x16, no copy hidden behind compute)"
    )
    assert "text_encoder: all 36 layers that run, 15.32 GiB" in verdict(EVERYTHING_FITS)


def test_what_is_held_across_the_steps_is_told_besides():
    assert verdict(HOST_MEMORY_BINDS).startswith(
        "Would retain text_encoder_2: all 24 layers, 8.87 GiB across the gap; "
        "would hold 34 of 57 transformer layers across the steps; "
        "626.60 GiB -> 325.90 GiB copied a request, about 1.57 s saved"
    )


def test_a_plan_that_retains_nothing_may_hold_something():
    held = tuple(use for use in HOST_MEMORY_BINDS.uses if not use.retain_resident_layers)
    for in_effect, start in ((False, "Would hold 34 of 57"), (True, "Holds 34 of 57")):
        plan = HOST_MEMORY_BINDS.model_copy(update={"uses": held, "in_effect": in_effect})
        assert verdict(plan).startswith(f"{start} transformer layers across the steps; ")


def test_a_set_that_the_user_declared_is_told_against_all_layers():
    assert "text_encoder: 43 of 66 layers, 11.33 GiB" in verdict(FIXED_BINDS)


def test_without_an_explanation_layers_that_run_are_not_guessed():
    plan = ONE_PHASE_BINDS.model_copy(update={"explanation": None})
    assert "text_encoder: 10 of 66 layers, 6.00 GiB" in verdict(plan)


def test_a_partly_retained_set_says_where_it_ends():
    use = encoder_use(Reason.PARTLY_RETAINED, 0.1).model_copy(update={"limiting_phase": "denoise"})
    assert reason(ONE_PHASE_BINDS, use) == "as many layers as fit in denoise, validated"
    use = use.model_copy(update={"limiting_phase": None})
    assert (
        reason(ONE_PHASE_BINDS, use) == "as many layers as fit or are worth their bytes, validated"
    )


def test_a_lack_of_headroom_is_told_of_the_least_that_could_be_retained():
    assert "has 6.20 GiB headroom, text_encoder needs at least 7.20 GiB, short by 1.00 GiB" in (
        verdict(nothing(encoder_use(Reason.NO_HEADROOM, 0.1, gib(1.0))))
    )


def test_a_refuted_attempt_is_told_with_its_sets_and_once():
    tried = attempt(
        Verdict.OOM,
        retained=("text_encoder_2",),
        sets=sets(24, 30),
        phase="denoise",
        shape=SHAPE,
        shortfall_bytes=gib(1.0),
    )
    refuted = encoder_use(Reason.REFUTED, 0.1).model_copy(update={"component": "text_encoder_2"})
    plan = nothing(refuted, refuted).model_copy(
        update={"attempts": (tried,), "components": HOST_MEMORY_BINDS.components}
    )
    assert verdict(plan).startswith(
        "Would retain nothing: text_encoder_2 24, transformer 30/57 was tried: out of memory in "
        f"denoise at {SHAPE}, short by 1.00 GiB, rolled back; 12.94 GiB copied a request"
    )


def nothing(*refused: object) -> Plan:
    idle = uses(encoder_use(Reason.RESIDENT, 0.0))[1:]
    return plan("RTX 4090", 23.52, Status.BASELINE_ONLY, uses=(*refused, *idle), sizing="auto")


@pytest.mark.parametrize(
    ("held", "retained", "text"),
    [
        (0, 0, "text_encoder_2 24"),
        (30, 0, "text_encoder_2 24, transformer 30/57"),
        (30, 30, "text_encoder_2 24, transformer 30"),
        (30, 12, "text_encoder_2 24, transformer 12 of 30/57"),
    ],
)
def test_the_sets_of_an_attempt_are_short(held: int, retained: int, text: str):
    encoder, transformer = sets(24, held)
    transformer = transformer.model_copy(update={"retained_layers": retained})
    tried = attempt(Verdict.ACCEPTED, retained=("text_encoder_2",), sets=(encoder, transformer))
    assert tried_sets(HOST_MEMORY_BINDS, tried) == text


def test_several_uses_of_a_component_are_told_apart_by_phase():
    encoder, _ = sets(24, 0)
    again = encoder.model_copy(update={"phase": "refine", "resident_layers": 7})
    tried = attempt(Verdict.ACCEPTED, retained=("text_encoder_2",), sets=(encoder, again))
    assert tried_sets(HOST_MEMORY_BINDS, tried) == (
        "text_encoder_2 text_encode_2 24, text_encoder_2 refine 24"
    )


def test_an_attempt_at_nothing_says_so():
    tried = attempt(Verdict.ACCEPTED, retained=(), sets=sets(0, 0))
    assert tried_sets(HOST_MEMORY_BINDS, tried) == "nothing"
