"""The call of a server's startup: searched, served, and verified by the next start."""

from __future__ import annotations

import time

from residency.phases.diffusers.undo import Residue
from residency.planner import Mode, Options, Settlement, settle
from residency.planner.plan import Status

from ..notes import Notes
from ..target import Target
from .bit_equality import same_bits


def run(target: Target, notes: Notes) -> None:
    source = target.source()
    pipeline = source.build()
    notes.note("pipeline", source.name)
    options = Options(
        component_residency={"dit": "layerwise-offload", "text_encoder": "layerwise-offload"},
        margin_bytes=target.scale.margin_bytes,
        lock_folder=target.folder,
    )
    images = []
    with target.device() as device:
        before = device.read().allocated_bytes
        for name, mode in (("search", Mode.SEARCH), ("verify", Mode.VERIFY)):
            began = time.monotonic()
            settlement = settle(
                pipeline,
                device=device,
                envelope=[source.shape],
                journal=target.folder / "journal",
                mode=mode,
                options=options,
            )
            notes.note(f"{name}_ready_s", time.monotonic() - began)
            notes.note(f"{name}_status", str(settlement.status))
            notes.note(f"{name}_warnings", list(settlement.warnings))
            notes.require(
                settlement.status is Status.COMMITTED,
                f"with room for everything, {name} came to {settlement.status}",
            )
            is_verified = name == "verify"
            notes.require(
                settlement.verified is is_verified,
                f"{name} {'searched' if is_verified else 'verified'}",
            )
            residue = Residue(pipeline)  # what requests leave on a pipeline is their own
            for _ in range(2):
                images.append(
                    settlement.serve(source.shape, lambda: pipeline.run(source.shape).value.cpu())
                )
            notes.require(settlement.check().holds, f"the evidence of {name} doesn't hold")
            _note_plan(settlement, name, notes)
            residue.restore()
            settlement.close()
            left = device.read().allocated_bytes - before
            notes.note(f"{name}_left_bytes", left)
            notes.require(left <= target.tolerance_bytes, f"{left} bytes are left after {name}")
    equal = [same_bits(images[0], each) for each in images]
    notes.note("served_images_equal", equal)
    notes.require(all(equal), "what is served differs from request to request")


def _note_plan(settlement: Settlement, name: str, notes: Notes) -> None:
    plan = settlement.plan
    notes.note(
        f"{name}_retained_layers",
        {f"{use.phase}/{use.component}": use.retained_layers for use in plan.uses},
    )
    last = plan.attempts[-1] if plan.attempts else None
    if last is not None:
        notes.note(f"{name}_request", {"s": last.seconds, "baseline_s": last.baseline_seconds})
