"""A candidate that runs out of memory, and what its rollback leaves behind."""

from __future__ import annotations

from dataclasses import replace

from residency.offload.device import Device, Reading
from residency.offload.hardware import Hardware
from residency.phases.host import Made
from residency.planner.choosing.prices import Pricing
from residency.planner.verdict import Event, Step, Verdict

from ..capped import capped
from ..notes import Notes
from ..planning import Planning, apart_bytes, retained, told
from ..target import Target
from .bit_equality import same_bits


def run(target: Target, notes: Notes) -> None:
    source = target.source()
    pipeline = source.build()
    notes.note("pipeline", source.name)
    planning = Planning(target, source, pipeline)
    with target.device() as device:
        # Without a host budget nothing is pinned, so that retaining is all there is to try.
        pricing = replace(Pricing.of(Hardware.of(device), {}, None), host_budget_bytes=None)
        needs = planning.needs(device, pricing)
        device.release_cache()
        with capped(target, device, needs.too_small_bytes) as card:
            notes.note("card_bytes", card.total_bytes)
            notes.note("usable_bytes", card.usable_bytes)
            notes.note("off_bytes", card.off_bytes)
            before = device.read()
            watch = _Watch(device)
            outcome = planning.run(device, pricing, listen=watch, explore=1)
            notes.note("tries", [told(each) for each in outcome.tries])
            notes.note("retained", list(retained(outcome)))
            first = outcome.tries[0] if outcome.tries else None
            notes.require(first is not None, "nothing was tried")
            if first is not None:
                verdict = first.judgement.verdict
                notes.require(verdict is Verdict.OOM, f"the verdict is {verdict}, not oom")
                notes.require(first.rolled_back, "it wasn't rolled back")
            notes.require(not retained(outcome), "something is retained on the card it doesn't fit")
            for name, apart in watch.apart.items():
                notes.note(f"after_the_rollback_{name}", apart)
                notes.require(
                    apart <= target.tolerance_bytes,
                    f"{name} is {apart} after the rollback, {target.tolerance_bytes} is allowed",
                )
            notes.require(bool(watch.apart), "no rollback was seen")

            made = [outcome.host.run(source.shape) for _ in range(2)]
            runs = all(isinstance(each, Made) for each in made)
            notes.note("next_request_runs", runs)
            image, again = (each.output.value for each in made)
            notes.require(same_bits(image, again), "two requests after it make different bits")
            outcome.close()
            left = apart_bytes(before, device.read())
            for name, apart in left.items():
                notes.note(f"after_close_{name}", apart)
                notes.require(
                    apart <= target.tolerance_bytes,
                    f"{name} is {apart} after close, {target.tolerance_bytes} is allowed",
                )


class _Watch:
    """Reads the device before a try, and after what was refuted is rolled back."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._before: Reading | None = None
        self.apart: dict[str, int] = {}

    def __call__(self, event: Event) -> None:
        if event.step is Step.TRYING and not self.apart:
            self._device.release_cache()
            self._before = self._device.read()
        elif event.step is Step.REFUTED and self._before is not None and not self.apart:
            self.apart = apart_bytes(self._before, self._device.read())
