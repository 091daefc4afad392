"""Order between compute and copies. Simulated streams never have to wait, so waits are recorded."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from stacks import Stack, row

from residency.offload.cards import custom_card
from residency.offload.layers import CopyStream
from residency.offload.layerwise import LayerwiseOffload
from residency.offload.simulated.card import SimulatedCard


@dataclass(frozen=True)
class Event:
    stream: str
    number: int

    def synchronize(self) -> None:
        pass


@dataclass
class RecordingStream:
    name: str
    recorded: list[Event] = field(default_factory=list)
    waited: list[Event] = field(default_factory=list)

    def record_event(self) -> Event:
        self.recorded.append(Event(self.name, len(self.recorded)))
        return self.recorded[-1]

    def wait_event(self, event: Event) -> None:
        self.waited.append(event)


class RecordingCard(SimulatedCard):
    """A card with one stream to compute and one to copy, which remember what they waited for."""

    def __init__(self) -> None:
        super().__init__(custom_card(1 << 20), allocator="exact", context_bytes=0)
        self.compute, self.copy = RecordingStream("compute"), RecordingStream("copy")
        self.current = self.compute
        self.copied_on: list[str] = []

    def new_stream(self) -> Any:
        return self.copy

    def current_stream(self) -> Any:
        return self.current

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        self.current = stream
        try:
            yield
        finally:
            self.current = self.compute

    def cross_bus(self, h2d_bytes: int, d2h_bytes: int) -> None:
        self.copied_on.append(self.current.name)
        super().cross_bus(h2d_bytes, d2h_bytes)


@pytest.fixture
def card() -> Iterator[RecordingCard]:
    with RecordingCard() as card:
        yield card


def target(card: RecordingCard) -> torch.Tensor:
    return torch.zeros(4, device=card.torch_device)


def test_a_copy_runs_on_its_stream_behind_the_compute_issued_before(card: RecordingCard):
    copies = CopyStream(card)
    copied = copies.fill([(target(card), torch.ones(4)), (target(card), torch.ones(4))])
    assert card.copy.waited == card.compute.recorded == [Event("compute", 0)]
    assert card.copied_on == ["copy", "copy"]
    assert copied == card.copy.recorded[-1]
    assert card.compute.waited == []
    copies.wait(copied)
    assert card.compute.waited == [copied]


def test_compute_waits_for_copies_whose_targets_are_given_up_by_an_error(card: RecordingCard):
    copies = CopyStream(card)
    card.faults.at_copy(2)
    with pytest.raises(RuntimeError, match="injected"):
        copies.fill([(target(card), torch.ones(4)), (target(card), torch.ones(4))])
    assert card.compute.waited == card.copy.recorded == [Event("copy", 0)]
    assert card.current is card.compute


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("holds", [False, True])
def test_a_layer_runs_only_behind_its_own_copy(card: RecordingCard, prefetch: int, holds: bool):
    module = Stack()
    offload = LayerwiseOffload(module, card, resident_layers=(1, 1), prefetch=prefetch)
    owner: dict[int, Event] = {}
    fill = offload._copies.fill
    by_bytes = {layer.up.weight.data_ptr(): i for i, layer in enumerate(offload._modules)}

    def remember(copies: Any) -> Event:
        copies = list(copies)
        event = fill(copies)
        layer = by_bytes.get(copies[0][1].data_ptr())
        if layer is not None:
            owner[layer] = event
        return event

    offload._copies.fill = remember  # type: ignore[method-assign]
    offload.install()
    ran = []

    def check(i: int) -> None:
        assert owner[i] in card.compute.waited
        ran.append(i)

    for i, layer in enumerate(offload._modules):
        layer.register_forward_pre_hook(lambda *_, i=i: check(i))
    for _ in range(2):
        offload.begin_use(holds_resident_set=holds, passes=2)
        assert card.compute.waited[0] == Event("copy", 0)  # the weights in no layer
        for _ in range(2):
            module(row().to(card.torch_device))
        offload.release_after_use(keep_resident=holds)
    assert ran == [*range(6)] * 4
    offload.remove()


def test_memory_is_given_up_only_behind_a_copy_into_it(card: RecordingCard):
    offload = LayerwiseOffload(Stack(), card, prefetch=2)
    offload.install()
    offload.begin_use(holds_resident_set=False)
    offload.module(row().to(card.torch_device))
    offload.release_after_use()
    offload.begin_use(holds_resident_set=False)
    assert offload.on_device == {0, 1}
    assert not set(card.copy.recorded[-2:]) & set(card.compute.waited)
    offload.release_after_use()
    assert set(card.copy.recorded) <= set(card.compute.waited)
    offload.remove()


def test_layers_in_flight_are_given_up_only_when_the_whole_card_is_done(card, monkeypatch):
    offload = LayerwiseOffload(Stack(), card, prefetch=2)
    offload.install()
    offload.begin_use(holds_resident_set=False)
    offload.module(row().to(card.torch_device))
    offload.release_after_use()
    offload.begin_use(holds_resident_set=False)
    held_bytes = []
    monkeypatch.setattr(card, "synchronize", lambda: held_bytes.append(card.read().allocated_bytes))
    offload.release_all()
    assert held_bytes == [2 * 1024]
    assert card.read().allocated_bytes == 0
    offload.remove()
