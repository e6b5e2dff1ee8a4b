"""Numbers of modules as a tree that fits a page, and whose rows still add up.

Every number is own to one path; what a row holds in all is its own plus its children's. Siblings with equal numbers
(``blocks.0`` to ``blocks.11``) become one row with their sum, small and deep ones go into the row above.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchledger.journal.statements import OUTSIDE_MODULE
from torchledger.render.names import clean

MAX_ROWS = 40
MAX_CHILDREN = 16
_DEEPEST = 32

_NUMBERED = re.compile(r"(.*?)([0-9]{1,9})")


class ModuleRow(NamedTuple):
    """One row: ``total`` is its ``own`` and the totals of the rows right below it."""

    depth: int
    label: str
    total: int
    own: int


@dataclass(slots=True)
class _Node:
    name: str
    own: int = 0
    tail: str = ""
    count: int = 1
    children: list[_Node] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.own + sum(child.total for child in self.children)

    @property
    def label(self) -> str:
        label = clean(self.name + self.tail)
        return f"{label} x{self.count}" if self.count > 1 else label

    def signature(self) -> tuple[Any, ...]:
        """What two nodes share that may be shown as one."""
        return (self.tail, self.own, self.count, *((child.name, child.signature()) for child in self.children))


def module_rows(own: Mapping[str, int], *, max_rows: int = MAX_ROWS) -> tuple[ModuleRow, ...]:
    """The rows of a tree, from each path's own number; the numbers ``own`` of the rows add up to theirs.

    Rows without any number are left out. The root model is ``""``.

    >>> for row in module_rows({"": 1, "blocks.0.fc": 4, "blocks.1.fc": 4, "head": 2, "norm": 0}):
    ...     print(row)
    ModuleRow(depth=0, label='(model)', total=11, own=1)
    ModuleRow(depth=1, label='blocks.[0-1].fc x2', total=8, own=8)
    ModuleRow(depth=1, label='head', total=2, own=2)
    """
    top = _Node("", children=_grow(own))
    top.children = _merge_equal([_tidy(child) for child in _without_empty(top.children)])
    _keep_largest(top)
    depth = _DEEPEST
    while depth > 0 and sum(1 for _ in _rows(top.children, 0, depth)) > max_rows:
        depth -= 1
    return tuple(_rows(top.children, 0, depth))


def _grow(own: Mapping[str, int]) -> list[_Node]:
    """The nodes of the tree's top; the order is that of ``own``."""
    rooted = "" in own
    nodes: dict[tuple[str, ...], _Node] = {}
    top = _Node("")
    for path, n in own.items():
        place: tuple[str, ...] = ()
        node = top
        parts = [path] if path == OUTSIDE_MODULE else path.split(".", _DEEPEST) if path else []
        if rooted and path != OUTSIDE_MODULE:
            parts.insert(0, "(model)")
        for part in parts:
            place = (*place, part)
            if place not in nodes:
                nodes[place] = _Node(part)
                node.children.append(nodes[place])
            node = nodes[place]
        node.own += n
    return top.children


def _without_empty(nodes: list[_Node]) -> list[_Node]:
    kept = []
    for node in nodes:
        node.children = _without_empty(node.children)
        if node.own or node.children:
            kept.append(node)
    return kept


def _tidy(node: _Node) -> _Node:
    """Below ``node``: equal siblings in one, and a row that would only repeat its one child joined with it."""
    node.children = _merge_equal([_tidy(child) for child in node.children])
    _keep_largest(node)
    if node.own == 0 and len(node.children) == 1 and node.name != "(model)":
        child = node.children[0]
        return _Node(node.name, child.own, f".{child.name}{child.tail}", child.count, child.children)
    return node


def _merge_equal(nodes: list[_Node]) -> list[_Node]:
    groups: dict[object, list[_Node]] = {}
    for node in nodes:
        match = _NUMBERED.fullmatch(node.name)
        key = (match[1], node.signature()) if match else node.name
        groups.setdefault(key, []).append(node)
    return [_merge(group) if len(group) > 1 else group[0] for group in groups.values()]


def _merge(group: list[_Node]) -> _Node:
    """Nodes of the same shape and numbers as one, with the sums of both."""
    merged = _sum_of(group)
    merged.count = sum(node.count for node in group)
    matches = [_NUMBERED.fullmatch(node.name) for node in group]
    numbers = sorted(int(match[2]) for match in matches if match)
    prefix = next(match[1] for match in matches if match)
    merged.name = f"{prefix}[{_ranges(numbers)}]"
    return merged


def _sum_of(group: list[_Node]) -> _Node:
    first = group[0]
    children = [_sum_of(list(nodes)) for nodes in zip(*(node.children for node in group), strict=True)]
    return _Node(first.name, sum(node.own for node in group), first.tail, first.count, children)


def _ranges(numbers: list[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2,5``; a long list is cut."""
    spans: list[list[int]] = []
    for n in numbers:
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in spans]
    return ",".join(texts if len(texts) <= 6 else [*texts[:4], "..", texts[-1]])


def _keep_largest(node: _Node) -> None:
    """Folds the smallest children into one row where there are too many."""
    if len(node.children) <= MAX_CHILDREN:
        return
    by_size = sorted(node.children, key=lambda child: -abs(child.total))
    kept = {id(child) for child in by_size[: MAX_CHILDREN - 1]}
    rest = [child for child in node.children if id(child) not in kept]
    folded = _Node(f"({len(rest)} more)", sum(child.total for child in rest))
    node.children = [*(child for child in node.children if id(child) in kept), folded]


def _rows(nodes: list[_Node], depth: int, deepest: int) -> Iterator[ModuleRow]:
    for node in nodes:
        if depth == deepest or not node.children:
            yield ModuleRow(depth, node.label, node.total, node.total)
        else:
            yield ModuleRow(depth, node.label, node.total, node.own)
            yield from _rows(node.children, depth + 1, deepest)
