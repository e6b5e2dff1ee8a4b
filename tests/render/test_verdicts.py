"""What a broken budget says, word for word."""

from __future__ import annotations

from dataclasses import replace

import pytest

from synthetic import MIB, gpt_report
from torchledger.errors import BudgetExceeded
from torchledger.gate.budgets import Budget
from torchledger.gate.judging import Verdict
from torchledger.render.verdicts import render_broken, verdict_line
from torchledger.report import Report

H100 = Report(environment={"torch": "2.13.0+cu126", "devices": {"cuda:0": {"name": "H100"}}})


def verdict(
    measured: int, budget: int, key: str = "peak", outcome: str = "OVER", allowed: int | None = None
) -> Verdict:
    return Verdict(key, measured, budget, budget if allowed is None else allowed, outcome, 0, "cuda:0")


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (verdict(2_480_343_613, 2**31), "peak 2.31 GiB > budget 2.00 GiB (+0.31 GiB, +15.5 %)"),
        (verdict(2**31 + 1, 2**31), "peak 2,147,483,649 B > budget 2,147,483,648 B (+1 B, <0.1 %)"),
        (verdict(5, 0, "recompute_flops"), "recompute_flops 5 FLOP > budget 0 FLOP (+5 FLOP)"),
        (verdict(2000, 3, "uncounted_ops"), "uncounted_ops 2,000 > budget 3 (+1,997, +66566.7 %)"),
        (
            verdict(2**20, 2**21, "activations", "WIN"),
            "WIN: activations 1.00 MiB < baseline 2.00 MiB (-1.00 MiB, -50.0 %)",
        ),
        (verdict(3, 2, "buffers", "REGRESSION"), "REGRESSION: buffers 3 B > baseline 2 B (+1 B, +50.0 %)"),
    ],
)
def test_one_line(found: Verdict, line: str) -> None:
    assert verdict_line(H100, found) == f"{line} on cuda:0 (H100), torch 2.13.0"


def test_a_tolerance_stands_behind_the_line() -> None:
    line = verdict_line(H100, verdict(3000, 2048, allowed=2100))
    assert line.endswith(" on cuda:0 (H100), torch 2.13.0; with its tolerance 2.05 KiB")


def test_lines_then_rows_then_how_to_accept_it() -> None:
    with pytest.raises(BudgetExceeded) as caught:
        gpt_report().check(Budget(peak="400 MiB", recompute_flops=0, gradients="100 MiB"))
    text = str(caught.value)
    lines, peak, flops, accept = text.split("\n\n")
    assert [line.split()[0] for line in lines.splitlines()] == ["peak", "gradients", "recompute_flops"]
    assert peak.startswith("At the peak of step 1, in backward at aten.mm of blocks.11.mlp:\n")
    assert "100.00 MiB  parameters       wte           aten.empty  outside  float32 50257x768" in peak
    assert "12.00 MiB  activations      blocks.0.mlp  aten.addmm  forward  float32 8x1024x3072 x12" in peak
    assert flops.startswith("FLOPs of step ")
    assert "recompute 144.00 MFLOP" in flops
    assert accept.startswith("To accept what was measured: peak=")
    assert text.endswith("\n[budget-exceeded]")


def test_rows_add_up_to_the_peak() -> None:
    report = gpt_report()
    text = render_broken(report, [verdict(1, 0)])
    rows = [line.split() for line in text.splitlines() if "MiB  " in line]
    assert sum(float(row[0]) for row in rows) == pytest.approx(report.peak.total_bytes / MIB, abs=0.02)


def test_names_cannot_forge_lines() -> None:
    report = Report(environment={"torch": "2.13.0\nPASS", "devices": {"cpu": {"name": "x\x1b[2J"}}})
    line = verdict_line(report, Verdict("peak", 2, 1, 1, "OVER", 0, "cpu"))
    assert line.isprintable()


@pytest.mark.parametrize(
    ("measured", "limit", "key", "said"),
    [
        (6_138_372_096, 1024, "peak", "peak 5.72 GiB > budget 1.00 KiB (+5.72 GiB, "),
        (6_138_372_096, 1, "activations", "activations 5.72 GiB > budget 1 B (+5.72 GiB, "),
        (2**30, 10 * 2**20, "peak", "peak 1.00 GiB > budget 10.00 MiB (+1014.00 MiB, +10140.0 %)"),
        (3 * 10**12, 999, "flops", "flops 3.00 TFLOP > budget 999 FLOP (+3.00 TFLOP, "),
        (5 * 10**15, 10**6, "model_flops", "model_flops 5.00 PFLOP > budget 1.00 MFLOP (+5.00 PFLOP, "),
        (2**20, 0, "buffers", "buffers 1.00 MiB > budget 0.00 MiB (+1.00 MiB)"),
    ],
)
def test_a_limit_of_another_size_keeps_its_own_unit(measured: int, limit: int, key: str, said: str) -> None:
    assert verdict_line(H100, verdict(measured, limit, key)).startswith(said)


def test_what_moved_since_the_baseline_comes_before_what_is_there() -> None:
    head = gpt_report().peak
    base = replace(head, activations=head.activations - 24 * MIB, total_bytes=head.total_bytes - 24 * MIB)
    rows = [replace(row, nbytes=row.nbytes // 2) if row.category == "activations" else row for row in head.largest]
    text = render_broken(gpt_report(), [verdict(2, 1)], base=replace(base, largest=tuple(rows)))
    _, moved, peak = text.split("\n\n")
    assert peak.startswith("At the peak")
    assert (
        moved.splitlines()
        == [
            "What changed at the peak since the baseline:",
            "  blocks.0.mlp activations +6.00 MiB: aten.addmm float32 8x1024x3072: now 12.00 MiB, was 6.00 MiB",
            "  in rows too small to be kept: activations -30.00 MiB",
        ]
        or "in rows too small to be kept: activations +18.00 MiB" in moved
    )
    assert "in no row" not in text
