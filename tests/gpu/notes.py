"""What a part notes while it runs. Each note is in the file at once, so none is lost with it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class UnmetError(Exception):
    """A part ran to its end, and a criterion isn't met."""


class Notes:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._unmet: list[str] = []

    def note(self, name: str, value: Any) -> None:
        """`value` is of what JSON can hold."""
        self._write({"name": name, "value": value})

    def machine(self, card: str, driver: str | None, torch: str) -> None:
        self._write({"machine": {"card": card, "driver": driver, "torch": torch}})

    def require(self, holds: bool, criterion: str) -> None:
        """Where it doesn't hold the part goes on, to note what else there is, and fails."""
        if not holds:
            self._unmet.append(criterion)

    def end(self) -> None:
        """Raises UnmetError with all that isn't met."""
        if self._unmet:
            raise UnmetError("; ".join(self._unmet))
        self._write({"ended": True})

    def failed(self, error: str) -> None:
        self._write({"failed": error})

    def _write(self, record: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


@dataclass
class Read:
    """Notes as they were found once their part had ended, or was ended."""

    numbers: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, str | None] = field(default_factory=dict)
    ended: bool = False
    failed: str | None = None

    @property
    def is_done(self) -> bool:
        return self.ended or self.failed is not None

    @classmethod
    def of(cls, path: Path) -> Read:
        read = cls()
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:  # the last line, of a process that was killed
                continue
            if "name" in record:
                read.numbers[record["name"]] = record["value"]
            read.machine |= record.get("machine", {})
            read.ended = read.ended or record.get("ended", False)
            read.failed = record.get("failed", read.failed)
        return read
