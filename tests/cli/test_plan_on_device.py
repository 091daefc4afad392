"""`residency plan --device`: the real card's code, whose runtime is a simulated one."""

import pytest
from canned_program import Run

from residency.offload.cards import custom_card
from residency.offload.cuda.device import CudaDevice
from residency.offload.cuda.system import System
from residency.offload.simulated.card import SimulatedCard
from residency.offload.simulated.runtime import SimulatedRuntime
from residency.offload.simulated.work import Clock
from residency.phases.diffusers.families import find_family
from residency.planner.plan import Status
from residency.planner.planfile import read_report
from residency.planner.verdict import Verdict

GIB = 1 << 30
MIB = 1 << 20
PLAN = ("plan", "qwen-image-2.1", "--tiny", "--device", "cuda:0", "--margin", "0")


pytestmark = pytest.mark.usefixtures("what_is_imported_is_no_garbage")


@pytest.fixture(autouse=True)
def _no_traces(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def card(monkeypatch):
    clock = Clock(h2d_bytes_per_s=1e9, pageable_bytes_per_s=4e8, op_s=1e-6)
    with SimulatedCard(custom_card(GIB), allocator="exact", clock=clock) as card:
        runtime = SimulatedRuntime(card)
        device = CudaDevice(
            runtime=runtime,
            device_type="simgpu",
            system=System("linux", False, ()),
            page_lock=card.pin,
        )
        monkeypatch.setattr(CudaDevice, "parse", lambda text: device)
        yield card


def test_the_loop_runs_on_the_card_and_puts_everything_back(run: Run, card, tmp_path):
    out = tmp_path / "plan.json"
    result = run(*PLAN, "--out", out)
    assert result.code == 0
    assert card.read().allocated_bytes == 0
    (plan,) = read_report(out).plans
    assert plan.status is Status.COMMITTED
    assert plan.device == card.identity.name
    assert plan.attempts[-1].verdict is Verdict.ACCEPTED
    assert plan.attempts[-1].seconds < plan.attempts[-1].baseline_seconds
    assert plan.copy_rate_source.startswith("measured: 1.0 GB/s from pinned memory, 0.4 from")
    assert "exposed copies measured" in plan.copy_rate_source
    assert "Would retain" in result.out


def test_a_dry_run_proposes_and_tries_nothing(run: Run, card, tmp_path):
    out = tmp_path / "plan.json"
    result = run(*PLAN, "--dry-run", "--out", out)
    (plan,) = read_report(out).plans
    assert (result.code, plan.status, plan.attempts) == (0, Status.PROPOSED, ())
    assert "by the model and not tried" in result.out
    assert "validated" not in result.out


def test_a_card_that_others_hold_is_planned_as_if_it_were_free(run: Run, card, tmp_path):
    card.others_bytes = GIB - 377 * MIB
    out = tmp_path / "plan.json"
    assert run(*PLAN).code == 1
    card.__exit__(None, None, None)  # the one that is simulated takes its slot
    free = run(*PLAN, "--assume-free", "--out", out)
    (plan,) = read_report(out).plans
    assert (free.code, plan.status, plan.others_bytes) == (0, Status.COMMITTED, 0)
    assert plan.device == "simulated"
    assert plan.card == f"{card.identity.name}, all free"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--card", "RTX 4090"), "--card is of a simulated card, and --device is cuda:0"),
        (("--others", "2GiB"), "--others is of a simulated card"),
        (("--expandable-segments",), "--expandable-segments is of a simulated card"),
        (("--assume-free", "--dry-run"), "--assume-free simulates"),
    ],
)
def test_options_that_would_do_nothing_are_refused(run: Run, options, said):
    result = run(*PLAN, *options)
    assert result.code == 2
    assert said in result.err
    assert "hint:" in result.err


@pytest.mark.parametrize("option", ["--dry-run", "--assume-free"])
def test_what_is_of_a_device_needs_one(run: Run, option):
    result = run("plan", "qwen-image-2.1", "--card", "RTX 4090", option)
    assert result.code == 2
    assert f"{option} needs --device" in result.err


def test_without_cuda_the_error_says_what_is_missing(run: Run):
    result = run(*PLAN)
    assert result.code == 2
    assert "CUDA" in result.err
    assert "hint:" in result.err


def test_a_folder_that_a_pipeline_was_saved_in_can_be_planned(run: Run, card, tmp_path):
    folder = tmp_path / "mine"
    pipeline = find_family("flux.1-dev", tiny=True).build()
    saved = type(pipeline)(**{**pipeline.components, "tokenizer": None, "tokenizer_2": None})
    saved.save_pretrained(folder)
    result = run("plan", folder, "--device", "cuda:0", "--dry-run")
    assert result.code == 2
    assert f"nothing says which shapes {folder} will serve" in result.err
