"""What a plan was validated under, and how it reads now."""

from __future__ import annotations

from collections.abc import Sequence

from ...offload.placement import Resident
from ...phases.shape import Shape
from ..outcome import Outcome
from ..planfile.fingerprint import Fingerprint
from .evidence import Evidence, Validated, check
from .holdings import Holdings
from .metrics import Metrics


class Premises:
    """Taken when the plan was committed. `measure` reads the device anew, into the gauges too.

    Raises BaselineError where `outcome` is a failure.
    """

    def __init__(self, outcome: Outcome, *, margin_bytes: int, metrics: Metrics) -> None:
        self._installation = outcome.installation
        self._margin_bytes = margin_bytes
        self._metrics = metrics
        self._holdings = Holdings(outcome.installation.pipeline.components)
        self._rest_bytes = self._holdings.at(outcome.installation.device.read()).rest_bytes
        self.validated = Validated.of(
            outcome,
            self._fingerprint(),
            margin_bytes=margin_bytes,
            rest_bytes=self._rest_bytes,
        )

    def _fingerprint(self) -> Fingerprint:
        """Only to be compared: not all that the user declared is in it."""
        installation = self._installation
        return Fingerprint.of(
            installation.pipeline,
            installation.device,
            installation.declarations,
            installation.warmup.shapes,
            margin_bytes=self._margin_bytes,
            prefetch=installation.prefetch,
        )

    def measure(self) -> int:
        """What components and a request may take of the device. For when no request runs: what
        one has there would count as this process's own."""
        reading = self._installation.device.read()
        held = self._holdings.at(reading)
        self._rest_bytes = held.rest_bytes
        usable = self.validated.usable_bytes(reading, held.rest_bytes)
        self._metrics.free_bytes.set(reading.free_bytes)
        self._metrics.retained_bytes.replace(
            {
                (name,): held.components[name]
                for name, placement in self._installation.placements.items()
                if not isinstance(placement, Resident)
            }
        )
        self._metrics.headroom_bytes.replace(
            {
                (need.phase, str(need.shape)): usable - need.peak_bytes - need.margin_bytes
                for need in self.validated.needs
            }
        )
        return usable

    def short_bytes(self, shapes: Sequence[Shape]) -> int:
        """What the plan lacks now at the one of `shapes` that it fits best; 0 where it fits."""
        usable = self.measure()
        return min(
            max((s.short_bytes for s in self.validated.shortages(usable, shape)), default=0)
            for shape in shapes
        )

    def evidence(self, *, ooms: int, outside: int) -> Evidence:
        """While a request runs, what this process has on the device besides its components is
        what `measure` read last."""
        return check(
            self.validated,
            self._installation.device.read(),
            rest_bytes=self._rest_bytes,
            now=self._fingerprint(),
            ooms=ooms,
            outside=outside,
        )
