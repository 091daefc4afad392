import sys
import threading

import pynvml
import pytest
from fake_nvml import Board, FakeNvml

from residency.offload.cuda.nvml import Nvml
from residency.offload.cuda.system import GpuProcess, NvmlMemory

GIB = 1 << 30

V2, V1 = "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMemoryInfo"


def board(**more: object) -> Board:
    return Board("GPU-a", 24 * GIB, 3 * GIB, GIB, **more)  # type: ignore[arg-type]


def test_a_session_that_is_closed_is_balanced_and_says_why_it_is_silent():
    library = FakeNvml(board())
    nvml = Nvml(library)
    card = nvml.card("a")
    nvml.close()
    nvml.close()
    assert (library.inits, library.sessions) == (1, 0)
    assert card.sample().absent == {
        "memory": "the session is closed",
        "processes": "the session is closed",
    }


def test_a_session_ends_with_the_object():
    library = FakeNvml(board())
    nvml = Nvml(library)
    card = nvml.card("a")
    del nvml
    assert library.sessions == 1
    del card
    assert library.sessions == 0


def test_a_session_that_could_not_begin_is_not_ended():
    library = FakeNvml(fails={"nvmlInit_v2": pynvml.NVMLError_DriverNotLoaded})
    nvml = Nvml(library)
    nvml.close()
    assert nvml.absence == "nvmlInit: Driver Not Loaded"
    assert library.calls == ["nvmlInit_v2"]


def test_nvidia_ml_py_is_not_needed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    nvml = Nvml()
    assert nvml.absence == "nvidia-ml-py isn't installed"
    card = nvml.card("a")
    assert card.facts.missing == nvml.absence
    assert card.sample().memory is None
    assert card.link() == ()


@pytest.mark.parametrize(
    ("told", "known"),
    [("a", "GPU-a"), ("GPU-a", "GPU-a"), ("s", "MIG-s"), ("MIG-s", "MIG-s")],
)
def test_a_card_is_found_by_its_uuid_with_and_without_a_prefix(told: str, known: str):
    library = FakeNvml(board(), Board("MIG-s", parent=board()))
    card = Nvml(library).card(told)
    assert (card.uuid, card.facts.missing) == (known, None)


def test_an_unknown_uuid_is_an_absence_that_names_it():
    facts = Nvml(FakeNvml(board())).card("zz").facts
    assert facts.missing == "no card has the UUID zz (nvmlDeviceGetHandleByUUID: Not Found)"


@pytest.mark.parametrize("uuid", ["", "00000000-0000-0000-0000-000000000000"])
def test_a_card_without_a_uuid_is_not_looked_for(uuid: str):
    library = FakeNvml(board())
    assert Nvml(library).card(uuid).facts.missing == "CUDA gives the card no UUID to find it by"
    assert "nvmlDeviceGetHandleByUUID" not in library.calls


def test_memory_has_what_the_driver_keeps_apart():
    memory = Nvml(FakeNvml(board())).card("a").sample().memory
    assert memory == NvmlMemory(24 * GIB, 20 * GIB, 3 * GIB, GIB, "nvmlDeviceGetMemoryInfo v2")


@pytest.mark.parametrize(
    "error", [pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NotSupported]
)
def test_the_older_call_is_asked_where_the_newer_fails_and_alone_from_then_on(
    error: type[Exception],
):
    library = FakeNvml(board(fails={V2: error}))
    card = Nvml(library).card("a")
    memory = card.sample().memory
    assert memory == NvmlMemory(24 * GIB, 20 * GIB, 4 * GIB, None, "nvmlDeviceGetMemoryInfo")
    library.calls.clear()
    card.sample()
    assert [call for call in library.calls if "Memory" in call] == [V1]


def test_memory_that_neither_call_tells_is_none_with_the_reason():
    fails = dict.fromkeys((V1, V2), pynvml.NVMLError_NotSupported)
    sample = Nvml(FakeNvml(board(fails=fails))).card("a").sample()
    assert sample.memory is None
    assert sample.absent == {"memory": "nvmlDeviceGetMemoryInfo: Not Supported"}


def test_memory_that_comes_back_is_read_again():
    fails = dict.fromkeys((V1, V2), pynvml.NVMLError_Unknown)
    lost = board(fails=fails)
    card = Nvml(FakeNvml(lost)).card("a")
    assert card.sample().memory is None
    lost.fails = {}
    assert card.sample().memory is not None


