"""Attention over (B, H, S, D), packed attention, flex attention, and fused transformer layers."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from flops.counting import Row, meta

with suppress(ImportError):  # its ops are declared when it is imported; torch 2.9 has none
    import torch.nn.modules.linear_cross_entropy

aten = torch.ops.aten


def t(*shape: int) -> Tensor:
    return torch.ones(*shape)


def qkv(b: int = 2, h: int = 4, s: int = 32, d: int = 16, make: Any = meta) -> tuple[Tensor, Tensor, Tensor]:
    return make(b, h, s, d), make(b, h, s, d), make(b, h, s, d)


def backward_of(**kwargs: Any) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(make=t))
    y, lse = aten._scaled_dot_product_flash_attention_for_cpu(q.detach(), k.detach(), v.detach(), **kwargs)
    causal = kwargs.get("is_causal", False)
    aten._scaled_dot_product_flash_attention_for_cpu_backward(y, q, k, v, y, lse, 0.0, causal)


# q, k, v (2, 4, 32, 16): 2·2·4·32²·32 forward, 2·2·4·32²·80 backward, of it 2·2·4·32²·16 scores again.
# Causal pairs are 528 of 1,024: the excess is 496/1,024 of what is not scored again.
FORWARD, BACKWARD, RESCORE = 524_288, 1_310_720, 262_144
EXCESS, EXCESS_BACKWARD = 253_952, 507_904


def flex(**kwargs: Any) -> Any:
    q, k, v = (torch.ones(1, 2, 256, 16) for _ in range(3))
    return flex_attention(q, k, v, **kwargs)


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def flex_grads() -> Any:
    mask = create_block_mask(causal, 1, 1, 256, 256, device="cpu").as_tuple()
    q, k, v = qkv(1, 2, 256, 16)
    return (None, q, k, v, q, None, q, None, None, None, mask, 0.25, {}, (), ())


# q (1, 2, 256, 16): 2·2·256²·32; causal leaves 256·257/2 pairs.
FLEX = [
    Row("flex_attention", 8_388_608, flex),
    Row(
        "flex_attention",
        8_388_608,
        lambda: flex(block_mask=create_block_mask(causal, 1, 1, 256, 256, device="cpu")),
        excess=8_388_608 - 4_210_688,
    ),
    # 2·2·256²·80, 2·2·256²·16 again; excess 2·2·64·(256² − 32,896)
    Row("flex_attention_backward", 20_971_520, flex_grads, rescore=4_194_304, excess=8_355_840, run=False),
]


def encoder() -> Any:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    with torch.no_grad():
        return layer(torch.ones(2, 32, 64))


def nested_encoder() -> Any:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    padding = torch.tensor([[False] * 5 + [True] * 4, [False] * 9])
    with torch.no_grad():
        return nn.TransformerEncoder(layer, 1).eval()(torch.ones(2, 9, 64), src_key_padding_mask=padding)


def cross_entropy(reduction: str, *, weight_grad: bool = True) -> Any:
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    x, w = torch.ones(10, 16, requires_grad=True), torch.ones(50, 16, requires_grad=weight_grad)
    target = torch.zeros(10, dtype=torch.long)
    options = LinearCrossEntropyOptions(allow_retain_graph=True)
    F.linear_cross_entropy(x, w, target, reduction=reduction, options=options).sum().backward()


def multi_head() -> Any:
    attention = nn.MultiheadAttention(64, 4, batch_first=True).eval()
    x = torch.ones(2, 32, 64)
    with torch.no_grad():
        return attention(x, x, x, need_weights=False)


# 64 tokens of width 64: 2·64·64·192 in, 4·2·32²·64 attention, 2·64·64² out, 4·64·64·128 feed-forward.
FAST = [
    Row(
        "aten._native_multi_head_attention",
        2_621_440,
        multi_head,
        parts=(("forward", 1_572_864), ("forward", 524_288)),
    ),
    Row(
        "aten._triton_multi_head_attention",
        2_621_440,
        lambda: (None, meta(2, 32, 64), None, None, 64, 4, meta(192, 64), meta(192), meta(64, 64), meta(64)),
        run=False,
    ),
    Row(
        "aten._transformer_encoder_layer_fwd",
        4_718_592,
        encoder,
        parts=(("forward", 1_572_864), ("forward", 524_288), ("forward", 1_048_576), ("forward", 1_048_576)),
    ),
    # 10 tokens from 16 to 50 classes, and the gradients that the forward computes too
    Row(
        "torch_nn._linear_cross_entropy_batch_chunked",
        48_000,
        lambda: cross_entropy("mean"),
        parts=(("forward", 16_000), ("input_grad", 16_000), ("weight_grad", 16_000)),
    ),
    Row(
        "torch_nn._linear_cross_entropy_batch_chunked",
        32_000,
        lambda: cross_entropy("mean", weight_grad=False),
        parts=(("forward", 16_000), ("input_grad", 16_000)),
    ),
    # forward alone; backward's products are seen one by one
    Row("torch_nn._linear_cross_entropy_batch_chunked_no_reduction", 16_000, lambda: cross_entropy("none")),
    # 14 tokens, but squares of 9: 2·14·64·192 + 4·2·81·64 + 2·14·64² + 4·14·64·128
    Row("aten._transformer_encoder_layer_fwd", 958_976, nested_encoder),
]

DENSE = [
    Row(
        "aten._scaled_dot_product_flash_attention_for_cpu",
        FORWARD,
        lambda: F.scaled_dot_product_attention(*qkv(make=t)),
    ),
    Row(
        "aten._scaled_dot_product_flash_attention_for_cpu",
        FORWARD,
        lambda: F.scaled_dot_product_attention(*qkv(make=t), is_causal=True),
        excess=EXCESS,
    ),
    # more keys than queries, wider values: 2·2·4·8·32·(16 + 24); the upper left leaves 8·9/2 of 8·32 pairs
    Row(
        "aten._scaled_dot_product_flash_attention",
        163_840,
        lambda: (None, meta(2, 4, 8, 16), meta(2, 4, 32, 16), meta(2, 4, 32, 24), 0.0, True),
        excess=140_800,
        run=False,
    ),
    # grouped queries: 8 heads share 2
    Row(
        "aten._scaled_dot_product_flash_attention",
        4_194_304,
        lambda: (None, meta(1, 8, 64, 32), meta(1, 2, 64, 32), meta(1, 2, 64, 32)),
        run=False,
    ),
    # the fp8 overload
    Row(
        "aten._scaled_dot_product_flash_attention",
        FORWARD,
        lambda: (None, *qkv(), meta(1), None, None, 0.0, True),
        excess=EXCESS,
        run=False,
    ),
    Row("aten._scaled_dot_product_efficient_attention", FORWARD, lambda: (None, *qkv(), None, True), run=False),
    Row(
        "aten._scaled_dot_product_efficient_attention",
        FORWARD,
        lambda: (None, *qkv(), None, True, 0.0, True),
        excess=EXCESS,
        run=False,
    ),
    Row(
        "aten._scaled_dot_product_cudnn_attention",
        FORWARD,
        lambda: (None, *qkv(), None, True, 0.0, True, False),
        excess=EXCESS,
        run=False,
    ),
    Row(
        "aten._scaled_dot_product_fused_attention_overrideable",
        FORWARD,
        lambda: (None, *qkv(), None, 0.0, True),
        excess=EXCESS,
        run=False,
    ),
    Row("aten._scaled_dot_product_attention_math_for_mps", FORWARD, lambda: (None, *qkv()), run=False),
    Row("aten._triton_scaled_dot_attention", FORWARD, lambda: (None, *qkv(), 0.0), run=False),
    # 8 queries, 32 keys, values 24 wide: 2·2·4·8·32·(3·16 + 2·24), of it 2·2·4·8·32·16 again
    Row(
        "aten._scaled_dot_product_flash_attention_backward",
        393_216,
        lambda: (
            None,
            meta(2, 4, 8, 24),
            meta(2, 4, 8, 16),
            meta(2, 4, 32, 16),
            meta(2, 4, 32, 24),
            *[None] * 7,
            False,
        ),
        rescore=65_536,
        run=False,
    ),
    Row("aten._scaled_dot_product_flash_attention_for_cpu_backward", BACKWARD, backward_of, rescore=RESCORE),
    Row(
        "aten._scaled_dot_product_flash_attention_for_cpu_backward",
        BACKWARD,
        lambda: backward_of(is_causal=True),
        rescore=RESCORE,
        excess=EXCESS + EXCESS_BACKWARD,  # with the forward that it needs
    ),
    *(
        Row(
            f"aten._scaled_dot_product_{name}_backward",
            BACKWARD,
            # causal is the last argument: after gy, q, k, v come ``others`` more
            lambda others=others: (None, qkv()[0], *qkv(), *[None] * others, True),
            rescore=RESCORE,
            excess=EXCESS_BACKWARD,
            run=False,
        )
        for name, others in (
            ("flash_attention", 7),
            ("efficient_attention", 7),
            ("cudnn_attention", 10),
            ("fused_attention_overrideable", 9),
        )
    ),
]

ROWS = [*DENSE, *FLEX, *FAST]
