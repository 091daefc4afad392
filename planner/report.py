"""The report of one planning run, for one card or several; on disk it is the plan file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from ..offload.errors import PlanFileError, StalePlanError
from .journal.file import replace_file
from .plan import Plan
from .planfile.fingerprint import Fingerprint
from .value import Value

FORMAT_VERSION: Literal[2] = 2


class Report(Value):
    format_version: Literal[2] = FORMAT_VERSION
    residency_version: str
    pipeline: str
    plans: tuple[Plan, ...]

    def to_json(self) -> str:
        return self.model_dump_json(indent=2) + "\n"

    def write(self, path: Path) -> None:
        """Put the report in `path`, which is whole or untouched whenever the process ends.

        Raises PlanFileError.
        """
        try:
            replace_file(path, self.to_json().encode())
        except OSError as error:
            raise PlanFileError(
                f"{path} can't be written: {error.strerror}",
                hint="free the disk, or name a file in another directory",
            ) from error

    def plan_under(self, fingerprint: Fingerprint, source: str) -> Plan:
        """The plan that was made under `fingerprint`. `source` names the report in messages.

        Raises StalePlanError with the first difference: to the plan for the same card if there is
        one, else to the first plan.
        """
        made = [(plan, plan.fingerprint) for plan in self.plans if plan.fingerprint is not None]
        if not made:
            raise StalePlanError(
                f"{source} doesn't say what its plans hold for", hint="plan again on this machine"
            )
        made.sort(key=lambda each: each[1].card != fingerprint.card)
        for plan, known in made:
            if known == fingerprint:
                return plan
        difference = made[0][1].first_difference(fingerprint)
        raise StalePlanError(
            f"{source} was planned under another fingerprint: {difference}",
            hint="plan again; what an old plan retains was proved for what was there then",
        )

    @classmethod
    def read(cls, path: Path) -> Report:
        """Raises PlanFileError where `path` holds no report of this format version."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanFileError(
                f"{path} can't be read: {error}", hint="name a file that --out wrote"
            ) from error
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, source: str) -> Report:
        """Raises PlanFileError. `source` names the text in messages."""
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanFileError(
                f"{source} is no JSON: {error}", hint="name a file that --out wrote"
            ) from error
        version = found.get("format_version") if isinstance(found, dict) else None
        if version != FORMAT_VERSION:
            raise PlanFileError(
                f"{source} has format version {version!r}, this residency reads {FORMAT_VERSION}",
                hint="plan again with `residency plan … --out`",
            )
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise PlanFileError(
                f"{source} is no report: {where}: {first['msg']}",
                hint="plan again with `residency plan … --out`",
            ) from error
