"""Reports set beside each other: what one costs and saves against the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torchledger.journal.statements import CATEGORIES, FlopStatement, MemorySnapshot, RunStatement
from torchledger.render.names import clean
from torchledger.render.rows import CountRow, model_rows, phase_rows, step_shown
from torchledger.render.tables import Column, Facts, Section, Table
from torchledger.render.text import DEFAULT_WIDTH, render_sections
from torchledger.units import format_bytes, format_count, format_flops, format_share


def side_by_side(reports: Mapping[str, RunStatement], width: int = DEFAULT_WIDTH) -> str:
    """Two or more reports in two tables, FLOPs and bytes, with the differences to the first one.

    Each report is shown by its step with the highest peak, so that its FLOPs and bytes belong together.

    Args:
        reports: by the name that heads their column, the one to compare with first.
        width: characters of a line.

    >>> print(side_by_side({"a": RunStatement(), "b": RunStatement()}).splitlines()[0])
    FLOPs of one step by phase
    """
    return render_sections(beside_sections(reports), width)


def beside_sections(reports: Mapping[str, RunStatement]) -> tuple[Section, ...]:
    """The tables of `side_by_side`, and what they come to in words.

    >>> len(beside_sections({"a": RunStatement(), "b": RunStatement()}))
    3
    """
    names = [clean(name) for name in reports]
    inference = any(_flops_of(run).inference for run in reports.values())
    flops = [flop_rows(_flops_of(run), inference=inference) for run in reports.values()]
    nbytes = byte_rows([run.peak for run in reports.values()])
    return (
        _table("FLOPs of one step by phase", "FLOP", names, flops, n_totals=4 + inference),
        _table("Bytes at the peak by category", "bytes", names, nbytes, n_totals=1),
        Facts("In words", tuple(_words(names, list(reports.values())))),
    )


def flop_rows(flops: FlopStatement, *, inference: bool = False) -> tuple[CountRow, ...]:
    """Phases, which add up to the hardware total, and what leads from there to the model's own FLOPs.

    >>> flop_rows(FlopStatement(total=4, model=4, forward=4))[-1]
    CountRow(name='model total', n=4)
    """
    less = model_rows(flops, inference=inference)
    totals = (CountRow("hardware total", flops.total), *less, CountRow("model total", flops.model))
    return phase_rows(flops, inference=inference) + totals


def byte_rows(peaks: list[MemorySnapshot]) -> list[tuple[CountRow, ...]]:
    """For each snapshot the categories, which add up to the total in the last row; only those that some snapshot has.

    >>> byte_rows([MemorySnapshot(total_bytes=8, inputs=8)])
    [(CountRow(name='inputs', n=8), CountRow(name='peak', n=8))]
    """
    shown = [name for name in CATEGORIES if any(peak.by_category[name] for peak in peaks)]
    return [
        (*(CountRow(name, peak.by_category[name]) for name in shown), CountRow("peak", peak.total_bytes))
        for peak in peaks
    ]


def _flops_of(run: RunStatement) -> FlopStatement:
    step = step_shown(run)
    return step.flops if step else FlopStatement()


def _table(title: str, unit: str, names: list[str], columns: list[tuple[CountRow, ...]], *, n_totals: int) -> Table:
    head = [Column(unit, "text"), *(Column(name) for name in names)]
    for name in names[1:]:
        more = "" if len(names) == 2 else f" of {name}"
        head += [Column(f"difference{more}"), Column("", drop=1)]
    rows = []
    for row in zip(*columns, strict=True):
        numbers = [cell.n for cell in row]
        cells = [row[0].name, *map(format_count, numbers)]
        for n in numbers[1:]:
            cells += [format_count(n - numbers[0], signed=True), _change(n, numbers[0])]
        rows.append(tuple(cells))
    return Table(title, tuple(head), tuple(rows), n_totals=n_totals)


def _change(n: int, before: int) -> str:
    """The difference in percent of what was before, with its sign."""
    if n == before or not before:
        return ""
    return f"{'+' if n > before else ''}{format_share(n - before, before)}"


def _words(names: list[str], runs: list[RunStatement]) -> Iterator[tuple[str, str]]:
    first = runs[0]
    for name, run in zip(names[1:], runs[1:], strict=True):
        peak = _more_or_less(run.peak.total_bytes, first.peak.total_bytes, format_bytes)
        activations = _more_or_less(run.peak.activations, first.peak.activations, format_bytes)
        flops = _more_or_less(_flops_of(run).total, _flops_of(first).total, format_flops)
        against = f"against {names[0]}"
        yield name, f"{against}, {peak} at the peak; {activations} of activations there; {flops} executed in a step"


def _more_or_less(n: int, before: int, in_units: Callable[[int], str]) -> str:
    if n == before:
        return f"the same {in_units(n)}"
    change = _change(n, before)
    return f"{in_units(abs(n - before))} {'more' if n > before else 'less'}" + (f" ({change})" if change else "")
