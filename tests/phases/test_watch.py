from itertools import pairwise

import pytest
import torch
from stage import WIDTH, Codec, Stack, anatomy, paint, toys
from torch import nn
from torch.nn.modules import module as torch_module

from residency.phases.component import Component
from residency.phases.diffusers.watch import Call, phases, watch
from residency.phases.graph import PhaseGraph

X = torch.ones(1, WIDTH)


def global_hooks():
    return {
        name: dict(value)
        for name, value in vars(torch_module).items()
        if name.startswith("_global_") and isinstance(value, dict)
    }


def watched(components, run):
    """The calls that `run` makes, as component and entry."""
    with watch(components, lambda component: None) as calls:
        run()
    return [(call.component, call.entry) for call in calls]


class Shout(RuntimeError):
    pass


class Raising(nn.Module):
    def forward(self, x):
        raise Shout


def calls(text):
    """`te transformer*2 vae.decoder`: two calls of transformer, and one through a submodule."""
    for word in text.split():
        entry, _, count = word.partition("*")
        component, _, path = entry.partition(".")
        yield from [Call(component, path)] * int(count or 1)


def told(text):
    """Phases with the passes of their components, in order."""
    found = phases(list(calls(text)))
    PhaseGraph(found)
    assert all(use.phase == phase.name for phase in found for use in phase.uses)
    return {phase.name: {use.component: use.passes for use in phase.uses} for phase in found}


def test_components_are_seen_to_work_in_order():
    components = toys()
    assert watched(components, lambda: paint(components, X)) == [
        ("text_encoder", ""),
        ("transformer", ""),
        ("transformer", ""),
        ("vae", "decoder"),
    ]


def test_whoever_listens_hears_of_a_call_before_the_component_runs():
    components = toys()
    order = []
    for component in components[:2]:
        component.module.embed.register_forward_pre_hook(
            lambda *_, name=component.name: order.append(f"{name} runs")
        )
    with watch(components, order.append):
        paint(components, X, steps=1)
    assert order == [
        "text_encoder",
        "text_encoder runs",
        "transformer",
        "transformer runs",
        "vae",
    ]


def test_what_a_component_runs_inside_itself_is_one_call():
    component = Component("transformer", nn.Sequential(Stack(), nn.Sequential(Stack(), Stack())))
    assert watched([component], lambda: component.module(X)) == [("transformer", "")]


@pytest.mark.parametrize(
    ("run", "entries"),
    [
        (lambda stack: stack.project(X), ["embed"]),
        (lambda stack: stack.run_layers(X), ["layers.0", "layers.1", "layers.2"]),
        (lambda stack: (stack(X), stack.project(X)), ["", "embed"]),
    ],
)
def test_a_method_that_is_no_forward_enters_by_submodules(run, entries):
    stack = Stack()
    found = watched([Component("transformer", stack)], lambda: run(stack))
    assert found == [("transformer", entry) for entry in entries]


def test_modules_of_no_component_are_not_seen():
    components = toys()
    assert watched(components, lambda: Stack()(X)) == []


def test_a_component_inside_anothers_forward_works_too():
    class Guided(nn.Module):
        def __init__(self, guide):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.guide = [guide]  # in a list, so that it isn't its submodule

        def forward(self, x):
            return self.layer(self.guide[0](x))

    guide = Stack()
    components = [Component("controlnet", guide), Component("transformer", Guided(guide))]
    found = watched(components, lambda: components[1].module(X))
    assert found == [("transformer", ""), ("controlnet", "")]


def test_a_call_that_fails_is_over():
    stack = Stack()
    stack.layers.append(Raising())
    components = (*toys()[:1], Component("transformer", stack))

    def run():
        for _ in range(2):
            with pytest.raises(Shout):
                stack(X)
        components[0].module(X)

    assert [name for name, _ in watched(components, run)] == [
        "transformer",
        "transformer",
        "text_encoder",
    ]


def test_a_listener_that_fails_keeps_the_module_from_running_and_the_next_call_is_seen():
    stack = Stack()
    ran = []
    stack.embed.register_forward_pre_hook(lambda *_: ran.append("embed"))
    heard = []

    def listen(component):
        heard.append(component)
        if len(heard) == 1:
            raise Shout

    with watch([Component("transformer", stack)], listen) as found:
        with pytest.raises(Shout):
            stack(X)
        assert ran == []
        stack(X)
    assert (len(found), heard, ran) == (2, ["transformer"] * 2, ["embed"])


def test_watching_leaves_nothing_behind():
    components = toys()
    before = anatomy(components), global_hooks()
    with watch(components, lambda component: None):
        assert anatomy(components) == before[0]
        assert global_hooks() != before[1]
        paint(components, X)
    assert (anatomy(components), global_hooks()) == before


def test_watching_leaves_nothing_behind_after_an_error():
    components = toys()
    components[1].module.layers.append(Raising())
    before = anatomy(components), global_hooks()
    with pytest.raises(Shout), watch(components, lambda component: None):
        paint(components, X)
    assert (anatomy(components), global_hooks()) == before


