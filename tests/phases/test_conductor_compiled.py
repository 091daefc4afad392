"""Components that torch.compile has compiled, before they are conducted or after."""

import pytest
import torch
from stage import WIDTH, paint, staged, toys
from torch._dynamo.utils import counters

from residency.offload.cards import find_card
from residency.offload.simulated.card import SimulatedCard
from residency.phases.component import Component
from residency.phases.diffusers.watch import phases, watch
from residency.phases.graph import PhaseGraph

X = torch.ones(1, WIDTH)
ALL_RESIDENT = dict.fromkeys(["text_encoder", "transformer", "vae"], "resident")


@pytest.fixture(autouse=True)
def _no_graphs():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(components: tuple[Component, ...]) -> tuple[Component, ...]:
    """The VAE has no forward that is called, so what is called of it is compiled."""
    *others, vae = components
    for component in others:
        component.module.compile(backend="eager")
    vae.module.decode = torch.compile(vae.module.decode, backend="eager")
    return components


def warmed(components: tuple[Component, ...]) -> tuple[Component, ...]:
    """Compiled and run on the card, and brought back to the host."""
    with SimulatedCard(find_card("RTX 5090"), allocator="exact") as card:
        for component in compiled(components):
            component.module.to(card.torch_device)
        paint(components, X.to(card.torch_device))
        for component in components:
            component.module.to("cpu")
    return components


def test_calls_of_a_component_that_ran_before_are_seen():
    components = compiled(toys())
    expected = paint(components, X)
    with watch(components, lambda component: None) as calls:
        assert torch.equal(paint(components, X), expected)
    assert [call.component for call in calls] == ["text_encoder", *["transformer"] * 2, "vae"]
    counters.clear()
    assert torch.equal(paint(components, X), expected)
    assert counters["stats"]["unique_graphs"] > 0  # without the calls in between
    assert len(calls) == 4


def test_a_component_that_ran_before_it_was_hooked_is_conducted():
    """Where the phases are known and nobody watches for them."""
    with watch(plain := toys(), lambda component: None) as calls:
        expected = paint(plain, X)
    with staged(warmed(toys()), residency=ALL_RESIDENT) as stage:
        stage.conductor.graph = PhaseGraph(phases(calls))
        x = X.to(stage.card.torch_device)
        with stage.conductor.request() as trace:
            assert torch.equal(paint(stage.components, x).cpu(), expected)
        assert [at.phase for at in trace.readings] == ["text_encode", "denoise", "vae_decode"]
        del x


@pytest.mark.parametrize("ready", [compiled, warmed])
@pytest.mark.parametrize("residency", [{}, ALL_RESIDENT])
def test_what_a_compiled_component_does_is_seen_and_conducted(ready, residency):
    expected = paint(toys(), X)
    with staged(ready(toys()), residency=residency) as stage:
        x = X.to(stage.card.torch_device)
        with stage.conductor.watching():
            paint(stage.components, x)
        assert stage.conductor.graph.phases == ("text_encode", "denoise", "vae_decode")
        stage.log.clear()
        for _ in range(2):
            with stage.conductor.request() as trace:
                assert torch.equal(paint(stage.components, x).cpu(), expected)
        assert [at.phase for at in trace.readings] == ["text_encode", "denoise", "vae_decode"]
        assert len(stage.log) == 2 * 2 * 3
        stage.check_integrity()
        del x
