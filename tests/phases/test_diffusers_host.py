"""A host over a tiny modular pipeline, without the planner: it may be opened and closed as often as
one likes, and takes off its own and nothing else."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig
from stage import anatomy, tiny

from residency.offload.cards import custom_card
from residency.offload.errors import InputError, OffloadError, RollbackError, ShapeError
from residency.offload.simulated.card import SimulatedCard, driver_error
from residency.phases.component import declare
from residency.phases.diffusers.families import find_family
from residency.phases.diffusers.host import LOAD, DiffusersHost
from residency.phases.diffusers.pipeline import DiffusersPipeline
from residency.phases.diffusers.undo import Place, Residue
from residency.phases.host import Made
from residency.phases.schedule import Hold, Schedule
from residency.phases.shape import Shape

GIB = 1 << 30
QWEN = "qwen-image-2.1"
SMALL = Shape(64, 64, tokens=16, steps=2, guidance=1.0)
HALF = {"dit": "0.5", "text_encoder": "0.5"}


class Server:
    """A pipeline, and the host over it; the VAE is resident and the rest streamed."""

    def __init__(self, pipeline: DiffusersPipeline, card: SimulatedCard) -> None:
        self.pipeline = pipeline
        self.pipe = pipeline.pipeline
        self.card = card
        self.kept: list[torch.Tensor] = []
        self.host = self.new_host()

    def new_host(self, shape: Shape = SMALL, **declared) -> DiffusersHost:
        """Over the pipeline as it is now."""
        found = DiffusersPipeline(self.pipe, name=self.pipeline.name, request=self.pipeline.request)
        declarations = declare(found.components, declared, {} if declared else HALF)
        return DiffusersHost(found, self.card, [shape], declarations, host_bytes=GIB)

    def retain(self) -> None:
        """All that was declared, over every gap, from pinned masters."""
        held = {each.name: tuple(sorted(each.declared)) for each in self.host.components()}
        uses = [
            Hold(
                phase=use.phase,
                component=use.component,
                retain_resident_layers=True,
                resident_set=held[use.component],
                retained_set=held[use.component],
                prefetch=2,
                pinned=True,
            )
            for use in self.host.baseline.uses
        ]
        for step in self.host.steps(Schedule(uses=tuple(uses))):
            step.apply()

    def request(self) -> torch.Tensor:
        """As the owner runs one, who drops what it leaves on the pipeline."""
        residue = Residue(self.pipeline)
        try:
            with self.host.request(SMALL, SMALL):
                return self.pipeline.run(SMALL).value
        finally:
            residue.restore()

    def serve(self) -> torch.Tensor:
        made = self.host.run(SMALL)
        assert isinstance(made, Made), made
        return made.output.value

    @property
    def names_on_card(self) -> list[str]:
        """Of weights."""
        return [
            f"{component.name}.{name}"
            for component in self.host.pipeline.components
            for name, tensor in component.module.state_dict(keep_vars=True).items()
            if tensor.device.type != "cpu"
        ]

    def check_nothing_is_left(self) -> None:
        """The host's own, and what it moved."""
        for name, component in self.pipe.components.items():
            if not isinstance(component, torch.nn.Module):
                continue
            assert "_hf_hook" not in vars(component), name
            for path, module in component.named_modules():
                for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
                    assert not getattr(hook, "is_ours", False), f"{name}.{path}"
        assert self.names_on_card == []
        assert self.card.pinned_bytes == 0
        kept = sum(each.untyped_storage().nbytes() for each in self.kept)
        assert self.card.read().allocated_bytes == kept


@contextmanager
def server(capacity_bytes: int = GIB) -> Iterator[Server]:
    """What requests leave on the pipeline, and in caches of its classes, is dropped in the end."""
    pipeline = tiny(QWEN)
    with SimulatedCard(custom_card(capacity_bytes), allocator="exact", context_bytes=0) as card:
        residue = Residue(pipeline)
        try:
            yield Server(pipeline, card)
        finally:
            residue.restore()


@pytest.fixture(scope="module")
def plain() -> torch.Tensor:
    """What the pipeline makes by itself on the host."""
    return tiny(QWEN).run(SMALL).value


def test_what_was_opened_and_closed_twice_is_as_it_was_found():
    with server() as test:
        before = anatomy(test.pipeline.components)
        for _ in range(2):
            assert not test.host.is_open
            assert test.host.open() is None
            assert test.host.is_open
            assert anatomy(test.pipeline.components) != before
            with pytest.raises(AssertionError):
                test.check_nothing_is_left()
            for _ in range(2):
                test.host.close()
                assert anatomy(test.pipeline.components) == before
                test.check_nothing_is_left()


