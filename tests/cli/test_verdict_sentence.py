import pytest
from canned import COMMITTED, INFEASIBLE, NO_HEADROOM, REFUTED, attempt, encoder_use, gib

from residency.cli.render.verdict import verdict
from residency.cli.render.words import VERDICTS, reason
from residency.planner.plan import Reason, Status
from residency.planner.verdict import Verdict


@pytest.mark.parametrize("why", Reason)
def test_every_reason_has_words(why: Reason):
    assert len(reason(COMMITTED, encoder_use(why, 0.0))) > 10


@pytest.mark.parametrize("said", Verdict)
def test_every_verdict_has_words(said: Verdict):
    assert VERDICTS[said]


def test_a_committed_plan_says_what_it_holds_what_it_saves_and_what_is_assumed():
    assert verdict(COMMITTED) == (
        "Would retain text_encoder: 43 of 66 layers, 11.33 GiB across the gap; 12.94 GiB -> "
        "2.01 GiB copied a request, about 0.23 s saved (at 50.4 GB/s; assumed: "
        "80% of PCIe 5.0 x16, no copy hidden behind compute)"
    )


def test_what_was_not_tried_is_not_called_validated():
    proposed = COMMITTED.model_copy(update={"status": Status.PROPOSED})
    assert (
        "43 of 66 layers, 11.33 GiB across the gap, by the model and not tried; 12.94"
        in verdict(proposed)
    )
    assert reason(proposed, encoder_use(Reason.RETAINED, 0.0)) == "fits every phase, not tried"


def test_a_neighbour_that_explains_a_refutation_is_told():
    tried = REFUTED.attempts[-1].model_copy(update={"neighbour_bytes": gib(3)})
    assert ", while another process took 3.00 GiB, rolled back" in verdict(
        REFUTED.model_copy(update={"attempts": (tried,)})
    )


def test_a_lack_of_headroom_is_told_with_its_three_numbers():
    assert verdict(NO_HEADROOM).startswith(
        "Would retain nothing: vae_decode at 720x720:steps=4 has 6.20 GiB headroom, "
        "text_encoder needs 11.33 GiB, short by 5.13 GiB"
    )


def test_a_refutation_is_told_with_what_was_seen():
    assert verdict(REFUTED).startswith(
        "Would retain nothing: text_encoder (11.33 GiB) was tried beyond the model, which had it "
        "short by 5.13 GiB: out of memory in vae_decode at 720x720:steps=4, short by 1.59 GiB, "
        "rolled back"
    )


def test_a_margin_that_was_not_kept_is_told_as_such():
    tried = attempt(Verdict.HEADROOM, phase="denoise", shape="720x720", shortfall_bytes=4 << 20)
    assert "margin not kept in denoise at 720x720, the margin short by 4 MiB, rolled back" in (
        verdict(REFUTED.model_copy(update={"attempts": (tried,)}))
    )


def test_a_state_that_was_not_restored_is_told():
    tried = attempt(Verdict.CRASH, rolled_back=False)
    plan = REFUTED.model_copy(update={"attempts": (tried,)})
    assert "was tried: failed with an error, not rolled back" in verdict(plan)


def test_a_baseline_that_does_not_fit_is_told_to_the_byte():
    assert verdict(INFEASIBLE) == (
        "Does not fit: vae_decode at 720x720:steps=4 is short by 1.20 GiB "
        "(1,288,490,189 bytes) with nothing retained"
    )


def test_components_that_cannot_even_be_loaded_are_told():
    assert INFEASIBLE.infeasible is not None
    found = INFEASIBLE.infeasible.model_copy(update={"phase": "load", "shape": None})
    text = verdict(INFEASIBLE.model_copy(update={"infeasible": found}))
    assert text.startswith("Does not fit: loading the resident components is short by")


def test_a_set_of_no_layers_is_what_lies_outside_of_them():
    use = encoder_use(Reason.RETAINED, 0.1).model_copy(
        update={"resident_layers": 0, "retained_layers": 0}
    )
    text = verdict(COMMITTED.model_copy(update={"uses": (use,)}))
    assert "text_encoder: its weights in no layer, 11.33 GiB across the gap" in text


def test_a_plan_with_nothing_to_save_says_so():
    idle = encoder_use(Reason.NOTHING_SAVED, 0.0)
    assert "it would save no copy" in verdict(NO_HEADROOM.model_copy(update={"uses": (idle,)}))
    held = encoder_use(Reason.RESIDENT, 0.0)
    assert "every component stays on the card" in verdict(
        NO_HEADROOM.model_copy(update={"uses": (held,)})
    )


def test_several_retained_sets_are_each_told_and_their_seconds_added():
    both = tuple(
        encoder_use(Reason.RETAINED, 0.2).model_copy(update={"component": name})
        for name in ("text_encoder", "text_encoder_2")
    )
    text = verdict(COMMITTED.model_copy(update={"uses": both}))
    assert text.count("11.33 GiB across the gap") == 2
    assert "about 0.40 s saved" in text


def test_the_tightest_shape_of_a_phase_is_the_one_named():
    small = NO_HEADROOM.phases[-1].model_copy(
        update={"shape": "512x512", "headroom_bytes": gib(9), "binding": False}
    )
    plan = NO_HEADROOM.model_copy(update={"phases": (small, *NO_HEADROOM.phases)})
    assert plan.status is Status.BASELINE_ONLY
    assert "vae_decode at 720x720:steps=4 has 6.20 GiB" in verdict(plan)


def test_what_a_phase_has_needs_and_lacks_adds_up_where_its_peak_holds_a_part_already():
    use = encoder_use(Reason.NO_HEADROOM, 0.4, gib(3.45)).model_copy(
        update={"limiting_phase": "text_encode"}
    )
    assert "has 7.54 GiB headroom, text_encoder needs 10.99 GiB, short by 3.45 GiB" in verdict(
        NO_HEADROOM.model_copy(update={"uses": (use,)})
    )
