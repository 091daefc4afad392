from residency.offload.device import Reading, Transfers


def test_transfers_between_two_moments_are_their_difference():
    earlier = Transfers(h2d_bytes=100, h2d_copies=3, d2h_bytes=10, d2h_copies=1)
    later = Transfers(h2d_bytes=1100, h2d_copies=5, d2h_bytes=30, d2h_copies=4)
    assert later - earlier == Transfers(1000, 2, 20, 3)
    assert later - later == Transfers()


def test_usable_is_the_total_less_others_and_context():
    reading = Reading(
        total_bytes=1000,
        free_bytes=1000 - 300 - 50 - 400,
        others_bytes=300,
        context_bytes=50,
        allocated_bytes=350,
        reserved_bytes=400,
        peak_allocated_bytes=380,
        peak_reserved_bytes=420,
        alloc_retries=0,
    )
    assert reading.usable_bytes == 1000 - 300 - 50 == reading.free_bytes + reading.reserved_bytes
