"""What a plan holds for: the card, the software, the pipeline with its adapters, the envelope, and
what the user declared."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from typing import TYPE_CHECKING

from ..phases.identity import ABSENT, HostIdentity, installed
from ..phases.schedule import Value

if TYPE_CHECKING:
    from ..phases.host import Host


class CardPrint(Value):
    name: str
    uuid: str
    total_bytes: int
    """What is free of it isn't here, since that changes from one minute to the next."""


class Difference(Value):
    field: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.field} was {self.before}, is {self.now}"


class Fingerprint(HostIdentity):
    card: CardPrint
    driver: str | None
    """Its version; None on a simulated card, and where it can't be read."""
    world_size: int
    """Ranks that serve together."""
    residency: str
    """The version of this package."""
    torch: str
    """The version of PyTorch."""
    margin_bytes: int

    @classmethod
    def of(cls, host: Host, *, margin_bytes: int, world_size: int = 1) -> Fingerprint:
        """As the host is now. Reads no weights, and takes components wherever they are."""
        return cls(
            **dict(host.portrait()),
            card=CardPrint(
                name=host.identity.name,
                uuid=host.identity.uuid,
                total_bytes=host.read().total_bytes,
            ),
            driver=host.driver,
            world_size=world_size,
            residency=residency_version(),
            torch=installed("torch") or ABSENT,
            margin_bytes=margin_bytes,
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


def residency_version() -> str:
    """Of this package; `absent` where it runs from a checkout and isn't installed."""
    return installed("residency") or ABSENT
