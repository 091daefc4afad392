"""The report of one planning run, for one card or several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from ..offload.errors import PlanFileError
from .plan import Plan
from .value import Value

FORMAT_VERSION: Literal[1] = 1


class Report(Value):
    format_version: Literal[1] = FORMAT_VERSION
    residency_version: str
    pipeline: str
    plans: tuple[Plan, ...]

    def to_json(self) -> str:
        return self.model_dump_json(indent=2) + "\n"

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
