import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from residency.offload.cuda.split import os_reserve_bytes
from residency.offload.cuda.system import Ram, System

GIB = 1 << 30
NOWHERE = Path("/nowhere/at/all")


def read(status: Path = NOWHERE, dxg: Path = NOWHERE, **more: object) -> System:
    return System.read(status=status, dxg=dxg, **{"release": "6.8.0", "environment": {}, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("release", "wsl"),
    [
        ("6.8.0-45-generic", False),
        ("5.15.153.1-microsoft-standard-WSL2", True),
        ("4.4.0-19041-Microsoft", True),
    ],
)
def test_wsl_is_told_by_the_kernel(release: str, wsl: bool):
    assert read(release=release).wsl == wsl


def test_wsl_is_told_by_its_device(tmp_path: Path):
    device = tmp_path / "dxg"
    device.touch()
    assert read(dxg=device).wsl


def test_the_numbers_of_this_process_are_those_of_all_namespaces_outermost_first(tmp_path: Path):
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nNSpid:\t546113\t57\nThreads:\t1\n")
    assert read(status).pids == (546113, 57, os.getpid())


def test_a_number_that_is_told_twice_is_there_once(tmp_path: Path):
    status = tmp_path / "status"
    status.write_text(f"NSpid:\t{os.getpid()}\n")
    assert read(status).pids == (os.getpid(),)


def test_without_procfs_there_is_the_number_that_the_process_knows():
    assert read().pids == (os.getpid(),)


@pytest.mark.parametrize(
    ("environment", "on"),
    [
        ({}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, True),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments : true"}, True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, False),
    ],
)
def test_expandable_segments_are_as_the_environment_says(environment: dict[str, str], on: bool):
    assert read(environment=environment).expandable_segments == on


def test_the_system_is_read_as_it_is():
    system = System.read()
    assert os.getpid() in system.pids
    assert system.windows is (os.name == "nt")


def test_ram_counts_what_can_be_had_and_not_what_is_unused(monkeypatch: pytest.MonkeyPatch):
    said = SimpleNamespace(total=100, available=90, free=10)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: said)
    assert Ram.read() == Ram(100, 90)


@pytest.mark.parametrize(("total_gib", "reserve_gib"), [(16, 2), (100, 2), (121, 2.42)])
def test_the_operating_system_is_left_two_gib_or_two_percent(total_gib: int, reserve_gib: float):
    assert os_reserve_bytes(Ram(total_gib * GIB, 0)) == pytest.approx(reserve_gib * GIB, abs=1)
