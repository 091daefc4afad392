"""Watching a run: which component works when, and from that the phases of a request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ...offload.compiled import retrace, untraced
from ..component import Component, ComponentGroup
from ..graph import ComponentUse, Phase


@dataclass(frozen=True, slots=True)
class Call:
    """A component was called from outside: through its own forward, or one of its submodules'."""

    component: str
    entry: str
    """The submodule's path; empty for the component itself."""


@contextmanager
def watch(components: Iterable[Component], called: Callable[[str], None]) -> Iterator[list[Call]]:
    """Collects the calls made inside the block; `called` hears of each before the module runs.

    Torch's hooks for all modules are used, so nothing is left on the pipeline's own.
    """
    homes = {
        module: (component.name, path)
        for component in components
        for path, module in component.module.named_modules()
    }
    calls: list[Call] = []
    depth: Counter[str] = Counter()

    def before(module: nn.Module, args: Any) -> None:
        home = homes.get(module)
        if home is None:
            return
        component, path = home
        depth[component] += 1
        if depth[component] == 1:
            calls.append(Call(component, path))
            called(component)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        home = homes.get(module)
        if home is not None:
            depth[home[0]] -= 1

    handles = [
        register_module_forward_pre_hook(untraced(before)),
        register_module_forward_hook(untraced(after), always_call=True),
    ]
    retrace()
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
        retrace()


def phases(calls: Sequence[Call]) -> list[Phase]:
    """The phases that the calls show.

    Calls of one component in a row are one use. Components that take turns, as a control net and
    a denoiser do at each step, share one phase.
    """
    found: list[Phase] = []
    names: set[str] = set()
    for block in _fold(_runs(calls)):
        passes: Counter[str] = Counter()
        for run in block:
            passes[run.component] += run.calls
        usual = name = _name(block)
        number = 1
        while name in names:
            number += 1
            name = f"{usual}_{number}"
        names.add(name)
        uses = tuple(ComponentUse(name, each, passes=count) for each, count in passes.items())
        found.append(Phase(name, uses))
    return found


@dataclass(frozen=True, slots=True)
class _Run:
    """Calls of one component in a row; `calls` counts those of the entry called most."""

    component: str
    calls: int
    entries: frozenset[str]


def _runs(calls: Sequence[Call]) -> list[_Run]:
    runs: list[_Run] = []
    start = 0
    for i, call in enumerate(calls):
        if i + 1 == len(calls) or calls[i + 1].component != call.component:
            entries = Counter(c.entry for c in calls[start : i + 1])
            runs.append(_Run(call.component, max(entries.values()), frozenset(entries)))
            start = i + 1
    return runs


def _fold(runs: Sequence[_Run]) -> Iterator[Sequence[_Run]]:
    """The runs of each phase: one, or all turns of components that take turns.

    The last turn may be cut short. So no phase has a component of the one before.
    """
    at = 0
    while at < len(runs):
        stop = at + 1
        for candidate in range(2, (len(runs) - at) // 2 + 1):
            block = _names(runs[at : at + candidate])
            if len({*block}) < len(block):
                break  # a component twice in the block: no turn is longer than this
            repeats = 1
            while _names(runs[at + repeats * candidate : at + (repeats + 1) * candidate]) == block:
                repeats += 1
            if repeats > 1:
                stop = at + repeats * candidate
                while stop < len(runs) and runs[stop].component in block:
                    stop += 1
                break
        yield runs[at:stop]
        at = stop


def _names(runs: Sequence[_Run]) -> list[str]:
    return [run.component for run in runs]


def _name(block: Sequence[_Run]) -> str:
    """The usual name for what the components do; another component's own name otherwise."""
    if any(ComponentGroup.of(run.component) is ComponentGroup.DIT for run in block):
        return "denoise"
    run = block[0]
    name = run.component
    group = ComponentGroup.of(name)
    suffix = name.removeprefix(group)
    if group is ComponentGroup.TEXT_ENCODER:
        return f"text_encode{suffix}"
    if group is ComponentGroup.IMAGE_ENCODER:
        return f"image_encode{suffix}"
    if group is ComponentGroup.VAE:
        encodes = any("encoder" in entry.split(".")[0] for entry in run.entries)
        return f"vae_{'encode' if encodes else 'decode'}{suffix}"
    return name
