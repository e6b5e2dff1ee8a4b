"""What products complain of on a device, where torch's meta kernels are more patient or say it otherwise."""

from __future__ import annotations

import torch

from torchledger.simulation.operators import Operator
from torchledger.simulation.printing import TYPE_NAMES


def check_operands(operator: Operator, operands: list[torch.Tensor]) -> None:
    """Complain of matrices that cannot be multiplied, in torch's words.

    Args:
        operator: The product.
        operands: Its matrices, as `hidden.PRODUCTS` names them.

    Raises:
        RuntimeError: their dtypes differ, are none that cuBLAS takes, or their shapes do not fit.
    """
    if len(operands) != 2:
        return
    one, other = operands
    if one.dtype is not other.dtype:
        names = (dtype_name(one.dtype), dtype_name(other.dtype))
        if one.dim() == 2:
            raise RuntimeError("mat1 and mat2 must have the same dtype, but got {} and {}".format(*names))
        raise RuntimeError("expected scalar type {} but found {}".format(*names))
    if not one.dtype.is_floating_point and not one.dtype.is_complex:
        kernel = "addmm_cuda" if one.dim() == 2 else "baddbmm_cuda"
        raise RuntimeError(f"\"{kernel}\" not implemented for '{dtype_name(one.dtype)}'")
    if one.dim() == 2 and other.dim() == 2 and one.shape[1] != other.shape[0]:
        shapes = " and ".join("x".join(map(str, tensor.shape)) for tensor in operands)
        raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({shapes})")


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as torch's errors name it.

    >>> dtype_name(torch.float16)
    'Half'
    """
    return TYPE_NAMES.get(dtype, str(dtype)).removesuffix("Tensor")
