import json
import subprocess
import sys
from pathlib import Path

import pytest
from canned import COMMITTED, report
from canned_check import FINGERPRINT, SEVERAL, UUID, FakeNvml, real, simulated
from canned_program import Run

from residency.offload.cards import custom_card
from residency.phases.identity import LibraryPrint
from residency.planner.dry_run import PlanRequest, plan
from residency.planner.fingerprint import CardPrint
from residency.planner.plan import Plan, Report
from residency.planner.planfile import write_report

HEAVY = {"torch", "networkx", "diffusers", "transformers", "numpy"}
OPTIONS = ("--pipeline", "qwen-image-2.1", "--tiny")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    found = FakeNvml(UUID)
    monkeypatch.setitem(sys.modules, "pynvml", found)
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plan.json"


def save(path: Path, *plans: Plan) -> Path:
    write_report(report(*plans), path)
    return path


def test_a_plan_for_a_card_of_this_machine_holds(run: Run, path: Path):
    result = run("check", save(path, real()))
    assert (result.code, result.err) == (0, "")
    title, verdict, digest, rest = result.out.splitlines()
    assert title == "qwen-image-2.1 on NVIDIA GeForce RTX 5090 (NVIDIA GeForce RTX 5090)"
    assert verdict.startswith("Holds: the card is in this machine")
    assert digest == f"fingerprint {FINGERPRINT.digest}"
    assert rest.startswith("Not compared: ")


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (real(driver="560.1"), "Stale: driver was 560.1, is 570.86."),
        (real(residency="0.0.1"), "Stale: residency was 0.0.1, is "),
        (real(torch="2.9.0"), "Stale: torch was 2.9.0, is "),
        (
            real(libraries=(LibraryPrint(name="diffusers", version="0.1"),)),
            "Stale: diffusers was 0.1, is ",
        ),
        (
            real(libraries=(LibraryPrint(name="no-such-package", version="1"),)),
            "Stale: no-such-package was 1, is absent.",
        ),
        (
            real(card=CardPrint(name="NVIDIA H200", uuid="GPU-elsewhere", total_bytes=1)),
            "Stale: UUID of the card was GPU-elsewhere, is absent.",
        ),
        (simulated(torch="2.9.0"), "Stale: torch was 2.9.0, is "),
        (COMMITTED, "Stale: the file doesn't say what the plan holds for."),
    ],
)
def test_a_stale_plan_ends_with_1_and_names_the_first_difference(
    run: Run, path: Path, made: Plan, told: str
):
    result = run("check", save(path, made))
    assert (result.code, result.err) == (1, "")
    assert result.out.splitlines()[1].startswith(told)


def test_a_driver_that_was_not_known_is_not_compared(run: Run, path: Path, machine: FakeNvml):
    machine.driver = b"580.95"
    assert run("check", save(path, real(driver=None))).code == 0
    assert run("check", save(path, real(driver="580.95"))).code == 0


def test_a_machine_whose_cards_cannot_be_listed_is_no_verdict(
    run: Run, path: Path, machine: FakeNvml
):
    machine.absent = True
    for made in (real(), real(driver=None)):
        result = run("check", save(path, made))
        assert (result.code, result.out) == (2, "")
        error, hint = result.err.splitlines()
        assert (
            error == "error: the cards of this machine can't be listed: nvmlInit: Driver Not Loaded"
        )
        assert hint.startswith("hint: ")


def test_a_simulated_plan_needs_no_cards(run: Run, path: Path, machine: FakeNvml):
    machine.absent = True
    assert run("check", save(path, simulated())).code == 0


def test_one_stale_plan_of_several_makes_the_file_stale(run: Run, path: Path):
    result = run("check", save(path, simulated(), real(driver="560.1")))
    assert result.code == 1
    assert result.out.count("Holds: ") == result.out.count("Stale: ") == 1