def test_a_watched_run_computes_the_same():
    components = toys()
    plain = paint(components, X)
    with watch(components, lambda component: None):
        assert torch.equal(paint(components, X), plain)


def test_a_vae_is_entered_by_its_encoder_or_its_decoder():
    codec = Codec()
    component = Component("vae", codec)
    assert watched([component], lambda: codec.encode(X)) == [("vae", "encoder")]
    assert watched([component], lambda: codec.decode(X)) == [("vae", "decoder")]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("text_encoder transformer vae.decoder", ["text_encode", "denoise", "vae_decode"]),
        ("text_encoder text_encoder_2 unet", ["text_encode", "text_encode_2", "denoise"]),
        ("text_encoder_3", ["text_encode_3"]),
        ("image_encoder transformer", ["image_encode", "denoise"]),
        ("vae.encoder transformer vae.decoder", ["vae_encode", "denoise", "vae_decode"]),
        ("vae.encoder.conv_in unet vae", ["vae_encode", "denoise", "vae_decode"]),
        ("vae.quant_conv vae.encoder unet", ["vae_encode", "denoise"]),
        ("vae.post_quant_conv vae.decoder", ["vae_decode"]),
        ("vae.decoder.encoder_attention", ["vae_decode"]),
        ("transformer safety_checker", ["denoise", "safety_checker"]),
        ("transformer transformer_2", ["denoise", "denoise_2"]),
        ("unet vae unet te unet", ["denoise", "vae_decode", "denoise_2", "te", "denoise_3"]),
        ("unet vae text_encoder unet", ["denoise", "vae_decode", "text_encode", "denoise_2"]),
    ],
)
def test_phases_have_the_usual_names(text, names):
    assert list(told(text)) == names


def test_a_name_that_another_phase_has_is_not_given_twice():
    text = "text_encoder text_encoder_2 text_encoder unet"
    assert list(told(text)) == ["text_encode", "text_encode_2", "text_encode_3", "denoise"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("te*2 transformer*8 vae.decoder", {"te": 2, "transformer": 8, "vae": 1}),
        # one call of the VAE enters it twice, tiles and frames enter the decoder alone again
        ("vae.post_quant_conv vae.decoder", {"vae": 1}),
        ("vae.post_quant_conv vae.decoder*21", {"vae": 21}),
    ],
)
def test_passes_are_the_calls_of_a_component_in_a_row(text, expected):
    found = told(text)
    assert {name: n for uses in found.values() for name, n in uses.items()} == expected


def test_components_that_take_turns_share_one_phase():
    found = told("te controlnet transformer controlnet transformer controlnet transformer vae")
    assert found == {
        "te": {"te": 1},
        "denoise": {"controlnet": 3, "transformer": 3},
        "vae_decode": {"vae": 1},
    }


def test_three_that_take_turns_share_one_phase():
    assert told("a controlnet unet " * 4) == {"denoise": {"a": 4, "controlnet": 4, "unet": 4}}


def test_guidance_in_turns_counts_every_call():
    found = told("controlnet*2 transformer*2 " * 3)
    assert found == {"denoise": {"controlnet": 6, "transformer": 6}}


def test_turns_of_unlike_length_count_every_call():
    found = told("controlnet transformer controlnet transformer controlnet transformer*5 vae")
    assert found["denoise"] == {"controlnet": 3, "transformer": 7}


def test_a_turn_that_is_cut_short_belongs_to_the_others():
    found = told("transformer controlnet transformer controlnet transformer vae")
    assert found == {
        "denoise": {"transformer": 3, "controlnet": 2},
        "vae_decode": {"vae": 1},
    }


def test_turns_may_begin_after_other_phases():
    found = told("te vae.encoder controlnet unet controlnet unet vae.decoder")
    assert list(found) == ["te", "vae_encode", "denoise", "vae_decode"]


def test_one_turn_is_no_turn():
    assert told("controlnet transformer vae") == {
        "controlnet": {"controlnet": 1},
        "denoise": {"transformer": 1},
        "vae_decode": {"vae": 1},
    }


def test_two_denoisers_one_after_another_are_two_phases():
    assert told("transformer*20 transformer_2*20 vae") == {
        "denoise": {"transformer": 20},
        "denoise_2": {"transformer_2": 20},
        "vae_decode": {"vae": 1},
    }


def test_two_encoders_that_read_two_prompts_share_one_phase():
    found = told("text_encoder text_encoder_2 text_encoder text_encoder_2 unet")
    assert found["text_encode"] == {"text_encoder": 2, "text_encoder_2": 2}


def test_no_phase_uses_a_component_of_the_one_before():
    for text in ("a b a b a", "a b c a b c a b", "a b a c a c", "a b c b c a", "b a b a c a"):
        found = list(told(text).values())
        for before, after in pairwise(found):
            assert not before.keys() & after.keys(), text


def test_no_calls_are_no_phases():
    assert phases([]) == []
