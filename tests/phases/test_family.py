import os
import subprocess
import sys
from functools import cache

import psutil
import pytest
import torch

from residency.offload.errors import InputError, ShapeError, UnknownNameError
from residency.offload.simulated.storage import is_virtual
from residency.phases.diffusers.families import Family, families, find_family
from residency.phases.shape import Shape

MIB = 2**20
GIB = 2**30

# family -> component -> weights in GiB, layer groups as (layers, MiB a layer, None if they differ)
FULL = {
    "flux.1-dev": {
        "text_encoder": (0.229, {"encoder.layers": (12, 13.5)}),
        "text_encoder_2": (8.870, {"encoder.block": (24, None)}),
        "transformer": (
            22.168,
            {"transformer_blocks": (19, 648.2), "single_transformer_blocks": (38, 270.1)},
        ),
        "vae": (0.156, {}),
    },
    "qwen-image": {
        "text_encoder": (
            15.445,
            {"model.language_model.layers": (28, 444.5), "model.visual.blocks": (32, 37.6)},
        ),
        "transformer": (38.055, {"transformer_blocks": (60, 648.2)}),
        "vae": (0.236, {}),
    },
    "qwen-image-2.1": {
        "text_encoder": (
            16.330,
            {
                "model.language_model.layers": (36, 368.0),
                "model.visual.blocks": (27, 29.1),
                "model.visual.deepstack_merger_list": (3, 76.5),
            },
        ),
        "transformer": (13.253, {"transformer_blocks": (32, 416.0)}),
        "vae": (0.629, {}),
    },
    "wan2.1-t2v-14b": {
        "text_encoder": (10.582, {"encoder.block": (24, 368.0)}),
        "transformer": (26.615, {"blocks": (40, 670.2)}),
        "vae": (0.473, {}),
    },
}


@cache
def full(name):
    """A full-scale pipeline's parts. For tests that only look: each takes half a second."""
    family = find_family(name)
    return parts(family, family.build())


def weight_bytes(module):
    buffers = sum(buffer.nbytes for buffer in module.buffers())
    return buffers + sum(parameter.nbytes for parameter in module.parameters())


def layer_groups(module):
    """The module lists that lie in no other module list, by name."""
    groups = {}
    for name, child in module.named_modules():
        inside = any(name.startswith(f"{group}.") for group in groups)
        if isinstance(child, torch.nn.ModuleList) and not inside:
            groups[name] = child
    return groups


def parts(family, pipeline):
    return {name: getattr(pipeline, name) for name in family.components}


def state(family, pipeline):
    return {
        f"{name}.{key}": value
        for name, part in parts(family, pipeline).items()
        for key, value in part.state_dict().items()
    }


