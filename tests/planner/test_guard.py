import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from pipeline_image import image_of
from serving import Served, sample, settled

from residency.offload.errors import (
    BusyError,
    InputError,
    OffloadError,
    OutsideEnvelopeError,
    ReentryError,
)
from residency.offload.memory_errors import OomKind, Shortfall
from residency.offload.placement import Strategy
from residency.offload.simulated.card import InjectedError, driver_error
from residency.phases.limit import Limit
from residency.planner.proof import Transaction
from residency.planner.serving import evidence
from residency.planner.serving.evidence import Ground
from residency.planner.serving.guard import Concurrency, GuardState, OutsidePolicy
from residency.planner.serving.metrics import Release
from residency.planner.serving.metrics import Served as Ending

MIB = 1 << 20


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with settled() as served:
        yield served


@pytest.fixture
def served(shared: Served) -> Iterator[Served]:
    yield shared
    shared.reset()


def full(message: str = "injected") -> torch.OutOfMemoryError:
    error = torch.OutOfMemoryError(message)
    error.shortfall = Shortfall(4096 * MIB, 0)
    return error


def out_of_memory(*given, **named):
    raise full()


class Fails:
    """Calls `call`, but for the first `times` times, which fail before."""

    def __init__(self, call, times: int = 1, fail=out_of_memory) -> None:
        self.call, self.left, self.fail = call, times, fail

    def __call__(self):
        if self.left:
            self.left -= 1
            self.fail()
        return self.call()


def endings(guard) -> dict[str, int]:
    counted = {each: sample(guard.metrics, "requests_total", outcome=each) for each in Ending}
    return {name: count for name, count in counted.items() if count}


def test_a_request_inside_the_envelope_runs_as_planned_and_gives_the_baselines_output(served):
    guard = served.guard()
    expected = served.baseline()
    for _ in range(2):
        assert torch.equal(guard.serve(served.shape, served.call()), expected)
    with guard.request(served.shape) as trace:
        served.call()()
    assert trace.transfers.h2d_bytes == served.outcome.planned.runs[0].h2d_bytes
    assert endings(guard) == {"planned": 3}
    assert sample(guard.metrics, "request_seconds_count", outcome="planned") == 3
    assert guard.state is GuardState.PLANNED
    assert guard.check().holds


def test_a_smaller_request_is_inside(served):
    guard = served.guard()
    smaller = replace(served.shape, width=32, height=48, tokens=7)
    output = guard.serve(smaller, served.call(smaller))
    assert torch.equal(output, served.baseline(smaller))


def test_a_request_outside_is_refused_before_anything_runs(served):
    guard = served.guard()
    larger = replace(served.shape, width=80)
    before = served.card.transfers, served.retained()
    with pytest.raises(OutsideEnvelopeError, match="80x64:tokens=16,steps=2,guidance=1") as refused:
        guard.serve(larger, lambda: pytest.fail("it ran"))
    assert refused.value.shape == "80x64:tokens=16,steps=2,guidance=1"
    assert len(refused.value.envelope) == 1
    assert refused.value.envelope[0].startswith("64x64:tokens=16")
    assert "outside=release" in refused.value.hint
    assert (served.card.transfers, served.retained()) == before
    assert sample(guard.metrics, "outside_envelope_total", policy="refuse") == 1
    assert endings(guard) == {"outside": 1}


@pytest.mark.parametrize(
    "changed",
    [{"height": 80}, {"frames": 5}, {"batch": 2}, {"tokens": 17}, {"guidance": 4.0}],
    ids=lambda changed: next(iter(changed)),
)
def test_one_dimension_that_is_larger_is_enough_to_be_outside(served, changed):
    with (
        pytest.raises(OutsideEnvelopeError),
        served.guard().request(replace(served.shape, **changed)),
    ):
        pytest.fail("it ran")


