"""The order of compute and copies, on streams that are checked, and with bugs planted in it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from stacks import Stack, row

from residency.offload.cards import custom_card
from residency.offload.device import Event
from residency.offload.errors import OrderError
from residency.offload.host_memory import HostBudget
from residency.offload.layers import CopyStream, Region
from residency.offload.layerwise import LayerwiseOffload
from residency.offload.placement import ComponentOffload, Placement, Resident
from residency.offload.simulated.card import InjectedError, SimulatedCard


@pytest.fixture
def card() -> Iterator[SimulatedCard]:
    with SimulatedCard(
        custom_card(1 << 20), allocator="exact", context_bytes=0, check_order=True
    ) as card:
        yield card


def use(
    placement: Placement, x: torch.Tensor, *, holds: bool = True, passes: int = 1, keep: bool
) -> None:
    placement.begin_use(holds_resident_set=holds, passes=passes)
    for _ in range(passes):
        placement.module(x)  # type: ignore[attr-defined]
    placement.release_after_use(keep_resident=keep)


def on_card(card: SimulatedCard) -> torch.Tensor:
    return row().to(card.torch_device)


def uses(card: SimulatedCard, **options: Any) -> None:
    """Several of one module, with a set that is held, retained, and neither."""
    offload = LayerwiseOffload(Stack(), card, **options)
    offload.install()
    try:
        for holds, passes, keep in ((0, 1, 0), (1, 2, 1), (1, 1, 0), (0, 2, 0), (1, 2, 0)):
            use(offload, on_card(card), holds=bool(holds), passes=passes, keep=bool(keep))
    finally:
        offload.remove()


def streamed(card: SimulatedCard) -> None:
    uses(card)


def pinned_set(card: SimulatedCard) -> None:
    uses(card, resident_layers=(1, 1), pin=HostBudget(1 << 20))


def given_up_in_flight(card: SimulatedCard) -> None:
    """A use that fetches layers ahead and ends before they run."""
    offload = LayerwiseOffload(Stack(), card, prefetch=2)
    offload.install()
    try:
        use(offload, on_card(card), holds=False, keep=False)
        offload.begin_use(holds_resident_set=False)
        offload.release_after_use()
        torch.zeros(8, device=card.torch_device)
    finally:
        offload.remove()


def given_up_by_a_use_that_fails(card: SimulatedCard) -> None:
    """Layers fetched ahead, a use that finds no memory before it fetched any, and its end."""
    offload = LayerwiseOffload(Stack(), card, resident_layers=(3, 3))
    offload.install()
    try:
        use(offload, on_card(card), holds=False, keep=False)
        offload.begin_use(holds_resident_set=False)
        card.faults.at_allocation(1)
        with suppress(torch.OutOfMemoryError):
            offload.begin_use(holds_resident_set=True)
        offload.release_after_use()
        torch.empty(8, device=card.torch_device)
    finally:
        offload.remove()


def given_up_elsewhere(card: SimulatedCard) -> None:
    """Layers fetched ahead on one stream, and given up in flight on another."""
    offload = LayerwiseOffload(Stack(), card)
    offload.install()
    try:
        use(offload, on_card(card), holds=False, keep=False)
        offload.begin_use(holds_resident_set=False)
        with card.on(card.new_stream()):
            offload.release_after_use()
        torch.empty(8, device=card.torch_device)
    finally:
        offload.remove()


def reset_in_flight(card: SimulatedCard) -> None:
    offload = LayerwiseOffload(Stack(), card, prefetch=2)
    offload.install()
    try:
        use(offload, on_card(card), holds=False, keep=False)
        offload.begin_use(holds_resident_set=False)
        offload.release_all()
        torch.zeros(8, device=card.torch_device)
    finally:
        offload.remove()


def copy_that_fails(card: SimulatedCard) -> None:
    """The second region of a layer isn't copied, and the buffer of the first is given up."""
    offload = ComponentOffload(Stack(), card)
    card.faults.at_copy(2)
    with suppress(InjectedError):
        offload.begin_use(holds_resident_set=False)
    offload.release_all()
    torch.zeros(8, device=card.torch_device)


