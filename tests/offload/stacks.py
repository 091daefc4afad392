"""Two stacks of layers, small enough to count every byte by hand."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

WIDTH = 16
ROW_BYTES = WIDTH * 4
"""One float32 row: what a stack is called with, and what each of its layers returns."""


class Block(nn.Module):
    """`hidden` times 128 bytes, half of it up and half down: 1024 for 8, in two regions of 512."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden, bias=False)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x))


class Stack(nn.Module):
    """No layer has `embed` (1024 bytes), which `head` is tied to, and `scale` (4 bytes).

    `path` is the order in which a call runs the layers, those of `second` behind those of `first`.
    """

    def __init__(self, first: Iterable[int] = (8, 8, 8), second: Iterable[int] = (8, 8, 8)) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
            self.first = nn.ModuleList(map(Block, first))
            self.second = nn.ModuleList(map(Block, second))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((1,), 0.5))
        self.path: Sequence[int] = range(len(self.first) + len(self.second))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = [*self.first, *self.second]
        x = self.embed(x) * self.scale
        for i in self.path:
            x = layers[i](x)
        return self.head(x)


def row() -> torch.Tensor:
    return torch.linspace(-1, 1, WIDTH).reshape(1, WIDTH)
