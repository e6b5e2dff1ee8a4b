"""What differs between two steps, entry by entry: bytes alive at the peak, and FLOPs by phase, op and module.

Rows add up to the difference of the totals, exactly: bytes that no row of a report claims are a row of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torchledger.gate.pairing import Entry, pair_entries, sizes
from torchledger.journal.checks import parents_of
from torchledger.journal.statements import CATEGORIES, PHASES, FlopStatement, MemorySnapshot, StepReport
from torchledger.units import format_against, format_count, format_flops


@dataclass(frozen=True, slots=True)
class EntryDifference:
    """Blocks that one op made in one module, of one category, whose bytes at the peak differ.

    ``dtype`` and ``shape`` are the head's, or the base's of an entry that is ``gone``; ``words`` say what changed. The
    kind ``rest`` stands for the bytes of a category that no row of the reports claims.
    """

    category: str
    module: str
    op: str
    dtype: str
    shape: tuple[int, ...]
    base_bytes: int
    head_bytes: int
    kind: Literal["changed", "new", "gone", "rest"]
    words: str

    @property
    def change(self) -> int:
        """Bytes more in the head; below 0 where it has less."""
        return self.head_bytes - self.base_bytes


@dataclass(frozen=True, slots=True)
class CountDifference:
    """A number that differs: FLOPs of a phase, an op or a module, bytes of a category, calls of an op."""

    name: str
    base: int
    head: int
    words: str = ""

    @property
    def change(self) -> int:
        """How much more the head has."""
        return self.head - self.base


@dataclass(frozen=True, slots=True)
class Instant:
    """What ran at a peak."""

    phase: str = ""
    module: str = ""
    op: str = ""


@dataclass(frozen=True, slots=True)
class Differences:
    """What differs between two steps; each tuple has the largest change first and leaves out what is equal.

    ``entries`` and ``categories`` each add up to ``head_bytes - base_bytes``, the totals at the peak; each of the
    ``flop_...`` to ``head_flops - base_flops``. ``flop_modules`` are what a module's own ops cost.
    """

    base_bytes: int = 0
    head_bytes: int = 0
    base_flops: int = 0
    head_flops: int = 0
    base_instant: Instant = Instant()
    head_instant: Instant = Instant()
    entries: tuple[EntryDifference, ...] = ()
    categories: tuple[CountDifference, ...] = ()
    flop_phases: tuple[CountDifference, ...] = ()
    flop_ops: tuple[CountDifference, ...] = ()
    flop_modules: tuple[CountDifference, ...] = ()
    uncounted: tuple[CountDifference, ...] = ()


def diff_statements(
    base: StepReport, head: StepReport, *, base_device: str | None = None, head_device: str | None = None
) -> Differences:
    """All that differs between two steps.

    Args:
        base: the step that is held against.
        head: the other one.
        base_device: whose peak; the step's main device, if left out.
        head_device: likewise.

    >>> step = StepReport(0, None, 0.0, FlopStatement(), {})
    >>> diff_statements(step, step) == Differences()
    True
    """
    peaks = [_peak(base, base_device), _peak(head, head_device)]
    before, after = base.flops, head.flops
    return Differences(
        base_bytes=peaks[0].total_bytes,
        head_bytes=peaks[1].total_bytes,
        base_flops=before.total,
        head_flops=after.total,
        base_instant=Instant(peaks[0].phase, peaks[0].module, peaks[0].op),
        head_instant=Instant(peaks[1].phase, peaks[1].module, peaks[1].op),
        entries=diff_snapshots(*peaks),
        categories=diff_counts(peaks[0].by_category, peaks[1].by_category),
        flop_phases=diff_counts(*({phase: getattr(flops, phase) for phase in PHASES} for flops in (before, after))),
        flop_ops=diff_counts(before.by_op, after.by_op),
        flop_modules=_diff_modules(before, after),
        uncounted=diff_counts(before.uncounted, after.uncounted),
    )


def diff_counts(base: Mapping[str, int], head: Mapping[str, int]) -> tuple[CountDifference, ...]:
    """The numbers that differ, largest change first; what one side lacks is 0 there.

    >>> [(row.name, row.change) for row in diff_counts({"a": 1, "b": 5}, {"a": 1, "c": 9})]
    [('c', 9), ('b', -5)]
    """
    rows = (CountDifference(name, base.get(name, 0), head.get(name, 0)) for name in (*base, *(head.keys() - base)))
    return tuple(sorted((row for row in rows if row.change), key=lambda row: (-abs(row.change), row.name)))


def diff_snapshots(base: MemorySnapshot, head: MemorySnapshot) -> tuple[EntryDifference, ...]:
    """What of two instants differs, largest change first; the changes add up to that of ``total_bytes``.

    Blocks are told apart by category, module, op, dtype and shape. Where in one place the dtype, the shape or the op
    changed, that is one entry; so are as many elements of another dtype that a module inside or around it makes now.
    Rows of modules that only changed their names are the same.

    >>> from torchledger.journal.statements import Allocation
    >>> def saved(nbytes, dtype):
    ...     row = Allocation(nbytes, "activations", "forward", "blocks.3.mlp", "aten.addmm", (8, 64), dtype)
    ...     return MemorySnapshot(total_bytes=nbytes, activations=nbytes, largest=(row,))
    >>> for entry in diff_snapshots(saved(1024, "bfloat16"), saved(2048, "float32")):
    ...     print(entry.module, entry.category, entry.change, entry.words)
    blocks.3.mlp activations 1024 8x64: now float32, was bfloat16
    """
    pairing = pair_entries(base, head)
    rows = [
        *_changed(pairing.pairs),
        *_unpaired(pairing.gone, pairing.new, head, "gone"),
        *_unpaired(pairing.new, pairing.gone, base, "new"),
    ]
    equal = dict.fromkeys(CATEGORIES, 0)
    for one, other in pairing.pairs:
        if one.nbytes == other.nbytes:
            equal[one.category] += one.nbytes
    for name in CATEGORIES:
        of_it = [row for row in rows if row.category == name]
        less = base.by_category[name] - equal[name] - sum(row.base_bytes for row in of_it)
        more = head.by_category[name] - equal[name] - sum(row.head_bytes for row in of_it)
        rows.append(EntryDifference(name, "", "", "", (), less, more, "rest", "bytes in no row of the reports"))
    return tuple(sorted((row for row in rows if row.change), key=_largest_first))


def _largest_first(row: EntryDifference) -> tuple[object, ...]:
    return -abs(row.change), row.module, row.category, row.op, row.shape, row.dtype


def _changed(pairs: Iterable[tuple[Entry, Entry]]) -> Iterator[EntryDifference]:
    for one, other in pairs:
        if one.nbytes != other.nbytes:
            yield EntryDifference(
                *(other.category, other.module, other.op, other.dtype, other.shape),
                base_bytes=one.nbytes,
                head_bytes=other.nbytes,
                kind="changed",
                words=_words(one, other),
            )


def _words(one: Entry, other: Entry) -> str:
    """What changed between two entries that are one, with what did not for context: ``8x64: now float32, was int8``."""
    same, now, was = [], [], []
    for before, after in ((one.dtype, other.dtype), (sizes(one.shape), sizes(other.shape))):
        if before == after:
            same.append(after)
        else:
            now.append(after)
            was.append(before)
    if one.n_blocks != other.n_blocks:
        now.append(f"{format_count(other.n_blocks)} block{'s' if other.n_blocks > 1 else ''}")
        was.append(format_count(one.n_blocks))
    elif not now:
        less, more = format_against(one.nbytes, other.nbytes)
        now.append(more)
        was.append(less)
    if one.phases != other.phases:
        now.append(f"in {' and '.join(sorted(other.phases))}")
        was.append(f"in {' and '.join(sorted(one.phases))}")
    if one.op != other.op:
        was.append(f"by {one.op}")
    if one.module != other.module:
        was.append(f"made in {one.module}")
    context = f"{' '.join(same)}: " if same else ""
    return f"{context}now {' '.join(now)}, was {' '.join(was)}"


def _unpaired(
    entries: list[Entry], unpaired_there: list[Entry], there: MemorySnapshot, kind: Literal["new", "gone"]
) -> Iterator[EntryDifference]:
    """Entries that the other instant lacks, but for those that may be among the bytes of which it lists no row."""
    listed = dict.fromkeys(CATEGORIES, 0)
    for row in there.largest:
        listed[row.category] += row.nbytes
    smallest = min((row.nbytes for row in there.largest), default=0)
    twins = {(e.module, e.op, e.dtype, e.shape): e.category for e in unpaired_there}
    for entry in entries:
        unlisted = there.by_category[entry.category] - listed[entry.category]
        if entry.nbytes <= min(unlisted, smallest or unlisted):
            continue
        twin = twins.get((entry.module, entry.op, entry.dtype, entry.shape))
        elsewhere = f", {'was' if kind == 'new' else 'now'} {twin}" if twin else ""
        yield EntryDifference(
            *(entry.category, entry.module, entry.op, entry.dtype, entry.shape),
            base_bytes=0 if kind == "new" else entry.nbytes,
            head_bytes=entry.nbytes if kind == "new" else 0,
            kind=kind,
            words=f"{entry.tensor}: {kind}{elsewhere}",
        )


def _peak(step: StepReport, device: str | None) -> MemorySnapshot:
    memory = step.memory.get(step.main_device if device is None else device)
    return memory.peak if memory is not None else MemorySnapshot()


def _diff_modules(base: FlopStatement, head: FlopStatement) -> tuple[CountDifference, ...]:
    """FLOPs of each module's own ops, with the phases that they changed in."""
    owns = [_own_phases(flops) for flops in (base, head)]
    rows = []
    for row in diff_counts(*({m: split.self_total for m, split in flops.by_module.items()} for flops in (base, head))):
        phases = [own.get(row.name, {}) for own in owns]
        moved = {phase: phases[1].get(phase, 0) - phases[0].get(phase, 0) for phase in PHASES}
        words = ", ".join(f"{phase} {format_flops(n, signed=True)}" for phase, n in moved.items() if n)
        rows.append(CountDifference(row.name, row.base, row.head, words))
    return tuple(rows)


def _own_phases(flops: FlopStatement) -> dict[str, dict[str, int]]:
    """Each module's FLOPs by phase, without its children's."""
    own = {module: {p: getattr(split, p) for p in PHASES} for module, split in flops.by_module.items()}
    for module, parent in parents_of(flops.by_module).items():
        if parent is not None:
            for phase in PHASES:
                own[parent][phase] -= getattr(flops.by_module[module], phase)
    return own
