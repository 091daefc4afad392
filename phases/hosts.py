"""Which host a pipeline gets, and the pipelines that are had by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ..offload.errors import InputError
from .shape import Shape

if TYPE_CHECKING:
    from ..offload.device import Device
    from .diffusers.pipeline import DiffusersPipeline
    from .host import Host
    from .identity import HostIdentity


@dataclass(frozen=True, slots=True)
class Declared:
    """What the user says of the components, in the words of the flags."""

    component_residency: Mapping[str, str] = field(default_factory=dict)
    """Component or group (dit, text_encoder, image_encoder, vae, all) → resident,
    layerwise-offload or component-offload."""
    resident_layers: Mapping[str, str] = field(default_factory=dict)
    """Component or group → a count (of each layer group), a fraction below 1, or `all`."""
    size: Literal["declared", "auto"] = "auto"
    """auto: the planner sizes the sets of layerwise components that declare no resident layers."""
    prefetch: int = 1
    """Layers fetched ahead."""


def host_of(
    pipeline: Any,
    device: Device,
    envelope: Sequence[Shape],
    declared: Declared,
    *,
    host_bytes: int | None,
) -> Host:
    """The host of a pipeline as it is now, on `device`. `host_bytes`: for pinned masters.

    Raises InputError and OffloadError where it can't be as declared.
    """
    from .component import declare, left_to_size
    from .diffusers.host import DiffusersHost

    found = _adapted(pipeline)
    declarations = declare(
        found.components,
        declared.component_residency,
        declared.resident_layers,
        unified=device.traits.unified,
    )
    sized: frozenset[str] = frozenset()
    if declared.size == "auto":
        sized = left_to_size(declarations)
    return DiffusersHost(
        found,
        device,
        envelope,
        declarations,
        sized=sized,
        prefetch=declared.prefetch,
        host_bytes=host_bytes,
    )


def host_as(
    known: HostIdentity, pipeline: Any, device: Device, *, host_bytes: int | None = None
) -> Host:
    """The host that a plan was made on, with what was declared then."""
    from .component import Declaration, ResidencyMode
    from .diffusers.host import DiffusersHost

    return DiffusersHost(
        _adapted(pipeline),
        device,
        [Shape.parse(text) for text in known.envelope],
        {
            each.component: Declaration(ResidencyMode(each.mode), each.resident_layers)
            for each in known.declarations
        },
        sized=[each.component for each in known.declarations if each.sized],
        prefetch=known.prefetch,
        host_bytes=host_bytes,
    )


def family_pipeline(
    name: str, *, tiny: bool, virtual: bool | None = None, shapes: Sequence[Shape] = ()
) -> DiffusersPipeline:
    """A family's pipeline, built anew. Raises UnknownNameError, and ShapeError for what it can't
    do, before anything is built."""
    from .diffusers.families import find_family
    from .diffusers.pipeline import DiffusersPipeline

    family = find_family(name, tiny=tiny)
    for shape in shapes:
        family.check(shape)
    built = family.build(virtual=virtual)
    return DiffusersPipeline(built, name=family.name, request=family.request)


def load_pipeline(
    name: str, *, tiny: bool, virtual: bool | None = False, shapes: Sequence[Shape]
) -> DiffusersPipeline:
    """A folder's pipeline with the weights that are in it, or a family's. Raises InputError where
    nothing says what a folder's pipeline will serve."""
    from .diffusers.pipeline import is_pretrained, load_pretrained

    if not is_pretrained(name):
        return family_pipeline(name, tiny=tiny, virtual=virtual, shapes=shapes)
    if not shapes:
        raise InputError(
            f"nothing says which shapes {name} will serve",
            hint="give --shape, as 1024x1024:steps=40",
        )
    return load_pretrained(name)


def envelope_of(pipeline: DiffusersPipeline, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
    """`shapes`, or the request that the model's card recommends."""
    recommended = () if pipeline.request is None else (pipeline.request,)
    return tuple(shapes) or recommended


def _adapted(pipeline: Any) -> DiffusersPipeline:
    """A pipeline as it is now: an adapter that was made earlier is made anew."""
    from .diffusers.pipeline import DiffusersPipeline

    if isinstance(pipeline, DiffusersPipeline):
        return DiffusersPipeline(pipeline.pipeline, name=pipeline.name, request=pipeline.request)
    return DiffusersPipeline(pipeline)
