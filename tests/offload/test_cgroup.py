"""Memory limits of cgroups, as files under a folder and in the kernel."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from residency.offload.host_memory import CgroupLimit, cgroup_limits

KIB, MIB = 1 << 10, 1 << 20
NO_LIMIT_V1 = 9223372036854771712
"""What cgroup v1 says where there is no limit: 2^63 less a page."""
PACKAGES = str(Path(sys.modules["residency.offload.host_memory"].__file__).parents[2])


class Machine:
    """A process's folder in procfs and the trees it sees. v2's is mounted at `unified`, v1's with
    the memory controller at `memory`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mounts: list[str] = []

    def mount(self, kind: str, *, root: str = "/", point: str | None = None) -> None:
        point = point or {"cgroup2": "unified", "cgroup": "memory"}[kind]
        place = str(self.folder / point).replace(" ", "\\040")
        options = "rw" if kind == "cgroup2" else f"rw,{Path(point).name}"
        self.mounts.append(f"36 31 0:32 {root} {place} rw,relatime shared:9 - {kind} cg {options}")

    def write(self, files: dict[str, object]) -> None:
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")

    def limits(self, own: str) -> dict[str, tuple[int, int]]:
        """Limit and what is available, by the file that says so."""
        self.write({"proc/cgroup": own, "proc/mountinfo": "\n".join(self.mounts)})
        return {
            each.source.removeprefix(f"{self.folder}/"): (each.limit_bytes, each.available_bytes)
            for each in cgroup_limits(self.folder / "proc")
        }


