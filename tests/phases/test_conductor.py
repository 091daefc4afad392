from contextlib import contextmanager

import pytest
import torch
from stage import WIDTH, Stack, anatomy, paint, staged, toys

from residency.offload.errors import PhaseError
from residency.offload.simulated.card import InjectedError, driver_error
from residency.phases.component import Component
from residency.phases.diffusers.watch import phases, watch
from residency.phases.graph import PhaseGraph

X = torch.ones(1, WIDTH)
ONE_REQUEST = [
    "prepare text_encode/text_encoder",
    "finish text_encode/text_encoder",
    "prepare denoise/transformer",
    "finish denoise/transformer",
    "prepare vae_decode/vae",
    "finish vae_decode/vae",
]
HALF = {"text_encoder": "1", "transformer": "1"}
LAYER_BYTES = 2 * 512
"""A weight and a bias, each in a region of its own."""


def graph_of(run):
    components = toys()
    with watch(components, lambda component: None) as calls:
        run(components)
    return PhaseGraph(phases(calls))


@contextmanager
def on_stage(components=None, *, run=lambda components: paint(components, X), **declared):
    """Toys on a card, and the graph of what `run` does with them."""
    graph = graph_of(run)
    with staged(components or toys(), **declared) as stage:
        stage.conductor.graph = graph
        stage.hold_what_is_declared()
        yield stage


def request(stage, **how):
    x = X.to(stage.card.torch_device)
    with stage.conductor.request() as trace:
        output = paint(stage.components, x, **how)
    return trace, output.cpu()


def retain(stage, component, retained=True):
    use = next(use for use in stage.conductor.graph.uses if use.component == component)
    stage.retain(use, retained)


def failed_request(stage, *, after=ZeroDivisionError):
    """One that ends with an error in the middle of denoising."""
    x = X.to(stage.card.torch_device)
    error = after()

    def fail(*_):
        raise error

    handle = stage.components[1].module.layers[1].register_forward_hook(fail)
    with pytest.raises(type(error)), stage.conductor.request() as trace:
        paint(stage.components, x)
    handle.remove()
    return trace


def on_card(stage, component):
    """Parameters of a component that are on the card."""
    module = {each.name: each.module for each in stage.components}[component]
    return {name for name, value in module.named_parameters() if value.device.type != "cpu"}


def hold(stage, component):
    """Fills up, call by call, with whether all of a component's layers are on the card."""
    module = {each.name: each.module for each in stage.components}[component]
    held = []

    def ask(*_):
        held.append(all(each.weight.device.type != "cpu" for each in module.layers))

    module.embed.register_forward_pre_hook(ask)
    return held


def test_a_use_ends_when_the_next_phase_begins_or_the_request_ends():
    with on_stage() as stage:
        request(stage)
        assert stage.log == ONE_REQUEST
        request(stage)
        assert stage.log == ONE_REQUEST * 2


def test_a_conducted_request_computes_the_same():
    expected = paint(toys(), X)
    with on_stage(resident_layers=HALF) as stage:
        assert torch.equal(request(stage)[1], expected)
        assert torch.equal(request(stage)[1], expected)
        stage.check_integrity()


def test_what_works_in_turns_stays_in_use_to_the_end_of_the_phase():
    transformer, controlnet = Stack(), Stack()
    components = (Component("transformer", transformer), Component("controlnet", controlnet))
    with staged(components) as stage:
        x = X.to(stage.card.torch_device)
        with stage.conductor.watching(), stage.conductor.request():
            controlnet(transformer(controlnet(transformer(x))))
        assert stage.conductor.graph.phases == ("denoise",)
        stage.log.clear()
        with stage.conductor.request():
            controlnet(transformer(controlnet(transformer(x))))
        assert stage.log[:2] == ["prepare denoise/transformer", "prepare denoise/controlnet"]
        assert sorted(stage.log[2:]) == ["finish denoise/controlnet", "finish denoise/transformer"]


def test_a_component_that_works_in_two_phases_is_finished_in_each():
    def run(components, x=X):
        _, transformer, vae = (each.module for each in components)
        vae.decode(transformer(vae.encode(x)))

    with on_stage(run=run) as stage:
        for _ in range(2):
            with stage.conductor.request() as trace:
                run(stage.components, X.to(stage.card.torch_device))
        assert [each.phase for each in trace.readings] == ["vae_encode", "denoise", "vae_decode"]
        assert [line for line in stage.log[:6] if "vae" in line] == [
            "prepare vae_encode/vae",
            "finish vae_encode/vae",
            "prepare vae_decode/vae",
            "finish vae_decode/vae",
        ]


def test_nothing_but_what_is_resident_stays_when_a_request_has_ended():
    with on_stage(resident_layers=HALF) as stage:
        before = stage.card.read().allocated_bytes
        request(stage)
        assert stage.card.read().allocated_bytes == before
        assert not on_card(stage, "text_encoder") | on_card(stage, "transformer")


