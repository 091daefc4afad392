"""`residency plan`"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..offload.errors import InputError
from .assignments import parse_assignments, parse_layer_counts, parse_shares
from .destination import Destination
from .faults import DOES_NOT_FIT, TracebackOption, reported, say_error
from .selection import select_cards
from .sizes import parse_size

if TYPE_CHECKING:
    from ..planner.report import Report
    from ..planner.request import PlanRequest

_RESIDENCY = "--component-residency"
_LAYERS = "--layerwise-resident-layers"
_NO_FIT_HINT = "offload more components, keep fewer layers resident, or serve smaller shapes"


def plan(
    pipeline: Annotated[
        str,
        typer.Argument(metavar="PIPELINE", help="A family of pipelines, such as qwen-image-2.1."),
    ],
    card: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A card to simulate; repeat to compare several."),
    ] = None,
    capacity: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="A card of any other size (22GiB); with one --card, that card with this capacity.",
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WxH[xFRAMES][:KEY=VALUE,…]",
            help="A shape that will be served, as 1280x720x81:steps=40,batch=2; repeatable. "
            "Without: the request that the model card recommends.",
        ),
    ] = None,
    component_residency: Annotated[
        list[str] | None,
        typer.Option(
            _RESIDENCY,
            metavar="NAME=MODE,…",
            help="Where a component or group (dit, text_encoder, image_encoder, vae, all) lives: "
            "resident, layerwise-offload or component-offload; repeatable.",
        ),
    ] = None,
    resident_layers: Annotated[
        list[str] | None,
        typer.Option(
            _LAYERS,
            metavar="NAME=N,…",
            help="Resident layers of a layerwise component or group: a count of each layer group, "
            "a fraction below 1, rounded in each layer group, or all; repeatable.",
        ),
    ] = None,
    size: Annotated[
        str,
        typer.Option(
            metavar="MODE",
            help="declared: sets as they are declared, whole or not at all; auto: as many layers "
            "as are best, where no resident layers are declared.",
        ),
    ] = "declared",
    exposure: Annotated[
        list[str] | None,
        typer.Option(
            "--exposure",
            metavar="PHASE=SHARE,…",
            help="Share of a phase's copy time that compute doesn't hide, 0 to 1, as denoise=0.1; "
            "default 1; repeatable.",
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Host memory for pinned weights; what it has no room for is pageable. "
            "Without: all are pinned, and not counted.",
        ),
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="What the driver takes for the process; default 376MiB."),
    ] = None,
    others: Annotated[
        str, typer.Option(metavar="SIZE", help="What other processes hold of the card.")
    ] = "0",
    margin: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Kept free in every phase; default 256MiB."),
    ] = None,
    explore: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Also try the N best candidates that the model says don't fit.",
        ),
    ] = 0,
    previous: Annotated[
        Path | None,
        typer.Option(
            metavar="PLAN.JSON",
            help="The plan of the last start: kept where only free memory wobbles.",
        ),
    ] = None,
    prefetch: Annotated[
        int, typer.Option(metavar="N", min=0, help="Layers that are fetched ahead.")
    ] = 1,
    expandable_segments: Annotated[
        bool,
        typer.Option(
            "--expandable-segments",
            help="Simulate the allocator's expandable segments (PYTORCH_CUDA_ALLOC_CONF).",
        ),
    ] = False,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="The family's tiny config, with real arithmetic.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="PLAN.JSON", help="Also write the report, as JSON, to this file."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="cuda[:N]",
            help="Plan on a card of this machine, not a simulated one; PIPELINE may then also be a "
            "folder that a diffusers pipeline was saved in.",
        ),
    ] = None,
    assume_free: Annotated[
        bool,
        typer.Option(
            "--assume-free",
            help="With --device: simulate that card as if no other process held memory of it.",
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="With --device: measure the baseline and propose, without trying anything.",
        ),
    ] = False,
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
        from ..planner.report import Report
        from ..planner.request import PlanRequest

        request = PlanRequest(
            pipeline=pipeline,
            cards=() if device else select_cards(card or [], capacity),
            shapes=tuple(Shape.parse(text) for text in shape or []),
            component_residency=parse_assignments(_RESIDENCY, component_residency or []),
            resident_layers=parse_layer_counts(_LAYERS, resident_layers or []),
            context_bytes=None if context is None else parse_size("--context", context),
            others_bytes=parse_size("--others", others),
            margin_bytes=None if margin is None else parse_size("--margin", margin),
            explore=explore,
            size=_sizing(size),
            exposures=parse_shares("--exposure", exposure or []),
            host_bytes=None if host_memory is None else parse_size("--host-memory", host_memory),
            previous=None if previous is None else Report.read(previous),
            prefetch=prefetch,
            expandable_segments=expandable_segments,
            dry_run=dry_run,
            tiny=tiny,
        )
        simulates = {
            "--card": card,
            "--capacity": capacity,
            "--context": context,
            "--others": others != "0",
            "--previous": previous,
            "--expandable-segments": expandable_segments,
        }
        _check_device(device, assume_free, dry_run, [*compress(simulates, simulates.values())])
        if not (device and _is_pretrained(pipeline)):
            _check(request)
        destination = None if out is None else Destination(out)
        if destination:
            destination.check()
        report = _run(request, device, assume_free)
        try:
            if destination:
                destination.write(report.to_json())
        finally:
            _print(report, json)
        fits = _report_shortages(report)
    if not fits:
        raise typer.Exit(DOES_NOT_FIT)


def _sizing(mode: str) -> Literal["declared", "auto"]:
    match mode:
        case "declared" | "auto":
            return mode
        case _:
            raise InputError(
                f"--size is {mode!r}, neither declared nor auto",
                hint="--size auto sizes the sets that no --layerwise-resident-layers declares",
            )


def _check(request: PlanRequest) -> None:
    """Refuses at once what the planner would refuse after loading torch and the pipeline."""
    from ..phases.component import resolve
    from ..phases.family import find_family
    from .render.units import format_bytes

    family = find_family(request.pipeline, tiny=request.tiny)
    for shape in request.shapes:
        family.check(shape)
    for selected in (request.component_residency, request.resident_layers):
        resolve(selected, family.components)
    taken = (request.context_bytes or 0) + request.others_bytes
    for card in request.cards:
        if taken >= card.total_bytes:
            raise InputError(
                f"{card.name} has {format_bytes(card.total_bytes)}, of which the context and "
                f"others take {format_bytes(taken)}: nothing is left",
                hint="name a larger card, or lower --context or --others",
            )


def _check_device(
    device: str | None, assume_free: bool, dry_run: bool, simulates: Sequence[str]
) -> None:
    """`simulates`: options that were given and say what a simulated card is like."""
    for option, given in (("--assume-free", assume_free), ("--dry-run", dry_run)):
        if given and device is None:
            raise InputError(
                f"{option} needs --device",
                hint="a simulated card is free, and what is done on it changes nothing",
            )
    if device is not None and simulates:
        raise InputError(
            f"{simulates[0]} is of a simulated card, and --device is {device}",
            hint=f"leave one of both out; {device} is read as it is",
        )
    if assume_free and dry_run:
        raise InputError(
            "--assume-free simulates, so there is nothing that --dry-run would leave alone",
            hint="leave one of both out",
        )


def _is_pretrained(pipeline: str) -> bool:
    from ..phases.pretrained import is_pretrained

    return is_pretrained(pipeline)


def _run(request: PlanRequest, device: str | None, assume_free: bool) -> Report:
    from .progress import shown_progress

    with shown_progress() as listen:
        from ..planner import on_device, service

        if device is None:
            return service.plan(request, listen)
        if assume_free:
            return service.plan(on_device.free_card(device, request), listen)
        return on_device.plan_on(device, request, listen)


def _print(report: Report, json: bool) -> None:
    from . import screen
    from .render.report import report_view

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
