import json
from pathlib import Path

import pytest
from canned import COMMITTED, INFEASIBLE, REFUTED, report
from canned_program import CannedService, Run

from residency.offload.cards import find_card
from residency.offload.errors import BaselineError, InputError, RollbackError
from residency.phases.shape import Shape
from residency.planner.dry_run import PlanRequest
from residency.planner.planfile import parse_report, read_report, write_report

PLAN = ("plan", "qwen-image-2.1", "--card", "RTX 4090")


def test_every_option_reaches_the_planner(run: Run, service: CannedService, tmp_path: Path):
    service.answer = report(COMMITTED)
    previous = tmp_path / "previous.json"
    write_report(report(REFUTED), previous)
    result = run(
        "plan",
        "qwen-image-2.1",
        *("--card", "4090", "--card", "NVIDIA GeForce RTX 5090"),
        *("--shape", "720x720:steps=4,guidance=5", "--shape", "1024x1024"),
        *("--component-residency", "dit=resident,text_encoder=layerwise-offload"),
        *("--component-residency", "vae=resident"),
        *("--layerwise-resident-layers", "text_encoder=0.65"),
        *("--context", "400MiB", "--others", "1GB", "--margin", "2GiB"),
        *("--size", "auto", "--host-memory", "48GiB"),
        *("--exposure", "denoise=0.1,text_encode=1", "--exposure", "vae_decode=.5"),
        *("--explore", "2", "--prefetch", "3", "--tiny"),
        *("--previous", previous, "--expandable-segments"),
    )
    assert (result.code, service.asked) == (
        0,
        PlanRequest(
            pipeline="qwen-image-2.1",
            cards=(find_card("RTX 4090"), find_card("RTX 5090")),
            shapes=(Shape(720, 720, steps=4, guidance=5.0), Shape(1024, 1024)),
            component_residency={
                "dit": "resident",
                "text_encoder": "layerwise-offload",
                "vae": "resident",
            },
            resident_layers={"text_encoder": "0.65"},
            context_bytes=400 << 20,
            others_bytes=10**9,
            margin_bytes=2 << 30,
            size="auto",
            exposures={"denoise": 0.1, "text_encode": 1.0, "vae_decode": 0.5},
            host_bytes=48 << 30,
            explore=2,
            previous=report(REFUTED),
            prefetch=3,
            expandable_segments=True,
            tiny=True,
        ),
    )


def test_what_is_not_said_is_left_to_the_planner(run: Run, service: CannedService):
    service.answer = report(COMMITTED)
    run(*PLAN)
    assert service.asked == PlanRequest("qwen-image-2.1", (find_card("RTX 4090"),))


def test_a_capacity_alone_is_a_card_of_that_size(run: Run, service: CannedService):
    service.answer = report(COMMITTED)
    run("plan", "qwen-image-2.1", "--capacity", "22GiB")
    assert service.asked is not None
    (card,) = service.asked.cards
    assert (card.name, card.total_bytes) == ("22.0 GiB card", 22 << 30)


def test_a_capacity_beside_a_card_is_that_card_with_another_total(run: Run, service: CannedService):
    service.answer = report(COMMITTED)
    run("plan", "qwen-image-2.1", "--card", "RTX 5090", "--capacity", "30GiB")
    assert service.asked is not None
    (card,) = service.asked.cards
    assert (card.name, card.total_bytes, card.pcie_generation) == ("RTX 5090", 30 << 30, 5)
    assert card.sources.total == "given by the user"


def test_data_is_on_stdout_and_progress_a_line_an_event_on_stderr(run: Run, service: CannedService):
    service.answer = report(COMMITTED)
    result = run(*PLAN, "--card", "RTX 5090")
    assert result.out.startswith("qwen-image-2.1 on RTX 5090 (simulated)\n")
    assert result.err.splitlines() == [
        "RTX 4090: measuring the baseline at 720x720",
        "RTX 5090: measuring the baseline at 720x720",
    ]


def test_json_on_stdout_is_the_report(run: Run, service: CannedService):
    service.answer = report(COMMITTED, REFUTED)
    result = run(*PLAN, "--json")
    assert parse_report(result.out, "stdout") == service.answer
    assert json.loads(result.out)["plans"][1]["attempts"][0]["beyond_model"] is True


def test_out_writes_the_report_besides_showing_it(run: Run, service: CannedService, tmp_path: Path):
    service.answer = report(COMMITTED)
    path = tmp_path / "plan.json"
    path.write_text("an older plan")
    result = run(*PLAN, "--out", path)
    assert result.code == 0
    assert "Would retain text_encoder" in result.out
    assert read_report(path) == service.answer
    assert [*tmp_path.iterdir()] == [path]


