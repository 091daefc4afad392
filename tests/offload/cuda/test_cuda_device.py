import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, FakeStream, Gpu, out_of_memory
from fake_nvml import Board, FakeNvml

from residency.offload.cuda.device import CudaDevice
from residency.offload.cuda.nvml import Nvml
from residency.offload.cuda.system import Ram, System
from residency.offload.device import FindingKind, Reading, Transfers
from residency.offload.errors import DeviceError, HostMemoryError, InputError

MIB = 1 << 20
GIB = 1 << 30
PID = 4242
LINUX = System("linux", wsl=False, pids=(PID,))


def gpu(**more: Any) -> Gpu:
    return Gpu("NVIDIA RTX", "a", **{"total_bytes": 24 * GIB, "free_bytes": 20 * GIB, **more})


def device(cuda: FakeCuda | None = None, **more: Any) -> CudaDevice:
    return CudaDevice(0, runtime=cuda or FakeCuda([gpu()]), **{"system": LINUX, **more})


def test_a_device_is_known_by_its_name_and_nvmls_uuid():
    nvml = Nvml(FakeNvml(Board("GPU-a", 24 * GIB)))
    assert device(nvml=nvml).identity.uuid == "GPU-a"
    assert device().identity.name == "NVIDIA RTX"
    assert str(device()) == "NVIDIA RTX (24.00 GiB)"


def test_tensors_go_to_the_device_of_the_given_type():
    assert device().torch_device == torch.device("cuda", 0)
    cuda = FakeCuda([gpu(), gpu()])
    second = CudaDevice(1, runtime=cuda, device_type="meta", system=LINUX)
    assert second.torch_device == torch.device("meta", 1)


def test_a_reading_has_the_allocators_figures():
    card = gpu(
        free_bytes=10 * GIB,
        reserved_bytes=12 * GIB,
        allocated_bytes=11 * GIB,
        peak_reserved_bytes=14 * GIB,
        peak_allocated_bytes=13 * GIB,
        alloc_retries=3,
    )
    assert device(FakeCuda([card])).read() == Reading(
        total_bytes=24 * GIB,
        free_bytes=10 * GIB,
        others_bytes=0,
        context_bytes=2 * GIB,
        allocated_bytes=11 * GIB,
        reserved_bytes=12 * GIB,
        peak_allocated_bytes=13 * GIB,
        peak_reserved_bytes=14 * GIB,
        alloc_retries=3,
    )


def test_before_cuda_is_initialized_nothing_is_allocated():
    assert device(FakeCuda([gpu()], initialized=False)).read().reserved_bytes == 0


def test_a_reading_is_taken_again_where_the_allocator_moved_under_it():
    card = gpu(free_bytes=24 * GIB)

    class Moving(FakeCuda):
        asked = 0

        def mem_get_info(self, device: int) -> tuple[int, int]:
            answer = super().mem_get_info(device)
            self.asked += 1
            if self.asked == 3:
                card.reserved_bytes += 4 * GIB
                card.free_bytes -= 4 * GIB
            return answer

    cuda = Moving([card])
    moving = device(cuda)
    moving.read()
    assert cuda.asked == 2
    reading = moving.read()
    assert (reading.free_bytes, reading.reserved_bytes) == (20 * GIB, 4 * GIB)
    assert reading.outside_bytes == 0
    assert cuda.asked == 4


def test_an_allocator_that_never_rests_is_read_all_the_same_and_adds_up():
    card = gpu(free_bytes=24 * GIB)

    class Restless(FakeCuda):
        def memory_stats(self, device: int) -> dict[str, Any]:
            card.reserved_bytes += 10 * GIB
            return super().memory_stats(device)

    reading = device(Restless([card])).read()
    assert reading.free_bytes + reading.reserved_bytes + reading.outside_bytes == 24 * GIB
    assert min(reading.free_bytes, reading.context_bytes) >= 0