def test_a_process_that_computes_and_draws_is_one():
    library = FakeNvml(
        board(
            compute=[(1, 5), (2, None), (3, None), (4, 9)],
            graphics=[(1, 7), (2, 4), (4, None), (5, 1)],
        )
    )
    assert Nvml(library).card("a").sample().processes == (
        GpuProcess(1, 7, graphics=True),
        GpuProcess(2, 4, graphics=True),
        GpuProcess(3, None),
        GpuProcess(4, 9, graphics=True),
        GpuProcess(5, 1, graphics=True),
    )


def test_memory_of_a_process_that_is_not_available_is_none_and_never_a_number():
    library = FakeNvml(board(compute=[(1, (1 << 64) - 1)]))
    assert Nvml(library).card("a").sample().processes == (GpuProcess(1, None),)


def test_no_processes_is_not_the_same_as_unknown_processes():
    assert Nvml(FakeNvml(board())).card("a").sample().processes == ()


def test_a_query_that_fails_leaves_the_others():
    queries = {
        "nvmlDeviceGetDisplayActive": "display_active",
        "nvmlDeviceGetVirtualizationMode": "virtualization",
        "nvmlDeviceGetMaxPcieLinkWidth": "pcie_width_max",
    }
    for failing, field in queries.items():
        library = FakeNvml(
            board(fails={failing: pynvml.NVMLError_NoPermission}, mig_mode=0, driver_model=1)
        )
        facts = Nvml(library).card("a").facts
        assert getattr(facts, field) is None
        assert facts.absent == {field: f"{failing}: Insufficient Permissions"}
        for other in set(queries.values()) - {field}:
            assert getattr(facts, other) is not None


def test_facts_in_words():
    facts = (
        Nvml(FakeNvml(board(driver_model=0, display_active=1, mig_mode=1, virtualization=2)))
        .card("a")
        .facts
    )
    assert facts.driver_version == "580.65.06"
    assert (facts.driver_model, facts.virtualization) == ("WDDM", "vGPU")
    assert (facts.display_active, facts.mig_mode, facts.mig_slice) == (True, True, False)
    assert (facts.pcie_generation_max, facts.pcie_width_max) == (4, 16)
    assert facts.absent == {}


def test_a_mode_without_a_name_is_shown_as_its_number():
    assert Nvml(FakeNvml(board(virtualization=9))).card("a").facts.virtualization == "9"


def test_a_binding_that_lacks_a_function_is_an_absence_too():
    class Older(FakeNvml):
        nvmlDeviceGetVirtualizationMode = None  # type: ignore[assignment]

    facts = Nvml(Older(board())).card("a").facts
    reason = "nvmlDeviceGetVirtualizationMode: this nvidia-ml-py doesn't have it"
    assert facts.absent["virtualization"] == reason


def test_a_slice_has_the_bus_of_its_card_and_memory_of_its_own():
    whole = board(mig_mode=1, link=(5, 8))
    card = Nvml(FakeNvml(whole, Board("MIG-s", 10 * GIB, GIB, parent=whole))).card("s")
    assert card.facts.mig_slice
    assert card.facts.mig_mode
    assert [term.value for term in card.link()] == [5, 8]
    memory = card.sample().memory
    assert memory is not None
    assert memory.total_bytes == 10 * GIB


def test_the_bus_is_read_anew_since_an_idle_card_slows_it():
    idle = board(link=(1, 16))
    card = Nvml(FakeNvml(idle)).card("a")
    assert [term.value for term in card.link()] == [1, 16]
    idle.link = (4, 16)
    assert [term.value for term in card.link()] == [4, 16]


def test_a_sample_asks_for_memory_and_processes_and_for_nothing_else():
    library = FakeNvml(board())
    card = Nvml(library).card("a")
    card.sample()
    library.calls.clear()
    card.sample()
    assert library.calls == [
        V2,
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetGraphicsRunningProcesses_v3",
    ]


def test_threads_may_sample_at_once():
    library = FakeNvml(board(compute=[(1, GIB)]))
    card = Nvml(library).card("a")
    alone, found = card.sample(), []

    def take() -> None:
        found.extend(card.sample() for _ in range(50))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [alone] * 200


def test_the_real_library_is_absent_here_and_says_so_or_opens():
    nvml = Nvml()
    assert (nvml.absence is None) or nvml.absence.startswith("nvmlInit: ")
    nvml.close()
