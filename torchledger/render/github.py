"""Comparisons for GitHub: a step summary within its size limit, and workflow annotations within theirs.

Source of the limits and of the escapes: GitHub's documentation, "Workflow commands for GitHub Actions", and the
runner's own ``ActionCommand``.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from torchledger.gate.comparison import Comparison, Comparisons
from torchledger.gate.judging import Outcome, Verdict
from torchledger.render.comparison import (
    comparison_sections,
    detailed_comparisons,
    difference_sections,
    overview_table,
    quantity_table,
    verdict_facts,
)
from torchledger.render.comparison_words import causes, machines_label, mismatch_lines, quantity_line, told_apart
from torchledger.render.markdown import escape, fact_lines, render_sections
from torchledger.render.names import clean, inert, shorten
from torchledger.units import format_count, format_number

SUMMARY_LIMIT_BYTES = 1024 * 1000
"""A step's summary may have 1,024 kB; a larger one is refused whole."""

N_ANNOTATIONS = 9
"""GitHub shows ten annotations of a type a step: nine, and one that says how many more there are."""

_N_ROWS = 50
_LONGEST_NAME = 300
_DELIMITER = re.compile(r"\| :?-+:? \|")


def render_github(comparisons: Comparisons, names: tuple[str, str] = ("base", "head")) -> str:
    """The comparison as Markdown for a step summary or a comment: the verdict first, detail folded away.

    >>> render_github(Comparisons(())).splitlines()[0]
    '### torchledger: NO-MATCH: nothing to compare'
    """
    facts = verdict_facts(comparisons, names)
    lines = [f"### torchledger: {escape(facts.title)}", "", *fact_lines(facts)]
    if len(comparisons.found) > 1:
        lines += ["", render_sections([overview_table(comparisons.found, n_rows=_N_ROWS)])]
    for comparison in detailed_comparisons(comparisons):
        if len(comparisons.found) > 1:
            body = [quantity_table(comparison), *difference_sections(comparison, n_rows=_N_ROWS)]
            title = f"{comparison.outcome}: <code>{html.escape(clean(comparison.name))}</code>"
            lines += _details(title, render_sections(body))
        else:
            lines += ["", render_sections([quantity_table(comparison)])]
            tables = list(difference_sections(comparison, n_rows=_N_ROWS))
            if tables:
                lines += _details("What moved these numbers", render_sections(tables))
    return "\n".join(lines)


def render_comparison_markdown(comparisons: Comparisons, names: tuple[str, str] = ("base", "head")) -> str:
    """The comparison as plain Markdown, without a newline at its end.

    >>> render_comparison_markdown(Comparisons(())).splitlines()[0]
    '#### NO-MATCH: nothing to compare'
    """
    return render_sections(comparison_sections(comparisons, names))


def _details(summary: str, body: str) -> list[str]:
    return ["", "<details>", f"<summary>{summary}</summary>", "", body, "", "</details>"]


def cut_page(page: str, limit_bytes: int) -> str:
    r"""The page in at most so many bytes of UTF-8: cut between lines, so in whole rows, with a note of what is missing.

    Empty, if not even the note has room.

    >>> cut_page("- one\n- two\n- three", 100)
    '- one\n- two\n- three'
    """
    if len(page.encode()) <= limit_bytes:
        return page
    lines = page.split("\n")
    room = limit_bytes - len(_cut_note(len(lines), is_open=True).encode())
    kept = 0
    for line in lines:
        room -= len(line.encode()) + 1
        if room < 0:
            break
        kept += 1
    fences = list(accumulate((line.startswith("```") for line in lines), initial=0))
    while kept and not (fences[kept] % 2 == 0 and _may_end(lines, kept)):
        kept -= 1
    is_open = lines[:kept].count("<details>") > lines[:kept].count("</details>")
    note = _cut_note(len(lines) - kept, is_open=is_open)
    cut = "\n".join(lines[:kept]) + note
    return cut if len(cut.encode()) <= limit_bytes else ""


def _may_end(lines: list[str], n_lines: int) -> bool:
    """Whether a page may end there: not in a table without rows, or below a title that nothing follows."""
    is_header = n_lines < len(lines) and _DELIMITER.match(lines[n_lines])
    last = lines[n_lines - 1]
    return last.lstrip().startswith(("| ", "- ", "### ")) and not _DELIMITER.match(last) and not is_header


def _cut_note(n_lines: int, *, is_open: bool) -> str:
    closing = "\n\n</details>" if is_open else ""
    return f"{closing}\n\n**Cut off here: {format_number(n_lines, 'line')} more than a step's summary has room for.**"


def annotation_lines(comparisons: Comparisons) -> list[str]:
    """Workflow commands: an error for each regression, a warning for what could not be compared, a notice for each win.

    >>> annotation_lines(Comparisons(()))
    ['::error title=torchledger%3A nothing to compare::base and head have no number in common']
    """
    errors, warnings, notices = [], [], []
    if comparisons.outcome == Outcome.NO_MATCH:
        why = next((c.unrelated for c in comparisons.found if c.unrelated), "base and head have no number in common")
        errors.append(("nothing to compare", why))
    for comparison in comparisons.found:
        for item in told_apart(comparison):
            if item.outcome == Outcome.REGRESSION:
                errors.append((f"{item.key} grew", _message(comparison, item)))
            elif item.outcome == Outcome.WIN:
                notices.append((f"{item.key} fell", _message(comparison, item)))
        prefix = _prefix(comparison)
        warnings += [("not compared", prefix + line) for line in mismatch_lines(comparison)]
        warnings += [("note", prefix + clean(note)) for note in comparison.notes if "fault" in note]
    for names, where in ((comparisons.only_base, "base"), (comparisons.only_head, "head")):
        notices += [(f"only in {where}", _name(name)) for name in names]
    return [
        *_titled("error", errors),
        *_titled("warning", warnings),
        *_titled("notice", notices),
    ]


def command_lines(kind: str, found: Iterable[tuple[Mapping[str, str], str]]) -> Iterator[str]:
    """Workflow commands of a kind from their properties and messages, no more of them than GitHub shows.

    >>> list(command_lines("error", [({"file": "a,b.py", "line": "3"}, "50 % more")]))
    ['::error file=a%2Cb.py,line=3::50 %25 more']
    """
    commands = list(found)
    for properties, message in commands[:N_ANNOTATIONS]:
        given = ",".join(f"{name}={_escape_property(value)}" for name, value in properties.items())
        yield f"::{kind} {given}::{_escape_data(message)}"
    if len(commands) > N_ANNOTATIONS:
        yield f"::{kind} title=torchledger::and {format_count(len(commands) - N_ANNOTATIONS)} more"


def _titled(kind: str, found: Iterable[tuple[str, str]]) -> Iterator[str]:
    return command_lines(kind, (({"title": f"torchledger: {title}"}, message) for title, message in found))


def _message(comparison: Comparison, item: Verdict) -> str:
    """The number, where it was measured, and the largest thing that moved it."""
    text = f"{_prefix(comparison)}{quantity_line(item)} on {machines_label(*comparison.machines)}"
    cause = next(causes(comparison, item), "")
    return f"{text}; most of it: {cause}" if cause else text


def _prefix(comparison: Comparison) -> str:
    return f"{_name(comparison.name)}: " if comparison.name else ""


def _name(name: str) -> str:
    return shorten(clean(name), _LONGEST_NAME) or "(a plain report)"


def _escape_data(text: str) -> str:
    return inert(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape_data(text).replace(":", "%3A").replace(",", "%2C")
