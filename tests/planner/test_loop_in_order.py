"""The whole loop on a card whose order is checked: by itself, and as what stands for CUDA."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from bench_card import GIB, Bench, tiny
from pipeline_image import image_of

from residency.offload.cards import custom_card
from residency.offload.cuda.device import CudaDevice
from residency.offload.cuda.system import System
from residency.offload.device import Device
from residency.offload.errors import OrderError
from residency.offload.layers import CopyStream
from residency.offload.simulated.card import SimulatedCard
from residency.offload.simulated.runtime import SimulatedRuntime
from residency.offload.simulated.work import Clock
from residency.phases.component import declare
from residency.phases.diffusers.families import find_family
from residency.phases.shape import Shape
from residency.planner import proof
from residency.planner.choosing.prices import Pricing

CLOCK = Clock(h2d_bytes_per_s=24e9, pageable_bytes_per_s=6e9, op_s=1e-5, bytes_per_s=1e12)


def checked(**options) -> SimulatedCard:
    return SimulatedCard(
        custom_card(GIB), allocator="exact", context_bytes=0, check_order=True, **options
    )


def bench_on(card: SimulatedCard, family: str) -> Bench:
    """Everything but the VAE layerwise, half of it resident."""
    pipeline = tiny(family)
    residency = {"dit": "layerwise-offload", "text_encoder": "layerwise-offload"}
    declarations = declare(pipeline.components, residency, dict.fromkeys(residency, "0.5"))
    size = find_family(family, tiny=True).request
    shape = Shape(size.width, size.height, size.frames, tokens=size.tokens)
    return Bench(card, pipeline, declarations, shape)


def itself(card: SimulatedCard) -> Device:
    return card


def as_cuda(card: SimulatedCard) -> Device:
    return CudaDevice(
        runtime=SimulatedRuntime(card),
        device_type="simgpu",
        system=System("linux", False, ()),
        page_lock=card.pin,
    )


@pytest.fixture(autouse=True)
def _compared_in_one_round(monkeypatch):
    monkeypatch.setattr(proof, "compare", partial(proof.compare, rounds=1))


def run_in_order(family: str, device_on: Callable[[SimulatedCard], Device], **settings) -> list:
    """Retains something that saves time, and puts all back. What was read in each phase."""
    with checked(clock=CLOCK) as card:
        test = bench_on(card, family)
        before = image_of(test.pipeline.pipeline)
        device = device_on(card)
        outcome = test.loop(device=device, **settings)
        assert outcome.committed is not None
        for measured, planned in zip(
            outcome.baseline.sweep.runs, outcome.planned.runs, strict=True
        ):
            assert torch.equal(measured.output.value, planned.output.value)
            assert planned.traces[-1].seconds < measured.traces[-1].seconds
        assert device.read() == card.read()
        outcome.close()
        assert before.differences(image_of(test.pipeline.pipeline)) == []
        assert card.read().allocated_bytes == card.pinned_bytes == 0
        return [
            (at.phase, at.reading)
            for run in (*outcome.baseline.sweep.runs, *outcome.planned.runs)
            for trace in run.traces
            for at in trace.readings
        ]


def test_the_loop_is_in_order_and_the_cuda_device_reads_what_the_card_reads():
    by_card, by_cuda = (run_in_order("qwen-image-2.1", on) for on in (itself, as_cuda))
    assert by_card == by_cuda


def test_the_loop_is_in_order_with_pinned_masters():
    pinned = Pricing(1e9, "assumed", host_budget_bytes=GIB)
    run_in_order("flux.1-dev", as_cuda, pricing=pinned)


def test_a_wait_that_is_missing_ends_the_loop(monkeypatch):
    monkeypatch.setattr(CopyStream, "wait", lambda self, event: None)
    with checked() as card:
        test = bench_on(card, "qwen-image")
        outcome = test.loop()
        assert outcome.failure is not None
        assert OrderError.__name__ in outcome.failure.detail
