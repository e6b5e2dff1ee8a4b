"""What stands beside the accounts: its rows are all there, its totals add up, and no name is markup."""

from __future__ import annotations

from dataclasses import replace

from synthetic import gpt_report
from torchledger.journal.rows import AuditedPeak, AuditRow, Growth
from torchledger.render.findings import MOST_ROWS, audit_table, growing_table, unseen_facts
from torchledger.render.markdown import render_markdown
from torchledger.render.page import report_sections
from torchledger.render.text import render_text
from torchledger.report import Report


def grown(n: int, **more: object) -> tuple[Growth, ...]:
    fields = {"category": "activations", "module": "m", "op": "aten.relu", "since_step": 0, "shape": (2,)}
    return tuple(
        Growth(**(fields | {"bytes_per_step": 1000 - i, "dtype": "float32"} | more))  # type: ignore[arg-type]
        for i in range(n)
    )


def with_audit(n: int, peak: AuditedPeak | None) -> Report:
    report = gpt_report()
    rows = tuple(AuditRow(f"aten.op{i}", "h.0", "backward", 5000 - i, i + 1) for i in range(n))
    steps = tuple(replace(s, audit=rows, audited_peak=peak) if s.index == 1 else s for s in report.steps)
    return replace(report, steps=steps, peak_step=None)


def test_growth_adds_up() -> None:
    for n in (1, 2, MOST_ROWS, MOST_ROWS + 5):
        report = replace(gpt_report(), growing=grown(n))
        table = growing_table(report)
        assert table is not None
        numbers = [int(row[0].replace(",", "")) for row in table.rows]
        if n == 1:
            assert (numbers, table.n_totals) == ([1000], 0)
        else:
            assert table.n_totals == 1
            assert sum(numbers[:-1]) == numbers[-1] == sum(row.bytes_per_step for row in report.growing)
        assert len(table.columns) == len(table.rows[0]) == 7
        assert table.rows[0][6] == "3 steps"
    where = growing_table(replace(gpt_report(), growing=grown(1, where="train.py:3")))
    assert where is not None
    assert where.rows[0][7] == "train.py:3"


def test_the_audit_says_how_much_it_leaves_out_and_where_the_peak_is() -> None:
    report = with_audit(MOST_ROWS + 3, AuditedPeak(2**30, 4096, "backward", "h.0", "aten.op0"))
    table = audit_table(report.steps[1])
    assert table is not None
    assert len(table.rows) == MOST_ROWS
    assert table.rows[0] == ("5,000", "4.88 KiB", "aten.op0", "h.0", "backward", "1")
    assert table.notes[0] == "3 more rows, of 4.87 KiB or less"
    assert table.notes[1] == (
        "the peak with them: 1.00 GiB (1,073,741,824 bytes), in aten.op0 of h.0, backward (4,096 of them inside it)"
    )
    assert table.notes[2].startswith("the peak without them: ")
    assert audit_table(report.steps[0]) is None
    empty = audit_table(with_audit(0, AuditedPeak(10, 0, "", "", "")).steps[1])
    assert empty is not None
    assert empty.notes[0] == "the peak with them: 10 B (10 bytes), at the step's start (none of them inside it)"


def test_the_page_has_them_in_order_and_without_them_it_has_none() -> None:
    report = replace(
        with_audit(2, AuditedPeak(2**30, 0, "backward", "", "aten.mm")), growing=grown(2), blind_spots=("a thread", "b")
    )
    titles = [section.title for section in report_sections(report)]
    plain = [section.title for section in report_sections(gpt_report())]
    new = [title for title in titles if title not in plain]
    assert [title for title in titles if title in plain] == plain
    assert [title.split()[0].rstrip(":") for title in new] == ["Growing", "Held", "Not"]
    assert titles[-1] == new[-1] == "Not seen"
    assert titles.index(new[0]) > titles.index("Largest rows at the peak of step 1 on cpu")
    for page in (render_text(report), render_markdown(report)):
        for title in new:
            assert title.split(",")[0] in page
    assert Report.from_dict(report.to_dict()) == report


def test_hostile_names_stay_on_their_line() -> None:
    name = "a\n| <b>\x1b[31m"
    report = replace(
        with_audit(0, AuditedPeak(10, 5, "backward", name, name)),
        growing=grown(1, module=name, op=name, dtype=name, where=name),
        blind_spots=(name,),
    )
    text, markdown = render_text(report, width=400), render_markdown(report)
    assert "\x1b" not in text + markdown
    assert "\n| <b>" not in text + markdown
    assert unseen_facts(report) is not None
    assert "\\<b\\>" in markdown
