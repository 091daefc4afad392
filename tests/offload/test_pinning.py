"""The blocks that masters are pinned in, by hand arithmetic and for any size."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from residency.offload.host_memory import (
    LARGEST_CHUNK_BYTES,
    LEAST_CHUNK_BYTES,
    chunked_charge_bytes,
    chunks,
    pinned_charge_bytes,
)

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("nbytes", "charge_bytes"),
    [(0, 0), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1023, 1024), (1024, 1024), (1025, 2048)],
)
def test_a_pinned_block_is_charged_after_rounding_to_a_power_of_two(nbytes, charge_bytes):
    assert pinned_charge_bytes(nbytes) == charge_bytes


@pytest.mark.parametrize(
    ("nbytes", "blocks", "charge_bytes"),
    [
        (0, [], 0),
        (6 * KIB, [6 * KIB], 8 * KIB),
        (200 * KIB, [200 * KIB], 256 * KIB),
        (300 * KIB, [256 * KIB, 44 * KIB], 320 * KIB),
        (500 * KIB, [500 * KIB], 512 * KIB),  # 256 and 244 would be charged as much
        (600 * KIB, [512 * KIB, 88 * KIB], 640 * KIB),
        (3 * MIB, [2 * MIB, MIB], 3 * MIB),
        (3 * GIB, [GIB, GIB, GIB], 3 * GIB),
        (3 * GIB - 1, [GIB, GIB, GIB - 1], 3 * GIB),
    ],
)
def test_a_master_is_pinned_in_powers_of_two_and_a_rest(nbytes, blocks, charge_bytes):
    assert [*chunks(nbytes)] == blocks
    assert chunked_charge_bytes(nbytes) == charge_bytes


@settings(derandomize=True, database=None, max_examples=500)
@given(st.integers(0, 40 * GIB) | st.integers(0, 3 * MIB) | st.integers(GIB - MIB, GIB + MIB))
def test_chunks_are_the_bytes_and_are_charged_little_more(nbytes: int):
    blocks = [*chunks(nbytes)]
    charge_bytes = chunked_charge_bytes(nbytes)
    assert sum(blocks) == nbytes
    assert sum(map(pinned_charge_bytes, blocks)) == charge_bytes
    assert 0 <= charge_bytes - nbytes < LEAST_CHUNK_BYTES // 2
    assert blocks == sorted(blocks, reverse=True)
    assert max(blocks, default=0) <= LARGEST_CHUNK_BYTES
    assert all(pinned_charge_bytes(block) == block for block in blocks[:-1])
    # No fewer powers of two, none above the largest, are as much.
    least = charge_bytes // LARGEST_CHUNK_BYTES + (charge_bytes % LARGEST_CHUNK_BYTES).bit_count()
    assert len(blocks) == least <= 13 + nbytes // LARGEST_CHUNK_BYTES


def test_a_block_to_a_layer_leaves_half_of_what_chunks_fit():
    """HM-01: layers of 1.2 GiB, and 41.22 GiB to pin them in."""
    layer_bytes, budget_bytes = round(1.2 * GIB), round(41.22 * GIB)
    assert budget_bytes // pinned_charge_bytes(layer_bytes) == 20
    # 1228.8 MiB are 1228 MiB, 768 KiB and 51.2 KiB.
    *blocks, rest = chunks(layer_bytes)
    assert [block / MIB for block in blocks] == [1024, 128, 64, 8, 4, 0.5, 0.25]
    assert rest // KIB == 51
    assert chunked_charge_bytes(layer_bytes) == 1228 * MIB + 832 * KIB
    assert budget_bytes // chunked_charge_bytes(layer_bytes) == 34


def test_no_block_is_as_large_as_those_that_drivers_refuse():
    """HM-05: 8 GiB in one piece can be pinned, 12 GiB can't."""
    assert [*chunks(12 * GIB)] == [GIB] * 12


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        ((3072, 3072), [16, 2]),
        ((12288, 3072), [64, 8]),
        ((5120, 13824), [128, 4, 2, 1]),
        ((3584, 18944), [128, 1, 0.5]),
    ],
    ids=["flux attention", "flux feed-forward", "wan feed-forward", "qwen2.5-vl feed-forward"],
)
def test_weights_of_known_models_are_few_blocks_and_charged_what_they_are(shape, blocks):
    nbytes = shape[0] * shape[1] * 2
    assert [block / MIB for block in chunks(nbytes)] == blocks
    assert chunked_charge_bytes(nbytes) == nbytes
