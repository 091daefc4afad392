"""What happens to a journal whose file, folder or disk isn't as it should be."""

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from journaling import DIGEST, FINGERPRINT, LARGE, OTHER, SMALL, commit, opened, written

from residency.offload.errors import JournalError
from residency.planner.journal.history import History
from residency.planner.journal.journal import Journal, read_records
from residency.planner.journal.record import JournalRecord

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return written(tmp_path_factory.mktemp("sample"))


def aside(path: Path) -> list[Path]:
    return sorted(path.parent.glob("journal.jsonl.corrupt-*"))


def histories(data: bytes) -> tuple[History, ...]:
    records, _ = read_records(data)
    return tuple(History.of(records, each.digest) for each in (FINGERPRINT, OTHER))


def test_a_journal_cut_off_at_any_byte_is_the_journal_of_the_records_before(path):
    opened(path.parent).begin(FINGERPRINT).intent(1, LARGE)
    commit(opened(path.parent).begin(FINGERPRINT), 1, SMALL)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    records = [JournalRecord.model_validate_json(line) for line in lines]
    assert [each.kind for each in records][:4] == ["begin", "intent", "crash", "begin"]
    assert histories(whole)[0] == History(crashed=(LARGE,), committed=SMALL)
    for number, line in enumerate(lines):
        before = b"".join(lines[:number])
        for cut in range(len(line)):
            found, whole_bytes = read_records(before + line[:cut])
            assert [*found] == records[:number]
            assert whole_bytes == len(before)
    assert read_records(whole) == (tuple(records), len(whole))


@pytest.mark.parametrize("share", [0.001, 0.3, 0.5, 0.77, 0.999])
def test_a_torn_last_line_is_cut_off_and_the_next_record_follows_the_last_whole_one(path, share):
    whole = written(path.parent)
    cut = round(share * len(whole))
    path.write_bytes(whole[:cut])
    last = whole[:cut].rfind(b"\n") + 1
    journal = Journal.open(path)
    assert path.read_bytes() == whole[:last]
    (warning,) = journal.warnings
    assert f"{cut - last} bytes of a torn last line" in warning
    assert journal.history(DIGEST) == histories(whole[:last])[0]
    commit(journal.begin(FINGERPRINT), 1, SMALL)
    assert Journal.open(path).history(DIGEST).committed == SMALL
    assert aside(path) == []


@pytest.mark.parametrize(
    "tail", [b"\0" * 4096, b"{}", b"{\n", b"\xff\n", b'{"format_version":2,"ki\n']
)
def test_a_last_line_that_is_no_json_is_cut_off(path, tail):
    whole = written(path.parent)
    path.write_bytes(whole + tail)
    journal = Journal.open(path)
    assert path.read_bytes() == whole
    assert len(journal.warnings) == 1
    assert aside(path) == []


def test_a_line_that_another_process_tore_is_cut_off_before_the_next_record(path):
    run = opened(path.parent).begin(FINGERPRINT)
    with path.open("ab") as file:
        file.write(b'{"format_version":2,"kind":"int')
    run.intent(1, LARGE)
    assert Journal.open(path).begin(FINGERPRINT).history == History(crashed=(LARGE,))
    assert aside(path) == []


def broken(whole: bytes, at: int, line: bytes) -> bytes:
    lines = whole.splitlines(keepends=True)
    lines[at] = line
    return b"".join(lines)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda whole: broken(whole, 2, b"garbage\n"), "line 3: JSON"),
        (lambda whole: broken(whole, 0, b"\n"), "line 1: JSON"),
        (lambda whole: broken(whole, 3, b"\xff\xfe\n"), "line 4"),
        (lambda whole: whole.replace(b'"intent"', b'"content"', 1), "line 2: kind"),
        (lambda whole: whole.replace(b'"pid"', b'"piD"', 1), "line 1: process.pid"),
        (
            lambda whole: whole.replace(b'"format_version":2', b'"format_version":1'),
            "line 1: format",
        ),
        (lambda whole: whole + b'{"format_version":1,"kind":"begin"}\n', "format_version"),
        (lambda whole: whole.replace(b'"format_version":2,', b"", 1), "line 1: format_version"),
        (lambda whole: whole + b"garbage\n" + b"{", "JSON"),
        (lambda whole: whole[:60] + b"\0" * 512 + whole[60:], "line 1"),
        (lambda whole: whole[5:], "line 1"),
        (lambda whole: b"\x89PNG\r\n\x1a\n" + whole, "line 1"),
        (lambda whole: b"\x89PNG", "line 1 doesn't begin as a record does"),
        (lambda whole: b"\0", "line 1 doesn't begin as a record does"),
        (lambda whole: b"[" * 100_000 + b"\n", "line 1"),
    ],
)
def test_a_damaged_journal_is_set_aside_whole_and_a_new_one_begun(path, damage, said):
    damaged = damage(written(path.parent))
    path.write_bytes(damaged)
    journal = Journal.open(path)
    (kept,) = aside(path)
    assert kept.read_bytes() == damaged
    assert path.read_bytes() == b""
    (warning,) = journal.warnings
    assert said in warning
    assert kept.name in warning
    commit(journal.begin(FINGERPRINT), 1, SMALL)
    assert Journal.open(path).history(DIGEST).committed == SMALL


