"""The report, without a card: end to end on a simulated one, and with parts that go wrong."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from residency.offload.cards import custom_card
from residency.offload.simulated.card import SimulatedCard
from residency.phases import identity
from residency.phases.graph import Headroom
from residency.planner import fingerprint
from tests.gpu.capped import capped
from tests.gpu.holder import holding
from tests.gpu.notes import Notes, Read, UnmetError
from tests.gpu.part import PARTS, Part, chosen
from tests.gpu.parts import bandwidth, hooks
from tests.gpu.parts.bit_equality import same_bits
from tests.gpu.pipelines import FULL, MID, TINY, filled
from tests.gpu.report import main, report
from tests.gpu.results import FORMAT_VERSION, PartResult, Results, Status
from tests.gpu.runner import Task
from tests.gpu.target import CudaTarget, SimulatedTarget

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
GIB = 1 << 30

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


def run_report(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.gpu.report", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory) -> tuple[Results, str]:
    """The results of all parts, and what was printed."""
    out = tmp_path_factory.mktemp("report") / "results.json"
    ended = run_report("--device", "simulated", "--out", str(out), "--minutes", "60")
    results = Results.read(out)
    assert ended.returncode == 0, f"{ended.stderr}\n{results.text()}"
    return results, ended.stdout


@pytest.fixture
def numbers(simulated) -> dict[str, dict]:
    return {part.name: part.numbers for part in simulated[0].parts}


def test_every_part_runs_to_its_end_on_a_simulated_card(simulated):
    results, _ = simulated
    assert [part.name for part in results.parts] == [part.name for part in PARTS]
    assert [part.error for part in results.parts] == [None] * len(PARTS)
    assert {part.status for part in results.parts} == {Status.OK}


def test_the_file_says_what_was_measured_on_what_and_when(simulated):
    results, printed = simulated
    assert (results.device, results.card) == ("simulated", "simulated card")
    assert results.driver == "simulated"
    assert results.torch == torch.__version__
    assert results.date.startswith("20")
    assert printed.rstrip().endswith(f"{len(PARTS)} ok, 0 failed, 0 skipped")
    assert all(f"\n{part.name} " in printed for part in PARTS)


def test_two_cards_out_of_one_get_opposite_decisions(numbers):
    found = numbers["two_cards"]
    assert found["small_retains"] == []
    assert found["large_retains"] == ["text_encoder"]
    assert found["small_off_bytes"] == found["large_off_bytes"] == 0
    first = found["small_tries"][0]
    assert (first["verdict"], first["rolled_back"]) == ("oom", True)
    assert first["predicted_shortfall_bytes"] > 0


def test_what_retaining_saves_is_the_copies_of_the_set(numbers):
    saved = numbers["two_cards"]["large_tries"][-1]["seconds"]
    assert saved["saved_s"] > saved["noise_s"]
    assert saved["saved_s"] == pytest.approx(saved["baseline_s"] - saved["candidate_s"])


def test_a_simulated_card_predicts_its_own_peaks_exactly(numbers):
    for card in ("small", "large"):
        ratios = numbers["two_cards"][f"{card}_peak_predicted_over_measured"]
        assert {*ratios} == {"text_encode", "denoise", "vae_decode"}
        assert {*ratios.values()} == {1.0}


def test_after_an_oom_nothing_is_left_behind_and_the_next_request_runs(numbers):
    found = numbers["oom_rollback"]
    assert found["tries"][0]["verdict"] == "oom"
    assert found["retained"] == []
    for what in ("allocated", "missing_free"):
        assert found[f"after_the_rollback_{what}_bytes"] == 0
        assert found[f"after_close_{what}_bytes"] == 0
    assert found["next_request_runs"]


def test_layers_are_copied_as_fast_as_one_buffer_where_compute_takes_no_time(numbers):
    found = numbers["bandwidth"]
    assert found["plain_pinned_bytes_per_s"] == pytest.approx(1e9)
    assert found["plain_pageable_bytes_per_s"] == pytest.approx(0.4e9)
    shares = [value for name, value in found.items() if name.endswith("share")]
    assert shares == pytest.approx([1.0] * 4)


def test_compute_hides_copies_and_hooks_take_time(numbers):
    found = numbers["hooks"]
    assert found["compute_s"] >= 1.5 * found["copies_s"]
    assert found["hidden_share_of_copies"] == pytest.approx(
        1 - found["stall_s"] / found["copies_s"]
    )
    assert 0.8 < found["hidden_share_of_copies"] <= found["most_that_can_be_hidden"]
    assert found["hidden_with_one_repeat"] < found["hidden_share_of_copies"]
    assert found["call_streamed_s"] > found["call_bare_s"] > 0


def test_every_way_of_holding_weights_makes_the_same_bits(numbers):
    found = numbers["bit_equality"]
    equal = {name: value for name, value in found.items() if name.startswith("equal: ")}
    assert len(equal) == 7
    assert all(all(value) for value in equal.values())
    assert found["finite_share"] == 1.0
    assert found["distinct_values"] > 1000
    assert found["left_allocated_bytes"] == 0


def test_the_second_start_verifies_what_the_first_committed(numbers):
    found = numbers["settle"]
    assert found["search_status"] == found["verify_status"] == "committed"
    assert found["verify_retained_layers"] == found["search_retained_layers"]
    assert found["verify_retained_layers"]["denoise/transformer"] > 0
    assert found["verify_left_bytes"] == found["search_left_bytes"] == 0


# Parts that go wrong.


def faulty(name: str, *, needs: tuple[str, ...] = (), limit_s: float = 60) -> Part:
    return Part(name, f"tests.gpu.faulty_parts:{name}", needs, limit_s)


def reported(tmp_path: Path, *parts: Part, minutes: float = 10) -> dict[str, PartResult]:
    out = tmp_path / "results.json"
    results = report(parts, device="cuda:0", minutes=minutes, out=out, folder=tmp_path / "work")
    assert Results.read(out) == results
    return {part.name: part for part in results.parts}


def test_a_part_that_raises_keeps_its_numbers_and_no_other_part_from_running(tmp_path):
    done = reported(tmp_path, faulty("raises"), faulty("misses"), faulty("passes"))
    assert [part.status for part in done.values()] == ["failed", "failed", "ok"]
    assert done["raises"].numbers == {"until_then": 1}
    assert "ArithmeticError: the card said no" in done["raises"].error
    assert done["misses"].error == "1 isn't above 2; 3 isn't above 4"
    assert done["misses"].numbers == {"afterwards": 2}
    assert done["passes"].numbers == {"answer": 42}


def test_a_part_that_hangs_is_cut_off_with_all_that_it_started(tmp_path):
    done = reported(tmp_path, faulty("hangs_in_a_call", limit_s=5), faulty("passes"))
    hung = done["hangs_in_a_call"]
    assert hung.status is Status.FAILED
    assert hung.seconds < 30
    assert hung.error.startswith("cut off after 5 s")
    assert "in hangs_in_a_call" in hung.error
    for process in ("pid", "child"):
        assert not is_running(hung.numbers[process])
    assert done["passes"].status is Status.OK


def is_running(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_a_process_that_dies_is_a_part_that_failed(tmp_path):
    done = reported(tmp_path, faulty("is_killed"), faulty("leaves"), faulty("passes"))
    assert done["is_killed"].error.startswith("its process was ended by SIGSEGV")
    assert "in is_killed" in done["is_killed"].error
    assert done["is_killed"].numbers == {"until_then": 1}
    assert done["leaves"].error == "its process ended with 3\na library says why"
    assert done["passes"].status is Status.OK


def test_the_card_is_that_of_the_first_part_that_read_it(tmp_path):
    out = tmp_path / "results.json"
    parts = (faulty("raises"), faulty("passes"), faulty("misses"))
    results = report(parts, device="cuda:0", minutes=10, out=out, folder=tmp_path / "work")
    assert (results.card, results.driver, results.torch) == ("a card", "580.1", "2.11.0")
    assert not results.passed


def test_what_cannot_be_imported_is_said_at_once_and_the_rest_runs(tmp_path, capsys):
    needy = faulty("raises", needs=("torch", "no_such_package"))
    out = tmp_path / "results.json"
    parts = (needy, faulty("passes"))
    results = report(parts, device="cuda:0", minutes=10, out=out, folder=tmp_path / "work")
    first, *_ = capsys.readouterr().err.splitlines()
    assert first == "no_such_package can't be imported: without it there is no raises"
    assert results.missing == ("no_such_package",)
    assert results.parts[0].status is Status.SKIPPED
    assert results.parts[0].error == "not importable: no_such_package"
    assert results.parts[1].status is Status.OK
    assert results.passed


def test_parts_import_nothing_but_what_they_say_they_need():
    program = (
        "import sys\n"
        "from importlib import import_module\n"
        "from tests.gpu.namespace import importable\n"
        "from tests.gpu.part import PARTS\n"
        "named = {name for part in PARTS for name in part.needs} | {'pynvml', 'rich', 'typer'}\n"
        "with importable():\n"
        "    for part in PARTS:\n"
        "        for name in named:\n"
        "            if name not in part.needs:\n"
        "                sys.modules[name] = None\n"
        "            elif sys.modules.get(name, name) is None:\n"
        "                del sys.modules[name]\n"
        "        import_module(part.run.partition(':')[0])\n"
        "        print(part.name)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT
    )
    assert ended.stdout.split() == [part.name for part in PARTS], ended.stderr


def test_without_time_parts_are_skipped_and_the_results_are_written(tmp_path):
    done = reported(tmp_path, faulty("passes"), faulty("raises"), minutes=0.1)
    assert {part.status for part in done.values()} == {Status.SKIPPED}
    assert done["passes"].error == "no time is left of 0.1 minutes"


def test_parts_are_chosen_by_name_and_run_in_the_reports_order():
    assert [part.name for part in chosen(["hooks", "machine"])] == ["machine", "hooks"]
    assert chosen(None) == PARTS
    with pytest.raises(ValueError, match="'hook' is no part: there are machine, bandwidth"):
        chosen(["hook"])


def test_a_part_that_there_is_not_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--parts", "speed"])
    assert ended.value.code == 2
    assert "'speed' is no part" in capsys.readouterr().err


@no_gpu
def test_without_a_card_each_part_fails_and_says_so(tmp_path):
    ended = run_report("--parts", "machine", "--out", str(tmp_path / "results.json"))
    assert ended.returncode == 1
    (machine,) = Results.read(tmp_path / "results.json").parts
    assert machine.status is Status.FAILED
    assert "InputError: torch" in machine.error


@pytest.mark.parametrize(
    ("part", "least", "said"),
    [
        (bandwidth, "LEAST_SHARE", "1 fetched ahead are copied at 100% of a plain"),
        (hooks, "LEAST_HIDDEN", "87% of copies are hidden"),
    ],
)
def test_a_criterion_that_is_not_met_fails_its_part(target, monkeypatch, part, least, said):
    monkeypatch.setattr(part, least, 1.1)
    notes = Notes(target.folder / "notes")
    part.run(target, notes)
    with pytest.raises(UnmetError, match=said):
        notes.end()
    assert Read.of(notes.path).numbers


def test_bits_are_the_same_where_not_a_number_is_and_not_where_only_values_are():
    one = torch.tensor([float("nan"), 0.0])
    assert same_bits(one, one.clone())
    assert not same_bits(one, torch.tensor([float("nan"), -0.0]))
    assert not same_bits(one, one.double())


# A smaller card out of a larger one.


@pytest.fixture
def target(tmp_path) -> SimulatedTarget:
    task = Task(PARTS[0], "simulated", "auto", 60, tmp_path)
    return SimulatedTarget(task, Notes(tmp_path / "notes"))


def test_a_capped_card_has_the_headroom_of_a_card_of_that_size(target):
    context = target.context_bytes
    with SimulatedCard(custom_card(4 * MIB), allocator="exact", context_bytes=context) as real:
        small = real.read()
    with target.device() as device, capped(target, device, 4 * MIB) as card:
        reading = device.read()
        assert card.usable_bytes == card.wanted_bytes == small.usable_bytes
        assert reading.total_bytes == target.total_bytes
        assert reading.others_bytes == target.total_bytes - 4 * MIB
        assert card.held_bytes == reading.others_bytes - target.other_context_bytes
        assert card.off_bytes == 0
        of_both = [
            Headroom(
                "denoise",
                TINY.shape,
                each.total_bytes,
                each.others_bytes,
                each.context_bytes,
                1 * MIB,
                1000,
            ).headroom_bytes
            for each in (reading, small)
        ]
        assert of_both == [4 * MIB - context - 1 * MIB - 1000] * 2


def test_the_allocators_limit_agrees_with_what_is_free(target):
    with target.device() as device:
        with capped(target, device, 4 * MIB):
            reading = device.read()
            limit = target.share * reading.total_bytes
            assert limit == pytest.approx(reading.free_bytes + reading.reserved_bytes, abs=1)
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(reading.free_bytes + 1, dtype=torch.uint8, device=device.torch_device)
        assert target.share == 1.0
        assert device.read().others_bytes == 0


def test_tensors_that_are_there_already_count_as_this_process_own(target):
    with target.device() as device:
        held = torch.empty(1 * MIB, dtype=torch.uint8, device=device.torch_device)
        with capped(target, device, 4 * MIB) as card:
            assert card.off_bytes == 0
            reading = device.read()
            assert reading.free_bytes == card.usable_bytes - held.nbytes
        del held


def test_a_holder_that_takes_whole_pages_leaves_less_than_one_too_much(target, monkeypatch):
    monkeypatch.setattr("tests.gpu.target.SimulatedHolder.granularity_bytes", 2 * MIB)
    with target.device() as device, capped(target, device, 4 * MIB) as card:
        assert card.held_bytes % (2 * MIB) == 0
        assert 0 < card.off_bytes < 2 * MIB


@pytest.mark.parametrize(("total", "said"), [(64 * MIB, "has left"), (300_000, "takes 300000")])
def test_a_card_that_cannot_be_made_is_refused_with_its_numbers(target, total, said):
    with target.device() as device:
        with pytest.raises(ValueError, match=said), capped(target, device, total):
            raise AssertionError("it was made")
        assert device.read().others_bytes == 0


@no_gpu
def test_a_holder_without_a_card_says_that_it_is_not_ready():
    with pytest.raises(RuntimeError, match="not ready"), holding(0):
        raise AssertionError("it holds")


# Pipelines.


def test_the_mid_size_pipeline_has_layers_of_full_width_and_few_of_them():
    modules = {each.name: each.module for each in MID.build_virtual().components}
    weights = {
        name: sum(each.nbytes for each in module.parameters()) for name, module in modules.items()
    }
    assert 4 * GIB < sum(weights.values()) < 5 * GIB
    (full,) = (FULL.family().components[name].config for name in ["transformer"])
    assert modules["transformer"].config.num_attention_heads == full["num_attention_heads"]
    layers = modules["text_encoder"].model.language_model.layers
    assert len(layers) == 4
    assert 368 * MIB <= sum(each.nbytes for each in layers[0].parameters()) < 369 * MIB


def test_filled_weights_are_real_repeatable_and_keep_the_variance():
    first, second = filled(TINY.family()), filled(TINY.family())
    weights = dict(first.components["text_encoder"].named_parameters())
    for name, other in second.components["text_encoder"].named_parameters():
        assert torch.equal(weights[name], other)
    head = weights["lm_head.weight"]
    assert float(head.std()) == pytest.approx(head.shape[1] ** -0.5, rel=0.02)
    norm = weights["model.language_model.norm.weight"]
    assert float(norm.mean()) == pytest.approx(1, abs=0.05)
    layers = [weights[f"model.language_model.layers.{i}.mlp.up_proj.weight"] for i in (0, 1)]
    assert not torch.equal(*layers)


@pytest.mark.parametrize(
    ("asked", "available", "limit_s", "name"),
    [
        ("auto", 100 * GIB, 270, "full"),
        ("auto", 40 * GIB, 270, "mid-size"),
        ("auto", 100 * GIB, 60, "mid-size"),
        ("mid", 100 * GIB, 270, "mid-size"),
        ("full", 40 * GIB, 60, "full"),
    ],
)
def test_the_full_pipeline_runs_where_host_and_time_allow_it(
    tmp_path, monkeypatch, asked, available, limit_s, name
):
    memory = psutil.virtual_memory()._replace(available=available)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    task = Task(PARTS[0], "cuda:0", asked, limit_s, tmp_path)
    source, why = CudaTarget(task, Notes(tmp_path / "notes")).source_for_two_cards()
    assert source.name == name
    assert f"{available / GIB:.0f} GiB of host memory available and {limit_s} s left" in why


# What is kept.

RESULTS = Results(
    device="cuda:0",
    card="NVIDIA H200",
    driver="580.1",
    torch="2.11.0",
    python="3.12.3",
    date="2026-12-01 10:00:00",
    missing=("highspy",),
    parts=(
        PartResult(
            "bandwidth",
            Status.OK,
            12.34,
            {
                "rate_bytes_per_s": 5.5e10,
                "peak_bytes": {"denoise": 3 * GIB, "vae_decode": 1000},
                "tries": [{"retained": [], "rolled_back": True, "phase": None}],
                "stall_s": 0.00025,
                "share": 0.98765,
            },
        ),
        PartResult("hooks", Status.FAILED, 1.0, {}, "Traceback\nValueError: no"),
        PartResult("settle", Status.SKIPPED, 0.0, {}, "not importable: highspy"),
    ),
)
TEXT = """\
NVIDIA H200, driver 580.1, torch 2.11.0, python 3.12.3, 2026-12-01 10:00:00
missing: highspy