def test_the_check_is_printed_as_json(run: Run, path: Path):
    result = run("check", save(path, real(driver="560.1")), "--json")
    assert result.code == 1
    assert json.loads(result.out) == {
        "format_version": 1,
        "pipeline": "qwen-image-2.1",
        "compared": "machine",
        "plans": [
            {
                "card": "NVIDIA GeForce RTX 5090",
                "device": "NVIDIA GeForce RTX 5090",
                "fingerprint": FINGERPRINT.model_copy(update={"driver": "560.1"}).digest,
                "holds": False,
                "difference": {"field": "driver", "before": "560.1", "now": "570.86"},
            }
        ],
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no JSON"),
        ('{"format_version": 1}', "format version 1, this residency reads 3"),
        ('{"format_version": 3, "plans": []}', "is no report"),
    ],
)
def test_a_file_that_is_no_plan_is_bad_input(run: Run, path: Path, text: str, message: str):
    path.write_text(text)
    result = run("check", path)
    assert (result.code, result.out) == (2, "")
    assert message in result.err


@pytest.mark.parametrize("option", [("--card", "RTX 5090"), ("--capacity", "22GiB"), ("--tiny",)])
def test_options_for_a_pipeline_without_one_are_bad_input(
    run: Run, path: Path, option: tuple[str, ...]
):
    result = run("check", save(path, simulated()), *option)
    assert result.code == 2
    assert "none is named" in result.err


def test_a_plan_of_a_real_card_is_not_built_anew(run: Run, path: Path):
    result = run("check", save(path, real()), *OPTIONS)
    assert result.code == 2
    assert "was validated on NVIDIA GeForce RTX 5090, not simulated" in result.err


def test_the_help_states_the_exit_codes_of_its_own(run: Run):
    told = run("check", "--help").out
    assert "Exit codes:" in told
    assert "a plan is stale" in told


def test_checking_imports_nothing_heavy(path: Path):
    write_report(SEVERAL, path)
    code = (
        "import sys; from residency.cli.main import main\n"
        f"sys.argv[1:] = ['check', {str(path)!r}]\n"
        "try:\n    main()\nfinally:\n    print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True)
    assert not {name.partition(".")[0] for name in done.stderr.split()} & HEAVY


@pytest.fixture(scope="module")
def planned() -> Report:
    request = PlanRequest(
        "qwen-image-2.1",
        (custom_card(1 << 30),),
        component_residency={"text_encoder": "layerwise-offload", "dit": "layerwise-offload"},
        resident_layers={"text_encoder": "0.5"},
        size="auto",
        tiny=True,
    )
    return plan(request)


def test_a_plan_that_was_just_made_holds_for_the_pipeline_as_it_is_built_now(
    run: Run, path: Path, planned: Report
):
    write_report(planned, path)
    assert run("check", path).code == 0
    result = run("check", path, *OPTIONS)
    assert (result.code, result.err) == (0, "")
    assert "\nHolds: the software, the pipeline and what was declared" in result.out
    assert run("check", path, *OPTIONS, "--capacity", "1GiB").code == 0


def test_another_card_makes_a_simulated_plan_stale(run: Run, path: Path, planned: Report):
    write_report(planned, path)
    result = run("check", path, *OPTIONS, "--card", "RTX 4090")
    assert result.code == 1
    assert "Stale: card was 1.0 GiB card, is RTX 4090." in result.out


def test_another_structure_makes_a_simulated_plan_stale(run: Run, path: Path, planned: Report):
    (made,) = planned.plans
    known = made.fingerprint
    assert known is not None
    first, *others = known.components
    lighter = (first.model_copy(update={"weight_bytes": 1 << 20}), *others)
    before = made.model_copy(
        update={"fingerprint": known.model_copy(update={"components": lighter})}
    )
    result = run("check", save(path, before), *OPTIONS)
    assert result.code == 1
    assert "Stale: weight of text_encoder was 1 MiB (1,048,576 bytes), is 1.1 MiB " in result.out


def test_a_plan_that_does_not_say_what_it_holds_for_is_stale_for_every_pipeline(
    run: Run, path: Path
):
    result = run("check", save(path, COMMITTED), *OPTIONS)
    assert result.code == 1
    assert "doesn't say what the plan holds for" in result.out
