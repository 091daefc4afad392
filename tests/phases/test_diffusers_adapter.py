from dataclasses import dataclass, replace
from functools import cache

import accelerate
import pytest
import torch
from diffusers.hooks import apply_group_offloading
from stage import anatomy, staged_pipeline, tiny
from torch import nn

from residency.offload.cards import find_card
from residency.offload.errors import InputError, ShapeError
from residency.offload.simulated.card import SimulatedCard
from residency.phases.diffusers.families import find_family
from residency.phases.diffusers.pipeline import DiffusersPipeline
from residency.phases.diffusers.request import run
from residency.phases.shape import Shape

SMALL = Shape(64, 64, tokens=16, steps=2, guidance=1.0)
STREAMED = {"dit": "layerwise-offload", "text_encoder": "layerwise-offload"}
EVERYTHING = {"all": "component-offload", **STREAMED}

ENCODE, DENOISE, DECODE = "text_encode", "denoise", "vae_decode"


def shape(name, guidance=1.0):
    return replace(SMALL, guidance=guidance, frames=5 if "wan" in name else 1)


@dataclass(frozen=True)
class Rehearsal:
    """What a family did on the card, and what was left of it."""

    phases: dict
    output: torch.Tensor
    before: dict
    after: dict


@cache
def rehearse(name, guidance):
    """Unguided with nothing held, guided with half of the layers resident and all retained."""
    pipeline, asked = tiny(name), shape(name, guidance)
    layers = {"dit": "0.5", "text_encoder": "0.5"} if asked.guided else {}
    before = anatomy(pipeline.components)
    with staged_pipeline(pipeline, [asked], residency=EVERYTHING, resident_layers=layers) as stage:
        assert stage.discover() is None
        graph = stage.conductor.graph
        phases = {phase: {} for phase in graph.phases}
        for use in list(graph.uses):
            phases[use.phase][use.component] = use.passes
            stage.retain(use, asked.guided)
        (swept,) = stage.sweep().runs
        stage.check_integrity()
    return Rehearsal(phases, swept.output.value, before, anatomy(pipeline.components))


# phase -> component -> passes of two steps
PHASES = {
    ("flux.1-dev", 1.0): {
        ENCODE: {"text_encoder": 1},
        "text_encode_2": {"text_encoder_2": 1},
        DENOISE: {"transformer": 2},
        DECODE: {"vae": 1},
    },
    ("flux.1-dev", 4.0): {
        ENCODE: {"text_encoder": 2, "text_encoder_2": 2},
        DENOISE: {"transformer": 4},
        DECODE: {"vae": 1},
    },
} | {
    (name, guidance): {
        ENCODE: {"text_encoder": prompts},
        DENOISE: {"transformer": 2 * prompts},
        DECODE: {"vae": 2 if "wan" in name else 1},  # a pass for each latent frame
    }
    for name in ("qwen-image", "qwen-image-2.1", "wan2.1-t2v-14b")
    for guidance, prompts in ((1.0, 1), (4.0, 2))
}


each_rehearsal = pytest.mark.parametrize(("name", "guidance"), PHASES)


@each_rehearsal
def test_the_phases_of_a_family_are_found(name, guidance):
    found = rehearse(name, guidance).phases
    assert found == PHASES[name, guidance]
    assert list(found) == list(PHASES[name, guidance])


@each_rehearsal
def test_output_from_the_card_is_the_plain_output_bit_for_bit(name, guidance):
    plain = run(tiny(name).pipeline, shape(name, guidance))
    assert torch.equal(rehearse(name, guidance).output, plain)


@each_rehearsal
def test_a_pipeline_is_left_as_it_was(name, guidance):
    assert rehearse(name, guidance).after == rehearse(name, guidance).before


def test_binding_makes_a_pipeline_execute_on_the_card():
    pipeline = tiny("qwen-image")
    with SimulatedCard(find_card("RTX 5090"), allocator="exact") as card:
        pipeline.bind(card)
        assert pipeline.pipeline._execution_device == card.torch_device
        pipeline.unbind()
    assert pipeline.pipeline._execution_device == torch.device("cpu")


def test_binding_and_unbinding_leave_no_trace():
    pipeline = tiny("flux.1-dev")
    before = anatomy(pipeline.components)
    with SimulatedCard(find_card("RTX 5090"), allocator="exact") as card:
        pipeline.bind(card)
        assert anatomy(pipeline.components) != before
        pipeline.unbind()
        pipeline.unbind()
    assert anatomy(pipeline.components) == before


def test_a_component_that_is_offloaded_already_is_refused_and_nothing_is_bound():
    pipeline = tiny("wan2.1-t2v-14b")
    hook = accelerate.hooks.ModelHook()
    accelerate.hooks.add_hook_to_module(pipeline.pipeline.vae, hook)
    before = anatomy(pipeline.components)
    with (
        SimulatedCard(find_card("RTX 5090"), allocator="exact") as card,
        pytest.raises(InputError, match=r"vae of wan2.1-t2v-14b is offloaded by .*ModelHook") as e,
    ):
        pipeline.bind(card)
    assert e.value.hint == "hand the pipeline over without its own offloading enabled"
    assert anatomy(pipeline.components) == before