def test_a_retained_set_stays_over_the_end_of_the_request():
    with on_stage(resident_layers=HALF) as stage:
        retain(stage, "text_encoder")
        first = request(stage)[0]
        kept = {"embed.weight", "embed.bias", "layers.0.weight", "layers.0.bias"}
        assert on_card(stage, "text_encoder") == kept
        assert on_card(stage, "transformer") == set()
        second = request(stage)[0]
        stage.check_integrity()
        saved = first.transfers.h2d_bytes - second.transfers.h2d_bytes
        assert saved == 2 * 4 * (WIDTH * WIDTH + WIDTH)


def test_retained_or_not_is_read_where_the_use_finishes():
    with on_stage(resident_layers=HALF) as stage:
        x = X.to(stage.card.torch_device)
        for retained in (True, False):
            with stage.conductor.request():
                paint(stage.components[:2], x)
                retain(stage, "transformer", retained)
            assert bool(on_card(stage, "transformer")) == retained


def test_each_phase_is_read_where_it_ends_with_its_uses_still_open():
    with on_stage() as stage:
        readings = request(stage)[0].readings
        assert [each.phase for each in readings] == ["text_encode", "denoise", "vae_decode"]
        resident = stage.card.read().allocated_bytes
        for each in readings[:2]:
            assert each.reading.allocated_bytes >= resident + LAYER_BYTES


def test_peaks_are_those_since_the_phase_began():
    with on_stage() as stage:
        x = X.to(stage.card.torch_device)
        with stage.conductor.request() as trace:
            torch.zeros(100_000, device=x.device)
            parts = {each.name: each.module for each in stage.components}
            x = parts["text_encoder"](x)
            x = parts["transformer"](x)
            torch.zeros(200_000, device=x.device)
            x = parts["transformer"](x)
            parts["vae"].decode(x)
        peaks = [each.reading.peak_allocated_bytes for each in trace.readings]
        assert 400_000 < peaks[0] < 500_000
        assert 800_000 < peaks[1] < 900_000
        assert peaks[2] < 100_000


def test_transfers_are_told_by_phase_and_add_up_to_those_of_the_request():
    with on_stage() as stage:
        trace = request(stage)[0]
        by_phase = {each.phase: each.transfers.h2d_bytes for each in trace.readings}
        linear = 4 * (WIDTH * WIDTH + WIDTH)
        assert by_phase == {
            "text_encode": 4 * linear,
            "denoise": 7 * linear,
            "vae_decode": 0,
        }
        assert sum(by_phase.values()) == trace.transfers.h2d_bytes


def test_passes_of_the_graph_reach_the_placement():
    with on_stage(resident_layers={"transformer": "all"}) as stage:
        held = hold(stage, "transformer")
        request(stage)
        assert held == [True, True]
        stage.conductor.expect({("denoise", "transformer"): 1})
        request(stage, steps=1)
        assert held == [True, True, False]


def test_an_error_gives_up_what_the_phase_has_and_a_later_request_works():
    with on_stage(resident_layers=HALF) as stage:
        level = stage.card.read().allocated_bytes
        expected = request(stage)[1]
        stage.card.faults.at_copy(18)
        with pytest.raises(InjectedError):
            request(stage)
        assert stage.card.read().allocated_bytes == level
        assert not on_card(stage, "text_encoder") | on_card(stage, "transformer")
        stage.check_integrity()
        assert torch.equal(request(stage)[1], expected)


def test_an_error_names_the_phase_that_it_ended():
    with on_stage() as stage:
        trace = failed_request(stage, after=driver_error)
        assert trace.phase == "denoise"
        assert [each.phase for each in trace.readings] == ["text_encode"]


@pytest.mark.parametrize("copies", range(1, 21))
def test_an_error_at_any_copy_leaves_a_state_that_works(copies):
    with on_stage(resident_layers=HALF) as stage:
        retain(stage, "text_encoder")
        x = X.to(stage.card.torch_device)
        stage.card.faults.at_copy(copies)
        with pytest.raises(InjectedError), stage.conductor.request():
            paint(stage.components, x)
        stage.check_integrity()
        stage.log.clear()
        request(stage)
        assert stage.log == ONE_REQUEST


def test_an_error_leaves_what_another_use_has_retained():
    with on_stage(resident_layers=HALF) as stage:
        retain(stage, "text_encoder")
        failed_request(stage)
        assert on_card(stage, "text_encoder")
        assert not on_card(stage, "transformer")
        request(stage)
        stage.check_integrity()


def test_a_use_that_can_not_be_finished_is_given_up_too(monkeypatch):
    with on_stage(resident_layers=HALF) as stage:
        level = stage.card.read().allocated_bytes
        expected = request(stage)[1]

        def fail(use):
            raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr(stage.conductor.strategies["transformer"], "finish", fail)
            with pytest.raises(ZeroDivisionError):
                request(stage)
        assert stage.card.read().allocated_bytes == level
        stage.check_integrity()
        assert torch.equal(request(stage)[1], expected)


