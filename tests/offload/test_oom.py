import pytest
import torch

from residency.offload.memory_errors import Shortfall

MIB = 1 << 20
GIB = 1 << 30

# Texts as CUDA builds of torch print them.
CUDA_TEXTS = {
    "torch 2.11": (
        "CUDA out of memory. Tried to allocate 1.12 GiB. GPU 0 has a total capacity of 23.52 GiB "
        "of which 1034.19 MiB is free. Including non-PyTorch memory, this process has 22.50 GiB "
        "memory in use. Of the allocated memory 21.63 GiB is allocated by PyTorch, and 512.18 MiB "
        "is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try "
        "setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.",
        Shortfall(round(1.12 * GIB), round(1034.19 * MIB)),
    ),
    "other processes": (
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 15.78 GiB "
        "of which 3.81 MiB is free. Process 4711 has 9.00 GiB memory in use. Including non-PyTorch "
        "memory, this process has 6.77 GiB memory in use.",
        Shortfall(20 * MIB, round(3.81 * MIB)),
    ),
    "a full card": (
        "CUDA out of memory. Tried to allocate 2.00 KiB. GPU 0 has a total capacity of 8.00 GiB of "
        "which 0 bytes is free.",
        Shortfall(2048, 0),
    ),
}


@pytest.mark.parametrize(("text", "shortfall"), CUDA_TEXTS.values(), ids=list(CUDA_TEXTS))
def test_the_text_of_cudas_error_gives_the_shortfall(text: str, shortfall: Shortfall):
    assert Shortfall.of(torch.OutOfMemoryError(text)) == shortfall


def test_a_shortfall_that_the_error_carries_goes_before_its_text():
    error = torch.OutOfMemoryError(CUDA_TEXTS["a full card"][0])
    error.shortfall = Shortfall(1023, 1)  # type: ignore[attr-defined]
    assert Shortfall.of(error) == Shortfall(1023, 1)


@pytest.mark.parametrize("text", ["CUDA error: invalid argument", "Tried to allocate 2.00 GiB."])
def test_an_error_without_the_numbers_has_no_shortfall(text: str):
    assert Shortfall.of(RuntimeError(text)) is None


def test_short_is_what_was_asked_for_beyond_what_was_free():
    assert Shortfall(requested_bytes=70, free_bytes=50).short_bytes == 20


def test_nothing_is_short_where_free_memory_was_only_in_pieces():
    assert Shortfall(requested_bytes=50, free_bytes=70).short_bytes == 0
