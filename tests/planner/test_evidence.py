from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from serving import Served, sample, settled
from torch import nn

from residency.offload.device import Reading
from residency.phases.shape import Shape
from residency.planner.serving import evidence
from residency.planner.serving.evidence import (
    LEFT_BEHIND_BYTES,
    Evidence,
    Ground,
    Need,
    Premises,
    Validated,
    check,
)
from residency.planner.serving.metrics import Metrics

GIB = 1 << 30
GB = 10**9
MIB = 1 << 20


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with settled() as served:
        yield served


@pytest.fixture
def served(shared: Served) -> Iterator[Served]:
    yield shared
    shared.reset()


@pytest.fixture
def validated(served) -> Validated:
    """One phase on a card of 8 GB: 6.5 GB at its peak, and a margin of 1.2 GB."""
    taken = Premises(served.outcome, margin_bytes=0, metrics=Metrics()).validated
    need = Need("denoise", Shape(1024, 1024), 6_500_000_000, 6_500_000_000, 1_200_000_000)
    return replace(taken, needs=(need,), outside_bytes=300_000_000, rest_bytes=0)


def reading(outside_bytes: int) -> Reading:
    return Reading(8 * GB, 0, outside_bytes, 0, 0, 0, 0, 0, 0)


def doubts(evidence: Evidence) -> list[Ground]:
    assert evidence.holds == (not evidence.reasons)
    return [each.ground for each in evidence.reasons]


class Adapted(nn.Module):
    """What PEFT puts around a linear layer."""

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self, base: nn.Linear, rank: int, *names: str) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict(
            {name: nn.Linear(base.in_features, rank, bias=False) for name in names}
        )
        self.lora_B = nn.ModuleDict(
            {name: nn.Linear(rank, base.out_features, bias=False) for name in names}
        )
        self.active_adapters = [*names]
        self.r = dict.fromkeys(names, rank)


@pytest.fixture
def adapt(served):
    """Puts adapters around a linear layer of the transformer; without names, takes them off."""
    module = served.pipeline.pipeline.transformer
    path, base = next(
        (name, each) for name, each in module.named_modules() if isinstance(each, nn.Linear)
    )
    parent, _, name = path.rpartition(".")

    def put(*names: str) -> None:
        layer = Adapted(base, 4, *names) if names else base
        setattr(module.get_submodule(parent), name, layer)

    yield put
    put()


@pytest.mark.parametrize("count", [1, 2])
def test_an_adapter_that_is_loaded_later_takes_the_evidence_away(served, adapt, count):
    """AD-02"""
    guard = served.guard()
    assert guard.check().holds
    adapt(*(f"style_{n}" for n in range(count)))
    (finding,) = guard.check().reasons
    assert finding.ground is Ground.ADAPTER
    assert "adapters were none, are style_0 of transformer" in finding.detail
    assert "rank 4" in finding.detail
    adapt()
    assert guard.check().holds


def test_an_adapter_that_was_there_and_is_gone_takes_the_evidence_away_too(served, adapt):
    adapt("style")
    guard = served.guard()
    assert guard.check().holds
    adapt()
    assert doubts(guard.check()) == [Ground.ADAPTER]


@pytest.mark.parametrize("loras", [0, 1, 2])
@pytest.mark.parametrize("lora_bytes", [400_000_000, 800_000_000])
def test_each_lora_on_the_card_is_charged_to_the_phase(validated, loras, lora_bytes):
    """AD-03: 0.4 to 0.8 GB each, which 1.2 GB to spare are enough for once or twice."""
    rest = loras * lora_bytes
    found = check(validated, reading(300_000_000), rest_bytes=rest, now=validated.fingerprint)
    short = rest - LEFT_BEHIND_BYTES - 1_200_000_000
    assert doubts(found) == ([Ground.PROCESS] if short > 0 else [])
    for finding in found.reasons:
        assert (finding.phase, finding.short_bytes) == ("denoise", short)
        assert f"this process {rest} besides" in finding.detail