def test_the_card_is_read_through_nvml_without_asking_for_facts_again():
    library = FakeNvml(Board("GPU-a", 24 * GIB, 4 * GIB, compute=[(PID, GIB), (9, 3 * GIB)]))
    card = device(nvml=Nvml(library))
    library.calls.clear()
    reading = card.read()
    assert (reading.others_bytes, reading.context_bytes) == (3 * GIB, GIB)
    assert len(library.calls) == 3


def test_a_process_that_nvml_saw_before_its_last_allocation_is_still_this_one():
    late = Board("GPU-a", 24 * GIB, 11 * GIB, compute=[(PID, 8 * GIB - 64 * MIB), (9, 3 * GIB)])
    card = gpu(free_bytes=13 * GIB, reserved_bytes=8 * GIB)
    inspection = device(FakeCuda([card]), nvml=Nvml(FakeNvml(late))).inspect()
    assert (inspection.reading.context_bytes, inspection.reading.others_bytes) == (0, 3 * GIB)
    assert inspection.of(FindingKind.NOT_OWN_PROCESS) is None


def test_a_process_that_holds_less_than_its_allocator_is_another():
    other = Board("GPU-a", 24 * GIB, 11 * GIB, compute=[(PID, 8 * GIB - 64 * MIB - 1)])
    card = gpu(free_bytes=13 * GIB, reserved_bytes=8 * GIB)
    inspection = device(FakeCuda([card]), nvml=Nvml(FakeNvml(other))).inspect()
    assert (inspection.reading.context_bytes, inspection.reading.others_bytes) == (3 * GIB, 0)
    assert inspection.of(FindingKind.NOT_OWN_PROCESS) is not None


def test_a_driver_that_does_not_answer_is_a_device_error_with_its_words():
    cuda = FakeCuda([gpu()])
    card = device(cuda)
    cuda.error = RuntimeError("CUDA error: GPU is lost\nCUDA kernel errors might be …")
    with pytest.raises(DeviceError, match="cuda:0 doesn't say its memory: CUDA error: GPU is lost"):
        card.read()


def test_a_card_so_full_that_no_context_fits_is_a_device_error():
    cuda = FakeCuda([gpu()], error=out_of_memory())
    with pytest.raises(DeviceError, match="out of memory") as raised:
        device(cuda)
    assert raised.value.hint is not None
    assert "other processes" in raised.value.hint


def test_a_card_whose_size_nobody_knows_is_a_device_error():
    with pytest.raises(DeviceError, match="no other source knows the size of NVIDIA RTX"):
        device(FakeCuda([gpu(total_bytes=0, free_bytes=0)]))


def test_the_first_reading_is_kept():
    card = gpu()
    kept = device(FakeCuda([card]))
    first = kept.read()
    card.free_bytes -= GIB
    assert kept.read() != first
    assert kept.first_reading == first


@pytest.mark.parametrize(("grown", "told"), [(256 * MIB, True), (256 * MIB - 1, False)])
def test_growth_outside_is_told_from_a_quarter_of_a_gib(grown: int, told: bool):
    card = gpu()
    watching = device(FakeCuda([card]))
    card.free_bytes -= grown
    assert (watching.inspect().of(FindingKind.FOREIGN_GROWTH) is not None) == told


def test_what_the_process_itself_allocates_is_no_growth_outside():
    card = gpu()
    watching = device(FakeCuda([card]))
    card.free_bytes -= 5 * GIB
    card.reserved_bytes += 5 * GIB
    assert watching.inspect().of(FindingKind.FOREIGN_GROWTH) is None


def test_what_programs_take_of_one_pool_is_no_growth_outside():
    left = [Ram(121 * GIB, 115 * GIB)]
    card = gpu(total_bytes=121 * GIB, free_bytes=100 * GIB, integrated=True)
    watching = device(FakeCuda([card]), ram=lambda: left[-1])
    left.append(Ram(121 * GIB, 95 * GIB))
    assert watching.first_reading.free_bytes - watching.read().free_bytes == 20 * GIB
    assert watching.inspect().of(FindingKind.FOREIGN_GROWTH) is None


