"""Comparisons as tables: the verdict first, then the numbers that moved, then what moved them, largest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torchledger.gate.comparison import REPEAT_THE_PEAK, Comparison, Comparisons
from torchledger.gate.differences import CountDifference, EntryDifference
from torchledger.gate.judging import Outcome, Verdict
from torchledger.render.comparison_words import (
    both,
    change,
    headline,
    instants_label,
    listed,
    machines_label,
    main_causes,
    mismatch_lines,
    moved,
    percent,
    told_apart,
    tolerance_label,
)
from torchledger.render.names import clean, module_label, shorten
from torchledger.render.tables import Column, Facts, Section, Table
from torchledger.units import format_bytes, format_count, format_flops, format_number

DEFAULT_ROWS = 10
DEFAULT_DETAILED = 10

_ORDER = {str(outcome): rank for rank, outcome in enumerate(Outcome)}


def comparison_sections(
    comparisons: Comparisons,
    names: tuple[str, str] = ("base", "head"),
    *,
    n_rows: int = DEFAULT_ROWS,
    n_detailed: int | None = DEFAULT_DETAILED,
) -> list[Section]:
    """All sections of a page: the verdict, and the tables of each comparison that did not simply pass.

    Args:
        comparisons: what was compared.
        names: of the two files.
        n_rows: how many of the largest differences a table lists before it adds up the rest.
        n_detailed: how many comparisons get tables of their own, the worst ones first; all, with None.

    >>> print(comparison_sections(Comparisons(()))[0].title)
    NO-MATCH: nothing to compare
    """
    sections: list[Section] = [verdict_facts(comparisons, names)]
    if len(comparisons.found) > 1:
        sections.append(overview_table(comparisons.found))
    detailed = detailed_comparisons(comparisons)
    shown = detailed[:n_detailed]
    for comparison in shown:
        sections += [quantity_table(comparison), *difference_sections(comparison, n_rows=n_rows)]
    if len(detailed) > len(shown):
        left = tuple(("", shorten(clean(comparison.name), 200)) for comparison in detailed[len(shown) :][:n_rows])
        more = f"{format_count(len(detailed) - len(shown))} more that changed, not shown in detail"
        sections.append(Facts(more, left))
    return sections


def detailed_comparisons(comparisons: Comparisons) -> list[Comparison]:
    """Those that get tables of their own, the worst first: a lone one always, else those in which a number moved."""
    found = sorted(comparisons.found, key=lambda comparison: _ORDER[comparison.outcome])
    return found if len(found) == 1 else [c for c in found if any(moved(v) for v in c.verdicts)]


def verdict_facts(comparisons: Comparisons, names: tuple[str, str] = ("base", "head")) -> Facts:
    """The verdict in one line, and what was compared with what.

    >>> verdict_facts(Comparisons((), only_head=("test_a",))).lines[-1]
    ('only in head', 'test_a')
    """
    lines = [("base", clean(names[0])), ("head", clean(names[1]))]
    found = comparisons.found
    if found:
        lines.append(("on", machines_label(*found[0].machines)))
    if len(found) == 1 and instants_label(found[0].differences):
        lines.append(("peak in", instants_label(found[0].differences)))
    if len(found) == 1 and found[0].outcome in (Outcome.REGRESSION, Outcome.WIN):
        word = "grew most" if found[0].outcome == Outcome.REGRESSION else "fell most"
        lines += [(word if i == 0 else "", line) for i, line in enumerate(main_causes(found[0]))]
    for side, only in (("only in base", comparisons.only_base), ("only in head", comparisons.only_head)):
        if only:
            lines.append((side, listed([clean(name) or "(a plain report)" for name in only])))
    for comparison in found:
        prefix = f"{clean(comparison.name)}: " if comparison.name and len(found) > 1 else ""
        lines += [("note", prefix + clean(note)) for note in comparison.notes]
        lines += [("NO-MATCH", prefix + line) for line in mismatch_lines(comparison)]
    notes = [line for line in lines if line[0] in ("note", "NO-MATCH")]
    if len(notes) > DEFAULT_ROWS:
        lines = [line for line in lines if line not in notes] + notes[:DEFAULT_ROWS]
        lines.append(("note", f"and {format_number(len(notes) - DEFAULT_ROWS, 'more note')}"))
    return Facts(headline(comparisons), tuple(lines))


def overview_table(found: Sequence[Comparison], *, n_rows: int = 30) -> Table:
    """One row for each comparison whose numbers moved, the worst first."""
    order = sorted(found, key=lambda comparison: _ORDER[comparison.outcome])
    rows = [c for c in order if c.outcome != Outcome.PASS or any(moved(v) for v in c.verdicts)]
    cells = []
    for comparison in rows[:n_rows]:
        changes = {item.key: change(item) for item in comparison.verdicts if moved(item)}
        behind = [item.key for item in told_apart(comparison) if item.outcome == comparison.outcome]
        worst = ", ".join(behind[:3]) + (f" and {len(behind) - 3} more" if len(behind) > 3 else "")
        worst = worst if comparison.outcome in (Outcome.REGRESSION, Outcome.WIN) else ""
        cells.append(
            (
                str(comparison.outcome),
                clean(comparison.name),
                changes.get("peak", "="),
                changes.get("flops", "="),
                worst,
            )
        )
    notes = []
    if len(rows) > n_rows:
        notes.append(f"{format_count(len(rows) - n_rows)} more changed")
    if len(rows) < len(found):
        notes.append(f"{format_count(len(found) - len(rows))} are equal in both")
    columns = (
        Column("verdict", "text"),
        Column("of", "name"),
        Column("peak", drop=1),
        Column("FLOPs", drop=2),
        Column("by", "name", drop=3),
    )
    return Table("What was compared", columns, tuple(cells), notes=tuple(notes))


def quantity_table(comparison: Comparison) -> Table:
    """Peak, FLOPs, and each number that moved or has no match, regressions first; the equal ones are named below."""
    shown = [item for item in told_apart(comparison) if not _is_folded(item)]
    shown.sort(key=lambda item: _ORDER[item.outcome])
    cells = [
        (
            item.key,
            *both(item),
            change(item),
            percent(item),
            tolerance_label(item),
            str(item.outcome),
        )
        for item in shown
    ]
    columns = (
        Column("quantity", "name"),
        Column("base", drop=2),
        Column("head"),
        Column("change", drop=1),
        Column("", drop=3),
        Column("tolerance", drop=4),
        Column("verdict", "text"),
    )
    title = f"{clean(comparison.name)}: highest of any step" if comparison.name else "Highest of any step"
    return Table(title, columns, tuple(cells), notes=tuple(_quantity_notes(comparison)))


def _is_folded(item: Verdict) -> bool:
    return item.outcome == Outcome.PASS and not item.change and item.key not in ("peak", "flops")


def _quantity_notes(comparison: Comparison) -> Iterator[str]:
    equal = [item.key for item in told_apart(comparison) if _is_folded(item) and item.measured]
    if equal:
        yield f"equal in both: {', '.join(equal)}"
    folded = {item.key for item in comparison.verdicts} - {i.key for i in told_apart(comparison)}
    if folded:
        yield f"{', '.join(key for key in REPEAT_THE_PEAK if key in folded)}: as the peak"


def difference_sections(comparison: Comparison, *, n_rows: int = DEFAULT_ROWS) -> Iterator[Table]:
    """What moved the numbers: entries at the peak, and FLOPs by module and op; a table only where something did."""
    differences = comparison.differences
    if differences.entries:
        yield entry_table(differences.entries, n_rows=n_rows)
    tables = (
        ("FLOPs by module that differ, own ops", "module", differences.flop_modules, format_flops, module_label),
        ("FLOPs by op that differ", "op", differences.flop_ops, format_flops, clean),
        ("Calls of uncounted ops that differ", "op", differences.uncounted, format_count, clean),
    )
    for title, what, rows, in_units, label in tables:
        if rows:
            yield _count_table(title, what, rows, in_units, label, n_rows)


def entry_table(entries: Sequence[EntryDifference], *, n_rows: int = DEFAULT_ROWS) -> Table:
    """What differs of what is alive at the peak, largest first, with the rest in one row; the rows add up.

    >>> entry_table([EntryDifference("inputs", "", "aten.ones", "int8", (4,), 0, 4, "new", "int8 4: new")]).rows[0]
    ('+4', '+4 B', 'inputs', '(model)', 'aten.ones', 'int8 4: new')
    """
    cells = [
        (
            format_count(entry.change, signed=True),
            format_bytes(entry.change, signed=True),
            entry.category,
            module_label(entry.module) if entry.kind != "rest" else "",
            clean(entry.op),
            clean(entry.words),
        )
        for entry in entries[:n_rows]
    ]
    rest, total = sum(entry.change for entry in entries[n_rows:]), sum(entry.change for entry in entries)
    if len(entries) > n_rows:
        more = f"({format_count(len(entries) - n_rows)} more)"
        cells.append((format_count(rest, signed=True), format_bytes(rest, signed=True), "", more, "", ""))
    cells.append((format_count(total, signed=True), format_bytes(total, signed=True), "", "total", "", ""))
    columns = (
        Column("bytes"),
        Column("", drop=2),
        Column("category", "text", drop=1),
        Column("made in", "name"),
        Column("by op", "name", drop=3),
        Column("what changed", "name"),
    )
    return Table("What differs at the peak, largest first", columns, tuple(cells), n_totals=1)


def _count_table(
    title: str,
    what: str,
    rows: Sequence[CountDifference],
    in_units: Callable[..., str],
    label: Callable[[str], str],
    n_rows: int,
) -> Table:
    def numbers(n: int) -> tuple[str, str]:
        # Calls have no other unit to be shown in.
        return format_count(n, signed=True), "" if in_units is format_count else in_units(n, signed=True)

    cells = [(label(row.name), *numbers(row.change), clean(row.words) or _was(row)) for row in rows[:n_rows]]
    if len(rows) > n_rows:
        rest = sum(row.change for row in rows[n_rows:])
        cells.append((f"({format_count(len(rows) - n_rows)} more)", *numbers(rest), ""))
    cells.append(("total", *numbers(sum(row.change for row in rows)), ""))
    columns = (Column(what, "name"), Column("change"), Column("", drop=2), Column("what changed", "name", drop=1))
    return Table(title, columns, tuple(cells), n_totals=1)


def _was(row: CountDifference) -> str:
    return "new" if not row.base else "gone" if not row.head else f"was {format_count(row.base)}"
