"""Whatever the sources say, a reading adds up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from residency.offload.cuda.reconcile import reconcile
from residency.offload.cuda.split import os_reserve_bytes, split
from residency.offload.cuda.system import (
    Facts,
    Figures,
    GpuProcess,
    NvmlFacts,
    NvmlMemory,
    Pool,
    Ram,
    Sample,
    System,
)
from residency.offload.errors import DeviceError

PID, OTHER = 4242, 977

sizes = st.one_of(
    st.integers(0, 100), st.sampled_from((-1, -50, 1000, (1 << 64) - 1, (1 << 64) - 40))
)
gibs = st.integers(1, 100).map(lambda size: size << 30)
totals = st.one_of(st.integers(1, 100), st.sampled_from((0, -1, 50 << 30, 1 << 64)))


@st.composite
def facts(draw: st.DrawFn) -> Facts:
    return Facts(
        name="a card",
        uuid="GPU-a",
        integrated=False,
        card_bytes=draw(totals),
        backend=draw(st.sampled_from(("native", "cudaMallocAsync"))),
        nvml=NvmlFacts(
            missing=draw(st.sampled_from((None, "no library"))), mig_mode=draw(st.booleans())
        ),
        system=System(
            draw(st.sampled_from(("linux", "win32"))), wsl=draw(st.booleans()), pids=(PID,)
        ),
    )


@st.composite
def figures(draw: st.DrawFn) -> Figures:
    memory = st.builds(NvmlMemory, totals, sizes, sizes, st.none() | sizes, st.just("NVML"))
    process = st.builds(
        GpuProcess, st.sampled_from((PID, OTHER, 7)), st.none() | sizes, st.booleans()
    )
    processes = st.lists(process, max_size=3, unique_by=lambda each: each.pid).map(tuple)
    return Figures(
        draw(totals),
        draw(sizes),
        Pool(*(draw(sizes) for _ in range(4))),
        Sample(draw(st.none() | memory), draw(st.none() | processes)),
        draw(st.none() | st.builds(Ram, gibs, gibs)),
    )


@given(facts(), figures())
def test_the_parts_are_the_whole_and_none_is_negative(card: Facts, said: Figures):
    try:
        reading = split(card, said).reading
    except DeviceError:
        assert card.card_bytes <= 0
        return
    parts = (
        reading.free_bytes,
        reading.others_bytes,
        reading.context_bytes,
        reading.reserved_bytes,
    )
    assert sum(parts) == reading.total_bytes
    assert min(parts) >= 0
    assert 0 <= reading.allocated_bytes <= reading.reserved_bytes
    assert min(reading.peak_allocated_bytes, reading.peak_reserved_bytes) >= 0
    if said.ram is not None:
        assert reading.free_bytes <= max(said.ram.available_bytes - os_reserve_bytes(said.ram), 0)
    elif 0 <= said.free_bytes <= said.total_bytes <= 2 * card.card_bytes:
        assert reading.free_bytes <= said.free_bytes


@given(facts(), figures())
def test_an_inspection_has_the_reading_and_a_message_for_every_finding(card: Facts, said: Figures):
    try:
        found = reconcile(card, said)
    except DeviceError:
        return
    assert found.reading == split(card, said).reading
    assert all(finding.message for finding in found.findings)
    assert {term.name: term.value for term in found.terms}["total"] == found.reading.total_bytes


def test_a_library_that_gives_no_reason_is_no_reason_to_fail():
    card = Facts("a card", "", False, 100, "native", NvmlFacts(), System("linux", False, (PID,)))
    reading = split(card, Figures(100, 90, Pool(), Sample())).reading
    assert reading.context_bytes == pytest.approx(10)
