import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from bench_card import GIB
from journaling import FINGERPRINT
from number_host import NumberHost
from pydantic import ValidationError

from residency.offload.cards import custom_card
from residency.offload.simulated.card import SimulatedCard
from residency.phases.component import Declaration, ResidencyMode, declare
from residency.phases.diffusers.families import find_family
from residency.phases.diffusers.host import DiffusersHost
from residency.phases.diffusers.pipeline import DiffusersPipeline
from residency.phases.shape import Shape
from residency.planner.fingerprint import Fingerprint

FAMILIES = ("flux.1-dev", "qwen-image-2.1")
SHAPE = Shape(64, 64, tokens=16)
FLUX = ("transformer", "vae", "text_encoder", "text_encoder_2")
OFFLOADED = Declaration(ResidencyMode.COMPONENT_OFFLOAD)

PRINT_DIGEST = """
import sys
from residency.offload.cards import custom_card
from residency.offload.simulated.card import SimulatedCard
from residency.phases.component import declare
from residency.phases.diffusers.families import find_family
from residency.phases.diffusers.host import DiffusersHost
from residency.phases.diffusers.pipeline import DiffusersPipeline
from residency.phases.shape import Shape
from residency.planner.fingerprint import Fingerprint
pipeline = DiffusersPipeline(find_family(sys.argv[1], tiny=True).build(seed=7))
host = DiffusersHost(
    pipeline,
    SimulatedCard(custom_card(1 << 30)),
    [Shape(64, 64, tokens=16)],
    declare(pipeline.components, {"text_encoder": "layerwise-offload"}, {}),
    sized={"transformer", "text_encoder"},
)
found = Fingerprint.of(host, margin_bytes=1)
print(found.digest)
"""


def built(name: str = "flux.1-dev", seed: int = 0) -> DiffusersPipeline:
    return DiffusersPipeline(find_family(name, tiny=True).build(seed=seed))


def taken(
    pipeline: DiffusersPipeline, card: SimulatedCard | None = None, **others: object
) -> Fingerprint:
    values: dict[str, object] = {
        "declarations": declare(pipeline.components, {"text_encoder": "layerwise-offload"}, {}),
        "shapes": [SHAPE],
        "prefetch": 1,
        "sized": {"text_encoder", "transformer"},
    }
    of_all = {key: others.pop(key) for key in ("margin_bytes", "world_size") if key in others}
    values |= others
    given = (values.pop("shapes"), values.pop("declarations"))
    host = DiffusersHost(pipeline, card or SimulatedCard(custom_card(GIB)), *given, **values)
    return Fingerprint.of(host, **{"margin_bytes": 1} | of_all)


@pytest.fixture(scope="module")
def pipeline() -> DiffusersPipeline:
    return built()


@pytest.mark.parametrize("family", FAMILIES)
def test_two_pipelines_of_one_family_have_one_fingerprint(family):
    assert taken(built(family)) == taken(built(family, seed=3))


