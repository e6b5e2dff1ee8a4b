"""A report as plain text: no colours, and as wide as the page it is printed on."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable
from dataclasses import replace

from tabulate import SEPARATING_LINE, tabulate

from torchledger.journal.statements import RunStatement
from torchledger.render.names import clean, inert, shorten
from torchledger.render.page import report_sections
from torchledger.render.tables import Column, Facts, Section, Table

DEFAULT_WIDTH = 100
_NARROWEST_NAME = 10
_GAP = 2
_LONGEST_FACT = 4000


def render_text(run: RunStatement, width: int = DEFAULT_WIDTH) -> str:
    """The report as a page of text, without a newline at its end.

    Args:
        run: the report.
        width: characters of a line; on a narrow page tables lose columns and shorten names.

    >>> render_text(RunStatement()).splitlines()[0]
    'torchledger: nothing was recorded'
    """
    return render_sections(report_sections(run), width)


def render_sections(sections: Iterable[Section], width: int = DEFAULT_WIDTH) -> str:
    """Tables and facts, one below the other; what names may hold beyond letters is escaped here, wherever it came from.

    >>> print(render_sections([Facts("Copies", (("kind", "dtype"),))]))
    Copies
      kind  dtype
    """
    drawn = (_facts(s, width) if isinstance(s, Facts) else _table(s, width) for s in sections)
    return inert("\n\n".join("\n".join(line.rstrip() for line in lines) for lines in drawn))


def page_width() -> int:
    """Characters of a line of the terminal, `DEFAULT_WIDTH` where there is none; ``COLUMNS`` overrides it.

    >>> page_width() > 0
    True
    """
    return max(shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns, 40)


def _facts(facts: Facts, width: int) -> list[str]:
    lines = _wrap(facts.title, width, "", "")
    indent = max(len(key) for key, _ in facts.lines) + 4 if facts.lines else 0
    for key, value in facts.lines:
        lines += _wrap(value, width, f"  {clean(key)}".ljust(indent), " " * indent)
    if facts.loud:
        rule = "!" * min(width, max(map(len, lines)))
        return [rule, *lines, rule]
    return lines


def _wrap(text: str, width: int, first: str, later: str) -> list[str]:
    words = clean(shorten(text, _LONGEST_FACT))
    return textwrap.wrap(
        words, max(width, len(later) + 20), initial_indent=first, subsequent_indent=later, break_on_hyphens=False
    ) or [first]


def _table(table: Table, width: int) -> list[str]:
    columns, rows = _fit(replace(table, rows=tuple(tuple(map(clean, row)) for row in table.rows)), width)
    body: list[list[str] | str] = [list(row) for row in rows]
    if 0 < table.n_totals < len(body):
        body.insert(len(body) - table.n_totals, SEPARATING_LINE)
    drawn = tabulate(
        body,
        headers=[clean(column.title) for column in columns],
        tablefmt="simple",
        colalign=["right" if column.kind == "number" else "left" for column in columns],
        disable_numparse=True,
        preserve_whitespace=True,
    )
    of_columns = tuple(column.note for column in columns if column.note)
    notes = [line for note in of_columns + table.notes for line in _wrap(note, width, "", "")]
    return [*_wrap(table.title, width, "", ""), *drawn.splitlines(), *notes]


def _fit(table: Table, width: int) -> tuple[list[Column], list[tuple[str, ...]]]:
    """The columns and rows that a page of that width has room for."""
    places = list(range(len(table.columns)))
    while _width_of(table, places) > width and any(table.columns[i].drop for i in places):
        highest = max(table.columns[i].drop for i in places)
        places.remove(next(i for i in reversed(places) if table.columns[i].drop == highest))
    widths = {i: _column_width(table, i) for i in places}
    names = [i for i in places if table.columns[i].kind == "name"]
    excess = _width_of(table, places) - width
    while excess > 0 and any(widths[i] > _NARROWEST_NAME for i in names):
        widest = max(names, key=lambda i: widths[i])
        widths[widest] -= 1
        excess -= 1
    rows = [tuple(shorten(row[i], widths[i]) for i in places) for row in table.rows]
    return [table.columns[i] for i in places], rows


def _width_of(table: Table, places: list[int]) -> int:
    return sum(_column_width(table, i) for i in places) + _GAP * (len(places) - 1)


def _column_width(table: Table, place: int) -> int:
    # tabulate gives a title two spaces more than it has letters.
    return max([len(table.columns[place].title) + 2, *(len(row[place]) for row in table.rows)])
