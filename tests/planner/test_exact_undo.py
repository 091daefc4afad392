"""Law 3: after a failure at any step the pipeline is what it was, to the last hook and value; and
law 10: what isn't undone is noticed."""

import gc
from itertools import count as counted
from itertools import product

import pytest
import torch
from bench_card import GIB, bench, each_family, tiny
from pipeline_image import image_of

from residency.offload.errors import RollbackError
from residency.offload.layers import Region
from residency.offload.simulated.card import driver_error, out_of_memory
from residency.phases.diffusers.host import DiffusersHost
from residency.phases.diffusers.undo import Bind, Conduct, Follow, Pin, Place, Prefetch
from residency.phases.schedule import Hold, Schedule
from residency.planner.proof import Transaction

FAULTS = pytest.mark.parametrize("fault", [out_of_memory, driver_error])
POINTS = 5
NATURAL = {"allocation": out_of_memory, "copy": driver_error}
"""What fails, and how."""
SWAPPED = {"allocation": driver_error, "copy": out_of_memory}
AS_IT_DOES = pytest.mark.parametrize(
    ("faults", "points"),
    [
        pytest.param(NATURAL, POINTS, id="as it does"),
        pytest.param(SWAPPED, 12, marks=pytest.mark.long, id="as it doesn't"),
    ],
)


