"""Which entry of one instant is which of another: the same, the same but changed, or under a new module's name."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

from torchledger.journal.statements import MemorySnapshot

_MANY_PAIRS = 4096
"""With more candidates than that, the entries of one place are paired in the order of their size."""
_MANY_RELATIVES = 64
"""So many candidates are looked at for what a module inside or around another made."""

Key = tuple[str, str, str, str, tuple[int, ...]]
"""Category, module, op, dtype and shape."""


@dataclass(slots=True)
class Entry:
    """All rows of one category, module, op, dtype and shape, added up."""

    category: str
    module: str
    op: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int = 0
    n_blocks: int = 0
    phases: set[str] = field(default_factory=set)

    @property
    def tensor(self) -> str:
        """Dtype, shape and number of blocks."""
        blocks = f" x{self.n_blocks}" if self.n_blocks > 1 else ""
        return f"{self.dtype} {sizes(self.shape)}{blocks}"


Entries = dict[Key, Entry]


@dataclass(frozen=True, slots=True)
class Pairing:
    """Entries of two instants: those that are in both, and those that only one of them has."""

    pairs: list[tuple[Entry, Entry]]
    gone: list[Entry]
    new: list[Entry]


def pair_entries(base: MemorySnapshot, head: MemorySnapshot) -> Pairing:
    """The entries of two instants, paired: first those that are alike, then those that likely are the same, changed.

    >>> from torchledger.journal.statements import Allocation
    >>> rows = [Allocation(8, "inputs", "outside", "", "aten.ones", (2,), dtype) for dtype in ("float32", "bfloat16")]
    >>> snapshots = [MemorySnapshot(total_bytes=8, inputs=8, largest=(row,)) for row in rows]
    >>> [(one.dtype, other.dtype) for one, other in pair_entries(*snapshots).pairs]
    [('float32', 'bfloat16')]
    """
    before, after = _entries(base), _entries(head)
    pairs = [(before.pop(key), after.pop(key)) for key in list(before) if key in after]
    for place in (_by_place, _by_tensor):
        pairs += _pair(before, after, place)
    pairs += _pair_relatives(before, after)
    pairs += _pair_renamed(before, after, _only_in(base, head), _only_in(head, base))
    return Pairing(pairs, list(before.values()), list(after.values()))


def sizes(shape: tuple[int, ...]) -> str:
    """A shape in words.

    >>> sizes((8, 1024)), sizes(())
    ('8x1024', 'scalar')
    """
    return "x".join(map(str, shape)) if shape else "scalar"


def _entries(snapshot: MemorySnapshot) -> Entries:
    found: Entries = {}
    for row in snapshot.largest:
        key = (row.category, row.module, row.op, row.dtype, row.shape)
        entry = found.get(key)
        if entry is None:
            entry = found[key] = Entry(*key)
        entry.nbytes += row.nbytes
        entry.n_blocks += row.n_blocks
        entry.phases.add(row.phase)
    return found


def _by_place(entry: Entry) -> Hashable:
    return entry.category, entry.module, entry.op


def _by_tensor(entry: Entry) -> Hashable:
    """Where another op makes it now: the shape is still the same."""
    return entry.category, entry.module, entry.shape


def _pair(before: Entries, after: Entries, place: Callable[[Entry], Hashable]) -> list[tuple[Entry, Entry]]:
    """Takes the entries out of both that stand in one place and are likely the same one, changed."""
    places: dict[Hashable, tuple[list[Key], list[Key]]] = {}
    for side, entries in enumerate((before, after)):
        for key, entry in entries.items():
            places.setdefault(place(entry), ([], []))[side].append(key)
    chosen = [pair for keys in places.values() for pair in _likeliest(*keys, before, after)]
    return [(before.pop(one), after.pop(other)) for one, other in chosen]


def _likeliest(ones: list[Key], others: list[Key], before: Entries, after: Entries) -> Iterator[tuple[Key, Key]]:
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


def _pair_relatives(before: Entries, after: Entries) -> Iterator[tuple[Entry, Entry]]:
    """Takes out what has as many elements of another dtype in a module above or below: a cast before or after it."""
    waiting: dict[Hashable, list[Key]] = {}
    for key, entry in before.items():
        waiting.setdefault(_elements(entry), []).append(key)
    for key, entry in list(after.items()):
        candidates = waiting.get(_elements(entry), [])
        for other in candidates[:_MANY_RELATIVES]:
            if before[other].dtype != entry.dtype and _are_relatives(before[other].module, entry.module):
                candidates.remove(other)
                yield before.pop(other), after.pop(key)
                break


def _elements(entry: Entry) -> Hashable:
    return entry.category, math.prod(entry.shape), entry.n_blocks


def _are_relatives(module: str, other: str) -> bool:
    """Whether one of two modules is inside the other; all are inside the model itself, which says nothing."""
    return bool(module and other) and (module.startswith(f"{other}.") or other.startswith(f"{module}."))


def _unlikeness(one: Entry, other: Entry) -> tuple[int, ...]:
    n_axes = abs(len(one.shape) - len(other.shape))
    axes = sum(a != b for a, b in zip(one.shape, other.shape, strict=False))
    blocks = abs(one.n_blocks - other.n_blocks)
    return n_axes, axes, int(one.dtype != other.dtype), blocks, abs(one.nbytes - other.nbytes)


def _only_in(one: MemorySnapshot, other: MemorySnapshot) -> set[str]:
    """Modules that the other instant does not know at all."""
    known = {row.module for row in other.largest} | other.by_module.keys()
    return {row.module for row in one.largest} - known


def _pair_renamed(before: Entries, after: Entries, left: set[str], came: set[str]) -> Iterator[tuple[Entry, Entry]]:
    """Takes out what is the same but for the name of its module, where the old name is gone and the new one is new."""
    waiting: dict[Hashable, deque[Key]] = {}
    for key, entry in before.items():
        if entry.module in left:
            waiting.setdefault((key[0], *key[2:], entry.nbytes, entry.n_blocks), deque()).append(key)
    for key, entry in list(after.items()):
        same = waiting.get((key[0], *key[2:], entry.nbytes, entry.n_blocks)) if entry.module in came else None
        if same:
            yield before.pop(same.popleft()), after.pop(key)