def test_an_inspection_has_the_bus_and_what_is_pinned():
    cuda = FakeCuda([gpu()])
    cuda.pinned = {"active_bytes.current": 5, "allocated_bytes.current": 8}
    nvml = Nvml(FakeNvml(Board("GPU-a", 24 * GIB, link=(3, 8))))
    terms = {term.name: term.value for term in device(cuda, nvml=nvml).inspect().terms}
    assert (terms["pinned, in use"], terms["pinned, with cache"]) == (5, 8)
    assert (terms["PCIe generation now"], terms["PCIe lanes now"]) == (3, 8)
    assert (terms["PCIe generation at most"], terms["PCIe lanes at most"]) == (4, 16)


def test_copies_are_counted_as_they_are_told():
    card = device()
    card.count_copy(h2d_bytes=5)
    card.count_copy(h2d_bytes=7)
    card.count_copy(d2h_bytes=3)
    card.count_copy()
    assert card.transfers == Transfers(12, 2, 3, 1)


def test_peaks_cache_and_waiting_are_the_runtimes():
    cuda = FakeCuda([gpu(peak_allocated_bytes=9)])
    card = device(cuda)
    card.reset_peaks()
    card.release_cache()
    card.synchronize()
    assert cuda.calls == [("reset_peak_memory_stats", 0), ("empty_cache",), ("synchronize", 0)]
    assert card.read().peak_allocated_bytes == 0


def test_work_inside_goes_to_the_stream_and_after_it_to_the_one_before():
    card = device()
    before, stream = card.current_stream(), card.new_stream()
    assert stream is not before
    with card.on(stream):
        assert card.current_stream() is stream
    assert card.current_stream() is before


def test_the_stream_is_the_one_before_after_an_error_too():
    card = device()
    before = card.current_stream()
    with pytest.raises(KeyError), card.on(card.new_stream()):
        raise KeyError
    assert card.current_stream() is before


def test_seconds_are_between_two_marks_of_the_current_stream():
    card = device()
    stream: Any = card.new_stream()
    assert isinstance(stream, FakeStream)
    stream.ms = 100.0
    with card.on(stream):
        since = card.mark()
        stream.ms = 1350.0
        until = card.mark()
    assert card.seconds(since, until) == pytest.approx(1.25)


def test_marks_are_of_the_devices_own_stream():
    cuda = FakeCuda([gpu(), gpu()])
    second = CudaDevice(1, runtime=cuda, system=LINUX)
    since = second.mark()
    cuda.streams[1].ms = 250.0
    assert second.seconds(since, second.mark()) == pytest.approx(0.25)


def test_every_value_on_a_real_card_is_defined():
    assert device().is_defined(torch.zeros(1))


def test_a_pinned_copy_has_the_values_and_is_another_tensor():
    host = torch.arange(4.0)
    pinned = device(page_lock=torch.clone).pin(host)
    assert torch.equal(pinned, host)
    assert pinned.data_ptr() != host.data_ptr()


