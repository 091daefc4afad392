import pytest
import torch

torch.set_num_threads(1)  # two spinning threads on shared cores are slower than one
torch.set_grad_enabled(False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs a CUDA device, and this machine has none")
    for item in items:
        if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
            item.add_marker(skip)
