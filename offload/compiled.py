"""Hooks on modules that torch.compile may compile, before or after they are hooked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

import torch

Hook = TypeVar("Hook", bound=Callable[..., object])


def untraced(hook: Hook) -> Hook:
    """`hook`, run as it stands each time, and known as ours. A graph ends where it is called.

    Traced, it would be run once, and what it did then be in the graph.
    """
    made: Hook = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    made.is_ours = True  # type: ignore[attr-defined]
    return made


def is_ours(hook: object) -> bool:
    """Whether we put it on a module: `untraced` made it, or it says so itself."""
    return getattr(hook, "is_ours", False) is True


def retrace() -> None:
    """Forget the graphs there are, which are of modules without the hooks that they have now.

    torch.compile guards the hooks that it has seen, and doesn't look for new ones: a graph that
    was made before goes on without them.
    """
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
