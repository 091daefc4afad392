import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from residency.offload.errors import InputError, ShapeError
from residency.phases.diffusers.families import families, find_family
from residency.phases.diffusers.request import arguments
from residency.phases.shape import Shape


class Denoiser(SimpleNamespace):
    """Stands for a pipeline of somebody else: a call with a signature, and components."""

    components: dict = {}  # noqa: RUF012


class ListOfPrompts(Denoiser):
    def __call__(self, prompt, height=64, width=64, negative_prompt=None, guidance_scale=7.5):
        raise NotImplementedError


class EmbeddedGuidance(Denoiser):
    def __call__(self, prompt, height=64, width=64, guidance_scale=3.5):
        raise NotImplementedError


class ImageToImage(Denoiser):
    def __call__(self, image, prompt=None, height=64, width=64):
        raise NotImplementedError


class Upscaler(Denoiser):
    def __call__(self, prompt=None):
        raise NotImplementedError


EMBEDDED = {"transformer": SimpleNamespace(config=SimpleNamespace(guidance_embeds=True))}


def tiny(name):
    return find_family(name, tiny=True).build()


@pytest.mark.parametrize("name", families())
def test_a_pipeline_accepts_its_arguments(name):
    family = find_family(name, tiny=True)
    pipeline = family.build()
    keywords = arguments(pipeline, family.request)
    if hasattr(pipeline, "blocks"):
        accepted = {each.name for each in pipeline.blocks.inputs} | {"output"}
    else:
        accepted = set(inspect.signature(pipeline.__call__).parameters)
    assert keywords.keys() <= accepted
    assert (keywords["width"], keywords["height"]) == (family.request.width, family.request.height)
    assert keywords["num_inference_steps"] == family.request.steps
    assert keywords["output_type"] == "pt"


def test_steps_that_the_shape_leaves_open_stay_with_the_pipeline():
    keywords = arguments(tiny("qwen-image"), Shape(64, 64))
    assert "num_inference_steps" not in keywords


def test_the_generator_is_on_the_cpu_and_depends_on_the_seed():
    def draw(seed):
        generator = arguments(tiny("flux.1-dev"), Shape(64, 64), seed=seed)["generator"]
        assert generator.device.type == "cpu"
        return torch.rand(4, generator=generator).tolist()

    assert draw(1) == draw(1) != draw(2)


def test_a_prompt_has_about_as_many_words_as_the_shape_has_tokens():
    keywords = arguments(tiny("wan2.1-t2v-14b"), Shape(64, 64, tokens=33, guidance=4))
    assert len(keywords["prompt"].split()) == 33
    assert len(keywords["negative_prompt"].split()) == 33
    assert keywords["prompt"] != keywords["negative_prompt"]


@pytest.mark.parametrize(("tokens", "length"), [(16, 512), (512, 512), (900, 900)])
def test_a_long_prompt_raises_the_sequence_length_and_a_short_one_keeps_the_default(tokens, length):
    keywords = arguments(tiny("qwen-image"), Shape(64, 64, tokens=tokens))
    assert keywords["max_sequence_length"] == length


@pytest.mark.parametrize("name", ["qwen-image", "flux.1-dev"])
def test_true_cfg_is_off_at_guidance_1_and_has_a_negative_prompt_above(name):
    pipeline = tiny(name)
    off = arguments(pipeline, Shape(64, 64))
    on = arguments(pipeline, Shape(64, 64, guidance=4))
    assert off["true_cfg_scale"] == 1.0
    assert "negative_prompt" not in off
    assert on["true_cfg_scale"] == 4.0
    assert on["negative_prompt"]
    assert "guidance_scale" not in off | on


def test_plain_cfg_is_off_at_guidance_1_and_has_a_negative_prompt_above():
    pipeline = tiny("wan2.1-t2v-14b")
    off = arguments(pipeline, Shape(64, 64))
    on = arguments(pipeline, Shape(64, 64, guidance=5))
    assert off["guidance_scale"] == 1.0
    assert "negative_prompt" not in off
    assert on["guidance_scale"] == 5.0
    assert on["negative_prompt"]