@pytest.mark.parametrize(
    "error",
    [
        out_of_memory(),
        RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"),
        RuntimeError("CUDA error: invalid argument"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_failing_pin_says_that_host_memory_is_short(error: Exception):
    """HM-05: 10 GiB are free on the card, and CUDA says out of memory."""

    def fail(host: torch.Tensor) -> torch.Tensor:
        raise error

    card = device(
        FakeCuda([gpu(free_bytes=10 * GIB)]), page_lock=fail, ram=lambda: Ram(64 * GIB, 48 * GIB)
    )
    with pytest.raises(HostMemoryError) as raised:
        card.pin(torch.zeros(3, dtype=torch.float32))
    assert "page-lock 12 bytes" in raised.value.message
    assert f"{48 * GIB} bytes of it available" in raised.value.message
    assert "host memory that is short, not the card's" in raised.value.message
    assert raised.value.hint is not None
    assert raised.value.__context__ is None


def test_a_pin_that_fails_by_another_fault_says_which():
    def fail(host: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal instruction was encountered")

    with pytest.raises(DeviceError, match="illegal instruction") as raised:
        device(page_lock=fail).pin(torch.zeros(3))
    assert not isinstance(raised.value, HostMemoryError)


def test_the_real_page_lock_fails_as_a_residency_error_without_cuda():
    if torch.cuda.is_available():
        pytest.skip("there is a card here")
    with pytest.raises(DeviceError, match="pinning 12 bytes failed"):
        device().pin(torch.zeros(3))


@pytest.mark.parametrize(("text", "index"), [("cuda", 0), ("cuda:0", 0), (" cuda:1 ", 1)])
def test_a_device_is_named_by_its_index(text: str, index: int):
    cuda = FakeCuda([gpu(), replace(gpu(), uuid="b")])
    parsed = CudaDevice.parse(text, runtime=cuda, nvml=None, system=LINUX)
    assert parsed.torch_device == torch.device("cuda", index)
    assert parsed.identity.uuid == "ab"[index]


@pytest.mark.parametrize("text", ["", "cpu", "cuda:", "cuda:x", "cuda:-1", "0", "cuda:0:1"])
def test_what_names_no_device_is_refused(text: str):
    with pytest.raises(InputError, match="is no CUDA device"):
        CudaDevice.parse(text, runtime=FakeCuda([gpu()]))


def test_an_index_that_is_not_there_is_refused_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    with pytest.raises(InputError) as raised:
        CudaDevice.parse("cuda:2", runtime=FakeCuda([gpu(), gpu()]))
    assert raised.value.message == "there is no cuda:2: this process sees 2, cuda:0 to cuda:1"
    assert raised.value.hint is not None
    assert "CUDA_VISIBLE_DEVICES is '3,1'" in raised.value.hint


def test_a_torch_without_cuda_is_told_from_a_machine_without_a_card(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(InputError, match="has no CUDA compiled in"):
        CudaDevice.parse("cuda:0", runtime=FakeCuda())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(InputError, match="torch sees no CUDA device") as raised:
        CudaDevice.parse("cuda:0", runtime=FakeCuda())
    assert raised.value.hint is not None
    assert "nvidia-smi -L" in raised.value.hint


def test_a_device_that_is_named_opens_a_session_of_nvml(monkeypatch: pytest.MonkeyPatch):
    library = FakeNvml(Board("GPU-a", 24 * GIB))
    monkeypatch.setitem(sys.modules, "pynvml", library)
    parsed = CudaDevice.parse("cuda:0", runtime=FakeCuda([gpu()]))
    assert parsed.identity.uuid == "GPU-a"
    assert library.sessions == 1
    del parsed
    assert library.sessions == 0


def test_a_device_that_is_given_a_session_opens_none(monkeypatch: pytest.MonkeyPatch):
    library = FakeNvml(Board("GPU-a", 24 * GIB))
    monkeypatch.setitem(sys.modules, "pynvml", library)
    CudaDevice.parse("cuda:0", runtime=FakeCuda([gpu()]), nvml=None)
    assert library.inits == 0


@pytest.mark.gpu
def test_a_real_card_adds_up():
    card = CudaDevice.parse("cuda:0")
    held = torch.empty(64 * MIB, dtype=torch.uint8, device=card.torch_device)
    reading = card.read()
    assert reading.allocated_bytes >= held.nbytes
    assert reading.total_bytes == (
        reading.free_bytes + reading.outside_bytes + reading.reserved_bytes
    )
    pinned = card.pin(torch.arange(8.0))
    assert pinned.is_pinned()
    since = card.mark()
    held.fill_(1)
    assert card.seconds(since, card.mark()) >= 0
    assert card.inspect().terms
