import json
import sys
from pathlib import Path
from typing import Any

import pynvml
import pytest
import torch
from canned_probe import NO_CARD, TWO_CARDS
from canned_program import Run

import residency.cli.survey
from residency.cli.survey import Machine
from residency.offload.device import FindingKind, Nature

GIB = 1 << 30
FAKES = Path(__file__).parents[1] / "offload" / "cuda"


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The made-up CUDA and NVML of the device's own tests."""
    monkeypatch.syspath_prepend(FAKES)
    import fake_cuda
    import fake_nvml

    class Fakes:
        Gpu, FakeCuda = fake_cuda.Gpu, fake_cuda.FakeCuda
        Board, FakeNvml = fake_nvml.Board, fake_nvml.FakeNvml

        @staticmethod
        def install(cuda: Any, nvml: Any) -> None:
            monkeypatch.setattr(torch, "cuda", cuda)
            monkeypatch.setitem(sys.modules, "pynvml", nvml)

    return Fakes


@pytest.fixture
def bare(fakes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No CUDA in torch, no NVML, no card."""
    monkeypatch.setattr(torch.version, "cuda", None)
    no_library = {"nvmlInit_v2": pynvml.NVMLError_LibraryNotFound}
    fakes.install(fakes.FakeCuda(), fakes.FakeNvml(fails=no_library))


@pytest.fixture
def two(fakes: Any) -> Any:
    """A card to itself, and one that another process holds 20 GiB of."""
    cuda = fakes.FakeCuda(
        [
            fakes.Gpu("RTX 5090", "a", 31 * GIB, 31 * GIB),
            fakes.Gpu("RTX 4090", "b", 23 * GIB, 3 * GIB),
        ]
    )
    fakes.install(cuda, fakes.FakeNvml(fakes.Board("GPU-b", 23 * GIB, 20 * GIB)))
    return cuda


def test_a_bare_machine_says_what_is_missing_and_what_the_host_has(bare: None, run: Run):
    result = run("probe")
    assert (result.code, result.err) == (0, "")
    for text in (
        f"torch {torch.__version__} has no CUDA compiled in",
        "simulate a card with --card",
        "NVML Shared Library Not Found",
        "Host memory",
        "RAM available",
    ):
        assert text in result.out


def test_this_machine_as_it_is_can_be_probed(run: Run):
    result = run("probe", "--json")
    assert result.code == 0
    machine = Machine.model_validate_json(result.out)
    assert (machine.no_card is None) == torch.cuda.is_available()
    assert machine.host[0].value is not None


def test_all_cards_are_probed_unless_one_is_named(two: Any, run: Run):
    machine = Machine.model_validate_json(run("probe", "--json").out)
    assert [(card.device, card.name) for card in machine.cards] == [
        ("cuda:0", "RTX 5090"),
        ("cuda:1", "RTX 4090"),
    ]
    named = Machine.model_validate_json(run("probe", "--json", "--device", "cuda:1").out)
    assert named.cards == machine.cards[1:]
    assert (named.no_card, named.hint, named.unreadable) == (None, None, ())


def test_the_session_of_nvml_is_ended(two: Any, run: Run):
    run("probe")
    assert sys.modules["pynvml"].sessions == 0
    assert sys.modules["pynvml"].inits == 1


def test_the_json_has_a_version_and_every_note_its_nature(two: Any, run: Run):
    found = json.loads(run("probe", "--json").out)
    assert found["format_version"] == 1
    kinds = {kind.value: kind for kind in FindingKind}
    notes = [note for card in found["cards"] for note in card["notes"]]
    assert notes
    for note in notes:
        assert Nature(note["nature"]) is kinds[note["kind"]].nature


def test_the_text_says_what_the_json_says(two: Any, run: Run, monkeypatch: pytest.MonkeyPatch):
    machine = Machine.model_validate_json(run("probe", "--json").out)
    # Host memory is another a moment later.
    monkeypatch.setattr(residency.cli.survey, "survey", lambda device: machine)
    text = run("probe").out
    assert "RTX 5090 (cuda:0)" in text
    assert "RTX 4090 (cuda:1)" in text
    for card in machine.cards:
        for figure in card.figures:
            assert figure.name in text
        for note in card.notes:
            assert note.hint is None or note.hint in text


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda:2", "there is no cuda:2: this process sees 2, cuda:0 to cuda:1"),
        ("gpu", "'gpu' is no CUDA device"),
    ],
)
def test_a_card_that_is_not_there_is_an_error(two: Any, run: Run, device: str, message: str):
    result = run("probe", "--device", device)
    error, hint = result.err.splitlines()
    assert (result.code, result.out) == (2, "")
    assert error == f"error: {message}"
    assert hint.startswith("hint: ")


def test_a_card_that_is_named_on_a_bare_machine_is_an_error(bare: None, run: Run):
    result = run("probe", "--device", "cuda:0")
    assert (result.code, result.out) == (2, "")
    assert "has no CUDA compiled in" in result.err


def test_a_card_that_can_not_be_read_is_told_and_the_others_are_shown(two: Any, run: Run):
    lost = two.mem_get_info

    def lost_first(device: int) -> tuple[int, int]:
        if device == 0:
            raise RuntimeError("CUDA error: GPU is lost")
        answer: tuple[int, int] = lost(device)
        return answer

    two.mem_get_info = lost_first
    result = run("probe")
    assert result.code == 0
    assert "cuda:0 can't be read" in result.out
    assert "CUDA error: GPU is lost" in result.out
    assert "RTX 4090 (cuda:1)" in result.out
    assert run("probe", "--device", "cuda:0").code == 2


@pytest.mark.parametrize("machine", [TWO_CARDS, NO_CARD], ids=["two cards", "no card"])
def test_the_json_is_read_back_as_it_was(machine: Machine):
    assert Machine.model_validate_json(machine.to_json()) == machine
