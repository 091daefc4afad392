"""The program as a process of its own: what it imports, its streams and how it ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from canned import COMMITTED, REFUTED, report

PROGRAM = (sys.executable, "-m", "residency.cli.main")
HEAVY = ("torch", "networkx", "diffusers", "transformers", "numpy")
REPORT_IMPORTS = """
import sys
from residency.cli.main import main
try:
    main()
finally:
    print(*sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""


def imported_by(*arguments: str) -> set[str]:
    command = (sys.executable, "-c", REPORT_IMPORTS, *arguments)
    done = subprocess.run(command, capture_output=True, text=True)
    return {*done.stderr.splitlines()[-1].split()}


@pytest.fixture
def saved(tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    path.write_text(report(COMMITTED, REFUTED).to_json(), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("plan", "--help"),
        ("explain", "--help"),
        ("--version",),
        ("cards",),
        ("plan", "qwen-image-2.1", "--card", "RTX 9999"),
        ("plan", "qwen-image-2.1", "--card", "RTX 4090", "--shape", "8x8"),
    ],
    ids=" ".join,
)
def test_nothing_heavy_is_imported_before_there_is_something_to_plan(arguments: tuple[str, ...]):
    assert not imported_by(*arguments).intersection(HEAVY)


@pytest.mark.parametrize("command", ["show", "explain"])
def test_showing_a_plan_imports_nothing_heavy(saved: str, command: str):
    assert not imported_by(command, saved).intersection(HEAVY)


@pytest.mark.parametrize("command", ["--help", "plan", "show", "explain", "cards"])
def test_every_help_states_the_exit_codes(command: str):
    arguments = (command,) if command == "--help" else (command, "--help")
    text = subprocess.run((*PROGRAM, *arguments), capture_output=True, text=True).stdout
    assert "Exit codes:" in text
    assert [line.split()[0] for line in text.splitlines()[-6:] if line[4:5].isdigit()] == [
        "0",
        "1",
        "2",
        "130",
    ]


def test_the_version_is_printed():
    done = subprocess.run((*PROGRAM, "--version"), capture_output=True, text=True)
    assert (done.returncode, done.stdout.startswith("residency ")) == (0, True)


def test_colour_is_used_when_asked_for_and_never_with_no_color(saved: str):
    def shown(**environment: str) -> str:
        return subprocess.run(
            (*PROGRAM, "show", saved),
            env={**os.environ, "TERM": "xterm-256color", **environment},
            capture_output=True,
            text=True,
        ).stdout

    assert "\x1b[" in shown(FORCE_COLOR="1")
    assert "\x1b[" not in shown()
    assert "\x1b[" not in shown(FORCE_COLOR="1", NO_COLOR="1")


def test_a_stdout_that_knows_only_ascii_gets_ascii(tmp_path: Path):
    saved = tmp_path / "plan.json"
    saved.write_text(
        report(COMMITTED.model_copy(update={"card": "Karte 4 µ"})).to_json(), encoding="utf-8"
    )
    done = subprocess.run(
        (*PROGRAM, "show", saved),
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "on Karte 4 \\xb5 (simulated)" in done.stdout
    assert "Would retain text_encoder" in done.stdout


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_reader_that_stops_reading_causes_no_complaint(saved: str, options: tuple[str, ...]):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        (*PROGRAM, "show", saved, *options), stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_named_and_no_fault_of_ours(saved: str):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            (*PROGRAM, "show", saved), stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert done.stderr.startswith("error: stdout can't be written: No space left on device\nhint: ")
