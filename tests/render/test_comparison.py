"""Comparisons on a page: rows add up, numbers that differ look different, and any name and width will do."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction

import pytest

from synthetic import gpt_memory, gpt_report, make_flops, make_report, make_snapshot, with_peak
from torchledger.gate.comparison import Comparisons, compare_reports, compare_runs
from torchledger.gate.differences import CountDifference, EntryDifference
from torchledger.journal.statements import Allocation, MemoryStatement, StepReport
from torchledger.render.comparison import comparison_sections, entry_table, quantity_table
from torchledger.render.comparison_words import entry_line, headline, quantity_line, told_apart
from torchledger.render.github import render_comparison_markdown, render_github
from torchledger.render.tables import Table
from torchledger.render.text import render_sections
from torchledger.report import Report

HOSTILE = ["a|b", "`", "``a`", "<script>alert(1)</script>", "</details>", "__init__", "*x*", "[a](b)", "@someone"]
HOSTILE += ["a\nb", "::error::no", "模型", "\u202egnp", "x" * 3000, "\ud800", "| --- |", "a\\|b", "%0A"]


def page(comparisons: Comparisons, width: int = 100) -> str:
    return render_sections(comparison_sections(comparisons), width)


def grown() -> Comparisons:
    head = gpt_report()
    return compare_reports({"": with_peak(head, Fraction(95, 100))}, {"": head})


def named(name: str, n: int) -> Report:
    """A report in which everything has that name."""
    flops = make_flops({"": {}, name: {"forward": n}}, by_op={name: n}, uncounted={name: n})
    row = Allocation(n, "inputs", "forward", name, name, (n,), name, where=name)
    snapshot = replace(make_snapshot(by_module={name: n}, inputs=n), op=name, module=name, largest=(row,))
    step = StepReport(0, 1, 0.1, flops, {"cpu": MemoryStatement(peak=snapshot, category_peaks={"inputs": n})})
    return make_report(step, environment={"torch": name, "devices": {"cpu": {"name": name}}}, faults=(name,))


def test_the_verdict_comes_first_with_the_number_behind_it() -> None:
    first, *rest = page(grown(), 120).splitlines()
    assert first == "REGRESSION: peak 465.51 MiB -> 490.01 MiB (+24.50 MiB, +5.3 %), and 1 more"
    assert any("requested, allocated, reserved" in line for line in rest)
    assert re.search(r"\npeak +465.51 MiB +490.01 MiB +\+24.50 MiB +\+5.3 % +exact +REGRESSION\n", page(grown(), 120))


def test_equal_reports_show_their_numbers() -> None:
    text = page(compare_reports({"": gpt_report()}, {"": gpt_report()}))
    assert text.startswith("PASS: nothing grew beyond its tolerance\n")
    assert "equal in both: " in text
    assert re.search(r"\npeak +[0-9.]+ MiB", text)
    assert "differ" not in text


def test_rows_of_the_entries_add_up() -> None:
    entries = [EntryDifference("inputs", f"m{i}", "op", "int8", (i,), 0, i * i, "new", "") for i in range(30, 0, -1)]
    entries.append(EntryDifference("workspace", "", "", "", (), 100, 0, "rest", "in no row"))
    for n_rows in (1, 10, 31, 50):
        *rows, total = entry_table(entries, n_rows=n_rows).rows
        numbers = [int(cells[0].replace(",", "")) for cells in rows]
        assert sum(numbers) == int(total[0].replace(",", "")) == sum(i * i for i in range(31)) - 100
        assert len(rows) == min(n_rows + 1, 31)


def test_tables_of_a_comparison_add_up() -> None:
    (comparison,) = compare_reports({"": gpt_report()}, {"": gpt_report(recompute=False)}).found
    tables = [s for s in comparison_sections(Comparisons((comparison,))) if isinstance(s, Table) and s.n_totals]
    assert len(tables) == 3
    for table in tables:
        place = next(i for i, column in enumerate(table.columns) if column.kind == "number")
        *rows, total = [int(cells[place].replace(",", "")) for cells in table.rows]
        assert sum(rows) == total
    changes = [int(t.rows[-1][1].replace(",", "")) for t in tables if "FLOPs" in t.title]
    assert changes == [comparison.differences.head_flops - comparison.differences.base_flops] * 2


def test_numbers_that_differ_look_different() -> None:
    base = gpt_report(n_steps=1)
    step = base.steps[0]
    flops = replace(step.flops, total=step.flops.total + 1)
    head = make_report(replace(step, flops=flops, memory={"cpu": gpt_memory(activations=step.peak.activations + 1)}))
    comparison = compare_runs(base, head)
    lines = {item.quantity.key: quantity_line(item) for item in told_apart(comparison) if item.change}
    assert {"peak", "activations", "flops"} <= lines.keys()
    for line in lines.values():
        before, after = re.fullmatch(r"\w+ (.+) -> (.+) \(.*\)", line).groups()  # type: ignore[union-attr]
        assert before != after
        assert before.split()[1] == after.split()[1]
    for cells in quantity_table(comparison).rows:
        assert (cells[1] != cells[2]) is bool(cells[3])


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_pages_fit(width: int) -> None:
    long = {f"tests/test_{'x' * 60}.py::test[{i}]": gpt_report() for i in range(3)}
    lower = {name: with_peak(report, Fraction(95, 100)) for name, report in long.items()}
    for found in (grown(), compare_reports(lower, long), compare_reports({"": gpt_report()}, {"": named("op", 5)})):
        # What stays of a table on the narrowest page may stand out a little.
        assert max(map(len, page(found, width).splitlines())) <= max(width, 60)


@pytest.mark.parametrize("name", HOSTILE)
def test_any_name_in_text(name: str) -> None:
    text = page(compare_reports({name: named(name, 4)}, {name: named(name, 6)}), 100)
    assert text.startswith("REGRESSION: ")
    assert text.isprintable() or set(text) - {"\n"} == {c for c in text if c.isprintable()}
    text.encode()
    assert not any(line.startswith("::") for line in text.splitlines() if "::error" not in name)


@pytest.mark.parametrize("render", [render_github, render_comparison_markdown])
@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_is_markup(name: str, render: object) -> None:
    reports = {name: named(name, 6), name + "2": named(name, 8)}
    before = {name: named(name, 4), name + "2": named(name + "2", 4), name + "3": named(name, 4)}
    text = render(compare_reports(before, reports), (name, name))  # type: ignore[operator]
    text.encode()
    outside_code = re.sub(r"<code>[^<]*</code>", "", text)
    outside_code = re.sub(r"(?<![`\\])(`+)(?!`).*?(?<!`)\1(?!`)", "", outside_code)
    tags = [line for line in outside_code.splitlines() if line in ("<details>", "</details>")]
    assert tags == (["<details>", "</details>"] * 2 if render is render_github else [])
    outside_code = re.sub(r"(?m)^</?details>$|^<summary>|</summary>$", "", outside_code)
    outside_code = re.sub(r"\\.", "", outside_code)
    assert not re.search(r"[<\[`_~@]", outside_code.replace("**", ""))
    for table in re.findall(r"(?:^\|.*\|$\n?)+", text, re.MULTILINE):
        assert len({len(re.split(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_many_reports_have_an_overview_and_only_some_detail() -> None:
    reports = {f"test_{i}": gpt_report() for i in range(40)}
    lower = {name: with_peak(report, Fraction(95, 100)) for name, report in reports.items() if name != "test_7"}
    found = compare_reports({**lower, "test_7": gpt_report(), "test_old": gpt_report()}, reports)
    text = page(found)
    assert text.startswith("REGRESSION: test_0: peak ")
    assert "; 1 of 40 pass" in text.splitlines()[0] + text.splitlines()[1]
    assert "1 are equal in both" in text
    assert text.count(": highest of any step") == 10
    assert "29 more that changed, not shown in detail" in text
    assert "test_old" in text


def test_what_was_not_compared_is_said_in_the_first_line() -> None:
    environments = [{"devices": {"cuda:0": {"name": name}}} for name in ("A100", "H100")]
    base, head = (gpt_report(device="cuda:0", environment=environment) for environment in environments)
    found = compare_reports({"": base}, {"": head})
    assert headline(found) == "PASS: nothing grew beyond its tolerance; 4 numbers not compared"
    assert "allocated, reserved, workspace, unexplained: A100 against H100" in page(found, 120)


def test_lines() -> None:
    entry = EntryDifference(
        "activations", "blocks.3.mlp", "aten.addmm", "float32", (8,), 4, 8, "changed", "now float32"
    )
    assert entry_line(entry) == "blocks.3.mlp activations +4 B: now float32 (aten.addmm)"
    assert CountDifference("a", 3, 1).change == -2
