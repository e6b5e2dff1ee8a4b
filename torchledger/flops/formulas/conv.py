"""Convolutions. B: batch; Cin, Cout: channels; g: groups; P: positions that the kernel is laid on; K: kernel positions.

A zero that padding put there counts as work, since the kernels multiply it.
"""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor

from torchledger.flops.costs import masked_parts, scale
from torchledger.flops.rules import Cost, counts


def laid_out(t: Tensor, w: Tensor) -> int:
    """2·B·P·numel(w): a kernel w of any layout, laid on each position of t (B, C, *spatial)."""
    return 2 * (t.numel() // t.shape[1]) * w.numel() if t.numel() else 0


def conv_cost(x: Tensor, w: Tensor, y: Tensor, transposed: bool = False) -> int | Cost:
    """2·B·P·Cout·(Cin/g)·K = 2·B·P·numel(w), with P the positions of y, or of x when transposed.

    A plain convolution reads Cin/g·K inputs for each of B·P·Cout outputs, and w is (Cout, Cin/g, *K). A transposed one
    spreads each of B·P·Cin inputs over Cout/g·K outputs, and w is (Cin, Cout/g, *K).

    Args:
        x: Input (B, Cin, *spatial), or without B.
        w: Weight.
        y: Output (B, Cout, *spatial), or without B.
        transposed: Whether the convolution is transposed.
    """
    shape = (x if transposed else y).shape
    spatial = max(w.dim(), x.dim()) - 2
    return scale(2 * prod(shape[: -spatial - 1]) * prod(shape[-spatial:]) * w.numel(), x.dtype)


@counts("aten.convolution", "aten._convolution", operands=(0, 1))
@counts("aten.convolution_overrideable", operands=(0, 1), ran=False)
def convolution(
    y: Tensor,
    x: Tensor,
    w: Tensor,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    /,
    *_: Any,
    **__: Any,
) -> int | Cost:
    """2·B·P·Cout·(Cin/g)·K.

    P counts output positions, or input positions when transposed (see `conv_cost`).
    """
    return conv_cost(x, w, y, transposed)


@counts("aten.convolution_backward", operands=(0, 1, 2))
@counts("aten.convolution_backward_overrideable", operands=(0, 1, 2), ran=False)
def convolution_backward(grads: Any, gy: Tensor, x: Tensor, w: Tensor, /, *args: Any, **__: Any) -> Cost:
    """2·B·P·Cout·(Cin/g)·K for each of the input's and the weight's gradient that is asked for.

    Either gradient pairs the same (input element, weight element, output element) triples as the forward product, with
    any groups and transposed or not. The bias gradient is a sum.
    """
    transposed, mask = args[-4], args[-1]
    return masked_parts(conv_cost(x, w, gy, transposed), w, mask[0], mask[1])


@counts(
    "aten._slow_conv2d_forward",
    "aten.slow_conv3d_forward",
    "aten.slow_conv_dilated2d",
    "aten.slow_conv_dilated3d",
    "aten.mkldnn_convolution",
    operands=(0, 1),
)
@counts(
    "aten._conv_depthwise2d",
    "aten.conv_depthwise3d",
    "aten._nnpack_spatial_convolution",
    operands=(0, 1),
    ran=False,
)
def plain_convolution(y: Any, x: Tensor, w: Tensor, /, *_: Any, **__: Any) -> int | Cost:
    """2·B·P·Cout·(Cin/g)·K.

    P counts output positions. A depthwise weight is (Cin·multiplier, 1, *K).
    """
    return conv_cost(x, w, y)


@counts(
    "aten.cudnn_convolution",
    "aten.cudnn_convolution_relu",
    "aten.cudnn_convolution_add_relu",
    "aten.miopen_convolution",
    "aten.miopen_convolution_relu",
    "aten.miopen_convolution_add_relu",
    "aten.miopen_depthwise_convolution",
    "aten._mps_convolution",
    operands=(0, 1),
    ran=False,
)
def device_convolution(y: Tensor, x: Tensor, w: Tensor, /, *_: Any, **__: Any) -> int | Cost:
    """2·B·P·Cout·(Cin/g)·K.

    P counts output positions; a fused activation or addition is element-wise.
    """
    return conv_cost(x, w, y)


@counts(
    "aten.slow_conv_transpose2d",
    "aten.slow_conv_transpose3d",
    operands=(0, 1),
)
def transposed_convolution(y: Tensor, x: Tensor, w: Tensor, /, *_: Any, **__: Any) -> int | Cost:
    """2·B·P·Cout·(Cin/g)·K.

    P counts input positions: each is spread over the kernel.
    """
    return conv_cost(x, w, y, transposed=True)


@counts(
    "aten.cudnn_convolution_transpose",
    "aten.miopen_convolution_transpose",
    "aten._mps_convolution_transpose",
    operands=(0, 1),
    ran=False,
)
def device_transposed_convolution(y: Tensor, x: Tensor, w: Tensor, /, *_: Any, **__: Any) -> int | Cost:
    """2·B·P·Cout·(Cin/g)·K.

    P counts input positions: each is spread over the kernel.
    """
    return conv_cost(x, w, y, transposed=True)


@counts("aten._slow_conv2d_backward", operands=(0, 1, 2))
def slow_conv2d_backward(grads: Any, gy: Tensor, x: Tensor, w: Tensor, /, *args: Any, **outs: Any) -> Cost:
    """2·B·P·Cout·(Cin/g)·K for each of the input's and the weight's gradient that is asked for.

    As convolution_backward. The overload that writes into given tensors computes the gradients that it is given.
    """
    mask = args[-1] if len(args) == 4 else [outs.get("grad_input") is not None, outs.get("grad_weight") is not None]
    return masked_parts(conv_cost(x, w, gy), w, bool(mask[0]), bool(mask[1]))


@counts("aten.mps_convolution_backward", operands=(0, 1, 2), ran=False)
def mps_convolution_backward(grads: Any, x: Tensor, gy: Tensor, w: Tensor, /, *args: Any, **__: Any) -> Cost:
    """2·B·P·Cout·(Cin/g)·K for each of the input's and the weight's gradient that is asked for.

    As convolution_backward.
    """
    return masked_parts(conv_cost(x, w, gy), w, args[-1][0], args[-1][1])


@counts("aten.mps_convolution_transpose_backward", operands=(0, 1, 2), ran=False)
def mps_convolution_transpose_backward(grads: Any, x: Tensor, gy: Tensor, w: Tensor, /, *args: Any, **__: Any) -> Cost:
    """2·B·P·Cout·(Cin/g)·K for each of the input's and the weight's gradient that is asked for.

    As convolution_backward; P counts input positions.
    """
    return masked_parts(conv_cost(x, w, gy, transposed=True), w, args[-1][0], args[-1][1])


@counts("aten.conv_tbc", operands=(0, 1))
def conv_tbc(y: Tensor, x: Tensor, w: Tensor, bias: Any, pad: int = 0, /, **_: Any) -> int | Cost:
    """2·T·B·Cin·Cout·K.

    Each of T·B·Cout outputs is a sum of Cin·K products.  x (Tin, B, Cin), w (K, Cin, Cout), y (T, B, Cout).
    """
    return scale(2 * y.shape[0] * y.shape[1] * w.numel(), x.dtype)