def test_a_request_outside_may_run_with_all_that_is_retained_released_first(served, caplog):
    guard = served.guard(outside=OutsidePolicy.RELEASE)
    guard.serve(served.shape, served.call())
    kept = served.retained()
    assert any(kept.values())
    larger = replace(served.shape, width=80)
    expected = served.baseline(larger)
    guard.serve(served.shape, served.call())
    seen = []

    def call():
        seen.append((served.retaining(), any(served.retained().values())))
        return served.call(larger)()

    assert torch.equal(guard.serve(larger, call), expected)
    assert seen == [([], False)]
    assert "80x64" in caplog.text
    assert sample(guard.metrics, "outside_envelope_total", policy="release") == 1
    assert sample(guard.metrics, "released_total", cause=Release.OUTSIDE) == 1
    assert endings(guard) == {"planned": 2, "baseline": 1}
    assert not any(served.retained().values())
    guard.serve(served.shape, served.call())
    assert served.retained() == kept
    assert guard.check().holds


def test_a_request_outside_may_run_as_planned_with_a_warning(served, caplog):
    guard = served.guard(outside=OutsidePolicy.WARN)
    larger = replace(served.shape, width=80)
    output = guard.serve(larger, served.call(larger))
    assert torch.equal(output, served.baseline(larger))
    (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "80x64" in record.getMessage()
    assert sample(guard.metrics, "outside_envelope_total", policy="warn") == 1
    assert endings(guard) == {"planned": 1}
    found = guard.check()
    assert [each.ground for each in found.reasons] == [Ground.OUTSIDE]
    assert not found.holds


def test_an_oom_outside_the_envelope_says_nothing_of_the_plan(served):
    guard = served.guard(outside=OutsidePolicy.WARN, max_ooms=1)
    larger = replace(served.shape, width=80)
    guard.serve(larger, Fails(served.call(larger)))
    assert guard.state is GuardState.PLANNED
    assert endings(guard) == {"retried": 1}


def test_other_steps_than_were_swept_give_the_right_output_in_no_more_memory(served):
    guard = served.guard()
    shape = replace(served.shape, steps=4)
    expected = served.baseline(shape)
    guard.serve(served.shape, served.call())
    with guard.request(shape) as trace:
        passes = {at[1]: count for at, count in served.host._conductor._passes.items()}
        output = served.call(shape)()
    assert (passes["text_encoder"], passes["transformer"]) == (1, 4)
    assert torch.equal(output, expected)
    run = served.outcome.planned.runs[0]
    for at in trace.readings:
        few = 16 << 10  # pipelines keep some numbers for each shape and step
        assert at.reading.peak_allocated_bytes <= run.peak_bytes(at.phase) + few


def test_more_steps_copy_what_is_streamed_once_a_step_and_fetch_nothing_in_vain(served):
    guard = served.guard()
    moved = {}
    guard.serve(served.shape, served.call())
    for steps in (2, 4):
        shape = replace(served.shape, steps=steps)
        with guard.request(shape) as trace:
            served.call(shape)()
        moved[steps] = trace.transfers.h2d_bytes
    (use,) = [u for u in served.host.schedule.uses if u.component == "transformer"]
    layers = served.host.placements["transformer"].layers
    a_step = sum(layer.copy_bytes for i, layer in enumerate(layers) if i not in use.resident_set)
    few = 2048  # and each step copies some numbers of its own
    assert a_step > 100 * few
    assert 0 <= moved[4] - moved[2] - 2 * a_step < few


def test_passes_are_scaled_by_steps_and_the_resident_set_is_held_as_it_was_validated(served):
    host, asked = served.host, served.test.shape
    like = asked
    swept = host.passes(like)
    denoise = next(at for at in swept if at[1] == "transformer")
    encode = next(at for at in swept if at[1] == "text_encoder")
    assert (swept[denoise], swept[encode]) == (2, 1)

    def passes(steps: int):
        return host._expected(replace(asked, steps=steps), like)

    assert passes(7)[denoise] == 7
    assert passes(1)[denoise] == 2  # one alone would hold nothing, and that wasn't validated
    assert passes(7)[encode] == 1
    host._warmup._passes[like] = swept | {denoise: 1}
    try:
        assert passes(7)[denoise] == 3  # retained, so it is held whatever runs
        with served.at_baseline():
            assert passes(7)[denoise] == 1  # nothing was held in the sweep
    finally:
        host._warmup._passes[like] = swept


def test_after_an_oom_the_request_runs_once_more_with_nothing_retained(served, caplog):
    guard = served.guard()
    expected = served.baseline()
    guard.serve(served.shape, served.call())
    kept, seen = served.retained(), []

    def call():
        seen.append((served.retaining() != [], any(served.retained().values())))
        return served.call()()

    assert torch.equal(guard.serve(served.shape, Fails(call)), expected)
    assert seen == [(False, False)]
    assert endings(guard) == {"planned": 1, "retried": 1}
    assert sample(guard.metrics, "ooms_total", kind=OomKind.DEVICE) == 1
    assert sample(guard.metrics, "retries_total") == 1
    assert sample(guard.metrics, "released_total", cause=Release.OOM) == 1
    assert "out of memory at 64x64" in caplog.text
    assert guard.state is GuardState.PLANNED
    guard.serve(served.shape, served.call())
    assert served.retained() == kept


def test_an_oom_in_the_second_run_too_is_raised(served):
    guard = served.guard()
    call = Fails(served.call(), times=9)
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        guard.serve(served.shape, call)
    assert call.left == 7
    assert endings(guard) == {"oom": 1}
    assert sample(guard.metrics, "ooms_total", kind=OomKind.DEVICE) == 2
    assert torch.equal(guard.serve(served.shape, served.call()), served.baseline())


def test_a_success_after_an_oom_does_not_validate_the_plan(served):
    """AD-04"""
    guard = served.guard()
    guard.serve(served.shape, Fails(served.call()))
    found = guard.check()
    assert not found.holds
    assert [each.ground for each in found.reasons] == [Ground.OOM]
    assert sample(guard.metrics, "request_seconds_count", outcome=Ending.RETRIED) == 1
    assert sample(guard.metrics, "request_seconds_count", outcome=Ending.PLANNED) is None


def deep(card, levels: int):
    """Runs out of memory with large tensors in frames of the way, and in what led to it."""
    held = torch.empty(64 * MIB, dtype=torch.uint8, device=card.torch_device)
    if levels:
        deep(card, levels - 1)
    try:
        refuse(card)
    except ValueError:
        raise full(f"with {held.nbytes} bytes") from None


def refuse(card):
    other = torch.empty(64 * MIB, dtype=torch.uint8, device=card.torch_device)
    raise ValueError(f"with {other.nbytes} bytes")


def test_what_the_failed_frames_held_is_free_before_the_second_run(served):
    """OR-01"""
    guard = served.guard()
    guard.serve(served.shape, served.call())
    before = served.card.read()
    free = []

    def call():
        free.append(served.card.read().free_bytes)
        if len(free) == 1:
            deep(served.card, 2)

    guard.serve(served.shape, call)
    assert free[1] >= before.free_bytes - 64 * MIB
    assert free[1] > free[0]


def test_what_the_failed_frames_held_is_free_while_the_error_is_held(served, monkeypatch):
    """OR-02"""
    guard = served.guard()
    guard.serve(served.shape, served.call())
    before = served.card.read()
    at_release = []
    release = served.card.release_cache
    monkeypatch.setattr(
        served.card,
        "release_cache",
        lambda: (at_release.append(served.card.read().allocated_bytes), release()),
    )
    with pytest.raises(torch.OutOfMemoryError) as caught, guard.request(served.shape):
        deep(served.card, 2)
    assert served.card.read().free_bytes >= before.free_bytes
    assert at_release[-1] < before.allocated_bytes  # and so it was when the cache was released
    assert "in deep\n    deep(card, levels - 1)" in "".join(caught.value.__notes__)


def test_what_an_error_holds_through_closures_is_free_while_it_is_held(served):
    """OR-01: layers have hooks, and what torch calls them through closes over their arguments."""
    guard = served.guard(watch_neighbour=False)
    level = served.card.read().allocated_bytes
    blocks = served.pipeline.pipeline.transformer.transformer_blocks
    handle = blocks[1].register_forward_hook(out_of_memory)
    with pytest.raises(torch.OutOfMemoryError) as caught, guard.request(served.shape):
        served.call()()
    handle.remove()
    few = 6 << 10  # of the scheduler
    assert served.card.read().allocated_bytes - level < few
    assert "transformer" in "".join(caught.value.__notes__)


def test_a_with_block_raises_the_oom_and_the_callers_own_retry_has_nothing_retained(served):
    guard = served.guard()
    guard.serve(served.shape, served.call())
    error = full("mine")
    with pytest.raises(torch.OutOfMemoryError) as caught, guard.request(served.shape):
        raise error
    assert caught.value is error
    assert not any(served.retained().values())
    other = replace(served.shape, width=32)
    for shape, retaining in ((other, True), (served.shape, False), (served.shape, True)):
        with guard.request(shape):
            assert bool(served.retaining()) is retaining
    assert endings(guard) == {"planned": 3, "oom": 1, "retried": 1}
    assert sample(guard.metrics, "retries_total") == 1


def test_repeated_ooms_put_the_server_at_its_baseline_until_it_is_renewed(served, caplog):
    guard = served.guard(max_ooms=3)
    expected = served.baseline()
    for n in (1, 2, 3):
        assert guard.state is GuardState.PLANNED
        guard.serve(served.shape, Fails(lambda: None))
        assert sample(guard.metrics, "ooms_total", kind=OomKind.DEVICE) == n
    assert guard.state is GuardState.BASELINE
    assert served.retaining() == []
    assert any(each.levelno == logging.ERROR for each in caplog.records)
    assert sample(guard.metrics, "demotions_total") == 1
    assert sample(guard.metrics, "settled") == 0
    assert sample(guard.metrics, "state", state="baseline") == 1
    assert torch.equal(guard.serve(served.shape, served.call()), expected)
    assert not any(served.retained().values())
    assert endings(guard) == {"retried": 3, "baseline": 1}
    guard.serve(served.shape, Fails(lambda: None))
    assert sample(guard.metrics, "demotions_total") == 1

    with guard.exclusive():
        Transaction(served.host, served.outcome.committed).apply()
        guard.renew(served.outcome)
    assert guard.state is GuardState.PLANNED
    assert sample(guard.metrics, "settled") == 1
    assert guard.check().holds


def test_ooms_that_are_far_apart_do_not_add_up(served):
    guard = served.guard(max_ooms=2, oom_window=3)
    quick = Fails(lambda: None, times=0)
    for fails in (1, 0, 0, 1, 0, 0):
        quick.left = fails
        guard.serve(served.shape, quick)
        assert guard.state is GuardState.PLANNED
    assert guard.check().holds is False  # one is in the window
    quick.left = 1
    guard.serve(served.shape, quick)
    quick.left = 1
    guard.serve(served.shape, quick)
    assert guard.state is GuardState.BASELINE


def transient():
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 48.00 MiB. GPU 0 has a total capacity of 31.84 GiB "
        "of which 17.00 GiB is free."
    )


