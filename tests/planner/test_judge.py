"""What is said of a sweep, by numbers alone: a card of 1000 bytes, of which 100 are others' and 200
the margin, so that a phase may take 700."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from residency.offload.device import FreeFloor, Reading, Transfers
from residency.offload.memory_errors import Shortfall
from residency.phases.host import Failure, Made, PhaseReading, RequestTrace, ShapeRun, Sweep
from residency.phases.shape import Shape
from residency.planner.verdict import Judgement, Verdict, judge

WIDE, TALL = Shape(64, 32), Shape(32, 64)
CARD, MARGIN, OUTSIDE = 1000, 200, 100


@dataclass(frozen=True)
class Number:
    value: float

    def apart(self, other: "Number") -> float:
        return abs(self.value - other.value)

    def difference(self, other: "Number", *, near: float) -> str | None:
        apart = self.apart(other)
        return None if apart <= near else f"{apart:g} apart"


def reading(peak: int = 0, outside: int = OUTSIDE, retries: int = 0) -> Reading:
    """Of `outside` the context takes 60. What is reserved speaks against nothing."""
    return Reading(CARD, CARD - outside, outside - 60, 60, 0, 0, peak, CARD, retries)


def swept(shape=WIDE, *, seconds=None, **each) -> ShapeRun:
    """Two requests of an encode and a decode. `each`: of the first and of the second, or of both:
    `peak` and `outside` are the decode's, `early` is the encode's peak, `copied`, `retries` so far,
    and what is made."""
    given = {
        "peak": 600,
        "outside": OUTSIDE,
        "early": 300,
        "copied": 50,
        "retries": 0,
        "makes": 1.0,
    }
    both = {name: v if isinstance(v, tuple) else (v, v) for name, v in (given | each).items()}
    made = []
    for n in (0, 1):
        peak, outside, early, copied, retries, makes = (values[n] for values in both.values())
        encode = PhaseReading("encode", reading(early), Transfers())
        decode = PhaseReading("decode", reading(peak, outside, retries), Transfers())
        trace = RequestTrace(None, [encode, decode], Transfers(copied), seconds=seconds)
        made.append(Made(trace, shape, None if makes is None else Number(makes)))
    return ShapeRun.of(shape, made)


BASELINE = swept(), swept(TALL)


def judged(*runs: ShapeRun, baseline=BASELINE, outside: int = 0) -> Judgement:
    """`outside`: what was sampled outside of this process at the most, meanwhile."""
    device = SimpleNamespace(read=lambda: reading(outside=max(outside, OUTSIDE)))
    with FreeFloor(device, every_s=None) as floor:
        pass
    before = None if baseline is None else Sweep(baseline)
    return judge(Sweep(runs), before, floor, margin_bytes=MARGIN)


OK = Verdict.ACCEPTED, None, None
DECODE = "decode", WIDE


@pytest.mark.parametrize(
    ("candidate", "baseline", "outside", "found"),
    [
        pytest.param({}, {}, 0, OK, id="as the baseline"),
        pytest.param({"peak": 700}, {}, 0, OK, id="the margin is left"),
        pytest.param({"peak": 701}, {}, 0, (Verdict.HEADROOM, DECODE, 1), id="1 byte isn't"),
        pytest.param(
            {"peak": (705, 600)}, {}, 0, (Verdict.HEADROOM, DECODE, 5), id="in the first request"
        ),
        pytest.param(
            {"early": 702, "peak": 740},
            {},
            0,
            (Verdict.HEADROOM, ("encode", WIDE), 2),
            id="the first phase is named",
        ),
        pytest.param({"outside": 200}, {}, 0, OK, id="others leave the margin"),
        pytest.param(
            {"outside": (100, 203)}, {}, 0, (Verdict.HEADROOM, DECODE, 3), id="others don't"
        ),
        pytest.param({}, {}, 200, OK, id="others left it between two phases"),
        pytest.param(
            {}, {}, 204, (Verdict.HEADROOM, DECODE, 4), id="others didn't, between two phases"
        ),
        pytest.param(
            {"outside": 230}, {}, 210, (Verdict.HEADROOM, DECODE, 30), id="the larger one counts"
        ),
        pytest.param({"peak": 701}, {"peak": 990}, 0, (Verdict.HEADROOM, DECODE, 1), id="however"),
        pytest.param({"copied": 51}, {}, 0, (Verdict.SLOWER, None, None), id="a byte more moved"),
        pytest.param({"copied": (999, 50)}, {}, 0, OK, id="the first request copies more"),
        pytest.param({"copied": 49}, {}, 0, OK, id="a byte less moved"),
        pytest.param({"makes": 1.5}, {}, 0, (Verdict.OUTPUT, None, None), id="another output"),
        pytest.param(
            {"makes": 1.5}, {"makes": (1.25, 1.0)}, 0, OK, id="within twice the baseline's own"
        ),
        pytest.param(
            {"makes": 1.625},
            {"makes": (1.25, 1.0)},
            0,
            (Verdict.OUTPUT, None, None),
            id="beyond twice the baseline's own",
        ),
        pytest.param({"makes": None}, {}, 0, OK, id="no values"),
        pytest.param({}, {"makes": None}, 0, OK, id="no values before"),
        pytest.param(
            {"seconds": 1.0, "retries": (4, 5)},
            {},
            0,
            (Verdict.HEADROOM, None, None),
            id="a retry in each request",
        ),
        pytest.param({"seconds": 1.0, "retries": (4, 4)}, {}, 0, OK, id="retries before it"),
        pytest.param({"seconds": 1.0, "retries": (4, 5)}, {"retries": (0, 1)}, 0, OK, id="as many"),
        pytest.param({"retries": (4, 5)}, {}, 0, OK, id="without a clock retries say nothing"),
    ],
)
def test_a_sweep_is_held_against_the_card_and_the_baseline(candidate, baseline, outside, found):
    said = judged(swept(**candidate), baseline=(swept(**baseline),), outside=outside)
    assert (said.verdict, said.place, said.shortfall_bytes) == found
    assert said.shape == (None if said.verdict is Verdict.ACCEPTED else "64x32")
    if said.place is not None:
        assert said.phase == said.place[0]


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({"peak": 701}, Verdict.HEADROOM),
        ({"copied": 51}, Verdict.SLOWER),
        ({"makes": 2.0}, Verdict.OUTPUT),
        ({"seconds": 1.0, "retries": (0, 1)}, Verdict.HEADROOM),
    ],
)
def test_the_second_shape_refutes_as_the_first_does(changed, verdict):
    said = judged(swept(), swept(TALL, **changed))
    assert (said.verdict, said.shape) == (verdict, "32x64")


def test_each_shape_is_compared_with_itself():
    baseline = (swept(copied=80, makes=3.0), swept(TALL))
    assert judged(swept(copied=80, makes=3.0), swept(TALL), baseline=baseline) == Judgement(
        Verdict.ACCEPTED
    )
    said = judged(swept(TALL, copied=80, makes=1.0), baseline=baseline)
    assert (said.verdict, said.detail) == (
        Verdict.SLOWER,
        "80 bytes are copied a request, 50 in the baseline",
    )


def test_what_is_worst_is_said_of_a_shape():
    everything = {"makes": 2.0, "peak": 701, "copied": 51, "seconds": 1.0, "retries": (0, 1)}
    found = []
    for name in ("makes", "peak", "copied", "retries"):
        found.append(judged(swept(**everything)).verdict)
        del everything[name]
    assert found == [Verdict.OUTPUT, Verdict.HEADROOM, Verdict.SLOWER, Verdict.HEADROOM]


def test_without_a_baseline_only_the_card_refutes():
    other = {"makes": 2.0, "copied": 999, "seconds": 1.0, "retries": (0, 9)}
    assert judged(swept(**other), baseline=None).verdict is Verdict.ACCEPTED
    assert judged(swept(peak=701), baseline=None).verdict is Verdict.HEADROOM


def failed(**changed) -> Judgement:
    given = {"phase": "decode", "shape": WIDE, "is_oom": True, "shortfall": Shortfall(300, 90)}
    failure = Failure(**given | {"detail": "CUDA out of memory"} | changed)
    with FreeFloor(SimpleNamespace(read=reading), every_s=None) as floor:
        pass
    runs = (swept(makes=2.0, peak=999),)  # what ended it is worse than what came before
    return judge(Sweep(runs, failure), Sweep((swept(),)), floor, margin_bytes=MARGIN)


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, (Verdict.OOM, DECODE, 210)),
        ({"shortfall": None}, (Verdict.OOM, DECODE, None)),
        ({"phase": None}, (Verdict.OOM, None, 210)),
        ({"shape": None}, (Verdict.OOM, None, 210)),
        ({"is_oom": False, "shortfall": None}, (Verdict.CRASH, DECODE, None)),
    ],
)
def test_what_ended_a_sweep_goes_before_all_else(changed, found):
    said = failed(**changed)
    assert (said.verdict, said.place, said.shortfall_bytes) == found
    assert said.detail == "CUDA out of memory"


@pytest.mark.parametrize(
    ("changed", "baseline", "told"),
    [
        ({"makes": 1.5}, {}, "0.5 apart"),
        ({"makes": 2.0}, {"makes": (1.25, 1.0)}, "1 apart, which differs from itself by 0.25"),
        ({"peak": 701}, {}, "199 bytes were left at the peak, the margin is 200"),
        (
            {"seconds": 1.0, "retries": (2, 5)},
            {"retries": (0, 1)},
            "the allocator ran out and tried again 3 times a request, 1 in the baseline",
        ),
    ],
)
def test_a_verdict_says_its_numbers(changed, baseline, told):
    assert judged(swept(**changed), baseline=(swept(**baseline),)).detail == told