def test_closing_what_was_never_opened_is_nothing():
    with server() as test:
        before = anatomy(test.pipeline.components)
        test.host.close()
        assert anatomy(test.pipeline.components) == before


def test_an_open_host_is_not_opened_again_and_serves_on(plain):
    with server() as test:
        assert test.host.open() is None
        with pytest.raises(InputError, match="offloaded by"):
            test.host.open()
        assert torch.equal(test.serve(), plain)
        test.host.close()
        test.check_nothing_is_left()


def test_a_second_host_over_an_open_one_is_refused_and_takes_nothing_off(plain):
    with server() as test:
        other = test.new_host()
        assert test.host.open() is None
        with pytest.raises(OffloadError, match="not on the host"):
            test.new_host()
        with pytest.raises(InputError, match="offloaded by"):
            other.open()
        other.close()
        assert torch.equal(test.serve(), plain)
        test.host.close()
        test.check_nothing_is_left()
        assert other.open() is None
        other.close()
        test.check_nothing_is_left()


@pytest.mark.parametrize(
    "enable",
    [
        lambda pipe: pipe.remove_all_hooks(),
        lambda pipe: pipe.enable_model_cpu_offload(device="cpu"),
    ],
    ids=["remove_all_hooks", "enable_model_cpu_offload"],
)
def test_another_offload_is_refused_in_words_and_takes_nothing_off(enable):
    pipeline = tiny("qwen-image")  # modular pipelines have no offload of their own
    with SimulatedCard(custom_card(GIB), allocator="exact", context_bytes=0) as card:
        test = Server(pipeline, card)
        assert test.host.open() is None
        before = test.serve()
        with pytest.raises(InputError, match="is offloaded by residency") as refused:
            enable(test.pipe)
        assert "close the settlement" in refused.value.hint
        assert torch.equal(test.serve(), before)
        test.host.close()
        test.check_nothing_is_left()


def test_opened_again_it_serves_the_same_bit_for_bit(plain):
    with server() as test:
        for _ in range(2):
            assert test.host.open() is None
            assert test.host.schedule == test.host.baseline
            assert torch.equal(test.serve(), plain)
            test.retain()
            assert torch.equal(test.serve(), plain)
            assert torch.equal(test.serve(), plain)
            assert any("text_encoder" in name for name in test.names_on_card)
            assert test.card.pinned_bytes > 0
            test.host.close()
            test.check_nothing_is_left()
        assert torch.equal(test.pipeline.run(SMALL).value, plain)


def test_phases_are_found_once():
    with server() as test:
        assert test.host.open() is None
        graph = test.host.graph
        test.host.close()
        copied = test.card.transfers.h2d_bytes
        assert test.host.open() is None
        assert test.host.graph is graph
        vae = next(each for each in test.host.components() if each.stays)
        assert test.card.transfers.h2d_bytes - copied == vae.copy_bytes
        test.host.close()


def test_a_card_too_small_for_what_is_resident_is_told_and_undone():
    with server(capacity_bytes=200_000) as test:
        host = test.new_host(all="resident")
        for _ in range(2):
            failure = host.open()
            assert (failure.phase, failure.is_oom) == (LOAD, True)
            for _ in range(2):
                host.close()
                test.check_nothing_is_left()


@pytest.mark.parametrize("at", [1, 40, 400])
def test_an_opening_that_failed_is_undone_and_opened_again(at, plain):
    with server() as test:
        before = anatomy(test.pipeline.components)
        test.card.faults.at_allocation(at)
        assert test.host.open().is_oom
        test.host.close()
        assert anatomy(test.pipeline.components) == before
        test.check_nothing_is_left()
        assert test.host.open() is None
        assert torch.equal(test.serve(), plain)
        test.host.close()
        test.check_nothing_is_left()


def test_an_opening_that_raised_is_undone_too():
    with server() as test:
        host = test.new_host(replace(SMALL, frames=9))
        with pytest.raises(ShapeError):
            host.open()
        host.close()
        test.check_nothing_is_left()
        host = test.new_host(vae="resident")
        test.card.faults.at_copy(1, driver_error)
        with pytest.raises(RuntimeError, match="injected"):
            host.open()
        host.close()
        test.check_nothing_is_left()


