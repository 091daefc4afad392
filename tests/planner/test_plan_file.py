"""The plan file: whole or untouched whatever happens while it is written, and what it holds for."""

import errno
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from journaling import FINGERPRINT, OTHER

from residency.offload.errors import PlanFileError, StalePlanError
from residency.offload.file import replace_file
from residency.phases.schedule import NOTHING
from residency.planner.fingerprint import Fingerprint
from residency.planner.plan import Plan, Report, Status
from residency.planner.planfile import read_report, write_report

OLD, NEW = b"old\n", b"new\n" * 10_000

WRITE_UNTIL_KILLED = """
import sys
from pathlib import Path
from residency.offload.file import replace_file
path = Path(sys.argv[1])
print("writes", flush=True)
while True:
    for letter in b"abc":
        replace_file(path, bytes([letter]) * 300_000)
"""


def plan(card: str, fingerprint: Fingerprint | None) -> Plan:
    return Plan(
        card=card,
        capacity_bytes=1,
        others_bytes=0,
        context_bytes=0,
        margin_bytes=0,
        status=Status.BASELINE_ONLY,
        components=(),
        shapes=(),
        schedule=NOTHING,
        uses=(),
        phases=(),
        attempts=(),
        infeasible=None,
        h2d_bytes_per_request=None,
        copy_bytes_per_s=1.0,
        copy_rate_source="assumed",
        sizing="declared",
        explanation=None,
        device=card,
        fingerprint=fingerprint,
    )


def report(*plans: Plan) -> Report:
    return Report(residency_version="0.1.0", pipeline="flux.1-dev", plans=plans)


def on_card(uuid: str, **others: object) -> Fingerprint:
    card = FINGERPRINT.card.model_copy(update={"uuid": uuid})
    return FINGERPRINT.model_copy(update={"card": card, **others})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_bytes(OLD)
    return path


def left_over(path: Path) -> list[str]:
    return [each.name for each in path.parent.iterdir() if each != path]


def test_a_report_is_read_with_its_fingerprint_as_it_was_written(tmp_path):
    made = report(plan("RTX 5090", FINGERPRINT))
    write_report(made, tmp_path / "plan.json")
    assert read_report(tmp_path / "plan.json") == made
    text = (tmp_path / "plan.json").read_text()
    assert '"driver": "570.86"' in text
    assert text.endswith("}\n")


def test_the_plan_of_the_same_fingerprint_is_found_among_several():
    first, second = on_card("GPU-1"), on_card("GPU-2")
    made = report(plan("one", first), plan("none", None), plan("two", second))
    assert made.plan_under(first, "plan.json").card == "one"
    assert made.plan_under(second, "plan.json").card == "two"


def test_a_stale_plan_is_refused_with_the_first_difference():
    with pytest.raises(
        StalePlanError, match=r"plan\.json .*driver was 570\.86, is 580\.95"
    ) as stale:
        report(plan("RTX 5090", FINGERPRINT)).plan_under(OTHER, "plan.json")
    assert stale.value.hint
    assert isinstance(stale.value, PlanFileError)


def test_a_stale_plan_is_compared_on_its_own_card_where_the_file_has_it():
    made = report(plan("one", on_card("GPU-1")), plan("two", on_card("GPU-2")))
    with pytest.raises(StalePlanError, match="margin was 268435456 bytes, is 1 bytes"):
        made.plan_under(on_card("GPU-2", margin_bytes=1), "plan.json")
    with pytest.raises(StalePlanError, match="UUID of the card was GPU-1, is GPU-3"):
        made.plan_under(on_card("GPU-3", margin_bytes=1), "plan.json")


@pytest.mark.parametrize("made", [report(), report(plan("RTX 5090", None))])
def test_a_plan_that_does_not_say_what_it_holds_for_is_stale(made):
    with pytest.raises(StalePlanError, match="doesn't say what its plans hold for"):
        made.plan_under(FINGERPRINT, "plan.json")


def test_a_file_is_replaced_by_the_whole_new_one(path):
    replace_file(path, NEW)
    assert path.read_bytes() == NEW
    assert left_over(path) == []


