"""What a person sees, against the files in golden/. `RESIDENCY_GOLDEN=write` writes them anew."""

import io
import os
from pathlib import Path

import pytest
from canned import COMMITTED, INFEASIBLE, NO_HEADROOM, REFUTED, report
from canned_check import HOLDS, HOLDS_SIMULATED, REBUILT, STALE
from canned_flux import HOST_MEMORY_BINDS
from canned_probe import LOST, NO_CARD, ONE_POOL, TWO_CARDS
from canned_sized import EVERYTHING_FITS, FIXED_BINDS, NOTHING_FITS, ONE_PHASE_BINDS
from rich.console import Console, RenderableType

from residency.cli.render.explanation import explanation_view
from residency.cli.render.files import check_view
from residency.cli.render.machine import cards_view, machine_view
from residency.cli.render.plan import report_view
from residency.cli.screen import rendered
from residency.offload.cards import CARDS

GOLDEN = Path(__file__).parent / "golden"
FLUX = report(HOST_MEMORY_BINDS, pipeline="flux.1-dev")
VIEWS = {
    "committed": report_view(report(COMMITTED)),
    "no_headroom": report_view(report(NO_HEADROOM)),
    "refuted": report_view(report(REFUTED)),
    "infeasible": report_view(report(INFEASIBLE)),
    "two_cards": report_view(report(COMMITTED, REFUTED)),
    "sized": report_view(report(ONE_PHASE_BINDS, EVERYTHING_FITS)),
    "sized_and_held": report_view(FLUX),
    "explain_everything_fits": explanation_view(report(EVERYTHING_FITS)),
    "explain_one_phase_binds": explanation_view(report(ONE_PHASE_BINDS)),
    "explain_host_memory_binds": explanation_view(FLUX),
    "explain_fixed_binds": explanation_view(report(FIXED_BINDS)),
    "explain_nothing_fits": explanation_view(report(NOTHING_FITS)),
    "explain_without_explanation": explanation_view(report(COMMITTED, INFEASIBLE)),
    "cards": cards_view(CARDS.values()),
    "check_holds": check_view(HOLDS),
    "check_simulated": check_view(HOLDS_SIMULATED),
    "check_rebuilt": check_view(REBUILT),
    "check_stale": check_view(STALE),
    "probe_two_cards": machine_view(TWO_CARDS),
    "probe_one_pool": machine_view(ONE_POOL),
    "probe_lost_card": machine_view(LOST),
    "probe_no_card": machine_view(NO_CARD),
}

every_view = pytest.mark.parametrize(("name", "view"), VIEWS.items(), ids=list(VIEWS))


@every_view
def test_a_view_is_its_golden_text(name: str, view: RenderableType):
    text = rendered(view, io.StringIO())
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("RESIDENCY_GOLDEN") == "write":
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


def test_every_golden_text_has_its_view():
    assert {path.stem for path in GOLDEN.iterdir()} == VIEWS.keys()


@every_view
def test_a_view_cuts_nothing_off(name: str, view: RenderableType):
    assert "…" not in (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


@every_view
@pytest.mark.parametrize("width", [40, 80, 100])
def test_a_narrow_terminal_folds_and_keeps_every_character(
    name: str, view: RenderableType, width: int
):
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    with console.capture() as captured:
        console.print(view)
    narrow = captured.get()
    wide = rendered(view, io.StringIO())
    assert max(map(len, narrow.split("\n"))) <= width
    assert sorted(_letters(narrow)) == sorted(_letters(wide))


def _letters(text: str) -> str:
    return "".join(text.split()).replace("─", "")


def test_brackets_in_a_name_are_no_markup():
    plan = COMMITTED.model_copy(update={"card": "card [bold]x[/bold] :warning:"})
    assert "on card [bold]x[/bold] :warning: (simulated)" in rendered(
        report_view(report(plan)), io.StringIO()
    )


def test_a_plan_that_is_no_dry_run_says_what_is_and_not_what_would_be():
    plan = COMMITTED.model_copy(update={"device": "NVIDIA GeForce RTX 5090", "in_effect": True})
    text = rendered(report_view(report(plan, plan)), io.StringIO())
    assert "Retains text_encoder" in text
    assert "ould retain" not in text
