import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from journaling import (
    DIGEST,
    FINGERPRINT,
    LARGE,
    MEDIUM,
    OTHER,
    SMALL,
    commit,
    opened,
    refute,
    written,
)

from residency.offload.errors import JournalError
from residency.planner.journal.history import History
from residency.planner.journal.journal import Journal
from residency.planner.journal.record import Kind, ProcessRecord
from residency.planner.verdict import Verdict

BEGIN_AND_DIE = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from journaling import FINGERPRINT, LARGE, MEDIUM, refute
from residency.planner.journal.journal import Journal
run = Journal.open(Path(sys.argv[1])).begin(FINGERPRINT)
refute(run, 1, LARGE)
run.intent(2, MEDIUM)
run.applied(2)
os.kill(os.getpid(), signal.SIGKILL)
"""
APPEND = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from journaling import FINGERPRINT, LARGE, refute
from residency.planner.journal.journal import Journal
own = FINGERPRINT.model_copy(update={"driver": sys.argv[3]})
run = Journal.open(Path(sys.argv[1])).begin(own)
for attempt in range(1, 11):
    refute(run, attempt, LARGE)
run.close()
"""


def child(program: str, path: Path, *options: str) -> subprocess.Popen[str]:
    folder = str(Path(__file__).parent)
    command = (sys.executable, "-c", program, str(path), folder, *options)
    return subprocess.Popen(command, text=True, stderr=subprocess.PIPE)


def test_a_new_journal_is_made_with_its_folders_and_knows_nothing(tmp_path):
    journal = Journal.open(tmp_path / "a" / "b" / "journal.jsonl")
    assert journal.path.read_bytes() == b""
    assert journal.history(DIGEST) == History()
    assert journal.warnings == []


def test_each_step_is_a_line_that_says_who_did_what_with_what(tmp_path):
    journal = opened(tmp_path)
    run = journal.begin(FINGERPRINT)
    refute(run, 1, LARGE)
    commit(run, 2, SMALL)
    run.close()
    lines = [json.loads(line) for line in journal.path.read_text().splitlines()]
    assert [(line["kind"], line["attempt"]) for line in lines] == [
        ("begin", None),
        ("intent", 1),
        ("applied", 1),
        ("verdict", 1),
        ("rolled_back", 1),
        ("intent", 2),
        ("applied", 2),
        ("verdict", 2),
        ("committed", 2),
        ("end", None),
    ]
    assert {line["run"] for line in lines} == {run.name}
    assert {line["fingerprint"] for line in lines} == {DIGEST}
    assert {line["process"]["pid"] for line in lines} == {os.getpid()}
    assert {line["format_version"] for line in lines} == {2}
    assert all(line["time"].endswith("Z") for line in lines)
    assert lines[1]["candidate"]["uses"][0]["retained_set"] == "0-65"
    assert (lines[3]["verdict"], lines[3]["detail"]) == ("oom", "1.59 GiB short in vae_decode")


def test_what_a_run_came_to_is_known_to_the_next_under_the_same_fingerprint(tmp_path):
    run = opened(tmp_path).begin(FINGERPRINT)
    refute(run, 1, LARGE)
    commit(run, 2, SMALL)
    known = opened(tmp_path).begin(FINGERPRINT).history
    assert known == History(refuted=(LARGE,), committed=SMALL)
    assert opened(tmp_path).begin(OTHER).history == History()


def test_a_commit_can_be_taken_back_with_a_verdict(tmp_path):
    run = opened(tmp_path).begin(FINGERPRINT)
    commit(run, 1, SMALL)
    run.rolled_back(1, Verdict.OOM, "a request ran out of memory")
    assert opened(tmp_path).history(DIGEST) == History(refuted=(SMALL,))


def test_a_run_can_record_that_another_process_died_of_a_candidate(tmp_path):
    run = opened(tmp_path).begin(FINGERPRINT)
    run.intent(1, SMALL)
    run.crashed(1, "rank 3 was killed")
    assert opened(tmp_path).history(DIGEST) == History(crashed=(SMALL,))


def test_a_killed_process_leaves_a_crash_that_no_later_start_forgets(tmp_path):
    path = tmp_path / "journal.jsonl"
    killed = child(BEGIN_AND_DIE, path)
    _, complaints = killed.communicate(timeout=60)
    assert (killed.returncode, complaints) == (-9, "")
    for _ in range(3):
        run = Journal.open(path).begin(FINGERPRINT)
        assert run.history == History(crashed=(MEDIUM,), refuted=(LARGE,))
        run.close()
    crashes = [each for each in Journal.open(path).records() if each.kind is Kind.CRASH]
    (crash,) = crashes  # the first of the three wrote it, and the others found it
    assert crash.candidate == MEDIUM
    assert crash.attempt == 2
    assert crash.process == ProcessRecord.current()
    assert f"process {killed.pid} on " in (crash.detail or "")
    assert " ended after applied at 20" in (crash.detail or "")


def test_what_another_fingerprint_left_open_is_left_as_it_is(tmp_path):
    opened(tmp_path).begin(OTHER).intent(1, LARGE)
    opened(tmp_path).begin(FINGERPRINT)
    assert Kind.CRASH not in [each.kind for each in opened(tmp_path).records()]
    assert opened(tmp_path).begin(OTHER).history == History(crashed=(LARGE,))


