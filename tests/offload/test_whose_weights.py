"""Undo is by ownership: what we put on a module is taken off it, and what others did meanwhile
stays. `leftovers` says what of ours was forgotten."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from snapshot import snapshot
from stacks import WIDTH, Stack, row
from torch import nn
from torch.utils.hooks import RemovableHandle

from residency.offload.cards import custom_card
from residency.offload.errors import OffloadError
from residency.offload.host_memory import HostBudget
from residency.offload.layers import Region
from residency.offload.layerwise import LayerwiseOffload
from residency.offload.placement import ComponentOffload, Placement, Resident
from residency.offload.simulated.card import SimulatedCard

PLACEMENTS: dict[str, Callable[[nn.Module, SimulatedCard], Placement]] = {
    "resident": Resident,
    "whole": ComponentOffload,
    "layerwise": lambda module, device: LayerwiseOffload(module, device, resident_layers=(2, 1)),
}


@pytest.fixture
def device() -> Iterator[SimulatedCard]:
    with SimulatedCard(custom_card(1 << 20), allocator="exact", context_bytes=0) as device:
        yield device
        gc.collect()
        device.check_integrity()
        assert device.read().allocated_bytes == 0


@pytest.fixture(params=PLACEMENTS.values(), ids=list(PLACEMENTS))
def make(request: pytest.FixtureRequest) -> Callable[[nn.Module, SimulatedCard], Placement]:
    return request.param


def use(placement: Placement, *, keep: bool) -> torch.Tensor:
    placement.begin_use(holds_resident_set=True)
    result = placement.module(row().to(placement.device.torch_device)).cpu()
    placement.release_after_use(keep_resident=keep)
    return result


def gone(placement: Placement) -> bool:
    placement.remove()
    return placement.leftovers() == [] and placement.allocated_bytes == 0


def to_bfloat16(module: Stack) -> None:
    module.to(torch.bfloat16)


def other_values(module: Stack) -> None:
    weight = module.first[0].up.weight
    weight.data = weight.data * 2


def other_shape(module: Stack) -> None:
    weight = module.second[0].down.weight
    weight.data = torch.full((3, WIDTH), 7.0, dtype=torch.float64, device=weight.device)


def transposed(module: Stack) -> None:
    weight = module.embed.weight
    weight.data = weight.data.t()


def other_parameter(module: Stack) -> None:
    module.first[1].up.weight = nn.Parameter(module.first[1].up.weight.data + 1)


def untied(module: Stack) -> None:
    module.head.weight = nn.Parameter(module.embed.weight.data)


def other_buffer(module: Stack) -> None:
    module.scale = module.scale * 3


def more_weights(module: Stack) -> None:
    module.first[2].up.lora = nn.Linear(WIDTH, 2, device=module.first[2].up.weight.device)


def layer_taken_out(module: Stack) -> None:
    del module.second[2]
    module.path = range(5)


def frozen(module: Stack) -> None:
    module.embed.weight.requires_grad_(False)
    module.first[0].up.weight.requires_grad_(False)


def hooked(module: Stack) -> None:
    module.first[0].register_forward_hook(forward_hook)
    module.second[1].register_forward_pre_hook(forward_hook)


def forward_hook(*_: Any) -> None:
    pass


CHANGES = [
    to_bfloat16,
    other_values,
    other_shape,
    transposed,
    other_parameter,
    untied,
    other_buffer,
    more_weights,
    layer_taken_out,
    frozen,
    hooked,
]


def contents(module: nn.Module) -> dict[str, Any]:
    """All that a module consists of, but for where in memory it stands."""
    found: dict[str, Any] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        values = tensor.detach().cpu()
        found[name] = (values.dtype, values.shape, tensor.requires_grad, values.tolist())
    for name, part in module.named_modules():
        hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
        found[f"{name} hooks"] = [hook for hook in hooks if hook is forward_hook]
    return found


def strides(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: parameter.stride() for name, parameter in module.named_parameters()}


def stands_apart(module: nn.Module) -> list[str]:
    tensors = (*module.named_parameters(), *module.named_buffers())
    return [name for name, tensor in tensors if tensor.device.type != "cpu"]


@pytest.mark.parametrize("keep", [False, True], ids=["released", "retained"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_somebody_changed_between_uses_is_still_there_afterwards(device, make, change, keep):
    module = Stack()
    placement = make(module, device)
    placement.install()
    use(placement, keep=keep)
    change(module)
    changed, geometry = contents(module), strides(module)
    assert gone(placement)
    assert contents(module) == changed
    assert strides(module) == geometry
    assert stands_apart(module) == []


@pytest.mark.parametrize("change", CHANGES)
def test_what_somebody_changed_during_a_use_is_still_there_afterwards(device, make, change):
    module = Stack()
    placement = make(module, device)
    placement.install()
    placement.begin_use(holds_resident_set=True)
    change(module)
    changed = contents(module)
    placement.release_all()
    assert gone(placement)
    assert contents(module) == changed
    assert stands_apart(module) == []


def apart(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """Where two snapshots differ: what came and what went, too."""
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


@pytest.mark.parametrize("keep", [False, True], ids=["released", "retained"])
@pytest.mark.parametrize("change", [each for each in CHANGES if each is not untied])
def test_all_else_is_as_it_was(device, make, change, keep):
    """Two modules, one that was placed meanwhile: the same change leaves the same behind."""
    module = Stack()
    before = snapshot(module)
    placement = make(module, device)
    placement.install()
    use(placement, keep=keep)
    change(module)
    placement.remove()
    reference = Stack()
    unchanged = snapshot(reference)
    change(reference)
    assert apart(before, snapshot(module)) <= apart(unchanged, snapshot(reference))


@pytest.mark.parametrize("pinned", [False, True])
def test_without_a_change_everything_is_as_it_was(device, make, pinned):
    module = Stack()
    before, expected = snapshot(module), module(row())
    placement = make(module, device)
    for _ in range(2):  # a placement that was removed can be installed again
        placement.install()
        if pinned:
            placement.pin_masters(HostBudget(1 << 20))
        for keep in (True, True, False):
            assert torch.equal(use(placement, keep=keep), expected)
        use(placement, keep=True)
        assert placement.allocated_bytes == device.read().allocated_bytes > 0
        assert gone(placement)
        assert device.pinned_bytes == 0
        assert snapshot(module) == before
    placement.remove()
    assert snapshot(module) == before


def test_a_weight_that_was_cast_and_cast_back_on_the_device_is_unchanged(device, make):
    module = Stack()
    before = snapshot(module)
    placement = make(module, device)
    placement.install()
    placement.begin_use(holds_resident_set=True)
    for parameter in module.parameters():
        parameter.data = parameter.data.double()
        parameter.data = parameter.data.float()
    placement.release_after_use()
    use(placement, keep=False)
    assert gone(placement)
    assert snapshot(module) == before


def test_a_nan_that_was_cast_and_cast_back_is_itself(device, make):
    module = Stack()
    next(module.parameters()).data[0, 0] = float("nan")
    placement = make(module, device)
    placement.install()
    placement.begin_use(holds_resident_set=True)
    for parameter in module.parameters():
        parameter.data = parameter.data.double().float()
    placement.release_after_use()
    use(placement, keep=False)
    assert gone(placement)
    assert next(module.parameters())[0, 0].isnan()


def test_zero_in_place_of_minus_zero_is_another_value(device):
    module = Stack()
    weight = next(module.parameters())
    weight.data[0, 0] = -0.0
    placement = ComponentOffload(module, device)
    placement.install()
    weight.data = weight.data + 0.0
    with pytest.raises(OffloadError, match="was exchanged since it was settled"):
        use(placement, keep=False)
    assert gone(placement)


def test_a_layer_that_can_not_be_bound_in_whole_is_not_bound_at_all(device, monkeypatch):
    module = Stack()
    before = snapshot(module)
    placement = LayerwiseOffload(module, device)
    placement.install()
    layer = placement._layers[0]
    whole = Region.bind

    def bind(self: Region, buffer: torch.Tensor, start: int) -> None:
        if self is layer.regions[-1]:
            raise RuntimeError("injected")
        whole(self, buffer, start)

    assert len(layer.regions) > 1
    with monkeypatch.context() as patch:
        patch.setattr(Region, "bind", bind)
        with pytest.raises(RuntimeError, match="injected"):
            use(placement, keep=False)
    assert all(each.device.type == "cpu" for each in layer.tensors)
    placement.release_all()
    use(placement, keep=False)
    assert gone(placement)
    assert snapshot(module) == before


@pytest.mark.parametrize("change", [to_bfloat16, other_values, other_shape, transposed])
def test_a_weight_that_was_exchanged_is_not_loaded_and_nothing_is_moved(device, make, change):
    module = Stack()
    placement = make(module, device)
    if not isinstance(placement, Resident):
        placement.install()
    change(module)
    changed = snapshot(module)
    begin = placement.install
    if not isinstance(placement, Resident):
        changed = snapshot(module)

        def begin() -> None:
            placement.begin_use(holds_resident_set=True)

    copied = device.transfers
    with pytest.raises(OffloadError, match="was exchanged since it was settled") as caught:
        begin()
    assert caught.value.hint is not None
    assert "settle again" in caught.value.hint
    assert snapshot(module) == changed
    assert (placement.allocated_bytes, device.transfers) == (0, copied)
    assert gone(placement)
    again = make(module, device)
    again.install()
    expected = module if change is other_shape or change is to_bfloat16 else None
    if expected is None:
        use(again, keep=False)
    assert gone(again)


def test_the_error_says_which_weight_it_was_and_what_it_is(device: SimulatedCard):
    module = Stack()
    placement = LayerwiseOffload(module, device)
    placement.install()
    module.second[0].up.to(torch.bfloat16)
    with pytest.raises(
        OffloadError,
        match=r"second\.0\.up\.weight \(torch\.float32 of \(8, 16\)\) was exchanged .*: "
        r"torch\.bfloat16 of \(8, 16\) on cpu stands there now",
    ):
        placement.begin_use(holds_resident_set=False)
    placement.remove()
    with pytest.raises(OffloadError, match=r"second\.0\.up\.weight"):
        placement.install()
    assert placement.leftovers() == []


def test_what_is_written_into_the_memory_of_a_weight_is_loaded(device, make):
    module = Stack()
    placement = make(module, device)
    if isinstance(placement, ComponentOffload | LayerwiseOffload):
        placement.install()
    module.first[0].up.weight.mul_(3)
    expected = module(row()) if not isinstance(placement, LayerwiseOffload) else None
    placement.install() if isinstance(placement, Resident) else None
    result = use(placement, keep=False)
    placement.remove()
    assert torch.equal(result, module(row()) if expected is None else expected)


# Each inverse broken on purpose.


def test_a_binding_that_was_left_is_noticed(device, make, monkeypatch):
    module = Stack()
    placement = make(module, device)
    placement.install()
    use(placement, keep=True)
    unbind = Region.unbind

    def forget_one(region: Region) -> None:
        if region.bindings[0].tensor is not module.first[0].up.weight:
            unbind(region)

    with monkeypatch.context() as broken:
        broken.setattr(Region, "unbind", forget_one)
        placement.remove()
    taken = placement.allocated_bytes
    assert placement.leftovers() == [
        "first.0.up.weight (torch.float32 of (8, 16)) is still on a device buffer",
        f"{taken} bytes of device buffers are still held",
    ]
    assert taken == device.read().allocated_bytes >= 512
    assert gone(placement)


@pytest.mark.parametrize("kept", range(12))
def test_a_hook_that_was_left_is_noticed(device: SimulatedCard, monkeypatch, kept: int):
    module = Stack()
    before = snapshot(module)
    placement = LayerwiseOffload(module, device)
    placement.install()
    handles = list(placement._handles)
    remove = RemovableHandle.remove

    def forget_one(handle: RemovableHandle) -> None:
        if handle is not handles[kept]:
            remove(handle)

    with monkeypatch.context() as broken:
        broken.setattr(RemovableHandle, "remove", forget_one)
        placement.remove()
    group, i = ("first", "second")[kept // 6], kept // 2 % 3
    table = "_forward_hooks" if kept % 2 else "_forward_pre_hooks"
    assert placement.leftovers() == [f"{group}.{i} is still hooked: {table}"]
    remove(handles[kept])
    assert placement.leftovers() == []
    assert snapshot(module) == before


def test_a_hook_on_a_layer_that_was_taken_out_is_noticed(device: SimulatedCard):
    module = Stack()
    placement = LayerwiseOffload(module, device)
    placement.install()
    del module.second[2]
    handle = placement._handles.pop()
    placement.remove()
    assert placement.leftovers() == [
        "layer 5, which was taken out, is still hooked: _forward_hooks"
    ]
    handle.remove()
    assert placement.leftovers() == []


def test_pins_that_were_left_are_noticed(device, make, monkeypatch):
    placement = make(Stack(), device)
    placement.install()
    placement.pin_masters(HostBudget(1 << 20))
    with monkeypatch.context() as broken:
        broken.setattr(placement, "unpin_masters", lambda: None)
        placement.remove()
    left = placement.leftovers()
    assert len(left) == 14
    assert all("are still pinned" in each for each in left)
    placement.unpin_masters()
    assert placement.leftovers() == []


def test_a_buffer_that_somebody_holds_is_told_until_it_is_let_go(device, make):
    module = Stack()
    placement = make(module, device)
    placement.install()
    placement.begin_use(holds_resident_set=True)
    held = module.first[0].up.weight.data[:2]
    placement.release_all()
    placement.remove()
    taken = placement.allocated_bytes
    assert taken == device.read().allocated_bytes >= 512
    assert placement.leftovers() == [f"{taken} bytes of device buffers are still held"]
    del held
    assert placement.leftovers() == []


def test_a_buffer_that_is_kept_by_mistake_is_noticed(device: SimulatedCard, monkeypatch):
    placement = LayerwiseOffload(Stack(), device, resident_layers=(1, 0))
    placement.install()
    use(placement, keep=True)
    with monkeypatch.context() as broken:
        broken.setattr(placement, "_forget_loaded", lambda: None)
        placement.remove()
    assert placement.leftovers() == ["1024 bytes of device buffers are still held"]
    assert gone(placement)
