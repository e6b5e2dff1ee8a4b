"""What differs between two steps, entry by entry: bytes alive at the peak, and FLOPs by phase, op and module.

Differences of rows add up to the difference of the totals, exactly: bytes that no kept row claims are rows of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torchledger.journal.checks import parent_of
from torchledger.journal.statements import CATEGORIES, PHASES, FlopStatement, MemorySnapshot, StepReport
from torchledger.units import format_bytes, format_count, format_flops

_MANY_PAIRS = 4096
"""From so many candidates on, rows of one place are paired in the order of their size."""


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
class Differences:
    """What differs between two steps; each tuple has the largest change first and leaves out what is equal.

    ``entries`` and ``categories`` each add up to ``head_bytes - base_bytes``, the totals at the peak; each of the
    ``flop_...`` to ``head_flops - base_flops``. ``flop_modules`` are what a module's own ops cost.
    """

    base_bytes: int = 0
    head_bytes: int = 0
    base_flops: int = 0
    head_flops: int = 0
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
    changed, that is one entry. Rows of modules that only changed their names are the same.

    >>> from torchledger.journal.statements import Allocation
    >>> def saved(nbytes, dtype):
    ...     row = Allocation(nbytes, "activations", "forward", "blocks.3.mlp", "aten.addmm", (8, 64), dtype)
    ...     return MemorySnapshot(total_bytes=nbytes, activations=nbytes, largest=(row,))
    >>> for entry in diff_snapshots(saved(1024, "bfloat16"), saved(2048, "float32")):
    ...     print(entry.module, entry.category, entry.change, entry.words)
    blocks.3.mlp activations 1024 8x64: now float32, was bfloat16
    """
    before, after = _entries(base), _entries(head)
    pairs = [(before.pop(key), after.pop(key)) for key in list(before) if key in after]
    renamed = _only_in(base, head), _only_in(head, base)
    for place in (_by_place, _by_tensor):
        pairs += _pair(before, after, place)
    _drop_renamed(before, after, *renamed)
    found = [*_changed(pairs), *_unpaired(before, head, after, "gone"), *_unpaired(after, base, before, "new")]
    rest = {name: [base.by_category[name], head.by_category[name]] for name in CATEGORIES}
    for row in found:
        rest[row.category][0] -= row.base_bytes
        rest[row.category][1] -= row.head_bytes
    equal = {name: 0 for name in CATEGORIES}
    for one, other in pairs:
        if one.nbytes == other.nbytes:
            equal[one.category] += one.nbytes
    for name, (less, more) in rest.items():
        if less != more:
            words = "bytes in no row of the reports"
            n = equal[name]
            found.append(EntryDifference(name, "", "", "", (), less - n, more - n, "rest", words))
    order = sorted((row for row in found if row.change), key=lambda row: (-abs(row.change), row.module, row.op, row.shape))
    return tuple(order)


@dataclass(slots=True)
class _Entry:
    """All rows of one category, module, op, dtype and shape, added up."""

    category: str
    module: str
    op: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int = 0
    n_blocks: int = 0
    phases: set[str] = field(default_factory=set)

    def tensor(self) -> str:
        blocks = f" x{self.n_blocks}" if self.n_blocks > 1 else ""
        return f"{self.dtype} {_sizes(self.shape)}{blocks}"


_Key = tuple[str, str, str, str, tuple[int, ...]]
_Entries = dict[_Key, _Entry]


def _entries(snapshot: MemorySnapshot) -> _Entries:
    found: _Entries = {}
    for row in snapshot.largest:
        key = (row.category, row.module, row.op, row.dtype, row.shape)
        entry = found.get(key)
        if entry is None:
            entry = found[key] = _Entry(*key)
        entry.nbytes += row.nbytes
        entry.n_blocks += row.n_blocks
        entry.phases.add(row.phase)
    return found


def _by_place(entry: _Entry) -> Hashable:
    return entry.category, entry.module, entry.op


def _by_tensor(entry: _Entry) -> Hashable:
    """Where the op changed: what it makes has the same shape still."""
    return entry.category, entry.module, entry.shape


def _pair(before: _Entries, after: _Entries, place: Callable[[_Entry], Hashable]) -> list[tuple[_Entry, _Entry]]:
    """Takes the entries out of both that stand in one place and are likely the same one, changed."""
    places: dict[Hashable, tuple[list[_Key], list[_Key]]] = {}
    for side, entries in enumerate((before, after)):
        for key, entry in entries.items():
            places.setdefault(place(entry), ([], []))[side].append(key)
    pairs = []
    for keys in places.values():
        for one, other in _likeliest(*keys, before, after):
            pairs.append((before.pop(one), after.pop(other)))
    return pairs


