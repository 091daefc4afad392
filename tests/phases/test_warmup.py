import gc
import weakref
from dataclasses import dataclass, replace

import pytest
import torch
from stage import anatomy, staged_pipeline, tiny

from residency.offload.cards import find_card
from residency.offload.errors import InputError, PhaseError
from residency.offload.memory_errors import Shortfall
from residency.offload.simulated.card import driver_error
from residency.phases.diffusers.families import find_family
from residency.phases.diffusers.pipeline import DiffusersPipeline
from residency.phases.diffusers.undo import Residue
from residency.phases.host import REQUESTS, Failure, Sweep
from residency.phases.shape import Shape

SMALL = Shape(64, 64, tokens=16, steps=2, guidance=1.0)
GUIDED = replace(SMALL, guidance=4.0)
LARGE = replace(SMALL, width=104, height=104)
"""Which is rounded to 96x96."""
QWEN, FLUX = "qwen-image", "flux.1-dev"
HALF = {"dit": "0.5", "text_encoder": "0.5"}
ENCODES, DENOISES, DECODES = (
    ("text_encode", "text_encoder"),
    ("denoise", "transformer"),
    ("vae_decode", "vae"),
)


def level(stage):
    """Allocated bytes, less what caches hold: of methods, and of a VAE whose decode broke off."""
    Residue(stage.pipeline)
    stage.pipeline.pipeline.vae.clear_cache()
    gc.collect()
    return stage.card.read().allocated_bytes


@dataclass(frozen=True)
class Swept:
    phases: tuple
    passes: dict
    begun: list
    """Passes that the denoiser's uses began with."""
    sweep: Sweep


@pytest.fixture(scope="module")
def swept():
    """A guided shape, a larger one, and a small one, of the same phases."""
    begun = []
    shapes = [GUIDED, LARGE, SMALL]
    with staged_pipeline(tiny(QWEN), shapes, resident_layers=HALF) as stage:
        assert stage.discover() is None
        begin_use = stage.placements["transformer"].begin_use

        def begin(*args, passes, **options):
            begun.append(passes)
            begin_use(*args, passes=passes, **options)

        stage.placements["transformer"].begin_use = begin
        sweep = stage.sweep()
        passes = {shape: stage.warmup.passes(shape) for shape in shapes}
        return Swept(stage.conductor.graph.phases, passes, begun, sweep)


def test_shapes_of_the_same_phases_have_one_graph_and_passes_of_their_own(swept):
    assert swept.phases == ("text_encode", "denoise", "vae_decode")
    assert swept.passes[GUIDED] == {ENCODES: 2, DENOISES: 4, DECODES: 1}
    assert swept.passes[SMALL] == {ENCODES: 1, DENOISES: 2, DECODES: 1}


def test_a_sweep_expects_the_passes_of_the_shape_that_it_runs(swept):
    assert swept.begun == [4, 4, 2, 2, 2, 2]


def test_shapes_of_different_phases_are_an_error():
    """With guidance FLUX's two encoders take turns, without it each has a phase of its own."""
    with (
        staged_pipeline(tiny(FLUX), [SMALL, GUIDED]) as stage,
        pytest.raises(PhaseError, match="runs text_encode → denoise → vae_decode, and") as caught,
    ):
        stage.discover()
    assert caught.value.hint == "plan shapes that have different phases apart"


def test_a_pipeline_whose_components_do_not_work_is_an_error():
    class Idle:
        def __init__(self):
            self.components = {"transformer": torch.nn.Linear(2, 2)}

        def __call__(self, prompt, width=64, height=64):
            return (torch.zeros(1, 3, height, width),)

    with (
        staged_pipeline(DiffusersPipeline(Idle()), [SMALL]) as stage,
        pytest.raises(PhaseError, match="no component of Idle worked at 64x64"),
    ):
        stage.discover()


def test_a_sweep_runs_each_shape_twice_and_reads_each_phase(swept):
    assert swept.sweep.failure is None
    assert [run.asked for run in swept.sweep.runs] == [GUIDED, LARGE, SMALL]
    for run in swept.sweep.runs:
        assert len(run.traces) == 2
        for trace in run.traces:
            phases = [reading.phase for reading in trace.readings]
            assert phases == [*swept.phases]


