"""One planner at a time on one card.

The lock is the operating system's, on a file in a folder of the user's own: it ends with the
process, however that ends, and isn't inherited by those that it forks. Not excluded are planners
that don't share the folder or its locks: those of other users, in containers without a common
folder, on hosts that share a folder whose file system has no locks between hosts, and of the same
user with another XDG_RUNTIME_DIR or TMPDIR. Name one folder for all of them where that matters.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
import tempfile
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from filelock import FileLock, Timeout
from pydantic import AwareDatetime, ValidationError

from ...offload.errors import LockedError
from ...offload.file import replace_file
from ...phases.schedule import Value
from .record import ProcessRecord


class Holder(Value):
    """The note beside a lock, by whoever holds it."""

    process: ProcessRecord
    program: str
    """Without its arguments, which may hold secrets."""
    since: AwareDatetime
    """In UTC."""

    def __str__(self) -> str:
        return (
            f"process {self.process.pid} ({self.program}) on {self.process.host}, "
            f"since {self.since:%Y-%m-%d %H:%M:%S} UTC"
        )

    @classmethod
    def current(cls) -> Holder:
        return cls(
            process=ProcessRecord.current(),
            program=f"{Path(sys.executable).name} {sys.argv[0]}",
            since=datetime.now(UTC),
        )


class PlannerLock:
    """`with PlannerLock(device.identity.uuid):` no other planner with the same folder is inside.

    Entering waits for `timeout_s` at most, and raises LockedError where another one stays inside,
    also one of this process, or where there can be no lock in the folder.
    """

    def __init__(self, uuid: str, folder: Path | None = None, *, timeout_s: float = 0.0) -> None:
        self.uuid = uuid
        self.timeout_s = timeout_s
        self._named = folder is not None
        self.folder = _default_folder() if folder is None else folder
        self.path = self.folder / f"{re.sub(r'[^A-Za-z0-9_-]', '_', uuid) or 'card'}.lock"
        self.note = self.path.with_suffix(".json")
        self._lock = FileLock(self.path, thread_local=False)

    def acquire(self) -> None:
        try:
            self.folder.mkdir(mode=0o777 if self._named else 0o700, parents=True, exist_ok=True)
            if not self._named:
                _check_private(self.folder)
            if self._lock.is_locked:
                raise Timeout(str(self.path))
            self._lock.acquire(timeout=max(self.timeout_s, 0))
        except Timeout:
            raise self._locked() from None
        except OSError as error:
            raise LockedError(
                f"{self.path} can't be locked: {error.strerror or error}",
                hint="name a folder that this user can write",
            ) from error
        # The note is for people: the lock holds without it.
        with suppress(OSError):
            self.note.unlink(missing_ok=True)
            replace_file(self.note, Holder.current().model_dump_json().encode(), mode=0o600)

    def release(self) -> None:
        with suppress(OSError):
            self.note.unlink(missing_ok=True)
        self._lock.release()

    def holder(self) -> Holder | None:
        """Who has left a note; None where nobody has, or whoever did has ended."""
        try:
            found = Holder.model_validate_json(self.note.read_bytes())
        except (OSError, ValidationError):
            return None
        return found if found.process.may_be_alive else None

    def _locked(self) -> LockedError:
        waited = f", and was for the {self.timeout_s:g} s waited" if self.timeout_s > 0 else ""
        return LockedError(
            f"{self.uuid} is being planned on{waited}: "
            f"by {self.holder() or 'a process that left no note'}",
            hint="wait until it is done, or end it: two planners would measure one another",
        )

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


def _default_folder() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "residency"
    user = os.getuid() if sys.platform != "win32" else "user"
    return Path(tempfile.gettempdir()) / f"residency-{user}"


def _check_private(folder: Path) -> None:
    """In a folder that anybody may write to, another user may have been first.

    Raises PermissionError.
    """
    if sys.platform == "win32":
        return
    found = folder.lstat()
    private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o022
    if not private or found.st_uid != os.getuid():
        raise PermissionError(
            errno.EPERM, f"{folder} isn't this user's alone: its owner is {found.st_uid}"
        )