def test_out_follows_a_link_and_leaves_it_one(run: Run, service: CannedService, tmp_path: Path):
    service.answer = report(COMMITTED)
    link, target = tmp_path / "link.json", tmp_path / "target.json"
    link.symlink_to(target)
    assert run(*PLAN, "--out", link).code == 0
    assert link.is_symlink()
    assert read_report(target) == service.answer


def test_a_report_that_cannot_be_written_is_still_shown(
    run: Run, service: CannedService, tmp_path: Path
):
    folder = tmp_path / "folder"
    folder.mkdir()
    service.answer = report(COMMITTED)
    service.meanwhile = folder.rmdir
    result = run(*PLAN, "--out", folder / "plan.json")
    assert result.code == 2
    assert "Would retain text_encoder" in result.out
    assert "can't be written: No such file or directory" in result.err


def test_a_baseline_that_fits_not_every_card_ends_with_1_and_says_where(
    run: Run, service: CannedService, tmp_path: Path
):
    service.answer = report(COMMITTED, INFEASIBLE)
    result = run(*PLAN, "--json", "--out", tmp_path / "plan.json")
    assert result.code == 1
    assert parse_report(result.out, "stdout") == read_report(tmp_path / "plan.json")
    assert result.err.splitlines()[-2:] == [
        "error: qwen-image-2.1 does not fit RTX 5080: vae_decode at 720x720:steps=4 is short by "
        "1.20 GiB (1,288,490,189 bytes) with nothing retained",
        "hint: offload more components, keep fewer layers resident, or serve smaller shapes",
    ]


def test_retaining_nothing_is_a_plan_and_ends_with_0(run: Run, service: CannedService):
    service.answer = report(REFUTED)
    assert run(*PLAN).code == 0


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (InputError("no", hint="yes"), 2, "error: no\nhint: yes\n"),
        (RollbackError("a hook is left"), 2, "error: a hook is left\n"),
        (BaselineError("too large"), 1, "error: too large\n"),
    ],
)
def test_an_error_of_the_planner_is_a_message_and_a_code(
    run: Run,
    service: CannedService,
    tmp_path: Path,
    error: Exception,
    code: int,
    message: str,
):
    service.answer = error
    result = run(*PLAN, "--out", tmp_path / "plan.json")
    assert (result.code, result.out) == (code, "")
    assert result.err.endswith(message)
    assert not [*tmp_path.iterdir()]


def test_a_fault_of_ours_is_one_line_and_a_traceback_on_request(
    run: Run, service: CannedService, monkeypatch: pytest.MonkeyPatch
):
    service.answer = ZeroDivisionError("division\nby zero")
    result = run(*PLAN)
    assert (result.code, result.out) == (2, "")
    assert "error: ZeroDivisionError: division (this is a fault of residency)\n" in result.err
    assert "Traceback" not in result.err
    assert "Traceback" in run(*PLAN, "--traceback").err
    monkeypatch.setenv("RESIDENCY_TRACEBACK", "1")
    result = run(*PLAN)
    assert (result.code, "Traceback" in result.err) == (2, True)


def test_an_interrupt_ends_with_130_and_writes_nothing(
    run: Run, service: CannedService, tmp_path: Path
):
    service.answer = KeyboardInterrupt()
    result = run(*PLAN, "--out", tmp_path / "plan.json")
    assert (result.code, result.out) == (130, "")
    assert not [*tmp_path.iterdir()]


def test_the_defaults_that_the_help_names_are_the_ones_in_force(run: Run):
    from residency.offload.simulated.card import CONTEXT_BYTES
    from residency.planner.dry_run import MARGIN_BYTES

    text = " ".join(run("plan", "--help").out.split())
    assert f"for the process; default {CONTEXT_BYTES >> 20}MiB" in text
    assert f"in every phase; default {MARGIN_BYTES >> 20}MiB" in text


def test_the_help_has_each_option_once_and_in_a_section_of_its_noun(run: Run):
    sections: dict[str, list[str]] = {}
    for line in run("plan", "--help").out.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            options = sections.setdefault(line, [])
        elif line.startswith("  --"):
            options.append(line.split()[0])
    assert sections == {
        "Arguments:": [],
        "Pipeline and envelope:": ["--shape", "--tiny"],
        "Declarations:": [
            "--component-residency",
            "--layerwise-resident-layers",
            "--size",
            "--prefetch",
        ],
        "Simulated card:": [
            "--card",
            "--capacity",
            "--context",
            "--others",
            "--expandable-segments",
        ],
        "Card of this machine:": ["--device", "--assume-free", "--dry-run"],
        "Prices and choice:": [
            "--exposure",
            "--host-memory",
            "--margin",
            "--explore",
            "--previous",
        ],
        "Output:": ["--json", "--out"],
        "Options:": ["--traceback"],
    }
