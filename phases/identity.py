"""What a host says of itself for the fingerprint of a plan. Nothing in it depends on memory
addresses, on the order in which things are listed, on the values of weights, or on where they
are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version

from .schedule import Value

ABSENT = "absent"


class LibraryPrint(Value):
    name: str
    version: str


class ComponentPrint(Value):
    name: str
    class_path: str
    weight_bytes: int
    """Of its parameters and persistent buffers, adapters aside; storages that are shared count
    once."""
    structure: str
    """A digest of the names, shapes, dtypes and quantisation of its parameters and persistent
    buffers, adapters aside, and of which of them are one and the same."""


class AdapterPrint(Value):
    """An adapter (LoRA and its kin, as PEFT injects them) that is loaded into a component."""

    component: str
    name: str
    ranks: tuple[int, ...]
    """All that its layers have; empty where the kind of adapter has none."""
    layers: int
    """Modules of the component that it adapts."""
    weight_bytes: int
    active: bool
    merged: bool

    @property
    def text(self) -> str:
        rank = f"rank {' and '.join(map(str, self.ranks))}, " if self.ranks else ""
        state = f"{'active' if self.active else 'inactive'}{', merged' if self.merged else ''}"
        return f"{rank}{self.layers} layers, {self.weight_bytes} bytes, {state}"


class DeclarationPrint(Value):
    component: str
    mode: str
    resident_layers: tuple[int, ...]
    """As declared, one count for each layer group."""
    sized: bool
    """Whether the planner sizes its sets."""

    @property
    def text(self) -> str:
        counts = " and ".join(map(str, self.resident_layers))
        layers = f", {counts} layers" if counts else ""
        return f"{self.mode}{layers}{', sized' if self.sized else ''}"


class HostIdentity(Value):
    pipeline: str
    """The import path of its class; with a modular pipeline, also that of its blocks."""
    libraries: tuple[LibraryPrint, ...]
    """The packages that the pipeline's and its components' classes are from, sorted."""
    components: tuple[ComponentPrint, ...]
    """Sorted by name, as are the next two."""
    adapters: tuple[AdapterPrint, ...]
    declarations: tuple[DeclarationPrint, ...]
    envelope: tuple[str, ...]
    """The largest shapes, sorted."""
    prefetch: int
    """Layers fetched ahead in the baseline."""


def installed(package: str) -> str | None:
    """The version that is installed of a package; None where it isn't, or isn't one."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def libraries(class_paths: Iterable[str]) -> Iterator[LibraryPrint]:
    """The packages that classes are from, sorted."""
    for name in sorted({path.partition(".")[0] for path in class_paths} - {"torch", "residency"}):
        found = installed(name)
        if found is not None:
            yield LibraryPrint(name=name, version=found)
