import pytest
import torch

from residency.offload.device import Reading
from residency.offload.memory_errors import OomKind, classify

MIB = 1 << 20
GIB = 1 << 30


def reading(
    total: float, free: float, *, outside: float = 0.0, peak_allocated: float = 0.0
) -> Reading:
    reserved = total - free - outside
    sizes = (total, free, 0.0, outside, 0.0, reserved, peak_allocated, reserved)
    return Reading(*(round(size * GIB) for size in sizes), alloc_retries=0)


def full(
    asked: str, total: str, free: str, allocated: str = "0 bytes", cached: str = "0 bytes"
) -> torch.OutOfMemoryError:
    """As CUDA builds of torch print it."""
    return torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of {total} of "
        f"which {free} is free. Including non-PyTorch memory, this process has 3.00 GiB memory in "
        f"use. Of the allocated memory {allocated} is allocated by PyTorch, and {cached} is "
        "reserved by PyTorch but unallocated."
    )


ASYNC = torch.OutOfMemoryError(
    "Allocation on device 0 would exceed allowed memory. (out of memory)\n"
    "Currently allocated     : 54.14 GiB\n"
    "Requested               : 686.41 MiB\n"
    "Device limit            : 79.35 GiB\n"
    "Free (according to CUDA): 27.25 MiB\n"
    "PyTorch limit (set by user-supplied memory fraction)\n"
    "                        : 17179869184.00 GiB"
)
ASSERT = RuntimeError(
    'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":1016,'
    " please report a bug to PyTorch."
)


@pytest.mark.parametrize(
    ("error", "now", "kind"),
    [
        pytest.param(
            full("1.96 GiB", "79.18 GiB", "1.08 GiB", "75.31 GiB", "1.83 GiB"),
            reading(79.18, 1.08, outside=0.96),
            OomKind.FRAGMENTED,
            id="AL-04",
        ),
        pytest.param(ASYNC, reading(79.35, 0.0266, outside=0.4), OomKind.FRAGMENTED, id="AL-02"),
        pytest.param(
            torch.OutOfMemoryError("out of memory in copy_"),
            reading(8.0, 4.8),
            OomKind.TRANSIENT,
            id="AL-05",
        ),
        pytest.param(
            full("1.00 GiB", "32.00 GiB", "17.00 GiB", "13.00 GiB"),
            reading(32.0, 17.0),
            OomKind.TRANSIENT,
            id="OR-04",
        ),
        pytest.param(
            full("381.50 MiB", "7.92 GiB", "231.00 MiB", "7.16 GiB"),
            reading(7.92, 0.2256, outside=0.4),
            OomKind.DEVICE,
            id="OR-02",
        ),
        pytest.param(ASSERT, reading(16.0, 0.1), OomKind.DEVICE, id="ME-04"),
        pytest.param(
            full("30.00 GiB", "15.99 GiB", "0 bytes", "30.00 GiB"),
            reading(15.99, 0.0),
            OomKind.DEVICE,
            id="WS-05",
        ),
    ],
)
def test_a_public_case_is_told_by_its_numbers(error: BaseException, now: Reading, kind: OomKind):
    assert classify(error, now) is kind


@pytest.mark.parametrize(
    ("error", "available_gib"),
    [
        pytest.param(
            full("854.00 MiB", "15.93 GiB", "10.23 GiB", "3.45 GiB", "955.91 MiB"), 1.0, id="HM-06"
        ),
        pytest.param(
            full("212.00 MiB", "11.99 GiB", "4.57 GiB", "5.87 GiB", "297.67 MiB"), 0.2, id="HM-07"
        ),
    ],
)
def test_a_card_with_room_and_a_host_without_is_short_of_host_memory(
    error: BaseException, available_gib: float
):
    available = round(available_gib * GIB)
    assert classify(error, host_available_bytes=available) is OomKind.HOST
    assert classify(error, host_available_bytes=30 * GIB) is OomKind.TRANSIENT
    assert classify(error) is OomKind.TRANSIENT


