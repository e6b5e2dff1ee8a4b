"""The page: its tables are parsed back, and their columns add up."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from synthetic import gpt_flops, gpt_memory, gpt_report, make_flops, make_report, make_snapshot, utilized_report
from torchledger.journal.statements import Allocation, MemoryStatement, StepReport, UnrecordedTime
from torchledger.render.beside import byte_rows, flop_rows, side_by_side
from torchledger.render.page import report_sections
from torchledger.render.text import render_text
from torchledger.report import Report
from torchledger.units import parse_bytes, parse_flops


def table(page: str, title: str) -> list[list[str]]:
    """The cells of the table with that title; a line of dashes stands as an empty row."""
    lines = page.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(title))
    rule = next(i for i in range(start, len(lines)) if set(lines[i]) <= {"-", " "} and lines[i])
    spans = [match.span() for match in re.finditer("-+", lines[rule])]
    rows = []
    for line in lines[rule + 1 :]:
        if not line or line.startswith("own:"):
            break
        rows.append([] if set(line) <= {"-", " "} else [line[low:high].rstrip() for low, high in spans])
    return rows


def number(cell: str) -> int:
    return int(cell.replace(",", "").strip())


@pytest.fixture(scope="module")
def report() -> Report:
    return utilized_report()


def test_flops_by_phase_add_up(report: Report) -> None:
    rows = table(render_text(report), "FLOPs of step 1 by phase")
    cut = rows.index([])
    assert sum(number(row[1]) for row in rows[:cut]) == number(rows[cut + 1][1]) == report.steps[1].flops.total
    assert rows[cut + 1][0] == "hardware total"
    assert rows[-1][0] == "model total"
    assert sum(number(row[1]) for row in rows[cut + 1 : -1]) == number(rows[-1][1]) == report.steps[1].flops.model
    for row in rows[:cut]:
        assert abs(parse_flops(row[2].strip()) - number(row[1])) <= number(row[1]) * 0.005


@pytest.mark.parametrize("title", ["FLOPs of step 1 by module", "Bytes at the peak of step 1 on cuda:0 by module"])
def test_module_trees_add_up(report: Report, title: str) -> None:
    rows = table(render_text(report), title)
    cut = rows.index([])
    total = number(rows[-1][1])
    assert total == (report.steps[1].flops.total if title.startswith("FLOP") else report.peak.total_bytes)
    assert sum(number(row[4]) for row in rows[:cut]) == number(rows[-1][4]) == total
    assert sum(number(row[1]) for row in rows[:cut] if not row[0].startswith(" ")) == total
    assert any(row[0].endswith(" x12") for row in rows[:cut])


def test_categories_add_up(report: Report) -> None:
    rows = table(render_text(report), "Bytes of step 1 on cuda:0 by category")
    cut = rows.index([])
    for column in (1, 2, 5):
        assert sum(number(row[column]) for row in rows[:cut]) == number(rows[-1][column])
    assert number(rows[-1][2]) == report.peak.total_bytes
    assert rows[cut - 1][0] == "unexplained"
    for row in rows[:cut]:
        assert abs(parse_bytes(row[3].strip()) - number(row[2])) <= number(row[2]) * 0.005


@pytest.mark.parametrize(
    ("title", "column"),
    [
        ("FLOPs of step 1 by op", 1),
        ("Largest rows at the peak of step 1 on cuda:0", 0),
        ("Copies of step 1 on cuda:0", 1),
        ("Copies of step 1 on cuda:0", 3),
    ],
)
def test_other_tables_add_up(report: Report, title: str, column: int) -> None:
    rows = table(render_text(report), title)
    cut = rows.index([])
    assert sum(number(row[column]) for row in rows[:cut]) == number(rows[-1][column])


def test_the_page_says_what_it_must(report: Report) -> None:
    page = " ".join(render_text(report).split())
    for said in (
        "3 recorded; the tables show step 1, which has the highest peak (each step has the same FLOPs)",
        "tokens 8,192 a step",
        "FLOPs a token 75,726 on the hardware, 57,782 of the model",
        "MFU, HFU 9.6%, 12.5% of h100-sxm in bf16, over 4 unrecorded steps of 5 us",
        "duration 125 ms under recording, which takes longer than the step by itself",
        "where in backward, module blocks.11.mlp, op aten.mm",
        "external 64.00 KiB (65,536 bytes) that no allocator gave (numpy, mapped files), in no total",
        "unexplained 0 B (0 bytes), 0.0 % of the peak",
        "Peak of each phase of step 1 on cuda:0",
        "Other devices, step 1",
        "note memory inside compiled regions is not known",
        "1 multiply-add = 2 FLOP",
    ):
        assert said in page
    assert "\x1b" not in page


def test_uncounted_and_inexact_flops_are_said() -> None:
    flops = gpt_flops()
    flops = replace(
        flops,
        uncounted={"mylib.op": 7, "mylib.other": 2},
        approximate=5,
        upper_bound=6,
        int_ops=123_456,
        causal_model=flops.model - 1,
        compiled_regions=2,
    )
    page = render_text(make_report(StepReport(0, None, 0.1, flops, {})))
    rows = table(page, "UNCOUNTED ops of all steps: their FLOPs are unknown, and in no total")
    assert [(row[0], number(row[1])) for row in rows if row] == [("mylib.op", 7), ("mylib.other", 2), ("total", 9)]
    for said in (
        "approximate formulas",
        "upper bounds",
        "123,456 int-ops, in no total",
        "compiled regions that ran: 2",
    ):
        assert said in page
    assert "model, causal pairs only" in page
    assert "N/A: the tokens of a step are not known" in page
    assert "UNCOUNTED" not in render_text(gpt_report())


def test_faults_are_loud() -> None:
    lines = render_text(gpt_report(faults=("lost a hook\nand more",))).splitlines()
    assert set(lines[0]) == {"!"}
    assert "FAULTS inside torchledger" in lines[1]
    assert "lost a hook\\nand more" in lines[2]
    assert set(lines[3]) == {"!"}


def test_an_allocators_bytes_that_nothing_explains_are_always_shown() -> None:
    memory = gpt_memory(unexplained=4096)
    page = render_text(make_report(StepReport(0, 1, 0.1, gpt_flops(), {"cuda:0": memory})))
    rows = table(page, "Bytes of step 0 on cuda:0 by category")
    assert [rows[rows.index([]) - 1][0], rows[rows.index([]) - 1][2].strip()] == ["unexplained", "4,096"]
    assert "unexplained  4.00 KiB (4,096 bytes)" in page


def test_steps_that_differ_are_said() -> None:
    steps = [StepReport(i, 1, 0.1, gpt_flops(scale=i + 1), {"cpu": gpt_memory()}) for i in range(2)]
    assert "the steps differ in FLOPs" in " ".join(render_text(make_report(*steps)).split())
    kept = make_report(*steps, n_steps=70)
    assert "70 recorded, 2 kept; the tables show step 0" in " ".join(render_text(kept).split())


@pytest.mark.parametrize("width", [60, 70, 80, 100, 200])
def test_lines_fit_the_page(report: Report, width: int) -> None:
    page = render_text(report, width)
    assert max(map(len, page.splitlines())) <= width
    if width >= 60:  # what adds up is there on any page
        rows = table(page, "FLOPs of step 1 by module")
        assert sum(number(row[1]) for row in rows[: rows.index([])] if not row[0].startswith(" ")) == number(
            rows[-1][1]
        )


def test_long_names_are_shortened_and_notes_go_with_their_column() -> None:
    flops = make_flops({"": {}, "a" * 300: {"forward": 9}})
    page = render_text(make_report(StepReport(0, None, 0.1, flops, {})), 60)
    assert max(map(len, page.splitlines())) <= 60
    assert "aa..aa" in page
    assert "own:" not in page


def test_odd_names_stay_on_their_line() -> None:
    name = "模型.\x1b[31m\n\u202e\ud800|`<b>"
    flops = make_flops({"": {}, name: {"forward": 9}}, by_op={name: 9}, by_dtype={name: 9}, uncounted={name: 1})
    row = Allocation(8, "inputs", "forward", name, name, (2,), name, where=name)
    snapshot = replace(
        make_snapshot(by_module={name: 8}, inputs=8), module=name, op=name, phase="forward", largest=(row,)
    )
    memory = MemoryStatement(peak=snapshot, peak_by_phase={"forward": snapshot}, notes=(name,))
    report = make_report(StepReport(0, 1, 0.1, flops, {name: memory}), environment={name: name}, faults=(name,))
    page = render_text(report)
    assert all(c.isprintable() for line in page.split("\n") for c in line)
    assert "模型" in page
    assert "\\x1b[31m\\n\\u202e\\ud800" in page
    assert Report.from_dict(report.to_dict()) == report


def test_nothing_and_zero() -> None:
    assert "none was recorded" in render_text(Report())
    for step in (
        StepReport(0, 0, 0.0, make_flops({}), {}),
        StepReport(0, None, 0.0, make_flops({}), {"cpu": MemoryStatement()}),
        StepReport(0, None, 0.0, make_flops({}), {"cpu": MemoryStatement(start=make_snapshot(), peak=make_snapshot())}),
    ):
        page = render_text(make_report(step))
        assert page.startswith("torchledger: nothing was recorded\n  steps  no op of torch ran in them on this thread")
        assert len(page.splitlines()) == 2
        assert len(render_text(make_report(step), 80).splitlines()) == 3
    left_out = make_report(unrecorded=UnrecordedTime(1, 0.5))
    assert "the schedule left out all of the 1 step" in render_text(left_out)


def test_a_thousand_modules() -> None:
    own = {"": {}} | {f"net.{i}.{j}": {"forward": i * j + 1} for i in range(100) for j in range(20)}
    page = render_text(make_report(StepReport(0, 1, 0.1, make_flops(own), {})))
    assert len(page.splitlines()) < 120


def test_sums_that_do_not_hold_are_shown_not_hidden() -> None:
    flops = replace(gpt_flops(), by_module={k: v for k, v in gpt_flops().by_module.items() if k != "head"})
    rows = table(render_text(make_report(StepReport(0, 1, 0.1, flops, {}))), "FLOPs of step 0 by module")
    assert (rows[rows.index([]) - 1][0], rows[rows.index([]) - 1][1].strip()) == ("(in no module)", "23,333,331")


def test_section_titles_are_told_apart(report: Report) -> None:
    titles = [section.title for section in report_sections(report)]
    assert len(set(titles)) == len(titles)


def test_side_by_side() -> None:
    plain, checkpointed = gpt_report(recompute=False), gpt_report()
    page = side_by_side({"plain": plain, "checkpointed": checkpointed})
    rows = table(page, "FLOPs of one step by phase")
    cut = rows.index([])
    for column in (1, 2, 3):
        assert sum(number(row[column]) for row in rows[:cut]) == number(rows[cut + 1][column])
        assert sum(number(row[column]) for row in rows[cut + 1 : -1]) == number(rows[-1][column])
    rows = table(page, "Bytes at the peak by category")
    cut = rows.index([])
    for column in (1, 2, 3):
        assert sum(number(row[column]) for row in rows[:cut]) == number(rows[-1][column])
    for row in rows[:cut]:
        assert number(row[2]) - number(row[1]) == number(row[3])
    assert number(rows[-1][1]) == plain.peak.total_bytes
    words = " ".join(page.split())
    assert "against plain, 200.00 MiB less (-29.0 %) at the peak; 200.00 MiB less (-66.7 %) of activations" in words
    assert "144.00 MFLOP more (+30.2 %) executed in a step" in words
    assert max(map(len, page.splitlines())) <= 100


def test_side_by_side_of_three_and_of_nothing() -> None:
    page = side_by_side({"a": gpt_report(), "b": gpt_report(), "c": Report()}, 200)
    assert "difference of b" in page
    assert "the same 490.01 MiB at the peak" in page
    assert "490.01 MiB less (-100.0 %) at the peak" in page
    assert side_by_side({"a": Report(), "b": Report()})
    assert flop_rows(gpt_flops())[-1].n == gpt_flops().model
    assert byte_rows([]) == []
