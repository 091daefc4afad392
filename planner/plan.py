"""The plan for one card: what is retained, and the evidence for it.

The field names are an interface: `residency plan --json` prints them, and other programs read them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from .explanation import Explanation
from .planfile.fingerprint import Fingerprint
from .value import Value


class Status(StrEnum):
    COMMITTED = "committed"
    """A candidate was validated and stays applied."""
    PROPOSED = "proposed"
    """A candidate is the best by the model, and nothing was applied."""
    BASELINE_ONLY = "baseline_only"
    """The pipeline runs, and retaining nothing is the plan."""
    INFEASIBLE = "infeasible"
    """The baseline itself doesn't fit the card."""


class Verdict(StrEnum):
    """What validation said of a candidate."""

    ACCEPTED = "accepted"
    OOM = "oom"
    HEADROOM = "headroom"
    """It ran, and left less than the margin free in a phase."""
    SLOWER = "slower"
    """It moved more bytes a request than the baseline, or took longer beyond noise."""
    OUTPUT = "output"
    """Its output isn't the baseline's."""
    CRASH = "crash"
    """An error other than out of memory; or it ended an earlier process."""
    HOST_MEMORY = "host_memory"
    """The host couldn't lock what it pins."""


class Reason(StrEnum):
    """Why a use retains, or doesn't. For people: nothing is decided by it."""

    RETAINED = "retained"
    RESIDENT = "resident"
    """The component never leaves the card, so there is nothing to retain."""
    NOTHING_SAVED = "nothing_saved"
    """Retaining would save no copy."""
    MARGINAL = "marginal"
    """It fits, and saves less of a request's seconds than the 1 % given up for fewer bytes."""
    NO_HEADROOM = "no_headroom"
    """A later phase has too little headroom for it."""
    REFUTED = "refuted"
    """It was tried, and validation refuted it."""
    PARTLY_RETAINED = "partly_retained"
    """As many layers as fit, or as are worth their bytes."""
    OUTBID = "outbid"
    """It fits alone, and what is retained instead saves more."""


class UsePlan(Value):
    phase: str
    component: str
    retain_resident_layers: bool
    resident_layers: int
    """Layers of the resident set, as it was declared or sized."""
    retained_layers: int
    """Of which held across the gap."""
    total_layers: int
    resident_set: tuple[int, ...]
    """The layers held during the use, counted over all groups."""
    retained_set: tuple[int, ...]
    """Of those, the layers held across the gap."""
    prefetch: int
    """Layers fetched ahead."""
    pinned: bool
    """Whether copies come from pinned host masters."""
    retained_bytes: int
    """Device bytes across the gap if this use retains; what it would take if it doesn't: the set
    that was declared, or all layers where it was to be sized."""
    saved_h2d_bytes: int
    """Bytes a request that retaining this use saves."""
    saved_s: float
    """Those bytes over `Plan.copy_bytes_per_s`."""
    reason: Reason
    shortfall_bytes: int | None
    """How much is missing in `limiting_phase`."""
    limiting_phase: str | None
    limiting_shape: str | None


class PhasePlan(Value):
    name: str
    shape: str
    """As asked for."""
    peak_bytes: int
    """Allocated by tensors at the most in the baseline, weights included."""
    headroom_bytes: int
    """capacity - others - context - peak - margin: what retained weights may take."""
    retained_bytes: int
    """What the plan adds to this phase."""
    learnt_bytes: int
    """What refutations took off the room that the model had for weights here."""
    binding: bool
    """The phase and shape that leaves retained sets the least room."""


class ShapePlan(Value):
    asked: str
    run: str | None
    """The size that came out: pipelines round to multiples of their own. None if nothing did."""


class ComponentPlan(Value):
    name: str
    residency: str
    resident_layers: int
    total_layers: int
    weight_bytes: int
    """Device bytes of all its weights."""
    non_layer_bytes: int
    """Of which in no layer."""


class SetPlan(Value):
    """How much of a component a candidate holds."""

    component: str
    phase: str
    resident_layers: int
    """During the use."""
    retained_layers: int
    """Across the gap behind it."""


class Attempt(Value):
    retained: tuple[str, ...]
    """Component names."""
    sets: tuple[SetPlan, ...]
    beyond_model: bool
    """The model said that it wouldn't fit, and it was tried all the same."""
    predicted_shortfall_bytes: int
    """What the model said was missing; 0 if it fits."""
    verdict: Verdict
    phase: str | None
    shape: str | None
    shortfall_bytes: int | None
    """With OOM: what was missing in that phase by the model, and at least what the allocation that
    failed lacked. With HEADROOM: how much of the margin was missing."""
    detail: str | None
    """The error's own text, or the numbers."""
    neighbour_bytes: int
    """What another process took meanwhile, where that explains the verdict: then the candidate
    isn't excluded by it."""
    seconds: float | None
    """Of a request, the median at the shape where it gains the least; None without a clock."""
    baseline_seconds: float | None
    """Of the baseline's, run in turns with it."""
    rolled_back: bool
    """The pipeline was put back, compared with the state before, and found equal."""


class Infeasible(Value):
    phase: str
    """`load` where resident components alone don't fit."""
    shape: str | None
    shortfall_bytes: int | None
    """What the phase's peak needs beyond the card, and at least what the allocation that failed
    lacked."""
    detail: str


class BytesPerRequest(Value):
    """At the largest shape of the most bytes, from the second request on."""

    baseline: int
    planned: int


class Plan(Value):
    card: str
    capacity_bytes: int
    others_bytes: int
    context_bytes: int
    margin_bytes: int
    status: Status
    components: tuple[ComponentPlan, ...]
    shapes: tuple[ShapePlan, ...]
    uses: tuple[UsePlan, ...]
    phases: tuple[PhasePlan, ...]
    attempts: tuple[Attempt, ...]
    infeasible: Infeasible | None
    h2d_bytes_per_request: BytesPerRequest | None
    copy_bytes_per_s: float
    copy_rate_source: str
    """Where the rate comes from, and what is assumed."""
    sizing: Literal["declared", "auto"]
    """Whether sets were declared by the user or sized by the planner."""
    explanation: Explanation | None
    """None where nothing was chosen, since the baseline doesn't run and wasn't measured."""
    in_effect: bool = False
    """The process that made this serves with it. Else everything was put back."""
    device: str
    """What the plan was validated on: `simulated`, or the driver's name of the card."""
    fingerprint: Fingerprint | None
    """What the plan holds for: where any of it differs, the plan is stale."""