def binding_that_fails(card: SimulatedCard) -> None:
    offload = ComponentOffload(Stack(), card)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Region, "bind", fail)
        with suppress(InjectedError):
            offload.begin_use(holds_resident_set=False)
    torch.zeros(8, device=card.torch_device)


def fail(*_: Any) -> None:
    raise InjectedError("injected")


def moving(placement: Placement, card: SimulatedCard) -> None:
    """Each use on another stream than the last, with what the last has left on the card."""
    x = on_card(card)
    first, second = card.current_stream(), card.new_stream()
    placement.install()
    try:
        for stream, keep in ((first, True), (second, True), (first, True), (second, False)):
            with card.on(stream):
                use(placement, x, passes=2, keep=keep)
            torch.empty(8, device=card.torch_device)
    finally:
        card.synchronize()
        placement.remove()


def moving_resident(card: SimulatedCard) -> None:
    moving(Resident(Stack(), card), card)


def moving_component(card: SimulatedCard) -> None:
    moving(ComponentOffload(Stack(), card), card)


def moving_layers(card: SimulatedCard) -> None:
    moving(LayerwiseOffload(Stack(), card, resident_layers=(2, 1)), card)


def freed_elsewhere(card: SimulatedCard) -> None:
    """What one stream has used is given up while another is current, and goes back to the first."""
    x, side = on_card(card), card.new_stream()
    placement = ComponentOffload(Stack(), card)
    placement.begin_use(holds_resident_set=False)
    with card.on(side):
        placement.begin_use(holds_resident_set=False)
        placement.module(x)
        placement.release_after_use()
    torch.empty(8, device=card.torch_device)


SCENES = (
    streamed,
    pinned_set,
    given_up_in_flight,
    given_up_by_a_use_that_fails,
    given_up_elsewhere,
    reset_in_flight,
    copy_that_fails,
    binding_that_fails,
    moving_resident,
    moving_component,
    moving_layers,
    freed_elsewhere,
)


@pytest.mark.parametrize("scene", SCENES)
def test_compute_and_copies_are_in_order(card, scene: Callable[[SimulatedCard], None]):
    scene(card)


# Bugs, each as the code would read with it.


def fill_without_waiting_for_compute(
    self: CopyStream, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]
) -> Event:
    with self.device.on(self._stream):
        for target, source in copies:
            target.copy_(source, non_blocking=True)
    return self._stream.record_event()


def fill_recording_before_it_copies(
    self: CopyStream, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]
) -> Event:
    compute = self.device.current_stream()
    self._stream.wait_event(compute.record_event())
    copied = self._stream.record_event()
    with self.device.on(self._stream):
        for target, source in copies:
            target.copy_(source, non_blocking=True)
    return copied


def fill_without_a_fence_for_errors(
    self: CopyStream, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]
) -> Event:
    compute = self.device.current_stream()
    self._stream.wait_event(compute.record_event())
    with self.device.on(self._stream):
        for target, source in copies:
            target.copy_(source, non_blocking=True)
    return self._stream.record_event()


def enter_without_waiting(self: LayerwiseOffload, i: int) -> None:
    self._order.enter(i)
    self.layers_run.add(i)
    (self._loaded.get(i) or self._load_streamed(i)).copied = None
    self._prefetch(self._ahead_of(i))


def give_up_without_waiting(self: LayerwiseOffload, i: int) -> None:
    loaded = self._loaded.pop(i)
    self._layers[i].offload()
    if loaded.streamed:
        self._window.append(loaded.buffer)


def release_without_waiting(
    self: LayerwiseOffload, keep_resident: bool = False, retained: frozenset[int] | None = None
) -> None:
    self._in_use = False
    self._order.end_pass()
    for i in [*self._loaded]:
        give_up_without_waiting(self, i)
    self._close_window()


