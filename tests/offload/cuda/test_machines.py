from dataclasses import replace

import pytest
from fake_nvml import FakeNvml
from machine import GIB, Machine, Plan, board, gib
from machines import MACHINES
from text_encoder import BASELINE_BYTES, MARGIN_BYTES, RETAINING_BYTES, instance, retains

from residency.offload.cuda.device import CudaDevice
from residency.offload.device import Inspection
from residency.offload.host_memory import HostMemory
from residency.planner.choosing.choose import choose
from residency.planner.choosing.unfit import Unfit

every_machine = pytest.mark.parametrize("machine", MACHINES.values(), ids=list(MACHINES))

ROUNDING = 8
"""Bytes by which figures in GiB are apart when they are added in another order."""


def planned(inspection: Inspection) -> Plan:
    if inspection.traits.unified:
        return "no offload"
    margin = MARGIN_BYTES + inspection.drift_reserve_bytes
    chosen = choose(instance(inspection.reading.usable_bytes - margin))
    if isinstance(chosen, Unfit):
        return "doesn't fit"
    return "retains" if retains(chosen.choice) else "streams"


@every_machine
def test_the_parts_of_a_reading_add_up_and_none_is_negative(machine: Machine):
    reading = machine.device().read()
    parts = [
        reading.free_bytes,
        reading.others_bytes,
        reading.context_bytes,
        reading.reserved_bytes,
    ]
    assert sum(parts) == reading.total_bytes
    assert min(parts) >= 0
    assert 0 <= reading.allocated_bytes <= reading.reserved_bytes


@every_machine
def test_a_reading_says_what_is_right_on_the_machine(machine: Machine):
    reading = machine.device().read()
    right_total = machine.total if machine.right_total is None else machine.right_total
    right_free = machine.free if machine.right_free is None else machine.right_free
    assert reading.total_bytes == pytest.approx(gib(right_total), abs=ROUNDING)
    assert reading.free_bytes == pytest.approx(gib(right_free), abs=ROUNDING)
    assert reading.others_bytes == pytest.approx(gib(machine.others), abs=ROUNDING)
    rest = reading.total_bytes - reading.free_bytes - reading.reserved_bytes
    context = rest if machine.context is None else gib(machine.context)
    assert reading.context_bytes == pytest.approx(context, abs=ROUNDING)


@every_machine
def test_an_inspection_finds_what_is_to_be_known_and_nothing_else(machine: Machine):
    inspection = machine.device().inspect()
    assert {finding.kind for finding in inspection.findings} == machine.findings
    assert len(inspection.findings) == len(machine.findings)
    assert inspection.reading == machine.device().read()


@every_machine
def test_the_traits_of_the_machine(machine: Machine):
    device = machine.device()
    inspection = device.inspect()
    assert inspection.traits == device.traits
    assert device.traits.unified == (machine.plan == "no offload")
    assert (device.traits.spills, device.traits.pins_on_card) == (machine.spills, machine.spills)
    assert device.traits.timed
    assert not device.traits.simulated
    assert device.traits.undo_slack_bytes == 64 << 20
    assert inspection.drift_reserve_bytes == gib(machine.drift)
    assert inspection.granularity_bytes == gib(machine.granularity)


@every_machine
def test_the_plan_for_the_machine(machine: Machine):
    assert planned(machine.device().inspect()) == machine.plan


@every_machine
def test_every_term_has_its_source_and_what_is_absent_has_its_reason(machine: Machine):
    terms = machine.device().inspect().terms
    assert len({term.name for term in terms}) == len(terms)
    for term in terms:
        assert term.source, term.name
        assert term.value != "", term.name


@pytest.mark.parametrize(
    ("name", "term"),
    [
        ("another process is listed without its memory", "other processes by NVML"),
        ("this process is listed without its memory", "this process by NVML"),
        ("WS-05: WSL, 30 GiB allocated on a card of 15.99, and counters that ran over",
         "this process by NVML"),
        ("ME-07: container, the process has another number for NVML", "this process by NVML"),
        ("ME-07: container, the process has another number for NVML", "other processes by NVML"),
        ("GPU is lost to NVML", "total by NVML"),
        ("no permission to see processes", "this process by NVML"),
    ],
)  # fmt: skip
def test_what_is_not_told_is_none_and_never_a_number(name: str, term: str):
    terms = {each.name: each.value for each in MACHINES[name].device().inspect().terms}
    assert terms[term] is None


def test_one_pool_leaves_nothing_for_pinned_masters():
    """ME-10, UP-01: what is pinned there is taken from the card."""
    device = MACHINES["ME-10: Jetson AGX Orin, no NVML"].device()
    assert device.traits.unified
    host = HostMemory(gib(52), "RAM available", gib(61.37))
    assert host.budget_bytes(unified=device.traits.unified) == 0


