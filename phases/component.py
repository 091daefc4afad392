"""The components of a pipeline: its modules, which of the usual groups each belongs to, and what
the user declares of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from ..offload.device import Device
from ..offload.errors import InputError, UnknownNameError
from ..offload.layers import LayerGroup, layer_groups
from ..offload.layerwise import LayerwiseOffload
from ..offload.placement import ComponentOffload, Placement, Resident

if TYPE_CHECKING:
    from torch import nn


class ComponentGroup(StrEnum):
    """The groups that SGLang's flags know, and diffusers' names for what is in them."""

    DIT = "dit"
    TEXT_ENCODER = "text_encoder"
    IMAGE_ENCODER = "image_encoder"
    VAE = "vae"
    OTHER = "other"

    @classmethod
    def of(cls, name: str) -> ComponentGroup:
        for prefix, group in _PREFIXES:
            if name == prefix or name.startswith(f"{prefix}_"):
                return group
        return cls.OTHER


_PREFIXES = (
    ("transformer", ComponentGroup.DIT),
    ("unet", ComponentGroup.DIT),
    ("text_encoder", ComponentGroup.TEXT_ENCODER),
    ("image_encoder", ComponentGroup.IMAGE_ENCODER),
    ("vae", ComponentGroup.VAE),
)

ALL = "all"

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, eq=False)
class Component:
    name: str
    module: nn.Module

    @property
    def group(self) -> ComponentGroup:
        return ComponentGroup.of(self.name)


def select(selector: str, names: Iterable[str]) -> Iterator[str]:
    """The components that a flag's `selector` means: a group, `all`, or one by its name.

    As in SGLang, `text_encoder` is the group of all text encoders, also where one bears its name.
    Raises UnknownNameError where it means none.
    """
    names = tuple(names)
    if selector == ALL:
        found = [*names]
    else:
        found = [name for name in names if selector in (name, ComponentGroup.of(name))]
    if not found:
        groups = {str(ComponentGroup.of(name)) for name in names} - {ComponentGroup.OTHER}
        raise UnknownNameError("component", selector, (*names, *sorted(groups - {*names}), ALL))
    yield from found


def resolve(assignments: Mapping[str, _T], names: Iterable[str]) -> dict[str, _T]:
    """Assignments by component: a name overrides a group, a group overrides `all`.

    Raises UnknownNameError.
    """
    names = tuple(names)
    groups = {*ComponentGroup} - {ComponentGroup.OTHER}
    order = sorted(assignments, key=lambda selector: (selector != ALL, selector not in groups))
    return {name: assignments[selector] for selector in order for name in select(selector, names)}


class ResidencyMode(StrEnum):
    RESIDENT = "resident"
    LAYERWISE_OFFLOAD = "layerwise-offload"
    COMPONENT_OFFLOAD = "component-offload"


@dataclass(frozen=True, slots=True)
class Declaration:
    """`resident_layers`: as declared, one count for each layer group."""

    mode: ResidencyMode
    resident_layers: tuple[int, ...] = ()
    fixed: str | None = None
    """What of this the user fixed, in the words of the flag, as `dit=resident`; None: nothing."""

    def place(self, component: Component, device: Device, *, prefetch: int) -> Placement:
        """Raises OffloadError where the component can't be placed so."""
        if self.mode is ResidencyMode.RESIDENT:
            return Resident(component.module, device)
        if self.mode is ResidencyMode.COMPONENT_OFFLOAD:
            return ComponentOffload(component.module, device)
        return LayerwiseOffload(
            component.module, device, resident_layers=self.resident_layers, prefetch=prefetch
        )