def _likeliest(ones: list[_Key], others: list[_Key], before: _Entries, after: _Entries) -> Iterator[tuple[_Key, _Key]]:
    """Pairs of the two lists, those first that have most in common."""
    if len(ones) * len(others) > _MANY_PAIRS:
        yield from zip(ones, others, strict=False)
        return
    candidates = [
        (_unlikeness(before[one], after[other]), i, j)
        for i, one in enumerate(ones)
        for j, other in enumerate(others)
        if before[one].dtype == after[other].dtype or len(before[one].shape) == len(after[other].shape)
    ]
    paired: tuple[set[int], set[int]] = (set(), set())
    for _, i, j in sorted(candidates):
        if i not in paired[0] and j not in paired[1]:
            paired[0].add(i)
            paired[1].add(j)
            yield ones[i], others[j]


def _unlikeness(one: _Entry, other: _Entry) -> tuple[int, ...]:
    n_sizes = abs(len(one.shape) - len(other.shape))
    sizes = sum(a != b for a, b in zip(one.shape, other.shape, strict=False))
    return n_sizes, sizes, int(one.dtype != other.dtype), abs(one.n_blocks - other.n_blocks), abs(one.nbytes - other.nbytes)


def _only_in(one: MemorySnapshot, other: MemorySnapshot) -> set[str]:
    """Modules that the other instant does not know at all."""
    known = {row.module for row in other.largest} | other.by_module.keys()
    return {row.module for row in one.largest} - known


def _drop_renamed(before: _Entries, after: _Entries, left: set[str], came: set[str]) -> None:
    """Takes out what is the same but for the name of its module, where the old name is gone and the new one is new."""
    waiting: dict[Hashable, list[_Key]] = {}
    for key, entry in before.items():
        if entry.module in left:
            waiting.setdefault((key[0], *key[2:], entry.nbytes, entry.n_blocks), []).append(key)
    for key in [key for key, entry in after.items() if entry.module in came]:
        entry = after[key]
        same = waiting.get((key[0], *key[2:], entry.nbytes, entry.n_blocks))
        if same:
            del before[same.pop(0)], after[key]


def _changed(pairs: Iterable[tuple[_Entry, _Entry]]) -> Iterator[EntryDifference]:
    for one, other in pairs:
        if one.nbytes != other.nbytes:
            yield EntryDifference(
                *(other.category, other.module, other.op, other.dtype, other.shape),
                base_bytes=one.nbytes,
                head_bytes=other.nbytes,
                kind="changed",
                words=_words(one, other),
            )


def _words(one: _Entry, other: _Entry) -> str:
    """What changed between two entries of one place."""
    now, was = [], []
    if one.shape != other.shape:
        now.append(_sizes(other.shape))
        was.append(_sizes(one.shape))
    if one.dtype != other.dtype:
        now.append(other.dtype)
        was.append(one.dtype)
    if one.n_blocks != other.n_blocks:
        now.append(f"{format_count(other.n_blocks)} blocks")
        was.append(format_count(one.n_blocks))
    elif not now:
        now.append(f"{format_bytes(other.nbytes // other.n_blocks)} a block")
        was.append(format_bytes(one.nbytes // one.n_blocks))
    if one.op != other.op:
        now.append(f"by {other.op}")
        was.append(f"by {one.op}")
    if one.phases != other.phases:
        now.append(f"in {' and '.join(sorted(other.phases))}")
        was.append(f"in {' and '.join(sorted(one.phases))}")
    same = [] if one.dtype != other.dtype else [other.dtype]
    same += [] if one.shape != other.shape else [_sizes(other.shape)]
    context = f"{' '.join(same)}: " if same else ""
    return f"{context}now {', '.join(now)}, was {', '.join(was)}"


def _unpaired(
    entries: _Entries, there: MemorySnapshot, unpaired_there: _Entries, kind: Literal["new", "gone"]
) -> Iterator[EntryDifference]:
    """Entries that the other instant lacks, but for those that may be among the bytes of which it lists no row."""
    listed = dict.fromkeys(CATEGORIES, 0)
    for row in there.largest:
        listed[row.category] += row.nbytes
    smallest = min((row.nbytes for row in there.largest), default=0)
    twins = {(e.module, e.op, e.dtype, e.shape): e.category for e in unpaired_there.values()}
    for entry in entries.values():
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
            words=f"{entry.tensor()}: {kind}{elsewhere}",
        )


def _sizes(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) if shape else "scalar"


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
    for module, split in flops.by_module.items():
        parent = parent_of(module, flops.by_module)
        if parent is not None:
            for phase in PHASES:
                own[parent][phase] -= getattr(split, phase)
    return own
