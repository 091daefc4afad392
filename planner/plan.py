"""The file models: the plan for one card with the evidence for it, the report of one run, and the
explanation of why the plan is what it is.

The field names are an interface: `residency plan --json` prints them, and other programs read them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from ..offload.errors import StalePlanError
from ..phases.schedule import Schedule, Value
from .fingerprint import Fingerprint
from .verdict import Verdict


class Stop(StrEnum):
    """Why a component isn't retained whole. For people: nothing is decided by it."""

    WHOLE = "whole"
    """It is: nothing stopped it."""
    ROOM = "room"
    """One more layer doesn't fit the limiting phase."""
    REFUTED = "refuted"
    """One more layer fits by the model, and validation refuted as much in the limiting phase."""
    FIXED = "fixed"
    """The user fixed it."""
    WORTHLESS = "worthless"
    """One more layer would save nothing worth its bytes."""
    OUTBID = "outbid"
    """One more layer doesn't fit the limiting phase beside what is held of other components, and
    would without; that saves more."""


class ComponentStop(Value):
    component: str
    phase: str
    """The use whose gap it is about."""
    retained_layers: int
    running_layers: int
    """Layers that run in the use: retaining others would save nothing."""
    resident_layers: int
    """Held during the use."""
    passes: int
    stop: Stop
    limiting_phase: str | None
    limiting_shape: str | None
    step_bytes: int | None
    """What one more step would take there: a layer, or, with nothing retained yet, a layer and
    the weights in no layer; all that is declared, where it was declared."""
    short_bytes: int | None
    """How much of that is missing there."""


class Worth(Value):
    """What one more GiB on the card would change."""

    layers: int
    """More layers held across gaps, or in uses."""
    seconds: float
    """Saved a request."""


class FrontierPoint(Value):
    """The best plan at another capacity, by the model: not validated."""

    capacity_bytes: int
    card: str | None
    """A catalogued card of that capacity."""
    fits: bool
    """Whether the baseline does."""
    retained_bytes: int
    resident_bytes: int
    """Held during uses of several passes, on top of what is retained."""
    copy_s: float
    h2d_bytes: int


class FixedCost(Value):
    component: str
    fixed: str
    """In the words of the flag, as `transformer=resident`."""
    seconds: float
    """What the best plan without it saves more; 0 if it costs nothing."""


class HostPlan(Value):
    budget_bytes: int | None
    charged_bytes: int
    """For pinned masters, after rounding to powers of two."""
    wanted_bytes: int
    """What pinning all of them would be charged."""
    pinned: tuple[str, ...]
    pageable: tuple[str, ...]


class Explanation(Value):
    binding_phase: str | None
    binding_shape: str | None
    left_bytes: int | None
    """What the plan leaves of the binding phase's room."""
    stops: tuple[ComponentStop, ...]
    one_more_gib: Worth | None
    frontier: tuple[FrontierPoint, ...]
    """By capacity; the plan's own card among them."""
    fixed: tuple[FixedCost, ...]
    host: HostPlan
    copy_s: float
    """Exposed copies of a request under the plan."""
    baseline_copy_s: float
    bound_s: float
    """No plan that fits copies for less, by the model."""
    proven: bool
    """Whether the solver closed the gap between the two within its time limit."""
    unfit: str | None
    """Why nothing fits, in words with the bytes; None where something does."""


class Status(StrEnum):
    COMMITTED = "committed"
    """A candidate was validated and stays applied."""
    PROPOSED = "proposed"
    """A candidate is the best by the model, and nothing was applied."""
    BASELINE_ONLY = "baseline_only"
    """The pipeline runs, and retaining nothing is the plan."""
    INFEASIBLE = "infeasible"
    """The baseline itself doesn't fit the card."""


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
    schedule: Schedule
    """What each use holds: the layers themselves, and how they are streamed."""
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


FORMAT_VERSION: Literal[3] = 3


class Report(Value):
    format_version: Literal[3] = FORMAT_VERSION
    residency_version: str
    pipeline: str
    plans: tuple[Plan, ...]

    def to_json(self) -> str:
        return self.model_dump_json(indent=2) + "\n"

    def plan_under(self, fingerprint: Fingerprint, source: str) -> Plan:
        """The plan that was made under `fingerprint`. `source` names the report in messages.

        Raises StalePlanError with the first difference: to the plan for the same card if there is
        one, else to the first plan.
        """
        made = [(plan, plan.fingerprint) for plan in self.plans if plan.fingerprint is not None]
        if not made:
            raise StalePlanError(
                f"{source} doesn't say what its plans hold for", hint="plan again on this machine"
            )
        made.sort(key=lambda each: each[1].card != fingerprint.card)
        for plan, known in made:
            if known == fingerprint:
                return plan
        difference = made[0][1].first_difference(fingerprint)
        raise StalePlanError(
            f"{source} was planned under another fingerprint: {difference}",
            hint="plan again; what an old plan retains was proved for what was there then",
        )
