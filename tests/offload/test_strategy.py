from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from stacks import Stack, row

from residency.offload.cards import custom_card
from residency.offload.layerwise import LayerwiseOffload
from residency.offload.placement import ComponentOffload, Resident, Strategy
from residency.offload.simulated.card import SimulatedCard

REST_TAKES = 1024 + 512
SET = 3 * 1024


@dataclass(frozen=True)
class Use:
    retain_resident_layers: bool = False
    passes: int = 1
    resident_layers: frozenset[int] | None = None
    retained_layers: frozenset[int] | None = None


@pytest.fixture
def device() -> Iterator[SimulatedCard]:
    with SimulatedCard(custom_card(1 << 20), allocator="exact", context_bytes=0) as device:
        yield device
        assert device.read().allocated_bytes == 0


@pytest.fixture
def layerwise(device: SimulatedCard) -> Iterator[LayerwiseOffload]:
    placement = LayerwiseOffload(Stack(), device, resident_layers=(2, 1))
    placement.install()
    yield placement
    placement.remove()


def run(placement, use: Use) -> int:
    """Bytes on the device when the use has ended."""
    strategy, device = Strategy(placement), placement.device
    strategy.prepare(use)
    for _ in range(use.passes):
        placement.module(row().to(device.torch_device))
    strategy.finish(use)
    return device.read().allocated_bytes


@pytest.mark.parametrize("passes", [1, 3])
def test_by_default_a_use_releases_everything(layerwise: LayerwiseOffload, passes: int):
    assert run(layerwise, Use(passes=passes)) == 0
    assert layerwise.on_device == set()


@pytest.mark.parametrize("passes", [1, 3])
def test_a_use_that_retains_leaves_the_set_and_the_non_layer_weights(layerwise, passes: int):
    use = Use(retain_resident_layers=True, passes=passes)
    assert run(layerwise, use) == REST_TAKES + SET == layerwise.allocated_bytes
    assert layerwise.on_device == {0, 1, 3}
    assert run(layerwise, Use()) == 0


@pytest.mark.parametrize(
    ("use", "held"),
    [
        (Use(), set()),
        (Use(passes=2), {0, 1, 3}),
        (Use(retain_resident_layers=True), {0, 1, 3}),
        (Use(retain_resident_layers=True, passes=2), {0, 1, 3}),
    ],
)
def test_the_set_is_held_where_its_layers_run_again_or_are_retained(layerwise, use: Use, held):
    Strategy(layerwise).prepare(use)
    assert layerwise.on_device == held


def test_a_use_of_one_pass_streams_what_it_would_not_use_again(layerwise: LayerwiseOffload):
    run(layerwise, Use())
    before = layerwise.device.transfers
    layerwise.device.reset_peaks()
    run(layerwise, Use())
    assert (layerwise.device.transfers - before).h2d_bytes == 1028 + 6 * 1024 + 64
    assert layerwise.device.read().peak_allocated_bytes == REST_TAKES + 2 * 1024 + 4 * 64


@pytest.mark.parametrize("retain", [False, True])
def test_a_component_in_one_piece_is_retained_or_released_too(device, retain: bool):
    placement = ComponentOffload(Stack(), device)
    use = Use(retain_resident_layers=retain)
    assert run(placement, use) == (placement.weight_bytes if retain else 0)
    placement.remove()


def test_a_resident_component_does_not_care(device: SimulatedCard):
    placement = Resident(Stack(), device)
    placement.install()
    assert run(placement, Use()) == placement.weight_bytes
    placement.remove()


def test_a_use_may_size_its_resident_set_and_what_of_it_is_retained(layerwise):
    sized = Use(
        retain_resident_layers=True,
        resident_layers=frozenset({0, 2, 3}),
        retained_layers=frozenset({2}),
    )
    strategy = Strategy(layerwise)
    strategy.prepare(sized)
    assert layerwise.on_device == {0, 2, 3}
    strategy.finish(sized)
    assert layerwise.on_device == {2}


def test_what_is_retained_is_of_the_resident_set(layerwise):
    sized = Use(retain_resident_layers=True, retained_layers=frozenset({0, 2}))
    strategy = Strategy(layerwise)
    strategy.prepare(sized)
    strategy.finish(sized)
    assert layerwise.on_device == {0}
