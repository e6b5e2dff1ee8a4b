"""What ops take inside themselves, which no dispatch shows: workspaces of cuBLAS and contiguous copies of operands.

Source: ``aten/src/ATen/native/cuda/Blas.cpp`` and ``aten/src/ATen/cuda/CUDABlas.cpp`` (`prepare_matrix_for_cublas`,
`prepare_batch_matrix_for_cublas`, `getCurrentCUDABlasHandle`). The order in a product is: its output, the copies of
operands that cuBLAS cannot read as they lie, the workspace of the handle (which stays), and the copies go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchledger import internals
from torchledger.simulation.contracts import Mode
from torchledger.simulation.operators import Operator

aten = torch.ops.aten
FORWARD_HANDLE, BACKWARD_HANDLE = 0, 1


def run_inside(mode: Mode, operator: Operator, args: Any, out: Any, place: int) -> None:
    """Take and give back what an op takes inside itself, after its output came."""
    operands = PRODUCTS.get(operator.op)
    if operands is None or place < 0:
        if operator.op is aten._scaled_dot_product_flash_attention_backward.default and place >= 0:
            _take_and_give(mode, flash_backward_bytes(args))
        return
    first = out if isinstance(out, torch.Tensor) else args[0]
    if not first.numel():
        return
    device = mode.device
    copies = [nbytes for tensor in operands(args) if (nbytes := _copied_bytes(tensor))]
    addresses = [device.take_hidden(nbytes) for nbytes in copies]
    device.take_workspace(BACKWARD_HANDLE if internals.current_graph_task_id() != -1 else FORWARD_HANDLE)
    for nbytes, address in zip(copies, addresses, strict=True):
        device.give_hidden(address, nbytes)


def _take_and_give(mode: Mode, sizes: list[int]) -> None:
    device = mode.device
    addresses = [device.take_hidden(nbytes) for nbytes in sizes]
    for nbytes, address in zip(sizes, addresses, strict=True):
        device.give_hidden(address, nbytes)


def flash_backward_bytes(args: Any) -> list[int]:
    """What flash attention's backward takes inside itself: sums in float32, and each head's gradients of shared keys.

    Source: ``mha_bwd`` in ``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp`` (softmax_d, dq_accum,
    dk_expanded and dv_expanded), not held against a device. Without deterministic algorithms.
    """
    query, key = args[1], args[2]
    batch, heads, rows, width = query.shape
    rounded_rows = -(-rows // 128) * 128
    step = 32 if width <= 128 else 64
    rounded_width = -(-width // step) * step
    sums = 4 * batch * heads * rounded_rows
    sizes = [sums, sums * rounded_width]
    if key.shape[1] != heads:
        sizes += [batch * key.shape[2] * heads * width * query.element_size()] * 2
    return sizes


def _copied_bytes(matrix: torch.Tensor) -> int:
    """Bytes of the contiguous copy of an operand, 0 where cuBLAS reads it as it lies."""
    shape, stride = matrix.shape, matrix.stride()
    if not matrix.numel() or matrix.dim() < 2:
        return 0
    if matrix.dim() == 2 and _is_dense(shape, stride):
        return 0
    (rows, columns), (row, column) = shape[-2:], stride[-2:]
    if (column == 1 and row >= max(1, columns)) or (row == 1 and column >= max(1, rows)):
        return 0
    if matrix.dim() == 3 and matrix.is_contiguous() and row != 0 and column != 0:
        return 0
    return matrix.numel() * matrix.element_size()


def _is_dense(shape: Any, stride: Any) -> bool:
    expected = 1
    for step, n in sorted(zip(stride, shape, strict=True)):
        if n == 1:
            continue
        if step != expected:
            return False
        expected *= n
    return True


def _at(*positions: int) -> Callable[[Any], Any]:
    return lambda args: [args[position] for position in positions]


PRODUCTS: dict[Any, Callable[[Any], Any]] = {
    aten.mm.default: _at(0, 1),
    aten.bmm.default: _at(0, 1),
    aten.addmm.default: _at(1, 2),
    aten.addmm_.default: _at(1, 2),
    aten._addmm_activation.default: _at(1, 2),
    aten.baddbmm.default: _at(1, 2),
    aten.baddbmm_.default: _at(1, 2),
    aten.addbmm.default: _at(1, 2),
    aten.mv.default: _at(0),
    aten.addmv.default: _at(1),
    aten.dot.default: _at(),
    aten.vdot.default: _at(),
    aten.linalg_solve_triangular.default: _at(),
    aten.triangular_solve.default: _at(),
}
