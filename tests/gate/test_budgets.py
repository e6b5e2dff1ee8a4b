"""Budgets: what can be written, and verdicts at the very edge."""

from __future__ import annotations

import pickle
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from synthetic import MIB, gpt_report, make_report
from torchledger.errors import BudgetExceeded, FaultyReportError, QuantityError, UsageError
from torchledger.gate.budgets import Budget, find_doubts, judge_budget, parse_share
from torchledger.gate.quantities import QUANTITIES
from torchledger.journal.statements import CATEGORIES, MemorySnapshot, MemoryStatement
from torchledger.ledger import Ledger

NAMED_IN_THE_DESIGN = (*CATEGORIES, "peak", "requested", "allocated", "reserved", "flops", "model_flops")
PHASES = ("forward_flops", "backward_flops", "recompute_flops", "optimizer_flops", "outside_flops")


def test_every_quantity_is_a_key() -> None:
    assert set(NAMED_IN_THE_DESIGN) | set(PHASES) <= set(QUANTITIES)
    assert list(Budget(**dict.fromkeys(QUANTITIES, 3)).limits) == list(QUANTITIES)


@pytest.mark.filterwarnings("ignore:a budget holds, but memory inside compiled regions")
def test_each_quantity_at_its_edge() -> None:
    report = gpt_report()
    step = max(report.steps, key=lambda step: step.peak.total_bytes)
    memory = step.memory["cpu"]
    by_hand = {
        "peak": memory.peak.total_bytes,
        "activations": memory.category_peaks["activations"],
        "gradients": 100 * MIB + 4,  # more than at the peak of the total
        "requested": memory.requested_peak_bytes,
        "flops": step.flops.forward + step.flops.backward + step.flops.recompute + 12_345 + 17,
        "recompute_flops": 12 * (3_000_001 + 1_000_003 + 2 * 4_000_007),
    }
    for key, value in by_hand.items():
        assert [verdict.outcome for verdict in report.check(Budget(**{key: value}))] == ["PASS"]
        with pytest.raises(BudgetExceeded) as caught:
            report.check(Budget(**{key: value - 1}))
        assert (caught.value.key, caught.value.measured, caught.value.budget) == (key, value, value - 1)


def test_a_tolerance_is_exact() -> None:
    (memory,) = gpt_report(n_steps=1).steps[0].memory.values()
    report, peak = gpt_report(n_steps=1), memory.peak.total_bytes
    limit = peak * 50 // 51  # 2 % of it reach the peak just so, or miss it by a byte
    share = Fraction(2, 100)
    for budget in range(limit - 3, limit + 3):
        outcome = judge_budget(report, Budget(peak=budget, tolerance="2%"))[0].outcome
        assert outcome == ("PASS" if peak <= budget * (1 + share) else "OVER")


@pytest.mark.parametrize(
    ("text", "share"), [("2%", 0.02), ("2 %", 0.02), (" 0.5%", 0.005), ("250%", 2.5), (0, 0), ("0", 0)]
)
def test_shares(text: str | float, share: float) -> None:
    assert parse_share(text, "here") == Fraction(str(share))


@pytest.mark.parametrize(
    "text", ["2", "-2%", "%", "2 percent", "2%%", "1 MiB", "nan%", "1e3%", "", None, 0.02, 2, True, [], b"2%"]
)
def test_what_is_no_share(text: object) -> None:
    with pytest.raises(QuantityError, match=r"here\(tolerance=.*write '2%', '0.5 %' or 0"):
        parse_share(text, "here")


@pytest.mark.parametrize(
    ("limits", "kind", "says"),
    [
        ({}, UsageError, "give at least one limit"),
        ({"peek": 1}, UsageError, r"Budget\(peek=1\): there is no quantity 'peek': did you mean 'peak'"),
        ({"peak": "24 MBananas"}, QuantityError, "cannot read '24 MBananas' as a size: write '2GiB'"),
        ({"peak": {"a": 1}}, UsageError, "budgets by parameter id are for @pytest.mark.ledger"),
        ({"peak": "x" * 10_000}, QuantityError, "xxx"),
    ],
)
def test_what_is_no_budget(limits: dict[str, object], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says) as caught:
        Budget(**limits)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 500


def test_a_report_takes_budgets_only() -> None:
    for budget in (None, {"peak": 1}, 5, "2 GiB"):
        with pytest.raises(UsageError, match=r"give a torchledger\.Budget"):
            gpt_report().check(budget)  # type: ignore[arg-type]


def test_what_was_not_measured_passes_nowhere() -> None:
    with pytest.raises(UsageError, match="no step was recorded"):
        make_report().check(Budget(peak=1))
    with pytest.raises(FaultyReportError, match="it broke"):
        gpt_report(faults=("it broke",)).check(Budget(peak="1 TiB"))


def test_doubts() -> None:
    report = gpt_report()
    assert list(find_doubts(report, {"flops": 1})) == []
    assert list(find_doubts(report, {"peak": 1})) == ["memory inside compiled regions is not known"]
    with pytest.warns(UserWarning, match="compiled regions"):
        report.check(Budget(peak="1 TiB"))
    many = gpt_report(n_steps=2)
    many = make_report(*many.steps, n_steps=900)
    assert list(find_doubts(many, {"flops": 1})) == [
        "of 900 steps 2 were kept (the last, and that of the peak): raise keep="
    ]


def test_asserting_in_a_loop() -> None:
    with Ledger() as ledger:
        for size in (1, 2, 3):
            torch.ones(size)
            ledger.step()
            ledger.assert_budget(peak="12", flops=0)
            ledger.assert_budget(Budget(peak=12))
        with pytest.raises(BudgetExceeded, match="peak 12 B > budget 11 B"):
            ledger.assert_budget(peak=11)
        with pytest.raises(UsageError, match="but not both"):
            ledger.assert_budget(Budget(peak=12), peak=12)
        with pytest.raises(UsageError, match="give at least one limit"):
            ledger.assert_budget()


def test_budgets_compare_and_pickle() -> None:
    budget = Budget(peak="2 GiB", flops=0, tolerance="2%")
    assert pickle.loads(pickle.dumps(budget)) == budget == Budget(flops=0, peak=2**31, tolerance="2.0 %")
    assert "2147483648" in repr(budget)
    with pytest.raises(AttributeError):
        budget.limits = {}  # type: ignore[misc]


def test_a_remainder_that_peaks_higher_is_a_doubt() -> None:
    report = gpt_report()
    step = report.steps[-1]
    for factor, n_doubts in ((1, 0), (2, 1)):
        peak = MemorySnapshot(total_bytes=factor * report.peak.total_bytes)
        remainder = replace(step, memory={"cpu": MemoryStatement(peak=peak)})
        doubts = [
            doubt for doubt in find_doubts(replace(report, remainder=remainder), {"peak": 1}) if "after the" in doubt
        ]
        assert len(doubts) == n_doubts
