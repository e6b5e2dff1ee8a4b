"""Attention kernels that take (B, S, H, D) or packed sequences."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from flops.counting import Row, meta
from flops.rows.attention import EXCESS, FORWARD, qkv

with suppress(ImportError):
    import torch.nn.attention.varlen


def ends(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# Two sequences, 5 and 9 long, 4 heads, width 16: 2·4·(25 + 81)·32 forward, ·80 backward, ·16 scores again.
# Causal pairs are 15 + 45: the excess is 46 pairs, 2·4·46·32 and twice that.
PACKED, PACKED_BACKWARD, PACKED_RESCORE = 27_136, 67_840, 13_568
PACKED_EXCESS, PACKED_EXCESS_BACKWARD = 11_776, 23_552
ENDS = (0, 5, 14)


def packed(*lead: int) -> tuple[Tensor, Tensor, Tensor]:
    return meta(*lead, 14, 4, 16), meta(*lead, 14, 4, 16), meta(*lead, 14, 4, 16)


# q (1, 64, 2, 16) in (B, S, H, D): 2·2·64²·32. A causal window of 16 leaves 904 pairs, causal alone 2,080.
SQUARE = 524_288
WINDOW_EXCESS = 408_576  # 2·2·32·(4,096 − 904)
CAUSAL_EXCESS = 258_048  # 2·2·32·(4,096 − 2,080)


def bshd() -> tuple[Tensor, Tensor, Tensor]:
    return meta(1, 64, 2, 16), meta(1, 64, 2, 16), meta(1, 64, 2, 16)


def flash(q: Tensor, k: Tensor, v: Tensor, cumulative: Tensor | None, longest: int, causal: bool, **kwargs: Any) -> Any:
    return (None, q, k, v, cumulative, cumulative, longest, longest, 0.0, causal, False, kwargs)


def flash_grads(
    q: Tensor, k: Tensor, v: Tensor, cumulative: Tensor | None, longest: int, causal: bool, **kwargs: Any
) -> Any:
    return (None, q, q, k, v, q, None, cumulative, cumulative, longest, longest, 0.0, causal, None, None, kwargs)


FLASH = [
    Row("aten._flash_attention_forward", SQUARE, lambda: flash(*bshd(), None, 64, False), run=False),
    Row(
        "aten._flash_attention_forward", SQUARE, lambda: flash(*bshd(), None, 64, True), excess=CAUSAL_EXCESS, run=False
    ),
    Row(
        "aten._flash_attention_forward",
        SQUARE,
        lambda: flash(*bshd(), None, 64, True, window_size_left=15, window_size_right=0),
        excess=WINDOW_EXCESS,
        run=False,
    ),
    # one query of 64 keys sees them all: causal is aligned to the lower right
    Row(
        "aten._flash_attention_forward",
        8192,
        lambda: flash(meta(1, 1, 2, 16), meta(1, 64, 2, 16), meta(1, 64, 2, 16), None, 64, True),
        run=False,
    ),
    Row("aten._flash_attention_forward", PACKED, lambda: flash(*packed(), ends(*ENDS), 9, False), run=False),
    Row(
        "aten._flash_attention_forward",
        PACKED,
        lambda: flash(*packed(), ends(*ENDS), 9, True),
        excess=PACKED_EXCESS,
        run=False,
    ),
    # lengths that cannot be read: 2 of the longest, 2·4·2·81·32
    Row(
        "aten._flash_attention_forward",
        41_472,
        lambda: flash(*packed(), meta(3, dtype=torch.int32), 9, False),
        quality="upper_bound",
        run=False,
    ),
    # of the keys 3 and 4 are used: 2·4·(5·3 + 9·4)·32
    Row(
        "aten._flash_attention_forward",
        13_056,
        lambda: flash(*packed(), ends(*ENDS), 9, False, seqused_k=ends(3, 4)),
        run=False,
    ),
    # dense, 40 of 64 keys used: 2·2·64·40·32
    Row(
        "aten._flash_attention_forward",
        327_680,
        lambda: flash(*bshd(), None, 64, False, seqused_k=ends(40)),
        run=False,
    ),
    Row(
        "aten._flash_attention_forward_no_dropout_inplace",
        PACKED,
        lambda: (None, meta(14, 4, 16), *flash(*packed(), ends(*ENDS), 9, False)[1:]),
        run=False,
    ),
    Row(
        "aten._flash_attention_backward",
        PACKED_BACKWARD,
        lambda: flash_grads(*packed(), ends(*ENDS), 9, True),
        rescore=PACKED_RESCORE,
        excess=PACKED_EXCESS_BACKWARD,
        run=False,
    ),
    # 2·2·64²·80, 2·2·64²·16 again
    Row(
        "aten._flash_attention_backward",
        1_310_720,
        lambda: flash_grads(*bshd(), None, 64, False),
        rescore=262_144,
        run=False,
    ),
]


def efficient(q: Tensor, k: Tensor, v: Tensor, cumulative: Tensor | None, mask: int, **kwargs: Any) -> Any:
    return (None, q, k, v, None, cumulative, cumulative, 9, 9, 0.0, mask, False, kwargs)


EFFICIENT = [
    Row("aten._efficient_attention_forward", SQUARE, lambda: efficient(*bshd(), None, 0), run=False),
    Row(
        "aten._efficient_attention_forward",
        SQUARE,
        lambda: efficient(*bshd(), None, 1),
        excess=CAUSAL_EXCESS,
        run=False,
    ),
    Row(
        "aten._efficient_attention_forward",
        SQUARE,
        lambda: efficient(*bshd(), None, 1, window_size=16),
        excess=WINDOW_EXCESS,
        run=False,
    ),
    # 2 queries, 4 keys: upper left leaves 1 + 2 pairs of 8, lower right 3 + 4; 2·2·32 a pair
    Row(
        "aten._efficient_attention_forward",
        1024,
        lambda: efficient(meta(1, 2, 2, 16), meta(1, 4, 2, 16), meta(1, 4, 2, 16), None, 1),
        excess=640,
        run=False,
    ),
    Row(
        "aten._efficient_attention_forward",
        1024,
        lambda: efficient(meta(1, 2, 2, 16), meta(1, 4, 2, 16), meta(1, 4, 2, 16), None, 2),
        excess=128,
        run=False,
    ),
    Row("aten._efficient_attention_forward", PACKED, lambda: efficient(*packed(1), ends(*ENDS), 0), run=False),
    Row(
        "aten._efficient_attention_backward",
        PACKED_BACKWARD,
        lambda: (
            None,
            *packed(1)[:1],
            *packed(1),
            None,
            packed(1)[0],
            ends(*ENDS),
            ends(*ENDS),
            9,
            9,
            None,
            0.0,
            None,
            None,
            1,
            False,
        ),
        rescore=PACKED_RESCORE,
        excess=PACKED_EXCESS_BACKWARD,
        run=False,
    ),
]

CUDNN = [
    Row("aten._cudnn_attention_forward", FORWARD, lambda: (None, *qkv(), None, None, None, 32, 32, True), run=False),
    Row(
        "aten._cudnn_attention_forward",
        FORWARD,
        lambda: (None, *qkv(), None, None, None, 32, 32, True, 0.0, True),
        excess=EXCESS,
        run=False,
    ),
    Row(
        "aten._cudnn_attention_forward",
        PACKED,
        lambda: (None, *packed(), None, ends(*ENDS), ends(*ENDS), 9, 9, True, 0.0, True),
        excess=PACKED_EXCESS,
        run=False,
    ),
    Row(
        "aten._cudnn_attention_forward_no_dropout_inplace",
        PACKED,
        lambda: (None, packed()[0], *packed(), ends(*ENDS), ends(*ENDS), 9, 9),
        run=False,
    ),
    Row(
        "aten._cudnn_attention_backward",
        PACKED_BACKWARD,
        lambda: (
            None,
            packed()[0],
            *packed(),
            packed()[0],
            None,
            None,
            None,
            None,
            ends(*ENDS),
            ends(*ENDS),
            9,
            9,
            0.0,
            True,
        ),
        rescore=PACKED_RESCORE,
        excess=PACKED_EXCESS_BACKWARD,
        run=False,
    ),
    Row("torch_attn._varlen_attn", PACKED, lambda: (None, *packed(), ends(*ENDS), ends(*ENDS), 9, 9), run=False),
    Row("torch_attn._varlen_attn", PACKED, lambda: (None, *packed(), ends(*ENDS), None, 9, 9), run=False),
    # a window of 3 before and none after leaves 1+2+3+4+4 of 25 pairs and 1+2+3+6·4 of 81
    Row(
        "torch_attn._varlen_attn",
        PACKED,
        lambda: (None, *packed(), ends(*ENDS), ends(*ENDS), 9, 9, False, None, [3, 0]),
        excess=15_872,  # 2·4·32·(106 − 14 − 30)
        run=False,
    ),
    Row(
        "torch_attn._varlen_attn_out",
        PACKED,
        lambda: (None, packed()[0], *packed(), ends(*ENDS), ends(*ENDS), 9, 9, True),
        excess=PACKED_EXCESS,
        run=False,
    ),
    Row(
        "torch_attn._varlen_attn_backward",
        PACKED_BACKWARD,
        lambda: (None, packed()[0], *packed(), packed()[0], None, ends(*ENDS), ends(*ENDS), 9, 9, True, None),
        rescore=PACKED_RESCORE,
        excess=PACKED_EXCESS_BACKWARD,
        run=False,
    ),
]

ROWS = [*FLASH, *EFFICIENT, *CUDNN]
