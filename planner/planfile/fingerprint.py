"""What a plan holds for: the card, the software, the pipeline with its adapters, the envelope, and
what the user declared. Nothing in it depends on memory addresses, on the order in which things are
listed, on the values of weights, or on where they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from ..value import Value

if TYPE_CHECKING:
    from ...offload.device import Device
    from ...phases.declaration import Declaration
    from ...phases.diffusers import DiffusersPipeline
    from ...phases.shape import Shape

ABSENT = "absent"


class CardPrint(Value):
    name: str
    uuid: str
    total_bytes: int
    """What is free of it isn't here, since that changes from one minute to the next."""


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


class Difference(Value):
    field: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.field} was {self.before}, is {self.now}"


class Fingerprint(Value):
    card: CardPrint
    driver: str | None
    """Its version; None on a simulated card, and where it can't be read."""
    world_size: int
    """Ranks that serve together."""
    residency: str
    """The version of this package."""
    torch: str
    """The version of PyTorch."""
    libraries: tuple[LibraryPrint, ...]
    """The packages that the pipeline's and its components' classes are from, sorted."""
    pipeline: str
    """The import path of its class; with a modular pipeline, also that of its blocks."""
    components: tuple[ComponentPrint, ...]
    """Sorted by name, as are the next two."""
    adapters: tuple[AdapterPrint, ...]
    declarations: tuple[DeclarationPrint, ...]
    envelope: tuple[str, ...]
    """The largest shapes, sorted."""
    margin_bytes: int
    prefetch: int
    """Layers fetched ahead, as the user set it."""

    @classmethod
    def of(
        cls,
        pipeline: DiffusersPipeline,
        device: Device,
        declarations: Mapping[str, Declaration],
        shapes: Iterable[Shape],
        *,
        margin_bytes: int,
        prefetch: int,
        sized: Iterable[str] = (),
        world_size: int = 1,
    ) -> Fingerprint:
        """`sized`: the components whose sets the planner sizes. Reads no weights, and takes
        components wherever they are."""
        from .structure import Structure, class_path, pipeline_path

        sized = frozenset(sized)
        found = {each.name: Structure.of(each.module) for each in pipeline.components}
        paths = {each.name: class_path(each.module) for each in pipeline.components}
        path = pipeline_path(pipeline.pipeline)
        return cls(
            card=CardPrint(
                name=device.identity.name,
                uuid=device.identity.uuid,
                total_bytes=device.read().total_bytes,
            ),
            driver=device.driver,
            world_size=world_size,
            residency=residency_version(),
            torch=installed("torch") or ABSENT,
            libraries=tuple(_libraries([path, *paths.values()])),
            pipeline=path,
            components=tuple(
                ComponentPrint(
                    name=name,
                    class_path=paths[name],
                    weight_bytes=structure.weight_bytes,
                    structure=structure.digest,
                )
                for name, structure in sorted(found.items())
            ),
            adapters=tuple(
                AdapterPrint(component=name, **asdict(adapter))
                for name, structure in sorted(found.items())
                for adapter in structure.adapters
            ),
            declarations=tuple(
                DeclarationPrint(
                    component=name,
                    mode=declared.mode,
                    resident_layers=declared.resident_layers,
                    sized=name in sized,
                )
                for name, declared in sorted(declarations.items())
            ),
            envelope=_envelope(pipeline, shapes),
            margin_bytes=margin_bytes,
            prefetch=prefetch,
        )

    @property
    def digest(self) -> str:
        """Equal for equal fingerprints; 16 hexadecimal digits."""
        return sha256(self.model_dump_json().encode()).hexdigest()[:16]

    def first_difference(self, now: Fingerprint) -> Difference | None:
        """What to name where `now` is another fingerprint; None where it is equal.

        The order is fixed: the card, the software, the pipeline, its components and adapters, and
        at last what the user asked for.
        """
        before, after = dict(self._facts()), dict(now._facts())
        for field in sorted({**before, **after}, key=lambda field: field[0]):
            was, is_now = before.get(field, ABSENT), after.get(field, ABSENT)
            if was != is_now:
                return Difference(field=field[1], before=was, now=is_now)
        return None

    def _facts(self) -> Iterator[tuple[tuple[int, str], str]]:
        """Every field in words, under its place in the order and its name."""
        for place, section in enumerate(
            (
                self._machine(),
                ((library.name, library.version) for library in self.libraries),
                [("pipeline", self.pipeline)],
                self._components(),
                ((f"adapter {each.name} of {each.component}", each.text) for each in self.adapters),
                [("envelope", "; ".join(self.envelope) or ABSENT)],
                ((f"residency of {each.component}", each.text) for each in self.declarations),
                [("margin", f"{self.margin_bytes} bytes"), ("prefetch", str(self.prefetch))],
            )
        ):
            yield from (((place, name), text) for name, text in section)

    def _machine(self) -> Iterator[tuple[str, str]]:
        yield "card", self.card.name
        yield "UUID of the card", self.card.uuid
        yield "memory of the card", f"{self.card.total_bytes} bytes"
        yield "driver", self.driver or "none"
        yield "world size", str(self.world_size)
        yield "residency", self.residency
        yield "torch", self.torch

    def _components(self) -> Iterator[tuple[str, str]]:
        for each in self.components:
            yield f"component {each.name}", each.class_path
            yield f"weight of {each.name}", f"{each.weight_bytes} bytes"
            yield f"structure of {each.name}", each.structure


def installed(package: str) -> str | None:
    """The version that is installed of a package; None where it isn't, or isn't one."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def residency_version() -> str:
    """Of this package; `absent` where it runs from a checkout and isn't installed."""
    return installed("residency") or ABSENT


def _libraries(class_paths: Iterable[str]) -> Iterator[LibraryPrint]:
    for name in sorted({path.partition(".")[0] for path in class_paths} - {"torch", "residency"}):
        found = installed(name)
        if found is not None:
            yield LibraryPrint(name=name, version=found)


def _envelope(pipeline: DiffusersPipeline, shapes: Iterable[Shape]) -> tuple[str, ...]:
    # Of shapes that cover one another the first is kept: sorted, that is always the same one.
    largest = pipeline.largest(sorted(shapes, key=lambda shape: str(pipeline.completed(shape))))
    return tuple(sorted(str(pipeline.completed(shape)) for shape in largest))
