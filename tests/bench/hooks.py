"""What the hooks of layerwise offload cost a layer call, against the bare module."""

import statistics
import time

import torch
from rich.table import Table
from torch import nn

from residency.offload.cards import find_card
from residency.offload.layerwise import LayerwiseOffload
from residency.offload.simulated.card import SimulatedCard

LAYERS = 64
ROUNDS = 200


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def table() -> Table:
    """All in one process, taking turns; medians. Layers do nothing, so calls are all there is."""
    x = torch.zeros(1)
    made = Table(title=f"Microseconds a layer call: {LAYERS} layers that do nothing, medians")
    made.add_column("module")
    made.add_column("µs a layer call", justify="right")
    made.add_column("above the bare module", justify="right")
    with SimulatedCard(find_card("RTX 4090"), allocator="exact") as device:
        bare = Stack()
        modules = {"bare": bare}
        held = {"hooked, all layers resident": LAYERS, "hooked, all layers streamed": 0}
        for name, resident in held.items():
            offload = LayerwiseOffload(Stack(), device, resident_layers=(resident,))
            offload.install()
            offload.begin_use(holds_resident_set=True, passes=ROUNDS + 20)
            modules[name] = offload.module
        seconds: dict[str, list[float]] = {name: [] for name in modules}
        for _ in range(ROUNDS):
            for name, module in modules.items():
                start = time.perf_counter()
                module(x)
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(each) / LAYERS * 1e6 for name, each in seconds.items()}
    for name, median in medians.items():
        extra = "-" if name == "bare" else f"+{median - medians['bare']:.1f}"
        made.add_row(name, f"{median:.1f}", extra)
    made.caption = "Streamed layers are copied by the simulated card's Python, not by a bus."
    return made