@pytest.mark.parametrize(("steps", "run"), [(50, 2), (1, 1)])
def test_a_warmup_takes_two_steps_at_most(steps, run):
    shape = replace(SMALL, steps=steps)
    with staged_pipeline(tiny("wan2.1-t2v-14b"), [shape]) as stage:
        assert stage.warmup.steps(shape) == run
        stage.discover()
        assert stage.warmup.passes(shape)[DENOISES] == run


def test_steps_that_nobody_gives_are_the_pipelines():
    pipeline = DiffusersPipeline(tiny("wan2.1-t2v-14b").pipeline)
    with staged_pipeline(pipeline, [Shape(64, 64)]) as stage:
        assert stage.warmup.steps(Shape(64, 64)) == 2


@pytest.mark.parametrize("higher", [1, 2])
def test_the_peak_of_a_phase_is_that_of_its_highest_request(higher):
    """The first has it where something is set up once, the second where something is carried on."""
    more = 64 << 20
    with staged_pipeline(tiny(QWEN), [SMALL]) as stage:
        stage.discover()
        (plain,) = stage.sweep().runs
        requests = 0

        def take(*_):
            nonlocal requests
            requests += 1
            if requests == higher:
                torch.empty(more, dtype=torch.uint8, device=stage.card.torch_device)

        handle = stage.pipeline.pipeline.vae.decoder.register_forward_pre_hook(take)
        (run,) = stage.sweep().runs
        handle.remove()
    assert requests == 2
    assert run.peak_bytes("vae_decode") > more > plain.peak_bytes("vae_decode")
    assert run.peak_bytes("denoise") == plain.peak_bytes("denoise")


def test_a_request_does_not_hold_the_output_of_the_one_before(swept):
    _, large, small = swept.sweep.runs
    for phase in range(3):
        for run in (large, small):
            first, second = (trace.readings[phase].reading for trace in run.traces)
            grown = second.peak_allocated_bytes - first.peak_allocated_bytes
            assert abs(grown) < run.output.value.nbytes // 10


def test_a_request_in_the_steady_state_is_what_counts(swept):
    with staged_pipeline(tiny(QWEN), [SMALL], resident_layers=HALF) as stage:
        stage.discover()
        for use in list(stage.conductor.graph.uses):
            stage.retain(use, True)
        (retained,) = stage.sweep().runs
    baseline = swept.sweep.runs[-1]
    for run in (retained, baseline):
        first, second = (trace.transfers.h2d_bytes for trace in run.traces)
        assert run.h2d_bytes == second <= first
    assert retained.h2d_bytes < baseline.h2d_bytes


def test_the_output_is_on_the_host_and_the_shape_told_that_was_run(swept):
    _, large, small = swept.sweep.runs
    assert large.output.value.device.type == small.output.value.device.type == "cpu"
    assert (large.output.value.shape, small.output.value.shape) == ((1, 3, 96, 96), (1, 3, 64, 64))
    assert (large.asked.size, large.run.size) == ("104x104", "96x96")


def test_a_sweep_leaves_nothing_of_its_requests_in_the_pipeline():
    with staged_pipeline(tiny(QWEN), [SMALL]) as stage:
        stage.discover()
        scheduler = stage.pipeline.pipeline.scheduler
        before = dict(vars(scheduler)), anatomy(stage.components)
        stage.sweep()
        assert (vars(scheduler), anatomy(stage.components)) == before


def test_virtual_output_is_none():
    family = find_family(QWEN, tiny=True)
    pipeline = DiffusersPipeline(family.build(virtual=True), request=family.request)
    large = Shape(256, 256, tokens=16, guidance=1.0)
    with staged_pipeline(pipeline, [large], virtual=True) as stage:
        stage.discover()
        run = stage.sweep().runs[0]
    assert (run.output, run.run.size) == (None, "256x256")


@pytest.fixture(scope="module")
def allocations():
    """Of one small request."""
    with staged_pipeline(tiny(QWEN), [SMALL], resident_layers=HALF) as stage:
        stage.discover()
        before = stage.card.faults.allocations
        with stage.conductor.request():
            stage.pipeline.run(SMALL)
        return stage.card.faults.allocations - before


@pytest.mark.parametrize(
    ("share", "phase"), [(0.01, "text_encode"), (0.6, "denoise"), (0.99, "vae_decode")]
)
def test_running_out_of_memory_is_a_failure_with_its_phase_and_shape(allocations, share, phase):
    with staged_pipeline(tiny(QWEN), [SMALL], resident_layers=HALF) as stage:
        stage.discover()
        before = level(stage)
        stage.card.faults.at_allocation(int(allocations * share))
        sweep = stage.sweep()
        assert sweep.runs == ()
        assert sweep.failure == Failure(phase, SMALL, True, None, "simgpu out of memory (injected)")
        assert level(stage) == before
        stage.check_integrity()
        assert stage.sweep().failure is None