def test_what_one_placement_raises_keeps_no_other_from_being_given_up(monkeypatch):
    """Of two components that are in use the first can't be released."""
    with on_stage(resident_layers=HALF) as stage:
        placement = stage.conductor.strategies["text_encoder"].placement

        def fail() -> None:
            raise ZeroDivisionError

        def use_both() -> None:
            with stage.conductor.request():
                for use in [*stage.conductor.graph.uses][:2]:
                    stage.conductor._open[use.component] = use
                    stage.conductor.strategies[use.component].prepare(use)
                raise KeyError

        with monkeypatch.context() as patch:
            patch.setattr(placement, "release_all", fail)
            with pytest.raises(ZeroDivisionError):
                use_both()
        assert not on_card(stage, "transformer")
        placement.release_all()
        assert not stage.conductor._open


def test_an_interrupt_gives_up_what_the_phase_has_too():
    with on_stage() as stage:
        failed_request(stage, after=KeyboardInterrupt)
        assert not on_card(stage, "transformer")
        request(stage)


def test_an_error_before_any_phase_is_none_of_a_phase():
    with on_stage() as stage:
        with pytest.raises(ZeroDivisionError), stage.conductor.request() as trace:
            raise ZeroDivisionError
        assert (trace.phase, trace.readings) == (None, [])


def test_a_component_that_no_phase_uses_is_an_error():
    with (
        on_stage(run=lambda components: components[1].module(X)) as stage,
        pytest.raises(PhaseError, match="text_encoder works, and no phase of denoise uses it"),
    ):
        request(stage)


def test_hooks_leave_no_trace():
    components = toys()
    before = anatomy(components)
    with on_stage(components) as stage:
        installed = anatomy(components)
        stage.conductor.remove()
        assert anatomy(components) != installed
        stage.conductor.install()
        request(stage)
    assert anatomy(components) == before


def test_removed_in_the_middle_of_a_phase_leaves_no_trace():
    components = toys()
    before = anatomy(components)
    with on_stage(components) as stage:
        stage.components[0].module(X.to(stage.card.torch_device))
    assert anatomy(components) == before


def test_once_removed_nothing_is_conducted():
    with on_stage(residency={"all": "resident"}) as stage:
        stage.conductor.remove()
        request(stage)
        assert stage.log == []


def test_direct_calls_outside_a_request_are_conducted():
    with on_stage() as stage:
        x = X.to(stage.card.torch_device)
        for _ in range(2):
            paint(stage.components, x)
        assert stage.log == [*ONE_REQUEST * 2][:-1]


def test_a_request_finishes_what_a_direct_call_has_open():
    with on_stage() as stage:
        stage.components[1].module(X.to(stage.card.torch_device))
        request(stage)
        direct = ["prepare denoise/transformer", "finish denoise/transformer"]
        assert stage.log == direct + ONE_REQUEST


def test_what_a_direct_call_has_open_is_not_the_requests_that_finishes_it():
    with on_stage() as stage:
        text_encoder = stage.components[0].module
        text_encoder(X.to(stage.card.torch_device))
        with stage.conductor.request() as trace:
            pass
        assert (trace.layers_run, trace.use_times, trace.readings) == ({}, {}, [])
        assert stage.log == ONE_REQUEST[:2]


@pytest.mark.parametrize("method", ["project", "run_layers"])
def test_a_component_may_be_entered_by_what_was_seen_to_be_called(method):
    components = (Component("transformer", Stack()),)
    run = getattr(components[0].module, method)
    expected = run(X)
    with staged(components) as stage:
        x = X.to(stage.card.torch_device)
        with stage.conductor.watching(), stage.conductor.request():
            run(x)
        for _ in range(2):
            stage.log.clear()
            with stage.conductor.request():
                output = run(x)
            assert stage.log == ["prepare denoise/transformer", "finish denoise/transformer"]
            assert torch.equal(output.cpu(), expected)


def test_watching_finds_the_graph_and_leaves_no_trace():
    components = toys()
    before = anatomy(components)
    with staged(components) as stage:
        with stage.conductor.watching():
            request(stage)
        assert stage.conductor.graph.is_like(graph_of(lambda parts: paint(parts, X)))
        assert stage.conductor.graph.passes["denoise", "transformer"] == 2
        assert stage.log == [
            "prepare text_encoder/text_encoder",
            "finish text_encoder/text_encoder",
            "prepare transformer/transformer",
            "finish transformer/transformer",
            "prepare vae/vae",
            "finish vae/vae",
        ]
    assert anatomy(components) == before


def test_watching_direct_calls_finishes_the_last_and_a_request_works_after_it():
    with staged(toys()) as stage:
        for _ in range(2):
            with stage.conductor.watching():
                paint(stage.components, X.to(stage.card.torch_device))
            assert stage.log[-1] == "finish vae/vae"
        stage.log.clear()
        request(stage)
        assert stage.log == ONE_REQUEST


def test_watching_a_run_in_which_nothing_works_finds_no_graph():
    with on_stage() as stage:
        with stage.conductor.watching():
            pass
        assert stage.conductor.graph is None


def test_watching_holds_no_resident_set():
    with on_stage(resident_layers={"transformer": "all"}) as stage:
        held = hold(stage, "transformer")
        with stage.conductor.watching():
            request(stage)
        assert held == [False, False]
        stage.hold_what_is_declared()
        request(stage)
        assert held[2:] == [True, True]
