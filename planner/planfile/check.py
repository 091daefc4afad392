"""Whether a plan file still holds, as far as that can be told without running the pipeline."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

from ..plan import Plan
from ..report import Report
from ..value import Value
from .fingerprint import ABSENT, Difference, Fingerprint, LibraryPrint, installed

FORMAT_VERSION: Literal[1] = 1


class Machine(Protocol):
    """What a machine says of its cards. Raises DeviceError where it can't be asked."""

    def has_card(self, uuid: str) -> bool: ...

    def driver(self) -> str | None: ...


class CheckedPlan(Value):
    card: str
    device: str
    """What the plan was validated on: `simulated`, or the driver's name of the card."""
    fingerprint: str | None
    """The digest of the plan's; None where the file has none, and then it doesn't hold."""
    holds: bool
    difference: Difference | None
    """The first one, where the fingerprint is another one now."""


class Check(Value):
    format_version: Literal[1] = FORMAT_VERSION
    pipeline: str
    compared: Literal["machine", "pipeline"]
    """machine: the card's UUID, the driver and the versions of the software. pipeline: all of the
    fingerprint, of the pipeline as it was built anew."""
    plans: tuple[CheckedPlan, ...]

    @property
    def holds(self) -> bool:
        return all(plan.holds for plan in self.plans)


def check_machine(report: Report, machine: Machine) -> Check:
    """`machine` is asked only of plans that were validated on a real card. Raises DeviceError."""
    checked = []
    for plan in report.plans:
        known = plan.fingerprint
        now = None if known is None else _on_machine(known, plan.device != "simulated", machine)
        checked.append(compared(plan, now))
    return Check(pipeline=report.pipeline, compared="machine", plans=tuple(checked))


def compared(plan: Plan, now: Fingerprint | None) -> CheckedPlan:
    known = plan.fingerprint
    difference = None if known is None or now is None else known.first_difference(now)
    return CheckedPlan(
        card=plan.card,
        device=plan.device,
        fingerprint=None if known is None else known.digest,
        holds=known is not None and difference is None,
        difference=difference,
    )


def _on_machine(known: Fingerprint, is_real: bool, machine: Machine) -> Fingerprint:
    """`known`, with all that can be told of this machine as it is here."""
    here: dict[str, object] = {
        "residency": installed("residency") or ABSENT,
        "torch": installed("torch") or ABSENT,
        "libraries": tuple(_here(known.libraries)),
    }
    if is_real:
        if known.driver is not None:
            here["driver"] = machine.driver()
        if not machine.has_card(known.card.uuid):
            here["card"] = known.card.model_copy(update={"uuid": ABSENT})
    return known.model_copy(update=here)


def _here(libraries: Iterable[LibraryPrint]) -> Iterable[LibraryPrint]:
    for each in libraries:
        yield LibraryPrint(name=each.name, version=installed(each.name) or ABSENT)
