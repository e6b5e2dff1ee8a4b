"""Statements as rows of exact integers: what tables are made of, and what tests add up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torchledger.journal.statements import (
    CATEGORIES,
    PHASES,
    Copies,
    FlopStatement,
    MemorySnapshot,
    MemoryStatement,
    RunStatement,
    StepReport,
)


class CountRow(NamedTuple):
    """A name and its number: FLOPs, or calls."""

    name: str
    n: int


class CategoryRow(NamedTuple):
    """Bytes of one category at the start of a step, at its peak and at its end."""

    category: str
    start: int
    peak: int
    end: int


class InstantRow(NamedTuple):
    """Bytes at the peak of one phase, and what ran there."""

    phase: str
    nbytes: int
    module: str
    op: str


class LargestRow(NamedTuple):
    """Bytes of equal blocks, and where they come from."""

    nbytes: int
    n_blocks: int
    category: str
    phase: str
    module: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    where: str | None


class CopyRow(NamedTuple):
    """Copies of one kind: their bytes and calls, and the module that made most of them, with its bytes."""

    kind: str
    nbytes: int
    calls: int
    module: str
    module_bytes: int


def step_shown(run: RunStatement) -> StepReport | None:
    """The step that a page is about: the one with the highest peak; else, without any bytes, the last one kept.

    >>> step_shown(RunStatement()) is None
    True
    """
    if run.peak_step is not None and run.peak.total_bytes:
        return run.peak_step
    return run.steps[-1] if run.steps else None


def phase_rows(flops: FlopStatement, *, inference: bool = False) -> tuple[CountRow, ...]:
    """FLOPs of each phase; they add up to ``flops.total``. Inference has a row if it cost something, or as asked for.

    >>> phase_rows(FlopStatement(total=3, forward=1, backward=2))[1]
    CountRow(name='backward', n=2)
    """
    phases = [phase for phase in PHASES if phase != "inference" or inference or flops.inference]
    return tuple(CountRow(phase, getattr(flops, phase)) for phase in phases)


def model_rows(flops: FlopStatement, *, inference: bool = False) -> tuple[CountRow, ...]:
    """What the hardware executed beyond the model's own FLOPs, as negative numbers: with the total, it gives ``model``.

    >>> model_rows(FlopStatement(total=5, model=4, recompute=1))
    (CountRow(name='less recompute', n=-1), CountRow(name='less attention rescore', n=0))
    """
    less = [CountRow("less recompute", -flops.recompute)]
    if inference or flops.inference:
        less.append(CountRow("less inference", -flops.inference))
    return (*less, CountRow("less attention rescore", -flops.attention_rescore))


def category_rows(memory: MemoryStatement, *, always: Iterable[str] = ()) -> tuple[CategoryRow, ...]:
    """Bytes by category: those that are not 0 throughout, and those in ``always``. Each column adds up.

    >>> category_rows(MemoryStatement(peak=MemorySnapshot(total_bytes=8, inputs=8)), always=["unexplained"])
    (CategoryRow(category='inputs', start=0, peak=8, end=0),
     CategoryRow(category='unexplained', start=0, peak=0, end=0))
    """
    columns = [snapshot.by_category for snapshot in (memory.start, memory.peak, memory.end)]
    rows = (CategoryRow(name, *(column[name] for column in columns)) for name in CATEGORIES)
    return tuple(row for row in rows if any(row[1:]) or row.category in always)


def has_allocator_reading(device: str, memory: MemoryStatement) -> bool:
    """Whether an allocator's own count stands behind the numbers, so that 0 bytes unexplained says something.

    >>> has_allocator_reading("cpu", MemoryStatement(reserved_peak_bytes=5))
    False
    """
    return device.partition(":")[0] not in ("cpu", "meta") and memory.reserved_peak_bytes > 0


def phase_peak_rows(memory: MemoryStatement) -> tuple[InstantRow, ...]:
    """The peak of each phase that ran, in the order of phases.

    >>> phase_peak_rows(MemoryStatement(peak_by_phase={"forward": MemorySnapshot(op="aten.mm")}))
    (InstantRow(phase='forward', nbytes=0, module='', op='aten.mm'),)
    """
    snapshots = [(phase, memory.peak_by_phase[phase]) for phase in PHASES if phase in memory.peak_by_phase]
    return tuple(InstantRow(phase, s.total_bytes, s.module, s.op) for phase, s in snapshots)


def largest_rows(snapshot: MemorySnapshot, *, limit: int = 10) -> tuple[tuple[LargestRow, ...], int]:
    """The largest rows of what is alive, largest first, and the bytes of everything else.

    >>> largest_rows(MemorySnapshot(total_bytes=8, inputs=8))
    ((), 8)
    """
    found = sorted(snapshot.largest, key=lambda row: -row.nbytes)[:limit]
    rows = tuple(
        LargestRow(r.nbytes, r.n_blocks, r.category, r.phase, r.module, r.op, r.shape, r.dtype, r.where) for r in found
    )
    return rows, snapshot.total_bytes - sum(row.nbytes for row in rows)


def copy_rows(copies: Iterable[Copies]) -> tuple[CopyRow, ...]:
    """Copies by kind, most bytes first.

    >>> copy_rows([Copies("dtype", 8, 1, "a"), Copies("dtype", 4, 2, "b")])
    (CopyRow(kind='dtype', nbytes=12, calls=3, module='a', module_bytes=8),)
    """
    calls: dict[str, int] = {}
    modules: dict[str, dict[str, int]] = {}
    for copy in copies:
        calls[copy.kind] = calls.get(copy.kind, 0) + copy.calls
        of_kind = modules.setdefault(copy.kind, {})
        of_kind[copy.module] = of_kind.get(copy.module, 0) + copy.nbytes
    rows = []
    for kind, of_kind in modules.items():
        most = max(sorted(of_kind), key=lambda module: of_kind[module])
        rows.append(CopyRow(kind, sum(of_kind.values()), calls[kind], most, of_kind[most]))
    return tuple(sorted(rows, key=lambda row: (-row.nbytes, row.kind)))


def count_rows(counts: Mapping[str, int], *, limit: int = 10) -> tuple[CountRow, ...]:
    """The largest counts first; the smallest are folded into one row. They add up as before.

    >>> count_rows({"a": 1, "b": 5, "c": 2}, limit=1)
    (CountRow(name='b', n=5), CountRow(name='(2 more)', n=3))
    """
    rows = sorted((CountRow(name, n) for name, n in counts.items()), key=lambda row: (-row.n, row.name))
    if len(rows) <= limit + 1:
        return tuple(rows)
    return (*rows[:limit], CountRow(f"({len(rows) - limit} more)", sum(row.n for row in rows[limit:])))
