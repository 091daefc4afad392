"""What there is of host memory, and the budget for pinned masters."""

from pathlib import Path

import psutil
import pytest

from residency.offload.errors import HostMemoryError, InputError
from residency.offload.host_memory import RESERVE_BYTES, HostBudget, HostLimits, HostMemory

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
GB = 10**9


def available(nbytes: int) -> HostMemory:
    return HostMemory(nbytes, "RAM available", nbytes)


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A host with so much RAM available, whose process is in one v2 cgroup."""

    def made(ram_bytes: int, limit_bytes: int, used_bytes: int) -> Path:
        ram = psutil.virtual_memory()._replace(available=ram_bytes, total=2 * ram_bytes)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: ram)
        (tmp_path / "cgroup").write_text("0::/\n")
        (tmp_path / "mountinfo").write_text(f"31 23 0:28 / {tmp_path} rw - cgroup2 cgroup2 rw\n")
        (tmp_path / "memory.max").write_text(f"{limit_bytes}\n")
        (tmp_path / "memory.current").write_text(f"{used_bytes}\n")
        return tmp_path

    return made


def test_a_budget_gives_back_what_it_charged():
    budget = HostBudget(10 * KIB)
    first, second = budget.charge(5 * KIB), budget.charge(1 * KIB)
    assert (first, second, budget.charged_bytes) == (8 * KIB, 1 * KIB, 9 * KIB)
    budget.give_back(first)
    assert budget.charged_bytes == 1 * KIB


def test_a_budget_charges_what_chunks_take():
    budget = HostBudget(4 * MIB)
    assert budget.charge(3 * MIB + 5 * KIB) == 3 * MIB + 8 * KIB


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
    budget.charge(4 * KIB)


def test_after_the_host_refused_a_pin_no_other_is_tried():
    budget = HostBudget(100 * KIB)
    first = budget.charge(16 * KIB)
    budget.charge(1 * KIB)
    budget.close(HostMemoryError("cudaHostAlloc failed"))
    assert budget.available_bytes == 17 * KIB
    budget.give_back(first)
    with pytest.raises(HostMemoryError) as caught:
        budget.charge(1)
    assert "isn't tried" in caught.value.message
    assert "with 17408 bytes pinned: cudaHostAlloc failed" in caught.value.message
    assert budget.charged_bytes == 1 * KIB


def test_the_term_that_leaves_least_binds_and_all_are_told(host):
    proc = host(1000 * KIB, 600 * KIB, 150 * KIB)
    limits = HostLimits.read(proc=proc)
    ram = HostMemory(1000 * KIB, "RAM available", 2000 * KIB)
    group = HostMemory(450 * KIB, str(proc / "memory.max"), 600 * KIB)
    assert limits.terms == (ram, group)
    assert limits.binding == HostMemory.read(proc=proc) == group
    assert HostMemory.read(proc=host(1000 * KIB, 5000 * KIB, 0)) == ram


def test_a_system_without_cgroups_has_its_ram(tmp_path):
    limits = HostLimits.read(proc=tmp_path)
    assert [term.source for term in limits.terms] == ["RAM available"]
    assert limits.binding.available_bytes > 0


def test_this_process_has_some_memory_and_no_more_than_the_machine():
    limits = HostLimits.read()
    assert 0 <= limits.binding.available_bytes <= psutil.virtual_memory().total
    assert limits.terms[0].source == "RAM available"


@pytest.mark.parametrize(
    ("available_bytes", "budget_bytes"),
    [
        (0, 0),
        (RESERVE_BYTES - 1, 0),
        (RESERVE_BYTES + 7, 7),
        (40 * GIB, 38 * GIB),
        (400 * GIB, 380 * GIB),
    ],
)
def test_the_budget_leaves_two_gib_or_a_twentieth(available_bytes: int, budget_bytes: int):
    assert available(available_bytes).budget_bytes() == budget_bytes


def test_on_unified_memory_nothing_is_pinned():
    assert available(120 * GIB).budget_bytes(unified=True) == 0
    assert available(120 * GIB).budget_bytes(unified=False) == 114 * GIB


def test_a_share_is_told_with_its_ranks():
    shared = HostMemory(101, "memory.max", 200).share(4)
    assert shared == HostMemory(25, "memory.max, for 4 ranks", 200)
    assert available(5).share(1) == available(5)


@pytest.mark.parametrize("ranks", [0, -1])
def test_memory_is_shared_by_one_rank_or_more(ranks: int):
    with pytest.raises(InputError, match=f"by {ranks} processes"):
        available(GIB).share(ranks)
    with pytest.raises(InputError):
        available(GIB).budget_bytes(local_ranks=ranks)


def test_a_host_that_is_as_large_as_the_pins_is_too_small():
    """HM-02: layers of 30.19 GiB on a host of 32 GiB."""
    budget = HostBudget(available(32 * GIB).budget_bytes())
    with pytest.raises(HostMemoryError, match="are left"):
        budget.charge(round(30.19 * GIB))
    assert budget.charged_bytes == 0


def test_the_container_and_not_the_host_says_what_there_is(host):
    """HM-03: 187 GB of RAM, a container of 46 GB, and a pipeline of 37.3 GB in it."""
    before = HostMemory.read(proc=host(187 * GB, 45_999_996_928, 0))
    assert round(before.available_bytes / GIB, 1) == 42.8
    loaded = HostMemory.read(proc=host(150 * GB, 45_999_996_928, round(37.3 * GB)))
    budget = HostBudget(loaded.budget_bytes())
    assert budget.available_bytes == 8_699_996_928 - RESERVE_BYTES
    with pytest.raises(HostMemoryError, match="are left"):
        budget.charge(round(37.3 * GB))


@pytest.mark.parametrize(("ranks", "fits"), [(1, True), (2, True), (4, True), (8, False)])
def test_each_rank_of_a_node_pins_its_own_masters(ranks: int, fits: bool):
    """HM-11: a model of 124 GB on a host of 1 TB."""
    budget = HostBudget(available(1000 * GB).budget_bytes(local_ranks=ranks))
    assert budget.available_bytes == 950 * GB // ranks
    if fits:
        budget.charge(124 * GB)
    else:
        with pytest.raises(HostMemoryError, match="are left"):
            budget.charge(124 * GB)
