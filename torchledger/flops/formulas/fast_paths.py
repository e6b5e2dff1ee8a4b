"""Fused layers: what eval and no_grad turn MultiheadAttention and TransformerEncoderLayer into, and fused losses.

B: batch; T: length; N: tokens (B·T, or fewer in a nested input); D: model width; F: feed-forward width. The projections
of a nested input run over its N tokens, its attention over squares padded to the longest length; so they are counted.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchledger.flops.costs import as_cost, scale
from torchledger.flops.rules import Cost, Part, counts
from torchledger.flops.tensors import components


def tokens_and_pairs(x: Tensor) -> tuple[int, int]:
    """N, and the (query, key) pairs B·T·T that attention over x (B, T, D) computes, T the longest length."""
    if x.is_nested:
        lengths = [size[0] for size in components(x)]
        return sum(lengths), len(lengths) * max(lengths, default=0) ** 2
    b, t = x.shape[:2]
    return b * t, b * t * t


def attention_parts(n: int, d: int, qkv_weight: Tensor, proj_weight: Tensor) -> tuple[Part, Part]:
    """2·N·D·3D for the projections of queries, keys and values, 2·N·D² for the output's."""
    return Part(qkv_weight, "forward", 2 * n * d * 3 * d), Part(proj_weight, "forward", 2 * n * d * d)


def fused_cost(pairs: int, d: int, parts: tuple[Part, ...]) -> Cost:
    """The products with weights, and 4·pairs·D for scores and values of all heads together."""
    return Cost(sum(part.flops for part in parts) + 4 * pairs * d, parts=parts)


@counts("aten._native_multi_head_attention", operands=(5, 7))
def native_multi_head_attention(
    y: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d: int,
    heads: int,
    qkv_weight: Tensor,
    qkv_bias: Any,
    proj_weight: Tensor,
    /,
    *_: Any,
    **__: Any,
) -> Cost:
    """2·N·D·3D + 4·B·T·T·D + 2·N·D².

    Projections in, scores and values, projection out. Queries, keys and values have one shape.  q (B, T, D).
    """
    n, pairs = tokens_and_pairs(q)
    return fused_cost(pairs, d, attention_parts(n, d, qkv_weight, proj_weight))


@counts("aten._triton_multi_head_attention", operands=(5, 7), ran=False)
def triton_multi_head_attention(y: Any, *args: Any, **_: Any) -> Cost:
    """2·N·D·3D + 4·B·T·T·D + 2·N·D².

    As `_native_multi_head_attention`.
    """
    return native_multi_head_attention(y, *args)


@counts("aten._transformer_encoder_layer_fwd", operands=(3, 5, 14, 16))
def transformer_encoder_layer_fwd(
    y: Any,
    x: Tensor,
    d: int,
    heads: int,
    qkv_weight: Tensor,
    qkv_bias: Any,
    proj_weight: Tensor,
    proj_bias: Any,
    gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Any,
    norm_bias_1: Any,
    norm_weight_2: Any,
    norm_bias_2: Any,
    ffn_weight_1: Tensor,
    ffn_bias_1: Any,
    ffn_weight_2: Tensor,
    /,
    *_: Any,
    **__: Any,
) -> Cost:
    """2·N·D·3D + 4·B·T·T·D + 2·N·D² + 4·N·D·F.

    Multi-head attention, then two linear layers from D to F and back.  x (B, T, D).
    """
    n, pairs = tokens_and_pairs(x)
    attention = attention_parts(n, d, qkv_weight, proj_weight)
    ffn = [Part(w, "forward", 2 * n * w.numel()) for w in (ffn_weight_1, ffn_weight_2)]
    return fused_cost(pairs, d, (*attention, *ffn))


@counts("torch_nn._linear_cross_entropy_batch_chunked", operands=(0, 1))
def linear_cross_entropy(y: Any, x: Tensor, w: Tensor, /, *args: Any, **_: Any) -> Cost:
    """2·N·D·V, and as much for each of the input's and the weight's gradient that is asked for.

    The forward of a linear layer and its cross entropy, chunk by chunk, computes the gradients as well; backward only
    scales them.  x (N, D), w (V, D).
    """
    once = as_cost(scale(2 * x.numel() * w.shape[0], x.dtype))
    kinds = [kind for kind, asked in (("input_grad", args[-3]), ("weight_grad", args[-2])) if asked]
    parts = tuple(Part(w, kind, once.flops) for kind in ("forward", *kinds))
    return Cost(once.flops * len(parts), parts=parts, quality=once.quality)


@counts("torch_nn._linear_cross_entropy_batch_chunked_no_reduction", operands=(0, 1))
def linear_cross_entropy_no_reduction(y: Any, x: Tensor, w: Tensor, /, *_: Any, **__: Any) -> int | Cost:
    """2·N·D·V.

    The logits, chunk by chunk; backward computes them again, op by op.  x (N, D), w (V, D).
    """
    return scale(2 * x.numel() * w.shape[0], x.dtype)
