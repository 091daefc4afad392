import pytest
from stage import Codec, Stack, toys
from torch import nn

from residency.offload.cards import find_card
from residency.offload.errors import InputError, OffloadError, UnknownNameError
from residency.offload.layers import LayerGroup, layer_groups
from residency.offload.layerwise import LayerwiseOffload
from residency.offload.placement import ComponentOffload, Resident
from residency.offload.simulated.card import SimulatedCard
from residency.phases.component import Component, Declaration, ResidencyMode, count_layers, declare
from residency.phases.diffusers.families import find_family

LAYERWISE, RESIDENT = ResidencyMode.LAYERWISE_OFFLOAD, ResidencyMode.RESIDENT


def groups(*sizes):
    return [LayerGroup(str(i), (nn.Identity(),) * size) for i, size in enumerate(sizes)]


QWEN3_VL = groups(36, 27, 3)


def with_lists_in_the_vae():
    codec = Codec()
    codec.up_blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    return Component("vae", codec)


def test_layers_are_streamed_by_default_and_a_vae_and_what_has_none_is_resident():
    components = (*toys()[:2], with_lists_in_the_vae(), Component("connector", nn.Linear(2, 2)))
    assert declare(components, {}, {}) == {
        "text_encoder": Declaration(LAYERWISE, (0,)),
        "transformer": Declaration(LAYERWISE, (0,)),
        "vae": Declaration(RESIDENT),
        "connector": Declaration(RESIDENT),
    }


@pytest.mark.parametrize(
    ("text", "placement"),
    [
        ("resident", Resident),
        ("layerwise-offload", LayerwiseOffload),
        ("component-offload", ComponentOffload),
    ],
)
def test_a_component_is_placed_as_declared(text, placement):
    component = Component("transformer", Stack())
    declared = declare([component], {"dit": text}, {})["transformer"]
    with SimulatedCard(find_card("RTX 5090"), allocator="exact") as card:
        placed = declared.place(component, card, prefetch=2)
        assert type(placed) is placement
        assert getattr(placed, "prefetch", 2) == 2


def test_resident_layers_and_prefetch_reach_the_offload():
    component = Component("transformer", Stack(layers=4))
    declared = declare([component], {}, {"dit": "0.5"})["transformer"]
    with SimulatedCard(find_card("RTX 5090"), allocator="exact") as card:
        placed = declared.place(component, card, prefetch=3)
        assert (placed.resident_layers, placed.total_layers, placed.prefetch) == (2, 4, 3)


def test_an_unknown_mode_suggests_one_like_it():
    with pytest.raises(UnknownNameError, match="there is no residency 'layerwise'") as caught:
        declare(toys(), {"all": "layerwise"}, {})
    assert "'layerwise-offload'" in caught.value.hint


@pytest.mark.parametrize("which", ["residency", "resident_layers"])
def test_an_unknown_component_is_an_error(which):
    given = {"residency": {}, "resident_layers": {}, which: {"unet": "resident"}}
    with pytest.raises(UnknownNameError, match="there is no component 'unet'"):
        declare(toys(), **given)


@pytest.mark.parametrize("mode", ["resident", "component-offload"])
def test_resident_layers_of_what_is_not_layerwise_are_an_error(mode):
    with pytest.raises(InputError, match=f"of transformer are 2, and transformer is {mode}") as e:
        declare(toys(), {"dit": mode}, {"transformer": "2"})
    assert e.value.hint.startswith("declare transformer=layerwise-offload")


def test_resident_layers_of_what_is_resident_by_default_are_an_error():
    with pytest.raises(InputError, match=r"resident layers of vae are 0\.5, and vae is resident"):
        declare(toys(), {}, {"vae": "0.5"})


def test_a_vae_with_lists_is_streamed_when_it_is_declared_so():
    declared = declare([with_lists_in_the_vae()], {"vae": "layerwise-offload"}, {"vae": "1"})
    assert declared["vae"] == Declaration(LAYERWISE, (1,), "vae=1")


def test_what_has_no_layers_cannot_be_placed_layerwise():
    component = Component("connector", nn.Linear(2, 2))
    declared = declare([component], {"connector": "layerwise-offload"}, {})["connector"]
    with (
        SimulatedCard(find_card("RTX 5090"), allocator="exact") as card,
        pytest.raises(OffloadError, match="Linear has no ModuleList"),
    ):
        declared.place(component, card, prefetch=1)


def test_layers_are_counted_in_each_group_of_the_component():
    module = nn.ModuleDict({"first": Stack(layers=4), "second": Stack(layers=2)})
    assert [len(group.layers) for group in layer_groups(module)] == [4, 2]
    declared = declare([Component("transformer", module)], {}, {"dit": "3"})
    assert declared["transformer"].resident_layers == (3, 2)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("0.65", (23, 18, 2)),
        ("0.8", (29, 22, 2)),
        ("0.01", (1, 1, 1)),
        ("0.999", (36, 27, 3)),
        ("0", (0, 0, 0)),
        ("0.0", (0, 0, 0)),
        ("1", (1, 1, 1)),
        ("2", (2, 2, 2)),
        ("30", (30, 27, 3)),
        ("1000", (36, 27, 3)),
        ("all", (36, 27, 3)),
        (" 2 ", (2, 2, 2)),
    ],
)
def test_resident_layers_are_a_count_of_each_group_a_fraction_or_all(text, counts):
    assert count_layers(text, QWEN3_VL) == counts


@pytest.mark.parametrize(
    "text", ["1.7", "-1", "-0.5", "nan", "inf", "-inf", "1.0", "1.", "1.00", "1e0", "x", "", "80%"]
)
def test_resident_layers_that_are_neither_are_refused(text):
    with pytest.raises(InputError, match="resident layers are ") as caught:
        count_layers(text, QWEN3_VL)
    assert repr(text) in caught.value.message
    assert caught.value.hint.startswith("give a count of layers")


def test_resident_layers_of_all_are_those_of_all_that_are_layerwise():
    components = find_family("qwen-image", tiny=True).build().components
    parts = [Component(name, components[name]) for name in ("text_encoder", "transformer", "vae")]
    declared = declare(parts, {}, {"all": "all"})
    assert declared["transformer"].resident_layers == (5,)
    assert declared["vae"].resident_layers == ()


def test_where_memory_is_unified_everything_is_resident():
    declared = declare(toys(), {}, {}, unified=True)
    assert {each.mode for each in declared.values()} == {ResidencyMode.RESIDENT}


def test_where_memory_is_unified_offload_is_refused_by_name():
    with pytest.raises(InputError, match=r"text_encoder is layerwise-offload.*one memory"):
        declare(toys(), {"text_encoder": "layerwise-offload"}, {}, unified=True)
