"""A file that is replaced as a whole: as it was or as it is to be, whenever a process ends."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EINVAL, ENOTSUP
from pathlib import Path
from secrets import token_hex


def replace_file(path: Path, data: bytes, *, mode: int | None = None) -> None:
    """Put `data` in `path`, durably before this returns. Links are followed.

    The permissions are `mode`, else those of the file that is replaced, else as the umask has it.
    Raises OSError; then the file is what it was, unless only its folder could not be flushed.
    """
    target = Path(os.path.realpath(path))
    partial = target.with_name(f".residency-{os.getpid()}-{token_hex(4)}.partial")
    if mode is None and target.exists():
        mode = stat.S_IMODE(target.stat().st_mode)
    try:
        with _created(partial, 0o666 if mode is None else mode & 0o600) as file:
            write_all(file, data)
            if mode is not None and sys.platform != "win32":
                _set_mode(file, mode)
            os.fsync(file)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(target.parent)


def write_all(file: int, data: bytes) -> None:
    """Raises OSError, having written any part of it."""
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable, where its file system can. Raises OSError."""
    if sys.platform == "win32":  # a folder can't be opened there, and its names are journaled
        return
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in (EINVAL, ENOTSUP):
            raise
    finally:
        os.close(file)


def _set_mode(file: int, mode: int) -> None:
    # Only where it differs: some file systems have one mode for all files, and refuse to set it.
    if stat.S_IMODE(os.fstat(file).st_mode) != mode:
        os.fchmod(file, mode)


@contextmanager
def _created(path: Path, mode: int) -> Iterator[int]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
    file = os.open(path, flags | getattr(os, "O_BINARY", 0), mode)
    try:
        yield file
    finally:
        os.close(file)
