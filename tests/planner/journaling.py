"""Candidates, fingerprints and journals to write about."""

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from residency.phases.identity import AdapterPrint, ComponentPrint, DeclarationPrint, LibraryPrint
from residency.phases.schedule import Hold, Schedule
from residency.planner.fingerprint import CardPrint, Fingerprint
from residency.planner.journal.journal import Journal, Run
from residency.planner.journal.record import JournalRecord, Kind, ProcessRecord
from residency.planner.verdict import Verdict

FINGERPRINT = Fingerprint(
    card=CardPrint(name="NVIDIA GeForce RTX 5090", uuid="GPU-5090", total_bytes=33_715_093_504),
    driver="570.86",
    world_size=1,
    residency="0.1.0",
    torch="2.13.0",
    libraries=(
        LibraryPrint(name="diffusers", version="0.42.1"),
        LibraryPrint(name="transformers", version="5.24.0"),
    ),
    pipeline="diffusers.FluxPipeline",
    components=(
        ComponentPrint(
            name="transformer",
            class_path="diffusers.FluxTransformer2DModel",
            weight_bytes=23_802_816_640,
            structure="e037876a07e0289c",
        ),
        ComponentPrint(
            name="vae",
            class_path="diffusers.AutoencoderKL",
            weight_bytes=167_639_366,
            structure="1cd90ddba460d53d",
        ),
    ),
    adapters=(
        AdapterPrint(
            component="transformer",
            name="style",
            ranks=(16,),
            layers=76,
            weight_bytes=44_000_000,
            active=True,
            merged=False,
        ),
    ),
    declarations=(
        DeclarationPrint(
            component="transformer", mode="layerwise-offload", resident_layers=(3, 8), sized=False
        ),
        DeclarationPrint(component="vae", mode="resident", resident_layers=(), sized=False),
    ),
    envelope=("1024x1024:steps=50",),
    margin_bytes=268_435_456,
    prefetch=1,
)
DIGEST = FINGERPRINT.digest
OTHER = FINGERPRINT.model_copy(update={"driver": "580.95"})


def candidate(layers: Iterable[int] = (), component: str = "text_encoder") -> Schedule:
    """Retains `layers` of a component, and of another one nothing."""
    held = tuple(layers)
    return Schedule(
        uses=(
            Hold(
                phase="text_encode",
                component=component,
                retain_resident_layers=bool(held),
                resident_set=held,
                retained_set=held,
                prefetch=1,
                pinned=True,
            ),
            Hold(
                phase="denoise",
                component="transformer",
                retain_resident_layers=False,
                resident_set=(0, 1, 2),
                retained_set=(),
                prefetch=1,
                pinned=False,
            ),
        )
    )


LARGE, MEDIUM, SMALL = candidate(range(66)), candidate(range(43)), candidate(range(0, 66, 3))


def opened(folder: Path) -> Journal:
    return Journal.open(folder / "journal.jsonl")


def refute(run: Run, attempt: int, tried: Schedule) -> None:
    """As the loop does it where a candidate runs out of memory."""
    run.intent(attempt, tried)
    run.applied(attempt)
    run.verdict(attempt, Verdict.OOM, "1.59 GiB short in vae_decode")
    run.rolled_back(attempt)


def commit(run: Run, attempt: int, tried: Schedule) -> None:
    run.intent(attempt, tried)
    run.applied(attempt)
    run.verdict(attempt, Verdict.ACCEPTED)
    run.committed(attempt)


def written(folder: Path) -> bytes:
    """A journal of three starts: a crash, what came of it, and one under another fingerprint."""
    journal = opened(folder)
    first = journal.begin(FINGERPRINT)
    refute(first, 1, LARGE)
    first.intent(2, MEDIUM)
    first.applied(2)
    second = journal.begin(FINGERPRINT)
    commit(second, 1, SMALL)
    second.close()
    commit(journal.begin(OTHER), 1, LARGE)
    return journal.path.read_bytes()


def record(kind: Kind, run: str = "a", attempt: int | None = 1, **others: object) -> JournalRecord:
    values: dict[str, object] = {
        "format_version": 2,
        "kind": kind,
        "run": run,
        "attempt": attempt,
        "fingerprint": DIGEST,
        "candidate": None if attempt is None else LARGE,
        "verdict": None,
        "detail": None,
        "process": ProcessRecord(pid=1, host="node7", boot="b"),
        "time": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    }
    return JournalRecord.model_validate(values | others)