def test_a_transient_oom_changes_nothing_and_the_request_runs_again_as_planned(served):
    """OR-04"""
    guard = served.guard(max_ooms=1)
    guard.serve(served.shape, served.call())
    kept, seen = served.retained(), []

    def call():
        seen.append((served.retaining() != [], served.retained()))
        return served.call()()

    output = guard.serve(served.shape, Fails(call, fail=transient))
    assert torch.equal(output, served.baseline())
    assert seen == [(True, kept)]
    assert guard.state is GuardState.PLANNED
    assert sample(guard.metrics, "ooms_total", kind=OomKind.TRANSIENT) == 1
    assert sample(guard.metrics, "ooms_total", kind=OomKind.DEVICE) == 0
    assert guard.check().holds


def test_a_second_transient_oom_of_a_request_is_taken_as_one_of_capacity(served):
    guard = served.guard(max_ooms=2)
    seen = []

    def call():
        seen.append(served.retaining() != [])
        return served.call()()

    guard.serve(served.shape, Fails(call, times=2, fail=transient))
    assert seen == [False]
    assert sample(guard.metrics, "ooms_total", kind=OomKind.TRANSIENT) == 2
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError), guard.request(served.shape):
            transient()
    assert guard.state is GuardState.BASELINE


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_what_torch_raises_as_another_error_is_an_oom_too(served, text):
    guard = served.guard()
    served.leave(served.planned_peak)

    def fail():
        raise RuntimeError(text)

    assert torch.equal(
        guard.serve(served.shape, Fails(served.call(), fail=fail)), served.baseline()
    )
    assert endings(guard) == {"retried": 1}
    with pytest.raises(RuntimeError, match="CUDA error"), guard.request(served.shape):
        fail()
    assert endings(guard) == {"retried": 1, "oom": 1}


