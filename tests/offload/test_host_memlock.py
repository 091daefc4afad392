"""RLIMIT_MEMLOCK, as the kernel tells it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from residency.offload.host_memory import HostLimits, LockLimit

resource = pytest.importorskip("resource")

KIB, MIB = 1 << 10, 1 << 20
PACKAGES = str(Path(sys.modules["residency.offload.host_memory"].__file__).parents[2])

CHILD = """
import ctypes, json, mmap, os, resource, sys
from pathlib import Path
from residency.offload.host_memory import LockLimit

limit_bytes, lock_bytes = map(int, sys.argv[1:])
_, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit_bytes, hard))
if lock_bytes:
    page = mmap.mmap(-1, lock_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(len(page))):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
found = LockLimit.read(proc=Path("/proc/self"))
print(json.dumps([found.limit_bytes, found.locked_bytes]))
"""


def in_child(limit_bytes: int, lock_bytes: int = 0) -> list[int | None]:
    """What a process under this soft limit reads, having locked so much."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(limit_bytes), str(lock_bytes)],
        env={**os.environ, "PYTHONPATH": PACKAGES},
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout)


def test_the_limit_is_the_soft_one_of_the_process():
    assert in_child(64 * KIB) == [64 * KIB, 0]


def test_what_is_locked_already_is_told():
    assert in_child(64 * KIB, lock_bytes=16 * KIB) == [64 * KIB, 16 * KIB]


def test_no_limit_is_none(monkeypatch, tmp_path):
    none = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: none)
    assert LockLimit.read(proc=tmp_path) == LockLimit(None, 0)


def test_a_system_without_the_limit_has_none(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "resource", None)
    assert LockLimit.read(proc=tmp_path) is None


def test_it_is_told_beside_the_terms_and_is_none_of_them(tmp_path):
    limits = HostLimits.read(proc=tmp_path)
    assert limits.lock == LockLimit.read(proc=tmp_path)
    assert [term.source for term in limits.terms] == ["RAM available"]
