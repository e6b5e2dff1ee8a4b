"""What is alive at an instant of a step: by category, by module, and the largest rows."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torchledger.journal.entries import LATE, MAPPED, Journal, Row, is_external
from torchledger.journal.statements import CATEGORIES, Allocation, MemorySnapshot
from torchledger.read.events import births, deaths

LARGEST_ROWS = 12
"""How many rows a snapshot's ``largest`` has."""

_GRADIENTS, _STATE = CATEGORIES.index("gradients"), CATEGORIES.index("optimizer_state")
PEAK_ROWS = 1000
"""How many rows the peak of a report has: all of most models, so that two peaks can be compared row by row."""

_Key = tuple[int, str, int, str, tuple[int, ...], str, int, int, bool]
"""Category, phase, module, op, shape, dtype, site and bytes of equal blocks, and whether they lie in mapped files."""
_Rows = dict[_Key, tuple[int, int]]
"""Bytes and number of the blocks of each key."""


class SnapshotReader:
    """Snapshots at positions among the events of one step; what is alive all along is added up once."""

    def __init__(self, journal: Journal, settled: dict[int, int], events: list[int]) -> None:
        self._journal = journal
        came, went = births(events), deaths(events)
        never = len(events)
        self._passing: dict[str, list[tuple[int, int, int, int, int, _Key]]] = defaultdict(list)
        """(came, went, bytes, category, module, key): alive at a position p if came < p <= went."""
        self._lasting: dict[str, _Lasting] = defaultdict(_Lasting)
        roles, first, blocks = journal.roles, journal.first, journal.blocks
        for number, row in there_before(journal):
            if is_external(roles.get(number, 0)):
                continue
            nbytes, device, phase, module, op, shape, dtype, site = row
            category = settled[number]
            key = (category, phase, module, op, shape, dtype, site, nbytes, bool(roles.get(number, 0) & MAPPED))
            if number in went:
                self._passing[device].append((-1, went[number], nbytes, category, module, key))
            else:
                self._lasting[device].add(nbytes, category, module, key)
        for number, position in came.items():
            if is_external(roles.get(number, 0)):
                continue
            nbytes, device, phase, module, op, shape, dtype, site = blocks[number - first]
            category = settled[number]
            key = (category, phase, module, op, shape, dtype, site, nbytes, bool(roles.get(number, 0) & MAPPED))
            self._passing[device].append((position, went.get(number, never), nbytes, category, module, key))
        self._cache: dict[tuple[str, int, int], MemorySnapshot] = {}

    def snapshot(self, device: str, position: int, *, n_rows: int = LARGEST_ROWS) -> MemorySnapshot:
        """What is alive on a device after so many events, with the largest ``n_rows`` rows."""
        found = self._cache.get((device, position, n_rows))
        if found is None:
            found = self._cache[device, position, n_rows] = self._read(device, position, n_rows)
        return found

    def _read(self, device: str, position: int, n_rows: int) -> MemorySnapshot:
        lasting = self._lasting[device]
        categories, modules = list(lasting.categories), dict(lasting.modules)
        elements, scalars, mapped = lasting.gradient_elements, lasting.optimizer_scalars, lasting.mapped
        rows: _Rows = {}
        for came, went, nbytes, category, module, key in self._passing[device]:
            if came < position <= went:
                categories[category] += nbytes
                modules[module] = modules.get(module, 0) + nbytes
                if key[8]:
                    mapped += nbytes
                if category == _GRADIENTS:
                    elements += _elements(nbytes, key[5])
                elif category == _STATE and key[4] == ():
                    scalars += nbytes
                if key in rows:
                    total, n = rows[key]
                    rows[key] = (total + nbytes, n + 1)
                else:
                    rows[key] = (nbytes, 1)
        paths = self._journal.modules
        by_path: dict[str, int] = {}
        for module, total in modules.items():
            path = paths[module]
            by_path[path] = by_path.get(path, 0) + total
        by_category: dict[str, Any] = dict(zip(CATEGORIES, categories, strict=True))
        return MemorySnapshot(
            total_bytes=sum(categories),
            **by_category,
            by_module=dict(sorted(by_path.items())),
            gradient_elements=elements,
            optimizer_scalars=scalars,
            mapped_bytes=mapped,
            largest=tuple(self._allocation(*row) for row in lasting.largest_with(rows, n_rows)),
        )

    def _allocation(self, key: _Key, nbytes: int, n_blocks: int) -> Allocation:
        category, phase, module, op, shape, dtype, site, _, _ = key
        journal = self._journal
        return Allocation(
            nbytes=nbytes,
            category=CATEGORIES[category],
            phase=phase,
            module=journal.modules[module],
            op=op,
            shape=tuple(shape),
            dtype=dtype,
            n_blocks=n_blocks,
            where=journal.sites[site] if site >= 0 else None,
        )