def test_the_set_is_retained_from_the_byte_at_which_it_fits():
    assert BASELINE_BYTES < RETAINING_BYTES
    for usable, plan in (
        (RETAINING_BYTES, True),
        (RETAINING_BYTES - 1, False),
        (BASELINE_BYTES, False),
    ):
        chosen = choose(instance(usable - MARGIN_BYTES))
        assert not isinstance(chosen, Unfit)
        assert retains(chosen.choice) == plan
    assert isinstance(choose(instance(BASELINE_BYTES - MARGIN_BYTES - 1)), Unfit)


def _first(name: str) -> tuple[Machine, CudaDevice]:
    machine = MACHINES[name]
    return machine, machine.device()


def test_a_missed_process_changes_nothing_that_a_plan_is_made_of():
    """ME-06: 17.00 GiB are left with the process and without, and never 30."""
    seen = MACHINES["ME-06: the process is listed"].device().read()
    missed = MACHINES["ME-06: the process is missed"].device().read()
    assert seen.free_bytes == missed.free_bytes == gib(17)
    assert seen.usable_bytes == missed.usable_bytes == gib(29)


def test_two_halves_of_a_container_size_the_same():
    """ME-07: with the process matched and without, 0.81 GiB are not PyTorch's."""
    halves = [
        MACHINES["ME-07: container, the process has another number for NVML"].device().read(),
        MACHINES["container whose namespaces can be seen"].device().read(),
    ]
    assert halves[0] == halves[1]
    assert halves[0].context_bytes == pytest.approx(gib(0.81), abs=ROUNDING)


def test_what_a_desktop_takes_between_two_requests_is_in_the_margin():
    """FD-02: other programs take 1 GiB more, and the next request still fits."""
    machine, device = _first("display active, and no program listed")
    inspection = device.inspect()
    margin = MARGIN_BYTES + inspection.drift_reserve_bytes
    usable = inspection.reading.usable_bytes
    chosen = choose(instance(usable - margin))
    assert not isinstance(chosen, Unfit)
    assert retains(chosen.choice)
    assert usable - GIB >= RETAINING_BYTES
    assert machine.drift == 1.0


def test_what_wants_95_percent_of_a_card_is_told_what_a_sibling_holds():
    """FD-05: of 139.8 GiB 132.81 are wanted, and 111.99 are free."""
    _, device = _first("FD-05: a sibling loads 26.47 GiB on an H200")
    inspection = device.inspect()
    assert inspection.reading.free_bytes < 0.95 * inspection.reading.total_bytes
    assert device.first_reading.others_bytes == pytest.approx(0, abs=ROUNDING)
    messages = [finding.message for finding in inspection.findings]
    assert any(f"other processes hold {gib(26.47)} bytes" in message for message in messages)
    assert any("has grown by" in message for message in messages)


@pytest.mark.parametrize(("compute_s", "plan"), [(100.0, True), (150.0, False)])
def test_a_card_is_not_filled_for_next_to_nothing(compute_s: float, plan: bool):
    """FD-03: 22 and 31.2 of 31.8 GiB at the same speed; the set saves 1.2 s a request here."""
    usable = MACHINES["RTX 5090, 31.4 GiB"].device().read().usable_bytes
    chosen = choose(instance(usable - MARGIN_BYTES, compute_s=compute_s))
    assert not isinstance(chosen, Unfit)
    assert retains(chosen.choice) == plan


@pytest.mark.parametrize("reserved_mib", [35926, 36452, 37134, 37710, 39026])
def test_what_may_be_taken_does_not_depend_on_the_allocators_history(reserved_mib: int):
    """AL-07: reserved differs by 8.6 % for the same work, and allocated doesn't."""
    reserved = reserved_mib / 1024
    held = replace(
        MACHINES["H200, 139.8 GiB"],
        total=79.2,
        free=79.2 - 0.375 - reserved,
        nvml=FakeNvml(board(79.6, 0.375 + reserved, 0.4, own=0.375 + reserved)),
        reserved=reserved,
        allocated=30.0,
    )
    reading = held.device().read()
    assert reading.usable_bytes == pytest.approx(gib(79.2 - 0.375), abs=ROUNDING)
    assert reading.allocated_bytes == gib(30.0)


def test_a_pool_that_allocates_in_larger_steps_says_so():
    """AL-03: 32 MiB a step instead of 2, so what is retained in pieces takes more."""
    native = MACHINES["RTX 4090, 23.52 GiB"]
    pooled = replace(native, backend="cudaMallocAsync")
    steps = [each.device().inspect().granularity_bytes for each in (native, pooled)]
    assert steps == [2 << 20, 32 << 20]
