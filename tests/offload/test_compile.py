"""Modules that were compiled, layer by layer or whole, while their layers come and go."""

from collections.abc import Callable, Iterator

import pytest
import torch
from snapshot import snapshot
from stacks import Stack, row
from torch import nn
from torch._dynamo.utils import counters

from residency.offload.cards import custom_card
from residency.offload.compiled import retrace, untraced
from residency.offload.layerwise import LayerwiseOffload
from residency.offload.placement import ComponentOffload
from residency.offload.simulated.card import SimulatedCard

Compile = Callable[[Stack], nn.Module]


def by_layer(module: Stack) -> nn.Module:
    """As diffusers compiles repeated blocks."""
    for layer in (*module.first, *module.second):
        layer.compile(backend="eager")
    return module


def in_place(module: Stack) -> nn.Module:
    module.compile(backend="eager")
    return module


def wrapped(module: Stack) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


WAYS = pytest.mark.parametrize("compiled", [by_layer, in_place, wrapped])


@pytest.fixture
def device() -> Iterator[SimulatedCard]:
    torch.compiler.reset()
    counters.clear()
    with SimulatedCard(custom_card(1 << 20), allocator="exact", context_bytes=0) as device:
        yield device
        torch.compiler.reset()
        device.check_integrity()
        assert device.read().allocated_bytes == 0


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def use(offload: LayerwiseOffload, call: nn.Module, *, keep: bool = False) -> list[torch.Tensor]:
    offload.begin_use(holds_resident_set=True, passes=2)
    x = row().to(offload.device.torch_device)
    results = [call(x).cpu() for _ in range(2)]
    offload.release_after_use(keep_resident=keep)
    offload.check_integrity()
    assert offload.layers_run_in_use == set(range(6))
    return results


@WAYS
@pytest.mark.parametrize("first", ["compiled", "hooked"])
def test_a_compiled_module_is_compiled_once_and_gives_the_same_output(
    device, compiled: Compile, first: str
):
    module = Stack()
    expected = module(row())
    offload = LayerwiseOffload(module, device, resident_layers=(2, 1))
    if first == "hooked":
        offload.install()
    call = compiled(module)
    if first == "compiled":
        call(row())
        undone = snapshot(module)
        offload.install()
    before = graphs()
    results = use(offload, call, keep=True)
    assert graphs() == before + 1  # of one layer, which all others are like
    with torch._dynamo.config.patch(error_on_recompile=True):
        for keep in (True, False):
            results += use(offload, call, keep=keep)
    assert graphs() == before + 1
    assert all(torch.equal(result, expected) for result in results)
    offload.remove()
    if first == "compiled":
        assert snapshot(module) == undone
    assert torch.equal(call(row()), expected)


@WAYS
def test_a_graph_from_before_the_hooks_is_not_run_without_them(device, compiled: Compile):
    """It was made with the weights on the card, and there they are again: nothing that it guards
    has changed."""
    module = Stack()
    expected = module(row())
    call = compiled(module.to(device.torch_device))  # type: ignore[arg-type]
    call(row().to(device.torch_device))
    module.to("cpu")
    offload = LayerwiseOffload(module, device, resident_layers=(3, 3))
    offload.install()
    assert all(torch.equal(result, expected) for result in use(offload, call))
    offload.remove()


def test_a_compiled_component_comes_and_goes_in_one_piece(device):
    module = Stack()
    expected = module(row())
    call = wrapped(module)
    placement = ComponentOffload(module, device)
    for _ in range(2):
        placement.begin_use(holds_resident_set=False)
        assert torch.equal(call(row().to(device.torch_device)).cpu(), expected)
        placement.release_after_use()
    placement.remove()


def test_a_hook_that_is_not_traced_runs_on_each_call(device):
    module, ran = nn.Linear(2, 2), []
    seen = module.register_forward_hook(
        untraced(lambda *_: ran.append(torch.compiler.is_compiling()))
    )
    call = torch.compile(module, backend="eager")
    for _ in range(3):
        call(torch.ones(1, 2))
    assert ran == [False] * 3
    seen.remove()


def test_without_retracing_a_new_hook_is_not_called(device):
    """Why `retrace` is there; if this fails, it isn't needed any more."""
    module, ran = nn.Sequential(nn.Linear(2, 2)), []
    call = torch.compile(module, backend="eager")
    call(torch.ones(1, 2))
    module[0].register_forward_hook(untraced(lambda *_: ran.append(1)))
    call(torch.ones(1, 2))
    assert ran == []
    retrace()
    call(torch.ones(1, 2))
    assert ran == [1]
