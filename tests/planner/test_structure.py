from types import SimpleNamespace

import pytest
import torch
from torch import nn

from residency.phases.diffusers.structure import Adapter, Structure, distinct_bytes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q = nn.Linear(8, 8)
        self.to_k = nn.Linear(8, 8, bias=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("cache", torch.zeros(100), persistent=False)


BLOCK_BYTES = 4 * (8 * 8 + 8 + 8 * 8)
MODEL_BYTES = 3 * BLOCK_BYTES + 4 * (8 + 8 + 8 + 8) + 8


class LoraLinear(nn.Module):
    """What PEFT puts in the place of a linear layer, as far as its attributes go."""

    adapter_layer_names = ("lora_A", "lora_B", "lora_embedding_A", "lora_magnitude_vector")

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.r: dict[str, int] = {}
        self.lora_A = nn.ModuleDict()
        self.lora_B = nn.ModuleDict()
        self.lora_embedding_A = nn.ParameterDict()
        self.lora_magnitude_vector = None
        self.lora_dropout = nn.ModuleDict()
        self.active_adapter: str | list[str] = []
        self.merged_adapters: list[str] = []
        self.disable_adapters = False

    @property
    def active_adapters(self) -> list[str]:
        found = self.active_adapter
        return [found] if isinstance(found, str) else found

    def add(self, name: str, rank: int) -> None:
        self.r[name] = rank
        self.lora_A[name] = nn.Linear(8, rank, bias=False)
        self.lora_B[name] = nn.Linear(rank, 8, bias=False)
        self.active_adapter = name


class SavedModule(nn.Module):
    """What PEFT puts in the place of a module that an adapter trains whole."""

    adapter_layer_names = ("modules_to_save",)

    def __init__(self, original: nn.Module, copy: nn.Module) -> None:
        super().__init__()
        self.original_module = original
        self.modules_to_save = nn.ModuleDict({"style": copy})
        self.active_adapters = ["style"]


def adapted(rank: int = 4) -> tuple[Model, list[LoraLinear]]:
    model = Model()
    layers = []
    for block in model.blocks:
        assert isinstance(block, Block)
        layer = LoraLinear(block.to_q)
        layer.add("style", rank)
        block.to_q = layer  # type: ignore[assignment]
        layers.append(layer)
    return model, layers


def test_weight_is_that_of_parameters_and_persistent_buffers():
    assert Structure.of(Model()).weight_bytes == MODEL_BYTES


def test_values_and_what_the_model_makes_for_itself_are_no_part_of_it():
    first, second = Model(), Model()
    second.cache = torch.zeros(7)
    second.blocks[0].to_q.weight.data.fill_(3)
    second.requires_grad_(False)
    assert Structure.of(first) == Structure.of(second)


def test_the_order_of_definition_is_no_part_of_it():
    one, other = nn.Module(), nn.Module()
    one.a, one.b = nn.Linear(2, 3), nn.Linear(3, 2)
    other.b, other.a = nn.Linear(3, 2), nn.Linear(2, 3)
    assert Structure.of(one) == Structure.of(other)


def change_shape(model: Model) -> None:
    model.blocks[1].to_q = nn.Linear(8, 9)


def change_dtype(model: Model) -> None:
    model.blocks[1].to_q.to(torch.bfloat16)


def change_name(model: Model) -> None:
    model.blocks[1].to_v = model.blocks[1].to_q
    del model.blocks[1].to_q


def drop_parameter(model: Model) -> None:
    model.blocks[1].to_q.bias = None


def add_buffer(model: Model) -> None:
    model.register_buffer("scale", torch.ones(1))


def set_quantisation(model: Model) -> None:
    model.config = SimpleNamespace(quantization_config={"bits": 4})


def set_kind_of_tensor(model: Model) -> None:
    class Packed(nn.Parameter):
        pass

    model.blocks[1].to_q.weight = Packed(torch.zeros(8, 8))


def set_quant_type(model: Model) -> None:
    model.blocks[1].to_q.weight.quant_type = "nf4"


def tie(model: Model) -> None:
    model.blocks[1].to_q.weight = model.blocks[0].to_q.weight


@pytest.mark.parametrize(
    "change",
    [
        change_shape,
        change_dtype,
        change_name,
        drop_parameter,
        add_buffer,
        set_quantisation,
        set_kind_of_tensor,
        set_quant_type,
        tie,
    ],
)
def test_each_change_of_the_structure_changes_its_digest(change):
    model = Model()
    before = Structure.of(model).digest
    change(model)
    assert Structure.of(model).digest != before


def test_a_quantisation_config_is_told_without_memory_addresses_or_order():
    class Config:
        def __init__(self, **values: object) -> None:
            self.values = values

        def to_dict(self) -> dict[str, object]:
            return self.values

    one, other = Model(), Model()
    one.config = SimpleNamespace(
        quantization_config=Config(bits=4, dtype=torch.bfloat16, skip=object())
    )
    other.config = SimpleNamespace(
        quantization_config=Config(skip=object(), dtype=torch.bfloat16, bits=4)
    )
    assert Structure.of(one) == Structure.of(other)
    other.config = SimpleNamespace(
        quantization_config=Config(skip=object(), dtype=torch.float16, bits=4)
    )
    assert Structure.of(one) != Structure.of(other)


def test_tied_weights_count_once():
    model = Model()
    tie(model)
    assert Structure.of(model).weight_bytes == MODEL_BYTES - 4 * 8 * 8


def test_views_of_one_storage_count_the_bytes_that_they_reach_once():
    storage = torch.zeros(100)
    assert distinct_bytes([storage[:10], storage[5:20], storage[50:60], storage[50:60]]) == 4 * 30
    assert distinct_bytes([storage[:40], storage[10:20], storage[30:50]]) == 4 * 50
    assert distinct_bytes([storage, storage.view(10, 10), torch.zeros(0)]) == 4 * 100


def test_sparse_and_meta_tensors_have_bytes_too():
    assert distinct_bytes([torch.eye(4).to_sparse()]) == 4 * 16
    assert distinct_bytes([torch.zeros(3, device="meta"), torch.zeros(3, device="meta")]) == 24


def test_a_wrapping_tensor_takes_what_is_inside_it():
    from torch.testing._internal.two_tensor import TwoTensor

    assert distinct_bytes([TwoTensor(torch.zeros(5), torch.zeros(5))]) == 2 * 4 * 5


def test_an_adapter_leaves_the_structure_and_the_weight_of_its_model_as_they_are():
    model, _ = adapted()
    found, plain = Structure.of(model), Structure.of(Model())
    assert (found.digest, found.weight_bytes) == (plain.digest, plain.weight_bytes)
    assert plain.adapters == ()
    assert found.adapters == (
        Adapter("style", (4,), 3, 3 * 2 * 4 * 8 * 4, active=True, merged=False),
    )


def test_adapters_are_told_apart_by_name_rank_bytes_and_state():
    model, layers = adapted()
    for layer in layers[:2]:
        layer.add("a", 2)
    layers[0].add("style", 16)
    layers[0].active_adapter = "a"
    layers[2].active_adapter = []
    layers[1].merged_adapters = ["style"]
    first, second = Structure.of(model).adapters
    assert first == Adapter("a", (2,), 2, 2 * 2 * 2 * 8 * 4, active=True, merged=False)
    assert second == Adapter("style", (4, 16), 3, (2 * 4 + 16) * 2 * 8 * 4, False, merged=True)


def test_disabled_adapters_are_not_active():
    model, layers = adapted()
    for layer in layers:
        layer.disable_adapters = True
    (found,) = Structure.of(model).adapters
    assert not found.active


def test_adapters_that_hold_parameters_or_whole_modules_are_found():
    model, layers = adapted()
    layers[0].lora_embedding_A["style"] = nn.Parameter(torch.zeros(10))
    model.norm = SavedModule(model.norm, nn.BatchNorm1d(8))  # type: ignore[assignment]
    found = Structure.of(model)
    assert found.digest == Structure.of(Model()).digest
    (style,) = found.adapters
    assert style.layers == 4
    assert style.weight_bytes == 3 * 2 * 4 * 8 * 4 + 4 * 10 + 4 * 32 + 8


def test_a_removed_adapter_leaves_no_trace():
    model, layers = adapted()
    for layer in layers:
        for held in (layer.lora_A, layer.lora_B):
            del held["style"]
    assert Structure.of(model) == Structure.of(Model())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_real_peft_adapters_are_found():
    import peft

    from residency.phases.diffusers.families import find_family

    raw = find_family("flux.1-dev", tiny=True).build()
    before = Structure.of(raw.transformer)
    one = peft.LoraConfig(r=4, target_modules=["to_q", "to_k"])
    two = peft.LoraConfig(r=8, target_modules=["to_v"], use_dora=True)
    raw.transformer.add_adapter(one, adapter_name="one")
    raw.transformer.add_adapter(two, adapter_name="two")
    found = Structure.of(raw.transformer)
    assert (found.digest, found.weight_bytes) == (before.digest, before.weight_bytes)
    own = {
        name: sum(p.nbytes for n, p in raw.transformer.named_parameters() if f".{name}." in n)
        for name in ("one", "two")
    }
    assert [(each.name, each.ranks, each.active, each.merged) for each in found.adapters] == [
        ("one", (4,), False, False),
        ("two", (8,), True, False),
    ]
    assert {each.name: each.weight_bytes for each in found.adapters} == own
    raw.delete_adapters(["one", "two"])
    assert Structure.of(raw.transformer) == before
