"""What a machine says of its cards and its host memory, read on the machine that this runs on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from ..offload.cuda.device import CudaDevice, visible_devices
from ..offload.cuda.nvml import Nvml
from ..offload.device import Inspection, Nature
from ..offload.errors import DeviceError, InputError
from ..offload.host_memory import HostLimits
from ..phases.schedule import Value

FORMAT_VERSION: Literal[1] = 1


class Figure(Value):
    name: str
    value: int | str | None
    """None where the source doesn't say; `source` then tells why."""
    unit: str
    """`bytes`, or what the number counts; empty for a word."""
    source: str


class Note(Value):
    kind: str
    nature: Nature
    message: str
    hint: str | None


class ProbedCard(Value):
    device: str
    """As torch names it: `cuda:0`."""
    name: str
    uuid: str
    usable_bytes: int
    """What this process may take with tensors."""
    drift_reserve_bytes: int
    """What a plan's margin should hold besides: programs of a desktop come to take it."""
    unified: bool
    """Device and host memory are one pool."""
    spills: bool
    """A full card goes on in host memory, and no out-of-memory error comes."""
    pins_on_card: bool
    """Page-locked host memory is charged to the card as well."""
    figures: tuple[Figure, ...]
    notes: tuple[Note, ...]


class Unreadable(Value):
    """A card that torch sees and that can't be read."""

    device: str
    message: str
    hint: str | None


class Machine(Value):
    format_version: Literal[1] = FORMAT_VERSION
    residency_version: str
    torch_version: str
    cards: tuple[ProbedCard, ...]
    unreadable: tuple[Unreadable, ...]
    no_card: str | None
    """Why there is no card; None where there is one."""
    hint: str | None
    """What to do about it."""
    no_nvml: str | None
    """Why NVML, which knows what other processes hold, says nothing; None where it does."""
    host: tuple[Figure, ...]

    def to_json(self) -> str:
        return self.model_dump_json(indent=2) + "\n"


def survey(device: str | None = None) -> Machine:
    """Of one card, or of all that this process sees, and of host memory.

    Raises InputError or DeviceError where the card that was named isn't there or can't be read.
    """
    cards: list[ProbedCard] = []
    unreadable: list[Unreadable] = []
    no_card = hint = None
    with closing(Nvml()) as nvml:
        no_nvml = nvml.absence
        if device is not None:
            cards.append(_card(CudaDevice.parse(device, nvml=nvml)))
        else:
            try:
                count = visible_devices()
            except InputError as error:
                count, no_card, hint = 0, error.message, error.hint
            for index in range(count):
                name = f"cuda:{index}"
                try:
                    cards.append(_card(CudaDevice.parse(name, nvml=nvml)))
                except DeviceError as error:
                    unreadable.append(
                        Unreadable(device=name, message=error.message, hint=error.hint)
                    )
    return Machine(
        residency_version=_version("residency"),
        torch_version=_version("torch"),
        cards=tuple(cards),
        unreadable=tuple(unreadable),
        no_card=no_card,
        hint=hint,
        no_nvml=no_nvml,
        host=tuple(host_figures(HostLimits.read(), any(card.unified for card in cards))),
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _card(device: CudaDevice) -> ProbedCard:
    return probed_card(str(device.torch_device), device.inspect())


def probed_card(device: str, inspection: Inspection) -> ProbedCard:
    traits = inspection.traits
    return ProbedCard(
        device=device,
        name=inspection.identity.name,
        uuid=inspection.identity.uuid,
        usable_bytes=inspection.reading.usable_bytes,
        drift_reserve_bytes=inspection.drift_reserve_bytes,
        unified=traits.unified,
        spills=traits.spills,
        pins_on_card=traits.pins_on_card,
        figures=tuple(
            Figure(name=term.name, value=term.value, unit=term.unit, source=term.source)
            for term in inspection.terms
        ),
        notes=tuple(
            Note(
                kind=finding.kind,
                nature=finding.nature,
                message=finding.message,
                hint=finding.hint,
            )
            for finding in inspection.findings
        ),
    )


def host_figures(limits: HostLimits, unified: bool = False) -> Iterator[Figure]:
    binding = limits.binding
    for term in limits.terms:
        yield Figure(
            name="available" if term is limits.terms[0] else "left in a cgroup",
            value=term.available_bytes,
            unit="bytes",
            source=term.source,
        )
    yield Figure(
        name="for pinned masters",
        value=binding.budget_bytes(unified=unified),
        unit="bytes",
        source="device memory is the host's, so none"
        if unified
        else f"{binding.source}, less a reserve",
    )
    if limits.lock is not None:
        limit = limits.lock.limit_bytes
        yield Figure(
            name="locked memory, at most",
            value="unlimited" if limit is None else limit,
            unit="" if limit is None else "bytes",
            source="RLIMIT_MEMLOCK, which drivers aren't held to as a rule",
        )
