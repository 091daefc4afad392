"""The main job at full scale: two cards, opposite decisions."""

import json
import resource
import subprocess
import sys

import pytest

from residency.offload.cards import custom_card, find_card
from residency.offload.errors import InputError, ShapeError, UnknownNameError
from residency.phases.shape import Shape
from residency.planner.dry_run import PlanRequest, plan
from residency.planner.plan import Reason, Status

MIB, GIB = 1 << 20, 1 << 30
DECLARED = "dit=resident,text_encoder=layerwise-offload,vae=resident"


def residency(*args: str) -> subprocess.CompletedProcess[str]:
    program = "from residency.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *args], capture_output=True, text=True, check=False
    )


def main_job(*args: str) -> subprocess.CompletedProcess[str]:
    return residency("plan", "qwen-image-2.1", "--component-residency", DECLARED, "--json", *args)


@pytest.fixture(scope="module")
def two_cards():
    cards = ("--card", "RTX 4090", "--card", "RTX 5090", "--shape", "720x720")
    run = main_job(*cards, "--layerwise-resident-layers", "text_encoder=0.65", "--explore", "1")
    assert run.returncode == 0, run.stderr
    return {made["card"]: made for made in json.loads(run.stdout)["plans"]}


@pytest.mark.scale
def test_the_two_cards_decide_the_opposite(two_cards):
    small, large = two_cards["RTX 4090"], two_cards["RTX 5090"]
    assert (small["status"], large["status"]) == ("baseline_only", "committed")
    assert [u["component"] for u in large["uses"] if u["retain_resident_layers"]] == [
        "text_encoder"
    ]
    assert not any(use["retain_resident_layers"] for use in small["uses"])


@pytest.mark.scale
def test_43_of_66_layers_and_the_weights_of_no_layer_are_what_is_retained(two_cards):
    encoder = two_cards["RTX 5090"]["uses"][0]
    layers = 23 * 368.016 + 18 * 29.06 + 2 * 76.5
    assert (encoder["resident_layers"], encoder["total_layers"]) == (43, 66)
    assert encoder["retained_bytes"] / MIB == pytest.approx(layers + 2459, rel=1e-3)


@pytest.mark.scale
def test_the_small_card_shows_what_failed_where_by_how_much_and_that_it_was_undone(two_cards):
    (attempt,) = two_cards["RTX 4090"]["attempts"]
    assert attempt["retained"] == ["text_encoder"]
    assert attempt["verdict"] == "oom"
    assert (attempt["shape"], attempt["rolled_back"]) == ("720x720", True)
    assert attempt["phase"] in ("text_encode", "vae_decode")
    assert attempt["shortfall_bytes"] > GIB
    assert two_cards["RTX 4090"]["shapes"] == [{"asked": "720x720", "run": "704x704"}]


@pytest.mark.scale
def test_bytes_a_request_are_those_of_the_layers_that_run(two_cards):
    small, large = (two_cards[card]["h2d_bytes_per_request"] for card in two_cards)
    layer, rest = 368.016 * MIB, 2459 * MIB
    assert small["baseline"] == large["baseline"] == small["planned"]
    assert small["baseline"] == pytest.approx(36 * layer + rest, rel=1e-3)
    assert large["planned"] == pytest.approx((36 - 23) * layer, rel=1e-3)


@pytest.mark.scale
def test_steady_memory_is_that_of_the_motivating_case(two_cards):
    made = two_cards["RTX 4090"]
    weights = {part["name"]: part["weight_bytes"] for part in made["components"]}
    rest = next(p["non_layer_bytes"] for p in made["components"] if p["name"] == "text_encoder")
    steady = weights["transformer"] + weights["vae"] + rest + made["context_bytes"]
    assert steady / GIB == pytest.approx(16.6, abs=0.1)
    binding = [phase["name"] for phase in made["phases"] if phase["binding"]]
    assert binding == ["vae_decode"]


@pytest.mark.scale
def test_the_main_job_takes_less_than_2_gib(two_cards):
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < 2 * GIB


