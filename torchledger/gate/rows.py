"""The largest rows at a peak as names with their bytes, as a baseline file keeps them, and back."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torchledger.journal.statements import CATEGORIES, PHASES, Allocation, MemorySnapshot

LIMIT = 24
_BETWEEN = " | "
_REST = "everything else"


def fold_layers(rows: Iterable[Allocation]) -> list[Allocation]:
    """The rows, largest first, with equal ones of numbered modules in one: of ``blocks.0.fc`` and ``blocks.1.fc``, say.

    >>> rows = [Allocation(8, "inputs", "forward", f"blocks.{i}.fc", "aten.mm", (2,), "float32") for i in range(3)]
    >>> [(row.module, row.nbytes, row.n_blocks) for row in fold_layers([*rows, *fold_layers(rows[:1])])]
    [('blocks.*.fc', 32, 4)]
    """
    groups: dict[Hashable, list[Allocation]] = {}
    for row in rows:
        place = ".".join("*" if part.isdigit() else part for part in row.module.split("."))
        groups.setdefault((place, row.category, row.op, row.phase, row.dtype, row.shape), []).append(row)
    folded = []
    for (place, *_), group in groups.items():  # type: ignore[misc]
        is_one = len({row.module for row in group}) == 1
        nbytes, n_blocks = sum(row.nbytes for row in group), sum(row.n_blocks for row in group)
        folded.append(replace(group[0], module=group[0].module if is_one else place, nbytes=nbytes, n_blocks=n_blocks))
    return sorted(folded, key=lambda row: -row.nbytes)


def encode_rows(peak: MemorySnapshot) -> dict[str, int]:
    """The largest rows of an instant by name, and what is left of each category; they add up to its total.

    Equal rows of numbered modules are one, so that a model of many layers has all its rows in few.

    >>> row = Allocation(8, "inputs", "outside", "", "aten.randn", (2,), "float32")
    >>> encode_rows(MemorySnapshot(total_bytes=9, inputs=9, largest=(row,)))
    {'inputs |  | aten.randn | outside | float32 | 2 | 1': 8, 'inputs | everything else': 1}
    """
    rows: dict[str, int] = {}
    rest = peak.by_category
    for row in fold_layers(peak.largest)[:LIMIT]:
        shape = "x".join(map(str, row.shape))
        name = _BETWEEN.join((row.category, row.module, row.op, row.phase, row.dtype, shape, str(row.n_blocks)))
        rows[name] = rows.get(name, 0) + row.nbytes
        rest[row.category] -= row.nbytes
    return rows | {f"{category}{_BETWEEN}{_REST}": n for category, n in rest.items() if n}


def decode_rows(rows: Mapping[str, int]) -> MemorySnapshot:
    """The instant that `encode_rows` made rows of, as far as they say; rows that cannot be read are left out.

    >>> decode_rows({"inputs | fc | aten.randn | outside | float32 | 2x3 | 1": 24, "edited": 5}).by_category["inputs"]
    24
    """
    categories: dict[str, Any] = dict.fromkeys(CATEGORIES, 0)
    modules: dict[str, int] = {}
    largest = []
    for name, nbytes in rows.items():
        parts = name.split(_BETWEEN)
        if parts[0] not in categories:
            continue
        if parts[1:] == [_REST]:
            categories[parts[0]] += nbytes
            continue
        row = _decode_row(parts, nbytes)
        if row is not None:
            largest.append(row)
            categories[row.category] += nbytes
            modules[row.module] = modules.get(row.module, 0) + nbytes
    largest.sort(key=lambda row: -row.nbytes)
    total = sum(categories.values())
    return MemorySnapshot(total_bytes=total, **categories, by_module=modules, largest=tuple(largest))


def trim_rows(peak: MemorySnapshot) -> MemorySnapshot:
    """The instant with as many rows as a baseline keeps, so that the two can be compared.

    >>> trim_rows(MemorySnapshot(total_bytes=3, other=3)).other
    3
    """
    return decode_rows(encode_rows(peak))


def _decode_row(parts: list[str], nbytes: int) -> Allocation | None:
    try:
        category, module, op, phase, dtype, shape, blocks = parts
        sizes = tuple(int(size) for size in shape.split("x")) if shape else ()
        count = int(blocks)
    except ValueError:
        return None
    if phase not in ("", *PHASES) or count < 1 or nbytes < 0:
        return None
    return Allocation(nbytes, category, phase, module, op, sizes, dtype, count)
