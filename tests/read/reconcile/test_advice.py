"""What would lower the peak: for the highest phase alone, and fitted to what lies there."""

from __future__ import annotations

from dataclasses import replace

import pytest

import torchledger as tl
from synthetic import make_snapshot
from torchledger.journal.evidence import ParameterEvidence, StepEvidence
from torchledger.journal.statements import MemoryStatement, StepReport
from torchledger.read.reconcile.memory import PhasePeak, memory_bridge, phase_peaks
from torchledger.render.bridges import reconciliation_sections
from torchledger.render.tables import Facts

WEIGHT = ParameterEvidence(1000, 2, 4000, "float32", "cpu", True, "product", "aten.mm")


def step_with(cpu: MemoryStatement) -> StepReport:
    return StepReport(3, 5, 0.0, tl.FlopStatement(), {"cpu": cpu}, StepEvidence({"w": WEIGHT}))


ADVICE = {
    "activations": ("backward", "checkpoint activations"),
    "temporaries": ("backward", "kernels that hold less"),
    "gradients": ("forward", "zero_grad(set_to_none=True)"),
    "autocast_copies": ("forward", "16 bits"),
    "inputs": ("forward", "a smaller batch"),
    "parameters": ("forward", "ZeRO"),
    "other": ("outside", "look at its rows"),
}


@pytest.mark.parametrize("category", ADVICE)
def test_advice(category: str) -> None:
    phase, words = ADVICE[category]
    snapshot = make_snapshot(**{"parameters": 4000, category: 10_000})
    statement = MemoryStatement(start=snapshot, end=snapshot, peak=snapshot, peak_by_phase={phase: snapshot})
    (found,) = phase_peaks(step_with(cpu=statement))
    assert (found.phase, found.category, found.category_bytes) == (phase, category, 10_000)
    assert words in found.advice


def peaks_of(**phases: tl.MemorySnapshot) -> dict[str, PhasePeak]:
    highest = max(phases.values(), key=lambda snapshot: snapshot.total_bytes)
    statement = MemoryStatement(start=highest, end=highest, peak=highest, peak_by_phase=phases)
    return {peak.phase: peak for peak in phase_peaks(step_with(cpu=statement))}


def test_advice_is_for_the_highest_phase_alone() -> None:
    low, high = (make_snapshot(parameters=4000, activations=n) for n in (9000, 9001))
    found = peaks_of(forward=low, backward=high, recompute=low)
    assert {phase: bool(peak.advice) for phase, peak in found.items()} == {
        "forward": False,
        "backward": True,
        "recompute": False,
    }
    again = peaks_of(forward=low, recompute=high)
    assert "smaller segments" in again["recompute"].advice
    bridge = memory_bridge(step_with(MemoryStatement(start=high, end=high, peak=high)))
    sections = reconciliation_sections(bridge, bridge, found.values())
    assert isinstance(sections[-1], Facts)
    assert [label for label, _ in sections[-1].lines] == ["the peak, in backward"]


def row_of(nbytes: int, op: str, shape: tuple[int, ...], n: int = 1, category: str = "temporaries") -> tl.Allocation:
    return tl.Allocation(nbytes, category, "backward", "", op, shape, "float32", n)


@pytest.mark.parametrize("loss", ["aten.nll_loss_backward", "aten._log_softmax", "aten.binary_cross_entropy"])
@pytest.mark.parametrize("category", ["temporaries", "activations"])
def test_advice_for_logits_that_are_there_three_times(category: str, loss: str) -> None:
    rows = (
        row_of(4000, "aten.mm", (2, 5, 100), category="activations"),
        row_of(8000, loss, (10, 100), 2, category=category),
        row_of(900, "aten.gelu", (9, 25), category="activations"),
    )
    held = {"activations": 4900, "temporaries": 8000} if category == "temporaries" else {"activations": 12_900}
    high = replace(make_snapshot(parameters=4000, **held), largest=rows)
    advice = peaks_of(backward=high)["backward"].advice
    assert advice.startswith("compute the loss in chunks")
    assert "3 of 10 x 100 at once, 11.72 KiB" in advice


def test_a_small_loss_is_no_reason_for_chunks() -> None:
    rows = (row_of(900, "aten._log_softmax", (9, 25)), row_of(9000, "aten.gelu", (9, 250), category="activations"))
    high = replace(make_snapshot(parameters=4000, activations=9000, temporaries=900), largest=rows)
    assert "checkpoint" in peaks_of(backward=high)["backward"].advice


def test_attention_is_no_loss() -> None:
    rows = (row_of(9000, "aten._softmax", (9, 250), category="activations"),)
    high = replace(make_snapshot(parameters=4000, activations=9000), largest=rows)
    assert "checkpoint" in peaks_of(backward=high)["backward"].advice


@pytest.mark.parametrize(("frozen", "words"), [(9000, "fewer bits"), (1000, "ZeRO"), (0, "ZeRO")])
def test_advice_for_frozen_weights(frozen: int, words: str) -> None:
    def parameter(nbytes: int, trainable: bool) -> ParameterEvidence:
        return ParameterEvidence(nbytes // 4, 2, nbytes, "float32", "cpu", trainable, "product", "aten.mm")

    evidence = StepEvidence({"base": parameter(frozen, False), "adapter": parameter(1000, True)})
    high = make_snapshot(parameters=frozen + 1000, gradients=1000, optimizer_state=2000, activations=300)
    statement = MemoryStatement(start=high, end=high, peak=high, peak_by_phase={"optimizer": high})
    step = StepReport(3, 5, 0.0, tl.FlopStatement(), {"cpu": statement}, evidence)
    (found,) = phase_peaks(step)
    assert words in found.advice
    assert ("ZeRO" in found.advice) == (words == "ZeRO")


def test_advice_for_an_optimizer_and_for_small_extras() -> None:
    step = make_snapshot(parameters=4000, optimizer_state=8000, temporaries=4000)
    small = make_snapshot(parameters=4000, optimizer_state=8000, activations=100)
    found = peaks_of(forward=small, optimizer=step, backward=tl.MemorySnapshot())
    assert list(found) == ["forward", "optimizer"]  # nothing was there in the backward
    assert "fused" in found["optimizer"].advice
    assert found["forward"].category == "optimizer_state"