def test_host_memory_that_is_short_is_no_oom_of_the_device(served):
    guard = served.guard(max_ooms=1)
    guard.serve(served.shape, served.call())
    kept = served.retained()
    error = RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate")
    with pytest.raises(RuntimeError) as caught, guard.request(served.shape):
        raise error
    assert caught.value is error
    assert served.retained() == kept
    assert endings(guard) == {"planned": 1, "error": 1}


def test_the_limit_of_settling_is_not_that_of_requests(served):
    served.outcome.close()
    over = Limit()
    served.outcome = served.test.loop(limit=over)
    over.cancel()
    guard = served.guard()
    assert torch.equal(guard.serve(served.shape, served.call()), served.baseline())


@pytest.mark.parametrize("n", [1, 3, 5])
def test_an_oom_while_a_set_is_brought_back_leaves_the_state_before_it(served, n, monkeypatch):
    """LT-01"""
    guard = served.guard()
    guard.serve(served.shape, served.call())
    for placement in served.host.placements.values():
        placement.release_all()
    before, prepare = image_of(served.pipeline.pipeline), Strategy.prepare

    def failing(strategy, use):
        monkeypatch.undo()
        served.card.faults.at_allocation(n)
        prepare(strategy, use)
        pytest.fail("so many allocations aren't made")

    monkeypatch.setattr(Strategy, "prepare", failing)
    with pytest.raises(torch.OutOfMemoryError), guard.request(served.shape):
        served.call()()
    assert before.differences(image_of(served.pipeline.pipeline)) == []
    served.card.check_integrity()
    for placement in served.host.placements.values():
        placement.check_integrity()
    assert torch.equal(guard.serve(served.shape, served.call()), served.baseline())
    assert endings(guard) == {"planned": 1, "oom": 1, "retried": 1}


