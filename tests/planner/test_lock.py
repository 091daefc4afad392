import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pydantic import ValidationError

from residency.offload.errors import LockedError
from residency.planner.journal.lock import Holder, PlannerLock
from residency.planner.journal.record import ProcessRecord

UUID = "GPU-1b2c"
HOLD = """
import os, sys
from pathlib import Path
from residency.planner.journal.lock import PlannerLock
with PlannerLock(sys.argv[1], Path(sys.argv[2])):
    forked = bool(sys.argv[3:]) and os.fork() == 0
    if forked or not sys.argv[3:]:
        print("holds", flush=True)
    sys.stdin.read()
    if forked:
        os._exit(0)
"""
TAKE_IN_TURNS = """
import sys, time
from pathlib import Path
from residency.planner.journal.lock import PlannerLock
inside = Path(sys.argv[2]) / "inside"
for _ in range(5):
    with PlannerLock(sys.argv[1], Path(sys.argv[2]), timeout_s=600):
        inside.touch(exist_ok=False)
        time.sleep(0.002)
        inside.unlink()
"""


@contextmanager
def holder(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock, until its stdin is closed."""
    command = (sys.executable, "-c", HOLD, UUID, str(folder), *options)
    with subprocess.Popen(
        command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_second_planner_is_told_who_the_first_is(tmp_path):
    with holder(tmp_path) as other:
        with pytest.raises(LockedError) as locked, PlannerLock(UUID, tmp_path):
            pytest.fail("both are inside")
        assert locked.value.message.startswith(
            f"{UUID} is being planned on: by process {other.pid}"
        )
        assert f"(python{sys.version_info[0]}" in locked.value.message.replace(
            Path(sys.executable).name, "python3"
        )
        assert " UTC" in locked.value.message
        assert locked.value.hint


def test_another_card_is_another_lock(tmp_path):
    with holder(tmp_path), PlannerLock("GPU-other", tmp_path):
        pass


def test_a_killed_holder_holds_no_longer(tmp_path):
    with holder(tmp_path) as other:
        other.kill()
        other.wait()
        assert PlannerLock(UUID, tmp_path).note.exists()
        with PlannerLock(UUID, tmp_path) as lock:
            mine = lock.holder()
            assert mine is not None
            assert mine.process == ProcessRecord.current()


def test_a_process_that_a_killed_holder_forked_does_not_hold_on(tmp_path):
    with holder(tmp_path, "fork") as other:
        os.kill(other.pid, signal.SIGKILL)
        os.waitpid(other.pid, 0)
        with PlannerLock(UUID, tmp_path):
            pass


def test_an_orderly_exit_leaves_neither_lock_nor_note(tmp_path):
    with PlannerLock(UUID, tmp_path) as lock:
        assert lock.note.exists()
    assert not lock.note.exists()
    with holder(tmp_path) as other:
        other.communicate()
    with PlannerLock(UUID, tmp_path):
        pass


def test_the_lock_is_free_after_an_error_inside(tmp_path):
    with pytest.raises(KeyError), PlannerLock(UUID, tmp_path):
        raise KeyError
    with PlannerLock(UUID, tmp_path):
        pass


def test_waiting_gets_the_lock_when_it_is_free(tmp_path):
    with holder(tmp_path) as other:
        waiting = PlannerLock(UUID, tmp_path, timeout_s=600)
        assert other.stdin is not None
        other.stdin.close()
        with waiting:
            pass


def test_waiting_in_vain_says_how_long(tmp_path):
    with holder(tmp_path), pytest.raises(LockedError, match=r"for the 0\.05 s waited: by process"):
        PlannerLock(UUID, tmp_path, timeout_s=0.05).acquire()


def test_planners_of_one_process_exclude_one_another_too(tmp_path):
    with PlannerLock(UUID, tmp_path) as lock:
        for again in (lock, PlannerLock(UUID, tmp_path)):
            with pytest.raises(LockedError, match=f"process {os.getpid()} "):
                again.acquire()
        assert lock.note.exists()
    with lock:
        pass


def test_many_planners_are_never_inside_together(tmp_path):
    command = (sys.executable, "-c", TAKE_IN_TURNS, UUID, str(tmp_path))
    children = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    assert [each.communicate(timeout=600)[1] for each in children] == [""] * 3


def test_the_note_is_its_users_alone_and_names_no_arguments(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["serve.py", "--token=secret"])
    with PlannerLock(UUID, tmp_path) as lock:
        assert stat.S_IMODE(lock.note.stat().st_mode) == 0o600
        assert json.loads(lock.note.read_text())["program"].endswith(" serve.py")


NOTES = {
    "empty": "",
    "garbage": "garbage",
    "no note": "{}",
    "before the reboot": Holder(
        process=ProcessRecord.current().model_copy(update={"boot": "another"}),
        program="python serve.py",
        since="2026-01-02T03:04:05Z",
    ).model_dump_json(),
    "ended": Holder(
        process=ProcessRecord.current().model_copy(update={"pid": 2**22 + 1}),
        program="python serve.py",
        since="2026-01-02T03:04:05Z",
    ).model_dump_json(),
}


def test_a_note_that_is_not_the_holders_names_nobody(tmp_path):
    with holder(tmp_path):
        lock = PlannerLock(UUID, tmp_path)
        for what, text in NOTES.items():
            lock.note.write_text(text)
            with pytest.raises(LockedError) as locked:
                lock.acquire()
            assert "by a process that left no note" in locked.value.message, what


def test_a_process_of_another_host_may_be_alive():
    away = ProcessRecord(pid=2**22 + 1, host="node7", boot="another")
    assert away.may_be_alive
    assert ProcessRecord.current().may_be_alive


def test_a_disk_that_has_no_room_for_the_note_has_room_for_the_lock(tmp_path, monkeypatch):
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("residency.planner.journal.lock.replace_file", full)
    lock = PlannerLock(UUID, tmp_path)
    lock.note.write_text("of the holder before")
    with lock:
        assert not lock.note.exists()
        with pytest.raises(LockedError, match="by a process that left no note"):
            PlannerLock(UUID, tmp_path).acquire()


def test_the_folder_is_the_users_runtime_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with PlannerLock(UUID) as lock:
        assert lock.path == tmp_path / "residency" / f"{UUID}.lock"
        assert stat.S_IMODE(lock.folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("runtime", [None, "", "/nonexistent"])
def test_without_a_runtime_folder_it_is_one_of_the_users_own(tmp_path, monkeypatch, runtime):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    if runtime is not None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with PlannerLock(UUID) as lock:
        assert lock.folder == tmp_path / f"residency-{os.getuid()}"
        assert stat.S_IMODE(lock.folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("what", ["writable for others", "a link", "another user's"])
def test_a_folder_that_another_user_may_have_made_is_refused(tmp_path, monkeypatch, what):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / f"residency-{os.getuid()}"
    if what == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir(mode=0o700)
    if what == "writable for others":
        folder.chmod(0o777)
    if what == "another user's":
        if os.getuid():
            pytest.skip("only root can make a folder another user's")
        os.chown(folder, 12345, -1)
    with pytest.raises(LockedError, match="isn't this user's alone") as refused:
        PlannerLock(UUID).acquire()
    assert refused.value.hint


def test_a_name_that_is_no_file_name_makes_one(tmp_path):
    with PlannerLock("MIG-GPU/../x y", tmp_path) as lock:
        assert lock.path.parent == tmp_path
        assert lock.path.name == "MIG-GPU____x_y.lock"


def test_a_folder_that_cannot_be_made_is_an_error_with_a_hint(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LockedError, match="can't be locked") as refused:
        PlannerLock(UUID, tmp_path / "file").acquire()
    assert refused.value.hint


def test_a_holder_is_read_as_it_was_written():
    mine = Holder.current()
    assert Holder.model_validate_json(mine.model_dump_json()) == mine
    with pytest.raises(ValidationError):
        Holder.model_validate_json("{}")