def test_an_interrupt_while_phases_are_found_is_undone():
    with server() as test:
        test.card.faults.at_allocation(40, lambda: KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            test.host.open()
        test.host.close()
        test.check_nothing_is_left()


def test_closed_in_the_middle_of_a_request_nothing_is_left(plain):
    with server() as test:
        residue = Residue(test.pipeline)
        assert test.host.open() is None
        test.retain()
        test.serve()
        layer = test.pipe.transformer.transformer_blocks[2]
        handle = layer.register_forward_hook(lambda *_: test.host.close())
        with pytest.raises(RuntimeError), test.host.request(SMALL, SMALL):
            test.pipeline.run(SMALL)
        handle.remove()
        residue.restore()
        test.check_nothing_is_left()
        assert test.host.open() is None
        assert torch.equal(test.serve(), plain)
        test.host.close()
        test.check_nothing_is_left()


def test_closed_in_the_middle_of_its_own_sweep_nothing_is_left():
    """What the sweep leaves is put back behind the closing, and nothing of ours with it."""
    with server() as test:
        assert test.host.open() is None
        layer = test.pipe.transformer.transformer_blocks[2]
        handle = layer.register_forward_hook(lambda *_: test.host.close())
        test.host.sweep()
        handle.remove()
        test.check_nothing_is_left()


def test_a_closing_that_is_interrupted_is_taken_up_where_it_was(monkeypatch):
    with server() as test:
        assert test.host.open() is None
        test.retain()
        test.serve()

        def interrupt(self: Place) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Place, "revert", interrupt)
            with pytest.raises(KeyboardInterrupt):
                test.host.close()
        test.host.close()
        test.check_nothing_is_left()


def test_every_placement_is_released_though_one_raises(monkeypatch):
    with server() as test:
        assert test.host.open() is None
        test.retain()
        test.serve()
        stays, *others = [test.host.placements[each] for each in ("text_encoder", "transformer")]
        assert all(each.allocated_bytes for each in (stays, *others))

        def fail() -> None:
            raise OffloadError("injected")

        with monkeypatch.context() as patch:
            patch.setattr(stays, "release_all", fail)
            with pytest.raises(OffloadError, match="injected"):
                test.host.release()
        assert [each.allocated_bytes for each in others] == [0]
        test.host.close()
        test.check_nothing_is_left()


def test_closed_after_calls_outside_of_any_request_nothing_is_left():
    with server() as test:
        assert test.host.open() is None
        test.retain()
        residue = Residue(test.pipeline)
        test.pipeline.run(SMALL)
        residue.restore()
        assert test.names_on_card
        test.host.close()
        test.check_nothing_is_left()


# What the owner does while a schedule that retains is in effect: each says whether it is there.


def load_a_lora(test: Server) -> Callable[[], bool]:
    config = LoraConfig(r=2, target_modules=["to_q", "to_k"], init_lora_weights=False)
    test.pipe.transformer.add_adapter(config, "style")

    def values() -> dict[str, torch.Tensor]:
        named = test.pipe.transformer.named_parameters()
        return {name: value.detach().cpu().clone() for name, value in named if "lora" in name}

    before = values()
    return lambda: bool(before) and all(torch.equal(values()[n], before[n]) for n in before)


def exchange_the_scheduler(test: Server) -> Callable[[], bool]:
    new = type(test.pipe.scheduler)(shift=3.0)
    test.pipe.update_components(scheduler=new)
    return lambda: test.pipe.scheduler is new and new.config.shift == 3.0


def exchange_a_resident_component(test: Server) -> Callable[[], bool]:
    new = find_family(QWEN, tiny=True).build(seed=7).vae
    test.pipe.update_components(vae=new)
    return lambda: test.pipe.vae is new


def exchange_a_streamed_component(test: Server) -> Callable[[], bool]:
    new = find_family(QWEN, tiny=True).build(seed=7).transformer
    test.pipe.update_components(transformer=new)
    return lambda: test.pipe.transformer is new


def exchange_a_layer(test: Server) -> Callable[[], bool]:
    blocks = test.pipe.transformer.transformer_blocks
    new = blocks[0] = find_family(QWEN, tiny=True).build(seed=7).transformer.transformer_blocks[0]
    return lambda: blocks[0] is new


def exchange_a_weight(test: Server) -> Callable[[], bool]:
    """One that is retained on the card, and one that is on the host."""
    blocks = test.pipe.transformer.transformer_blocks
    modules = [blocks[i].get_submodule("attn.to_v") for i in (0, -1)]
    for module in modules:
        module.weight = torch.nn.Parameter(torch.full_like(module.weight, 2.0))
    return lambda: all(bool((module.weight == 2.0).all()) for module in modules)


