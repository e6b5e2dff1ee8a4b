"""Scaled (fp8, fp4) and grouped matrix products. m, n, k as in matmul; G: groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchledger.flops.rules import Cost, counts
from torchledger.flops.tensors import read_ints

_FP4_PAIRS = getattr(torch, "float4_e2m1fn_x2", None)


def packed(t: Tensor) -> int:
    """How many numbers one element of t holds: two in the fp4 type, else one."""
    return 2 if t.dtype == _FP4_PAIRS else 1


@counts("aten._scaled_mm", "aten._scaled_mm_v2", operands=(0, 1))
def scaled_mm(result: Tensor, a: Tensor, b: Tensor, /, *_: Any, **__: Any) -> int:
    """2·m·n·k.

    As mm; the scales are element-wise.  a (m, k), b (k, n); fp4 holds two numbers of k in one element.
    """
    return 2 * result.numel() * a.shape[1] * packed(a)


@counts("aten._scaled_addmm", "aten._scaled_addmm_", operands=(1, 2), ran=False)
def scaled_addmm(result: Tensor, bias: Tensor, a: Tensor, b: Tensor, /, *_: Any, **__: Any) -> int:
    """2·m·n·k.

    As `_scaled_mm`; adding is element-wise.  a (m, k), b (k, n).
    """
    return scaled_mm(result, a, b)


@counts("aten._grouped_mm", operands=(0, 1))
def grouped_mm(result: Any, a: Tensor, b: Tensor, offs: Tensor | None = None, /, *_: Any, **__: Any) -> int | Cost:
    """2·G·m·n·k, 2·offs[-1]·n·k, 2·m·offs[-1]·k or 2·m·n·offs[-1].

    a (G, m, k) @ b (G, k, n): G products. Where one operand lacks the G, ``offs`` says where each group ends along
    that operand's other dimension: along m for a (M, k) @ b (G, k, n), along n for a (G, m, k) @ b (k, N), along k for
    a (m, K) @ b (K, n). Rows past the last offset are not computed. Where offsets cannot be read, the whole dimension
    is an upper bound.
    """
    k = a.shape[-1] * packed(a)
    if a.dim() == 3 and b.dim() == 3:
        return 2 * a.shape[0] * a.shape[1] * k * b.shape[-1]
    ends = read_ints(offs)
    if a.dim() == 2 and b.dim() == 3:
        rows = ends[-1] if ends else a.shape[0]
        flops = 2 * rows * k * b.shape[-1]
    elif a.dim() == 3:
        columns = ends[-1] if ends else b.shape[-1]
        flops = 2 * a.shape[1] * k * columns
    else:
        depth = ends[-1] * packed(a) if ends else k
        flops = 2 * a.shape[0] * depth * b.shape[-1]
    return flops if ends else Cost(flops, quality="upper_bound")


@counts("aten._scaled_grouped_mm", operands=(0, 1), ran=False)
def scaled_grouped_mm(
    result: Tensor, a: Tensor, b: Tensor, scale_a: Any, scale_b: Any, offs: Tensor | None = None, /, *_: Any, **__: Any
) -> int | Cost:
    """2·G·m·n·k, 2·offs[-1]·n·k, 2·m·offs[-1]·k or 2·m·n·offs[-1].

    As `_grouped_mm`; the scales are element-wise.
    """
    return grouped_mm(result, a, b, offs)


@counts("aten._scaled_grouped_mm_v2", operands=(0, 1), ran=False)
def scaled_grouped_mm_v2(
    result: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Any,
    recipe_a: Any,
    swizzle_a: Any,
    scale_b: Any,
    recipe_b: Any,
    swizzle_b: Any,
    offs: Tensor | None = None,
    /,
    *_: Any,
    **__: Any,
) -> int | Cost:
    """2·G·m·n·k, 2·offs[-1]·n·k, 2·m·offs[-1]·k or 2·m·n·offs[-1].

    As `_grouped_mm`; the scales are element-wise.
    """
    return grouped_mm(result, a, b, offs)