def declare(
    components: Iterable[Component],
    residency: Mapping[str, str],
    resident_layers: Mapping[str, str],
    *,
    unified: bool = False,
) -> dict[str, Declaration]:
    """One declaration for each component.

    What `residency` leaves open: a VAE, which is small and runs in many short passes, and whatever
    has no layer groups are resident; the rest is streamed layer by layer. Where memory is
    `unified` all is resident: a copy from it to itself costs time and takes its bytes twice.
    Raises InputError for names and numbers that can't be, for resident layers where no component
    that they are declared for is layerwise, since they would do nothing, and for offload where
    memory is unified.
    """
    parts = {component.name: component for component in components}
    groups = {name: layer_groups(component.module) for name, component in parts.items()}
    modes = {name: _default(component, groups[name]) for name, component in parts.items()}
    if unified:
        modes = dict.fromkeys(parts, ResidencyMode.RESIDENT)
    modes |= {name: _mode(text) for name, text in resolve(residency, parts).items()}
    _check_unified(unified, modes)
    layerwise = [name for name, mode in modes.items() if mode is ResidencyMode.LAYERWISE_OFFLOAD]
    for selector, text in resident_layers.items():
        selected = [*select(selector, parts)]
        if not {*selected} & {*layerwise}:
            raise InputError(
                f"resident layers of {selector} are {text}, and {selected[0]} is "
                f"{modes[selected[0]]}",
                hint=f"declare {selector}=layerwise-offload, or leave its resident layers out",
            )
    layers = resolve({s: (s, text) for s, text in resident_layers.items()}, parts)
    places = resolve({s: f"{s}={text}" for s, text in residency.items()}, parts)
    declared = {}
    for name, mode in modes.items():
        if mode is not ResidencyMode.LAYERWISE_OFFLOAD:
            declared[name] = Declaration(mode, fixed=places.get(name))
            continue
        selector, text = layers.get(name, (name, "0"))
        fixed = f"{selector}={text}" if name in layers else None
        declared[name] = Declaration(mode, count_layers(text, groups[name]), fixed)
    return declared


def left_to_size(declarations: Mapping[str, Declaration]) -> frozenset[str]:
    """Layerwise components for which the user declared no resident layers."""
    return frozenset(
        name
        for name, each in declarations.items()
        if each.mode is ResidencyMode.LAYERWISE_OFFLOAD and each.fixed is None
    )


def _check_unified(unified: bool, modes: Mapping[str, ResidencyMode]) -> None:
    offloaded = [name for name, mode in modes.items() if mode is not ResidencyMode.RESIDENT]
    if unified and offloaded:
        raise InputError(
            f"{offloaded[0]} is {modes[offloaded[0]]}, and host and device are one memory here: "
            "offload would copy weights within it",
            hint=f"declare {offloaded[0]}=resident, or leave it out",
        )


def _mode(text: str) -> ResidencyMode:
    try:
        return ResidencyMode(text)
    except ValueError:
        raise UnknownNameError("residency", text, [*ResidencyMode]) from None


def _default(component: Component, groups: Sequence[LayerGroup]) -> ResidencyMode:
    if component.group is ComponentGroup.VAE or not groups:
        return ResidencyMode.RESIDENT
    return ResidencyMode.LAYERWISE_OFFLOAD


def count_layers(text: str, groups: Sequence[LayerGroup]) -> tuple[int, ...]:
    """Resident layers of each group: `all`, a count, or a fraction below 1.

    As in SGLang, a count is of each group, at most what it has, and a fraction is rounded in each
    group, to at least one layer. Raises InputError.
    """
    sizes = [len(group.layers) for group in groups]
    if text == "all":
        return tuple(sizes)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if (
        not 0 <= value < math.inf
        or (value > 1 and not value.is_integer())
        or (value == 1 and not text.strip().isdigit())
    ):
        raise InputError(
            f"resident layers are {text!r}",
            hint="give a count of layers (0, 1, 2, …), a fraction below 1 (0.65), or all",
        )
    if value >= 1 or value == 0:
        return tuple(min(int(value), size) for size in sizes)
    return tuple(max(1, round(value * size)) for size in sizes)
