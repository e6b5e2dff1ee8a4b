"""The table of quantities: complete, and each number is the highest of the kept steps on the main device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from synthetic import MIB, gpt_flops, gpt_memory, gpt_report, make_report, make_snapshot
from torchledger.errors import UsageError
from torchledger.gate.quantities import QUANTITIES, Measured, find_quantity, measure_quantities
from torchledger.journal.statements import CATEGORIES, MemoryStatement, StepReport
from torchledger.report import Report


def test_every_key_of_the_design_is_there() -> None:
    named = {"peak", "requested", "allocated", "reserved", "flops", "model_flops", "forward_flops", "backward_flops"}
    named |= {
        "recompute_flops",
        "optimizer_flops",
        "inference_flops",
        "outside_flops",
        "attention_rescore_flops",
        "int_ops",
    }
    assert set(QUANTITIES) == named | set(CATEGORIES) | {"uncounted_ops", "compiled_regions"}
    assert all(key == quantity.key for key, quantity in QUANTITIES.items())


def test_numbers_by_hand() -> None:
    memory = replace(
        gpt_memory(), requested_peak_bytes=101, allocated_peak_bytes=202, reserved_peak_bytes=303, external_bytes=0
    )
    flops = replace(gpt_flops(), uncounted={"mylib.a": 2, "mylib.b": 3}, int_ops=17, compiled_regions=4)
    found = {
        key: m.value
        for key, m in measure_quantities(make_report(StepReport(7, 1, 0.1, flops, {"cpu": memory}))).items()
    }
    assert found["peak"] == memory.peak.total_bytes
    assert (found["requested"], found["allocated"], found["reserved"]) == (101, 202, 303)
    # A category's own highest value, which for gradients lies elsewhere than the peak.
    assert (found["gradients"], memory.peak.gradients) == (100 * MIB + 4, 50 * MIB)
    assert (found["uncounted_ops"], found["int_ops"], found["compiled_regions"]) == (5, 17, 4)
    phases = ("forward", "backward", "recompute", "optimizer", "inference", "outside")
    assert sum(found[f"{phase}_flops"] for phase in phases) == found["flops"] == 620_346_557
    assert found["model_flops"] == found["flops"] - found["recompute_flops"] - found["attention_rescore_flops"]


def test_the_highest_step_is_named() -> None:
    report = gpt_report(n_steps=3)  # the second has the highest peak
    found = measure_quantities(report)
    assert found["peak"] == Measured(report.peak.total_bytes, 1, "cpu")
    assert found["parameters"].step_index == 1  # equal in all: that of the peak
    steps = [replace(step, flops=gpt_flops(scale=3)) if step.index == 2 else step for step in report.steps]
    assert measure_quantities(Report(steps=tuple(steps), n_steps=3))["flops"].step_index == 2


def test_bytes_are_those_of_the_main_device() -> None:
    early = StepReport(0, 1, 0.1, gpt_flops(), {"cpu": MemoryStatement(peak=make_snapshot(inputs=2**50))})
    late = StepReport(1, 1, 0.1, gpt_flops(recompute=False), {"cuda:0": gpt_memory(), "cpu": early.memory["cpu"]})
    found = measure_quantities(make_report(early, late))
    assert found["peak"] == Measured(gpt_memory().peak.total_bytes, 1, "cuda:0")
    assert found["inputs"].value == 8192
    assert replace(found["flops"], apart=0) == Measured(gpt_flops().total, 0, "cuda:0")


def test_no_step_is_no_number() -> None:
    assert measure_quantities(Report()) == {}
    # Of a step without any bytes only the FLOPs are known.
    assert "peak" not in measure_quantities(make_report(StepReport(0, None, 0.0, gpt_flops(), {})))


@pytest.mark.parametrize(("key", "near"), [("activation", "activations"), ("flop", "flops"), ("PEAK", "peak")])
def test_a_wrong_key_is_met_with_the_right_one(key: str, near: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean .*'{near}'"):
        find_quantity(key)


def test_a_key_like_no_other_lists_all() -> None:
    with pytest.raises(UsageError, match="there are peak, requested"):
        find_quantity("x" * 500)
