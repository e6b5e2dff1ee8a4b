"""What Inductor and distributed programs call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flops.counting import Row, meta

aten = torch.ops.aten


def t(*shape: int) -> Tensor:
    return torch.ones(*shape)


def mkl_linear() -> Any:
    x, w = t(8, 16), t(4, 16)
    return torch.ops.mkl._mkl_linear(x, torch.ops.mkl._mkl_reorder_linear_weight(w, 8), w, None, 8)


def pointwise_conv(other: bool) -> Any:
    x, w = t(1, 3, 8, 8), t(4, 3, 3, 3)
    shape = ([0, 0], [1, 1], [1, 1], 1)
    if other:
        return torch.ops.mkldnn._convolution_pointwise(x, t(1, 4, 6, 6), w, None, *shape, "add", None, None, [], None)
    return torch.ops.mkldnn._convolution_pointwise(x, w, None, *shape, "none", [], "")


def pointwise_conv_inplace() -> Any:
    return torch.ops.mkldnn._convolution_pointwise_(
        t(1, 4, 6, 6), t(1, 3, 8, 8), t(4, 3, 3, 3), None, [0, 0], [1, 1], [1, 1], 1, "add", None, None, [], None
    )


def pointwise_conv_transpose() -> Any:
    return torch.ops.mkldnn._convolution_transpose_pointwise(
        t(1, 8, 10, 10), t(8, 2, 3, 3), None, [0, 0], [0, 0], [1, 1], [1, 1], 1, "none", [], ""
    )


ROWS = [
    # 8 tokens from 16 to 4
    Row("mkl._mkl_linear", 1024, mkl_linear),
    Row(
        "mkldnn._linear_pointwise",
        1024,
        lambda: torch.ops.mkldnn._linear_pointwise(t(8, 16), t(4, 16), t(4), "relu", [], ""),
    ),
    Row("mkldnn._convolution_pointwise", 7776, lambda: pointwise_conv(False)),
    Row("mkldnn._convolution_pointwise", 7776, lambda: pointwise_conv(True)),
    Row("mkldnn._convolution_pointwise_", 7776, pointwise_conv_inplace),
    # x (1, 8, 10, 10), w (8, 2, 3, 3): 2·100·144
    Row("mkldnn._convolution_transpose_pointwise", 28_800, pointwise_conv_transpose),
    # (8, 16) @ (16, 4) + (8, 2) @ (2, 4)
    Row(
        "inductor._mm_plus_mm",
        1152,
        lambda: torch.ops.inductor._mm_plus_mm(t(8, 16), t(16, 4), t(8, 2), t(2, 4), t(8, 4)),
    ),
    Row(
        "flex_gemm", 1024, lambda: (None, aten.addmm.default, None, (meta(4), meta(8, 16), meta(16, 4)), {}), run=False
    ),
    Row("flex_gemm", 240, lambda: (None, aten.bmm.default, None, (meta(2, 3, 4), meta(2, 4, 5)), {}), run=False),
    Row(
        "flex_gemm",
        6144,
        lambda: (None, aten._grouped_mm.default, None, (meta(3, 8, 16), meta(3, 16, 8)), {}),
        run=False,
    ),
    # 4 ranks of 8 rows each: 2·32·16·(4 + 5)
    *(
        Row(
            f"symm_mem.{name}",
            9216,
            lambda: ((None, [meta(32, 4), meta(32, 5)]), meta(8, 16), [meta(16, 4), meta(16, 5)], 0, "group"),
            run=False,
        )
        for name in ("fused_all_gather_matmul", "fused_all_gather_scaled_matmul")
    ),
    *(
        Row(f"symm_mem.{name}", 1024, lambda: (meta(2, 4), meta(8, 16), meta(16, 4), "sum", 0, "group"), run=False)
        for name in ("fused_matmul_reduce_scatter", "fused_scaled_matmul_reduce_scatter")
    ),
    Row("symm_mem._async_input_mm", 1024, lambda: (meta(8, 4), meta(8, 16), meta(16, 4), None, 0), run=False),
]
