"""Rows of integers as tables of text, before anything is known of the page that they are drawn on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from torchledger.journal.statements import OUTSIDE_MODULE, FlopStatement, MemorySnapshot, MemoryStatement
from torchledger.render.names import clean, module_label, shape_label
from torchledger.render.rows import (
    CountRow,
    category_rows,
    copy_rows,
    count_rows,
    has_allocator_reading,
    largest_rows,
    model_rows,
    phase_peak_rows,
    phase_rows,
)
from torchledger.render.tree import module_rows
from torchledger.units import format_bytes, format_count, format_flops, format_share


@dataclass(frozen=True, slots=True)
class Column:
    """One column: ``name`` cells hold names of code and may be shortened, ``number`` cells stand to the right.

    On a narrow page the column with the highest ``drop`` goes first; 0 stays. ``note`` stands below the table where
    the column is shown.
    """

    title: str
    kind: Literal["name", "number", "text"] = "number"
    drop: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A titled table; the last ``n_totals`` rows are totals, and ``notes`` stand below it."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    n_totals: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """Lines of a key and what is to be said of it; ``loud`` ones must not be overlooked."""

    title: str
    lines: tuple[tuple[str, str], ...]
    loud: bool = False


Section = Table | Facts


def flop_table(flops: FlopStatement, title: str) -> Table:
    """FLOPs by phase, with what the hardware executed and the model's own.

    >>> flop_table(FlopStatement(total=4, model=4, forward=4), "FLOPs").rows[0]
    ('forward', '4', '4 FLOP', '100.0 %')
    """
    totals = [CountRow("hardware total", flops.total), *model_rows(flops), CountRow("model total", flops.model)]
    if flops.causal_model != flops.model:
        totals.append(CountRow("model, causal pairs only", flops.causal_model))
    rows = [*phase_rows(flops), *totals]
    cells = [(row.name, format_count(row.n), format_flops(row.n), format_share(row.n, flops.total)) for row in rows]
    columns = (Column("phase", "text"), Column("FLOP"), Column("", drop=2), Column("share", drop=1))
    return Table(title, columns, tuple(cells), n_totals=len(totals), notes=tuple(_flop_notes(flops)))


def _flop_notes(flops: FlopStatement) -> Iterable[str]:
    for what, n in (("approximate formulas", flops.approximate), ("formulas that are upper bounds", flops.upper_bound)):
        if n:
            yield f"{format_count(n)} FLOP of the total ({format_share(n, flops.total)}) come from {what}"
    if flops.int_ops:
        yield f"integer products: {format_count(flops.int_ops)} int-ops, in no total above"
    if flops.compiled_regions:
        where = ", ".join(f"{count} in {module or '(model)'}" for module, count in flops.compiled_in.items())
        yield f"compiled regions that ran: {format_count(flops.compiled_regions)}" + (f" ({where})" if where else "")
    if flops.global_excess:
        yield f"all ranks together, distributed tensors counted whole: {format_count(flops.global_total)} FLOP"


def flop_module_table(flops: FlopStatement, title: str) -> Table | None:
    """FLOPs of the modules as a tree, or None where there are none.

    >>> flop_module_table(FlopStatement(), "modules") is None
    True
    """
    own = {module: split.self_total for module, split in flops.by_module.items()}
    return _module_table(own, flops.total, title, "FLOP", format_flops)


def byte_module_table(snapshot: MemorySnapshot, title: str, *, rooted: bool = False) -> Table | None:
    """What is alive as a tree of the modules that made it, or None where nothing is known of them.

    ``rooted`` says that all modules are those of one model.

    >>> byte_module_table(MemorySnapshot(), "modules") is None
    True
    """
    root = {"": 0} if rooted else {}
    own = root | {module: snapshot.by_module[module] for module in sorted(snapshot.by_module, key=_natural)}
    return _module_table(own, snapshot.total_bytes, title, "bytes", format_bytes)


def _natural(module: str) -> tuple[object, ...]:
    """Sorts ``blocks.10`` behind ``blocks.9``, and what is outside any module last."""
    parts = re.split(r"([0-9]{1,9})", module)
    return (module == OUTSIDE_MODULE, *((int(part), part) if i % 2 else (0, part) for i, part in enumerate(parts)))


def _module_table(
    own: Mapping[str, int], total: int, title: str, unit: str, in_units: Callable[[int], str]
) -> Table | None:
    rows = [("  " * row.depth + row.label, row.total, row.own) for row in module_rows(own)]
    if not rows:
        return None
    missing = total - sum(row[2] for row in rows)
    if missing:
        rows.append(("(in no module)", missing, missing))
    rows.append(("total", total, total))
    cells = [
        (label, format_count(n), in_units(n), format_share(n, total), format_count(own_n)) for label, n, own_n in rows
    ]
    columns = (
        Column("module", "name"),
        Column(unit),
        Column("", drop=2),
        Column("share", drop=1),
        Column("own", drop=3, note="own: what no row below it shows; this column adds up to the total"),
    )
    return Table(title, columns, tuple(cells), n_totals=1)


def category_table(memory: MemoryStatement, device: str, title: str) -> Table:
    """Bytes by category at the start of the step, at its peak and at its end.

    >>> category_table(MemoryStatement(), "cpu", "bytes").rows
    (('total', '0', '0', '0 B', '', '0'),)
    """
    always = ("unexplained",) if has_allocator_reading(device, memory) else ()
    total = ("total", memory.start.total_bytes, memory.peak.total_bytes, memory.end.total_bytes)
    cells = [
        (
            name,
            format_count(start),
            format_count(peak),
            format_bytes(peak),
            format_share(peak, memory.peak.total_bytes),
            format_count(end),
        )
        for name, start, peak, end in [*category_rows(memory, always=always), total]
    ]
    columns = (
        Column("category", "text"),
        Column("start, bytes", drop=2),
        Column("peak, bytes"),
        Column("", drop=3),
        Column("share", drop=1),
        Column("end, bytes", drop=2),
    )
    return Table(title, columns, tuple(cells), n_totals=1)


def phase_peak_table(memory: MemoryStatement, title: str) -> Table | None:
    """The highest instant of each phase, or None where none ran.

    >>> phase_peak_table(MemoryStatement(), "peaks") is None
    True
    """
    cells = [
        (
            row.phase,
            format_count(row.nbytes),
            format_bytes(row.nbytes),
            module_label(row.module) if row.op else "",
            clean(row.op),
        )
        for row in phase_peak_rows(memory)
    ]
    columns = (
        Column("phase", "text"),
        Column("bytes"),
        Column("", drop=1),
        Column("in module", "name"),
        Column("at op", "name"),
    )
    return Table(title, columns, tuple(cells)) if cells else None


def largest_table(snapshot: MemorySnapshot, title: str) -> Table | None:
    """The largest rows of what is alive, with everything else in one row, or None where nothing is known of them.

    >>> largest_table(MemorySnapshot(), "largest") is None
    True
    """
    rows, rest = largest_rows(snapshot)
    if not rows:
        return None
    with_where = any(row.where for row in rows)
    cells = [
        (
            format_count(row.nbytes),
            format_bytes(row.nbytes),
            row.category,
            module_label(row.module),
            clean(row.op),
            clean(f"{row.dtype} {shape_label(row.shape)}" + (f" x{row.n_blocks}" if row.n_blocks > 1 else "")),
            clean(row.where or ""),
        )
        for row in rows
    ]
    cells.append((format_count(rest), format_bytes(rest), "everything else", "", "", "", ""))
    total = snapshot.total_bytes
    cells.append((format_count(total), format_bytes(total), "total", "", "", "", ""))
    columns = (
        Column("bytes"),
        Column("", drop=2),
        Column("category", "text"),
        Column("made in", "name"),
        Column("by op", "name"),
        Column("tensor", "name", drop=1),
        Column("where", "name"),
    )
    n_columns = len(columns) if with_where else len(columns) - 1
    return Table(title, columns[:n_columns], tuple(row[:n_columns] for row in cells), n_totals=1)


def copy_table(memory: MemoryStatement, title: str) -> Table | None:
    """Copies by kind, or None where there were none.

    >>> copy_table(MemoryStatement(), "copies") is None
    True
    """
    rows = copy_rows(memory.copies)
    if not rows:
        return None
    cells = [
        (
            row.kind,
            format_count(row.nbytes),
            format_bytes(row.nbytes),
            format_count(row.calls),
            module_label(row.module),
            format_share(row.module_bytes, row.nbytes),
        )
        for row in rows
    ]
    nbytes, calls = sum(row.nbytes for row in rows), sum(row.calls for row in rows)
    cells.append(("total", format_count(nbytes), format_bytes(nbytes), format_count(calls), "", ""))
    columns = (
        Column("kind", "text"),
        Column("bytes"),
        Column("", drop=1),
        Column("calls"),
        Column("most of it in", "name"),
        Column("", drop=2),
    )
    return Table(title, columns, tuple(cells), n_totals=1)


def count_table(counts: Mapping[str, int], title: str, name: str, unit: str) -> Table | None:
    """Numbers by name, largest first, with their total, or None where there are none.

    >>> count_table({"aten.mm": 6, "aten.bmm": 2}, "FLOPs by op", "op", "FLOP").rows[-1]
    ('total', '8', '100.0 %')
    """
    if not counts:
        return None
    total = sum(counts.values())
    rows = [*count_rows(counts), *([CountRow("total", total)] if len(counts) > 1 else [])]
    cells = [(clean(row.name), format_count(row.n), format_share(row.n, total)) for row in rows]
    columns = (Column(name, "name"), Column(unit), Column("share", drop=1))
    n_columns = 3 if unit == "FLOP" else 2  # a share of calls would say nothing
    return Table(title, columns[:n_columns], tuple(row[:n_columns] for row in cells), n_totals=int(len(counts) > 1))


def device_table(memory: Mapping[str, MemoryStatement], title: str) -> Table | None:
    """The bytes of several devices, or None where there are none.

    >>> device_table({}, "devices") is None
    True
    """
    cells = [
        (
            clean(device),
            format_count(statement.start.total_bytes),
            format_count(statement.peak.total_bytes),
            format_bytes(statement.peak.total_bytes),
            format_count(statement.end.total_bytes),
        )
        for device, statement in sorted(memory.items())
        if statement.peak.total_bytes
    ]
    columns = (
        Column("device", "name"),
        Column("start, bytes", drop=1),
        Column("peak, bytes"),
        Column("", drop=2),
        Column("end, bytes", drop=1),
    )
    return Table(title, columns, tuple(cells)) if cells else None
