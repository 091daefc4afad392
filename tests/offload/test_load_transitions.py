"""Public cases of components that don't fit while they are loaded: what is charged is what their
storages hold, and what isn't to be on the card never is."""

import pytest
import torch

from residency.offload.cards import custom_card
from residency.offload.errors import OffloadError
from residency.offload.layerwise import LayerwiseOffload
from residency.offload.placement import ComponentOffload, Resident
from residency.offload.simulated.card import SimulatedCard
from residency.phases.diffusers.families import find_family

GIB = 1 << 30


def encoder(family: str = "wan2.1-t2v-14b", dtype: str = "bfloat16"):
    """A full-scale text encoder without weights."""
    spec = find_family(family).components["text_encoder"]
    return spec.model_copy(update={"dtype": dtype}).build(virtual=True, seed=0)


def card(capacity_gib: float) -> SimulatedCard:
    return SimulatedCard(custom_card(int(capacity_gib * GIB)), virtual=True, context_bytes=0)


def test_a_component_weighs_what_its_storages_hold_whatever_its_config_says():
    """LT-02: loaded as fp32 an encoder takes twice what its checkpoint has."""
    with card(1) as device:
        as_saved = Resident(encoder(), device).weight_bytes
        upcast = Resident(encoder(dtype="float32"), device).weight_bytes
    assert upcast == pytest.approx(2 * as_saved, rel=1e-3)
    assert as_saved / GIB == pytest.approx(10.6, abs=0.1)


def test_an_encoder_that_fits_as_bf16_is_refused_by_the_card_as_fp32():
    """LT-06: 10.6 GiB fit into 18.58, and 21.2 don't; offloaded, neither is ever there whole."""
    with card(18.58) as device:
        fits = Resident(encoder(), device)
        fits.install()
        fits.remove()
        doubled = Resident(encoder(dtype="float32"), device)
        with pytest.raises(torch.OutOfMemoryError):
            doubled.install()
        doubled.remove()
        streamed = LayerwiseOffload(encoder(dtype="float32"), device)
        streamed.install()
        assert device.read().allocated_bytes == 0
        streamed.begin_use(holds_resident_set=False)
        assert device.read().allocated_bytes < 5 * GIB
        streamed.release_all()
        streamed.remove()
        assert device.read().allocated_bytes == 0


def test_what_does_not_fit_in_one_piece_is_streamed():
    """LT-07: a whole-component onload fails on a card that the same component streams through."""
    with card(8) as device:
        whole = ComponentOffload(encoder(), device)
        with pytest.raises(torch.OutOfMemoryError):
            whole.begin_use(holds_resident_set=False)
        whole.release_all()
        assert device.read().allocated_bytes == 0
        device.reset_peaks()
        streamed = LayerwiseOffload(encoder(), device, prefetch=1)
        streamed.install()
        streamed.begin_use(holds_resident_set=False)
        for layer in range(streamed.total_layers):
            streamed._enter(layer)
            streamed._leave(layer)
        assert device.read().peak_allocated_bytes < 3 * GIB
        streamed.release_all()
        streamed.remove()


def test_while_components_are_placed_only_what_is_resident_is_on_the_card():
    """LT-03: an encoder of 15.5 GiB beside a denoiser of 10 doesn't fit 22.03 while it is loaded;
    on the host it takes nothing of the card."""
    with card(22.03) as device:
        streamed = LayerwiseOffload(encoder("qwen-image"), device)
        resident = Resident(encoder(), device)  # of 10.6 GiB, in the denoiser's place
        for placement in (streamed, resident):
            placement.install()
        assert streamed.weight_bytes + resident.weight_bytes > 22.03 * GIB
        peak = device.read().peak_allocated_bytes
        assert peak == pytest.approx(resident.weight_bytes, rel=1e-3)
        for placement in (resident, streamed):
            placement.remove()


def test_a_component_that_is_bound_to_its_device_is_refused_by_what_it_is():
    """LT-04: a loader that puts a quantised encoder on the card leaves nothing to plan."""
    linear = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
    with card(1) as device:
        bound = torch.nn.Sequential(linear)
        linear[0].to(device.torch_device)
        with pytest.raises(OffloadError, match=r"is on simgpu:0, not on the host"):
            LayerwiseOffload(bound, device)
        linear[0].to("cpu")


def test_what_a_process_takes_outside_of_torch_is_no_room_for_weights():
    """LT-05: 23.58 GiB in use, of which torch has 16.93 and 0.085 cached: 6.56 are charged."""
    capacity, free = int(23.64 * GIB), int(32.75 * (1 << 20))
    allocated, cached = int(16.93 * GIB), int(87.06 * (1 << 20))
    outside = capacity - free - allocated - cached
    assert outside / GIB == pytest.approx(6.59, abs=0.04)
    with SimulatedCard(custom_card(capacity), virtual=True, context_bytes=outside) as device:
        assert device.read().usable_bytes == allocated + cached + free