bandwidth      ok         12.3 s
  rate_bytes_per_s                               55.000 GB/s
  peak_bytes.denoise                             3.000 GiB
  peak_bytes.vae_decode                          1000 B
  tries[0].retained                              none
  tries[0].rolled_back                           yes
  tries[0].phase                                 not known
  stall_s                                        0.000250 s
  share                                          0.9877

hooks          failed      1.0 s
  | Traceback
  | ValueError: no

settle         skipped     0.0 s
  | not importable: highspy

1 ok, 1 failed, 1 skipped"""


def test_the_text_is_what_a_person_reads():
    assert RESULTS.text() == TEXT


def test_results_are_read_back_as_they_were_written(tmp_path):
    RESULTS.write(tmp_path / "results.json")
    assert Results.read(tmp_path / "results.json") == RESULTS
    assert [*tmp_path.iterdir()] == [tmp_path / "results.json"]
    assert not RESULTS.passed
    assert replace(RESULTS, parts=RESULTS.parts[2:]).passed


def test_results_of_another_format_are_refused(tmp_path):
    old = json.loads(RESULTS.to_json()) | {"format_version": FORMAT_VERSION + 1}
    (tmp_path / "results.json").write_text(json.dumps(old))
    with pytest.raises(ValueError, match="format version 2"):
        Results.read(tmp_path / "results.json")


def test_notes_of_a_process_that_was_killed_while_it_wrote_are_read_as_far_as_they_go(tmp_path):
    notes = Notes(tmp_path / "notes")
    notes.note("whole", 1)
    with notes.path.open("a") as file:
        file.write('{"name": "half", "val')
    read = Read.of(notes.path)
    assert read.numbers == {"whole": 1}
    assert not read.is_done


def test_a_checkout_is_importable_without_being_installed():
    program = (
        "from tests.gpu.namespace import importable\n"
        "with importable():\n"
        "    import residency.offload.errors as found, subprocess, sys\n"
        "    print(found.__file__)\n"
        "    child = 'import residency.offload.errors as found; print(found.__file__)'\n"
        "    subprocess.run([sys.executable, '-c', child], check=True, cwd='/')\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [sys.executable, "-u", "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=True,
    )
    first, second = ended.stdout.split()
    assert first == second
    assert first.endswith("/residency/offload/errors.py")
    assert "/residency-" in first


def test_a_package_that_is_not_installed_has_no_version(monkeypatch):
    def version(package: str) -> str:
        raise identity.PackageNotFoundError(package)

    monkeypatch.setattr(identity, "version", version)
    assert fingerprint.residency_version() == "absent"


# With a card.


@pytest.mark.gpu
@pytest.mark.parametrize("part", [part.name for part in PARTS])
def test_on_a_card(part, tmp_path):
    out = tmp_path / "results.json"
    run_report("--parts", part, "--out", str(out), "--scale", "mid")
    (result,) = Results.read(out).parts
    assert result.status is Status.OK, result.error
