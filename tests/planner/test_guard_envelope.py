from dataclasses import replace

import pytest
import torch
from bench_card import bench
from serving import Served, sample, settled

from residency.offload.errors import BaselineError, OutsideEnvelopeError
from residency.phases.shape import Shape
from residency.planner.choosing.prices import Pricing
from residency.planner.serving.guard import GuardState


def test_what_was_validated_at_17_frames_is_not_validated_for_81():
    """WC-01"""
    shape = Shape(32, 32, 17, tokens=16, guidance=1)
    with settled("wan2.1-t2v-14b", changed={"shapes": (shape,), "measure_only": True}) as served:
        guard = served.guard()
        with pytest.raises(OutsideEnvelopeError, match=r"32x32x81.* is outside.* 32x32x17"):
            guard.serve(replace(shape, frames=81), lambda: pytest.fail("it ran"))
        shorter = replace(shape, frames=9, steps=2)
        guard.serve(shorter, served.call(shorter))
        assert sample(guard.metrics, "requests_total", outcome="baseline") == 1


def test_without_guidance_a_request_is_inside_what_was_validated_with_it():
    with settled(guidance=3.0) as served:
        guard = served.guard()
        for guidance in (3.0, 1.0):
            shape = replace(served.shape, guidance=guidance)
            expected = served.baseline(shape)
            assert torch.equal(guard.serve(shape, served.call(shape)), expected)
        assert sample(guard.metrics, "requests_total", outcome="planned") == 2


def test_one_step_is_inside_and_holds_the_resident_set_as_it_was_validated():
    with settled("flux.1-dev") as served:
        guard = served.guard()
        shape = replace(served.shape, steps=1)
        expected = served.baseline(shape)
        held = served.host.placements["transformer"].resident_set
        scheduler, seen = served.pipeline.pipeline.scheduler, []
        step = scheduler.step

        def watched(*given, **named):
            seen.append(served.retained()["transformer"] >= held > frozenset())
            return step(*given, **named)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scheduler, "step", watched)
            output = guard.serve(shape, served.call(shape))
        assert torch.equal(output, expected)
        assert seen == [True]
        with guard.request(shape) as trace:
            served.call(shape)()
        (run,) = served.outcome.planned.runs
        few = 16 << 10
        for at in trace.readings:
            assert at.reading.peak_allocated_bytes <= run.peak_bytes(at.phase) + few


def test_a_request_is_run_as_the_validated_shape_with_its_guidance():
    wide, tall = Shape(64, 32, tokens=16, guidance=3), Shape(32, 64, tokens=16, guidance=1)
    with settled(changed={"shapes": (wide, tall), "measure_only": True}) as served:
        envelope = served.guard().envelope
        assert set(envelope.shapes) == {wide, tall}
        small = Shape(32, 32, tokens=16)
        assert envelope.covering(replace(small, guidance=1)) == envelope.shapes
        assert envelope.like(replace(small, guidance=1)) == tall
        assert envelope.like(replace(small, guidance=3)) == wide
        assert envelope.covering(Shape(64, 64, tokens=16, guidance=1)) == ()


def test_a_plan_to_retain_nothing_is_served_at_the_baseline():
    with bench("qwen-image-2.1") as test:
        outcome = test.loop(measure_only=True)
        served = Served(test, outcome)
        guard = served.guard(max_ooms=1)
        assert guard.state is GuardState.BASELINE
        assert sample(guard.metrics, "settled") == 1
        expected = guard.serve(served.shape, served.call())
        fails = iter([True, False])

        def call():
            if next(fails):
                raise RuntimeError("CUDA error: out of memory")
            return served.call()()

        assert torch.equal(guard.serve(served.shape, call), expected)
        assert sample(guard.metrics, "requests_total", outcome="retried") == 1
        assert sample(guard.metrics, "demotions_total") == 0
        outcome.close()


def test_what_failed_cannot_be_served():
    with bench("qwen-image-2.1", capacity_bytes=1_600_000) as test:
        outcome = test.loop()
        assert outcome.failure is not None
        with pytest.raises(BaselineError, match="nothing was validated"):
            Served(test, outcome).guard()


def test_a_request_at_the_baseline_leaves_what_is_pinned_pinned():
    pricing = Pricing(1e9, "assumed", host_budget_bytes=1 << 30)
    with settled(changed={"pricing": pricing}) as served:
        guard, pinned = served.guard(), served.card.pinned_bytes
        assert pinned > 0
        charged = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(served.card, "pin", charged.append)
            served.leave(served.planned_peak - 1)
            guard.serve(served.shape, lambda: None)
        assert sample(guard.metrics, "requests_total", outcome="baseline") == 1
        assert (served.card.pinned_bytes, charged) == (pinned, [])
