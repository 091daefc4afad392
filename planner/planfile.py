"""The plan file: written, read, and whether it still holds, as far as that can be told without
running the pipeline."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol

from pydantic import ValidationError

from ..offload.cards import Card, custom_card
from ..offload.errors import InputError, PlanFileError
from ..offload.file import replace_file
from ..phases.identity import ABSENT, LibraryPrint, installed
from ..phases.schedule import Value
from .fingerprint import Difference, Fingerprint
from .plan import FORMAT_VERSION as PLAN_VERSION
from .plan import Plan, Report

FORMAT_VERSION: Literal[1] = 1


def write_report(report: Report, path: Path) -> None:
    """Put `report` in `path`, which is whole or untouched whenever the process ends.

    Raises PlanFileError.
    """
    try:
        replace_file(path, report.to_json().encode())
    except OSError as error:
        raise PlanFileError(
            f"{path} can't be written: {error.strerror}",
            hint="free the disk, or name a file in another directory",
        ) from error


def read_report(path: Path) -> Report:
    """Raises PlanFileError where `path` holds no report of this format version."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanFileError(
            f"{path} can't be read: {error}", hint="name a file that --out wrote"
        ) from error
    return parse_report(text, str(path))


def parse_report(text: str, source: str) -> Report:
    """Raises PlanFileError. `source` names the text in messages."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanFileError(
            f"{source} is no JSON: {error}", hint="name a file that --out wrote"
        ) from error
    version = found.get("format_version") if isinstance(found, dict) else None
    if version != PLAN_VERSION:
        raise PlanFileError(
            f"{source} has format version {version!r}, this residency reads {PLAN_VERSION}",
            hint="plan again with `residency plan … --out`",
        )
    try:
        return Report.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise PlanFileError(
            f"{source} is no report: {where}: {first['msg']}",
            hint="plan again with `residency plan … --out`",
        ) from error


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


def check_pipeline(report: Report, family: str, cards: Sequence[Card], *, tiny: bool) -> Check:
    """Compare with the family's pipeline, built anew; what the user declared is taken from the
    plan. Each of `cards` is compared with the plan for it, or with the first plan where there is
    none; without cards each plan is compared on its own card.

    Raises InputError where a plan was made on a real card, or there is no plan.
    """
    from ..phases.hosts import family_pipeline

    pairs = [(_plan_for(card, report), card) for card in cards] or [
        (plan, _own_card(plan)) for plan in report.plans
    ]
    for plan, _ in pairs:
        if plan.device != "simulated":
            raise InputError(
                f"the plan for {plan.card} was validated on {plan.device}, not simulated",
                hint="leave --pipeline and --card out: what they build is for simulated cards",
            )
    pipeline = family_pipeline(family, tiny=tiny)
    checked = tuple(compared(plan, _anew(plan, pipeline, card)) for plan, card in pairs)
    return Check(pipeline=report.pipeline, compared="pipeline", plans=checked)


def _plan_for(card: Card, report: Report) -> Plan:
    if not report.plans:
        raise InputError("the file has no plan", hint="plan again with --out")
    return next((plan for plan in report.plans if plan.card == card.name), report.plans[0])


def _own_card(plan: Plan) -> Card:
    return replace(custom_card(plan.capacity_bytes), name=plan.card)


def _anew(plan: Plan, pipeline: object, card: Card) -> Fingerprint | None:
    from ..offload.simulated.card import SimulatedCard
    from ..phases.hosts import host_as

    known = plan.fingerprint
    if known is None:
        return None
    host = host_as(known, pipeline, SimulatedCard(card))
    return Fingerprint.of(host, margin_bytes=known.margin_bytes, world_size=known.world_size)