def test_two_damaged_journals_of_one_second_are_both_kept(path):
    for text in (b"one", b"two", b"three"):
        path.write_bytes(text)
        Journal.open(path)
    assert sorted(each.read_bytes() for each in aside(path)) == [b"one", b"three", b"two"]


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.one_of(
        st.binary(max_size=400),
        st.lists(st.sampled_from([b"{", b"}", b"\n", b'"', b":", b"1", b"\0", b"null"])).map(
            b"".join
        ),
    ),
    st.booleans(),
)
def test_no_bytes_keep_a_journal_from_being_opened_and_written(tmp_path, sample, garbage, behind):
    path = tmp_path / "journal.jsonl"
    for each in (path, *aside(path)):
        each.unlink(missing_ok=True)
    whole = sample if behind else b""
    path.write_bytes(whole + garbage)
    journal = Journal.open(path)
    kept = b"".join(each.read_bytes() for each in aside(path))
    assert (kept or path.read_bytes()) in (whole + garbage, whole)
    if not kept:
        assert journal.history(DIGEST) == histories(whole)[0]
    before = path.read_bytes()
    journal.begin(OTHER).close()
    assert path.read_bytes().startswith(before)
    assert not Journal.open(path).warnings


def test_a_directory_in_its_place_is_an_error_with_a_hint(path):
    path.mkdir()
    with pytest.raises(JournalError, match="it is no file") as refused:
        Journal.open(path)
    assert refused.value.hint
    assert path.is_dir()


def test_a_pipe_in_its_place_is_an_error_and_is_not_waited_for(path):
    os.mkfifo(path)
    with pytest.raises(JournalError, match="it is no file"):
        Journal.open(path)


def test_a_file_where_a_folder_should_be_is_an_error_with_a_hint(tmp_path):
    (tmp_path / "folder").write_text("")
    with pytest.raises(JournalError, match="can't be opened") as refused:
        Journal.open(tmp_path / "folder" / "journal.jsonl")
    assert refused.value.hint


@pytest.mark.parametrize("fails_after_bytes", [0, 1, 100])
def test_a_record_that_does_not_fit_the_disk_leaves_no_trace(path, monkeypatch, fails_after_bytes):
    run = opened(path.parent).begin(FINGERPRINT)
    before = path.read_bytes()
    write = os.write

    def full(file: int, data: bytes) -> int:
        if os.fstat(file).st_size >= len(before) + fails_after_bytes:
            raise FULL
        return write(file, bytes(data)[:fails_after_bytes])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(JournalError, match="No space left on device") as refused:
            run.intent(1, LARGE)
        assert refused.value.hint
    assert path.read_bytes() == before
    run.applied(1)
    assert [each.kind for each in Journal.open(path).records()] == ["begin", "applied"]


def test_a_record_that_cannot_be_flushed_leaves_no_trace(path, monkeypatch):
    run = opened(path.parent).begin(FINGERPRINT)
    before = path.read_bytes()

    def fail(file: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(JournalError, match="Input/output error"):
            run.intent(1, LARGE)
    assert path.read_bytes() == before


def test_a_part_that_cannot_be_cut_off_either_is_cut_off_by_the_next_record(path, monkeypatch):
    run = opened(path.parent).begin(FINGERPRINT)
    write = os.write
    calls: list[int] = []

    def full(file: int, data: bytes) -> int:
        calls.append(file)
        if len(calls) > 1:
            raise FULL
        return write(file, bytes(data)[:50])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        patched.setattr(os, "ftruncate", lambda file, size: (_ for _ in ()).throw(FULL))
        with pytest.raises(JournalError, match="No space left"):
            run.intent(1, LARGE)
    run.intent(2, SMALL)
    journal = Journal.open(path)
    assert [each.attempt for each in journal.records()] == [None, 2]
    assert journal.warnings == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder), capture_output=True
    )
    if mounted.returncode:
        pytest.skip("nothing may be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(("umount", folder), check=True)


def test_on_a_disk_that_fills_up_every_record_that_was_promised_is_there(small_disk):
    run = opened(small_disk).begin(FINGERPRINT)
    promised = 0

    def fill() -> None:
        nonlocal promised
        for attempt in range(1, 1000):
            run.intent(attempt, LARGE)
            promised = attempt

    with pytest.raises(JournalError, match="No space left on device"):
        fill()
    assert promised > 10
    assert len(opened(small_disk).records()) == 1 + promised
    assert opened(small_disk).history(DIGEST).crashed == (LARGE,)


def test_in_a_folder_that_cannot_be_written_there_is_no_journal(small_disk):
    subprocess.run(("mount", "-o", "remount,ro", small_disk), check=True)
    with pytest.raises(JournalError, match="Read-only file system") as refused:
        opened(small_disk)
    assert refused.value.hint


def test_a_disk_that_turns_read_only_ends_a_run_with_an_error(small_disk):
    run = opened(small_disk).begin(FINGERPRINT)
    subprocess.run(("mount", "-o", "remount,ro", small_disk), check=True)
    with pytest.raises(JournalError, match="Read-only file system"):
        run.intent(1, LARGE)