class _Lasting:
    """Blocks that are there from a step's start to its end."""

    def __init__(self) -> None:
        self.categories = [0] * len(CATEGORIES)
        self.modules: dict[int, int] = {}
        self.gradient_elements = 0
        self.optimizer_scalars = 0
        self.mapped = 0
        self._rows: _Rows = {}
        self._largest: list[tuple[_Key, int, int]] | None = None

    def add(self, nbytes: int, category: int, module: int, key: _Key) -> None:
        self.categories[category] += nbytes
        self.modules[module] = self.modules.get(module, 0) + nbytes
        if key[8]:
            self.mapped += nbytes
        if category == _GRADIENTS:
            self.gradient_elements += _elements(nbytes, key[5])
        elif category == _STATE and key[4] == ():
            self.optimizer_scalars += nbytes
        total, n = self._rows.get(key, (0, 0))
        self._rows[key] = (total + nbytes, n + 1)

    def largest_with(self, rows: _Rows, n_rows: int) -> list[tuple[_Key, int, int]]:
        """The largest of these rows and others, which may be of the same keys."""
        if self._largest is None:
            self._largest = sorted(((key, *row) for key, row in self._rows.items()), key=_by_size)
        candidates = [(key, *self._with(key, row)) for key, row in _at_least_the_last_of_the_largest(rows, n_rows)]
        seen = {key for key, _, _ in candidates}
        for row in self._largest:
            if row[0] not in seen:
                candidates.append(row)
                if len(candidates) >= len(seen) + n_rows:
                    break
        return sorted(candidates, key=_by_size)[:n_rows]

    def _with(self, key: _Key, row: tuple[int, int]) -> tuple[int, int]:
        if key not in self._rows:
            return row
        total, n = self._rows[key]
        return row[0] + total, row[1] + n


def _elements(nbytes: int, dtype: str) -> int:
    """Elements of a gradient's storage; the indices of a sparse one are none."""
    if "int" in dtype or dtype == "bool":
        return 0
    return nbytes // _item_bytes(dtype)


@functools.cache
def _item_bytes(dtype: str) -> int:
    bits = re.search("[0-9]+", dtype)
    return max(int(bits[0]) // 8, 1) if bits else 4


def _by_size(row: tuple[_Key, int, int]) -> tuple[int, _Key]:
    return -row[1], row[0]


def _at_least_the_last_of_the_largest(rows: _Rows, n_rows: int) -> list[tuple[_Key, tuple[int, int]]]:
    """The rows that may be among the largest, by the size of the last of them (a full sort takes much longer)."""
    if len(rows) <= n_rows:
        return list(rows.items())
    last = sorted((row[0] for row in rows.values()), reverse=True)[n_rows - 1]
    return [(key, row) for key, row in rows.items() if row[0] >= last]


def there_before(journal: Journal) -> Iterable[tuple[int, Row]]:
    """(number, row) of the blocks that a step began with: those carried over, and those that it met late."""
    yield from journal.carried.items()
    for number, role in journal.roles.items():
        if role & LATE and number >= journal.first:
            yield number, journal.blocks[number - journal.first]