def enter_lending_its_buffer(self: LayerwiseOffload, i: int) -> None:
    """The buffer of the layer that is about to run is the next one's."""
    real_enter(self, i)
    if self._is_streamed(i) and self._order.known:
        self._window.append(self._loaded[i].buffer)
        for ahead in list(self._ahead_of(i)):
            if ahead in self._loaded:
                self._give_up(ahead)
            self._load_streamed(ahead)


def offload_without_joining(self: ComponentOffload) -> None:
    self._weights.offload()
    self._loaded = False


real_enter = LayerwiseOffload._enter


def do_nothing(*_: Any) -> None:
    pass


def wait_never(self: CopyStream, event: Event) -> None:
    pass


BUGS = {
    "a copy doesn't wait for compute": (
        streamed, CopyStream, "fill", fill_without_waiting_for_compute,
        r"copy_from, which writes .* doesn't wait for aten::\w+, which reads",
    ),
    "the event is recorded before the copies": (
        streamed, CopyStream, "fill", fill_recording_before_it_copies,
        r"which reads .* doesn't wait for aten::_copy_from, which writes",
    ),
    "a layer runs before its copy": (
        streamed, LayerwiseOffload, "_enter", enter_without_waiting,
        r"which reads .* doesn't wait for aten::_copy_from, which writes",
    ),
    "a pinned layer runs before its copy": (
        pinned_set, LayerwiseOffload, "_enter", enter_without_waiting,
        r"which reads .* doesn't wait for aten::_copy_from, which writes",
    ),
    "compute waits for no copy": (
        streamed, CopyStream, "wait", wait_never,
        r"which reads .* doesn't wait for aten::_copy_from, which writes",
    ),
    "a layer is given up with its copy in flight": (
        given_up_in_flight, LayerwiseOffload, "release_after_use", release_without_waiting,
        r"are allocated on stream 0 while aten::_copy_from",
    ),
    "all is given up with copies in flight": (
        reset_in_flight, SimulatedCard, "synchronize", do_nothing,
        r"are allocated on stream 0 while aten::_copy_from",
    ),
    "a buffer is the next layer's before its last reader": (
        streamed, LayerwiseOffload, "_enter", enter_lending_its_buffer,
        r"which reads .* doesn't wait for aten::_copy_from, which writes",
    ),
    "an error in a copy leaves the others in flight": (
        copy_that_fails, CopyStream, "fill", fill_without_a_fence_for_errors,
        r"are allocated on stream 0 while aten::_copy_from",
    ),
    "an error behind the copies leaves them in flight": (
        binding_that_fails, CopyStream, "wait", wait_never,
        r"are allocated on stream 0 while aten::_copy_from",
    ),
    "a resident component doesn't follow compute": (
        moving_resident, CopyStream, "join", do_nothing,
        r"which reads .* on stream 2, doesn't wait for .* on stream 1",
    ),
    "a component doesn't follow compute": (
        moving_component, CopyStream, "join", do_nothing,
        r"which reads .* on stream 2, doesn't wait for .* on stream 1",
    ),
    "layers don't follow compute": (
        moving_layers, CopyStream, "join", do_nothing,
        r"which reads .* on stream 2, doesn't wait for .* on stream 1",
    ),
    "memory doesn't go back behind its last reader": (
        freed_elsewhere, ComponentOffload, "_offload", offload_without_joining,
        r"are allocated on stream 0 while aten::mm, which reads",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("scene", "owner", "name", "bug", "message"), BUGS.values(), ids=list(BUGS)
)
def test_a_bug_in_the_order_is_found(card, monkeypatch, scene, owner, name: str, bug, message: str):
    monkeypatch.setattr(owner, name, bug)
    with pytest.raises(OrderError, match=message):
        scene(card)
