"""What a start comes to where its disk is full or read-only, or its journal isn't one."""

import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from journaling import record
from settling import Server, Settling, open_attempts

from residency.planner.journal.record import Kind

long = pytest.mark.long
PAGE_BYTES = 4096
RECORDS = 6
"""Of a start whose first candidate is committed, and of one that verifies."""


@contextmanager
def disk(folder: Path, pages: int) -> Iterator[Path]:
    """A file system of so many pages."""
    folder.mkdir()
    size = f"size={pages * PAGE_BYTES}"
    mounted = subprocess.run(
        ("mount", "-t", "tmpfs", "-o", size, "tmpfs", folder), capture_output=True
    )
    if mounted.returncode:
        pytest.skip("nothing may be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(("umount", folder), check=True)


def fill(folder: Path) -> Path:
    """A file that takes all that is free."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * PAGE_BYTES)
        except OSError:
            return filler


def padding(nbytes: int) -> bytes:
    """A record of another run, so long."""
    least = record(Kind.BEGIN, attempt=None, fingerprint="0" * 16, detail="").to_line()
    assert nbytes >= len(least)
    detail = "x" * (nbytes - len(least))
    return record(Kind.BEGIN, attempt=None, fingerprint="0" * 16, detail=detail).to_line()


def is_at_baseline(server: Server, **job: object) -> list[str]:
    """A start serves with nothing retained. Its warnings."""
    start = server.start(**job)
    settled = start.settled
    assert (settled["status"], settled["retained"]) == ("baseline_only", [])
    server.check_served(start)
    server.check_put_back(start)
    server.check_journal()
    warnings: list[str] = settled["warnings"]
    return warnings


@pytest.mark.parametrize(
    "number", [1, pytest.param(2, marks=long), 3, pytest.param(4, marks=long), 5, 6]
)
def test_where_a_record_does_not_fit_the_disk_the_baseline_is_served(
    settling: Settling, committed: Server, tmp_path: Path, number: int
) -> None:
    """The disk is full in the middle of one record, and from then on."""
    lengths = [len(line) + 1 for line in committed.journal.read_bytes().splitlines()]
    assert len(lengths) == RECORDS
    before = sum(lengths[: number - 1]) + lengths[number - 1] // 2
    with disk(tmp_path / "disk", pages=3) as folder:
        server = settling.server()
        server.journal = folder / "journal"
        server.journal.write_bytes(padding(2 * PAGE_BYTES - before))
        filler = fill(folder)
        if number == RECORDS:
            start = server.start()
            assert start.settled["status"] == "committed"
            plan, end = start.settled["warnings"]
            assert "the next start has to search" in plan
            assert "can't be written: No space left on device" in end
        else:
            warning = is_at_baseline(server)[-1]
            assert "nothing is " in warning
            assert "can't be written: No space left on device" in warning
        known = [each for each in server.kinds() if each != "end"]  # which is short, and may fit
        assert len(known) == 1 + number - 1
        left = open_attempts(server.records())
        assert bool(left) == (number in (3, 4, 5)), "the safe side: it is taken for a crash"
        filler.unlink()
        assert server.boots().settled["status"] == "committed"


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=() if n in (2, 5) else long) for n in range(1, RECORDS)]
)
def test_where_a_record_of_a_verification_does_not_fit_the_baseline_is_served(
    settling: Settling, committed: Server, number: int
) -> None:
    server = settling.server(like=committed)
    warnings = is_at_baseline(server, appends=number, where="full")
    assert "nothing is " in warnings[-1]
    assert "No space left on device" in warnings[-1]
    assert len(server.records()) == RECORDS + number - 1
    assert server.boots().settled["status"] == "committed"


def test_on_a_read_only_disk_the_baseline_is_served_and_the_plan_kept(
    settling: Settling, committed: Server, tmp_path: Path
) -> None:
    with disk(tmp_path / "disk", pages=16) as folder:
        server = settling.server(like=committed)
        for path in (server.journal, server.plan_file):
            (folder / path.name).write_bytes(path.read_bytes())
        server.journal = folder / "journal"
        subprocess.run(("mount", "-o", "remount,ro", folder), check=True)
        (warning,) = is_at_baseline(server)
        assert "nothing is tried without the journal" in warning
        assert "Read-only file system" in warning
        subprocess.run(("mount", "-o", "remount,rw", folder), check=True)
        assert server.boots().settled["verified"]


def test_in_a_read_only_folder_without_a_journal_the_baseline_is_served(
    settling: Settling, tmp_path: Path
) -> None:
    with disk(tmp_path / "disk", pages=16) as folder:
        server = settling.server()
        server.journal = folder / "below" / "journal"
        subprocess.run(("mount", "-o", "remount,ro", folder), check=True)
        (warning,) = is_at_baseline(server)
        assert "Read-only file system" in warning


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "random bytes": lambda whole: random.Random(1).randbytes(len(whole)),
    "zeros": lambda whole: bytes(len(whole)),
    "JSON of something else": lambda whole: b'{"name": "residency", "version": 1}\n',
    "a plan": lambda whole: b'{\n  "format_version": 2,\n  "plans": []\n}\n',
    "another format version": lambda whole: whole.replace(b'version":2', b'version":9'),
    "cut off in front": lambda whole: whole[random.Random(2).randrange(1, 200) :],
    "a hole": lambda whole: whole[:700] + bytes(300) + whole[1000:],
}


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(name, marks=() if name in ("zeros", "another format version") else long)
        for name in DAMAGES
    ],
)
def test_a_journal_that_is_none_is_set_aside_and_the_server_starts_as_if_new(
    settling: Settling, committed: Server, damage: str
) -> None:
    server = settling.server(like=committed)
    damaged = DAMAGES[damage](server.journal.read_bytes())
    server.journal.write_bytes(damaged)
    start = server.start()
    assert start.settled["status"] == "committed"
    assert not start.settled["verified"]
    (warning,) = start.settled["warnings"]
    (aside,) = server.folder.glob("journal.corrupt-*")
    assert f"it was set aside as {aside.name}" in warning
    assert aside.read_bytes() == damaged


def test_a_plan_file_that_is_none_is_searched_for_anew(
    settling: Settling, committed: Server
) -> None:
    server = settling.server(like=committed)
    server.plan_file.write_bytes(random.Random(4).randbytes(5000))
    start = server.boots()
    assert not start.settled["verified"]
    assert "searched for anew" in start.settled["warnings"][0]
    assert server.boots().settled["verified"]