def equal_states(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def in_a_new_process(program):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-W", "error", "-c", program]
    return subprocess.run(command, check=True, env=environment, capture_output=True, text=True)


def test_the_families_are_the_four_that_were_measured():
    assert set(families()) == set(FULL)


@pytest.mark.parametrize("name", FULL)
def test_a_full_scale_pipeline_weighs_what_the_real_one_does(name):
    find_family(name, tiny=True).build()  # imports what it takes
    before = psutil.Process().memory_info().rss
    built = full(name)
    assert psutil.Process().memory_info().rss - before < 100 * MIB
    assert built.keys() == FULL[name].keys()
    for component, (gib, groups) in FULL[name].items():
        assert weight_bytes(built[component]) / GIB == pytest.approx(gib, abs=0.0011), component
        found = layer_groups(built[component])
        for group, (layers, layer_mib) in groups.items():
            assert len(found[group]) == layers
            if layer_mib is not None:
                assert weight_bytes(found[group][1]) / MIB == pytest.approx(layer_mib, abs=0.06)


def test_the_text_encoder_of_qwen_image_21_has_66_groups():
    encoder = full("qwen-image-2.1")["text_encoder"]
    assert [len(group) for group in layer_groups(encoder).values()] == [27, 3, 36]


def test_virtual_parameters_are_marked_and_buffers_hold_real_values():
    built = full("qwen-image-2.1").values()
    assert all(is_virtual(parameter) for part in built for parameter in part.parameters())
    buffers = [buffer for part in built for buffer in part.buffers()]
    assert buffers
    assert not any(is_virtual(buffer) for buffer in buffers)
    assert all(buffer.isfinite().all() and buffer.count_nonzero() for buffer in buffers)


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("scale", ["tiny", "full"])
def test_a_pipeline_is_built_for_inference(name, scale):
    family = find_family(name, tiny=True)
    built = (full(name) if scale == "full" else parts(family, family.build())).values()
    assert not any(part.training for part in built)
    assert not any(parameter.requires_grad for part in built for parameter in part.parameters())


@pytest.mark.parametrize("name", FULL)
def test_a_tiny_pipeline_has_the_layer_groups_of_the_full_one(name):
    tiny = find_family(name, tiny=True)
    small, large = parts(tiny, tiny.build()), full(name)
    assert small.keys() == large.keys()
    for component in small:
        assert layer_groups(small[component]).keys() == layer_groups(large[component]).keys()
        groups = layer_groups(small[component]).values()
        assert component == "vae" or all(len(group) >= 3 for group in groups)


@pytest.mark.parametrize("name", FULL)
def test_a_tiny_pipeline_weighs_a_few_megabytes_and_no_weight_is_virtual(name):
    family = find_family(name, tiny=True)
    built = parts(family, family.build()).values()
    assert sum(map(weight_bytes, built)) < 8 * MIB
    assert not any(is_virtual(parameter) for part in built for parameter in part.parameters())


@pytest.mark.parametrize("scale", ["tiny", "full"])
@pytest.mark.parametrize(
    ("name", "component"), [("flux.1-dev", "text_encoder_2"), ("wan2.1-t2v-14b", "text_encoder")]
)
def test_a_t5_encoder_keeps_its_embedding_tied(name, component, scale):
    family = find_family(name, tiny=True)
    encoder = (full(name) if scale == "full" else parts(family, family.build()))[component]
    assert encoder.shared.weight is encoder.encoder.embed_tokens.weight


@pytest.mark.parametrize("name", FULL)
def test_tiny_weights_depend_on_the_seed_and_on_nothing_else(name):
    family = find_family(name, tiny=True)
    first = state(family, family.build(seed=1))
    torch.manual_seed(99)
    assert equal_states(first, state(family, family.build(seed=1)))
    assert not equal_states(first, state(family, family.build(seed=2)))
    assert all(value.isfinite().all() for value in first.values())


@pytest.mark.parametrize("tiny", [False, True])
def test_building_leaves_the_generator_and_the_default_dtype_as_they_were(tiny):
    generator, dtype = torch.get_rng_state(), torch.get_default_dtype()
    find_family("flux.1-dev", tiny=tiny).build()
    assert torch.equal(generator, torch.get_rng_state())
    assert torch.get_default_dtype() == dtype


def test_building_prints_nothing():
    """In a process of its own, since the libraries hold on to the first stderr that they see."""
    done = in_a_new_process(
        "from residency.phases.diffusers.families import families, find_family\n"
        "for name in families():\n"
        "    find_family(name).build(), find_family(name, tiny=True).build()"
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_a_tiny_pipeline_can_be_virtual_too():
    family = find_family("wan2.1-t2v-14b", tiny=True)
    built = parts(family, family.build(virtual=True)).values()
    assert all(is_virtual(parameter) for part in built for parameter in part.parameters())


def test_an_unknown_family_suggests_the_ones_like_it():
    with pytest.raises(UnknownNameError, match=r"no pipeline 'qwen-image-2'") as caught:
        find_family("qwen-image-2")
    assert caught.value.hint.startswith("did you mean 'qwen-image")


@pytest.mark.parametrize("name", ["", "..", "flux.1-dev/full.json"])
def test_a_path_is_no_family(name):
    with pytest.raises(UnknownNameError):
        find_family(name)


def test_a_config_with_an_unknown_key_is_refused():
    raw = find_family("qwen-image", tiny=True).model_dump(by_alias=True)
    raw["request"] = {"width": 8, "height": 8}
    assert Family.model_validate(raw).request == Shape(8, 8)
    with pytest.raises(ValueError, match="vea"):
        Family.model_validate(raw | {"vea": {}})


def test_the_recommended_request_is_within_the_limits():
    for name in families():
        for family in (find_family(name), find_family(name, tiny=True)):
            family.check(family.request)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("qwen-image-2.1", "16x1024", "16x1024 is too small for qwen-image-2.1"),
        ("flux.1-dev", "1024x1024:tokens=513", "flux.1-dev can't do 513 tokens"),
        ("qwen-image", "1024x1024x81", "qwen-image can't do 81 frames"),
    ],
)
def test_a_shape_beyond_the_limits_is_refused_before_anything_is_built(name, shape, message):
    with pytest.raises(ShapeError, match=message):
        find_family(name).check(Shape.parse(shape))


@pytest.mark.parametrize("library", ["diffusers", "transformers"])
def test_a_missing_library_is_named_with_what_installs_it(library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(InputError, match=f"built with {library}") as caught:
        find_family("qwen-image", tiny=True).build()
    assert caught.value.hint == "pip install 'residency[diffusers]'"


def test_finding_a_family_imports_neither_torch_nor_diffusers():
    program = (
        "import sys; from residency.phases.diffusers.families import find_family, families\n"
        "for name in families(): find_family(name)\n"
        "assert not {'torch', 'diffusers', 'transformers'} & set(sys.modules)"
    )
    in_a_new_process(program)
