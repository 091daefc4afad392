import psutil
import pytest

from residency.offload.errors import HostMemoryError
from residency.offload.host import HostBudget, HostMemory, pinned_charge_bytes

KIB = 1 << 10
NO_LIMIT_V1 = 9223372036854771712
"""What cgroup v1 says where there is no limit: 2^63 less a page."""


@pytest.mark.parametrize(
    ("nbytes", "charge_bytes"),
    [(0, 0), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1023, 1024), (1024, 1024), (1025, 2048)],
)
def test_pinned_memory_is_charged_after_rounding_to_a_power_of_two(nbytes, charge_bytes):
    assert pinned_charge_bytes(nbytes) == charge_bytes


def test_a_budget_gives_back_what_it_charged():
    budget = HostBudget(10 * KIB)
    first, second = budget.charge(5 * KIB), budget.charge(1 * KIB)
    assert (first, second, budget.charged_bytes) == (8 * KIB, 1 * KIB, 9 * KIB)
    budget.give_back(first)
    assert budget.charged_bytes == 1 * KIB


def test_a_budget_can_be_charged_to_the_last_byte_and_no_further():
    budget = HostBudget(8 * KIB)
    budget.charge(8 * KIB)
    with pytest.raises(HostMemoryError, match=r"1 bytes takes 1 of host memory.*0 are left"):
        budget.charge(1)


def test_a_charge_that_is_refused_takes_nothing_and_says_the_numbers():
    budget = HostBudget(10 * KIB)
    budget.charge(4 * KIB)
    with pytest.raises(HostMemoryError) as caught:
        budget.charge(5 * KIB)
    assert "pinning 5120 bytes takes 8192" in caught.value.message
    assert "of 10240 bytes 6144 are left" in caught.value.message
    assert budget.charged_bytes == 4 * KIB


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """Writes a tree of cgroup files and reads host memory under it, with 1000 KiB RAM available."""
    ram = psutil.virtual_memory()._replace(available=1000 * KIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: ram)

    def read(own, files):
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        memory = HostMemory.read(cgroups=tmp_path / "cgroup", own_cgroup=tmp_path / "own")
        return memory.available_bytes, memory.source.removeprefix(f"{tmp_path / 'cgroup'}/")

    return read


def v2(group, limit, usage):
    return {f"{group}memory.max": limit, f"{group}memory.current": usage}


def v1(group, limit, usage):
    folder = f"memory/{group}memory."
    return {f"{folder}limit_in_bytes": limit, f"{folder}usage_in_bytes": usage}


def test_a_v2_limit_leaves_what_its_cgroup_does_not_use(cgroups):
    files = v2("pod/", 600 * KIB, 150 * KIB)
    assert cgroups("0::/pod\n", files) == (450 * KIB, "pod/memory.max")


def test_the_least_of_nested_limits_counts_whichever_is_above(cgroups):
    files = v2("pod/app/", 500 * KIB, 100 * KIB) | v2("pod/", 600 * KIB, 350 * KIB)
    assert cgroups("0::/pod/app\n", files) == (250 * KIB, "pod/memory.max")
    files = v2("pod/app/", 200 * KIB, 100 * KIB)
    assert cgroups("0::/pod/app\n", files) == (100 * KIB, "pod/app/memory.max")


def test_a_container_sees_its_own_limit_at_the_root(cgroups):
    assert cgroups("0::/\n", v2("", 300 * KIB, 100 * KIB)) == (200 * KIB, "memory.max")


def test_max_is_no_limit(cgroups):
    files = v2("pod/app/", "max", 100 * KIB) | v2("pod/", 900 * KIB, 100 * KIB)
    assert cgroups("0::/pod/app\n", files) == (800 * KIB, "pod/memory.max")
    assert cgroups("0::/pod/app\n", v2("pod/", "max", 0)) == (1000 * KIB, "RAM available")


def test_ram_counts_where_it_is_less_than_the_limit(cgroups):
    assert cgroups("0::/\n", v2("", 5000 * KIB, 0)) == (1000 * KIB, "RAM available")


def test_a_cgroup_above_its_limit_leaves_nothing(cgroups):
    assert cgroups("0::/\n", v2("", 100 * KIB, 130 * KIB)) == (0, "memory.max")


def test_a_limit_without_a_usage_says_nothing(cgroups):
    assert cgroups("0::/\n", {"memory.max": 10}) == (1000 * KIB, "RAM available")


def test_a_v1_limit_is_read_from_the_memory_controller(cgroups):
    own = "12:pids:/job\n4:cpu,memory:/job/step\n1:name=systemd:/job\n"
    files = v1("job/step/", NO_LIMIT_V1, 50 * KIB) | v1("job/", 700 * KIB, 50 * KIB)
    assert cgroups(own, files) == (650 * KIB, "memory/job/memory.limit_in_bytes")


def test_the_v1_number_for_no_limit_is_none(cgroups):
    assert cgroups("4:memory:/\n", v1("", NO_LIMIT_V1, 50)) == (1000 * KIB, "RAM available")


def test_a_system_without_cgroups_has_its_ram(tmp_path):
    memory = HostMemory.read(cgroups=tmp_path / "none", own_cgroup=tmp_path / "nor")
    assert memory.source == "RAM available"
    assert memory.available_bytes > 0