def test_three_identical_requests_find_and_leave_identical_sets_whatever_is_free(served):
    """RV-02"""
    guard = served.guard()
    seen = set()
    guard.serve(served.shape, served.call())
    for left in (served.planned_peak, 100 * MIB, served.planned_peak + 8192):
        served.leave(left)
        with guard.request(served.shape) as trace:
            served.call()()
        uses = served.host.schedule.uses
        seen.add((uses, *served.retained().items(), trace.transfers))
    assert len(seen) == 1
    assert endings(guard) == {"planned": 4}


def test_beside_a_neighbour_that_has_grown_requests_run_at_the_baseline_until_it_leaves(
    served, caplog
):
    guard = served.guard()
    expected = served.baseline()
    guard.serve(served.shape, served.call())
    kept = served.retained()
    served.leave(served.planned_peak - 1)
    for _ in range(2):
        assert torch.equal(guard.serve(served.shape, served.call()), expected)
        assert not any(served.retained().values())
    assert caplog.text.count("the plan lacks 1 bytes by now") == 1
    assert sample(guard.metrics, "released_total", cause=Release.NEIGHBOUR) == 2
    assert sample(guard.metrics, "ooms_total", kind=OomKind.DEVICE) == 0
    served.card.others_bytes = 0
    guard.serve(served.shape, served.call())
    assert served.retained() == kept
    assert endings(guard) == {"planned": 2, "baseline": 2}


