"""Verdicts: each number by its tolerance, no number across machines that decide it, and never a silent pass."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from synthetic import gpt_flops, gpt_memory, gpt_report, make_report, with_peak
from torchledger.errors import UsageError
from torchledger.gate.comparison import (
    Comparison,
    Comparisons,
    compare_reports,
    compare_runs,
)
from torchledger.gate.judging import Outcome
from torchledger.gate.machine import read_machine
from torchledger.gate.quantities import QUANTITIES
from torchledger.gate.tolerances import Tolerance
from torchledger.journal.statements import MemoryStatement, StepReport
from torchledger.report import Report

H100 = {"torch": "2.13.0", "devices": {"cuda:0": {"name": "NVIDIA H100"}}}


def verdicts(comparison: Comparison) -> dict[str, str]:
    return {item.key: str(item.outcome) for item in comparison.verdicts}


def one(comparison: Comparison) -> Comparisons:
    return Comparisons((comparison,))


def test_the_gate_fails_on_a_base_lowered_by_5_percent() -> None:
    head = gpt_report()
    comparison = compare_runs(with_peak(head, Fraction(95, 100)), head)
    assert verdicts(comparison)["peak"] == verdicts(comparison)["activations"] == "REGRESSION"
    assert verdicts(comparison)["flops"] == "PASS"
    assert one(comparison).exit_code == 1
    assert one(compare_runs(head, head)).exit_code == 0
    assert comparison.differences.head_bytes - comparison.differences.base_bytes == sum(
        entry.change for entry in comparison.differences.entries
    )


def test_a_win_is_named_and_fine() -> None:
    head = gpt_report()
    comparison = compare_runs(with_peak(head, Fraction(105, 100)), head)
    assert comparison.outcome == Outcome.WIN
    assert verdicts(comparison)["peak"] == "WIN"
    assert one(comparison).exit_code == 0


@pytest.mark.parametrize(
    ("tolerance", "verdict"),
    [
        (Tolerance(Fraction(6, 100)), "PASS"),
        (Tolerance(Fraction(5, 100)), "REGRESSION"),  # 5 % of what was before is less than what came
        (Tolerance(Fraction(1, 100), 2**40), "PASS"),
        (Tolerance(Fraction(1, 100), 2**10), "REGRESSION"),
    ],
)
def test_tolerances_are_of_the_base(tolerance: Tolerance, verdict: str) -> None:
    head = gpt_report()
    comparison = compare_runs(with_peak(head, Fraction(95, 100)), head, tolerances={"peak": tolerance})
    found = verdicts(comparison)
    assert found["peak"] == verdict
    assert found["activations"] == "REGRESSION"  # its own tolerance is still exact


def test_the_edge_of_a_tolerance() -> None:
    head = gpt_report()
    room = {"flops": Tolerance(absolute=10)}

    def grown(n: int) -> str:
        steps = [replace(step, flops=replace(step.flops, total=step.flops.total + n)) for step in head.steps]
        return verdicts(compare_runs(head, Report(steps=tuple(steps), n_steps=3), tolerances=room))["flops"]

    assert [grown(n) for n in (-11, -10, 0, 10, 11)] == ["WIN", "PASS", "PASS", "PASS", "REGRESSION"]


def test_exact_on_cpu_to_the_last_byte() -> None:
    base = gpt_report(n_steps=1)
    step = base.steps[0]
    memory = gpt_memory(activations=step.peak.activations + 1)
    head = make_report(replace(step, memory={"cpu": memory}))
    assert verdicts(compare_runs(base, head))["peak"] == "REGRESSION"
    assert verdicts(compare_runs(head, base))["peak"] == "WIN"
    on_cuda = [
        make_report(replace(step, memory={"cuda:0": s.memory["cpu"]}), environment=H100)
        for s in (base.steps[0], head.steps[0])
    ]
    assert verdicts(compare_runs(*on_cuda))["peak"] == "PASS"
    simulated = {**H100, "simulated": True}
    dry = [replace(run, environment=simulated) for run in on_cuda]
    assert verdicts(compare_runs(*dry))["peak"] == "REGRESSION"


OF_ALLOCATOR = {"allocated", "reserved", "workspace", "unexplained"}

MACHINES = {
    "the same": (H100, H100, set()),
    "another GPU": (H100, {**H100, "devices": {"cuda:0": {"name": "NVIDIA A100"}}}, OF_ALLOCATOR),
    "another torch": (H100, {**H100, "torch": "2.14.0"}, OF_ALLOCATOR),
    "a patch of torch": (H100, {**H100, "torch": "2.13.1+cu130"}, set()),
    "unknown": (H100, {}, OF_ALLOCATOR),
    "simulated": (H100, {**H100, "simulated": True}, OF_ALLOCATOR),
    "odd": (H100, {"torch": 5, "devices": ["x"]}, OF_ALLOCATOR),
}


@pytest.mark.parametrize("case", MACHINES)
def test_what_the_allocator_decides_needs_the_same_machine(case: str) -> None:
    base, head, unmatched = MACHINES[case]
    comparison = compare_runs(
        gpt_report(device="cuda:0", environment=base), gpt_report(device="cuda:0", environment=head)
    )
    assert {key for key, verdict in verdicts(comparison).items() if verdict == "NO-MATCH"} == unmatched
    assert all(bool(item.why) == (item.outcome == Outcome.NO_MATCH) for item in comparison.verdicts)
    assert comparison.outcome == Outcome.PASS


def test_another_kind_of_device_compares_what_the_program_decides() -> None:
    found = verdicts(compare_runs(gpt_report(), gpt_report(device="cuda:0", environment=H100)))
    compared = {key for key, verdict in found.items() if verdict != "NO-MATCH"}
    assert compared == {key for key, quantity in QUANTITIES.items() if quantity.depends_on == "program"}
    assert {"peak", "activations", "temporaries", "reserved"} & compared == set()
    assert {"optimizer_state", "inputs"} & compared == set()
    assert {"parameters", "gradients", "flops"} <= compared


def test_differences_belong_to_the_numbers() -> None:
    """The step of the highest peak need not be that of the most FLOPs."""
    lean, busy = gpt_flops(), gpt_flops(scale=3)
    report = gpt_report(n_steps=3)
    steps = [replace(step, flops=busy if step.index == 2 else lean) for step in report.steps]
    base, head = make_report(*steps), gpt_report(n_steps=3, recompute=False)
    found = compare_runs(base, head)
    numbers = {item.key: item.change for item in found.verdicts}
    assert numbers["flops"] == gpt_flops(recompute=False).total - busy.total
    for rows in (found.differences.flop_modules, found.differences.flop_ops, found.differences.flop_phases):
        assert sum(row.change for row in rows) == numbers["flops"]
    assert sum(entry.change for entry in found.differences.entries) == numbers["peak"] != 0


def test_on_cpu_the_version_of_torch_hides_nothing() -> None:
    head = gpt_report(environment={"torch": "2.14.0"})
    comparison = compare_runs(with_peak(gpt_report(), Fraction(95, 100)), head)
    assert verdicts(comparison)["peak"] == "REGRESSION"
    assert any("2.14.0" in note for note in comparison.notes)


def test_nothing_to_compare_is_3() -> None:
    assert one(compare_runs(Report(), Report())).exit_code == 3
    only_head = compare_runs(Report(), gpt_report())
    assert set(verdicts(only_head).values()) == {"NEW"}
    assert one(only_head).exit_code == 3
    assert set(verdicts(compare_runs(gpt_report(), Report())).values()) == {"GONE"}
    assert compare_reports({"a": gpt_report()}, {"b": gpt_report()}).exit_code == 3
    assert compare_reports({}, {}).exit_code == 3


def test_what_only_one_side_has() -> None:
    step = StepReport(0, None, 0.0, gpt_flops(), {})
    found = verdicts(compare_runs(make_report(step), make_report(replace(step, memory={"cpu": gpt_memory()}))))
    assert found["peak"] == "NEW"
    assert found["flops"] == "PASS"


def test_many_reports_go_by_their_ids() -> None:
    report = gpt_report()
    lower = with_peak(report, Fraction(95, 100))
    found = compare_reports({"a": report, "b": lower, "old": report}, {"b": report, "a": report, "new": report})
    assert [(c.name, str(c.outcome)) for c in found.found] == [("b", "REGRESSION"), ("a", "PASS")]
    assert (found.only_base, found.only_head) == (("old",), ("new",))
    assert found.exit_code == 1


def test_a_plain_report_goes_with_the_only_one_of_a_file() -> None:
    report = gpt_report()
    for base, head in (("", "test_a"), ("test_a", ""), ("", "")):
        (comparison,) = compare_reports({base: report}, {head: report}).found
        assert comparison.name == (base or head)
    assert compare_reports({"": report}, {"a": report, "b": report}).exit_code == 3
    assert compare_reports({"a": report}, {"b": report}).exit_code == 3


def test_unknown_keys_of_tolerances_are_refused() -> None:
    given = {"peek": Tolerance()}
    with pytest.raises(UsageError, match="did you mean 'peak'"):
        compare_runs(Report(), Report(), tolerances=given)
    with pytest.raises(UsageError, match="did you mean 'peak'"):
        compare_reports({}, {}, tolerances=given)


def test_what_a_reader_must_know_is_noted() -> None:
    base = gpt_report(faults=("a hook failed",))
    head = replace(gpt_report(n_steps=2), steps=tuple(replace(s, tokens=4) for s in gpt_report(n_steps=2).steps))
    notes = "\n".join(compare_runs(base, Report(steps=head.steps, n_steps=2)).notes)
    for said in ("a hook failed", "3 against 2 steps", "8,192 against 4 tokens", "torch 2.13.0 against (unknown)"):
        assert said in notes


def test_machines_are_read_with_suspicion() -> None:
    odd = {"torch": None, "devices": {"cuda:0": "H100"}, "simulated": 0}
    machine = read_machine(gpt_report(device="cuda:0", environment=odd))
    assert (machine.device, machine.name, machine.torch, machine.simulated) == ("cuda:0", "", "", False)
    named = {"devices": {"cuda:0": {"name": "NVIDIA H100", "simulated": True}}}
    assert read_machine(gpt_report(device="cuda:0", environment=named)).simulated
    assert not read_machine(gpt_report(environment={"simulated": True})).simulated  # of a CPU there is no other kind
    assert read_machine(make_report(StepReport(0, 1, 0.1, gpt_flops(), {"cpu": MemoryStatement()}))).device == "cpu"