@pytest.fixture
def v2(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    machine.mount("cgroup2")
    return machine


@pytest.fixture
def v1(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    machine.mount("cgroup", point="cpu")
    machine.mount("cgroup")
    return machine


def files_v2(group: str, limit: object, used: object, **more: object) -> dict[str, object]:
    names = {"max": limit, "current": used, **more}
    return {f"unified/{group}memory.{name}": text for name, text in names.items()}


def files_v1(group: str, limit: object, used: object, **more: object) -> dict[str, object]:
    names = {"limit_in_bytes": limit, "usage_in_bytes": used, **more}
    return {f"memory/{group}memory.{name}": text for name, text in names.items()}


def test_a_v2_limit_leaves_what_its_cgroup_does_not_use(v2: Machine):
    v2.write(files_v2("pod/", 600, 150))
    assert v2.limits("0::/pod") == {"unified/pod/memory.max": (600, 450)}


def test_every_cgroup_up_to_the_root_has_its_say(v2: Machine):
    v2.write(files_v2("pod/app/", 500, 100) | files_v2("pod/", 600, 350) | files_v2("", 900, 1))
    assert v2.limits("0::/pod/app") == {
        "unified/pod/app/memory.max": (500, 400),
        "unified/pod/memory.max": (600, 250),
        "unified/memory.max": (900, 899),
    }


def test_max_is_no_limit(v2: Machine):
    v2.write(files_v2("pod/app/", "max", 100) | files_v2("pod/", 900, 100))
    assert v2.limits("0::/pod/app") == {"unified/pod/memory.max": (900, 800)}


def test_memory_high_counts_since_pinned_memory_can_not_be_reclaimed(v2: Machine):
    v2.write(files_v2("pod/", 600, 150, high=500))
    assert v2.limits("0::/pod") == {
        "unified/pod/memory.max": (600, 450),
        "unified/pod/memory.high": (500, 350),
    }
    v2.write(files_v2("pod/", "max", 150, high="max"))
    assert v2.limits("0::/pod") == {}


def test_file_cache_that_is_dropped_first_is_not_in_use(v2: Machine):
    stat = "anon 90\nfile 60\nactive_file 40\ninactive_file 20\n"
    v2.write(files_v2("pod/", 600, 150, stat=stat))
    assert v2.limits("0::/pod") == {"unified/pod/memory.max": (600, 470)}


def test_cache_can_not_make_more_of_a_limit_than_it_is(v2: Machine):
    v2.write(files_v2("pod/", 600, 150, stat="inactive_file 151"))
    assert v2.limits("0::/pod") == {"unified/pod/memory.max": (600, 600)}


def test_a_cgroup_above_its_limit_leaves_nothing(v2: Machine):
    v2.write(files_v2("pod/", 100, 130))
    assert v2.limits("0::/pod") == {"unified/pod/memory.max": (100, 0)}


def test_a_limit_without_a_usage_is_still_the_most_there_can_be(v2: Machine):
    v2.write({"unified/memory.max": 100})
    assert v2.limits("0::/") == {"unified/memory.max": (100, 100)}
    v2.write({"unified/memory.current": "a lot"})
    assert v2.limits("0::/") == {"unified/memory.max": (100, 100)}


@pytest.mark.parametrize("garbage", ["", "-1", "12 MiB", "1e9", "²", "\x00\x00", "0x10", "١٢"])
def test_a_file_without_a_number_says_nothing(v2: Machine, garbage: str):
    v2.write(files_v2("pod/", garbage, 10) | files_v2("", 50, 10, stat=f"inactive_file {garbage}"))
    assert v2.limits("0::/pod") == {"unified/memory.max": (50, 40)}


def test_a_file_that_is_no_text_says_nothing(v2: Machine):
    v2.write(files_v2("", 50, 10, stat=""))
    (v2.folder / "unified/memory.max").write_bytes(b"\xff\xfe\x00")
    (v2.folder / "unified/memory.stat").write_bytes(b"inactive_file \xff\n")
    assert v2.limits("0::/") == {}


def test_a_file_that_can_not_be_read_says_nothing(v2: Machine):
    v2.write(files_v2("pod/", 60, 10) | files_v2("", 50, 10))
    (v2.folder / "unified/pod/memory.max").unlink()
    (v2.folder / "unified/pod/memory.max").mkdir()
    assert v2.limits("0::/pod") == {"unified/memory.max": (50, 40)}


@pytest.mark.parametrize("own", ["", "0", "0::", "x:y", "0::/pod\n\ngarbage", "7:cpu:/pod", ":::"])
def test_lines_that_name_no_cgroup_are_passed_over(v2: Machine, own: str):
    v2.write(files_v2("", 50, 10))
    assert set(v2.limits(own)) <= {"unified/memory.max"}


@pytest.mark.parametrize(
    "line", ["garbage", "36 31 0:32 / - cgroup2", "a - b - c", "36 31 - cgroup2"]
)
def test_lines_that_name_no_mount_are_passed_over(v2: Machine, line: str):
    v2.write(files_v2("", 50, 10))
    v2.mounts.insert(0, line)
    assert v2.limits("0::/") == {"unified/memory.max": (50, 40)}


def test_without_procfs_there_are_no_limits(tmp_path: Path):
    assert cgroup_limits(tmp_path / "proc") == ()


def test_v1_limits_are_those_of_the_memory_controller(v1: Machine):
    v1.write(files_v1("job/step/", NO_LIMIT_V1, 50) | files_v1("job/", 700, 50))
    v1.write({"cpu/job/memory.limit_in_bytes": 3, "memory/elsewhere/memory.limit_in_bytes": 4})
    own = "12:pids:/job\n4:cpu,memory:/job/step\n1:name=systemd:/elsewhere\n"
    assert v1.limits(own) == {"memory/job/memory.limit_in_bytes": (700, 650)}


def test_v1_file_cache_is_that_of_the_whole_subtree(v1: Machine):
    stat = "inactive_file 5\ntotal_inactive_file 20"
    v1.write(files_v1("job/", 700, 50, stat=stat))
    assert v1.limits("4:memory:/job") == {"memory/job/memory.limit_in_bytes": (700, 670)}
    v1.write(files_v1("job/", 700, 50, stat="inactive_file 5"))
    assert v1.limits("4:memory:/job") == {"memory/job/memory.limit_in_bytes": (700, 655)}


def test_a_v1_limit_above_the_mount_is_told_by_what_is_below(v1: Machine):
    stat = "hierarchical_memory_limit 400"
    v1.write(files_v1("", NO_LIMIT_V1, 50, stat=stat))
    told = {"memory/memory.stat hierarchical_memory_limit": (400, 350)}
    assert v1.limits("4:memory:/") == told
    v1.write(files_v1("", 700, 50, stat=stat))
    assert v1.limits("4:memory:/") == {"memory/memory.limit_in_bytes": (700, 650), **told}


@pytest.mark.parametrize("above", [700, NO_LIMIT_V1])
def test_a_v1_limit_that_is_the_least_is_told_once(v1: Machine, above: int):
    v1.write(files_v1("", 700, 50, stat=f"hierarchical_memory_limit {above}"))
    assert v1.limits("4:memory:/") == {"memory/memory.limit_in_bytes": (700, 650)}


def test_swap_and_soft_limits_are_not_counted(v1: Machine):
    more = {"memsw.limit_in_bytes": 100, "soft_limit_in_bytes": 90, "kmem.limit_in_bytes": 80}
    v1.write(files_v1("", 700, 50, **more))
    assert v1.limits("4:memory:/") == {"memory/memory.limit_in_bytes": (700, 650)}


def test_on_a_hybrid_system_both_hierarchies_have_their_say(v1: Machine):
    v1.mount("cgroup2")
    v1.write(files_v1("job/", 700, 50))
    assert v1.limits("4:memory:/job\n0::/job") == {"memory/job/memory.limit_in_bytes": (700, 650)}
    v1.write(files_v2("job/", 300, 50))
    assert v1.limits("4:memory:/job\n0::/job") == {
        "memory/job/memory.limit_in_bytes": (700, 650),
        "unified/job/memory.max": (300, 250),
    }
    assert v1.limits("4:memory:/job") == {"memory/job/memory.limit_in_bytes": (700, 650)}


def test_a_container_in_a_namespace_sees_its_own_cgroup_as_the_root(v2: Machine):
    v2.write(files_v2("", 300, 100))
    assert v2.limits("0::/") == {"unified/memory.max": (300, 200)}


def test_a_container_that_only_its_part_of_the_tree_is_mounted_in_reads_that(tmp_path: Path):
    machine = Machine(tmp_path)
    machine.mount("cgroup2", root="/docker/4f")
    machine.write(files_v2("", 300, 100) | files_v2("task/", 200, 50) | files_v2("docker/", 9, 1))
    below = {"unified/task/memory.max": (200, 150), "unified/memory.max": (300, 200)}
    assert machine.limits("0::/docker/4f/task") == below
    assert machine.limits("0::/docker/4f") == {"unified/memory.max": (300, 200)}
    # Names that only begin alike, and a cgroup that the mount doesn't show.
    for elsewhere in ("/docker/4f0/task", "/docker", "/"):
        assert machine.limits(f"0::{elsewhere}") == {"unified/memory.max": (300, 200)}


def test_a_path_that_does_not_exist_under_its_mount_leaves_the_root(v1: Machine):
    v1.write(files_v1("", 300, 100))
    assert v1.limits("4:memory:/docker/4f") == {"memory/memory.limit_in_bytes": (300, 200)}


def test_a_cgroup_outside_of_the_namespace_is_not_looked_for_outside_of_the_mount(v2: Machine):
    v2.write(files_v2("", 300, 100) | {"memory.max": 5, "pod/memory.max": 6})
    for path in ("/..", "/../pod", "/pod/../../pod"):
        assert v2.limits(f"0::{path}") == {"unified/memory.max": (300, 200)}


def test_a_mount_from_above_the_namespace_shows_what_is_named_from_there(tmp_path: Path):
    machine = Machine(tmp_path)
    machine.mount("cgroup2", root="/..")
    machine.write(files_v2("", 300, 100) | files_v2("beside/", 200, 50))
    assert machine.limits("0::/") == {"unified/memory.max": (300, 200)}
    assert machine.limits("0::/../beside") == {
        "unified/beside/memory.max": (200, 150),
        "unified/memory.max": (300, 200),
    }


def test_a_limit_that_two_mounts_show_at_one_place_is_told_once(v2: Machine):
    v2.mount("cgroup2")
    v2.write(files_v2("", 300, 100))
    assert len(cgroup_limits(v2.folder / "proc")) == 0  # nothing is written yet
    assert v2.limits("0::/") == {"unified/memory.max": (300, 200)}
    assert len(cgroup_limits(v2.folder / "proc")) == 1


def test_spaces_in_the_path_of_a_mount_are_read(tmp_path: Path):
    machine = Machine(tmp_path)
    machine.mount("cgroup2", point="my cgroups")
    machine.write({"my cgroups/memory.max": 300, "my cgroups/memory.current": 100})
    assert machine.limits("0::/") == {"my cgroups/memory.max": (300, 200)}


def test_colons_in_the_name_of_a_cgroup_are_part_of_it(v2: Machine):
    v2.write(files_v2("a:b/", 300, 100))
    assert v2.limits("0::/a:b") == {"unified/a:b/memory.max": (300, 200)}


@settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(
        st.tuples(st.none() | st.integers(0, 1000), st.integers(0, 1200), st.integers(0, 300)),
        min_size=1,
        max_size=5,
    ),
    st.booleans(),
)
def test_the_least_along_the_chain_is_what_there_is(
    tmp_path: Path, chain: list[tuple[int | None, int, int]], is_v2: bool
):
    machine = Machine(tmp_path / uuid.uuid4().hex)
    machine.mount("cgroup2" if is_v2 else "cgroup")
    path = ""
    for depth, (limit, used, cached) in enumerate(chain):
        path += f"g{depth}/"
        if is_v2:
            stat = f"inactive_file {cached}"
            machine.write(files_v2(path, "max" if limit is None else limit, used, stat=stat))
        else:
            most = NO_LIMIT_V1 if limit is None else limit
            stat = f"total_inactive_file {cached}"
            machine.write(files_v1(path, most, used, stat=stat))
    left = [
        min(limit, max(limit - used + min(cached, used), 0))
        for limit, used, cached in chain
        if limit is not None
    ]
    found = machine.limits(f"{'0:' if is_v2 else '4:memory'}:/{path.rstrip('/')}")
    assert [available for _, available in found.values()] == left[::-1]


CHILD = """
import os, sys
from pathlib import Path
group, wanted = Path(sys.argv[1]), int(sys.argv[2])
(group / "cgroup.procs").write_text(str(os.getpid()))
from residency.offload.host_memory import HostMemory
before = HostMemory.read()
block = b"x" * wanted
after = HostMemory.read()
print(before.limit_bytes, before.available_bytes, after.available_bytes, before.source, sep="\\n")
"""


@pytest.fixture
def real_group() -> Iterator[tuple[Path, str]]:
    """A cgroup below this process's own, and the name of the file that holds its limit."""
    group = None
    for v2 in (True, False):
        parent = _own_folder(v2)
        if parent is None:
            continue
        try:
            group = parent / f"residency-{uuid.uuid4().hex}"
            group.mkdir()
        except OSError:
            group = None
            continue
        name = "memory.max" if v2 else "memory.limit_in_bytes"
        if (group / name).exists():
            break
        group.rmdir()
        group = None
    if group is None:
        pytest.skip("no memory cgroup can be made below this process's own")
    try:
        yield group, name
    finally:
        group.rmdir()


def _own_folder(v2: bool) -> Path | None:
    from residency.offload.host_memory import _mounts, _own_cgroups

    proc = Path("/proc/self")
    own = dict(_own_cgroups(proc))
    folders = (
        next(mount.chain(own[v2])) for mount in _mounts(proc) if mount.v2 == v2 and v2 in own
    )
    return next((folder for folder in folders if (folder / "cgroup.procs").exists()), None)


def test_a_process_in_a_real_cgroup_reads_its_limit_and_what_it_uses(
    real_group: tuple[Path, str],
):
    group, name = real_group
    limit_bytes, block_bytes = 512 * MIB, 128 * MIB
    try:
        (group / name).write_text(str(limit_bytes))
    except OSError as error:
        pytest.skip(f"the limit of a cgroup can't be set here: {error}")
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(group), str(block_bytes)],
        env={**os.environ, "PYTHONPATH": PACKAGES},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode and "cgroup.procs" in done.stderr:
        pytest.skip(f"a process can't be moved into a cgroup here: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    limit, before, after, source = done.stdout.splitlines()
    assert source == str(group / name)
    assert int(limit) == limit_bytes
    assert limit_bytes - 128 * MIB < int(before) < limit_bytes
    # What the interpreter takes and frees in between is no matter beside the block.
    assert abs(int(before) - int(after) - block_bytes) < 8 * MIB


def test_a_limit_says_what_is_left_of_it():
    assert CgroupLimit(100, 30, "memory.max").available_bytes == 70
