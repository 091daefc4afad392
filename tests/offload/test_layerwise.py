"""What a module does while its layers come and go: the same as on the host, or a clear error."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from snapshot import snapshot
from stacks import Stack, row
from torch import Tensor, nn

from residency.offload.cards import custom_card
from residency.offload.errors import OffloadError
from residency.offload.layerwise import LayerwiseOffload
from residency.offload.simulated.card import InjectedError, SimulatedCard

RETAINED_BYTES = 1536 + 2 * 1024
"""Of a `Stack` with one resident layer in each group."""


@pytest.fixture
def device() -> Iterator[SimulatedCard]:
    with SimulatedCard(
        custom_card(1 << 20), allocator="exact", context_bytes=0, check_order=True
    ) as device:
        yield device
        device.check_integrity()
        assert device.read().allocated_bytes == 0


def run(offload: LayerwiseOffload, *, holds: bool, passes: int, keep: bool) -> list[Tensor]:
    offload.begin_use(holds_resident_set=holds, passes=passes)
    x = row().to(offload.device.torch_device)
    results = [offload.module(x * (n + 1)).cpu() for n in range(passes)]
    offload.release_after_use(keep_resident=keep)
    offload.check_integrity()
    return results


def assert_equal(results: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert all(torch.equal(r, e) for r, e in zip(results, expected, strict=True))


def outputs(module: nn.Module, passes: int) -> list[Tensor]:
    return [module(row() * (n + 1)) for n in range(passes)]


@pytest.mark.parametrize("prefetch", [0, 1, 7])
@pytest.mark.parametrize("counts", [(), (0, 2), (2, 1), (3, 0), (3, 3)])
@pytest.mark.parametrize("path", [range(6), (3, 4, 5, 0, 1, 2), (5, 0, 4, 1)])
def test_the_output_is_the_hosts_to_the_last_bit(device: SimulatedCard, counts, prefetch, path):
    module = Stack(first=(8, 24, 8))
    module.path = path
    expected = outputs(module, 3)
    offload = LayerwiseOffload(module, device, resident_layers=counts, prefetch=prefetch)
    offload.install()
    for holds in (False, True, True, False):
        for keep in (False, holds):
            assert_equal(run(offload, holds=holds, passes=3, keep=keep), expected)
            assert_equal(run(offload, holds=holds, passes=1, keep=keep), expected[:1])
    offload.remove()
    assert_equal(outputs(module, 3), expected)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_path_that_changes_from_pass_to_pass_gives_the_hosts_output(device, prefetch: int):
    module = Stack()
    offload = LayerwiseOffload(module, device, resident_layers=(1, 0), prefetch=prefetch)
    paths = [(0, 1), range(6), (5, 4), (0,), (1, 3, 5), (2, 2, 2), (), range(6)]
    expected = []
    for module.path in paths:
        expected += outputs(module, 1)
    offload.install()
    offload.begin_use(holds_resident_set=True, passes=len(paths))
    x = row().to(device.torch_device)
    results = []
    for module.path in paths:
        results.append(module(x).cpu())
        offload.check_integrity()
    offload.release_after_use()
    assert_equal(results, expected)
    offload.remove()


def test_weights_in_half_precision_and_buffers_of_integers_come_too(device: SimulatedCard):
    module = Stack().to(torch.bfloat16)
    for layer in module.first:
        layer.register_buffer("steps", torch.arange(3), persistent=False)
    offload = LayerwiseOffload(module, device)
    expected = module(row().bfloat16())
    offload.install()
    offload.begin_use(holds_resident_set=False)
    assert torch.equal(module(row().bfloat16().to(device.torch_device)).cpu(), expected)
    offload.remove()


def test_a_layer_that_two_groups_share_runs_in_both(device: SimulatedCard):
    module = Stack()
    module.second[0] = module.first[2]
    expected = outputs(module, 2)
    offload = LayerwiseOffload(module, device, prefetch=1)
    offload.install()
    for _ in range(2):
        assert_equal(run(offload, holds=False, passes=2, keep=False), expected)
    offload.remove()


def test_a_layer_that_repeats_runs_with_one_copy_of_it(device: SimulatedCard):
    module = Stack()
    module.path = (0, 0, 1, 1, 2)
    expected = outputs(module, 2)
    offload = LayerwiseOffload(module, device, prefetch=1)
    offload.install()
    for _ in range(2):
        assert_equal(run(offload, holds=False, passes=2, keep=False), expected)
    offload.remove()


def test_a_buffer_written_during_a_use_is_lost_with_it(device: SimulatedCard):
    module = Stack()
    offload = LayerwiseOffload(module, device)
    offload.install()
    offload.begin_use(holds_resident_set=False)
    module.scale.fill_(9.0)
    offload.release_after_use()
    assert module.scale.tolist() == [0.5]
    offload.remove()


@contextmanager
def watched(offload: LayerwiseOffload) -> Iterator[list[list[int]]]:
    """What is on the device whenever a layer has run. The offload's own hooks come before."""
    seen: list[list[int]] = []
    hooks = [
        layer.register_forward_hook(lambda *_: seen.append(sorted(offload.on_device)))
        for layer in (*offload.module.first, *offload.module.second)
    ]
    yield seen
    for hook in hooks:
        hook.remove()