def test_a_modular_pipeline_leaves_the_scale_to_its_guider_and_returns_images_alone():
    pipeline = tiny("qwen-image-2.1")
    on = arguments(pipeline, Shape(64, 64, guidance=5))
    assert on["negative_prompt"]
    assert on["output"] == "images"
    assert not {"guidance_scale", "true_cfg_scale"} & on.keys()
    assert "negative_prompt" not in arguments(pipeline, Shape(64, 64))


def test_embedded_guidance_stays_with_the_pipeline():
    keywords = arguments(EmbeddedGuidance(components=EMBEDDED), Shape(64, 64))
    assert "guidance_scale" not in keywords


def test_cfg_is_refused_by_a_pipeline_that_only_embeds_guidance():
    with pytest.raises(ShapeError, match="EmbeddedGuidance has no classifier-free guidance"):
        arguments(EmbeddedGuidance(components=EMBEDDED), Shape(64, 64, guidance=3))


@pytest.mark.parametrize(
    ("name", "keyword"),
    [
        ("flux.1-dev", "num_images_per_prompt"),
        ("qwen-image-2.1", "num_images_per_prompt"),
        ("wan2.1-t2v-14b", "num_videos_per_prompt"),
    ],
)
def test_a_batch_is_so_many_outputs_of_one_prompt(name, keyword):
    keywords = arguments(tiny(name), Shape(64, 64, batch=3))
    assert keywords[keyword] == 3
    assert isinstance(keywords["prompt"], str)


def test_a_batch_is_a_list_of_prompts_where_there_is_no_other_way():
    keywords = arguments(ListOfPrompts(), Shape(64, 64, batch=3, guidance=2))
    assert len(keywords["prompt"]) == len(keywords["negative_prompt"]) == 3
    assert isinstance(arguments(ListOfPrompts(), Shape(64, 64))["prompt"], str)


def test_frames_are_asked_of_a_video_pipeline_even_if_it_is_one():
    video = tiny("wan2.1-t2v-14b")
    assert arguments(video, Shape(64, 64, frames=9))["num_frames"] == 9
    assert arguments(video, Shape(64, 64))["num_frames"] == 1


@pytest.mark.parametrize("name", ["flux.1-dev", "qwen-image", "qwen-image-2.1"])
def test_an_image_pipeline_refuses_frames(name):
    with pytest.raises(ShapeError, match="makes images, and the shape has 9 frames") as caught:
        arguments(tiny(name), Shape(64, 64, frames=9))
    assert caught.value.hint == "write 64x64"


@pytest.mark.parametrize(
    ("name", "smallest"),
    [("flux.1-dev", 16), ("qwen-image", 16), ("qwen-image-2.1", 16), ("wan2.1-t2v-14b", 8)],
)
def test_less_than_one_latent_is_refused(name, smallest):
    pipeline = tiny(name)
    arguments(pipeline, Shape(smallest, smallest))
    with pytest.raises(ShapeError, match=f"{smallest - 1}x64 is smaller than one latent") as caught:
        arguments(pipeline, Shape(smallest - 1, 64))
    assert caught.value.hint == f"width and height start at {smallest}"


def test_a_pipeline_that_needs_an_image_is_refused():
    with pytest.raises(InputError, match="ImageToImage needs image, which no shape gives"):
        arguments(ImageToImage(), Shape(64, 64))


def test_a_pipeline_that_is_told_no_size_is_refused():
    with pytest.raises(ShapeError, match="Upscaler takes no width"):
        arguments(Upscaler(), Shape(64, 64))


def test_arguments_leave_the_pipeline_alone():
    pipeline = tiny("qwen-image-2.1")
    guider, tokens = pipeline.guider, pipeline.processor.tokens
    arguments(pipeline, replace(Shape(64, 64), guidance=3, tokens=9))
    assert pipeline.guider is guider
    assert pipeline.processor.tokens == tokens
