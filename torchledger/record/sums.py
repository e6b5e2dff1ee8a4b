"""Sums that are made out of place only because a dispatch mode is on."""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

import torch

from torchledger import internals
from torchledger.record.storages import Books

_storage_of = torch.Tensor.untyped_storage
_engine_code = internals.engine_run_backward.__code__


class Sums:
    """Notes the sums that a program without a ledger makes in place, for the read floor to take them so.

    Without a mode the engine adds a gradient into the earlier one that it meets, if it holds the last reference to it,
    and `linear` adds its bias into the product. Both are taken as made in place, if what they would have been added to
    goes at once.
    """

    references_in_linear: int | None = None
    """How many references a product has when `linear` itself adds the bias to it: a program's own sum sees more.

    None while a probe is finding out.
    """

    def __init__(self, books: Books, dispatch_code: CodeType) -> None:
        self._books = books
        self._dispatch_code = dispatch_code

    def note(self, args: Any, out: Any, node: Any, node_first_block: int, caller: FrameType | None) -> None:
        """Note a sum.

        Args:
            args: The arguments of `aten.add.Tensor`.
            out: Its result, which has just been entered.
            node: The autograd node whose backward runs, or None.
            node_first_block: The number of the first block that could have been made by that node.
            caller: The frame that called the dispatch handler.
        """
        old, new = args
        if self.references_in_linear is None:
            self.references_in_linear = sys.getrefcount(old)
            return
        if type(old) is not torch.Tensor or not isinstance(new, torch.Tensor) or old.layout is not torch.strided:
            return
        books = self._books
        ref = books.live.get(id(_storage_of(old)))
        if ref is None or old.shape != out.shape or old.dtype is not out.dtype or not _is_dense(old):
            return
        if node is not None and not torch.is_grad_enabled() and self._is_engine(caller):
            if old._is_view():
                return  # what it is a view of holds the storage too
            if ref.number >= node_first_block:
                targets = [edge for edge in node.next_functions if edge[0] is not None]
                if len(set(targets)) == len(targets):
                    return  # made by the node itself, which sends one gradient to each target: not the engine's sum
        elif new.dim() != 1 or sys.getrefcount(old) != self.references_in_linear:
            return
        books.inplace_adds.append((len(books.events) - 1, ref.number))

    def note_scattered(self, old: Any, out: Any, node: Any, node_first_block: int, caller: FrameType | None) -> None:
        """A formula writes into a tensor of its own: `scatter` for `scatter_`, only because a mode is on."""
        if node is None or type(old) is not torch.Tensor or torch.is_grad_enabled() or not self._is_engine(caller):
            return
        ref = self._books.live.get(id(_storage_of(old)))
        if ref is None or ref.number < node_first_block or old.shape != out.shape or old.dtype is not out.dtype:
            return
        self._books.inplace_adds.append((len(self._books.events) - 1, ref.number))

    def _is_engine(self, frame: FrameType | None) -> bool:
        """Whether no Python stands between the op and the engine."""
        while frame is not None and frame.f_code is self._dispatch_code:  # an inner ledger
            frame = frame.f_back
        return frame is None or frame.f_code is _engine_code


def _is_dense(tensor: torch.Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))
