"""What is done to a pipeline while it is settled is its owner's: settling again and closing take
off what is ours, and nothing else."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from peft import LoraConfig
from transformers import Qwen3Config, Qwen3Model

from residency.offload.cards import find_card
from residency.offload.simulated.card import SimulatedCard
from residency.phases.diffusers.families import StubTokenizer, TokenizerSpec, find_family
from residency.phases.diffusers.pipeline import DiffusersPipeline
from residency.phases.diffusers.undo import Residue
from residency.planner import Options, Settlement, settle
from residency.planner.plan import Status

SHAPE = "64x64:steps=2,tokens=16"


def ours(pipe) -> list[str]:
    """What of ours is on a pipeline, found by looking and not by asking."""
    found = []
    for name, component in pipe.components.items():
        if not isinstance(component, torch.nn.Module):
            continue
        if "_hf_hook" in vars(component):
            found.append(f"{name}._hf_hook")
        for path, module in component.named_modules():
            for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
                origin = getattr(hook, "_torchdynamo_orig_callable", hook)
                if type(origin).__module__.startswith("residency"):
                    found.append(f"{name}.{path} hook")
        for path, tensor in (*component.named_parameters(), *component.named_buffers()):
            if tensor.device.type != "cpu":
                found.append(f"{name}.{path} is on {tensor.device}")
    return found


class Server:
    """A settled tiny Qwen-Image, its VAE resident and the rest streamed."""

    def __init__(self, pipe, device: SimulatedCard) -> None:
        self.pipe = pipe
        self.kept: list[torch.Tensor] = []
        self.settlement: Settlement = settle(
            pipe,
            device=device,
            envelope=[SHAPE],
            options=Options(component_residency={"vae": "resident"}),
        )
        assert {each.rpartition(" ")[2] for each in ours(pipe)} >= {"hook", "simgpu:0"}

    def lora(self) -> dict[str, torch.Tensor]:
        return {n: p for n, p in self.pipe.transformer.named_parameters() if "lora" in n}

    def ask(self):
        asked = {"width": 64, "height": 64, "num_inference_steps": 2, "true_cfg_scale": 1.0}
        dice = torch.Generator().manual_seed(5)
        given = {"output_type": "pt", "max_sequence_length": 16, "generator": dice}
        return self.pipe("a cat", **asked, **given)

    def serve(self):
        with self.settlement.guard(SHAPE):
            return self.ask()


@contextmanager
def on_card(pipe) -> Iterator[SimulatedCard]:
    """What requests leave on a pipeline, and in caches of its classes, is dropped in the end."""
    with SimulatedCard(find_card("RTX 4090"), allocator="exact") as card:
        residue = Residue(DiffusersPipeline(pipe))
        try:
            yield card
        finally:
            residue.restore()


@contextmanager
def served() -> Iterator[Server]:
    pipe = find_family("qwen-image", tiny=True).build()
    with on_card(pipe) as card:
        yield Server(pipe, card)


def load_a_lora(server: Server) -> Callable[[], bool]:
    config = LoraConfig(r=2, target_modules=["to_q", "to_k"], init_lora_weights=False)
    server.pipe.transformer.add_adapter(config, "style")
    values = {n: p.detach().cpu().clone() for n, p in server.lora().items()}

    def is_there() -> bool:
        now = server.lora()
        return bool(values) and all(torch.equal(now[n].cpu(), values[n]) for n in values)

    return is_there


def exchange_the_scheduler(server: Server) -> Callable[[], bool]:
    new = server.pipe.scheduler = type(server.pipe.scheduler)(shift=3.0)
    return lambda: server.pipe.scheduler is new and new.config.shift == 3.0


def exchange_a_component(server: Server) -> Callable[[], bool]:
    new = find_family("qwen-image", tiny=True).build(seed=7).vae
    values = {name: tensor.clone() for name, tensor in new.state_dict().items()}
    server.pipe.register_modules(vae=new)
    return lambda: (
        server.pipe.vae is new
        and all(
            torch.equal(tensor.cpu(), values[name]) for name, tensor in new.state_dict().items()
        )
    )


def keep_an_output(server: Server) -> Callable[[], bool]:
    image = server.serve().images
    value = image.cpu().clone()
    server.kept.append(image)
    return lambda: image.device.type != "cpu" and torch.equal(image.cpu(), value)


def keep_embeddings(server: Server) -> Callable[[], bool]:
    with server.settlement.guard(SHAPE):
        embeddings, _ = server.pipe.encode_prompt(prompt="a cat", max_sequence_length=16)
    value = embeddings.cpu().clone()
    server.kept.append(embeddings)
    return lambda: embeddings.device.type != "cpu" and torch.equal(embeddings.cpu(), value)


def train_a_parameter(server: Server) -> Callable[[], bool]:
    parameters = [next(c.parameters()) for c in (server.pipe.transformer, server.pipe.vae)]
    for each in parameters:
        each.requires_grad_(True)
    return lambda: all(each.requires_grad for each in parameters)


def cast_the_pipeline(server: Server) -> Callable[[], bool]:
    server.pipe.transformer.to(torch.float64)
    server.pipe.vae.to(torch.float64)
    return lambda: {server.pipe.transformer.dtype, server.pipe.vae.dtype} == {torch.float64}


DONE = [
    load_a_lora,
    exchange_the_scheduler,
    exchange_a_component,
    keep_an_output,
    keep_embeddings,
    train_a_parameter,
    cast_the_pipeline,
]


@pytest.mark.long
@pytest.mark.parametrize("do", DONE, ids=lambda do: do.__name__)
def test_what_the_owner_did_is_there_after_settling_again_and_closing(do):
    with served() as server:
        is_there = do(server)
        server.settlement.resettle()
        assert is_there()
        server.settlement.close()
        assert is_there()
        server.settlement.close()
        assert is_there()
        assert ours(server.pipe) == []
        server.kept.clear()


def test_all_of_it_at_once():
    with served() as server:
        are_there = [do(server) for do in (keep_an_output, keep_embeddings)]
        are_there += [do(server) for do in DONE if do not in (keep_an_output, keep_embeddings)]
        server.settlement.resettle()
        server.settlement.close()
        server.settlement.close()
        assert [each() for each in are_there] == [True] * len(DONE)
        assert ours(server.pipe) == []
        server.kept.clear()


def test_settling_again_is_of_the_pipeline_as_it_is_now():
    with served() as server:
        before = server.serve().images.cpu()
        load_a_lora(server)
        assert [each.ground for each in server.settlement.check().reasons] == ["adapter"]
        server.settlement.resettle()
        assert server.settlement.check().holds
        assert [each.name for each in server.settlement.plan.fingerprint.adapters] == ["style"]
        after = server.serve().images.cpu()
        assert not torch.equal(before, after)
        server.settlement.close()
        assert torch.equal(server.ask().images, after)


class Chat(StubTokenizer):
    def apply_chat_template(self, messages, **_: object) -> str:
        return messages[0]["content"]


def z_image() -> ZImagePipeline:
    """A tiny one. Its rope embedder is a plain object on the denoiser, and moves its tables to
    where it is called: no parameter, no buffer, and no part of any module."""
    torch.manual_seed(0)
    spec = TokenizerSpec(vocabulary=900, model_max_length=64)
    encoder = Qwen3Config(
        vocab_size=1000,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
    )
    widths = {"block_out_channels": (32, 32), "norm_num_groups": 8, "latent_channels": 4}
    scaling = {"scaling_factor": 0.36, "shift_factor": 0.11}
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "layers_per_block": 1}
    pipe = ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=AutoencoderKL(up_block_types=("UpDecoderBlock2D",) * 2, **widths, **blocks, **scaling),
        text_encoder=Qwen3Model(encoder),
        tokenizer=Chat(spec, tokens=16),
        transformer=ZImageTransformer2DModel(
            in_channels=4,
            dim=32,
            n_layers=3,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=32,
            axes_dims=[4, 6, 6],
            axes_lens=[64, 64, 64],
        ),
    )
    pipe.set_progress_bar_config(disable=True)
    for component in (pipe.vae, pipe.text_encoder, pipe.transformer):
        component.requires_grad_(False).eval()
    return pipe


def test_tables_on_a_plain_object_of_a_modules_are_nothing_of_ours():
    pipe, shape = z_image(), "32x32:steps=2,tokens=16"
    asked = {"width": 32, "height": 32, "num_inference_steps": 2, "guidance_scale": 0.0}

    def make() -> torch.Tensor:
        seeded = torch.Generator().manual_seed(0)
        asked_for = {"output_type": "pt", "max_sequence_length": 32, "generator": seeded}
        return pipe("a cat", **asked_for, **asked).images.cpu()

    with on_card(pipe) as card:
        alone = make()
        settlement = settle(pipe, device=card, envelope=[shape])
        assert settlement.status is Status.COMMITTED
        with settlement.guard(shape):
            assert torch.equal(make(), alone)
        rope = pipe.transformer.rope_embedder
        assert {each.device.type for each in rope.freqs_cis} == {card.torch_device.type}
        settlement.resettle()
        assert settlement.status is Status.COMMITTED
        with settlement.guard(shape):
            assert torch.equal(make(), alone)
        settlement.close()
        settlement.close()
        assert ours(pipe) == []
        assert torch.equal(make(), alone)
        assert {each.device.type for each in rope.freqs_cis} == {"cpu"}
