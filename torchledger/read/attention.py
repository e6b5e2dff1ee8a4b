"""Which products between activations are attention's."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import NamedTuple

from torchledger.journal.entries import Journal

_SOFTMAX = ("aten._softmax", "aten._safe_softmax")


class _Candidate(NamedTuple):
    """A product without parameters: its number, the elements of its result and operands, and when it ran."""

    number: int
    sizes: tuple[int, ...]
    path: str
    position: int
    """Blocks that the step had by then; -1: not known."""


@dataclass(slots=True)
class _Softmax:
    position: int
    n_elements: int
    row: int
    """Elements of one row."""
    above: str
    """What its module stands below."""
    has_scores: bool = False


def find_attention(journal: Journal) -> set[int]:
    """Indices of the forward products that are attention's: those of attention ops, and both around a softmax.

    A product without parameters gives the scores if a softmax of as many elements runs in its module (or in one beside
    or below it); the product that takes that many elements gives the values. Where columns were added to the scores
    (sinks) or taken out of them (windows) before the softmax, the products just before and after it are, if they have
    as many rows.
    """
    softmaxes = [
        _Softmax(position, prod(row[5]), row[5][-1] if row[5] else 1, _above(journal.modules[row[3]]))
        for position, row in enumerate(journal.blocks)
        if row[4] in _SOFTMAX and 0 not in row[5]
    ]
    found: set[int] = set()
    groups = _candidates(journal, found)
    candidates = [candidate for group in groups for candidate in group]
    by_size: dict[int, list[_Softmax]] = {}
    for softmax in softmaxes:
        by_size.setdefault(softmax.n_elements, []).append(softmax)
    scored: dict[int, list[str]] = {}
    for index, sizes, path, _ in candidates:
        for softmax in by_size.get(sizes[0], ()):
            if _touches(path, softmax.above):
                softmax.has_scores = True
                found.add(index)
                scored.setdefault(sizes[0], []).append(path)
                break
    _find_sliced(groups, softmaxes, found, scored)
    for index, sizes, path, _ in candidates:
        for size in sizes[1:]:
            if any(_touches(path, _above(other)) for other in scored.get(size, ())):
                found.add(index)
    return found


def _candidates(journal: Journal, found: set[int]) -> list[list[_Candidate]]:
    """Products without parameters in forwards, in groups with no other product between; also attention's own ops."""

    def candidate(index: int) -> _Candidate | None:
        op, _, _, module, _, _, _, parts, _, link = journal.products[index]
        if "attention" in op or "transformer_encoder" in op:
            found.add(index)
        elif not parts and link and link[5]:
            sizes = tuple(link[5])
            return _Candidate(index, sizes[:3], journal.modules[module], sizes[3] if len(sizes) > 3 else -1)
        return None

    rows = [candidate(i) for i, row in enumerate(journal.products) if row[2] in ("forward", "recompute")]
    return [[c for c in group if c] for some, group in groupby(rows, key=bool) if some]


def _find_sliced(
    groups: list[list[_Candidate]], softmaxes: list[_Softmax], found: set[int], scored: dict[int, list[str]]
) -> None:
    """Scores and values around each softmax whose size is not that of any scores."""
    following = [softmax.position for softmax in softmaxes[1:]]
    for softmax, end in zip(softmaxes, [*following, None], strict=False):
        if softmax.has_scores:
            continue
        n_rows = softmax.n_elements // softmax.row
        group = _group_around(groups, softmax.position)
        before = [c for c in group if c.position <= softmax.position]
        after = [c for c in group if c.position > softmax.position and (end is None or c.position <= end)]
        scores = [c for c in before if _touches(c.path, softmax.above) and c.sizes[0] % n_rows == 0]
        sizes = {softmax.n_elements, *(c.sizes[0] for c in scores)}
        values = [c for c in after if _touches(c.path, softmax.above) and sizes & {*c.sizes[1:]}]
        values = values or [c for c in after[:1] if any(size % n_rows == 0 for size in c.sizes[1:])]
        if not scores or not values:
            continue
        found.update(c.number for c in (*scores, *values))
        for c in scores:
            scored.setdefault(c.sizes[0], []).append(c.path)


def _group_around(groups: list[list[_Candidate]], position: int) -> list[_Candidate]:
    """The products before and after a position, if no product with a parameter stands between."""
    for group in groups:
        if group[0].position < 0:
            continue
        if group[0].position <= position < group[-1].position:
            return group
    return []


def _above(path: str) -> str:
    return path.rpartition(".")[0]


def _touches(path: str, above: str) -> bool:
    """Whether a module stands beside or below what is ``above`` another, or is it."""
    return path == above or not above or path.startswith(f"{above}.")
