"""Integer and low-bit products, and the prepacked linear layers of FBGEMM. m, n, k as in matmul; N: tokens.

A packed weight's shape does not tell its layer's, so n comes from the output and k from the input. Products with
weights of eight bits or fewer go to the bucket of integer operations, whatever the kernel multiplies in.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchledger.flops.formulas.conv import laid_out
from torchledger.flops.rules import Cost, UnknownCostError, counts


def integer_product(y: Tensor, x: Tensor) -> Cost:
    """2·m·n·k integer operations.  x (..., k), y (..., n)."""
    return Cost(2 * y.numel() * x.shape[-1], quality="integer")


@counts(
    "aten._int_mm",
    "aten._weight_int8pack_mm",
    "aten._weight_int4pack_mm_for_cpu",
    "aten.fbgemm_linear_int8_weight",
    "aten.fbgemm_linear_int8_weight_fp32_activation",
    quality="integer",
    operands=(0, 1),
)
@counts(
    "aten._weight_int4pack_mm",
    "aten._weight_int4pack_mm_with_scales_and_zeros",
    "aten._mixed_dtypes_linear",
    quality="integer",
    operands=(0, 1),
    ran=False,
)
def int_mm(y: Tensor, x: Tensor, w: Any, /, *_: Any, **__: Any) -> Cost:
    """2·m·n·k integer operations.

    x (m, k), y (m, n).
    """
    return integer_product(y, x)


@counts("aten._dyn_quant_matmul_4bit", quality="integer", operands=(0, 1))
def dyn_quant_matmul_4bit(y: Tensor, x: Tensor, w: Tensor, block: int, k: int, n: int, /, **_: Any) -> Cost:
    """2·m·n·k integer operations.

    x (..., k); k and n are arguments.
    """
    return Cost(2 * (x.numel() // k) * n * k if k else 0, quality="integer")


@counts(
    "quantized.linear",
    "quantized.linear_relu",
    "quantized.linear_dynamic",
    "quantized.linear_relu_dynamic",
    "quantized.linear_with_input_q_dq_qweight_dq_output_fp32",
    "quantized.linear_with_input_q_dq_qweight_dq_relu_output_fp32",
    "quantized.matmul",
    "_quantized.linear",
    "_quantized.linear_dynamic",
    "_quantized.wrapped_quantized_linear",
    "_quantized._wrapped_quantized_linear_prepacked",
    "onednn.qlinear_pointwise",
    quality="integer",
    operands=(0, 1),
)
@counts("quantized.linear_leaky_relu", "quantized.linear_tanh", quality="integer", operands=(0,), ran=False)
def quantized_linear(y: Tensor, x: Tensor, /, *_: Any, **__: Any) -> Cost:
    """2·N·in·out integer operations.

    x (..., in), y (..., out).
    """
    return integer_product(y, x)


@counts(
    "sparse.qlinear",
    "sparse.qlinear_relu",
    "sparse.qlinear_dynamic",
    "sparse.qlinear_relu_dynamic",
    quality="integer",
    operands=(0,),
    ran=False,
)
def block_sparse_linear(y: Tensor, x: Tensor, /, *_: Any, **__: Any) -> Cost:
    """2·N·in·out integer operations, dense-equivalent.

    How many blocks of the packed weight are stored is not visible.  x (..., in), y (..., out).
    """
    return integer_product(y, x)


@counts(
    "quantized.linear_dynamic_fp16",
    "quantized.linear_relu_dynamic_fp16",
    "quantized.linear_dynamic_fp16_unpacked_weight",
    "_quantized.wrapped_fbgemm_linear_fp16_weight",
    "aten.fbgemm_linear_fp16_weight",
    "aten.fbgemm_linear_fp16_weight_fp32_activation",
    "onednn.linear_dynamic_fp16",
    "onednn.linear_relu_dynamic_fp16",
    operands=(0, 1),
)
def fp16_linear(y: Tensor, x: Tensor, /, *_: Any, **__: Any) -> int:
    """2·N·in·out.

    Weights stored in half precision; floating-point products.  x (..., in), y (..., out).
    """
    return 2 * y.numel() * x.shape[-1]


def unpacked_conv(y: Tensor, x: Tensor, packed: Any) -> Cost:
    """A convolution whose weight is unpacked to learn its shape."""
    if not hasattr(packed, "unpack"):
        raise UnknownCostError
    w = packed.unpack()[0]
    return Cost(laid_out(x if packed.transpose() else y, w), quality="integer")


@counts(
    "quantized.conv1d",
    "quantized.conv1d_relu",
    "quantized.conv1d_dynamic",
    "quantized.conv2d",
    "quantized.conv2d_relu",
    "quantized.conv2d_dynamic",
    "quantized.conv3d",
    "quantized.conv3d_relu",
    "quantized.conv3d_dynamic",
    "quantized.conv_transpose1d",
    "quantized.conv_transpose1d_dynamic",
    "quantized.conv_transpose2d",
    "quantized.conv_transpose2d_dynamic",
    "quantized.conv_transpose3d",
    "quantized.conv_transpose3d_dynamic",
    "_quantized.conv2d",
    "_quantized.conv2d_relu",
    "_quantized.conv_transpose1d",
    "_quantized.conv_transpose2d",
    quality="integer",
    operands=(0,),
)
@counts("_quantized.conv3d", "_quantized.conv3d_relu", quality="integer", operands=(0,), ran=False)
def quantized_conv(y: Tensor, x: Tensor, packed: Any, /, *_: Any, **__: Any) -> Cost:
    """2·B·P·Cout·(Cin/g)·K integer operations.

    As convolution, the weight's shape read from the packed parameters. One-dimensional ones are packed as (…, 1, K).
    """
    return unpacked_conv(y, x, packed)


@counts("quantized.conv2d_add", "quantized.conv2d_add_relu", quality="integer", operands=(0,), ran=False)
def quantized_conv_add(y: Tensor, x: Tensor, other: Tensor, packed: Any, /, *_: Any, **__: Any) -> Cost:
    """2·B·P·Cout·(Cin/g)·K integer operations.

    As convolution; the addition is element-wise.
    """
    return unpacked_conv(y, x, packed)


@counts(
    "onednn.qconv_pointwise",
    "onednn.qconv1d_pointwise",
    "onednn.qconv2d_pointwise",
    "onednn.qconv3d_pointwise",
    quality="integer",
    operands=(0, 3),
)
def onednn_conv(y: Tensor, x: Tensor, x_scale: Any, x_zero: Any, w: Tensor, /, *_: Any, **__: Any) -> Cost:
    """2·B·P·Cout·(Cin/g)·K integer operations.

    P counts output positions; the packed weight has as many elements as the original.
    """
    return Cost(laid_out(y, w), quality="integer")
