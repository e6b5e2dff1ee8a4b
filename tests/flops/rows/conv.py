"""Convolutions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flops.counting import Row, meta

aten = torch.ops.aten
ONE, ZERO = [1, 1], [0, 0]
ALL = [True, True, True]


def t(*shape: int) -> Tensor:
    return torch.ones(*shape)


def grads(kind: str, *flops: int) -> tuple[tuple[str, int], ...]:
    kinds = {"x": "input_grad", "w": "weight_grad"}
    return tuple((kinds[letter], value) for letter, value in zip(kind, flops, strict=True))


def backward(x: Tensor, w: Tensor, gy: Tensor, mask: list[bool], groups: int = 1, transposed: bool = False) -> object:
    return aten.convolution_backward(gy, x, w, None, ONE, ZERO, ONE, transposed, ZERO, groups, mask)


ROWS = [
    # y (1, 4, 6, 6), w (4, 3, 3, 3): 2·36·108
    Row("aten.convolution", 7776, lambda: F.conv2d(t(1, 3, 8, 8), t(4, 3, 3, 3))),
    # unbatched
    Row("aten.convolution", 7776, lambda: F.conv2d(t(3, 8, 8), t(4, 3, 3, 3))),
    # strided, dilated and padded: y (2, 4, 4, 4), 2·32·108
    Row("aten.convolution", 6912, lambda: F.conv2d(t(2, 3, 8, 8), t(4, 3, 3, 3), stride=2, padding=2, dilation=2)),
    # depthwise: y (2, 8, 10, 10), w (8, 1, 3, 3): 2·200·72
    Row("aten.convolution", 28800, lambda: F.conv2d(t(2, 8, 10, 10), t(8, 1, 3, 3), padding=1, groups=8)),
    # transposed, 4 groups: x (2, 8, 10, 10), w (8, 4, 3, 3): 2·200·288
    Row("aten.convolution", 115200, lambda: F.conv_transpose2d(t(2, 8, 10, 10), t(8, 4, 3, 3), stride=2, groups=4)),
    # one and three dimensions: 2·6·24 and 2·8·48
    Row("aten.convolution", 288, lambda: F.conv1d(t(1, 3, 7), t(4, 3, 2))),
    Row("aten.convolution", 768, lambda: F.conv3d(t(1, 3, 3, 3, 3), t(2, 3, 2, 2, 2))),
    Row(
        "aten._convolution",
        7776,
        lambda: aten._convolution(
            t(1, 3, 8, 8), t(4, 3, 3, 3), None, ONE, ZERO, ONE, False, ZERO, 1, False, False, False, False
        ),
    ),
    Row(
        "aten.convolution_overrideable",
        7776,
        lambda: (meta(1, 4, 6, 6), meta(1, 3, 8, 8), meta(4, 3, 3, 3), None, ONE, ZERO, ONE, False, ZERO, 1),
        run=False,
    ),
    Row(
        "aten.convolution_backward",
        15552,
        lambda: backward(t(1, 3, 8, 8), t(4, 3, 3, 3), t(1, 4, 6, 6), ALL),
        parts=grads("xw", 7776, 7776),
    ),
    Row(
        "aten.convolution_backward",
        7776,
        lambda: backward(t(1, 3, 8, 8), t(4, 3, 3, 3), t(1, 4, 6, 6), [False, True, False]),
        parts=grads("w", 7776),
    ),
    Row(
        "aten.convolution_backward",
        0,
        lambda: (
            None,
            meta(1, 4, 6, 6),
            meta(1, 3, 8, 8),
            meta(4, 3, 3, 3),
            None,
            ONE,
            ZERO,
            ONE,
            False,
            ZERO,
            1,
            [False, False, True],
        ),
        run=False,
        parts=(),
    ),
    # 8 groups: y (2, 8, 8, 8), w (8, 1, 3, 3): 2·128·72 each
    Row(
        "aten.convolution_backward",
        36864,
        lambda: backward(t(2, 8, 10, 10), t(8, 1, 3, 3), t(2, 8, 8, 8), ALL, groups=8),
        parts=grads("xw", 18432, 18432),
    ),
    # transposed, 4 groups: x (2, 8, 10, 10), w (8, 4, 3, 3): 2·200·288 each
    Row(
        "aten.convolution_backward",
        230400,
        lambda: backward(t(2, 8, 10, 10), t(8, 4, 3, 3), t(2, 16, 12, 12), ALL, groups=4, transposed=True),
        parts=grads("xw", 115200, 115200),
    ),
    Row(
        "aten.convolution_backward_overrideable",
        15552,
        lambda: (None, meta(1, 4, 6, 6), meta(1, 3, 8, 8), meta(4, 3, 3, 3), ONE, ZERO, ONE, False, ZERO, 1, ALL),
        run=False,
        parts=grads("xw", 7776, 7776),
    ),
    # Kernels of their own
    Row(
        "aten._slow_conv2d_forward",
        7776,
        lambda: aten._slow_conv2d_forward(t(1, 3, 8, 8), t(4, 3, 3, 3), [3, 3], None, ONE, ZERO),
    ),
    Row(
        "aten.slow_conv3d_forward",
        768,
        lambda: aten.slow_conv3d_forward(t(1, 3, 3, 3, 3), t(2, 3, 2, 2, 2), [2] * 3, None, [1] * 3, [0] * 3),
    ),
    Row("aten.slow_conv_dilated2d", 7776, lambda: aten.slow_conv_dilated2d(t(1, 3, 8, 8), t(4, 3, 3, 3), [3, 3])),
    Row("aten.slow_conv_dilated3d", 768, lambda: aten.slow_conv_dilated3d(t(1, 3, 3, 3, 3), t(2, 3, 2, 2, 2), [2] * 3)),
    Row(
        "aten.slow_conv_transpose2d", 28800, lambda: aten.slow_conv_transpose2d(t(1, 8, 10, 10), t(8, 2, 3, 3), [3, 3])
    ),  # 2·100·144
    Row(
        "aten.slow_conv_transpose3d",
        1296,
        lambda: aten.slow_conv_transpose3d(t(1, 3, 3, 3, 3), t(3, 1, 2, 2, 2), [2] * 3),
    ),
    Row(
        "aten.mkldnn_convolution",
        7776,
        lambda: aten.mkldnn_convolution(t(1, 3, 8, 8), t(4, 3, 3, 3), None, ZERO, ONE, ONE, 1),
    ),
    Row("aten._conv_depthwise2d", 28800, lambda: (meta(2, 8, 10, 10), meta(2, 8, 10, 10), meta(8, 1, 3, 3)), run=False),
    Row(
        "aten.conv_depthwise3d", 432, lambda: (meta(1, 3, 2, 3, 3), meta(1, 3, 3, 3, 3), meta(3, 1, 2, 1, 2)), run=False
    ),  # 2·18·12
    Row(
        "aten._nnpack_spatial_convolution",
        7776,
        lambda: (meta(1, 4, 6, 6), meta(1, 3, 8, 8), meta(4, 3, 3, 3)),
        run=False,
    ),
    *(
        Row(f"aten.{name}", 7776, lambda: (meta(1, 4, 6, 6), meta(1, 3, 8, 8), meta(4, 3, 3, 3)), run=False)
        for name in (
            "cudnn_convolution",
            "cudnn_convolution_relu",
            "cudnn_convolution_add_relu",
            "miopen_convolution",
            "miopen_convolution_relu",
            "miopen_convolution_add_relu",
            "miopen_depthwise_convolution",
            "_mps_convolution",
        )
    ),
    *(
        Row(f"aten.{name}", 115200, lambda: (meta(2, 16, 21, 21), meta(2, 8, 10, 10), meta(8, 4, 3, 3)), run=False)
        for name in ("cudnn_convolution_transpose", "miopen_convolution_transpose", "_mps_convolution_transpose")
    ),
    Row(
        "aten._slow_conv2d_backward",
        15552,
        lambda: aten._slow_conv2d_backward(t(1, 4, 6, 6), t(1, 3, 8, 8), t(4, 3, 3, 3), [3, 3], ONE, ZERO, ALL),
        parts=grads("xw", 7776, 7776),
    ),
    Row(
        "aten._slow_conv2d_backward",
        15552,
        lambda: aten._slow_conv2d_backward(
            t(1, 4, 6, 6),
            t(1, 3, 8, 8),
            t(4, 3, 3, 3),
            [3, 3],
            ONE,
            ZERO,
            grad_input=t(1, 3, 8, 8),
            grad_weight=t(4, 3, 3, 3),
            grad_bias=t(4),
        ),
    ),
    Row(
        "aten.mps_convolution_backward",
        7776,
        lambda: (None, meta(1, 3, 8, 8), meta(1, 4, 6, 6), meta(4, 3, 3, 3), ZERO, ONE, ONE, 1, [True, False, True]),
        run=False,
        parts=grads("x", 7776),
    ),
    Row(
        "aten.mps_convolution_transpose_backward",
        230400,
        lambda: (
            None,
            meta(2, 8, 10, 10),
            meta(2, 16, 21, 21),
            meta(8, 4, 3, 3),
            ZERO,
            ZERO,
            ONE,
            ONE,
            4,
            [True, True],
        ),
        run=False,
        parts=grads("xw", 115200, 115200),
    ),
    # y (6, 2, 4), w (3, 5, 4): 2·6·2·60
    Row("aten.conv_tbc", 1440, lambda: torch.conv_tbc(t(8, 2, 5), t(3, 5, 4), t(4))),
]
