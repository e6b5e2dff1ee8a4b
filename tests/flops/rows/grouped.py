"""Scaled and grouped products."""

from __future__ import annotations

import torch

from flops.counting import Row, meta

aten = torch.ops.aten
BF16 = torch.bfloat16
FP8 = torch.float8_e4m3fn
FP4 = getattr(torch, "float4_e2m1fn_x2", None)


def b(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=BF16)


def ends(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def scaled_mm() -> torch.Tensor:
    one = torch.ones(())
    return torch._scaled_mm(torch.ones(16, 32).to(FP8), torch.ones(16, 32).to(FP8).t(), one, one, out_dtype=BF16)


def scaled_mm_v2() -> torch.Tensor:
    one = torch.ones(())
    a, w = torch.ones(16, 32).to(FP8), torch.ones(16, 32).to(FP8).t()
    tensorwise = torch.nn.functional.ScalingType.TensorWise
    return torch.nn.functional.scaled_mm(a, w, one, tensorwise, one, tensorwise, output_dtype=BF16)


ROWS = [
    # 2·16·16·32
    Row("aten._scaled_mm", 16384, scaled_mm),
    Row("aten._scaled_mm_v2", 16384, scaled_mm_v2),
    Row("aten._scaled_mm", 16384, lambda: (meta(16, 16), meta(16, 16, dtype=FP4), meta(16, 16, dtype=FP4)), run=False),
    Row("aten._scaled_addmm", 16384, lambda: (meta(16, 16), meta(16, 16), meta(16, 32), meta(32, 16)), run=False),
    Row("aten._scaled_addmm_", 16384, lambda: (meta(16, 16), meta(16, 16), meta(16, 32), meta(32, 16)), run=False),
    # 3 groups of (8, 16) @ (16, 8): 2·3·8·8·16
    Row("aten._grouped_mm", 6144, lambda: torch._grouped_mm(b(3, 8, 16), b(3, 16, 8))),
    # rows up to 24 of 24, in 2 groups: 2·24·8·16
    Row("aten._grouped_mm", 6144, lambda: torch._grouped_mm(b(24, 16), b(2, 16, 8), offs=ends(8, 24))),
    # of 24 rows the last 8 belong to no group
    Row("aten._grouped_mm", 4096, lambda: (None, b(24, 16), b(2, 16, 8), ends(8, 16)), run=False),
    # columns up to 24: 2·8·24·16
    Row("aten._grouped_mm", 6144, lambda: torch._grouped_mm(b(2, 8, 16), b(16, 24), offs=ends(8, 24))),
    # depth up to 24: 2·8·8·24
    Row("aten._grouped_mm", 3072, lambda: torch._grouped_mm(b(8, 24), b(24, 8), offs=ends(8, 24))),
    Row(
        "aten._grouped_mm",
        6144,
        lambda: (None, meta(24, 16), meta(2, 16, 8), meta(2, dtype=torch.int32)),
        quality="upper_bound",
        run=False,
    ),
    Row(
        "aten._scaled_grouped_mm",
        4096,
        lambda: (None, meta(24, 16), meta(2, 16, 8), meta(24), meta(2, 8), ends(8, 16)),
        run=False,
    ),
    Row(
        "aten._scaled_grouped_mm_v2",
        4096,
        lambda: (None, meta(24, 16), meta(2, 16, 8), [], [], [], [], [], [], ends(8, 16)),
        run=False,
    ),
]