def test_a_neighbour_that_grows_in_the_middle_of_a_request_makes_it_run_again(served):
    guard = served.guard()
    expected = served.baseline()
    guard.serve(served.shape, served.call())
    decode = served.pipeline.pipeline.vae.decode
    grown = []

    def grows(*given, **named):
        if not grown:
            grown.append(True)
            served.leave(served.baseline_peak + 4096)
        return decode(*given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served.pipeline.pipeline.vae, "decode", grows)
        assert torch.equal(guard.serve(served.shape, served.call()), expected)
    assert endings(guard) == {"planned": 1, "retried": 1}
    assert torch.equal(guard.serve(served.shape, served.call()), expected)
    assert endings(guard) == {"planned": 1, "retried": 1, "baseline": 1}


def test_a_neighbour_that_is_not_watched_is_met_by_an_oom(served):
    guard = served.guard(watch_neighbour=False)
    guard.serve(served.shape, served.call())
    served.leave(served.baseline_peak + 4096)
    guard.serve(served.shape, served.call())
    assert endings(guard) == {"planned": 1, "retried": 1}


def test_an_error_that_is_no_oom_passes_unchanged_and_counts_towards_nothing(served):
    guard = served.guard(max_ooms=1)
    guard.serve(served.shape, served.call())
    served.card.faults.at_copy(3, driver_error)
    with pytest.raises(InjectedError):
        guard.serve(served.shape, served.call())
    error = KeyError("mine")
    with pytest.raises(KeyError) as caught, guard.request(served.shape):
        raise error
    assert caught.value is error
    assert sample(guard.metrics, "ooms_total", kind=OomKind.DEVICE) == 0
    assert guard.state is GuardState.PLANNED
    assert torch.equal(guard.serve(served.shape, served.call()), served.baseline())
    assert endings(guard) == {"planned": 2, "error": 2}
    assert sample(guard.metrics, "retries_total") == 0


def test_an_error_in_the_second_run_is_raised_as_what_it_is(served):
    guard = served.guard()
    errors = iter([full(), KeyError("mine")])

    def call():
        raise next(errors)

    with pytest.raises(KeyError, match="mine"):
        guard.serve(served.shape, call)
    assert endings(guard) == {"error": 1}


def test_a_device_that_cannot_be_read_any_more_hides_no_error(served, monkeypatch):
    guard = served.guard()

    def broken():
        raise driver_error()

    def call():
        monkeypatch.setattr(served.card, "read", broken)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        guard.serve(served.shape, call)
    monkeypatch.undo()


def test_inside_a_request_no_gradients_are_recorded(served):
    with torch.enable_grad():
        with served.guard().request(served.shape):
            assert not torch.is_grad_enabled()
        assert torch.is_grad_enabled()


def test_gauges_show_what_is_retained_and_what_is_left(served):
    guard = served.guard(margin_bytes=1000)
    served.leave(100 * MIB)
    guard.serve(served.shape, served.call())
    metrics, reading = guard.metrics, served.card.read()
    assert sample(metrics, "free_bytes") == reading.free_bytes
    for name, layers in served.retained().items():
        placement = served.host.placements[name]
        held = sum(placement.layers[i].buffer_bytes for i in layers) + placement.non_layer_bytes
        assert sample(metrics, "retained_bytes", component=name) == held > 0
    assert 'component="vae"' not in metrics.text()  # it is resident, and so never retained
    (run,) = served.outcome.planned.runs
    left = 100 * MIB - run.peak_bytes("denoise") - 1000
    at = {"phase": "denoise", "shape": str(run.asked)}
    assert sample(metrics, "headroom_bytes", **at) == left


def test_requests_of_many_threads_run_one_at_a_time(served):
    guard = served.guard()
    inside, most, done = [], [], []

    def work(n: int) -> None:
        with guard.request(served.shape):
            inside.append(n)
            most.append(len(inside))
            threading.Event().wait(0.002)
            inside.remove(n)
        done.append(n)

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, n) for n in range(40)]:
            future.result(timeout=60)
    assert set(most) == {1}
    assert sorted(done) == [*range(40)]


