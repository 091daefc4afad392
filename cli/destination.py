"""The file that `--out` names: whole or untouched, whenever the program ends."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..offload.errors import InputError


@dataclass(frozen=True, slots=True)
class Destination:
    path: Path

    def check(self) -> None:
        """Raises InputError where it is plain beforehand that `write` would fail."""
        target = self._target
        directory = target.parent
        if target.exists() and not target.is_file():
            raise InputError(f"--out {self.path} is no file", hint="name a file, such as plan.json")
        if not directory.is_dir():
            raise InputError(
                f"--out {self.path} can't be written: there is no directory {directory}",
                hint="make the directory, or name another",
            )
        if not os.access(directory, os.W_OK | os.X_OK):
            raise InputError(
                f"--out {self.path} can't be written: {directory} may not be written to",
                hint="name a file in another directory",
            )

    def write(self, text: str) -> None:
        """Raises InputError."""
        from ..planner.journal.file import replace_file

        try:
            replace_file(self.path, text.encode())
        except OSError as error:
            raise InputError(
                f"--out {self.path} can't be written: {error.strerror}",
                hint="free the disk, or name a file in another directory",
            ) from error

    @property
    def _target(self) -> Path:
        """Links are followed, as they are in writing."""
        return Path(os.path.realpath(self.path))
