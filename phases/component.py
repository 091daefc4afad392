"""The components of a pipeline: its modules, and which of the usual groups each belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from ..offload.errors import UnknownNameError

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
