from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from residency.offload.errors import DeviceIntegrityError
from residency.offload.simulated.allocator import Allocator, AllocatorFull, CachingAllocator
from residency.offload.simulated.base import Block, ExactAllocator

KIB = 1 << 10
MIB = 1 << 20
PLENTY = 1 << 40


def expandable(limit_bytes: int) -> CachingAllocator:
    return CachingAllocator(limit_bytes, expandable_segments=True)


every_allocator = pytest.mark.parametrize(
    "make", [CachingAllocator, expandable, ExactAllocator], ids=["caching", "expandable", "exact"]
)


def mib(allocator: Allocator) -> tuple[float, float]:
    """Allocated and reserved."""
    return allocator.allocated_bytes / MIB, allocator.reserved_bytes / MIB


def allocate_all(allocator: Allocator, *sizes_mib: int) -> list[Block]:
    return [allocator.allocate(size * MIB) for size in sizes_mib]


@pytest.mark.parametrize(
    ("nbytes", "allocated_bytes", "reserved_bytes"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (1 * MIB, 1 * MIB, 2 * MIB),
        (1 * MIB + 1, 1 * MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        # Rounding to 512 bytes comes first.
        (10 * MIB - 511, 10 * MIB, 10 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        # 12 MiB less 11 MiB and 512 bytes is below 1 MiB: the block keeps it.
        (11 * MIB + 1, 12 * MIB, 12 * MIB),
        # 14 MiB less 12 MiB and 512 bytes is above 1 MiB: it is split off.
        (12 * MIB + 1, 12 * MIB + 512, 14 * MIB),
        (100 * MIB, 100 * MIB, 100 * MIB),
    ],
)
def test_one_allocation_takes_a_rounded_block_from_a_rounded_segment(
    nbytes: int, allocated_bytes: int, reserved_bytes: int
) -> None:
    allocator = CachingAllocator(PLENTY)
    block = allocator.allocate(nbytes)
    assert allocator.requested_bytes == nbytes
    assert block.size_bytes == allocator.allocated_bytes == allocated_bytes
    assert allocator.reserved_bytes == reserved_bytes


@pytest.mark.parametrize(
    ("nbytes", "allocated_bytes", "reserved_bytes"),
    [
        (1, 512, 2 * MIB),
        (1 * MIB + 1, 1 * MIB + 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 20 * MIB),
        (11 * MIB + 1, 11 * MIB + 512, 20 * MIB),
        (21 * MIB, 21 * MIB, 2 * 20 * MIB),
    ],
)
def test_an_expandable_segment_grows_by_pages_and_splits_to_the_block(
    nbytes: int, allocated_bytes: int, reserved_bytes: int
) -> None:
    allocator = expandable(PLENTY)
    allocator.allocate(nbytes)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (
        allocated_bytes,
        reserved_bytes,
    )


@every_allocator
def test_zero_bytes_take_nothing(make: Callable[[int], Allocator]) -> None:
    allocator = make(0)
    block = allocator.allocate(0)
    assert (allocator.live_blocks, allocator.reserved_bytes) == (0, 0)
    allocator.record_stream(block, 1)
    allocator.free(block)
    allocator.check_integrity()


def test_the_exact_allocator_takes_what_is_asked_for() -> None:
    allocator = ExactAllocator(1000)
    first, _ = allocator.allocate(1), allocator.allocate(999)
    assert allocator.allocated_bytes == allocator.reserved_bytes == 1000
    with pytest.raises(AllocatorFull):
        allocator.allocate(1)
    allocator.free(first)
    allocator.allocate(1, stream=7)
    assert allocator.reserved_bytes == 1000


def test_two_small_blocks_fill_a_small_segment() -> None:
    allocator = CachingAllocator(PLENTY)
    allocate_all(allocator, 1, 1)
    assert mib(allocator) == (2, 2)
    allocator.allocate(1)
    assert allocator.reserved_bytes == 2 * 2 * MIB


def test_a_remainder_of_512_bytes_is_split_in_the_small_pool() -> None:
    allocator = CachingAllocator(PLENTY)
    allocator.allocate(1 * MIB)
    allocator.allocate(1 * MIB - 512)
    allocator.allocate(512)
    assert mib(allocator) == (2, 2)


def test_a_remainder_of_exactly_1_mib_is_not_split_in_the_large_pool() -> None:
    allocator = CachingAllocator(PLENTY)
    assert allocator.allocate(20 * MIB - 1 * MIB).size_bytes == 20 * MIB
    assert allocator.allocate(20 * MIB - 1 * MIB - 512).size_bytes == 19 * MIB - 512


def test_blocks_below_10_mib_share_segments_of_20_mib() -> None:
    allocator = CachingAllocator(PLENTY)
    allocate_all(allocator, 5, 5, 5, 5)
    assert mib(allocator) == (20, 20)
    allocate_all(allocator, 5)
    assert mib(allocator) == (25, 40)


def test_freed_memory_stays_reserved_and_is_used_again() -> None:
    allocator = CachingAllocator(PLENTY)
    allocator.free(allocator.allocate(10 * MIB))
    assert mib(allocator) == (0, 10)
    allocator.allocate(10 * MIB)
    assert mib(allocator) == (10, 10)


def test_the_smallest_block_that_fits_is_used() -> None:
    allocator = CachingAllocator(PLENTY)
    for block in allocate_all(allocator, 16, 12, 14):
        allocator.free(block)
    allocate_all(allocator, 12, 14, 16)
    assert mib(allocator) == (12 + 14 + 16, 12 + 14 + 16)


def test_neighbours_that_are_free_merge() -> None:
    allocator = CachingAllocator(PLENTY)
    first, second, third, _ = allocate_all(allocator, 5, 5, 5, 5)
    allocator.free(first)
    allocator.free(third)
    allocator.free(second)
    allocator.allocate(15 * MIB)
    assert mib(allocator) == (15 + 5, 20)


def test_streams_do_not_share_cached_blocks() -> None:
    allocator = CachingAllocator(PLENTY)
    allocator.free(allocator.allocate(10 * MIB, stream=0))
    allocator.allocate(10 * MIB, stream=1)
    assert mib(allocator) == (10, 10 + 10)


def test_small_and_large_blocks_do_not_share_segments() -> None:
    allocator = CachingAllocator(PLENTY)
    allocator.free(allocator.allocate(20 * MIB))
    allocator.allocate(512)
    assert allocator.reserved_bytes == 20 * MIB + 2 * MIB


def test_release_gives_back_only_segments_without_a_live_block() -> None:
    allocator = CachingAllocator(PLENTY)
    big, first, _ = allocate_all(allocator, 30, 5, 5)
    allocator.free(big)
    allocator.free(first)
    allocator.release_cache()
    assert mib(allocator) == (5, 20)


def test_an_allocation_that_does_not_fit_releases_the_cache_and_counts_one_retry() -> None:
    allocator = CachingAllocator(20 * MIB)
    allocator.free(allocator.allocate(10 * MIB))
    allocator.allocate(20 * MIB)
    assert (mib(allocator), allocator.alloc_retries) == ((20, 20), 1)


def test_an_allocation_that_fails_says_the_numbers_and_leaves_all_usable() -> None:
    allocator = CachingAllocator(40 * MIB)
    held, cached = allocate_all(allocator, 12, 12)
    allocator.free(cached)
    with pytest.raises(AllocatorFull, match="31457280 bytes were asked for") as caught:
        allocator.allocate(30 * MIB)
    full = caught.value
    assert (full.requested_bytes, full.limit_bytes) == (30 * MIB, 40 * MIB)
    assert (full.allocated_bytes, full.reserved_bytes) == (12 * MIB, 12 * MIB)
    assert (allocator.alloc_retries, allocator.live_blocks) == (1, 1)
    allocator.check_integrity()
    allocator.allocate(28 * MIB)
    assert mib(allocator) == (12 + 28, 40)
    assert held.size_bytes == 12 * MIB


def test_fragments_fail_an_allocation_that_their_sum_would_hold() -> None:
    allocator = CachingAllocator(40 * MIB)
    for block in allocate_all(allocator, *[5] * 8)[::2]:
        allocator.free(block)
    with pytest.raises(AllocatorFull) as caught:
        allocator.allocate(6 * MIB)
    assert caught.value.reserved_bytes - caught.value.allocated_bytes == 4 * 5 * MIB


@pytest.mark.parametrize(("make", "fits"), [(CachingAllocator, False), (expandable, True)])
def test_an_expandable_segment_has_no_borders_that_fragment_it(
    make: Callable[[int], Allocator], fits: bool
) -> None:
    allocator = make(40 * MIB)
    blocks = allocate_all(allocator, *[5] * 8)
    for block in blocks[2:6]:
        allocator.free(block)
    if fits:
        allocator.allocate(20 * MIB)
        assert mib(allocator) == (40, 40)
    else:
        with pytest.raises(AllocatorFull):
            allocator.allocate(12 * MIB)


def test_an_expandable_segment_releases_the_pages_that_no_block_touches() -> None:
    allocator = expandable(PLENTY)
    # Pages of 20 MiB: the second block lies on half of the first page and on the whole second.
    _, middle, _ = allocate_all(allocator, 10, 30, 20)
    allocator.free(middle)
    allocator.release_cache()
    assert mib(allocator) == (10 + 20, 60 - 20)
    allocator.check_integrity()
    allocator.allocate(30 * MIB)
    assert mib(allocator) == (60, 60)


def test_an_expandable_segment_uses_a_hole_before_its_tail() -> None:
    allocator = expandable(60 * MIB)
    first, second, _ = allocate_all(allocator, 20, 20, 20)
    allocator.free(first)
    allocator.free(second)
    allocator.release_cache()
    assert mib(allocator) == (20, 20)
    allocate_all(allocator, 30, 10)
    assert mib(allocator) == (20 + 30 + 10, 60)


def test_an_expandable_segment_passes_over_a_hole_that_is_too_small() -> None:
    allocator = expandable(PLENTY)
    first, _, _ = allocate_all(allocator, 20, 20, 20)
    allocator.free(first)
    allocator.release_cache()
    allocator.allocate(30 * MIB)
    assert mib(allocator) == (20 + 20 + 30, 20 + 20 + 2 * 20)
    allocator.check_integrity()


def test_a_free_block_that_can_not_grow_is_preferred_to_one_that_can() -> None:
    allocator = expandable(PLENTY)
    first, _, _ = allocate_all(allocator, 16, 4, 8)
    allocator.free(first)
    # 16 MiB are free before and 40 - 16 - 4 - 8 = 12 at the tail, which one page makes 32.
    allocate_all(allocator, 12, 28)
    assert mib(allocator) == (4 + 8 + 12 + 28, 40 + 20)


def test_a_neighbour_that_grows_stops_growth_until_the_cache_is_released() -> None:
    allocator = CachingAllocator(40 * MIB)
    cached = allocator.allocate(30 * MIB)
    allocator.limit_bytes = 20 * MIB
    with pytest.raises(AllocatorFull) as caught:
        allocator.allocate(512)
    assert (caught.value.limit_bytes, caught.value.reserved_bytes) == (20 * MIB, 30 * MIB)
    allocator.free(cached)
    allocator.allocate(512)
    assert (allocator.reserved_bytes, allocator.alloc_retries) == (2 * MIB, 2)


def test_a_neighbour_that_grows_does_not_stop_use_of_the_cache() -> None:
    allocator = CachingAllocator(40 * MIB)
    allocator.free(allocator.allocate(30 * MIB))
    allocator.limit_bytes = 0
    allocator.allocate(30 * MIB)
    assert (mib(allocator), allocator.alloc_retries) == ((30, 30), 0)


def test_a_block_that_another_stream_uses_is_pending_until_that_stream_is_done() -> None:
    allocator = CachingAllocator(PLENTY)
    block = allocator.allocate(10 * MIB)
    allocator.record_stream(block, 1)
    allocator.record_stream(block, 2)
    allocator.free(block)
    assert (mib(allocator), allocator.requested_bytes) == ((0, 10), 10 * MIB)
    allocator.process_events([1, 3])
    allocator.check_integrity()
    allocator.allocate(10 * MIB)
    assert mib(allocator) == (10, 10 + 10)
    allocator.process_events([2])
    allocator.allocate(10 * MIB)
    assert (mib(allocator), allocator.requested_bytes) == ((20, 20), 20 * MIB)


def test_a_block_that_its_own_stream_is_recorded_for_is_free_at_once() -> None:
    allocator = CachingAllocator(PLENTY)
    block = allocator.allocate(10 * MIB, stream=3)
    allocator.record_stream(block, 3)
    allocator.free(block)
    allocator.allocate(10 * MIB, stream=3)
    assert mib(allocator) == (10, 10)


@every_allocator
def test_an_allocation_that_does_not_fit_waits_for_pending_blocks(
    make: Callable[[int], Allocator],
) -> None:
    allocator = make(20 * MIB)
    block = allocator.allocate(20 * MIB)
    allocator.record_stream(block, 1)
    allocator.free(block)
    allocator.allocate(20 * MIB)
    assert (mib(allocator), allocator.alloc_retries) == ((20, 20), 1)


def test_a_retry_does_not_search_the_cache_again() -> None:
    allocator = CachingAllocator(20 * MIB)
    block, *_ = allocate_all(allocator, 5, 5, 5, 5)
    allocator.record_stream(block, 1)
    allocator.free(block)
    with pytest.raises(AllocatorFull):
        allocator.allocate(5 * MIB)
    allocator.allocate(5 * MIB)
    assert (mib(allocator), allocator.alloc_retries) == ((20, 20), 1)


def test_peaks_last_until_they_are_reset() -> None:
    allocator = CachingAllocator(PLENTY)
    allocator.free(allocator.allocate(30 * MIB - 1))
    allocator.release_cache()
    allocator.allocate(10 * MIB)
    assert allocator.peak_requested_bytes == 30 * MIB - 1
    assert allocator.peak_allocated_bytes == allocator.peak_reserved_bytes == 30 * MIB
    allocator.reset_peaks()
    assert allocator.peak_requested_bytes == 10 * MIB
    assert allocator.peak_allocated_bytes == allocator.peak_reserved_bytes == 10 * MIB


@every_allocator
def test_a_block_is_freed_once(make: Callable[[int], Allocator]) -> None:
    allocator = make(PLENTY)
    block = allocator.allocate(3 * KIB)
    allocator.free(block)
    with pytest.raises(DeviceIntegrityError, match="3072 bytes on stream 0 was freed when it was"):
        allocator.free(block)
    with pytest.raises(DeviceIntegrityError, match="used by another stream"):
        allocator.record_stream(block, 1)
    allocator.check_integrity()


def test_a_block_freed_in_the_middle_of_an_allocation_waits_for_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocator = CachingAllocator(PLENTY)
    block = allocator.allocate(5 * MIB)
    chunk_type: Any = type(block)
    split = chunk_type.split

    def collect_garbage_and_split(chunk: Any, *args: Any) -> Any:
        allocator.free(block)
        return split(chunk, *args)

    monkeypatch.setattr(chunk_type, "split", collect_garbage_and_split)
    allocator.allocate(5 * MIB)
    allocator.check_integrity()
    assert mib(allocator) == (5, 20)


def lose_bytes(allocator: Any, block: Any) -> None:
    allocator.allocated_bytes -= 512


def lose_request(allocator: Any, block: Any) -> None:
    allocator.requested_bytes -= 1


def lose_segment(allocator: Any, block: Any) -> None:
    allocator.reserved_bytes -= 20 * MIB


def lose_block(allocator: Any, block: Any) -> None:
    allocator.live_blocks -= 1


def shrink_block(allocator: Any, block: Any) -> None:
    block.size_bytes -= 512


def cut_off_rest(allocator: Any, block: Any) -> None:
    block.next = None


def forget_to_merge(allocator: Any, block: Any) -> None:
    block.pool.add(block.next.split(5 * MIB, block.next.state))


def forget_to_list(allocator: Any, block: Any) -> None:
    block.pool.free.clear()


def list_live_block(allocator: Any, block: Any) -> None:
    block.pool.free.append((block.size_bytes, block.address, block))


def free_without_pending(allocator: Any, block: Any) -> None:
    allocator.record_stream(block, 1)
    allocator.free(block)
    allocator._pending.clear()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_bytes, "allocated bytes are booked"),
        (lose_request, "requested bytes are booked"),
        (lose_segment, "reserved bytes are booked"),
        (lose_block, "live blocks are booked"),
        (shrink_block, "follows one that ends at"),
        (cut_off_rest, "holds chunks of 5242880 bytes"),
        (forget_to_merge, "are both free"),
        (forget_to_list, "0 chunks of stream 0 are listed as free and 1 are"),
        (list_live_block, "2 chunks of stream 0 are listed as free and 1 are"),
        (free_without_pending, "pending blocks are booked"),
    ],
)
def test_damage_is_found(damage: Callable[[Any, Any], None], message: str) -> None:
    allocator = CachingAllocator(PLENTY)
    block = allocator.allocate(5 * MIB)
    allocator.check_integrity()
    damage(allocator, block)
    with pytest.raises(DeviceIntegrityError, match=message):
        allocator.check_integrity()


