"""What a run of tests found, for its terminal and for GitHub: how much of each budget was used, and what failed."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence

from torchledger.gate.quantities import QUANTITIES
from torchledger.gate.results import NEARLY, Failure, Use
from torchledger.render.github import command_lines
from torchledger.render.markdown import escape, render_sections
from torchledger.render.names import clean, inert
from torchledger.render.tables import Column, Table
from torchledger.units import format_against, format_count, format_number, format_share

_N_ROWS = 50
_N_DETAILED = 20
_NEARLY = f"Budgets of which {float(NEARLY):.0%} or more is used"


def budget_table(uses: Iterable[Use], *, every: bool) -> Table | None:
    """Budgets that hold, the fullest first: all of them, or those that are nearly used up; None where there are none.

    >>> budget_table([Use("t.py::test_a", "peak", 97, 100)], every=False).rows
    (('t.py::test_a', 'peak', '97 B', '100 B', '97.0 %'),)
    """
    shown = sorted((use for use in uses if every or use.share >= NEARLY), key=lambda use: (-use.share, use.test_id))
    if not shown:
        return None
    rows = tuple((clean(use.test_id), use.key, *_amounts(use), format_share(use.measured, use.limit)) for use in shown)
    columns = (
        Column("test", "name"),
        Column("quantity", "name"),
        Column("measured"),
        Column("budget"),
        Column("used"),
    )
    title = "Budgets, and how much of each was used" if every else _NEARLY
    notes = (f"and {format_number(len(rows) - _N_ROWS, 'more budget')}",) if len(rows) > _N_ROWS else ()
    return Table(title, columns, rows[:_N_ROWS], notes=notes)


def _amounts(use: Use) -> tuple[str, str]:
    unit = QUANTITIES[use.key].unit
    if unit == "count":
        return format_count(use.measured), format_count(use.limit)
    return format_against(use.measured, use.limit, unit)


def render_suite(failures: Sequence[Failure], uses: Sequence[Use], lines: Sequence[str], n_tests: int) -> str:
    """A run as Markdown for a step summary: what failed first, detail folded away.

    >>> render_suite([], [], ["baselines: 1 PASS"], 1).splitlines()
    ['### torchledger: 1 measured test passed', '', '- baselines: 1 PASS']
    """
    measured = format_number(n_tests, "measured test")
    title = f"{format_count(len(failures))} of {measured} failed" if failures else f"{measured} passed"
    page = [f"### torchledger: {title}", "", *(f"- {escape(line)}" for line in lines)]
    if failures:
        rows = tuple((failure.test_id, failure.summary) for failure in failures[:_N_ROWS])
        more = len(failures) - _N_ROWS
        notes = (f"and {format_number(more, 'more test')}",) if more > 0 else ()
        table = Table("What failed", (Column("test", "name"), Column("by", "text")), rows, notes=notes)
        page += ["", render_sections([table])]
    for failure in failures[:_N_DETAILED]:
        page += ["", "<details>", f"<summary><code>{html.escape(clean(failure.test_id))}</code></summary>", ""]
        page += [*_fenced(failure.text), "", "</details>"]
    nearly = budget_table(uses, every=False)
    if nearly is not None:
        page += ["", render_sections([nearly])]
    return "\n".join(page)


def _fenced(text: str) -> list[str]:
    """Lines of text as a block of code that no line of it ends."""
    lines = inert("\n".join(clean(line) for line in text.splitlines())).replace("```", "'''").splitlines()
    return ["```text", *lines, "```"]


def failure_annotations(failures: Iterable[Failure], problems: Iterable[str] = ()) -> list[str]:
    """Workflow commands: an error for each failure, at its test, and one for each problem of the whole run.

    >>> failure_annotations([Failure("t.py::test_a", "t.py", 3, "peak 2 B > budget 1 B")])
    ['::error file=t.py,line=3,title=torchledger%3A a budget is exceeded::t.py::test_a: peak 2 B > budget 1 B']
    """
    return list(command_lines("error", _annotations(failures, problems)))


def _annotations(failures: Iterable[Failure], problems: Iterable[str]) -> Iterator[tuple[dict[str, str], str]]:
    for problem in problems:
        yield {"title": "torchledger"}, clean(problem)
    for failure in failures:
        title = "a number is not the baseline's" if failure.is_of_baseline else "a budget is exceeded"
        place = {"file": failure.file, "line": str(failure.line)} if failure.file else {}
        yield place | {"title": f"torchledger: {title}"}, clean(f"{failure.test_id}: {failure.summary}")