def test_a_full_card_is_full_however_short_the_host_is():
    error = full("2.00 GiB", "24.00 GiB", "1.00 GiB", "22.00 GiB")
    assert classify(error, host_available_bytes=0) is OomKind.DEVICE


@pytest.mark.parametrize(
    ("available", "kind"), [(3 * GIB - 1, OomKind.HOST), (3 * GIB, OomKind.TRANSIENT)]
)
def test_the_host_is_short_with_less_than_two_gib_beyond_what_was_asked_for(
    available: int, kind: OomKind
):
    error = full("1.00 GiB", "24.00 GiB", "20.00 GiB")
    assert classify(error, host_available_bytes=available) is kind


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA error: out of memory"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: invalid argument"),
        full("12.00 GiB", "15.93 GiB", "1.00 GiB"),
        MemoryError(),
    ],
    ids=["OutOfMemoryError", "RuntimeError", "invalid", "with numbers", "MemoryError"],
)
def test_at_a_pin_it_is_the_hosts(error: BaseException):
    """HM-05: pinning 12 GiB fails with 48 GiB of host memory free, and CUDA says out of memory."""
    assert classify(error, reading(15.93, 0.1), pinning=True) is OomKind.HOST


def test_another_fault_at_a_pin_is_no_lack_of_memory():
    error = RuntimeError("CUDA error: an illegal instruction was encountered")
    assert classify(error, pinning=True) is OomKind.NOT_MEMORY


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        OSError("[Errno 12] Cannot allocate memory"),
    ],
)
def test_memory_that_the_host_refuses_is_the_hosts(error: BaseException):
    assert classify(error) is OomKind.HOST


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        torch.OutOfMemoryError("nothing is known"),
    ],
)
def test_without_numbers_it_is_the_cards_unless_half_of_it_is_free(error: BaseException):
    assert classify(error) is OomKind.DEVICE
    assert classify(error, reading(24.0, 12.0)) is OomKind.DEVICE
    assert classify(error, reading(24.0, 12.1)) is OomKind.TRANSIENT


@pytest.mark.parametrize(
    "error",
    [
        ValueError("out of range"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError('x INTERNAL ASSERT FAILED at "/pytorch/aten/src/ATen/core/ivalue.h":1'),
    ],
)
def test_another_error_is_no_lack_of_memory(error: BaseException):
    assert classify(error, reading(24.0, 20.0)) is OomKind.NOT_MEMORY


@pytest.mark.parametrize(
    ("asked", "free", "kind"),
    [
        ("300.00 MiB", "599.00 MiB", OomKind.DEVICE),
        ("300.00 MiB", "600.00 MiB", OomKind.TRANSIENT),
        ("2.00 MiB", "257.00 MiB", OomKind.DEVICE),
        ("2.00 MiB", "258.00 MiB", OomKind.TRANSIENT),
    ],
)
def test_plenty_is_twice_what_was_asked_for_and_256_mib_more(asked: str, free: str, kind: OomKind):
    assert classify(full(asked, "24.00 GiB", free, "23.00 GiB")) is kind


def test_a_limit_that_the_program_set_itself_is_a_full_card():
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 24.00 GiB "
        "of which 20.00 GiB is free. 4.00 GiB allowed; Of the allocated memory 3.90 GiB is "
        "allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated."
    )
    assert classify(error) is OomKind.DEVICE


def test_without_the_text_the_peak_tells_what_was_allocated_when_it_failed():
    """By the time of the reading the failed request's tensors are gone."""
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB "
        "of which 1.00 GiB is free."
    )
    assert classify(error, reading(24.0, 1.0, peak_allocated=22.5)) is OomKind.DEVICE
    assert classify(error, reading(24.0, 1.0, peak_allocated=21.5)) is OomKind.FRAGMENTED
    assert classify(error) is OomKind.DEVICE