def test_a_crash_is_a_failure_that_says_what_was_raised():
    with staged_pipeline(tiny(QWEN), [SMALL]) as stage:
        stage.discover()
        before = level(stage)
        stage.card.faults.at_copy(100, driver_error)
        failure = stage.sweep().failure
        assert failure == Failure(
            "denoise", SMALL, False, None, "InjectedError: the copy failed (injected)"
        )
        assert level(stage) == before
        assert stage.sweep().failure is None


def test_a_sweep_stops_at_the_first_failure_and_keeps_the_runs_before_it(allocations):
    with staged_pipeline(tiny(QWEN), [SMALL, GUIDED], resident_layers=HALF) as stage:
        stage.discover()
        stage.card.faults.at_allocation(allocations * REQUESTS + allocations // 2)
        sweep = stage.sweep()
    assert [run.asked for run in sweep.runs] == [SMALL]
    assert sweep.failure.shape == GUIDED


def test_a_card_that_is_too_small_says_how_much_is_missing():
    with staged_pipeline(tiny(QWEN), [SMALL]) as stage:
        stage.discover()
        peak = stage.sweep().runs[0].peak_bytes("vae_decode")
        free = find_card("RTX 5090").total_bytes - stage.card.context_bytes
        stage.card.others_bytes = free - peak + 1
        failure = stage.sweep().failure
    assert failure.is_oom
    assert failure.shortfall.short_bytes > 0
    assert failure.phase == "vae_decode"


@pytest.mark.parametrize(
    ("share", "phase"), [(0.01, "text_encode"), (0.5, "denoise"), (0.99, "vae_decode")]
)
def test_running_out_while_the_phases_are_looked_for_is_a_failure_too(allocations, share, phase):
    with staged_pipeline(tiny(QWEN), [SMALL]) as stage:
        before = level(stage)
        stage.card.faults.at_allocation(int(allocations * share))
        failure = stage.discover()
        assert failure == Failure(phase, SMALL, True, None, "simgpu out of memory (injected)")
        assert level(stage) < before + 4096
        assert stage.discover() is None


def test_a_failure_before_any_component_works_has_no_phase():
    with staged_pipeline(tiny(QWEN), [SMALL]) as stage:
        stage.pipeline.pipeline.scheduler = None
        stage.pipeline.pipeline.encode_prompt = None
        failure = stage.discover()
        del stage.pipeline.pipeline.encode_prompt
    assert (failure.phase, failure.shape, failure.is_oom) == (None, SMALL, False)
    assert failure.detail.startswith("TypeError: ")


def test_what_the_user_asked_for_wrongly_is_no_failure():
    with (
        staged_pipeline(tiny(QWEN), [replace(SMALL, frames=9)]) as stage,
        pytest.raises(InputError),
    ):
        stage.discover()


def test_an_interrupt_is_no_failure():
    def interrupt():
        return KeyboardInterrupt()

    with staged_pipeline(tiny(QWEN), [SMALL]) as stage:
        stage.discover()
        stage.card.faults.at_allocation(50, interrupt)
        with pytest.raises(KeyboardInterrupt):
            stage.sweep()


def test_a_failure_lets_go_of_what_the_error_and_its_cause_held():
    def fail():
        held = torch.zeros(3)
        watched.append(weakref.ref(held))
        raise ValueError("first")

    def fail_again():
        other = torch.zeros(3)
        watched.append(weakref.ref(other))
        try:
            fail()
        except ValueError:
            raise RuntimeError("second") from None

    watched = []
    try:
        fail_again()
    except RuntimeError as error:
        failure = Failure.of(error, "denoise", SMALL)
        assert [each() for each in watched] == [None, None]
    assert failure == Failure("denoise", SMALL, False, None, "RuntimeError: second")


def test_a_failure_of_memory_reads_what_was_short():
    text = "Tried to allocate 2.00 GiB. GPU 0 has 4.00 GiB of which 1.00 GiB is free."
    failure = Failure.of(torch.OutOfMemoryError(text), None, None)
    assert failure == Failure(None, None, True, Shortfall(2 << 30, 1 << 30), text)
