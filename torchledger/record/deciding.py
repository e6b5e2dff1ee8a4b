"""Values that tell which way a formula of autograd goes without a dispatch mode."""

from __future__ import annotations

import math
from typing import Any

import torch

from torchledger import internals
from torchledger.journal.entries import FORMULA, WORKSPACE
from torchledger.record.storages import Books

_SAFE_PRODUCT = ["aten.ones", "aten.cat", "aten.cumprod", "aten.flip", "aten.cat", "aten.cumprod"]
"""How the formula of a product begins under a mode, after a copy of an input that is not contiguous."""
_FIRST = 3
"""Its blocks up to the first of the two cumulative products."""
_INT_BYTES = 8
_OP = 4


class Deciding:
    """Notes, in the backward of a product, whether the input holds zeros.

    Without a mode the program reads this too, to choose between a quotient and a product of all others.
    """

    def __init__(self, books: Books) -> None:
        self._books = books
        self._n_zeros: int | None = None

    def note(self, node: Any, node_first_block: int, args: Any, out: Any) -> None:
        """Note an op whose values may decide.

        Args:
            node: The autograd node whose formula runs.
            node_first_block: The number of the first block that the node could have made.
            args: The arguments of `aten.eq.Scalar` or `aten.cumprod`.
            out: Its result, which has just been entered.
        """
        books = self._books
        made = [row[_OP] for row in books.blocks[node_first_block - books.first :]]
        if made == ["aten.mul", "aten.eq"]:  # of a cumulative product
            self._name(type(node).__name__, _count(out))
            return
        if made[:1] == ["aten.clone"]:
            del made[0]
        if made == _SAFE_PRODUCT[:_FIRST]:
            self._n_zeros = _count_zeros(args[0])
        elif made == _SAFE_PRODUCT:
            self._note_product(type(node).__name__, args[0], args[1], internals.input_dimensions(node))

    def note_bags(self, args: Any) -> None:
        """Note what the backward of bags makes inside itself: the bag of each index, where the forward kept none."""
        _, indices, offsets, bag_of_index, *_ = args
        if indices.numel() and not bag_of_index.numel():
            n_ids = len(indices) + 1
            number = self._add("aten._embedding_bag_backward", (n_ids,), str(offsets.dtype)[6:], offsets.element_size())
            self._books.roles[number] = WORKSPACE

    def _note_product(self, node: str, factors: Any, dim: int, n_dims: int | None) -> None:
        """Note a product's factors: the first cumulative product has all but the last, this one all but the first."""
        n_zeros = _count_zeros(factors)
        if n_zeros is None or self._n_zeros is None or n_dims is None:
            self._name(node, None)
        elif node == "ProdBackward1":
            self._name(node, n_zeros + self._n_zeros)
            shape = tuple(factors.shape)
            self._add("aten.eq", shape, "bool", 1)
            self._add("aten.sum", (*shape[:dim], 1, *shape[dim:][1:]), "int64", _INT_BYTES)
        else:
            n_zeros = self._n_zeros + _is_zero(factors, 1)
            self._name("" if n_zeros == 1 else node, n_zeros)  # of one zero the program computes the same
            if n_zeros > 1:
                self._add("aten.nonzero", (n_zeros, n_dims), "int64", _INT_BYTES)

    def _add(self, op: str, shape: tuple[int, ...], dtype: str, item_bytes: int) -> int:
        """Enter what no dispatch shows: it comes and goes here, and is read as alive as long as a formula has it."""
        books = self._books
        _, device, phase, module, *_ = books.blocks[-1]
        number = books.first + len(books.blocks)
        books.blocks.append((math.prod(shape) * item_bytes, device, phase, module, op, shape, dtype, -1))
        books.events += (number, ~number)
        return number

    def _name(self, node: str, n_zeros: int | None) -> None:
        """Say which formula began last: "", if it runs so without a mode too."""
        name = f"{node} of unknown values" if n_zeros is None else f"{node} with zeros" if n_zeros and node else node
        marks = self._books.marks
        for index in range(len(marks) - 1, -1, -1):
            position, kind, _ = marks[index]
            if kind == FORMULA:
                marks[index] = (position, FORMULA, name)
                return


def _count_zeros(tensor: Any) -> int | None:
    n_others = _count(tensor)
    return None if n_others is None else tensor.numel() - n_others


def _is_zero(vector: torch.Tensor, index: int) -> bool:
    with internals.no_dispatch_modes():
        return index < len(vector) and bool(vector[index] == 0)


def _count(tensor: Any) -> int | None:
    """How many elements are not zero, or None where that is not to be asked."""
    if type(tensor) is not torch.Tensor or not tensor.is_cpu:
        return None
    with internals.no_dispatch_modes():
        return int(torch.count_nonzero(tensor))
