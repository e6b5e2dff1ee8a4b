"""Decompositions whose vectors nobody asked for: what they would take without a ledger.

`eigvalsh`, `svdvals`, `eigvals` and what is made of them (norms, ranks, condition numbers) compute no vectors where no
gradient needs them. Under any dispatch mode they do, and drop them before they return.
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

import torch

from torchledger.record.storages import Books

_WITHOUT_VECTORS = {"aten._linalg_eigh": 0, "aten.linalg_eig": 0, "aten._linalg_svd": 1}
"""The position of the values among the results."""


class Decompositions:
    """Corrects the price of a decomposition once all its vectors die within the very call that made them."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._watched: dict[int, weakref.ref[Any]] = {}

    def watch(self, name: str, out: Any, values_only: int, caller: FrameType) -> None:
        """A decomposition was made; its row is the next one of the journal.

        Args:
            name: The op.
            out: Its results.
            values_only: The FLOPs of the values alone.
            caller: The frame that made the call.
        """
        row = self._books.n_products_before + len(self._books.products)
        vectors = [t for i, t in enumerate(out) if i != _WITHOUT_VECTORS[name] and t.numel()]
        place = (id(caller), caller.f_lasti)
        alive = len(vectors)

        def died(ref: weakref.ref[Any]) -> None:
            nonlocal alive
            self._watched.pop(id(ref), None)
            frame = sys._getframe(1)
            if (id(frame), frame.f_lasti) == place:  # still inside that call: no Python has seen the vectors
                alive -= 1
                if not alive:
                    self._correct(row, values_only)

        for vector in vectors:
            ref = weakref.ref(vector.untyped_storage(), died)
            self._watched[id(ref)] = ref

    def forget(self) -> None:
        """Watch for no more deaths."""
        self._watched.clear()

    def _correct(self, number: int, flops: int) -> None:
        products = self._books.products
        index = number - self._books.n_products_before
        if 0 <= index < len(products):
            op, dtype, phase, module, _, rescore, excess, parts, quality, link = products[index]
            parts = tuple((parameter, kind, flops) for parameter, kind, _ in parts)
            if link and link[4]:
                link = (*link[:4], (flops // 2,), link[5])
            products[index] = (op, dtype, phase, module, flops, rescore, excess, parts, quality, link)


def is_watched(name: str, out: Any) -> bool:
    """Whether the results of an op are those of a decomposition of plain tensors."""
    return name in _WITHOUT_VECTORS and isinstance(out, tuple) and all(type(t) is torch.Tensor for t in out)
