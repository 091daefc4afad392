"""Planning on a card of this machine: the loop runs there, and everything is put back."""

from __future__ import annotations

from dataclasses import replace

from ..offload.cards import custom_card
from ..offload.cuda.device import CudaDevice
from ..offload.errors import InputError
from ..offload.inspection import FindingKind
from ..offload.simulated.card import CONTEXT_BYTES
from ..phases.diffusers import DiffusersPipeline
from ..phases.family import find_family
from ..phases.limit import Limit
from ..phases.pretrained import is_pretrained, load_pretrained
from ..phases.shape import Shape
from .event import Event
from .hardware import Hardware
from .options import Mode, Options
from .ranks.agreement import Solo
from .report import Report
from .request import Listener, PlanRequest, Progress
from .startup import Startup


def plan_on(device: str, request: PlanRequest, listen: Listener) -> Report:
    """A family's pipeline gets random weights, a folder's those that are in it.

    Raises InputError where the device isn't there, or a name, a shape or a number can't be;
    LockedError where another planner is on the card.
    """
    hardware = Hardware.of(device)
    name = hardware.device.identity.name

    def tell(doing: Event | str) -> None:
        listen(Progress(name, str(doing)))

    tell(f"loading {request.pipeline}")
    pipeline, shapes = _pipeline(request)
    startup = Startup(
        pipeline,
        hardware,
        shapes,
        None,
        Options(
            component_residency=request.component_residency,
            resident_layers=request.resident_layers,
            size=request.size,
            exposures=request.exposures,
            margin_bytes=request.margin_bytes,
            host_bytes=request.host_bytes,
            prefetch=request.prefetch,
            explore=request.explore,
            dry_run=request.dry_run,
        ),
        Limit(),
        tell,
        Solo(),
    )
    settled = startup.run(Mode.SEARCH)
    if settled.outcome.failure is None:
        settled.outcome.close()
    return settled.report.model_copy(update={"pipeline": request.pipeline})


def free_card(device: str, request: PlanRequest) -> PlanRequest:
    """`request` for a simulated card like the device, as if nobody else were on it."""
    found = CudaDevice.parse(device)
    inspection = found.inspect()
    reading = inspection.reading
    # Where others can't be told from the context, what is known of other contexts is all there is.
    unknown = inspection.of(FindingKind.OTHERS_UNKNOWN) is not None
    context = CONTEXT_BYTES if unknown else reading.context_bytes
    card = replace(custom_card(reading.total_bytes), name=f"{found.identity.name}, all free")
    return replace(request, cards=(card,), context_bytes=context, others_bytes=0)


def _pipeline(request: PlanRequest) -> tuple[DiffusersPipeline, tuple[Shape, ...]]:
    if is_pretrained(request.pipeline):
        if not request.shapes:
            raise InputError(
                f"nothing says which shapes {request.pipeline} will serve",
                hint="give --shape, as 1024x1024:steps=40",
            )
        return load_pretrained(request.pipeline), request.shapes
    family = find_family(request.pipeline, tiny=request.tiny)
    shapes = request.shapes or (family.request,)
    for shape in shapes:
        family.check(shape)
    built = family.build(virtual=False)
    return DiffusersPipeline(built, name=family.name, request=family.request), shapes
