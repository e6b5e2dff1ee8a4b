"""A report as Markdown, to be pasted into a pull request: names stand in code spans, so that none is markup."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torchledger.journal.statements import RunStatement
from torchledger.render.names import clean, inert
from torchledger.render.page import report_sections
from torchledger.render.tables import Column, Facts, Section, Table

_MARKUP = re.compile(r"([\\`*_{}\[\]<>#|~@&$])")
_ALIGNMENTS = {"number": "---:", "name": ":---", "text": ":---"}


def render_markdown(run: RunStatement) -> str:
    """The report as Markdown, without a newline at its end.

    >>> render_markdown(RunStatement()).splitlines()[0]
    '#### torchledger: nothing was recorded'
    """
    return render_sections(report_sections(run))


def render_sections(sections: Iterable[Section]) -> str:
    r"""Tables and facts, one below the other.

    >>> print(render_sections([Facts("Copies", (("kind", "a < b"),))]))
    #### Copies
    <BLANKLINE>
    - kind: a \< b
    """
    return inert("\n\n".join(_facts(s) if isinstance(s, Facts) else _table(s) for s in sections))


def escape(text: str) -> str:
    r"""``text`` as Markdown that shows it and nothing else.

    >>> escape("__init__ <b>")
    '\\_\\_init\\_\\_ \\<b\\>'
    """
    return _MARKUP.sub(r"\\\1", clean(text))


def code_span(text: str) -> str:
    r"""``text`` as code inside a table; an indent is kept, and backticks and pipes do not end it.

    >>> code_span("  blocks.0"), code_span("a|b"), code_span("`x`")
    ('&nbsp;&nbsp;`blocks.0`', '`a\\|b`', '`` `x` ``')
    """
    name = clean(text.lstrip(" "))
    indent = "&nbsp;" * (len(text) - len(text.lstrip(" ")))
    if not name:
        return indent
    longest = max((len(run) for run in re.findall("`+", name)), default=0)
    fence, pad = "`" * (longest + 1), " " if name.startswith("`") or name.endswith("`") else ""
    return f"{indent}{fence}{pad}{name}{pad}{fence}".replace("|", "\\|")


def fact_lines(facts: Facts) -> list[str]:
    """The lines of facts as a list; what has no key of its own stands below what it goes on from.

    >>> fact_lines(Facts("", (("grew most", "a"), ("", "b"), ("note", "c"))))
    ['- grew most: a', '  - b', '- note: c']
    """
    lines: list[str] = []
    for key, value in facts.lines:
        words = f"{escape(key)}: {escape(value)}" if key else escape(value)
        lines.append(f"- {words}" if key or not lines else f"  - {words}")
    return lines


def _facts(facts: Facts) -> str:
    return "\n".join([f"#### {escape(facts.title)}", "", *fact_lines(facts)])


def _table(table: Table) -> str:
    first_total = len(table.rows) - table.n_totals
    lines = [
        f"#### {escape(table.title)}",
        "",
        _line(escape(column.title) for column in table.columns),
        _line(_ALIGNMENTS[column.kind] for column in table.columns),
        *(
            _line(
                _cell(text, column, bold=place >= first_total) for text, column in zip(row, table.columns, strict=True)
            )
            for place, row in enumerate(table.rows)
        ),
    ]
    for note in (*(column.note for column in table.columns if column.note), *table.notes):
        lines += ["", escape(note)]
    return "\n".join(lines)


def _cell(text: str, column: Column, *, bold: bool) -> str:
    if not text:
        return ""
    if bold:
        return f"**{escape(text)}**"
    return code_span(text) if column.kind == "name" else escape(text)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
