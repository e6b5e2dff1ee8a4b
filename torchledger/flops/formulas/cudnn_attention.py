"""cuDNN's attention, (B, H, S, D) or packed (N, H, D), and PyTorch's variable-length ops. Letters as in attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torchledger.flops.formulas.attention import CostOfPairs, backward_cost, flag, forward_cost, sdpa_cost
from torchledger.flops.formulas.packed_attention import Mask, Packing, attention_cost, flash_mask
from torchledger.flops.rules import Cost, counts


def cudnn_cost(cost: CostOfPairs, q: Tensor, k: Tensor, v: Tensor, packing: Packing, causal: bool) -> Cost:
    """``cost`` over (B, H, S, D), causal to the upper left, or over packed (N, H, D) sequences."""
    if packing.ends_q is None:
        return sdpa_cost(cost, q, k, v, causal)
    return attention_cost(cost, q, k, v, packing, Mask(right=0 if causal else None, lower_right=False))


@counts("aten._cudnn_attention_forward", operands=(0, 1, 2), ran=False)
def cudnn_forward(
    y: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Any,
    ends_q: Tensor | None,
    ends_k: Tensor | None,
    max_q: Any,
    max_k: Any,
    /,
    *args: Any,
    **_: Any,
) -> Cost:
    """2·H·Σ Sq·Sk·(D + Dv).

    The sum goes over the batch, or over the packed sequences.  q (B, H, Sq, D) or packed (N, H, D).
    """
    return cudnn_cost(forward_cost, q, k, v, Packing(ends_q, ends_k, max_q, max_k), flag(args, 2))


@counts("aten._cudnn_attention_forward_no_dropout_inplace", operands=(1, 2, 3), ran=False)
def cudnn_forward_inplace(
    lse: Any,
    y: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends_q: Tensor | None,
    ends_k: Tensor | None,
    max_q: Any,
    max_k: Any,
    causal: bool = False,
    /,
    **kwargs: Any,
) -> Cost:
    """2·H·Σ Sq·Sk·(D + Dv).

    As `_cudnn_attention_forward`, with the output given first.
    """
    packing = Packing(ends_q, ends_k, max_q, max_k, kwargs.get("seqused_k"))
    return cudnn_cost(forward_cost, q, k, v, packing, causal)


@counts("aten._cudnn_attention_backward", operands=(1, 2, 3), ran=False)
def cudnn_backward(grads: Any, gy: Tensor, q: Tensor, k: Tensor, v: Tensor, /, *args: Any, **_: Any) -> Cost:
    """2·H·Σ Sq·Sk·(3·D + 2·Dv).

    2·H·Σ Sq·Sk·D of it is the score product, run again.  Shapes as forward.
    """
    ends_q, ends_k, max_q, max_k = args[5:9]
    return cudnn_cost(backward_cost, q, k, v, Packing(ends_q, ends_k, max_q, max_k), flag(args, 10))


def varlen_mask(causal: bool, window: Sequence[int] | None) -> Mask:
    """The band of ``torch.nn.attention.varlen``, which is flash attention's."""
    left, right = window if window else (None, None)
    return flash_mask(causal, {"window_size_left": left, "window_size_right": right})


@counts("torch_attn._varlen_attn", operands=(0, 1, 2), ran=False)
def varlen(
    y: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends_q: Tensor,
    ends_k: Tensor | None,
    max_q: Any,
    max_k: Any,
    causal: bool = False,
    scale: float | None = None,
    window: Sequence[int] | None = None,
    gqa: bool = False,
    used_k: Tensor | None = None,
    /,
    *_: Any,
    **__: Any,
) -> Cost:
    """2·H·Σ Sq·Sk·(D + Dv).

    The sum goes over the packed sequences.  q (N, H, D), k (N, Hk, D), v (N, Hk, Dv).
    """
    packing = Packing(ends_q, ends_k, max_q, max_k, used_k)
    return attention_cost(forward_cost, q, k, v, packing, varlen_mask(causal, window))


@counts("torch_attn._varlen_attn_out", operands=(1, 2, 3), ran=False)
def varlen_out(lse: Any, y: Tensor, /, *args: Any, **kwargs: Any) -> Cost:
    """2·H·Σ Sq·Sk·(D + Dv).

    As `_varlen_attn`, with the output given first.
    """
    return varlen(lse, *args, **kwargs)


@counts("torch_attn._varlen_attn_backward", operands=(1, 2, 3), ran=False)
def varlen_backward(
    grads: Any,
    gy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Any,
    lse: Any,
    ends_q: Tensor,
    ends_k: Tensor | None,
    max_q: Any,
    max_k: Any,
    causal: bool,
    rng_state: Any,
    scale: float | None = None,
    window: Sequence[int] | None = None,
    /,
    **_: Any,
) -> Cost:
    """2·H·Σ Sq·Sk·(3·D + 2·Dv).

    2·H·Σ Sq·Sk·D of it is the score product, run again.  Shapes as forward.
    """
    packing = Packing(ends_q, ends_k, max_q, max_k)
    return attention_cost(backward_cost, q, k, v, packing, varlen_mask(causal, window))