@pytest.mark.parametrize("more", [0, 1_200_000_000, 1_200_000_001])
def test_a_neighbour_that_takes_more_than_is_to_spare_is_found_to_the_byte(validated, more):
    now = reading(300_000_000 + more)
    found = check(validated, now, rest_bytes=0, now=validated.fingerprint)
    assert doubts(found) == ([Ground.NEIGHBOUR] if more > 1_200_000_000 else [])
    for finding in found.reasons:
        assert finding.short_bytes == more - 1_200_000_000
        assert finding.shape == "1024x1024"
        assert f"take {more} bytes more" in finding.detail


def test_each_phase_that_is_short_is_named_with_its_own_bytes(served):
    premises = Premises(served.outcome, margin_bytes=0, metrics=Metrics())
    (run,) = served.outcome.planned.runs
    peaks = {phase: run.peak_bytes(phase) for phase in served.host.graph.phases}
    left = sorted(peaks.values())[-2] - 1
    served.leave(left)
    found = premises.evidence(ooms=0, outside=0)
    assert {(each.phase, each.short_bytes) for each in found.reasons} == {
        (phase, peak - left) for phase, peak in peaks.items() if peak > left
    }
    assert len(found.reasons) == 2
    assert {each.shape for each in found.reasons} == {str(run.asked)}


def test_half_of_the_margin_is_for_others_and_the_rest_for_fragmentation(served, monkeypatch):
    (run,) = served.outcome.planned.runs
    monkeypatch.setattr(type(run), "fragmentation_bytes", lambda run, phase: 700)
    for margin, lost in ((0, 0), (1000, 500), (5000, 700)):
        taken = Premises(served.outcome, margin_bytes=margin, metrics=Metrics()).validated
        for need in taken.needs:
            assert need.needed_bytes - need.peak_bytes == lost
            assert need.margin_bytes == margin


def test_what_this_process_puts_on_the_card_itself_counts(served, monkeypatch):
    left_behind, free = 16 << 10, 40 << 10
    monkeypatch.setattr(evidence, "LEFT_BEHIND_BYTES", left_behind)
    guard = served.guard()
    served.leave(served.planned_peak + free)
    device = served.card.torch_device
    model = torch.empty(left_behind + free, dtype=torch.uint8, device=device)
    assert guard.check().holds
    more = torch.empty(1, dtype=torch.uint8, device=device)
    (finding,) = guard.check().reasons
    assert finding.short_bytes == 1
    assert f"this process {left_behind + free + 1} besides" in finding.detail
    guard.serve(served.shape, lambda: None)
    assert sample(guard.metrics, "released_total", cause="neighbour") == 1
    del model, more
    assert guard.check().holds


def test_what_is_retained_is_not_taken_for_something_else(served):
    guard = served.guard()

    guard.serve(served.shape, served.call())
    served.host.release()

    def held_and_rest() -> tuple[int, int]:
        held = sum(served.host.held_bytes().values())
        return held, served.card.read().allocated_bytes - held

    held_before, rest_before = held_and_rest()
    guard.serve(served.shape, served.call())
    held, rest = held_and_rest()
    assert held - held_before > 1_000_000
    assert abs(rest - rest_before) < 16 << 10
    assert guard.check().holds


def test_a_component_that_was_changed_takes_the_evidence_away(served):
    guard = served.guard()
    module = served.pipeline.pipeline.transformer
    module.register_parameter("extra", nn.Parameter(torch.zeros(3)))
    (finding,) = guard.check().reasons
    assert finding.ground is Ground.STRUCTURE
    assert "transformer" in finding.detail
    del module.extra
    assert guard.check().holds


def test_what_a_server_met_takes_the_evidence_away(validated):
    found = check(
        validated,
        reading(300_000_000),
        rest_bytes=0,
        now=validated.fingerprint,
        ooms=2,
        outside=3,
    )
    assert doubts(found) == [Ground.OUTSIDE, Ground.OOM]
    assert [each.detail.split()[0] for each in found.reasons] == ["3", "2"]


def test_evidence_is_a_value_that_survives_json(validated):
    found = check(validated, reading(7 * GB), rest_bytes=0, now=validated.fingerprint)
    assert not found.holds
    assert Evidence.model_validate_json(found.model_dump_json()) == found
