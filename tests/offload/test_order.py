from residency.offload.layerwise import LayerOrder


def run(order: LayerOrder, *layers: int) -> None:
    order.begin(passes=1)
    for layer in layers:
        order.enter(layer)
    order.end_pass()


def test_until_a_pass_is_seen_the_layers_of_a_group_follow_one_another():
    order = LayerOrder([3, 2])
    assert list(order.after(0)) == [1, 2]
    assert list(order.after(3)) == [4]
    assert (order.first, order.known) == (None, False)


def test_a_pass_teaches_which_group_follows_which_and_what_comes_first():
    order = LayerOrder([2, 2])
    run(order, 2, 3, 0, 1)
    assert list(order.after(2)) == [3, 0, 1]
    assert (order.first, order.known, order.is_last(1)) == (2, True, True)


def test_layers_that_are_left_out_are_no_longer_expected():
    order = LayerOrder([4])
    run(order, 0, 2)
    assert list(order.after(0)) == [2]
    assert order.is_last(2)


def test_a_layer_that_runs_again_begins_the_next_pass():
    order = LayerOrder([2])
    order.begin(passes=3)
    for layer in (0, 1, 0, 1):
        order.enter(layer)
    assert order.passes_left == 2
    assert order.is_last(1)


def test_entering_tells_whether_the_order_changed():
    order = LayerOrder([3])
    order.begin(passes=1)
    assert [order.enter(layer) for layer in (0, 1, 2)] == [False, False, False]
    order.begin(passes=1)
    assert [order.enter(layer) for layer in (0, 2, 1)] == [False, True, True]


def test_orders_that_go_round_end():
    order = LayerOrder([3])
    order.begin(passes=2)
    for layer in (0, 1, 2, 0, 2, 1):
        order.enter(layer)
    assert list(order.after(0)) == [2, 1]
    assert set(order.after(2)) <= {1}


def test_a_pass_that_was_broken_off_teaches_no_end():
    order = LayerOrder([3])
    order.begin(passes=1)
    order.enter(0)
    order.interrupt()
    assert not order.end_pass()
    assert list(order.after(0)) == [1, 2]
