"""The enums of a plan, and its places, in words."""

from __future__ import annotations

from typing import assert_never

from ...planner.plan import Plan, Reason, Status, UsePlan, Verdict
from .units import format_bytes

VERDICTS = {
    Verdict.ACCEPTED: "accepted",
    Verdict.OOM: "out of memory",
    Verdict.HEADROOM: "ran, margin not kept",
    Verdict.SLOWER: "slower than the baseline",
    Verdict.OUTPUT: "output differs from the baseline's",
    Verdict.CRASH: "failed with an error",
    Verdict.HOST_MEMORY: "the host couldn't lock what it pins",
}


def place(phase: str | None, shape: str | None) -> str:
    return " at ".join(part for part in (phase, shape) if part) or "-"


def layers(resident: int, total: int) -> str:
    if total and not resident:
        return "its weights in no layer"
    return f"{layer_count(resident, total)} layers" if total else "all its weights"


def layer_count(resident: int, total: int) -> str:
    return f"{resident} of {total}" if total else "-"


def would_retain(plan: Plan) -> str:
    return "retains" if plan.in_effect else "would retain"


def would_hold(plan: Plan) -> str:
    return "holds" if plan.in_effect else "would hold"


def reason(plan: Plan, use: UsePlan) -> str:
    proof = "not tried" if plan.status is Status.PROPOSED else "validated"
    match use.reason:
        case Reason.RETAINED:
            return f"fits every phase, {proof}"
        case Reason.RESIDENT:
            return "never leaves the card"
        case Reason.NOTHING_SAVED:
            return "retaining it would save no copy"
        case Reason.MARGINAL:
            return "fits, and saves less than 1 % of a request"
        case Reason.NO_HEADROOM:
            return f"too little headroom{_where(use)}{short_by(use.shortfall_bytes)}"
        case Reason.REFUTED:
            return f"tried and refuted{_where(use)}{short_by(use.shortfall_bytes)}"
        case Reason.PARTLY_RETAINED if use.limiting_phase:
            return f"as many layers as fit{_where(use)}, {proof}"
        case Reason.PARTLY_RETAINED:
            return f"as many layers as fit or are worth their bytes, {proof}"
        case Reason.OUTBID:
            return "fits alone, what is retained instead saves more"
        case _:
            assert_never(use.reason)


def _where(use: UsePlan) -> str:
    return f" in {use.limiting_phase}" if use.limiting_phase else ""


def short_by(shortfall_bytes: int | None) -> str:
    return "" if shortfall_bytes is None else f", short by {format_bytes(shortfall_bytes)}"