@pytest.mark.scale
def test_a_baseline_that_does_not_fit_ends_with_1_and_says_where_and_by_how_much():
    run = main_job("--card", "RTX 4090", "--shape", "1536x1536")
    (made,) = json.loads(run.stdout)["plans"]
    assert (run.returncode, made["status"]) == (1, "infeasible")
    assert made["infeasible"]["phase"] == "vae_decode"
    needed = max(phase["peak_bytes"] for phase in made["phases"]) + made["context_bytes"]
    assert made["infeasible"]["shortfall_bytes"] == needed - made["capacity_bytes"]
    assert "vae_decode at 1536x1536 is short by 4." in run.stderr


@pytest.mark.scale
def test_a_set_that_fits_and_saves_less_than_1_percent_is_not_retained_and_says_so():
    streamed = {"dit": "layerwise-offload", "text_encoder": "layerwise-offload"}
    request = PlanRequest(
        "flux.1-dev",
        (find_card("RTX 4090"),),
        (Shape(1024, 1024),),
        streamed,
        {"text_encoder_2": "0.5"},
    )
    (made,) = plan(request).plans
    assert made.status is Status.BASELINE_ONLY
    (encoder,) = (use for use in made.uses if use.component == "text_encoder_2")
    assert encoder.reason is Reason.MARGINAL
    assert 0 < encoder.saved_s < 0.01 * made.explanation.baseline_copy_s


@pytest.mark.scale
@pytest.mark.parametrize(
    ("family", "shape"),
    [("flux.1-dev", "1024x1024"), ("wan2.1-t2v-14b", "832x480x81")],
)
def test_a_larger_free_card_never_moves_more_bytes_a_request(family, shape):
    moved = []
    for card in ("RTX 5090", "H100 80GB"):
        request = PlanRequest(
            family,
            (find_card(card),),
            (Shape.parse(shape),),
            {"dit": "layerwise-offload", "text_encoder": "layerwise-offload"},
            {"text_encoder": "all"},
        )
        (made,) = plan(request).plans
        moved.append(made.h2d_bytes_per_request.planned)
    assert moved == sorted(moved, reverse=True)


def tiny_request(**changed) -> PlanRequest:
    given = {"pipeline": "flux.1-dev", "cards": (custom_card(GIB),), "tiny": True}
    return PlanRequest(**{**given, **changed})


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"pipeline": "flux.2"}, UnknownNameError, "no pipeline 'flux.2'"),
        ({"cards": ()}, InputError, "no card"),
        ({"margin_bytes": -1}, InputError, "margin_bytes is -1"),
        ({"explore": -1}, InputError, "explore is -1"),
        ({"shapes": (Shape(8, 64),)}, ShapeError, "8x64 is too small"),
        ({"shapes": (Shape(64, 64, 9),)}, ShapeError, "9 frames"),
        ({"component_residency": {"vocoder": "resident"}}, UnknownNameError, "vocoder"),
        ({"component_residency": {"dit": "remote"}}, UnknownNameError, "residency 'remote'"),
        ({"resident_layers": {"dit": "1.7"}}, InputError, "'1.7'"),
        ({"resident_layers": {"vae": "2"}}, InputError, "vae is resident"),
        ({"context_bytes": 2 * GIB}, InputError, "nothing is left"),
        ({"others_bytes": GIB}, InputError, "nothing is left"),
        ({"prefetch": -1}, InputError, "prefetch is -1"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_numbers_and_a_hint(changed, error, said):
    with pytest.raises(error, match=said) as refused:
        plan(tiny_request(**changed))
    assert refused.value.hint


def test_progress_names_the_card_and_what_is_done():
    told = []
    plan(tiny_request(), lambda progress: told.append((progress.card, progress.doing)))
    assert [card for card, _ in told] == ["1.0 GiB card"] * len(told)
    assert [doing for _, doing in told][:3] == [
        "building flux.1-dev",
        "placing components and finding the phases",
        "measuring the baseline",
    ]