def test_the_digest_is_the_same_in_another_process():
    done = subprocess.run(
        (sys.executable, "-c", PRINT_DIGEST, FAMILIES[0]),
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [taken(built(FAMILIES[0])).digest]


def test_it_tells_what_there_is(pipeline):
    found = taken(pipeline)
    assert found.card.name == "1.0 GiB card"
    assert found.card.total_bytes == GIB
    assert found.driver is None
    assert found.pipeline.endswith(".FluxPipeline")
    assert [each.name for each in found.libraries] == ["diffusers", "transformers"]
    assert [each.name for each in found.components] == [
        "text_encoder",
        "text_encoder_2",
        "transformer",
        "vae",
    ]
    modules = {each.name: each.module for each in pipeline.components}
    for each in found.components:
        assert each.class_path.endswith(f".{type(modules[each.name]).__name__}")
        tensors = {p.untyped_storage().data_ptr(): p for p in modules[each.name].parameters()}
        assert each.weight_bytes == sum(p.nbytes for p in tensors.values())
    assert {each.component: each.text for each in found.declarations} == {
        "text_encoder": "layerwise-offload, 0 layers, sized",
        "text_encoder_2": "layerwise-offload, 0 layers",
        "transformer": "layerwise-offload, 0 and 0 layers, sized",
        "vae": "resident",
    }


def test_a_modular_pipeline_is_told_with_its_blocks():
    assert " of " in taken(built("qwen-image-2.1")).pipeline


def test_where_the_weights_are_and_what_ran_meanwhile_makes_no_difference():
    pipeline = built()
    with SimulatedCard(custom_card(GIB), allocator="exact") as card:
        before = taken(pipeline, card)
        sized = {"text_encoder", "transformer"}
        declarations = declare(pipeline.components, {"text_encoder": "layerwise-offload"}, {})
        host = DiffusersHost(pipeline, card, [SHAPE], declarations, sized=sized)
        assert host.open() is None
        assert host.sweep().failure is None
        ran = Fingerprint.of(host, margin_bytes=1)
        host.close()
        assert (ran, taken(pipeline, card)) == (before, before)


def test_a_driver_is_in_the_fingerprint_and_another_one_is_named():
    class Driven(NumberHost):
        driver = "570.86"

    made = Fingerprint.of(Driven({"denoise": (1, {"dit": 1})}, {"dit": (1, 1)}, 9), margin_bytes=0)
    assert made.driver == "570.86"
    other = made.model_copy(update={"driver": "580.95"})
    assert made.digest != other.digest
    assert str(made.first_difference(other)) == "driver was 570.86, is 580.95"


def test_what_is_free_makes_no_difference_and_the_total_does(pipeline):
    crowded = SimulatedCard(custom_card(GIB), others_bytes=GIB // 2, context_bytes=1)
    assert taken(pipeline, crowded) == taken(pipeline)
    smaller = SimulatedCard(custom_card(GIB - 1))
    assert str(taken(pipeline).first_difference(taken(pipeline, smaller))) == (
        "memory of the card was 1073741824 bytes, is 1073741823 bytes"
    )


def test_the_order_of_what_is_asked_for_makes_no_difference(pipeline):
    shapes = [
        SHAPE,
        Shape(64, 64, tokens=16, steps=9),
        Shape(64, 64, tokens=16, steps=2),
        Shape(96, 32),
        Shape(32, 96),
    ]
    declarations = declare(pipeline.components, {}, {})
    backwards = dict(reversed(declarations.items()))
    one = taken(pipeline, shapes=shapes, declarations=declarations)
    assert one == taken(pipeline, shapes=shapes[::-1], declarations=backwards)
    assert len(one.envelope) == 3


def test_smaller_shapes_than_the_largest_make_no_difference(pipeline):
    assert taken(pipeline, shapes=[SHAPE, Shape(32, 64, tokens=16)]) == taken(pipeline)


@pytest.mark.parametrize(
    ("others", "told"),
    [
        (
            {"shapes": [Shape(96, 64, tokens=16)]},
            "envelope was 64x64:tokens=16, is 96x64:tokens=16",
        ),
        ({"margin_bytes": 2}, "margin was 1 bytes, is 2 bytes"),
        ({"prefetch": 0}, "prefetch was 1, is 0"),
        ({"world_size": 4}, "world size was 1, is 4"),
        (
            {"sized": {"text_encoder"}},
            "residency of transformer was layerwise-offload, 0 and 0 layers, sized, is "
            "layerwise-offload, 0 and 0 layers",
        ),
        (
            {"sized": (), "declarations": dict.fromkeys(FLUX, OFFLOADED)},
            "residency of text_encoder was layerwise-offload, 0 layers, sized, is "
            "component-offload",
        ),
    ],
)
def test_what_the_user_changed_is_named(pipeline, others, told):
    assert str(taken(pipeline).first_difference(taken(pipeline, **others))) == told


def changed() -> Iterator[tuple[str, Fingerprint, str]]:
    """Every field of the fingerprint, changed alone, and what is said of it."""
    card, (flux, vae) = FINGERPRINT.card, FINGERPRINT.components
    (style,), (layerwise, resident) = FINGERPRINT.adapters, FINGERPRINT.declarations
    diffusers, transformers = FINGERPRINT.libraries
    adapter_now = "rank 16, 76 layers, 44000000 bytes, active"
    changes: list[tuple[str, dict[str, object], str]] = [
        ("card.name", {"card": card.model_copy(update={"name": "RTX 4090"})}, "card was NVIDIA"),
        (
            "card.uuid",
            {"card": card.model_copy(update={"uuid": "GPU-2"})},
            "UUID of the card was GPU-5090, is GPU-2",
        ),
        (
            "card.total_bytes",
            {"card": card.model_copy(update={"total_bytes": 5})},
            "memory of the card was 33715093504 bytes, is 5 bytes",
        ),
        ("driver", {"driver": "580.95"}, "driver was 570.86, is 580.95"),
        ("driver", {"driver": None}, "driver was 570.86, is none"),
        ("world_size", {"world_size": 2}, "world size was 1, is 2"),
        ("residency", {"residency": "0.2.0"}, "residency was 0.1.0, is 0.2.0"),
        ("torch", {"torch": "2.14.0"}, "torch was 2.13.0, is 2.14.0"),
        (
            "libraries.version",
            {"libraries": (diffusers.model_copy(update={"version": "0.43"}), transformers)},
            "diffusers was 0.42.1, is 0.43",
        ),
        ("libraries.name", {"libraries": (diffusers,)}, "transformers was 5.24.0, is absent"),
        ("pipeline", {"pipeline": "a.B"}, "pipeline was diffusers.FluxPipeline, is a.B"),
        (
            "components.class_path",
            {"components": (flux.model_copy(update={"class_path": "a.B"}), vae)},
            "component transformer was diffusers.FluxTransformer2DModel, is a.B",
        ),
        (
            "components.name",
            {"components": (flux,)},
            "component vae was diffusers.AutoencoderKL, is absent",
        ),
        (
            "components.weight_bytes",
            {"components": (flux.model_copy(update={"weight_bytes": 7}), vae)},
            "weight of transformer was 23802816640 bytes, is 7 bytes",
        ),
        (
            "components.structure",
            {"components": (flux, vae.model_copy(update={"structure": "ab"}))},
            "structure of vae was 1cd90ddba460d53d, is ab",
        ),
        (
            "adapters",
            {"adapters": ()},
            f"adapter style of transformer was {adapter_now}, is absent",
        ),
        (
            "adapters",
            {"adapters": (style, style.model_copy(update={"name": "two"}))},
            f"adapter two of transformer was absent, is {adapter_now}",
        ),
        *(
            (
                f"adapters.{field}",
                {"adapters": (style.model_copy(update={field: value}),)},
                f"adapter style of transformer was {adapter_now}, is {text}",
            )
            for field, value, text in (
                ("ranks", (), "76 layers, 44000000 bytes, active"),
                ("ranks", (4, 8), "rank 4 and 8, 76 layers, 44000000 bytes, active"),
                ("layers", 1, "rank 16, 1 layers, 44000000 bytes, active"),
                ("weight_bytes", 5, "rank 16, 76 layers, 5 bytes, active"),
                ("active", False, "rank 16, 76 layers, 44000000 bytes, inactive"),
                ("merged", True, f"{adapter_now}, merged"),
            )
        ),
        (
            "adapters.component",
            {"adapters": (style.model_copy(update={"component": "vae"}),)},
            f"adapter style of transformer was {adapter_now}, is absent",
        ),
        ("envelope", {"envelope": ()}, "envelope was 1024x1024:steps=50, is absent"),
        (
            "declarations.mode",
            {"declarations": (layerwise.model_copy(update={"mode": "resident"}), resident)},
            "residency of transformer was layerwise-offload, 3 and 8 layers, is resident, "
            "3 and 8 layers",
        ),
        (
            "declarations.resident_layers",
            {"declarations": (layerwise.model_copy(update={"resident_layers": (3, 9)}), resident)},
            "residency of transformer was layerwise-offload, 3 and 8 layers, is "
            "layerwise-offload, 3 and 9 layers",
        ),
        (
            "declarations.sized",
            {"declarations": (layerwise.model_copy(update={"sized": True}), resident)},
            "residency of transformer was layerwise-offload, 3 and 8 layers, is "
            "layerwise-offload, 3 and 8 layers, sized",
        ),
        (
            "declarations.component",
            {"declarations": (layerwise,)},
            "residency of vae was resident, is absent",
        ),
        ("margin_bytes", {"margin_bytes": 0}, "margin was 268435456 bytes, is 0 bytes"),
        ("prefetch", {"prefetch": 2}, "prefetch was 1, is 2"),
    ]
    for field, update, told in changes:
        yield field, FINGERPRINT.model_copy(update=update), told


CHANGED = [*changed()]


@pytest.mark.parametrize(("field", "now", "told"), CHANGED, ids=[each[0] for each in CHANGED])
def test_each_field_that_differs_alone_is_named_and_changes_the_digest(field, now, told):
    difference = FINGERPRINT.first_difference(now)
    assert str(difference).startswith(told)
    assert now.digest != FINGERPRINT.digest
    back = now.first_difference(FINGERPRINT)
    assert difference is not None
    assert back is not None
    assert {back.before, back.now} == {difference.before, difference.now}


def test_no_field_is_left_out_of_the_test_above():
    told = {field.partition(".")[0] for field, _, _ in CHANGED}
    assert told == {*Fingerprint.model_fields}
    for name in ("card", "libraries", "components", "adapters", "declarations"):
        value = getattr(FINGERPRINT, name)
        part = value[0] if isinstance(value, tuple) else value
        inner = {field.partition(".")[2] for field, _, _ in CHANGED if field.startswith(name)}
        missing = {*type(part).model_fields} - inner
        assert missing <= {"name"} if name == "adapters" else not missing


def test_the_first_of_several_differences_is_named_in_one_order():
    """The order of the list above: each change hides those of the fields behind its own."""
    for i, (field, earlier, told) in enumerate(CHANGED):
        changed_by_both = {
            name: getattr(earlier, name)
            for name in Fingerprint.model_fields
            if getattr(earlier, name) != getattr(FINGERPRINT, name)
        }
        for other, later, _ in CHANGED[i + 1 :]:
            if other.partition(".")[0] != field.partition(".")[0]:
                both = later.model_copy(update=changed_by_both)
                assert str(FINGERPRINT.first_difference(both)).startswith(told)


def test_equal_fingerprints_have_no_difference():
    assert FINGERPRINT.first_difference(FINGERPRINT.model_copy(deep=True)) is None


def test_a_fingerprint_is_read_as_it_was_written(pipeline):
    found = taken(pipeline)
    again = Fingerprint.model_validate_json(found.model_dump_json())
    assert again == found
    assert again.digest == found.digest
    assert len(found.digest) == 16


def test_a_fingerprint_takes_no_unknown_field_and_cannot_be_changed():
    with pytest.raises(ValidationError):
        FINGERPRINT.driver = "1"  # type: ignore[misc]
    with pytest.raises(ValidationError):
        Fingerprint.model_validate(FINGERPRINT.model_dump() | {"more": 1})


def test_importing_it_imports_no_torch():
    code = "import residency.planner.fingerprint, sys; print('torch' in sys.modules)"
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True)
    assert done.stdout == "False\n"
