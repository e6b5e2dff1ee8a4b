"""Markdown: the same rows, and no name is markup."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from synthetic import gpt_report, make_flops, make_report, make_snapshot, utilized_report
from torchledger.journal.statements import MemoryStatement, StepReport
from torchledger.render.markdown import code_span, escape, render_markdown
from torchledger.render.page import report_sections
from torchledger.render.tables import Table


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
