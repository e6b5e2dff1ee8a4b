"""How often a parameter's elements are used by a product: multiply-adds, from the shapes of its operands.

The formulas say what a product costs. These say, without them, how many rows a weight met, so that a formula that is
missing or wrong shows as such and not as a weight that was used more or less often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from torch import Tensor

Uses = Callable[[Sequence[Any], Any, int], int]
"""(the op's arguments, its result, the position of the parameter) -> multiply-adds."""


def _of_matrices(left: int) -> Uses:
    def count(args: Sequence[Any], out: Any, position: int) -> int:
        weight: Tensor = args[position]
        other: Tensor = args[2 * left + 1 - position]
        inner = weight.shape[-1] if position == left else weight.shape[-2]
        batch = weight.numel() // (weight.shape[-1] * weight.shape[-2] or 1)
        return weight.numel() * other.numel() // (inner * batch or 1)

    return count


def _of_vector(left: int) -> Uses:
    def count(args: Sequence[Any], out: Any, position: int) -> int:
        return int(args[left].numel())  # every element of the matrix meets one of the vector, and the other way round

    return count


def _of_linear(args: Sequence[Any], out: Any, position: int) -> int:
    x, weight = args[0], args[1]
    return int(weight.numel() * x.numel() // (x.shape[-1] or 1))


def _of_convolution(args: Sequence[Any], out: Any, position: int) -> int:
    x, weight, transposed = args[0], args[1], bool(args[6])
    places: Tensor = x if transposed else out
    return int(weight.numel() * places.numel() // (places.shape[1] or 1))


def _of_three(args: Sequence[Any], out: Any, position: int) -> int:
    """Of a bilinear layer: each element of the weight (O, I1, I2) meets one of each of the rows of x (N, I1)."""
    tensors, expanded = args[:3], args[3:6]
    sizes = [1] * (tensors[0].dim() + len(expanded[0]))
    for tensor, absent in zip(tensors, expanded, strict=True):
        present = [d for d in range(len(sizes)) if d not in absent]
        for d, size in zip(present, tensor.shape, strict=True):
            sizes[d] = max(sizes[d], size)
    return prod(sizes)


USES: dict[str, Uses] = {
    "aten.mm": _of_matrices(0),
    "aten.addmm": _of_matrices(1),
    "aten.addmm_": _of_matrices(1),
    "aten._addmm_activation": _of_matrices(1),
    "aten.bmm": _of_matrices(0),
    "aten.baddbmm": _of_matrices(1),
    "aten.baddbmm_": _of_matrices(1),
    "aten.mv": _of_vector(0),
    "aten.addmv": _of_vector(1),
    "aten.addmv_": _of_vector(1),
    "aten.linear": _of_linear,
    "aten.convolution": _of_convolution,
    "aten._trilinear": _of_three,
}
"""By op packet; of other products half the FLOPs stand for the multiply-adds."""


_BATCHED = frozenset(("aten.bmm", "aten.baddbmm", "aten.baddbmm_", "aten._grouped_mm", "aten._scaled_grouped_mm"))


def count_matrices(name: str, args: Sequence[Any], position: int) -> tuple[int, ...]:
    """How many matrices a batched product takes its operand at ``position`` for, broadcast ones once; else nothing.

    >>> import torch
    >>> count_matrices("aten.bmm", (torch.ones(3, 2, 4), torch.ones(3, 4, 5)), 1)
    (3,)
    >>> count_matrices("aten.bmm", (torch.ones(3, 2, 4), torch.ones(1, 4, 5).expand(3, 4, 5)), 1)
    (1,)
    """
    if name not in _BATCHED or args[position].dim() < 3 or args[position].is_nested:
        return ()
    operand: Tensor = args[position]
    return (int(operand.shape[0]) if operand.stride(0) else 1,)


def count_uses(name: str, args: Sequence[Any], out: Any, position: int, flops: int) -> int:
    """Multiply-adds of the parameter at ``position``, from shapes where the op is in `USES`, else ``flops`` / 2.

    A complex multiply-add is four real ones.

    >>> import torch
    >>> x, w = torch.ones(5, 4), torch.ones(4, 3)
    >>> count_uses("aten.mm", (x, w), x @ w, 1, 0)  # 12 elements, 5 rows
    60
    """
    uses = USES.get(name)
    if uses is None or not args[position].dim() or any(isinstance(arg, Tensor) and arg.is_nested for arg in args):
        return flops // 2
    return uses(args, out, position) * (4 if args[position].is_complex() else 1)
