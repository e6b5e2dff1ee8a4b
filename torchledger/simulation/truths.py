"""What is assumed of bools that nobody knows: False, but for what no sound training run has, and what follows from it.

No value is taken for infinite or for nan, so ``torch.isfinite(loss)`` holds; and what is not False is True, so that a
program that asks the same question in two ways gets one answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
_Tensor = torch.Tensor
_BOTH = {aten.mul, aten.bitwise_and, aten.logical_and}
_EITHER = {aten.bitwise_or, aten.logical_or}
_NOT = {aten.bitwise_not, aten.logical_not}
_SAME = {
    aten.all,
    aten.any,
    aten.clone,
    aten._to_copy,
    aten.index,
    aten.index_select,
    aten.gather,
    aten.amin,
    aten.amax,
}
_ZERO_TAKES = {aten.bitwise_and, aten.logical_and, aten.bitwise_and_, aten.logical_and_}
_TRUE_TAKES = {aten.bitwise_or, aten.logical_or, aten.bitwise_or_, aten.logical_or_}


def is_taken_for_true(packet: Any, args: Any, holds: Callable[[Any], bool]) -> bool:
    """Whether the bools that an op gives are taken for True.

    Args:
        packet: The op.
        args: Its arguments, of which some are not known.
        holds: Says of a bool tensor whether it is true throughout: known, or taken for it.
    """
    if packet is aten.isfinite or packet is aten._is_all_true:  # the latter is how distributions validate
        return True
    if packet is aten.eq:
        return _is_same(args[0], args[1])
    if packet is aten.ne:
        return isinstance(args[1], float) and not math.isfinite(args[1])
    if packet in _NOT:
        return not holds(args[0])
    if packet in _BOTH:
        return holds(args[0]) and holds(args[1])
    if packet in _EITHER:
        return holds(args[0]) or holds(args[1])
    return packet in _SAME and holds(args[0])


def find_absorbing(packet: Any, known: list[torch.Tensor | None]) -> bool | None:
    """What a logical op gives although one operand is not known: ``False & x``, ``True | x``; else None.

    Args:
        packet: The op.
        known: The values of its operands; None where they are not known.

    >>> find_absorbing(aten.logical_or, [None, torch.tensor([True])])
    True
    """
    for values in known:
        if values is None or not values.numel():
            continue
        if packet in _ZERO_TAKES and not values.any():
            return False
        if packet in _TRUE_TAKES and values.dtype is torch.bool and values.all():
            return True
    return None


def _is_same(one: Any, other: Any) -> bool:
    """Whether two operands are one tensor."""
    return (
        isinstance(other, _Tensor)
        and one.untyped_storage() is other.untyped_storage()
        and one.stride() == other.stride()
        and one.storage_offset() == other.storage_offset()
    )