def test_outputs_of_requests_from_many_threads_are_those_of_the_baseline(served):
    guard = served.guard()
    expected = [served.baseline(seed=seed) for seed in range(2)]

    def work(seed: int) -> bool:
        return torch.equal(guard.serve(served.shape, served.call(seed=seed)), expected[seed])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, [0, 1, 0]))


def test_a_thread_that_fails_leaves_the_turn_to_the_next(served):
    guard = served.guard()

    def work(n: int) -> str:
        try:
            with guard.request(served.shape):
                raise KeyError("mine") if n % 2 == 0 else full("mine")
        except (KeyError, torch.OutOfMemoryError) as error:
            return type(error).__name__

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(work, n) for n in range(8)]
        assert [f.result(timeout=60) for f in futures] == ["KeyError", "OutOfMemoryError"] * 4


@pytest.fixture
def occupied(served):
    """Enters requests of a guard in another thread, and leaves them at the end."""
    leave = threading.Event()
    threads = []

    def occupy(guard) -> None:
        entered = threading.Event()

        def work() -> None:
            with guard.request(served.shape):
                entered.set()
                leave.wait(10)

        threads.append(threading.Thread(target=work))
        threads[-1].start()
        assert entered.wait(10)

    yield occupy
    leave.set()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(
    "given",
    [{"concurrency": Concurrency.REFUSE}, {"wait_s": 0.02}, {"wait_s": 0}],
    ids=["refuse", "wait", "wait no time"],
)
def test_a_request_that_is_not_to_wait_for_longer_is_refused(served, occupied, given):
    guard = served.guard(**given)
    occupied(guard)
    with pytest.raises(BusyError, match="another request runs"):
        guard.serve(served.shape, lambda: pytest.fail("it ran"))
    assert endings(guard) == {"busy": 1}


def test_a_request_outside_is_refused_without_waiting(served, occupied):
    guard = served.guard(wait_s=0)
    occupied(guard)
    with pytest.raises(OutsideEnvelopeError):
        guard.serve(replace(served.shape, width=80), lambda: pytest.fail("it ran"))


def test_while_a_request_runs_the_evidence_can_be_checked_and_the_guard_not_be_taken(
    served, occupied
):
    guard = served.guard(wait_s=0.01)
    occupied(guard)
    assert guard.check().holds
    with pytest.raises(BusyError), guard.exclusive():
        pytest.fail("a request runs")


def test_what_a_request_has_on_the_device_is_no_evidence_against_the_plan(served, monkeypatch):
    monkeypatch.setattr(evidence, "LEFT_BEHIND_BYTES", 0)
    guard = served.guard()
    served.leave(served.planned_peak)
    with guard.request(served.shape):
        held = torch.empty(64 << 10, dtype=torch.uint8, device=served.card.torch_device)
        assert guard.check().holds
    assert not guard.check().holds
    del held
    assert guard.check().holds


def test_a_request_inside_a_request_is_refused_and_not_waited_for(served):
    guard = served.guard()
    with guard.request(served.shape):
        with pytest.raises(ReentryError, match="inside a request already"):
            guard.serve(served.shape, lambda: pytest.fail("it ran"))
        assert guard.check().holds
    guard.serve(served.shape, lambda: None)
    assert endings(guard) == {"planned": 2}


def test_a_closed_guard_runs_nothing_until_it_is_renewed(served):
    guard = served.guard()
    guard.close()
    assert sample(guard.metrics, "state", state="closed") == 1
    with pytest.raises(OffloadError, match="isn't served any more"):
        guard.serve(served.shape, lambda: pytest.fail("it ran"))
    guard.renew(served.outcome)
    guard.serve(served.shape, lambda: None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_ooms": 0}, "max_ooms is 0"),
        ({"max_ooms": 5, "oom_window": 4}, "oom_window is 4"),
        ({"wait_s": -1}, "wait_s is -1"),
        ({"wait_s": 1, "concurrency": Concurrency.REFUSE}, "concurrency is refuse"),
    ],
)
def test_settings_that_cannot_be_are_refused(served, given, said):
    with pytest.raises(InputError, match=said):
        served.guard(**given)
