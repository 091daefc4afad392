"""What a run of the report found: the file that is kept, and the text that a person reads."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

FORMAT_VERSION = 1


class Status(StrEnum):
    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class PartResult:
    name: str
    status: Status
    seconds: float
    """Of the wall, with the start of the part's own process."""
    numbers: dict[str, Any]
    """As far as the part came. `_bytes` and `_s` are bytes and seconds, as everywhere."""
    error: str | None = None
    """Why it failed or was skipped."""


@dataclass(frozen=True, slots=True)
class Results:
    device: str
    """As asked for: `cuda:0`, or `simulated`."""
    card: str | None
    """None where no part came so far as to read it, as are the next two."""
    driver: str | None
    torch: str | None
    python: str
    date: str
    """In UTC, when the run began."""
    missing: tuple[str, ...]
    """Packages that some part needs, and that can't be imported."""
    parts: tuple[PartResult, ...]
    format_version: int = FORMAT_VERSION

    @property
    def passed(self) -> bool:
        return all(part.status is not Status.FAILED for part in self.parts)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    def write(self, path: Path) -> None:
        """In one step: who reads `path` sees the results before or these."""
        beside = path.with_name(f"{path.name}.part")
        beside.write_text(self.to_json(), encoding="utf-8")
        beside.replace(path)

    @classmethod
    def read(cls, path: Path) -> Results:
        """Raises ValueError for another format version."""
        found = json.loads(path.read_text(encoding="utf-8"))
        if found.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"{path} has format version {found.get('format_version')}, and {FORMAT_VERSION} is "
                "what is read here"
            )
        parts = tuple(
            PartResult(**{**part, "status": Status(part["status"])}) for part in found.pop("parts")
        )
        return cls(**{**found, "missing": tuple(found["missing"]), "parts": parts})

    def text(self) -> str:
        """A line for each part, and under it its numbers."""
        lines = [
            f"{self.card or 'a card that was not read'}, driver {self.driver or 'none'}, "
            f"torch {self.torch or 'not read'}, python {self.python}, {self.date}"
        ]
        if self.missing:
            lines.append(f"missing: {', '.join(self.missing)}")
        for part in self.parts:
            lines.append(f"\n{part.name:<14} {part.status:<8} {part.seconds:>6.1f} s")
            lines += [f"  {name:<46} {value}" for name, value in _flat(part.numbers)]
            if part.error is not None:
                lines += [f"  | {line}" for line in part.error.rstrip().splitlines()]
        counts = [sum(part.status is status for part in self.parts) for status in Status]
        told = ", ".join(f"{count} {status}" for count, status in zip(counts, Status, strict=True))
        return "\n".join([*lines, f"\n{told}"])


def _flat(value: Any, name: str = "") -> list[tuple[str, str]]:
    """Names and values, a line for each; bytes and seconds in units that can be read."""
    if isinstance(value, dict):
        inner = [_flat(each, f"{name}.{key}" if name else key) for key, each in value.items()]
        return [line for lines in inner for line in lines]
    if isinstance(value, list) and any(isinstance(each, dict | list) for each in value):
        inner = [_flat(each, f"{name}[{i}]") for i, each in enumerate(value)]
        return [line for lines in inner for line in lines]
    if isinstance(value, list):
        return [(name, ", ".join(_said(name, each) for each in value) or "none")]
    return [(name, _said(name, value))]


def _said(name: str, value: Any) -> str:
    if isinstance(value, bool | str) or value is None:
        return {True: "yes", False: "no", None: "not known"}.get(value, str(value))
    words = name.split(".")
    if name.endswith("bytes_per_s"):
        return f"{value / 1e9:.3f} GB/s"
    if any(word.endswith("_bytes") for word in words):
        return f"{value / (1 << 30):.3f} GiB" if abs(value) >= 1 << 27 else f"{value} B"
    if name.endswith("_s"):
        return f"{value:.6f} s" if abs(value) < 0.1 else f"{value:.3f} s"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
