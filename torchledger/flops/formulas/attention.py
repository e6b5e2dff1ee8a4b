"""Attention fused behind scaled_dot_product_attention. B: batch; H: query heads; D, Dv: key and value widths.

Tensors are (B, H, S, D). Sq queries meet Sk keys in H heads, the query's, also where keys and values have fewer
(grouped queries). The full square counts; a causal flag, aligned to the upper left as PyTorch documents it (query i
sees keys 0..i), gives ``causal_excess``. A mask given as a tensor is not looked into.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from torch import Tensor

from torchledger.flops.pairs import Pairs, causal_pairs
from torchledger.flops.rules import Cost, counts
from torchledger.flops.tensors import components

CostOfPairs = Callable[[int, Pairs, int, int], Cost]


def forward_cost(heads: int, pairs: Pairs, d: int, dv: int) -> Cost:
    """2·H·pairs·(D + Dv): the score product over D, then the value product over Dv."""
    each = 2 * heads * (d + dv)
    return Cost(each * pairs.full, causal_excess=each * (pairs.full - pairs.real), quality=pairs.quality)


def backward_cost(heads: int, pairs: Pairs, d: int, dv: int) -> Cost:
    """2·H·pairs·(3·D + 2·Dv): scores again (D); gradients of values and weights (Dv), of queries and keys (D)."""
    each = 4 * heads * (d + dv)
    rescore = 2 * heads * pairs.full * d
    return Cost(each * pairs.full + rescore, rescore, each * (pairs.full - pairs.real), quality=pairs.quality)


def sdpa_cost(cost: CostOfPairs, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Cost:
    """``cost`` over q (..., Sq, D), k (..., Sk, D), v (..., Sk, Dv): Sq·Sk pairs for each of q's batches and heads.

    Nested q, k, v (B, H, S, D): the sum over the components.
    """
    if q.is_nested:
        return nested_cost(cost, q, k, v, causal)
    *batch, sq, d = q.shape
    sk, dv = v.shape[-2:]
    return cost(prod(batch), Pairs(sq * sk, causal_pairs(sq, sk) if causal else sq * sk), d, dv)


def nested_cost(cost: CostOfPairs, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Cost:
    """`sdpa_cost` for nested tensors, whose components are (H, S, D)."""
    queries, values = components(q), components(v)
    squares = [(x[1], y[1]) for x, y in zip(queries, values, strict=True)]
    full = sum(sq * sk for sq, sk in squares)
    real = sum(causal_pairs(sq, sk) for sq, sk in squares) if causal else full
    heads, _, d = queries[0]
    return cost(heads, Pairs(full, real), d, values[0][2])


def flag(args: Sequence[Any], position: int) -> bool:
    """The boolean at ``position``, False where trailing defaults were left out."""
    return len(args) > position and bool(args[position])


@counts("aten._scaled_dot_product_flash_attention_for_cpu", operands=(0, 1, 2))
def flash_for_cpu(result: Any, q: Tensor, k: Tensor, v: Tensor, /, *args: Any, **_: Any) -> Cost:
    """2·B·H·Sq·Sk·(D + Dv)."""
    return sdpa_cost(forward_cost, q, k, v, flag(args, 1))


@counts("aten._scaled_dot_product_flash_attention", operands=(0, 1, 2), ran=False)
def flash(result: Any, q: Tensor, k: Tensor, v: Tensor, /, *args: Any, **_: Any) -> Cost:
    """2·B·H·Sq·Sk·(D + Dv).

    The overload for fp8 has three scales before the dropout.
    """
    quantized = len(args) > 3 and not isinstance(args[0], float)
    return sdpa_cost(forward_cost, q, k, v, flag(args, 4 if quantized else 1))


@counts(
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    operands=(0, 1, 2),
    ran=False,
)
def efficient(result: Any, q: Tensor, k: Tensor, v: Tensor, /, *args: Any, **_: Any) -> Cost:
    """2·B·H·Sq·Sk·(D + Dv)."""
    return sdpa_cost(forward_cost, q, k, v, flag(args, 3))


@counts(
    "aten._scaled_dot_product_fused_attention_overrideable",
    "aten._scaled_dot_product_attention_math_for_mps",
    operands=(0, 1, 2),
    ran=False,
)
def overrideable(result: Any, q: Tensor, k: Tensor, v: Tensor, /, *args: Any, **_: Any) -> Cost:
    """2·B·H·Sq·Sk·(D + Dv)."""
    return sdpa_cost(forward_cost, q, k, v, flag(args, 2))


@counts("aten._triton_scaled_dot_attention", operands=(0, 1, 2), ran=False)
def triton_attention(result: Any, q: Tensor, k: Tensor, v: Tensor, /, *_: Any, **__: Any) -> Cost:
    """2·B·H·Sq·Sk·(D + Dv).

    Never causal.
    """
    return sdpa_cost(forward_cost, q, k, v, causal=False)


@counts("aten._scaled_dot_product_flash_attention_for_cpu_backward", operands=(1, 2, 3))
def flash_for_cpu_backward(grads: Any, gy: Tensor, q: Tensor, k: Tensor, v: Tensor, /, *args: Any, **_: Any) -> Cost:
    """2·B·H·Sq·Sk·(3·D + 2·Dv).

    2·B·H·Sq·Sk·D of it is the score product, run again (see `backward_cost`).
    """
    return sdpa_cost(backward_cost, q, k, v, flag(args, 3))


@counts(
    "aten._scaled_dot_product_flash_attention_backward",
    "aten._scaled_dot_product_efficient_attention_backward",
    operands=(1, 2, 3),
    ran=False,
)
def flash_backward(grads: Any, gy: Tensor, q: Tensor, k: Tensor, v: Tensor, /, *args: Any, **_: Any) -> Cost:
    """2·B·H·Sq·Sk·(3·D + 2·Dv).

    2·B·H·Sq·Sk·D of it is the score product, run again (see `backward_cost`).
    """
    return sdpa_cost(backward_cost, q, k, v, flag(args, 7))


@counts("aten._scaled_dot_product_cudnn_attention_backward", operands=(1, 2, 3), ran=False)
def cudnn_backward(grads: Any, gy: Tensor, q: Tensor, k: Tensor, v: Tensor, /, *args: Any, **_: Any) -> Cost:
    """2·B·H·Sq·Sk·(3·D + 2·Dv).

    2·B·H·Sq·Sk·D of it is the score product, run again (see `backward_cost`).
    """
    return sdpa_cost(backward_cost, q, k, v, flag(args, 10))


@counts("aten._scaled_dot_product_fused_attention_overrideable_backward", operands=(1, 2, 3), ran=False)
def overrideable_backward(grads: Any, gy: Tensor, q: Tensor, k: Tensor, v: Tensor, /, *args: Any, **_: Any) -> Cost:
    """2·B·H·Sq·Sk·(3·D + 2·Dv).

    2·B·H·Sq·Sk·D of it is the score product, run again (see `backward_cost`).
    """
    return sdpa_cost(backward_cost, q, k, v, flag(args, 9))
