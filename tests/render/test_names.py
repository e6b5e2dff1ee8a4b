"""Names from elsewhere on every page that is made of a report: none is a command, and none does more than be shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner import HOSTILE, find_commands, find_controls
from synthetic import MIB, gpt_memory, make_flops, make_report
from torchledger.errors import BudgetExceeded
from torchledger.gate.budgets import Budget
from torchledger.gate.comparison import compare_reports
from torchledger.journal.evidence import ParameterEvidence, StepEvidence
from torchledger.journal.statements import Allocation, Copies, MemoryStatement, StepReport
from torchledger.reconciliation import reconcile
from torchledger.render.beside import side_by_side
from torchledger.render.comparison import comparison_sections
from torchledger.render.github import annotation_lines, render_comparison_markdown, render_github
from torchledger.render.markdown import render_markdown
from torchledger.render.names import inert
from torchledger.render.text import render_sections, render_text
from torchledger.report import Report


def hostile_report(name: str, n: int = 2) -> Report:
    """A report in which a name stands wherever one can."""
    flops = make_flops({"": {}, name: {"forward": n, "backward": 2 * n}})
    flops = replace(
        flops,
        by_op={name: flops.total},
        by_dtype={name: flops.total},
        uncounted={name: n},
        compiled_in={name: 1},
        compiled_regions=1,
    )
    memory = gpt_memory(activations=n * MIB)
    row = Allocation(n * MIB, "activations", "forward", name, name, (2,), name, where=name)
    peak = replace(memory.peak, largest=(row,), module=name, op=name, by_module={name: memory.peak.total_bytes})
    memory = replace(
        memory, peak=peak, peak_by_phase={"forward": peak}, copies=(Copies("dtype", 8, 1, name),), notes=(name,)
    )
    devices = {"cpu": {"name": name}}
    evidence = StepEvidence(
        {name: ParameterEvidence(n, 2, 4 * n, name, "cpu", True, "product", name)}, tokens_from=name
    )
    return make_report(
        StepReport(0, 1, 0.1, flops, {"cpu": memory, f"x{name}": MemoryStatement(peak=memory.start)}, evidence),
        environment={"torch": name, "note": name, name: name, "devices": devices},
        faults=(name, f"word {name}", "word " * 20 + name),
    )


def broken_budget(report: Report) -> str:
    with pytest.raises(BudgetExceeded) as exceeded:
        replace(report, faults=()).check(Budget(peak=1, flops=0))
    return str(exceeded.value)


PAGES: dict[str, Callable[[Report, Report], str]] = {
    "text": lambda base, head: render_text(base, 100),
    "narrow text": lambda base, head: render_text(base, 40),
    "markdown": lambda base, head: render_markdown(base),
    "side by side": lambda base, head: side_by_side({base.environment["torch"]: base, "b": head}),
    "reconciled": lambda base, head: str(reconcile(base.steps[0], tokens=3)),
    "comparison": lambda base, head: render_sections(comparison_sections(compare_reports({"": base}, {"": head})), 80),
    "comparison in markdown": lambda base, head: render_comparison_markdown(compare_reports({"": base}, {"": head})),
    "comparison of many": lambda base, head: render_sections(
        comparison_sections(
            compare_reports({base.environment["torch"]: base, "c": base}, {base.environment["torch"]: head, "d": head})
        )
    ),
    "summary": lambda base, head: render_github(compare_reports({"": base}, {"": head})),
    "broken budget": lambda base, head: broken_budget(base),
}


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("name", HOSTILE)
def test_no_page_has_a_command_or_a_control(name: str, page: str) -> None:
    text = PAGES[page](hostile_report(name), hostile_report(name, 4))
    assert find_commands(text) == []
    assert find_controls(text) == []


@pytest.mark.parametrize("name", HOSTILE)
def test_annotations_are_ours_alone(name: str) -> None:
    lines = annotation_lines(compare_reports({name: hostile_report(name)}, {name: hostile_report(name, 4)}))
    assert lines
    for line in lines:
        assert line.startswith(
            ("::error title=torchledger", "::warning title=torchledger", "::notice title=torchledger")
        )
        assert find_controls(line) == []
        assert "##[" not in line


@given(st.text(st.sampled_from(":# \n\r\t[]verso-aA\x85\u2028"), max_size=40))
def test_inert(text: str) -> None:
    made = inert(text.replace("\r", ""))
    assert find_commands(made) == []
    assert inert(made) == made
    assert made.count("\n") == text.count("\n")
    if not find_commands(text.replace("\r", "")) and "##" not in text:
        assert made == text.replace("\r", "")


def test_a_long_name_costs_what_it_is_long() -> None:
    """A word of a million letters is cut before it is wrapped, line by line."""
    text = render_text(hostile_report("x" * 10**6), 80)
    assert len(text) < 10**5
