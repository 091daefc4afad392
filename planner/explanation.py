"""Why the plan is what it is: what stopped each component, and what more memory would buy."""

from __future__ import annotations

from enum import StrEnum

from .value import Value


class Stop(StrEnum):
    """Why a component isn't retained whole. For people: nothing is decided by it."""

    WHOLE = "whole"
    """It is: nothing stopped it."""
    ROOM = "room"
    """One more layer doesn't fit the limiting phase."""
    REFUTED = "refuted"
    """One more layer fits by the model, and validation refuted as much in the limiting phase."""
    PINNED = "pinned"
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


class PinCost(Value):
    component: str
    pin: str
    """In the words of the flag, as `transformer=resident`."""
    seconds: float
    """What the best plan without the pin saves more; 0 if it costs nothing."""


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
    pins: tuple[PinCost, ...]
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