def test_only_the_layers_in_the_window_are_on_the_device(device: SimulatedCard):
    offload = LayerwiseOffload(Stack(), device, prefetch=1)
    offload.install()
    with watched(offload) as seen:
        run(offload, holds=False, passes=2, keep=False)
        run(offload, holds=False, passes=1, keep=False)
    # Across the groups' border the first pass doesn't know yet who is next.
    assert seen[:6] == [[1], [2], [], [4], [5], []]
    assert seen[6:12] == seen[12:] == [[1], [2], [3], [4], [5], []]
    offload.remove()


def test_as_many_layers_are_fetched_ahead_of_a_resident_one(device: SimulatedCard):
    offload = LayerwiseOffload(Stack(), device, resident_layers=(2, 0), prefetch=1)
    offload.install()
    run(offload, holds=False, passes=1, keep=False)
    with watched(offload) as seen:
        run(offload, holds=True, passes=1, keep=False)
    assert seen == [[0, 1, 2], [0, 1, 2], [0, 1, 3], [0, 1, 4], [0, 1, 5], [0, 1]]
    offload.remove()


def test_a_use_that_failed_teaches_no_order(device: SimulatedCard):
    module = Stack()
    offload = LayerwiseOffload(module, device, prefetch=1)
    offload.install()
    run(offload, holds=False, passes=1, keep=False)
    offload.begin_use(holds_resident_set=False)
    module.path = (0, 99)
    with pytest.raises(IndexError):
        module(row().to(device.torch_device))
    offload.release_all()
    offload.release_after_use()
    module.path = range(6)
    with watched(offload) as seen:
        run(offload, holds=False, passes=1, keep=False)
    assert seen == [[1], [2], [3], [4], [5], []]
    offload.remove()


def test_a_copy_that_failed_can_be_tried_again_in_the_same_use(device: SimulatedCard):
    module = Stack()
    expected = outputs(module, 1)
    offload = LayerwiseOffload(module, device, prefetch=1)
    offload.install()
    offload.begin_use(holds_resident_set=False)
    x = row().to(device.torch_device)
    for n in (1, 4, 5):
        device.faults.at_copy(n)
        with pytest.raises(InjectedError):
            module(x)
        offload.check_integrity()
    assert_equal([module(x).cpu()], expected)
    del x
    offload.remove()


def test_releasing_twice_is_releasing_once(device: SimulatedCard):
    offload = LayerwiseOffload(Stack(), device, resident_layers=(1, 1))
    offload.install()
    run(offload, holds=True, passes=2, keep=True)
    offload.release_after_use(keep_resident=True)
    assert device.read().allocated_bytes == RETAINED_BYTES
    offload.release_after_use()
    offload.release_after_use()
    offload.check_integrity()
    assert device.read().allocated_bytes == 0
    offload.remove()


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_beginning_twice_is_beginning_once(device: SimulatedCard, first: bool, second: bool):
    module = Stack()
    expected = outputs(module, 2)
    offload = LayerwiseOffload(module, device, resident_layers=(1, 1))
    offload.install()
    for _ in range(3):  # the order is known from the second time on
        run(offload, holds=False, passes=1, keep=False)
        offload.begin_use(holds_resident_set=first, passes=2)
        assert_equal(run(offload, holds=second, passes=2, keep=second), expected)
        kept_bytes = RETAINED_BYTES if second else 0
        assert device.read().allocated_bytes == kept_bytes
    offload.remove()


def test_everything_goes_with_release_all_from_any_state(device: SimulatedCard):
    module = Stack()
    before = snapshot(module)
    offload = LayerwiseOffload(module, device, resident_layers=(1, 1), prefetch=2)

    def nothing_is_left() -> bool:
        offload.release_all()
        offload.check_integrity()
        return device.read().allocated_bytes == 0

    assert nothing_is_left()
    offload.install()
    assert nothing_is_left()
    offload.begin_use(holds_resident_set=True)
    assert nothing_is_left()
    run(offload, holds=True, passes=2, keep=True)
    assert nothing_is_left()
    offload.begin_use(holds_resident_set=False)
    module.path = (0, 3)
    module(row().to(device.torch_device))
    assert nothing_is_left()
    assert nothing_is_left()
    module.path = before_path = range(6)
    offload.remove()
    assert module.path is before_path
    assert {k: v for k, v in snapshot(module).items() if k != ".path"} == {
        k: v for k, v in before.items() if k != ".path"
    }