def test_a_record_is_on_disk_before_the_call_returns(tmp_path, monkeypatch):
    run = opened(tmp_path).begin(FINGERPRINT)
    done: list[tuple[str, bytes]] = []
    write, fsync = os.write, os.fsync

    def spied_write(file: int, data: bytes) -> int:
        done.append(("write", bytes(data)))
        return write(file, data)

    def spied_fsync(file: int) -> None:
        if os.path.samestat(os.fstat(file), run.journal.path.stat()):
            done.append(("fsync", run.journal.path.read_bytes()))
        fsync(file)

    monkeypatch.setattr(os, "write", spied_write)
    monkeypatch.setattr(os, "fsync", spied_fsync)
    steps = [
        lambda: run.intent(1, LARGE),
        lambda: run.applied(1),
        lambda: run.verdict(1, Verdict.ACCEPTED),
        lambda: run.committed(1),
        lambda: run.rolled_back(1),
        lambda: run.crashed(1, "x"),
        lambda: run.close(),
    ]
    for step in steps:
        done.clear()
        step()
        appended = [(what, data) for what, data in done if b'"kind"' in data]
        assert [what for what, _ in appended] == ["write", "fsync"]
        assert appended[1][1].endswith(appended[0][1])
        assert appended[1][1] == run.journal.path.read_bytes()


def test_the_name_of_a_new_journal_is_on_disk_too(tmp_path, monkeypatch):
    synced: list[os.stat_result] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file)))
    opened(tmp_path)
    assert any(os.path.samestat(each, tmp_path.stat()) for each in synced)


def test_processes_append_at_the_same_time_and_no_record_is_lost(tmp_path):
    path = tmp_path / "journal.jsonl"
    children = [child(APPEND, path, f"driver {number}") for number in range(3)]
    run = Journal.open(path).begin(FINGERPRINT)
    for attempt in range(1, 21):
        refute(run, attempt, SMALL)
    assert [each.communicate(timeout=60)[1] for each in children] == ["", "", ""]
    journal = Journal.open(path)
    records = journal.records()
    assert journal.warnings == []
    assert sum(each.fingerprint == DIGEST for each in records) == 1 + 20 * 4
    per_run = {
        name: [e.kind for e in records if e.run == name] for name in {e.run for e in records}
    }
    assert sorted(map(len, per_run.values())) == [42, 42, 42, 81]
    assert journal.history(DIGEST) == History(refuted=(SMALL,))


def test_an_attempt_is_announced_once(tmp_path):
    run = opened(tmp_path).begin(FINGERPRINT)
    run.intent(1, LARGE)
    with pytest.raises(AssertionError, match="announced twice"):
        run.intent(1, SMALL)


def test_a_start_costs_a_few_kilobytes(tmp_path):
    journal = opened(tmp_path)
    run = journal.begin(FINGERPRINT)
    run.close()
    begun_bytes = journal.path.stat().st_size
    refute(run, 1, LARGE)
    assert begun_bytes < 1000
    assert journal.path.stat().st_size - begun_bytes < 4 * 1200


def test_a_large_journal_is_cut_down_to_what_is_known(tmp_path):
    before = written(tmp_path)
    known = [opened(tmp_path).history(each.digest) for each in (FINGERPRINT, OTHER)]
    for _ in range(5):
        run = opened(tmp_path).begin(FINGERPRINT)
        refute(run, 1, LARGE)
        run.close()
    grown = (tmp_path / "journal.jsonl").stat().st_size
    journal = Journal.open(tmp_path / "journal.jsonl", max_bytes=grown - 1)
    assert journal.path.stat().st_size < len(before)
    assert [journal.history(each.digest) for each in (FINGERPRINT, OTHER)] == known
    assert journal.warnings == []
    untouched = journal.path.stat()
    Journal.open(journal.path, max_bytes=grown)
    assert journal.path.stat() == untouched
    assert Journal.open(journal.path).begin(FINGERPRINT).history == known[0]


def test_a_run_whose_journal_was_cut_down_meanwhile_goes_on(tmp_path):
    run = opened(tmp_path).begin(FINGERPRINT)
    run.intent(1, LARGE)
    Journal.open(tmp_path / "journal.jsonl", max_bytes=0)
    run.verdict(1, Verdict.ACCEPTED)
    run.committed(1)
    assert opened(tmp_path).history(DIGEST) == History(committed=LARGE)


def test_a_run_whose_journal_was_deleted_goes_on_in_a_new_one(tmp_path):
    run = opened(tmp_path).begin(FINGERPRINT)
    (tmp_path / "journal.jsonl").unlink()
    run.intent(1, LARGE)
    assert opened(tmp_path).history(DIGEST) == History(crashed=(LARGE,))


def test_a_lock_that_stays_taken_is_an_error_that_names_it(tmp_path, monkeypatch):
    from filelock import FileLock

    monkeypatch.setattr("residency.planner.journal.journal.LOCK_TIMEOUT_S", 0.0)
    journal = opened(tmp_path)
    with FileLock(f"{journal.path}.lock"), pytest.raises(JournalError, match="was held by") as held:
        journal.records()
    assert held.value.hint


def test_the_journal_imports_no_torch():
    code = "import residency.planner.journal.journal, sys; print('torch' in sys.modules)"
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False\n", "")
