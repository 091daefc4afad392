"""What layerwise offload copies and holds, by hand, on an allocator that takes bytes as asked.

A `Stack` has 1024 + 4 bytes in no layer, which take 1024 + 512 on the device, and layers of 128
bytes for each hidden element: 1024 for the usual 8. While a layer adds up, four rows of 64 bytes
are alive: the call's input, the layer's, what it adds, the sum.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from stacks import ROW_BYTES, Block, Stack, row
from torch import nn

from residency.offload.cards import custom_card
from residency.offload.errors import HostMemoryError
from residency.offload.host_memory import HostBudget
from residency.offload.layerwise import LayerwiseOffload
from residency.offload.simulated.card import SimulatedCard
from residency.offload.simulated.storage import mark_virtual

REST = 1024 + 4
REST_TAKES = 1024 + 512
LAYER = 1024
ROWS = 4 * ROW_BYTES


@pytest.fixture
def device() -> Iterator[SimulatedCard]:
    with SimulatedCard(custom_card(1 << 20), allocator="exact", context_bytes=0) as device:
        yield device
        device.check_integrity()
        assert device.read().allocated_bytes == 0


Used = tuple[int, int, int]


def use(
    offload: LayerwiseOffload, *, holds: bool = False, passes: int = 1, keep: bool = False
) -> Used:
    """What one use copies, its peak, and what it leaves."""
    device = offload.device
    before = device.transfers
    device.reset_peaks()
    offload.begin_use(holds_resident_set=holds, passes=passes)
    x = row().to(device.torch_device)
    for _ in range(passes):
        offload.module(x)
    peak_bytes = device.read().peak_allocated_bytes
    del x
    offload.release_after_use(keep_resident=keep)
    offload.check_integrity()
    moved_bytes = (device.transfers - before).h2d_bytes - ROW_BYTES
    return moved_bytes, peak_bytes, device.read().allocated_bytes


@pytest.fixture
def offloaded(device: SimulatedCard) -> Iterator[Callable[..., LayerwiseOffload]]:
    installed: list[LayerwiseOffload] = []

    def install(module: nn.Module, *counts: int, **options) -> LayerwiseOffload:
        offload = LayerwiseOffload(module, device, resident_layers=counts, **options)
        offload.install()
        installed.append(offload)
        return offload

    yield install
    for offload in installed:
        offload.remove()


def test_what_a_component_weighs(offloaded):
    offload = offloaded(Stack(first=(8, 16, 8)), 2, 1)
    assert [layer.buffer_bytes for layer in offload.layers] == [1024, 2048, 1024, 1024, 1024, 1024]
    assert offload.non_layer_bytes == 1024 + 512
    assert offload.weight_bytes == 1536 + 5 * 1024 + 2048
    assert offload.copy_bytes == REST + 5 * 1024 + 2048
    assert (offload.total_layers, offload.resident_layers) == (6, 3)


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5, 9])
def test_one_use_with_nothing_resident_copies_every_weight_once(offloaded, prefetch: int):
    offload = offloaded(Stack(), prefetch=prefetch)
    copies = offload.device.transfers.h2d_copies
    assert use(offload)[0] == REST + 6 * LAYER
    # Two regions in no layer, two in each layer, and the input.
    assert offload.device.transfers.h2d_copies - copies == 2 + 6 * 2 + 1
    assert use(offload)[0] == REST + 6 * LAYER
    assert offload.device.transfers.d2h_bytes == 0


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_every_pass_copies_the_layers_again(offloaded, prefetch: int):
    offload = offloaded(Stack(), prefetch=prefetch)
    for _ in range(3):
        assert use(offload, passes=3)[0] == REST + 3 * 6 * LAYER


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_held_set_is_copied_once_and_the_rest_in_every_pass(offloaded, prefetch: int):
    offload = offloaded(Stack(), 2, 1, prefetch=prefetch)
    for _ in range(2):
        assert use(offload, holds=True, passes=3)[0] == REST + 3 * LAYER + 3 * 3 * LAYER


def test_a_set_that_is_not_held_is_copied_like_any_other_layer(offloaded):
    assert use(offloaded(Stack(), 2, 1), passes=3)[0] == REST + 3 * 6 * LAYER


def test_what_is_retained_is_not_copied_again(offloaded):
    offload = offloaded(Stack(), 2, 1)
    assert use(offload, holds=True, keep=True)[0] == REST + 6 * LAYER
    assert use(offload, holds=True, keep=True)[0] == 3 * LAYER
    assert use(offload, holds=True, passes=2, keep=True)[0] == 2 * 3 * LAYER


def test_with_every_layer_retained_a_use_copies_nothing(offloaded):
    offload = offloaded(Stack(), 3, 3)
    use(offload, holds=True, keep=True)
    assert use(offload, holds=True, passes=3, keep=True)[0] == 0


def test_a_retained_set_saves_its_copies_in_the_next_use_even_if_that_does_not_hold_it(offloaded):
    offload = offloaded(Stack(), 2, 1)
    use(offload, holds=True, keep=True)
    moved_bytes, _, left_bytes = use(offload)
    assert (moved_bytes, left_bytes) == (3 * LAYER, 0)
    assert use(offload)[0] == REST + 6 * LAYER


@pytest.mark.parametrize(("prefetch", "buffers"), [(0, 1), (1, 2), (2, 3), (5, 6), (9, 6)])
def test_the_window_is_one_layer_and_those_fetched_ahead(offloaded, prefetch: int, buffers: int):
    offload = offloaded(Stack(), prefetch=prefetch)
    use(offload)
    assert use(offload, passes=3)[1] == REST_TAKES + buffers * LAYER + ROWS


def test_the_peak_of_a_use_is_non_layer_resident_window_and_activation(offloaded):
    offload = offloaded(Stack(), 2, 1, prefetch=1)
    expected = REST_TAKES + 3 * LAYER + 2 * LAYER + ROWS
    assert use(offload, holds=True, passes=3)[1] == expected == 6912
    assert use(offload, holds=True, passes=3)[1] == expected


def test_a_window_over_one_streamed_layer_has_one_buffer(offloaded):
    offload = offloaded(Stack(), 3, 2, prefetch=2)
    assert use(offload, holds=True, passes=3)[1] == REST_TAKES + 5 * LAYER + 1 * LAYER + ROWS


def test_with_every_layer_held_there_is_no_window(offloaded):
    offload = offloaded(Stack(), 3, 3, prefetch=2)
    assert use(offload, holds=True)[1] == REST_TAKES + 6 * LAYER + ROWS


def test_a_use_leaves_nothing_unless_it_is_kept(offloaded):
    offload = offloaded(Stack(), 2, 1)
    assert use(offload, holds=True)[2] == 0
    assert use(offload, holds=True, keep=True)[2] == REST_TAKES + 3 * LAYER == 4608
    assert use(offload, holds=True)[2] == 0


def test_without_a_set_to_keep_the_non_layer_weights_are(offloaded):
    offload = offloaded(Stack(), 2, 1)
    assert use(offload, keep=True)[2] == REST_TAKES
    assert use(offload)[0] == 6 * LAYER


def test_nothing_is_on_the_device_before_the_first_use(offloaded):
    offload = offloaded(Stack(), 3, 3, prefetch=5)
    assert offload.device.read().allocated_bytes == 0
    assert offload.device.transfers.h2d_bytes == 0


def test_a_tied_weight_is_copied_once_and_takes_its_bytes_once(offloaded):
    module = Stack()
    module.head.weight = nn.Parameter(torch.zeros(16, 16))
    moved_bytes, peak_bytes, _ = use(offloaded(module))
    assert moved_bytes == REST + 1024 + 6 * LAYER
    assert peak_bytes == REST_TAKES + 1024 + 2 * LAYER + ROWS


def test_views_of_one_flat_storage_are_copied_layer_by_layer(offloaded):
    module = Stack()
    storage = torch.zeros(6, LAYER // 4)
    for layer, flat in zip([*module.first, *module.second], storage, strict=True):
        layer.up.weight.data = flat[:128].view(8, 16)
        layer.down.weight.data = flat[128:].view(16, 8)
    moved_bytes, peak_bytes, _ = use(offloaded(module, prefetch=0))
    assert moved_bytes == REST + 6 * LAYER
    assert peak_bytes == REST_TAKES + 1 * LAYER + ROWS


def test_views_that_overlap_are_copied_in_one(offloaded):
    module = Stack()
    storage = torch.zeros(192)
    # `up` has elements 0 to 127, `down` 64 to 191: 192 of 4 bytes, which take 1024.
    module.first[0].up.weight.data = storage[:128].view(8, 16)
    module.first[0].down.weight.data = storage[64:].view(16, 8)
    offload = offloaded(module)
    assert use(offload)[0] == REST + 192 * 4 + 5 * LAYER
    assert offload.layers[0].buffer_bytes == 1024


def test_a_buffer_that_layers_share_is_there_for_the_whole_use(offloaded):
    module = Stack()
    table = torch.zeros(100)
    for layer in (*module.first, *module.second):
        layer.register_buffer("table", table)
    offload = offloaded(module)
    assert offload.non_layer_bytes == REST_TAKES + 512
    assert use(offload)[0] == REST + 400 + 6 * LAYER


def test_a_weight_that_a_layer_shares_with_the_head_is_there_for_the_whole_use(offloaded):
    module = Stack(first=(16, 8, 8))
    module.first[0].up.weight = module.embed.weight
    offload = offloaded(module)
    # `up` of 1024 bytes is `embed`; `down` of 1024 is what the layer has left.
    assert [layer.buffer_bytes for layer in offload.layers] == [1024] * 6
    moved_bytes, peak_bytes, _ = use(offload, passes=2)
    assert moved_bytes == REST + 2 * 6 * LAYER
    assert peak_bytes == REST_TAKES + 2 * LAYER + ROWS


def test_layers_of_unequal_size_share_buffers_of_the_largest(offloaded):
    offload = offloaded(Stack(first=(8, 16, 8), second=(24, 8, 8)), prefetch=1)
    wide_rows = ROWS - ROW_BYTES + 24 * 4  # in the layer of 24, what it adds isn't summed up yet
    layers = 4 * 1024 + 2048 + 3072
    # The first use finds out: 2048 from the second layer is still there when 3072 come.
    assert use(offload)[:2] == (REST + layers, REST_TAKES + 2048 + 3072 + wide_rows)
    assert use(offload)[:2] == (REST + layers, REST_TAKES + 2 * 3072 + wide_rows)


def test_a_large_layer_that_is_held_makes_no_large_buffers(offloaded):
    offload = offloaded(Stack(first=(24, 8, 8)), 1, 0, prefetch=1)
    wide_rows = ROWS - ROW_BYTES + 24 * 4
    for _ in range(2):
        _, peak_bytes, _ = use(offload, holds=True, passes=2)
        assert peak_bytes == REST_TAKES + 3072 + 2 * LAYER + wide_rows


def test_a_region_is_copied_as_it_is_and_takes_multiples_of_512(offloaded):
    offload = offloaded(Stack(first=(9, 9, 9), second=(9, 9, 9)), prefetch=0)
    # 9 x 64 = 576 bytes up and down, which take 1024 each.
    assert [layer.buffer_bytes for layer in offload.layers] == [2048] * 6
    assert use(offload)[:2] == (REST + 6 * 1152, REST_TAKES + 2048 + ROWS)


@pytest.mark.parametrize("prefetch", [1, 2])
def test_groups_that_run_in_another_order_are_fetched_in_theirs(offloaded, prefetch: int):
    module = Stack()
    module.path = (3, 4, 5, 0, 1, 2)
    offload = offloaded(module, prefetch=prefetch)
    for _ in range(3):
        moved_bytes, peak_bytes, _ = use(offload, passes=3)
        assert moved_bytes == REST + 3 * 6 * LAYER
        assert peak_bytes == REST_TAKES + (1 + prefetch) * LAYER + ROWS


@pytest.mark.parametrize("path", [(5, 4, 3, 2, 1, 0), (0, 3, 1, 4, 2, 5), (2, 0, 1)])
def test_any_order_is_learned_and_nothing_is_copied_in_vain_from_then_on(offloaded, path):
    module = Stack()
    module.path = path
    offload = offloaded(module, prefetch=1)
    use(offload, passes=2)
    for _ in range(2):
        assert use(offload, passes=3)[0] == REST + 3 * len(path) * LAYER


def test_layers_that_never_run_are_not_copied(offloaded):
    module = Stack()
    module.path = (3, 4, 5)
    offload = offloaded(module, 0, 1)
    assert use(offload)[0] == REST + 3 * LAYER
    assert use(offload, holds=True, passes=2)[0] == REST + 1 * LAYER + 2 * 2 * LAYER
    assert offload.layers_run == {3, 4, 5}


def test_layers_that_never_run_are_copied_as_part_of_a_set_that_is_held(offloaded):
    module = Stack()
    module.path = (3, 4, 5)
    offload = offloaded(module, 2, 0)
    assert use(offload, holds=True, passes=2)[0] == REST + 2 * LAYER + 2 * 3 * LAYER


def test_a_model_that_leaves_early_copies_one_layer_in_vain_and_then_none(offloaded):
    module = Stack()
    module.path = (0, 1)
    offload = offloaded(module, prefetch=1)
    # In definition order 2 follows 1.
    assert use(offload)[0] == REST + 3 * LAYER
    assert use(offload)[0] == REST + 2 * LAYER
    assert use(offload, passes=3)[0] == REST + 3 * 2 * LAYER


def test_a_model_that_leaves_early_only_sometimes_is_followed(offloaded):
    module = Stack()
    offload = offloaded(module, prefetch=1)
    use(offload)
    module.path = (0, 1)
    assert use(offload)[0] == REST + 3 * LAYER
    module.path = range(6)
    assert use(offload)[0] == REST + 6 * LAYER
    assert use(offload, passes=2)[0] == REST + 2 * 6 * LAYER


def test_the_next_pass_is_fetched_only_while_one_is_left(offloaded):
    offload = offloaded(Stack(), prefetch=2)
    use(offload)
    x = row().to(offload.device.torch_device)
    offload.begin_use(holds_resident_set=False, passes=2)
    assert offload.on_device == {0, 1}
    offload.module(x)
    assert offload.on_device == {0, 1}
    offload.module(x)
    assert offload.on_device == set()
    offload.release_after_use()


def test_the_first_streamed_layers_are_fetched_when_a_use_begins(offloaded):
    offload = offloaded(Stack(), 2, 0, prefetch=2)
    use(offload, holds=True)
    offload.begin_use(holds_resident_set=True, passes=1)
    assert offload.on_device == {0, 1, 2, 3}
    offload.release_after_use()


def test_predictions_are_what_is_measured(offloaded):
    offload = offloaded(Stack(first=(8, 16, 8)), 2, 1, prefetch=1)
    use(offload, holds=True, passes=2)
    moved_bytes, peak_bytes, _ = use(offload, holds=True, passes=2, keep=True)
    held_bytes = 1024 + 2048 + 1024
    assert moved_bytes == REST + held_bytes + 2 * 3 * LAYER
    assert peak_bytes == REST_TAKES + held_bytes + 2 * LAYER + ROWS
    again_bytes, _, left_bytes = use(offload, holds=True, passes=2, keep=True)
    assert moved_bytes - again_bytes == REST + held_bytes
    assert left_bytes == offload.allocated_bytes == REST_TAKES + held_bytes


@pytest.mark.parametrize("pin", [False, True])
def test_virtual_weights_take_and_move_what_real_ones_do(pin: bool):
    def run(virtual: bool) -> list[Used]:
        module = Stack(first=(8, 24, 8))
        if virtual:
            for parameter in module.parameters():
                mark_virtual(parameter)
        card = custom_card(1 << 20)
        with SimulatedCard(card, allocator="exact", context_bytes=0, virtual=virtual) as device:
            budget = HostBudget(1 << 20) if pin else None
            offload = LayerwiseOffload(module, device, resident_layers=(2, 1), pin=budget)
            offload.install()
            offload.begin_use(holds_resident_set=True)
            assert device.is_defined(module(row().to(device.torch_device))) == (not virtual)
            offload.release_after_use()
            uses = [use(offload, holds=keep, passes=2, keep=keep) for keep in (True, True, False)]
            pinned_bytes = device.pinned_bytes
            offload.remove()
            return [*uses, (pinned_bytes, budget.charged_bytes if budget else 0, 0)]

    assert run(virtual=True) == run(virtual=False)


def test_pinned_masters_are_charged_after_rounding_while_they_are_installed(device):
    budget = HostBudget(1 << 20)
    module = Stack(first=(24, 8, 8))
    offload = LayerwiseOffload(module, device, pin=budget)
    offload.install()
    # 24 x 64 = 1536 bytes up and down are charged 2048 each; all else is a power of two.
    charged = 2 * 2048 + 5 * 2 * 512 + 1024 + 4
    assert budget.charged_bytes == device.pinned_bytes == charged
    assert use(offload)[0] == REST + 3072 + 5 * LAYER
    offload.remove()
    assert budget.charged_bytes == device.pinned_bytes == 0
    offload.install()
    assert budget.charged_bytes == device.pinned_bytes == charged
    offload.remove()


@pytest.mark.parametrize("budget_bytes", [0, 511, 3000, 6 * 1024 + 1023, 6 * 1024 + 1024 + 3])
def test_a_budget_that_is_too_small_pins_nothing_at_all(device, budget_bytes: int):
    budget = HostBudget(budget_bytes)
    offload = LayerwiseOffload(Stack(), device, pin=budget)
    with pytest.raises(HostMemoryError, match="are left"):
        offload.install()
    assert budget.charged_bytes == device.pinned_bytes == 0
    assert not any(layer._forward_pre_hooks for layer in offload.module.first)
    budget.available_bytes = 6 * 1024 + 1024 + 4
    offload.install()
    assert budget.charged_bytes == budget.available_bytes
    offload.remove()


def test_a_block_weighs_128_bytes_for_each_hidden_element():
    assert sum(p.nbytes for p in Block(8).parameters()) == LAYER