def spread(count: int, points: int) -> list[int]:
    """About `points` numbers from 1 to `count`, the first and the last among them."""
    return sorted({1 + i * (count - 1) // max(points - 1, 1) for i in range(points)})


def retaining_all(host: DiffusersHost, *, prefetch: int = 1, pinned: bool = False) -> Schedule:
    """What was declared is held in every use and across every gap."""
    declared = {each.name: tuple(sorted(each.declared)) for each in host.components()}
    return Schedule(
        uses=tuple(
            Hold(
                phase=use.phase,
                component=use.component,
                retain_resident_layers=True,
                resident_set=declared[use.component],
                retained_set=declared[use.component],
                prefetch=prefetch,
                pinned=pinned,
            )
            for use in host.baseline.uses
        )
    )


def failing(monkeypatch, at: int, fault, *, after: bool) -> None:
    """The step of that number fails, before or behind what it does."""
    number = counted()

    def patched(kind) -> None:
        apply = kind.apply

        def failing_apply(step) -> None:
            is_it = next(number) == at
            if is_it and not after:
                raise fault()
            apply(step)
            if is_it:
                raise fault()

        monkeypatch.setattr(kind, "apply", failing_apply)

    for kind in (Bind, Place, Conduct):
        patched(kind)


def opened(host: DiffusersHost, fault) -> None:
    """Opens a host that fails: out of memory is told, anything else raised."""
    if fault is out_of_memory:
        assert host.open().is_oom
    else:
        with pytest.raises(type(fault())):
            host.open()


@each_family
@FAULTS
def test_a_failure_at_any_step_of_opening_is_undone(family, fault):
    with bench(family) as test:
        before = image_of(test.pipeline.pipeline)
        host = test.host()
        assert host.open() is None
        steps = len(host._put_on)
        host.close()
        for k, after in product(range(steps), (False, True)):
            host = test.host()
            with pytest.MonkeyPatch.context() as patch:
                failing(patch, k, fault, after=after)
                opened(host, fault)
            host.close()
            assert before.differences(image_of(test.pipeline.pipeline)) == []
            test.card.check_integrity()
            assert test.card.read().allocated_bytes == 0


@each_family
@AS_IT_DOES
def test_a_failure_at_an_allocation_or_copy_of_opening_is_undone(family, faults, points):
    with bench(family) as test:
        before = image_of(test.pipeline.pipeline)
        start = test.card.faults.allocations, test.card.faults.copies
        host = test.host()
        assert host.open() is None
        made = test.card.faults.allocations - start[0], test.card.faults.copies - start[1]
        host.close()
        for (kind, fault), count in zip(faults.items(), made, strict=True):
            for n in spread(count, points):
                host = test.host()
                getattr(test.card.faults, f"at_{kind}")(n, fault)
                try:
                    failure = host.open()
                    assert failure is not None
                    assert failure.is_oom == (fault is out_of_memory)
                except type(fault()):
                    assert fault is driver_error
                host.close()
                assert before.differences(image_of(test.pipeline.pipeline)) == []
                test.card.check_integrity()
                assert test.card.read().allocated_bytes == 0


@each_family
@AS_IT_DOES
def test_a_failure_anywhere_in_validation_leaves_the_baseline_and_then_the_given_pipeline(
    family, faults, points
):
    with bench(family) as test:
        given = image_of(test.pipeline.pipeline)
        host = test.host()
        assert host.open() is None
        baseline = host.sweep()
        assert baseline.failure is None
        before = image_of(test.pipeline.pipeline)

        start = test.card.faults.allocations, test.card.faults.copies
        candidate = Transaction(host, retaining_all(host))
        candidate.apply()
        assert host.sweep().failure is None
        made = test.card.faults.allocations - start[0], test.card.faults.copies - start[1]
        candidate.rollback()
        assert before.differences(image_of(test.pipeline.pipeline)) == []
        level = test.card.read().allocated_bytes

        for (kind, fault), count in zip(faults.items(), made, strict=True):
            for n in spread(count, points):
                candidate = Transaction(host, retaining_all(host))
                candidate.apply()
                getattr(test.card.faults, f"at_{kind}")(n, fault)
                failure = host.sweep().failure
                assert failure is not None
                assert failure.is_oom == (fault is out_of_memory)
                candidate.rollback()
                assert before.differences(image_of(test.pipeline.pipeline)) == []
                test.card.check_integrity()
                assert test.card.read().allocated_bytes == level
        again = host.sweep()
        assert torch.equal(again.runs[0].output.value, baseline.runs[0].output.value)
        del before
        host.close()
        assert given.differences(image_of(test.pipeline.pipeline)) == []
        assert test.card.read().allocated_bytes == 0


@each_family
def test_a_settlement_that_is_closed_leaves_nothing_behind(family):
    pipeline = tiny(family)
    before = image_of(pipeline.pipeline)
    with bench(family, pipeline=pipeline) as test:
        outcome = test.loop(pipeline=pipeline)
        assert outcome.committed is not None
        outcome.close()
        del outcome
        gc.collect()
        assert before.differences(image_of(pipeline.pipeline)) == []
        assert test.card.read().allocated_bytes == 0
        test.card.check_integrity()


def test_a_settlement_whose_baseline_fails_leaves_nothing_behind():
    with bench("qwen-image-2.1", capacity_bytes=1_600_000) as test:
        before = image_of(test.pipeline.pipeline)
        outcome = test.loop()
        assert outcome.failure is not None
        assert before.differences(image_of(test.pipeline.pipeline)) == []
        assert test.card.read().allocated_bytes == 0


BROKEN = [
    (Pin, "masters are pinned"),
    (Prefetch, "fetches 3 layers ahead"),
    (Follow, "another schedule is in effect"),
]


@pytest.mark.parametrize(("kind", "told"), BROKEN, ids=lambda each: getattr(each, "__name__", ""))
def test_a_step_of_a_schedule_that_forgets_its_inverse_is_noticed(monkeypatch, kind, told):
    with bench("qwen-image-2.1") as test:
        host = test.host(host_bytes=GIB)
        assert host.open() is None
        candidate = Transaction(host, retaining_all(host, prefetch=3, pinned=True))
        candidate.apply()
        assert host.sweep().failure is None
        with monkeypatch.context() as patch:
            patch.setattr(kind, "revert", lambda self: None)
            with pytest.raises(RollbackError, match=told):
                candidate.rollback()
        host.close()
        assert test.card.read().allocated_bytes == test.card.pinned_bytes == 0


@pytest.mark.parametrize(
    ("kind", "told"),
    [(Bind, "is told where it executes"), (Place, "hook|device buffer"), (Conduct, "a hook of")],
    ids=["Bind", "Place", "Conduct"],
)
def test_a_step_of_opening_that_forgets_its_inverse_is_noticed(monkeypatch, kind, told):
    with bench("qwen-image-2.1") as test:
        host = test.host()
        assert host.open() is None
        assert host.sweep().failure is None
        put_on = [*host._put_on]
        with monkeypatch.context() as patch:
            patch.setattr(kind, "revert", lambda self: None)
            with pytest.raises(RollbackError, match=told):
                host.close()
        for step in reversed(put_on):
            step.revert()
        assert test.card.read().allocated_bytes == 0


def test_a_tensor_that_is_left_on_the_card_is_noticed(monkeypatch):
    with bench("flux.1-dev") as test:
        before = image_of(test.pipeline.pipeline)
        host = test.host()
        assert host.open() is None
        unbind, forgotten = Region.unbind, []

        def forget_one(region: Region) -> None:
            if not forgotten and region.bindings[0].tensor.device.type != "cpu":
                forgotten.append(region)
            elif region not in forgotten:
                unbind(region)

        monkeypatch.setattr(Region, "unbind", forget_one)
        with pytest.raises(RollbackError, match="still on a device buffer"):
            host.close()
        assert len(before.differences(image_of(test.pipeline.pipeline))) == 1
        monkeypatch.undo()
        forgotten.pop().unbind()


def test_a_step_that_cannot_be_undone_does_not_keep_the_others_from_it(monkeypatch):
    with bench("wan2.1-t2v-14b") as test:
        host = test.host()
        assert host.open() is None
        with monkeypatch.context() as patch:
            patch.setattr(Conduct, "revert", lambda self: (_ for _ in ()).throw(OSError("stuck")))
            with pytest.raises(RollbackError, match="OSError: stuck"):
                host.close()
        assert test.card.read().allocated_bytes == 0
        host._conductor.remove()


def restrided(pipeline) -> None:
    weight = next(pipeline.transformer.parameters())
    weight.data = weight.data.t().contiguous().t()


def trained(pipeline) -> None:
    next(pipeline.transformer.parameters()).requires_grad_(True)


def unshared(pipeline) -> None:
    """Two parameters that stood on one storage stand on one each, with the same values."""
    first, second = [*pipeline.transformer.parameters()][:2]
    second.data = second.data.clone()
    assert first.data_ptr() != second.data_ptr()


def hooked(pipeline) -> None:
    pipeline.vae.register_forward_hook(lambda *_: None)


def valued(pipeline) -> None:
    next(pipeline.transformer.parameters()).add_(1)


@pytest.mark.parametrize("change", [restrided, trained, unshared, hooked, valued])
def test_an_image_notices(change):
    pipeline = tiny("qwen-image").pipeline
    first, second = [*pipeline.transformer.parameters()][:2]
    both = torch.cat((first.flatten(), second.flatten()))
    first.data = both[: first.numel()].view(first.shape)
    second.data = both[first.numel() :].view(second.shape)
    before = image_of(pipeline)
    assert before.differences(image_of(pipeline)) == []
    change(pipeline)
    assert before.differences(image_of(pipeline))
