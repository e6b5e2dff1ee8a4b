"""Which products between activations are attention's."""

from __future__ import annotations

from math import prod

from torchledger.journal.entries import Journal

_SOFTMAX = ("aten._softmax", "aten._safe_softmax")


def find_attention(journal: Journal) -> set[int]:
    """Indices of the forward products that are attention's: those of attention ops, and both around a softmax.

    A product without parameters gives the scores if a softmax of as many elements runs in its module (or in one beside
    or below it); the product that takes that many elements gives the values.
    """
    found: set[int] = set()
    softmaxes: dict[int, set[str]] = {}
    for row in journal.blocks:
        if row[4] in _SOFTMAX:
            softmaxes.setdefault(prod(row[5]), set()).add(_above(journal.modules[row[3]]))
    candidates: list[tuple[int, tuple[int, ...], str]] = []
    for index, (op, _, phase, module, _, _, _, parts, _, link) in enumerate(journal.products):
        if phase not in ("forward", "recompute"):
            continue
        if "attention" in op or "transformer_encoder" in op:
            found.add(index)
        elif not parts and link and link[5]:
            candidates.append((index, link[5], journal.modules[module]))
    scored: dict[int, list[str]] = {}
    for index, sizes, path in candidates:
        if any(_touches(path, above) for above in softmaxes.get(sizes[0], ())):
            found.add(index)
            scored.setdefault(sizes[0], []).append(path)
    for index, sizes, path in candidates:
        for size in sizes[1:]:
            if any(_touches(path, _above(other)) for other in scored.get(size, ())):
                found.add(index)
    return found


def _above(path: str) -> str:
    return path.rpartition(".")[0]


def _touches(path: str, above: str) -> bool:
    """Whether a module stands beside or below what is ``above`` another, or is it."""
    return path == above or not above or path.startswith(f"{above}.")