@pytest.mark.parametrize("damage", [lose_bytes, lose_request, lose_block])
def test_damage_to_the_exact_allocator_is_found(damage: Callable[[Any, Any], None]) -> None:
    allocator = ExactAllocator(PLENTY)
    damage(allocator, allocator.allocate(1000))
    with pytest.raises(DeviceIntegrityError, match="are booked"):
        allocator.check_integrity()


def assert_books_are_right(allocator: Allocator, held: list[Block]) -> None:
    allocator.check_integrity()
    assert allocator.live_blocks == len(held)
    assert allocator.allocated_bytes == sum(block.size_bytes for block in held)
    assert allocator.allocated_bytes <= allocator.reserved_bytes <= allocator.peak_reserved_bytes


def assert_rounded(allocator: Allocator, block: Block, nbytes: int) -> None:
    rounded_bytes = -(-nbytes // 512) * 512
    if isinstance(allocator, ExactAllocator):
        assert block.size_bytes == nbytes
    elif rounded_bytes <= 1 * MIB or getattr(allocator, "expandable_segments", False):
        assert block.size_bytes == rounded_bytes
    else:
        assert rounded_bytes <= block.size_bytes <= rounded_bytes + 1 * MIB


sizes = st.one_of(
    st.integers(1, 4 * KIB), st.integers(1, 3 * MIB), st.integers(1, 32).map(lambda n: n * MIB)
)
steps = st.one_of(
    st.tuples(st.just("allocate"), sizes, st.integers(0, 2)),
    st.tuples(st.just("allocate"), sizes, st.just(0)),
    st.tuples(st.just("free"), st.integers(0, 99), st.just(0)),
    st.tuples(st.just("record_stream"), st.integers(0, 99), st.integers(0, 2)),
    st.tuples(st.just("process_events"), st.just(0), st.integers(0, 2)),
    st.tuples(st.just("release_cache"), st.just(0), st.just(0)),
    st.tuples(st.just("limit"), st.integers(0, 200), st.just(0)),
)


@every_allocator
@settings(max_examples=200, derandomize=True, deadline=None)
@given(todo=st.lists(steps, min_size=10, max_size=60))
def test_the_books_are_right_after_every_step(
    make: Callable[[int], Allocator], todo: list[tuple[str, int, int]]
) -> None:
    allocator = make(100 * MIB)
    held: list[Block] = []
    for verb, value, stream in todo:
        reserved_bytes = allocator.reserved_bytes
        if verb == "allocate":
            with suppress(AllocatorFull):
                block = allocator.allocate(value, stream)
                assert_rounded(allocator, block, value)
                held.append(block)
            assert allocator.reserved_bytes <= max(allocator.limit_bytes, reserved_bytes)
        elif verb == "free" and held:
            allocator.free(held.pop(value % len(held)))
        elif verb == "record_stream" and held:
            allocator.record_stream(held[value % len(held)], stream)
        elif verb == "process_events":
            allocator.process_events([stream])
        elif verb == "release_cache":
            allocator.release_cache()
        elif verb == "limit":
            allocator.limit_bytes = value * MIB
        assert_books_are_right(allocator, held)
    while held:
        allocator.free(held.pop())
    allocator.release_cache()
    assert_books_are_right(allocator, held)
    assert allocator.reserved_bytes == allocator.requested_bytes == 0
