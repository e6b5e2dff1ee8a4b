"""Markdown: the same rows, and no name is markup."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest

from synthetic import gpt_report, make_flops, make_report, make_snapshot, utilized_report, with_peak
from torchledger.gate.comparison import Comparisons, compare_reports
from torchledger.journal.statements import MemoryStatement, StepReport
from torchledger.render.github import render_comparison_markdown, render_github
from torchledger.render.markdown import code_span, escape, render_markdown, render_sections
from torchledger.render.page import report_sections
from torchledger.render.tables import Facts, Table


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_every_table_has_its_rows() -> None:
    report = utilized_report()
    page = render_markdown(report).splitlines()
    for section in report_sections(report):
        assert f"#### {escape(section.title)}" in page
        if isinstance(section, Table):
            at = page.index(f"#### {escape(section.title)}") + 2
            lines = page[at : at + 2 + len(section.rows)]
            assert {len(cells(line)) for line in lines} == {len(section.columns)}
            assert page[at - 1] == ""
            assert not page[at + len(lines) : at + len(lines) + 1] or page[at + len(lines)] == ""


def test_numbers_are_those_of_the_text() -> None:
    page = render_markdown(gpt_report())
    assert "| **hardware total** | **620,346,557** | **620.35 MFLOP** | **100.0 %** |" in page
    assert "| &nbsp;&nbsp;`blocks.[0-11] x12` | 597,000,864 |" in page


@pytest.mark.parametrize(
    "name", ["a|b", "`", "``a`", "<script>alert(1)</script>", "__init__", "*x*", "[a](b)", "@someone", "~x~"]
)
def test_no_name_is_markup(name: str) -> None:
    flops = make_flops({"": {}, name: {"forward": 9}}, by_op={name: 9})
    snapshot = replace(make_snapshot(by_module={name: 8}, inputs=8), op=name, module=name, phase="forward")
    report = make_report(
        StepReport(0, 1, 0.1, flops, {"cpu": MemoryStatement(peak=snapshot, notes=(name,))}), faults=(name,)
    )
    outside_code = re.sub(r"(?<![`\\])(`+)(?!`).*?(?<!`)\1(?!`)", "", render_markdown(report))
    outside_code = re.sub(r"\\.", "", outside_code)
    assert not re.search(r"[<\[`_~@]", outside_code.replace("**", ""))


def test_code_spans() -> None:
    assert code_span("a") == "`a`"
    assert code_span("a`b") == "``a`b``"
    assert code_span("  a|b") == "&nbsp;&nbsp;`a\\|b`"
    assert code_span("") == ""


def test_what_goes_on_from_a_fact_stands_below_it() -> None:
    facts = Facts("A title", (("grew most", "a"), ("", "b"), ("note", "c")))
    assert render_sections([facts]).splitlines() == ["#### A title", "", "- grew most: a", "  - b", "- note: c"]
    assert render_sections([Facts("A title", (("", "b"), ("", "c")))]).splitlines()[2:] == ["- b", "  - c"]


@pytest.mark.parametrize("render", [render_comparison_markdown, render_github])
def test_no_fact_of_a_comparison_has_an_empty_label(render: Callable[[Comparisons], str]) -> None:
    base, head = gpt_report(recompute=False), gpt_report(recompute=True)
    head = replace(head, steps=tuple(replace(step, tokens=None) for step in head.steps), peak_step=None)
    page = render(compare_reports({"": base}, {"": head}))
    assert "- : " not in page
    assert "grew most: " in page
    assert "\n  - " in page
    assert "None" not in page
    many = {f"t{i}": gpt_report() for i in range(30)}
    taller = {name: with_peak(report, Fraction(105, 100)) for name, report in many.items()}
    more = render(compare_reports(many, taller))
    assert "- : " not in more
