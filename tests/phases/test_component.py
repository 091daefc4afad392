import pytest
from torch import nn

from residency.offload.errors import UnknownNameError
from residency.phases.component import Component, ComponentGroup, resolve, select

FLUX = ("text_encoder", "text_encoder_2", "transformer", "vae")


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("transformer", "dit"),
        ("transformer_2", "dit"),
        ("unet", "dit"),
        ("text_encoder", "text_encoder"),
        ("text_encoder_2", "text_encoder"),
        ("text_encoder_3", "text_encoder"),
        ("image_encoder", "image_encoder"),
        ("vae", "vae"),
        ("vae_decoder", "vae"),
        ("controlnet", "other"),
        ("safety_checker", "other"),
        ("transformers", "other"),
        ("my_vae", "other"),
        ("unet2", "other"),
        ("", "other"),
    ],
)
def test_the_group_of_a_component_is_told_by_its_name(name, group):
    assert ComponentGroup.of(name) == group
    assert Component(name, nn.Identity()).group == group


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ("transformer", ["transformer"]),
        ("dit", ["transformer"]),
        ("text_encoder_2", ["text_encoder_2"]),
        ("all", list(FLUX)),
        ("vae", ["vae"]),
    ],
)
def test_a_selector_is_a_name_a_group_or_all(selector, names):
    assert list(select(selector, FLUX)) == names


def test_a_group_means_each_of_its_components():
    assert list(select("dit", ["vae", "transformer", "transformer_2"])) == [
        "transformer",
        "transformer_2",
    ]


def test_a_name_that_is_also_a_group_means_the_group():
    assert list(select("text_encoder", FLUX)) == ["text_encoder", "text_encoder_2"]
    assert list(select("text_encoder", ["text_encoder_2", "text_encoder_3"])) == [
        "text_encoder_2",
        "text_encoder_3",
    ]


@pytest.mark.parametrize("selector", ["image_encoder", "unet", "", "ALL", "Vae", "dit "])
def test_what_selects_nothing_is_an_error(selector):
    with pytest.raises(UnknownNameError, match="there is no component"):
        list(select(selector, FLUX))


def test_an_error_suggests_names_and_groups():
    with pytest.raises(UnknownNameError) as caught:
        list(select("transfomer", FLUX))
    assert caught.value.hint == "did you mean 'transformer'?"
    with pytest.raises(UnknownNameError) as caught:
        list(select("?", FLUX))
    assert caught.value.hint == ("known: text_encoder, text_encoder_2, transformer, vae, dit, all")


def test_all_of_nothing_is_an_error():
    with pytest.raises(UnknownNameError):
        list(select("all", []))


def test_a_name_overrides_a_group_and_a_group_overrides_all():
    assignments = {"transformer_2": 3, "all": 1, "dit": 2}
    names = ["text_encoder", "transformer", "transformer_2"]
    expected = {"text_encoder": 1, "transformer": 2, "transformer_2": 3}
    assert resolve(assignments, names) == expected
    assert resolve(dict(reversed(assignments.items())), names) == expected


def test_one_of_a_group_is_told_apart_by_its_own_name():
    assert resolve({"text_encoder_2": "b", "text_encoder": "a"}, FLUX) == {
        "text_encoder": "a",
        "text_encoder_2": "b",
    }


def test_what_nothing_is_assigned_to_is_left_out():
    assert resolve({"vae": 1}, FLUX) == {"vae": 1}
    assert resolve({}, FLUX) == {}


def test_an_assignment_to_nothing_is_an_error_even_where_others_are_right():
    with pytest.raises(UnknownNameError, match="there is no component 'vea'") as caught:
        resolve({"all": 1, "vea": 2}, FLUX)
    assert caught.value.hint == "did you mean 'vae'?"
