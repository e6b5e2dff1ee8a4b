"""Which parts of a model make up a term: its stages, found in the names of its parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torchledger.read.reconcile.bridge import Part
from torchledger.units import format_count

MOST_STAGES = 12
"""No split goes beyond so many."""


class Reused(NamedTuple):
    """One parameter that met more or fewer rows than D: its name, its elements, its multiply-adds, and its term."""

    name: str
    n_elements: int
    uses: int
    value: int


def split_by_stage(parameters: Iterable[Reused], n_tokens: int) -> tuple[Part, ...]:
    """A term's value by stage of the model, in the model's order; the values add up to the term.

    A stage is a module: of the children of the root, the one with over half of the term is taken apart into its own
    children, and so on, as long as there are no more than `MOST_STAGES`.

    >>> conv, linear = Reused("features.0.weight", 9, 9 * 64, 6 * 9 * 63), Reused("head.weight", 4, 8, 6 * 4)
    >>> [(part.name, part.value) for part in split_by_stage([conv, linear], 1)]
    [('features.0', 3402), ('head', 24)]
    """
    rows = list(parameters)
    stages = _children("", rows)
    while stages:
        largest = max(stages, key=lambda name: sum(abs(row.value) for row in stages[name]))
        weight = sum(abs(row.value) for row in stages[largest])
        below = _children(largest, stages[largest])
        if 2 * weight <= sum(abs(row.value) for row in rows) or set(below) <= {largest}:
            break
        if len(stages) + len(below) - 1 > MOST_STAGES:
            break
        split: dict[str, list[Reused]] = {}
        for name, members in stages.items():
            split.update(below if name == largest else {name: members})
        stages = split
    return tuple(_part(name, members, n_tokens) for name, members in stages.items() if any(m.value for m in members))


def _children(path: str, rows: list[Reused]) -> dict[str, list[Reused]]:
    """The parameters below a module by child; one of its own stays under the module's name."""
    found: dict[str, list[Reused]] = {}
    depth = path.count(".") + 1 if path else 0
    for row in rows:
        modules = row.name.split(".")[:-1]
        name = ".".join(modules[: depth + 1]) if len(modules) > depth else path
        found.setdefault(name, []).append(row)
    return found


def _part(name: str, rows: list[Reused], n_tokens: int) -> Part:
    n = sum(row.n_elements for row in rows)
    times = sorted({row.uses / (row.n_elements * n_tokens) for row in rows if row.n_elements and n_tokens})
    met = " to ".join(f"{x:,.4g}" for x in dict.fromkeys([times[0], times[-1]])) if times else "other"
    return Part(name, sum(row.value for row in rows), f"{format_count(n)} parameters met {met} rows for each of D")
