"""Matrix products, linear layers, and what is built of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flops.counting import Row, meta

aten = torch.ops.aten
BOTH = [True, True]
ALL = [True, True, True]


def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*shape).to(dtype)


def nested(*lengths: int, width: int, layout: torch.layout = torch.strided) -> Tensor:
    return torch.nested.nested_tensor([t(n, width) for n in lengths], layout=layout)


def bilinear() -> Any:
    return F.bilinear(t(8, 5), t(8, 6), t(3, 5, 6))


ROWS = [
    # (8, 16) @ (16, 4): 8·4 results of 16 multiply-adds
    Row("aten.mm", 1024, lambda: torch.mm(t(8, 16), t(16, 4))),
    Row("aten.mm", 1024, lambda: torch.mm(t(8, 16), t(16, 4), out=t(8, 4))),
    Row("aten.mm", 1024, lambda: (meta(8, 4), meta(8, 16), meta(16, 4), torch.float32), run=False),  # out_dtype
    Row("aten.mm", 0, lambda: torch.mm(t(8, 0), t(0, 4))),
    # four real products for a complex one
    Row("aten.mm", 4096, lambda: torch.mm(t(8, 16, dtype=torch.complex64), t(16, 4, dtype=torch.complex64))),
    Row("aten.mm", 1024, lambda: torch.mm(t(8, 16, dtype=torch.int64), t(16, 4, dtype=torch.int64)), quality="integer"),
    Row("aten.mm", 1024, lambda: torch.mm(t(8, 16, dtype=torch.bfloat16), t(16, 4, dtype=torch.bfloat16))),
    Row("aten.addmm", 1024, lambda: torch.addmm(t(4), t(8, 16), t(16, 4), beta=2, alpha=3)),
    Row("aten.addmm", 1024, lambda: torch.addmm(t(4), t(8, 16), t(16, 4), out=t(8, 4))),
    Row("aten.addmm", 1024, lambda: (meta(8, 4), meta(4), meta(8, 16), meta(16, 4), torch.float32), run=False),
    Row("aten.addmm_", 1024, lambda: t(8, 4).addmm_(t(8, 16), t(16, 4))),
    Row("aten._addmm_activation", 1024, lambda: torch._addmm_activation(t(4), t(8, 16), t(16, 4), use_gelu=True)),
    # (2, 3, 4) @ (2, 4, 5): 2·2·3·4·5
    Row("aten.bmm", 240, lambda: torch.bmm(t(2, 3, 4), t(2, 4, 5))),
    Row("aten.bmm", 240, lambda: torch.bmm(t(2, 3, 4), t(2, 4, 5), out=t(2, 3, 5))),
    Row("aten.bmm", 960, lambda: torch.bmm(t(2, 3, 4, dtype=torch.complex64), t(2, 4, 5, dtype=torch.complex64))),
    # components 5 and 9 long, 4 wide: x @ xᵀ is 2·4·(25 + 81)
    Row("aten.bmm", 848, lambda: torch.bmm(nested(5, 9, width=4), nested(5, 9, width=4).transpose(1, 2))),
    Row("aten.baddbmm", 240, lambda: torch.baddbmm(t(2, 3, 5), t(2, 3, 4), t(2, 4, 5))),
    Row("aten.baddbmm_", 240, lambda: t(2, 3, 5).baddbmm_(t(2, 3, 4), t(2, 4, 5))),
    Row("aten.addbmm", 240, lambda: torch.addbmm(t(3, 5), t(2, 3, 4), t(2, 4, 5))),
    Row("aten.addbmm_", 240, lambda: t(3, 5).addbmm_(t(2, 3, 4), t(2, 4, 5))),
    # (8, 16) @ (16): 2·8·16
    Row("aten.mv", 256, lambda: torch.mv(t(8, 16), t(16))),
    Row("aten.addmv", 256, lambda: torch.addmv(t(8), t(8, 16), t(16))),
    Row("aten.addmv_", 256, lambda: t(8).addmv_(t(8, 16), t(16))),
    Row("aten.dot", 32, lambda: torch.dot(t(16), t(16))),
    Row("aten.vdot", 128, lambda: torch.vdot(t(16, dtype=torch.complex64), t(16, dtype=torch.complex64))),
    # one multiply-add for each of 3·5
    Row("aten.addr", 30, lambda: torch.addr(t(3, 5), t(3), t(5))),
    Row("aten.addr_", 30, lambda: t(3, 5).addr_(t(3), t(5))),
    # 2·(2·3·4 + 5·6·7)
    Row("aten._foreach_mm", 468, lambda: aten._foreach_mm([t(2, 3), t(5, 6)], [t(3, 4), t(6, 7)])),
    # components of 5 and 9 rows: 2·14·16·4
    Row("aten.linear", 1792, lambda: F.linear(nested(5, 9, width=16), t(4, 16), t(4))),
    Row("aten.linear", 1792, lambda: (None, nested(5, 9, width=16, layout=torch.jagged), t(4, 16), t(4)), run=False),
    Row("aten.mkldnn_linear", 1024, lambda: F.linear(t(8, 16).to_mkldnn(), t(4, 16).to_mkldnn())),
    Row("aten.matmul", 848, lambda: torch.matmul(nested(5, 9, width=4), nested(5, 9, width=4).transpose(1, 2))),
    # broadcast batches 2 and 3: 2·6·4·5·7
    Row("aten.matmul", 1680, lambda: (meta(2, 3, 4, 7), meta(2, 1, 4, 5), meta(3, 5, 7)), run=False),
    # forward 2·4·(25 + 81) once for each of two gradients
    Row(
        "aten.matmul_backward",
        1696,
        lambda: (
            None,
            nested(5, 9, width=4),
            nested(5, 9, width=4),
            nested(5, 9, width=4).transpose(1, 2),
            BOTH,
        ),
        run=False,
    ),
    Row(
        "aten.linear_backward",
        3584,
        lambda: aten.linear_backward(nested(5, 9, width=16), nested(5, 9, width=4), t(4, 16), ALL),
        parts=(("input_grad", 1792), ("weight_grad", 1792)),
    ),
    Row(
        "aten.linear_backward",
        1792,
        lambda: (None, t(2, 7, 16), t(2, 7, 4), t(4, 16), [False, True, True]),
        run=False,
        parts=(("weight_grad", 1792),),
    ),
    Row(
        "aten.mkldnn_linear_backward",
        2048,
        lambda: (None, meta(8, 16), meta(8, 4), meta(4, 16), ALL),
        run=False,
        parts=(("input_grad", 1024), ("weight_grad", 1024)),
    ),
    Row(
        "aten.mkldnn_linear_backward_input",
        1024,
        lambda: (meta(8, 16), [8, 16], meta(8, 4), meta(4, 16)),
        run=False,
        parts=(("input_grad", 1024),),
    ),
    Row(
        "aten.mkldnn_linear_backward_weights",
        1024,
        lambda: (None, meta(8, 4), meta(8, 16), meta(4, 16), True),
        run=False,
        parts=(("weight_grad", 1024),),
    ),
    # 2·8·3·5·6 over the first input, then 2·8·3·6 over the second
    Row("aten._trilinear", 1728, bilinear),
    # unrolled along a summed dimension, 4·6 for each of its 5 slices; the third tensor only scales
    Row("aten._trilinear", 240, lambda: aten._trilinear(t(4, 5, 6), t(5, 6), t(4), [], [0], [1, 2], [1, 2], 1)),
    # along the dimension that is kept: 5·6 for each of its 4 slices
    Row("aten._trilinear", 240, lambda: aten._trilinear(t(4, 5, 6), t(5, 6), t(4), [], [0], [1, 2], [1, 2], 0)),
    # 2·4·5 points of 3 numbers for each of 2 coordinates
    Row("aten.affine_grid_generator", 480, lambda: F.affine_grid(t(2, 2, 3), [2, 3, 4, 5], align_corners=False)),
    # 2·3·4·5 points of 4 numbers for each of 3 coordinates
    Row("aten.affine_grid_generator", 2880, lambda: F.affine_grid(t(2, 3, 4), [2, 1, 3, 4, 5], align_corners=False)),
    Row("aten.cudnn_affine_grid_generator", 480, lambda: (meta(2, 4, 5, 2), meta(2, 2, 3), 2, 3, 4, 5), run=False),
    Row(
        "aten.cudnn_affine_grid_generator_backward",
        480,
        lambda: (meta(2, 2, 3), meta(2, 4, 5, 2), 2, 3, 4, 5),
        run=False,
    ),
    # 2 sums over 3 matrices of 16 elements
    Row("aten._compute_linear_combination", 192, lambda: aten._compute_linear_combination(t(3, 4, 4), t(2, 3))),
    # 40 and 30 rows of 5, widened to 7
    Row("aten._euclidean_dist", 16800, lambda: torch.cdist(t(40, 5), t(30, 5))),
    Row("aten._cdist_forward", 0, lambda: torch.cdist(t(4, 5), t(3, 5))),
    Row("aten._cdist_forward", 16800, lambda: aten._cdist_forward(t(40, 5), t(30, 5), 2.0, 0)),
    Row("aten._cdist_forward", 168, lambda: aten._cdist_forward(t(4, 5), t(3, 5), 2.0, 1)),
    Row("aten._cdist_forward", 0, lambda: aten._cdist_forward(t(40, 5), t(30, 5), 2.0, 2)),
    Row("aten._cdist_forward", 0, lambda: aten._cdist_forward(t(40, 5), t(30, 5), 1.0, None)),
]