def test_the_new_file_is_on_disk_before_it_takes_the_name_and_the_name_before_the_return(
    path, monkeypatch
):
    steps: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def spied_fsync(file: int) -> None:
        found = os.fstat(file)
        if stat.S_ISDIR(found.st_mode):
            steps.append("fsync of the folder")
        else:
            steps.append(f"fsync of {found.st_size} bytes")
        fsync(file)

    def spied_replace(source: Path, target: Path) -> Path:
        steps.append("replace")
        return replace(source, target)

    monkeypatch.setattr(os, "fsync", spied_fsync)
    monkeypatch.setattr(Path, "replace", spied_replace)
    replace_file(path, NEW)
    assert steps == [f"fsync of {len(NEW)} bytes", "replace", "fsync of the folder"]


@pytest.mark.parametrize("call", ["write", "fsync", "fchmod"])
def test_a_full_disk_leaves_the_old_file(path, monkeypatch, call):
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path.chmod(0o640)
    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        with pytest.raises(OSError, match="No space left"):
            replace_file(path, NEW, mode=0o600 if call != "fchmod" else None)
    assert path.read_bytes() == OLD
    assert left_over(path) == []


def test_a_full_disk_is_a_plan_file_error_with_a_hint(path, monkeypatch):
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(PlanFileError, match=r"can't be written: No space left on device") as failed:
        write_report(report(), path)
    assert failed.value.hint
    assert path.read_bytes() == OLD


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder))
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("nothing may be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(("umount", folder), check=True)


def test_a_real_full_disk_leaves_the_old_file(small_disk):
    path = small_disk / "plan.json"
    replace_file(path, OLD)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"x" * (1 << 20))
    assert path.read_bytes() == OLD
    assert left_over(path) == []
    replace_file(path, b"small")
    assert path.read_bytes() == b"small"


def test_a_folder_that_cannot_be_written_leaves_the_old_file(small_disk):
    path = small_disk / "plan.json"
    replace_file(path, OLD)
    subprocess.run(("mount", "-o", "remount,ro", small_disk), check=True)
    with pytest.raises(PlanFileError, match="Read-only file system"):
        write_report(report(), path)
    assert path.read_bytes() == OLD


def test_a_writer_that_is_killed_leaves_one_whole_file(tmp_path):
    path = tmp_path / "plan.json"
    for _ in range(3):
        command = (sys.executable, "-c", WRITE_UNTIL_KILLED, str(path))
        with subprocess.Popen(command, text=True, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            for _ in range(200):
                if path.exists():
                    data = path.read_bytes()
                    assert data in (b"a" * 300_000, b"b" * 300_000, b"c" * 300_000)
            os.kill(writer.pid, signal.SIGKILL)
        if path.exists():
            assert {*path.read_bytes()} in ({97}, {98}, {99})
            assert path.stat().st_size == 300_000


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o660, 0o400])
def test_the_permissions_of_the_file_before_are_kept(path, mode):
    path.chmod(mode)
    replace_file(path, NEW)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_new_file_has_the_permissions_that_the_umask_leaves(tmp_path):
    before = os.umask(0o027)
    try:
        replace_file(tmp_path / "new", NEW)
        replace_file(tmp_path / "own", NEW, mode=0o600)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "own").stat().st_mode) == 0o600


def test_it_is_never_more_open_than_it_will_be(path, monkeypatch):
    path.chmod(0o600)
    seen: list[int] = []
    write = os.write

    def spied(file: int, data: bytes) -> int:
        seen.append(stat.S_IMODE(os.fstat(file).st_mode))
        return write(file, data)

    monkeypatch.setattr(os, "write", spied)
    replace_file(path, NEW)
    assert {*seen} == {0o600}


def test_a_link_is_followed_and_stays(path):
    link = path.with_name("link.json")
    link.symlink_to(path)
    replace_file(link, NEW)
    assert link.is_symlink()
    assert path.read_bytes() == NEW


def test_a_folder_that_cannot_be_flushed_by_its_file_system_is_no_error(path, monkeypatch):
    fsync = os.fsync

    def refuse(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(file)

    monkeypatch.setattr(os, "fsync", refuse)
    replace_file(path, NEW)
    assert path.read_bytes() == NEW


def test_a_folder_that_fails_to_be_flushed_is_an_error(path, monkeypatch):
    fsync = os.fsync

    def fail(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(file)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        replace_file(path, NEW)