def test_running_outside_a_use_is_an_error_with_a_hint(device: SimulatedCard):
    module = Stack()
    offload = LayerwiseOffload(module, device)
    offload.install()
    for _ in range(2):
        with pytest.raises(OffloadError, match="layer 0 of Stack runs outside a use") as caught:
            module(row())
        assert "begin_use" in str(caught.value.hint)
        run(offload, holds=False, passes=1, keep=False)
    offload.begin_use(holds_resident_set=False)
    offload.release_all()
    with pytest.raises(OffloadError, match="outside a use"):
        module(row())
    offload.remove()
    assert module(row()).shape == row().shape


def test_hooking_twice_is_an_error(device: SimulatedCard):
    offload = LayerwiseOffload(Stack(), device)
    offload.install()
    with pytest.raises(OffloadError, match="hooked already") as caught:
        offload.install()
    assert "remove()" in str(caught.value.hint)
    offload.remove()
    offload.install()
    offload.remove()
    offload.remove()


def test_installing_and_removing_leaves_no_trace(device: SimulatedCard):
    module = Stack()
    before = snapshot(module)
    offload = LayerwiseOffload(module, device, resident_layers=(2, 1))
    assert snapshot(module) == before
    offload.install()
    assert snapshot(module) != before
    run(offload, holds=True, passes=2, keep=True)
    offload.remove()
    assert snapshot(module) == before


def test_hooks_of_others_stay_where_they_are(device: SimulatedCard):
    module = Stack()
    calls = []
    layer = module.first[0]
    layer.register_forward_pre_hook(lambda *_: calls.append("before"))
    layer.register_forward_hook(lambda *_: calls.append("after"))
    before = snapshot(module)
    offload = LayerwiseOffload(module, device)
    offload.install()
    run(offload, holds=False, passes=1, keep=False)
    offload.remove()
    assert calls == ["before", "after"]
    assert snapshot(module) == before


def test_a_module_that_is_on_the_card_already_is_refused(device: SimulatedCard):
    module = Stack().to(device.torch_device)
    with pytest.raises(OffloadError, match="is on simgpu:0, not on the host"):
        LayerwiseOffload(module, device)


def test_a_module_without_memory_is_refused(device: SimulatedCard):
    with pytest.raises(OffloadError, match="is on meta, not on the host"):
        LayerwiseOffload(Stack().to("meta"), device)


def test_a_module_without_layers_is_refused(device: SimulatedCard):
    with pytest.raises(OffloadError, match="Linear has no ModuleList") as caught:
        LayerwiseOffload(nn.Linear(1, 1), device)
    assert "resident or component-offload" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"resident_layers": (1,)}, "1 resident counts for 2 layer groups", "first, second"),
        ({"resident_layers": (4, 0)}, "4 resident layers of first, which has 3", "0 to 3"),
        ({"resident_layers": (0, -1)}, "-1 resident layers of second", "0 to 3"),
        ({"prefetch": -1}, "prefetch is -1", "0 fetches no layer ahead"),
    ],
)
def test_counts_that_do_not_fit_the_layers_are_refused(device, options, message: str, hint: str):
    with pytest.raises(OffloadError, match=message) as caught:
        LayerwiseOffload(Stack(), device, **options)
    assert hint in str(caught.value.hint)


def test_a_layer_moved_behind_its_back_is_found(device: SimulatedCard):
    module = Stack()
    offload = LayerwiseOffload(module, device, resident_layers=(1, 0))
    offload.install()
    offload.check_integrity()
    offload.begin_use(holds_resident_set=True)
    offload.check_integrity()
    device.synchronize()
    module.first[0].to("cpu")
    with pytest.raises(OffloadError, match=r"\(8, 16\)\) should be on simgpu and is on cpu"):
        offload.check_integrity()
    offload.release_all()
    offload.check_integrity()
    module.second[1].to(device.torch_device)
    with pytest.raises(OffloadError, match="should be on cpu and is on simgpu:0"):
        offload.check_integrity()
    offload.remove()
    offload.check_integrity()


def test_a_window_buffer_that_is_lost_is_found(device: SimulatedCard):
    module = Stack()
    offload = LayerwiseOffload(module, device, prefetch=1)
    offload.install()
    offload.begin_use(holds_resident_set=False)
    module(row().to(device.torch_device))
    offload.check_integrity()
    offload._window.pop()
    with pytest.raises(OffloadError, match="2 buffers of at most 2: 0 in use, 1 free"):
        offload.check_integrity()
    offload.remove()
