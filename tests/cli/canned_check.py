"""Plans with fingerprints, and a driver's library that knows of cards."""

from importlib.metadata import version

from canned import COMMITTED, report

from residency.phases.identity import ComponentPrint, DeclarationPrint, LibraryPrint
from residency.planner.fingerprint import CardPrint, Difference, Fingerprint
from residency.planner.plan import Plan
from residency.planner.planfile import Check, CheckedPlan

UUID = "GPU-5fae0c1d-90a4-4d1c-8e0b-4a3a57e8c2f1"
REAL_CARD = "NVIDIA GeForce RTX 5090"

FINGERPRINT = Fingerprint(
    card=CardPrint(name=REAL_CARD, uuid=UUID, total_bytes=33_715_093_504),
    driver="570.86",
    world_size=1,
    residency=version("residency"),
    torch=version("torch"),
    libraries=(LibraryPrint(name="diffusers", version=version("diffusers")),),
    pipeline="diffusers.FluxPipeline",
    components=(
        ComponentPrint(
            name="transformer",
            class_path="diffusers.FluxTransformer2DModel",
            weight_bytes=23_802_816_640,
            structure="e037876a07e0289c",
        ),
    ),
    adapters=(),
    declarations=(
        DeclarationPrint(component="transformer", mode="resident", resident_layers=(), sized=False),
    ),
    envelope=("1024x1024:steps=50",),
    margin_bytes=268_435_456,
    prefetch=1,
)
SIMULATED = FINGERPRINT.model_copy(
    update={
        "card": CardPrint(name="RTX 5090", uuid="SIM-RTX-5090", total_bytes=33_715_093_504),
        "driver": None,
    }
)


def real(**changes: object) -> Plan:
    """A plan that was committed on a real card, with a fingerprint changed so."""
    fingerprint = FINGERPRINT.model_copy(update=changes)
    return COMMITTED.model_copy(
        update={"card": REAL_CARD, "device": REAL_CARD, "fingerprint": fingerprint}
    )


def simulated(**changes: object) -> Plan:
    fingerprint = SIMULATED.model_copy(update=changes)
    return COMMITTED.model_copy(update={"fingerprint": fingerprint})


def checked(plan: Plan, field: str = "", before: str = "", now: str = "") -> CheckedPlan:
    return CheckedPlan(
        card=plan.card,
        device=plan.device,
        fingerprint=None if plan.fingerprint is None else "0123456789abcdef",
        holds=plan.fingerprint is not None and not field,
        difference=Difference(field=field, before=before, now=now) if field else None,
    )


HOLDS = Check(pipeline="flux.1-dev", compared="machine", plans=(checked(real()),))
HOLDS_SIMULATED = Check(
    pipeline="flux.1-dev", compared="machine", plans=(checked(simulated()), checked(COMMITTED))
)
REBUILT = Check(pipeline="flux.1-dev", compared="pipeline", plans=(checked(simulated()),))
STALE = Check(
    pipeline="flux.1-dev",
    compared="pipeline",
    plans=(
        checked(real(), "driver", "570.86", "580.95"),
        checked(simulated(), "weight of transformer", "23802816640 bytes", "11901408320 bytes"),
    ),
)
SEVERAL = report(real(), simulated())


class FakeNvml:
    """The part of pynvml that is asked, for a machine with the cards of `uuids`."""

    class NVMLError(Exception):
        pass

    def __init__(self, *uuids: str, driver: str | bytes = "570.86", absent: bool = False) -> None:
        self.uuids = uuids
        self.driver = driver
        self.absent = absent

    def nvmlInit(self) -> None:
        if self.absent:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlShutdown(self) -> None:
        pass

    def nvmlSystemGetDriverVersion(self) -> str | bytes:
        return self.driver

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.uuids:
            raise self.NVMLError("Not Found")
        return uuid