def train(test: Server) -> Callable[[], bool]:
    parameters = [next(c.parameters()) for c in (test.pipe.transformer, test.pipe.vae)]
    for each in parameters:
        each.requires_grad_(True)
    return lambda: all(each.requires_grad for each in parameters)


def cast_streamed(test: Server) -> Callable[[], bool]:
    streamed = (test.pipe.text_encoder, test.pipe.transformer)
    for each in streamed:
        each.to(torch.bfloat16)
    return lambda: {p.dtype for each in streamed for p in each.parameters()} == {torch.bfloat16}


def cast_resident(test: Server) -> Callable[[], bool]:
    test.pipe.vae.to(torch.bfloat16)
    return lambda: {p.dtype for p in test.pipe.vae.parameters()} == {torch.bfloat16}


def move_to_the_card(test: Server) -> Callable[[], bool]:
    """The owner's placement is undone where it is of what he handed over on the host."""
    values = {n: v.cpu().clone() for n, v in test.pipe.transformer.state_dict().items()}
    test.pipe.transformer.to(test.card.torch_device)
    now = test.pipe.transformer.state_dict
    return lambda: all(torch.equal(now()[name].cpu(), values[name]) for name in values)


def keep_an_output(test: Server) -> Callable[[], bool]:
    image = test.request()
    value = image.cpu().clone()
    test.kept.append(image)
    return lambda: image.device.type != "cpu" and torch.equal(image.cpu(), value)


def cache_embeddings(test: Server) -> Callable[[], bool]:
    """On the pipeline, as a program does that serves one prompt again and again."""
    seen = []

    def keep(_: object, args: object, kwargs: dict[str, torch.Tensor]) -> None:
        seen.extend(v for v in kwargs.values() if isinstance(v, torch.Tensor) and v.dim() == 3)

    handle = test.pipe.transformer.register_forward_pre_hook(keep, with_kwargs=True)
    test.request()
    handle.remove()
    embeddings = test.pipe.embeddings = seen[-1].clone()
    value = embeddings.cpu().clone()
    test.kept.append(embeddings)
    return lambda: (
        test.pipe.embeddings is embeddings
        and embeddings.device.type != "cpu"
        and torch.equal(embeddings.cpu(), value)
    )


TOGETHER = [
    keep_an_output,
    cache_embeddings,
    load_a_lora,
    train,
    exchange_the_scheduler,
    exchange_a_resident_component,
    exchange_a_weight,
]
ALONE = [
    exchange_a_streamed_component,
    exchange_a_layer,
    cast_streamed,
    cast_resident,
    move_to_the_card,
]


@pytest.mark.parametrize(
    "done",
    [
        pytest.param(TOGETHER, id="together"),
        pytest.param([cast_streamed, cast_resident], id="cast"),
        *(pytest.param([do], id=do.__name__, marks=pytest.mark.long) for do in (*TOGETHER, *ALONE)),
    ],
)
def test_what_the_owner_did_is_there_after_closing_and_a_new_host_opens_and_closes(done):
    with server() as test:
        assert test.host.open() is None
        test.retain()
        test.serve()
        are_there = [do(test) for do in done]
        test.host.close()
        assert all(is_there() for is_there in are_there)
        test.check_nothing_is_left()
        test.host = test.new_host()
        assert test.host.open() is None
        test.retain()
        test.serve()
        assert all(is_there() for is_there in are_there)
        for _ in range(2):
            test.host.close()
            assert all(is_there() for is_there in are_there)
            test.check_nothing_is_left()
        test.kept.clear()


def test_a_host_whose_weights_were_exchanged_says_so_where_it_is_opened_again():
    with server() as test:
        assert test.host.open() is None
        test.host.close()
        test.pipe.transformer.to(torch.bfloat16)
        with pytest.raises(OffloadError, match="exchanged"):
            test.host.open()
        test.host.close()
        test.check_nothing_is_left()


def test_closing_says_what_it_could_not_take_off(monkeypatch):
    with server() as test:
        assert test.host.open() is None
        with monkeypatch.context() as patch:
            patch.setattr(DiffusersPipeline, "unbind", lambda self: None)
            with pytest.raises(RollbackError, match="told where it executes"):
                test.host.close()
        test.host.pipeline.unbind()
        test.check_nothing_is_left()
