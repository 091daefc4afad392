import gc
import os
import sys
from collections.abc import Iterator

os.environ["OMP_NUM_THREADS"] = "1"  # two spinning threads on shared cores are slower than one

import pytest
import torch

from residency.offload.simulated.storage import card_in_slot, live_buffers, put_in

torch.set_num_threads(1)  # where a plugin has imported torch already
torch.set_grad_enabled(False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs a CUDA device, and this machine has none")
    for item in items:
        if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _no_test_leaves_anything_on_a_card() -> Iterator[None]:
    """There is one slot in a process, and a card is put in only where no tensors are left of the
    one before: neither what a failed test had put in, nor the frames of its traceback, stay. What
    is held all the same fails the test that left it, and not the one that comes next."""
    before = card_in_slot()
    yield
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        if hasattr(sys, name):
            delattr(sys, name)
    left = card_in_slot()
    if left is not None and left is not before:
        left.__exit__(None, None, None)
        put_in(before)
        gc.collect()
    if before is None and live_buffers():
        gc.collect()
        assert not live_buffers(), "tensors stay on a card"


@pytest.fixture(scope="session")
def what_is_imported_is_no_garbage() -> None:
    """A failure and a rollback collect garbage: 0.3 s each where that walks all of diffusers."""
    import diffusers  # noqa: F401
    import transformers  # noqa: F401

    from residency.phases.diffusers.families import families, find_family

    for name in families():  # diffusers imports a class where it is first asked for
        find_family(name, tiny=True).build()
    gc.collect()
    gc.freeze()
