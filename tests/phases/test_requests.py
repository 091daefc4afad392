import logging
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from residency.offload.errors import ShapeError
from residency.phases.diffusers.families import families, find_family
from residency.phases.diffusers.request import request, run
from residency.phases.shape import Shape

UNGUIDED, GUIDED = 1.0, 3.0


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Threads that wait for one another on busy cores take longer than tiny layers do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextmanager
def counted_calls(pipeline):
    """Counts the forward passes of each component with weights."""
    calls = Counter()
    handles = [
        part.register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
        for name, part in pipeline.components.items()
        if isinstance(part, torch.nn.Module)
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@pytest.fixture
def logged():
    """What diffusers and transformers log; neither hands its records to the root logger."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    libraries = [logging.getLogger(name) for name in ("diffusers", "transformers")]
    for library in libraries:
        library.addHandler(handler)
    yield records
    for library in libraries:
        library.removeHandler(handler)


def layers_without_vision(module):
    """The layers of the outermost module lists: vision has no say where no image goes in."""
    for name, child in module.named_children():
        if isinstance(child, torch.nn.ModuleList):
            yield from child
        elif name != "visual":
            yield from layers_without_vision(child)


@pytest.mark.parametrize("guidance", [UNGUIDED, GUIDED])
@pytest.mark.parametrize("name", families())
def test_a_request_repeats_itself_exactly(name, guidance):
    family = find_family(name, tiny=True)
    pipeline = family.build()
    shape = replace(family.request, guidance=guidance)
    first = run(pipeline, shape)
    assert first.isfinite().all()
    assert first.std() > 0.01
    assert first.shape[-2:] == (shape.height, shape.width)
    assert torch.equal(first, run(pipeline, shape))
    assert torch.equal(first, run(family.build(), shape))
    assert not torch.equal(first, run(pipeline, shape, seed=1))


@pytest.mark.parametrize(("guidance", "passes"), [(UNGUIDED, 1), (GUIDED, 2)])
@pytest.mark.parametrize("name", families())
def test_guidance_doubles_the_encodes_and_the_denoiser_s_calls(name, guidance, passes):
    family = find_family(name, tiny=True)
    pipeline = family.build()
    with counted_calls(pipeline) as calls:
        run(pipeline, replace(family.request, guidance=guidance, steps=2))
    encoders = {component for component in family.components if "encoder" in component}
    assert calls == {"transformer": 2 * passes} | dict.fromkeys(encoders, passes)


@pytest.mark.parametrize("name", families())
def test_guidance_changes_the_output(name):
    family = find_family(name, tiny=True)
    pipeline = family.build()
    unguided, guided = (
        run(pipeline, replace(family.request, guidance=guidance)) for guidance in (UNGUIDED, GUIDED)
    )
    assert not torch.equal(unguided, guided)


@pytest.mark.parametrize("name", families())
def test_a_batch_comes_out_whole(name):
    family = find_family(name, tiny=True)
    output = run(family.build(), replace(family.request, batch=2, guidance=GUIDED))
    assert output.shape[0] == 2
    assert output.isfinite().all()


@pytest.mark.parametrize("name", families())
def test_every_layer_that_a_prompt_passes_has_a_say_in_the_output(name):
    family = find_family(name, tiny=True)
    pipeline = family.build()
    shape = replace(family.request, guidance=UNGUIDED)
    reference = run(pipeline, shape)
    for component in family.components.keys() - {"vae"}:
        for layer in layers_without_vision(getattr(pipeline, component)):
            matrix = max(layer.parameters(), key=torch.Tensor.numel)
            before = matrix.clone()
            matrix.zero_()
            assert not torch.equal(reference, run(pipeline, shape)), component
            matrix.copy_(before)
    assert torch.equal(reference, run(pipeline, shape))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("flux.1-dev", "72x80:tokens=100,steps=2"),
        ("qwen-image", "72x80:tokens=16,steps=2"),
        ("qwen-image-2.1", "64x64:guidance=2,steps=2"),
        ("wan2.1-t2v-14b", "80x96x6:steps=2"),
    ],
)
def test_the_libraries_log_nothing_of_a_request_and_are_loud_again_afterwards(name, shape, logged):
    pipeline = find_family(name, tiny=True).build()
    run(pipeline, Shape.parse(shape))
    assert logged == []
    with request(pipeline, Shape.parse(shape)) as keywords:
        pass
    pipeline(**keywords)
    assert logged


def test_stub_tokenizers_take_the_tokens_of_the_shape_for_the_request():
    pipeline = find_family("flux.1-dev", tiny=True).build()
    pipeline.tokenizer.tokens = 5
    with request(pipeline, Shape(64, 64, tokens=40)):
        assert (pipeline.tokenizer.tokens, pipeline.tokenizer_2.tokens) == (40, 40)
    assert (pipeline.tokenizer.tokens, pipeline.tokenizer_2.tokens) == (5, 512)


@pytest.mark.parametrize(("guidance", "conditions"), [(UNGUIDED, 1), (GUIDED, 2)])
def test_a_modular_pipeline_gets_its_guider_back(guidance, conditions):
    pipeline = find_family("qwen-image-2.1", tiny=True).build()
    pipeline.guider = guider = pipeline.guider.new(guidance_scale=7.5)
    state = guider.get_state()
    with request(pipeline, Shape(64, 64, guidance=guidance)) as keywords:
        pipeline(**keywords)
        assert pipeline.guider.num_conditions == conditions
    assert pipeline.guider is guider
    assert guider.get_state() == state


def test_the_pipeline_is_put_back_when_a_request_fails():
    pipeline = find_family("qwen-image-2.1", tiny=True).build()
    guider, tokens = pipeline.guider, pipeline.processor.tokens
    with pytest.raises(ZeroDivisionError), request(pipeline, Shape(64, 64, tokens=3, guidance=2)):
        raise ZeroDivisionError
    assert pipeline.guider is guider
    assert pipeline.processor.tokens == tokens


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("wan2.1-t2v-14b", "72x64", "divisible by 16 but are 64 and 72"),
        ("flux.1-dev", "64x64:tokens=600", "cannot be greater than 512 but is 600"),
        ("qwen-image", "64x64:tokens=2000", "cannot be greater than 1024 but is 2000"),
    ],
)
def test_what_the_pipeline_refuses_is_a_shape_error(name, shape, message):
    pipeline = find_family(name, tiny=True).build()
    with pytest.raises(ShapeError, match=f"Pipeline refuses {shape}: .*{message}") as caught:
        run(pipeline, Shape.parse(shape))
    assert isinstance(caught.value.__cause__, ValueError)
    assert pipeline.tokenizer.tokens == 512


def test_another_value_error_is_left_as_it_is():
    pipeline = find_family("qwen-image", tiny=True).build()
    with pytest.raises(ValueError, match="not of the shape"), request(pipeline, Shape(64, 64)):
        raise ValueError("not of the shape")
