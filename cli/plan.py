"""`residency plan`"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..offload.errors import InputError
from . import screen
from .arguments import parse_assignments, parse_layer_counts, parse_shares, parse_size, select_cards
from .files import Destination
from .screen import DOES_NOT_FIT, TracebackOption, reported, say_error, shown_progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..offload.cards import Card
    from ..phases.shape import Shape
    from ..planner.dry_run import PlanRequest
    from ..planner.plan import Report
    from ..planner.verdict import Listener

_RESIDENCY = "--component-residency"
_LAYERS = "--layerwise-resident-layers"
_NO_FIT_HINT = "offload more components, keep fewer layers resident, or serve smaller shapes"

# What is served.
_SERVED = "Pipeline and envelope"
Pipeline = Annotated[
    str, typer.Argument(metavar="PIPELINE", help="A family of pipelines, such as qwen-image-2.1.")
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        metavar="WxH[xFRAMES][:KEY=VALUE,…]",
        rich_help_panel=_SERVED,
        help="A shape that will be served, as 1280x720x81:steps=40,batch=2; repeatable. "
        "Without: the request that the model card recommends.",
    ),
]
Tiny = Annotated[
    bool,
    typer.Option(
        "--tiny",
        rich_help_panel=_SERVED,
        help="The family's tiny config, with real arithmetic.",
    ),
]

# What the user declares for the components.
_DECLARED = "Declarations"
Residency = Annotated[
    list[str] | None,
    typer.Option(
        _RESIDENCY,
        metavar="NAME=MODE,…",
        rich_help_panel=_DECLARED,
        help="Where a component or group (dit, text_encoder, image_encoder, vae, all) lives: "
        "resident, layerwise-offload or component-offload; repeatable.",
    ),
]
ResidentLayers = Annotated[
    list[str] | None,
    typer.Option(
        _LAYERS,
        metavar="NAME=N,…",
        rich_help_panel=_DECLARED,
        help="Resident layers of a layerwise component or group: a count of each layer group, "
        "a fraction below 1, rounded in each layer group, or all; repeatable.",
    ),
]
Sizing = Annotated[
    str,
    typer.Option(
        metavar="MODE",
        rich_help_panel=_DECLARED,
        help="declared: sets as they are declared, whole or not at all; auto: as many layers "
        "as are best, where no resident layers are declared.",
    ),
]
Prefetch = Annotated[
    int,
    typer.Option(
        metavar="N", min=0, rich_help_panel=_DECLARED, help="Layers that are fetched ahead."
    ),
]

# The cards that are simulated.
_SIMULATED = "Simulated card"
Cards = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        rich_help_panel=_SIMULATED,
        help="A card to simulate; repeat to compare several.",
    ),
]
Capacity = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        rich_help_panel=_SIMULATED,
        help="A card of any other size (22GiB); with one --card, that card with this capacity.",
    ),
]
Context = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        rich_help_panel=_SIMULATED,
        help="What the driver takes for the process; default 376MiB.",
    ),
]
Others = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        rich_help_panel=_SIMULATED,
        help="What other processes hold of the card.",
    ),
]
ExpandableSegments = Annotated[
    bool,
    typer.Option(
        "--expandable-segments",
        rich_help_panel=_SIMULATED,
        help="Simulate the allocator's expandable segments (PYTORCH_CUDA_ALLOC_CONF).",
    ),
]

# A card of this machine in their place.
_REAL = "Card of this machine"
Device = Annotated[
    str | None,
    typer.Option(
        metavar="cuda[:N]",
        rich_help_panel=_REAL,
        help="Plan on a card of this machine, not a simulated one; PIPELINE may then also be a "
        "folder that a diffusers pipeline was saved in.",
    ),
]
AssumeFree = Annotated[
    bool,
    typer.Option(
        "--assume-free",
        rich_help_panel=_REAL,
        help="With --device: simulate that card as if no other process held memory of it.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        rich_help_panel=_REAL,
        help="With --device: measure the baseline and propose, without trying anything.",
    ),
]

# What the choice is made by.
_CHOICE = "Prices and choice"
Exposure = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PHASE=SHARE,…",
        rich_help_panel=_CHOICE,
        help="Share of a phase's copy time that compute doesn't hide, 0 to 1, as denoise=0.1; "
        "default 1; repeatable.",
    ),
]
HostMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        rich_help_panel=_CHOICE,
        help="Host memory for pinned weights; what it has no room for is pageable. "
        "Without: all are pinned, and not counted.",
    ),
]
Margin = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        rich_help_panel=_CHOICE,
        help="Kept free in every phase; default 256MiB.",
    ),
]
Explore = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=0,
        rich_help_panel=_CHOICE,
        help="Also try the N best candidates that the model says don't fit.",
    ),
]
Previous = Annotated[
    Path | None,
    typer.Option(
        metavar="PLAN.JSON",
        rich_help_panel=_CHOICE,
        help="The plan of the last start: kept where only free memory wobbles.",
    ),
]

# What is told of it.
_OUTPUT = "Output"
Json = Annotated[
    bool, typer.Option("--json", rich_help_panel=_OUTPUT, help="Print the report as JSON.")
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="PLAN.JSON",
        rich_help_panel=_OUTPUT,
        help="Also write the report, as JSON, to this file.",
    ),
]


def plan(
    pipeline: Pipeline,
    shape: Shapes = None,
    tiny: Tiny = False,
    component_residency: Residency = None,
    resident_layers: ResidentLayers = None,
    size: Sizing = "declared",
    prefetch: Prefetch = 1,
    card: Cards = None,
    capacity: Capacity = None,
    context: Context = None,
    others: Others = "0",
    expandable_segments: ExpandableSegments = False,
    device: Device = None,
    assume_free: AssumeFree = False,
    dry_run: DryRun = False,
    exposure: Exposure = None,
    host_memory: HostMemory = None,
    margin: Margin = None,
    explore: Explore = 0,
    previous: Previous = None,
    json: Json = False,
    out: Out = None,
    traceback: TracebackOption = False,
) -> None:
    """Plan what stays on the card between phases.

    PIPELINE runs through the whole loop on simulated cards, with real shapes and no weights, or
    with --device on a real one: measure, propose, apply, validate, roll back what is refuted.
    Afterwards everything is put back; `residency.planner.settle` does the same inside a server.

    Sizes are 376MiB, 2GiB (1024 each), 24GB (1000 each) or plain bytes. The plan is on stdout,
    progress on stderr.
    """
    with reported(traceback):
        from ..phases.shape import Shape
        from ..planner.planfile import read_report

        target = Target(device, assume_free=assume_free, dry_run=dry_run)
        target.check(
            simulated={
                "--card": card,
                "--capacity": capacity,
                "--context": context,
                "--others": others != "0",
                "--previous": previous,
                "--expandable-segments": expandable_segments,
            }
        )
        cards = () if device else select_cards(card or [], capacity)
        shapes = tuple(Shape.parse(text) for text in shape or [])
        residency = parse_assignments(_RESIDENCY, component_residency or [])
        layers = parse_layer_counts(_LAYERS, resident_layers or [])
        sizing = _sizing(size)
        exposures = parse_shares("--exposure", exposure or [])
        context_bytes = _optional_size("--context", context)
        others_bytes = parse_size("--others", others)
        host_bytes = _optional_size("--host-memory", host_memory)
        margin_bytes = _optional_size("--margin", margin)
        kept = None if previous is None else read_report(previous)
        if not (device and _is_pretrained(pipeline)):
            _check_served(pipeline, shapes, (residency, layers), tiny=tiny)
        _check_room(cards, context_bytes or 0, others_bytes)
        destination = None if out is None else Destination(out)
        if destination:
            destination.check()
        with shown_progress() as listen:
            from ..planner.dry_run import PlanRequest

            request = PlanRequest(
                pipeline=pipeline,
                cards=cards,
                shapes=shapes,
                component_residency=residency,
                resident_layers=layers,
                context_bytes=context_bytes,
                others_bytes=others_bytes,
                margin_bytes=margin_bytes,
                explore=explore,
                size=sizing,
                exposures=exposures,
                host_bytes=host_bytes,
                previous=kept,
                prefetch=prefetch,
                expandable_segments=expandable_segments,
                dry_run=dry_run,
                tiny=tiny,
            )
            report = target.plan(request, listen)
        try:
            if destination:
                destination.write(report.to_json())
        finally:
            _print(report, json)
        fits = _report_shortages(report)
    if not fits:
        raise typer.Exit(DOES_NOT_FIT)


@dataclass(frozen=True, slots=True)
class Target:
    """Where the loop runs: on simulated cards, on a card of this machine, or on a simulated one
    that is what that card would be if nobody else held memory of it."""

    device: str | None
    """None: on simulated cards."""
    assume_free: bool
    dry_run: bool

    def check(self, simulated: Mapping[str, object]) -> None:
        """Raises InputError for options that would do nothing here. `simulated`: what was given
        for those that say what a simulated card is like."""
        for option, given in (("--assume-free", self.assume_free), ("--dry-run", self.dry_run)):
            if given and self.device is None:
                raise InputError(
                    f"{option} needs --device",
                    hint="a simulated card is free, and what is done on it changes nothing",
                )
        if self.device is not None:
            for option in compress(simulated, simulated.values()):
                raise InputError(
                    f"{option} is of a simulated card, and --device is {self.device}",
                    hint=f"leave one of both out; {self.device} is read as it is",
                )
        if self.assume_free and self.dry_run:
            raise InputError(
                "--assume-free simulates, so there is nothing that --dry-run would leave alone",
                hint="leave one of both out",
            )

    def plan(self, request: PlanRequest, listen: Listener) -> Report:
        from ..planner import dry_run

        if self.device is None:
            return dry_run.plan(request, listen)
        if self.assume_free:
            return dry_run.plan(dry_run.free_card(self.device, request), listen)
        return dry_run.plan_on(self.device, request, listen)


def _sizing(mode: str) -> Literal["declared", "auto"]:
    match mode:
        case "declared" | "auto":
            return mode
        case _:
            raise InputError(
                f"--size is {mode!r}, neither declared nor auto",
                hint="--size auto sizes the sets that no --layerwise-resident-layers declares",
            )


def _optional_size(option: str, text: str | None) -> int | None:
    return None if text is None else parse_size(option, text)


def _is_pretrained(pipeline: str) -> bool:
    from ..phases.diffusers.pipeline import is_pretrained

    return is_pretrained(pipeline)


def _check_served(
    pipeline: str,
    shapes: Sequence[Shape],
    declared: Sequence[Mapping[str, object]],
    *,
    tiny: bool,
) -> None:
    """Refuses at once what the planner would refuse after it has loaded torch and the pipeline."""
    from ..phases.diffusers.families import find_family

    family = find_family(pipeline, tiny=tiny)
    for shape in shapes:
        family.check(shape)
    for selected in filter(None, declared):
        from ..phases.component import resolve

        resolve(selected, family.components)


def _check_room(cards: Sequence[Card], context_bytes: int, others_bytes: int) -> None:
    from .render.words import format_bytes

    taken = context_bytes + others_bytes
    for card in cards:
        if taken >= card.total_bytes:
            raise InputError(
                f"{card.name} has {format_bytes(card.total_bytes)}, of which the context and "
                f"others take {format_bytes(taken)}: nothing is left",
                hint="name a larger card, or lower --context or --others",
            )


def _print(report: Report, json: bool) -> None:
    from .render.plan import report_view

    if json:
        screen.write(report.to_json())
    else:
        screen.show(report_view(report))


def _report_shortages(report: Report) -> bool:
    """Whether the pipeline fits every card; says on stderr where it doesn't."""
    from ..planner.plan import Status
    from .render.verdict import shortage

    short = [planned for planned in report.plans if planned.status is Status.INFEASIBLE]
    for planned in short:
        hint = _NO_FIT_HINT if planned is short[-1] else None
        found = shortage(planned.infeasible)
        say_error(f"{report.pipeline} does not fit {planned.card}: {found}", hint)
    return not short
