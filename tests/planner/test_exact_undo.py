"""Law 3: after a failure at any step the pipeline is what it was, to the last hook and value."""

import gc
from dataclasses import replace
from itertools import product

import pytest
from bench_card import bench, each_family, tiny
from pipeline_image import image_of

from residency.offload.errors import RollbackError
from residency.offload.layers import Region
from residency.offload.simulated.faults import driver_error, out_of_memory
from residency.planner.installation import Installation
from residency.planner.loop import run_loop
from residency.planner.transaction import Assign, Operation, Transaction

FAULTS = pytest.mark.parametrize("fault", [out_of_memory, driver_error])
POINTS = 5


def spread(count: int, points: int) -> list[int]:
    """About `points` numbers from 1 to `count`, the first and the last among them."""
    return sorted({1 + i * (count - 1) // max(points - 1, 1) for i in range(points)})


def install(test) -> Installation:
    return Installation(test.pipeline, test.card, test.declarations, (test.shape,))


def retain_all(installation: Installation) -> list[Operation]:
    return [
        Assign(
            installation.graph,
            replace(use, retain_resident_layers=True),
            installation.placements[use.component],
        )
        for use in installation.graph.uses
        if installation.placements[use.component].retained_bytes
    ]


class Fails(Operation):
    """Stands before or behind a real operation, and raises."""

    def __init__(self, operation: Operation, fault, *, after: bool) -> None:
        self.operation, self.fault, self.after = operation, fault, after

    def apply(self) -> None:
        if self.after:
            self.operation.apply()
        raise self.fault()

    def revert(self) -> None:
        self.operation.revert()


@each_family
@FAULTS
def test_a_failure_at_any_operation_of_apply_is_undone(family, fault):
    with bench(family) as test:
        before = image_of(test.pipeline.pipeline)
        count = len(install(test).transaction().operations)
        for k, after in product(range(count), (False, True)):
            transaction = install(test).transaction()
            operations = list(transaction.operations)
            operations[k] = Fails(operations[k], fault, after=after)
            transaction.operations = tuple(operations)
            with pytest.raises(type(fault())):
                transaction.apply()
            transaction.rollback()
            assert before.differences(image_of(test.pipeline.pipeline)) == []
            test.card.check_integrity()
            assert test.card.read().allocated_bytes == 0


@each_family
@FAULTS
def test_a_failure_at_an_allocation_or_copy_of_apply_is_undone(family, fault):
    with bench(family) as test:
        before = image_of(test.pipeline.pipeline)
        start = test.card.faults.allocations, test.card.faults.copies
        transaction = install(test).transaction()
        transaction.apply()
        made = test.card.faults.allocations - start[0], test.card.faults.copies - start[1]
        transaction.rollback()
        for kind, count in zip(("allocation", "copy"), made, strict=True):
            for n in spread(count, POINTS):
                transaction = install(test).transaction()
                getattr(test.card.faults, f"at_{kind}")(n, fault)
                with pytest.raises(type(fault())):
                    transaction.apply()
                transaction.rollback()
                assert before.differences(image_of(test.pipeline.pipeline)) == []
                test.card.check_integrity()
                assert test.card.read().allocated_bytes == 0


@each_family
@FAULTS
@pytest.mark.parametrize("points", [POINTS, pytest.param(12, marks=pytest.mark.scale)])
def test_a_failure_anywhere_in_validation_leaves_the_baseline_and_then_the_given_pipeline(
    family, fault, points
):
    with bench(family) as test:
        given = image_of(test.pipeline.pipeline)
        installation = install(test)
        outer = installation.transaction()
        outer.apply()
        assert installation.warmup.discover() is None
        baseline = installation.warmup.sweep()
        assert baseline.failure is None
        before = image_of(test.pipeline.pipeline)

        start = test.card.faults.allocations, test.card.faults.copies
        candidate = Transaction(test.pipeline, test.card, retain_all(installation))
        candidate.apply()
        assert installation.warmup.sweep().failure is None
        made = test.card.faults.allocations - start[0], test.card.faults.copies - start[1]
        candidate.rollback()
        assert before.differences(image_of(test.pipeline.pipeline)) == []
        level = test.card.read().allocated_bytes

        for kind, count in zip(("allocation", "copy"), made, strict=True):
            for n in spread(count, points):
                candidate = Transaction(test.pipeline, test.card, retain_all(installation))
                candidate.apply()
                getattr(test.card.faults, f"at_{kind}")(n, fault)
                failure = installation.warmup.sweep().failure
                assert failure is not None
                assert failure.is_oom == (fault is out_of_memory)
                candidate.rollback()
                assert before.differences(image_of(test.pipeline.pipeline)) == []
                test.card.check_integrity()
                assert test.card.read().allocated_bytes == level
        again = installation.warmup.sweep()
        assert (again.runs[0].output == baseline.runs[0].output).all()
        del before  # it holds what the run left in attributes, on the card
        outer.rollback()
        assert given.differences(image_of(test.pipeline.pipeline)) == []
        assert test.card.read().allocated_bytes == 0


@each_family
def test_a_settlement_that_is_closed_leaves_nothing_behind(family):
    pipeline = tiny(family)
    before = image_of(pipeline.pipeline)
    with bench(family, pipeline=pipeline) as test:
        outcome = run_loop(pipeline, test.card, test.settings())
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
        outcome = run_loop(test.pipeline, test.card, test.settings())
        assert outcome.failure is not None
        assert before.differences(image_of(test.pipeline.pipeline)) == []
        assert test.card.read().allocated_bytes == 0


def test_a_rollback_that_forgets_to_release_is_noticed(monkeypatch):
    with bench("qwen-image-2.1") as test:
        installation = install(test)
        outer = installation.transaction()
        outer.apply()
        installation.warmup.discover()
        before = image_of(test.pipeline.pipeline)
        candidate = Transaction(test.pipeline, test.card, retain_all(installation))
        candidate.apply()
        installation.warmup.sweep()
        monkeypatch.setattr(Assign, "revert", lambda self: None)
        with pytest.raises(RollbackError, match="aren't as before"):
            candidate.rollback()
        differences = before.differences(image_of(test.pipeline.pipeline))
        assert any("text_encoder" in each for each in differences)
        del before
        monkeypatch.undo()
        outer.rollback()


def test_a_rollback_that_leaves_one_tensor_on_the_card_is_noticed(monkeypatch):
    with bench("flux.1-dev") as test:
        before = image_of(test.pipeline.pipeline)
        transaction = install(test).transaction()
        transaction.apply()
        unbind, forgotten = Region.unbind, []

        def forget_one(region: Region) -> None:
            if not forgotten and region.bindings[0].tensor.device.type != "cpu":
                forgotten.append(region)
            elif region not in forgotten:
                unbind(region)

        monkeypatch.setattr(Region, "unbind", forget_one)
        with pytest.raises(RollbackError, match=r"'cpu', .* became \('simgpu:0',"):
            transaction.rollback()
        assert len(before.differences(image_of(test.pipeline.pipeline))) == 1
        monkeypatch.undo()
        forgotten.pop().unbind()


def test_an_operation_that_cannot_be_undone_does_not_keep_the_others_from_it(monkeypatch):
    with bench("wan2.1-t2v-14b") as test:
        installation = install(test)
        transaction = installation.transaction()
        transaction.apply()
        monkeypatch.setattr(
            installation.conductor, "remove", lambda: (_ for _ in ()).throw(OSError("stuck"))
        )
        with pytest.raises(RollbackError, match="OSError: stuck"):
            transaction.rollback()
        assert test.card.read().allocated_bytes == 0
        monkeypatch.undo()
        installation.conductor.remove()