def test_unbinding_leaves_a_hook_of_somebody_elses():
    pipeline = tiny("wan2.1-t2v-14b")
    hook = accelerate.hooks.ModelHook()
    accelerate.hooks.add_hook_to_module(pipeline.pipeline.vae, hook)
    pipeline.unbind()
    assert pipeline.pipeline.vae._hf_hook is hook


def test_components_are_the_modules_that_have_weights():
    pipeline = tiny("flux.1-dev")
    names = [component.name for component in pipeline.components]
    assert sorted(names) == ["text_encoder", "text_encoder_2", "transformer", "vae"]
    for component in pipeline.components:
        assert component.module is getattr(pipeline.pipeline, component.name)


def test_a_pipeline_without_modules_is_refused():
    class Empty:
        def __init__(self):
            self.components = {"scheduler": object(), "vae": None, "helper": nn.Identity()}

    with pytest.raises(InputError, match="Empty has no component with weights") as caught:
        DiffusersPipeline(Empty())
    assert caught.value.hint


def test_a_pipeline_is_called_what_it_is_named_or_by_its_class():
    inner = tiny("qwen-image").pipeline
    assert DiffusersPipeline(inner).name == "QwenImagePipeline"
    assert DiffusersPipeline(inner, name="mine").name == "mine"


@pytest.mark.parametrize(
    ("name", "asked", "size"),
    [
        ("qwen-image", "72x72", "64x64"),
        ("flux.1-dev", "72x72", "64x64"),
        ("qwen-image-2.1", "80x72", "64x64"),
        ("wan2.1-t2v-14b", "64x64x7", "64x64x5"),
    ],
)
def test_the_shape_is_told_that_a_pipeline_rounded_to(name, asked, size):
    asked = Shape.parse(f"{asked}:tokens=16,steps=2,guidance=1")
    output = tiny(name).run(asked)
    assert output.shape.size == size
    assert replace(output.shape, width=72, height=72, frames=1) == replace(
        asked, width=72, height=72, frames=1
    )


def test_an_output_of_several_images_keeps_the_batch():
    output = tiny("qwen-image").run(replace(SMALL, batch=2))
    assert output.value.shape == (2, 3, 64, 64)
    assert output.shape == replace(SMALL, batch=2)


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("wan2.1-t2v-14b", Shape(72, 64, frames=5)),
        ("flux.1-dev", Shape(64, 64, frames=5)),
        ("flux.1-dev", Shape(64, 64, tokens=600)),
        ("qwen-image", Shape(8, 64)),
    ],
)
def test_a_shape_that_the_pipeline_refuses_is_a_shape_error_of_the_warmup(name, refused):
    with (
        staged_pipeline(tiny(name), [refused]) as stage,
        pytest.raises(ShapeError) as caught,
    ):
        stage.discover()
    assert caught.value.hint


def test_the_recommended_request_completes_what_a_shape_leaves_open():
    pipeline = tiny("wan2.1-t2v-14b")
    assert pipeline.completed(Shape(64, 64)) == Shape(64, 64, steps=2, guidance=5.0)
    assert pipeline.steps(Shape(64, 64)) == 2
    assert pipeline.steps(Shape(64, 64, steps=9)) == 9


def test_without_one_the_pipeline_says_its_steps():
    pipeline = DiffusersPipeline(tiny("wan2.1-t2v-14b").pipeline)
    assert pipeline.completed(Shape(64, 64)) == Shape(64, 64)
    assert pipeline.steps(Shape(64, 64)) == 50


def test_the_largest_shapes_are_as_asked_and_compared_as_completed():
    pipeline = tiny("wan2.1-t2v-14b")
    open_, off, same = Shape(64, 64), Shape(64, 64, guidance=1.0), Shape(64, 64, guidance=5.0)
    assert pipeline.largest([off, open_]) == (open_,)
    assert pipeline.largest([open_, off, same]) == (open_,)
    assert pipeline.largest([same, open_]) == (same,)


def test_a_component_under_diffusers_group_offloading_is_refused():
    built = find_family("qwen-image", tiny=True).build()
    cpu = torch.device("cpu")
    apply_group_offloading(
        built.transformer,
        onload_device=cpu,
        offload_device=cpu,
        offload_type="block_level",
        num_blocks_per_group=1,
    )
    with SimulatedCard(find_card("RTX 5090"), allocator="exact") as device:
        with pytest.raises(InputError, match=r"transformer of .* GroupOffloadingHook") as refused:
            DiffusersPipeline(built).bind(device)
        assert refused.value.hint
