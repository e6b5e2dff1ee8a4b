"""Integer and low-bit products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flops.counting import Row, meta

aten = torch.ops.aten
INT8, BF16 = torch.int8, torch.bfloat16


def quint8(*shape: int) -> Tensor:
    return torch.quantize_per_tensor(torch.ones(*shape), 0.1, 0, torch.quint8)


def qint8(*shape: int) -> Tensor:
    return torch.quantize_per_tensor(torch.ones(*shape), 0.1, 0, torch.qint8)


def linear(op: str, *after: Any, namespace: str = "quantized") -> Any:
    """A packed (4, 16) weight for 8 tokens, with ``after`` behind it."""
    packed = torch.ops.quantized.linear_prepack(qint8(4, 16), None)
    x = torch.ones(8, 16) if "dynamic" in op or "q_dq" in op else quint8(8, 16)
    function = getattr(getattr(torch.ops, namespace), op)
    return function(x, 0.1, 0, packed) if "q_dq" in op else function(x, packed, *after)


def fp16_linear(op: str) -> Any:
    packed = torch.ops.quantized.linear_prepack_fp16(torch.ones(4, 16), None)
    return getattr(torch.ops.quantized, op)(torch.ones(8, 16), packed)


def conv(op: str, dims: int = 2, transposed: bool = False, groups: int = 1, namespace: str = "quantized") -> Any:
    """A convolution of x (1, 4, 6, ...) with 4 to 4 channels and kernels of 3."""
    ones, zeros = [1] * dims, [0] * dims
    w = qint8(4, 4 // groups, *[3] * dims)
    kind = "conv_transpose" if transposed else "conv"
    prepack = getattr(torch.ops.quantized, f"{kind}{dims}d_prepack")
    packed = prepack(w, None, ones, zeros, *([zeros] if transposed else []), ones, groups)
    x = torch.ones(1, 4, *[6] * dims)
    function = getattr(getattr(torch.ops, namespace), op)
    if op.endswith("dynamic"):
        return function(x, packed)
    return function(torch.quantize_per_tensor(x, 0.1, 0, torch.quint8), packed, 0.1, 0)


def qlinear_pointwise() -> Any:
    w = torch.ops.onednn.qlinear_prepack(torch.ones(4, 16, dtype=INT8), None)
    x = torch.ones(8, 16, dtype=torch.uint8)
    scales, zeros = torch.ones(4), torch.zeros(4, dtype=torch.int32)
    return torch.ops.onednn.qlinear_pointwise(
        x, 1.0, 0, w, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "none"
    )


def onednn_conv(name: str, dims: int) -> Any:
    scales, zero_points = torch.ones(4), torch.zeros(4, dtype=torch.int32)
    ones, zeros = [1] * dims, [0] * dims
    x = torch.ones(1, 4, *[6] * dims, dtype=torch.uint8)
    w = torch.ops.onednn.qconv_prepack(
        torch.ones(4, 2, *[3] * dims, dtype=INT8), scales, 1.0, 0, ones, zeros, ones, 2, list(x.shape)
    )
    return getattr(torch.ops.onednn, name)(
        x, 1.0, 0, w, scales, zero_points, None, ones, zeros, ones, 2, 1.0, 0, torch.float32, "none", [], None
    )


class Packed:
    """Packed parameters of a convolution with a (4, 4, 3, ...) weight."""

    def __init__(self, dims: int = 3) -> None:
        self.dims = dims

    def unpack(self) -> tuple[Tensor, None]:
        return meta(4, 4, *[3] * self.dims), None

    def transpose(self) -> bool:
        return False


def fbgemm_int8(name: str) -> Any:
    w, offsets, scale, zero = torch.fbgemm_linear_quantize_weight(torch.ones(4, 16))
    packed = torch.fbgemm_pack_quantized_matrix(w)
    with torch.inference_mode():  # only here do these reach a dispatch mode
        return getattr(torch, name)(torch.ones(8, 16), w, packed, offsets, scale, zero, torch.ones(4))


def fbgemm_fp16(name: str) -> Any:
    packed = torch.fbgemm_pack_gemm_matrix_fp16(torch.ones(4, 16))
    with torch.inference_mode():
        return getattr(torch, name)(torch.ones(8, 16), packed, torch.ones(4))


def onednn_fp16(name: str) -> Any:
    packed = torch.ops.onednn.linear_prepack_fp16(torch.ones(4, 16, dtype=torch.float16), [8, 16])
    return getattr(torch.ops.onednn, name)(torch.ones(8, 16), packed, None)


def wrapped_linear() -> Any:
    one, zero = torch.tensor(1.0), torch.tensor(0)
    return torch.ops._quantized.wrapped_quantized_linear(
        torch.ones(8, 16), one, zero, torch.ones(4, 16), one, zero, torch.ones(4), one, zero, 4
    )


def wrapped_prepacked_linear() -> Any:
    one, zero = torch.tensor(1.0), torch.tensor(0)
    packed = torch.ops._quantized._wrapped_linear_prepack(torch.ones(4, 16), one, zero, torch.ones(4))
    return torch.ops._quantized._wrapped_quantized_linear_prepacked(torch.ones(8, 16), one, zero, packed, one, zero, 4)


def wrapped_fp16_linear() -> Any:
    packed = torch.ops._quantized.wrapped_fbgemm_pack_gemm_matrix_fp16(torch.ones(4, 16))
    return torch.ops._quantized.wrapped_fbgemm_linear_fp16_weight(torch.ones(8, 16), packed, torch.ones(4), 4)


def int4() -> Any:
    packed = aten._convert_weight_to_int4pack_for_cpu(torch.ones(32, 64, dtype=torch.int32), 1)
    return aten._weight_int4pack_mm_for_cpu(torch.ones(8, 64), packed, 32, torch.ones(2, 32, 2))


def dyn_4bit() -> Any:
    packed = aten._dyn_quant_pack_4bit_weight(
        torch.ones(32, 32, dtype=torch.uint8), torch.ones(32, 2), None, 32, 64, 32
    )
    return aten._dyn_quant_matmul_4bit(torch.ones(8, 64), packed, 32, 64, 32)


def integer(op: str, flops: int, call: Any, run: bool = True) -> Row:
    return Row(op, flops, call, quality="integer", run=run)


# 8 tokens from 16 to 4: 2·8·16·4
LINEAR = 1024
# y (1, 4, 4, 4), w (4, 4, 3, 3): 2·16·144; transposed x (1, 4, 6, 6): 2·36·144
ROWS = [
    integer(
        "aten._int_mm", 65_536, lambda: torch._int_mm(torch.ones(32, 32, dtype=INT8), torch.ones(32, 32, dtype=INT8))
    ),
    # (8, 32) @ (32, 16)
    integer(
        "aten._weight_int8pack_mm",
        8192,
        lambda: aten._weight_int8pack_mm(
            torch.ones(8, 32, dtype=BF16), torch.ones(16, 32, dtype=INT8), torch.ones(16, dtype=BF16)
        ),
    ),
    integer("aten._weight_int4pack_mm_for_cpu", 32_768, int4),  # (8, 64) @ (64, 32)
    integer("aten._weight_int4pack_mm", 32_768, lambda: (meta(8, 32), meta(8, 64), meta(4, 1, 32, 4)), run=False),
    integer(
        "aten._weight_int4pack_mm_with_scales_and_zeros",
        32_768,
        lambda: (meta(8, 32), meta(8, 64), meta(32, 8)),
        run=False,
    ),
    integer("aten._dyn_quant_matmul_4bit", 32_768, dyn_4bit),
    integer("aten._mixed_dtypes_linear", LINEAR, lambda: (meta(8, 4), meta(8, 16), meta(16, 4)), run=False),
    *(
        integer(f"aten.{name}", LINEAR, lambda name=name: fbgemm_int8(name))
        for name in ("fbgemm_linear_int8_weight", "fbgemm_linear_int8_weight_fp32_activation")
    ),
    *(
        Row(f"aten.{name}", LINEAR, lambda name=name: fbgemm_fp16(name))
        for name in ("fbgemm_linear_fp16_weight", "fbgemm_linear_fp16_weight_fp32_activation")
    ),
    integer("quantized.linear", LINEAR, lambda: linear("linear", 0.1, 0)),
    integer("quantized.linear_relu", LINEAR, lambda: linear("linear_relu", 0.1, 0)),
    integer("quantized.linear_dynamic", LINEAR, lambda: linear("linear_dynamic")),
    integer("quantized.linear_relu_dynamic", LINEAR, lambda: linear("linear_relu_dynamic")),
    integer(
        "quantized.linear_with_input_q_dq_qweight_dq_output_fp32",
        LINEAR,
        lambda: linear("linear_with_input_q_dq_qweight_dq_output_fp32"),
    ),
    integer(
        "quantized.linear_with_input_q_dq_qweight_dq_relu_output_fp32",
        LINEAR,
        lambda: linear("linear_with_input_q_dq_qweight_dq_relu_output_fp32"),
    ),
    integer("quantized.matmul", LINEAR, lambda: torch.ops.quantized.matmul(qint8(8, 16), qint8(16, 4), 0.1, 0)),
    integer("onednn.qlinear_pointwise", LINEAR, qlinear_pointwise),
    *(
        integer(name, LINEAR, lambda: (meta(8, 4), meta(8, 16), None), run=False)
        for name in (
            "quantized.linear_leaky_relu",
            "quantized.linear_tanh",
            "sparse.qlinear",
            "sparse.qlinear_relu",
            "sparse.qlinear_dynamic",
            "sparse.qlinear_relu_dynamic",
        )
    ),
    Row("quantized.linear_dynamic_fp16", LINEAR, lambda: fp16_linear("linear_dynamic_fp16")),
    Row("quantized.linear_relu_dynamic_fp16", LINEAR, lambda: fp16_linear("linear_relu_dynamic_fp16")),
    integer("_quantized.linear", LINEAR, lambda: linear("linear", 0.1, 0, namespace="_quantized")),
    integer("_quantized.linear_dynamic", LINEAR, lambda: linear("linear_dynamic", namespace="_quantized")),
    integer("_quantized.wrapped_quantized_linear", LINEAR, wrapped_linear),
    integer("_quantized._wrapped_quantized_linear_prepacked", LINEAR, wrapped_prepacked_linear),
    Row("_quantized.wrapped_fbgemm_linear_fp16_weight", LINEAR, wrapped_fp16_linear),
    Row(
        "quantized.linear_dynamic_fp16_unpacked_weight",
        LINEAR,
        lambda: torch.ops.quantized.linear_dynamic_fp16_unpacked_weight(
            torch.ones(8, 16), torch.ones(4, 16), torch.ones(4)
        ),
    ),
    *(
        Row(f"onednn.{name}", LINEAR, lambda name=name: onednn_fp16(name))
        for name in ("linear_dynamic_fp16", "linear_relu_dynamic_fp16")
    ),
    integer("quantized.conv2d", 4608, lambda: conv("conv2d")),
    integer("quantized.conv2d", 2304, lambda: conv("conv2d", groups=2)),
    integer("quantized.conv2d_relu", 4608, lambda: conv("conv2d_relu")),
    integer("quantized.conv2d_dynamic", 4608, lambda: conv("conv2d_dynamic")),
    integer("quantized.conv1d", 384, lambda: conv("conv1d", dims=1)),  # 2·4·48
    integer("quantized.conv1d_relu", 384, lambda: conv("conv1d_relu", dims=1)),
    integer("quantized.conv3d", 55_296, lambda: conv("conv3d", dims=3)),  # 2·64·432
    integer("quantized.conv3d_relu", 55_296, lambda: conv("conv3d_relu", dims=3)),
    integer("quantized.conv_transpose2d", 10_368, lambda: conv("conv_transpose2d", transposed=True)),
    integer("quantized.conv_transpose1d", 576, lambda: conv("conv_transpose1d", 1, transposed=True)),  # 2·6·48
    integer("quantized.conv1d_dynamic", 384, lambda: conv("conv1d_dynamic", dims=1)),
    integer("quantized.conv3d_dynamic", 55_296, lambda: conv("conv3d_dynamic", dims=3)),
    integer("quantized.conv_transpose1d_dynamic", 576, lambda: conv("conv_transpose1d_dynamic", 1, transposed=True)),
    integer("quantized.conv_transpose2d_dynamic", 10_368, lambda: conv("conv_transpose2d_dynamic", transposed=True)),
    # 2·216·432
    integer("quantized.conv_transpose3d", 186_624, lambda: conv("conv_transpose3d", 3, transposed=True)),
    integer(
        "quantized.conv_transpose3d_dynamic", 186_624, lambda: conv("conv_transpose3d_dynamic", 3, transposed=True)
    ),
    integer("_quantized.conv2d", 4608, lambda: conv("conv2d", namespace="_quantized")),
    integer("_quantized.conv2d_relu", 4608, lambda: conv("conv2d_relu", namespace="_quantized")),
    integer("_quantized.conv_transpose1d", 576, lambda: conv("conv_transpose1d", 1, True, namespace="_quantized")),
    integer("_quantized.conv_transpose2d", 10_368, lambda: conv("conv_transpose2d", 2, True, namespace="_quantized")),
    *(
        integer(f"_quantized.{name}", 55_296, lambda: (meta(1, 4, 4, 4, 4), meta(1, 4, 6, 6, 6), Packed()), run=False)
        for name in ("conv3d", "conv3d_relu")
    ),
    *(
        integer(f"quantized.{name}", 4608, lambda: (meta(1, 4, 4, 4), meta(1, 4, 6, 6), None, Packed(2)), run=False)
        for name in ("conv2d_add", "conv2d_add_relu")
    ),
    # 2 groups: y (1, 4, 4), w (4, 2, 3); y (1, 4, 4, 4), w (4, 2, 3, 3); y (1, 4, 4, 4, 4), w (4, 2, 3, 3, 3)
    integer("onednn.qconv1d_pointwise", 192, lambda: onednn_conv("qconv1d_pointwise", 1)),
    integer("onednn.qconv2d_pointwise", 2304, lambda: onednn_conv("qconv2d_pointwise", 2)),
    integer("onednn.qconv3d_pointwise", 27_648, lambda: onednn_conv("qconv3d_pointwise", 3)),
    integer("onednn.qconv_pointwise", 2304, lambda: onednn_conv("qconv_pointwise", 2)),
]
