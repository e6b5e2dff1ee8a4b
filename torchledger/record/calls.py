"""How ops are called that, under any dispatch mode, do not do what they do without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchledger import internals

aten = torch.ops.aten
_convolution = aten.convolution.default._op
_equal = aten.equal.default._op
_read = aten._local_scalar_dense.default._op
_DTYPES = {float: torch.float64, int: torch.int64, bool: torch.bool, complex: torch.complex128}


def call_convolution(*args: Any) -> Any:
    """`aten.convolution`, which `torch.jit.trace` writes down from within, where a mode keeps it from looking."""
    with internals.tracing_again():
        return _convolution(*args)


def call_read(tensor: Any) -> Any:
    """`aten._local_scalar_dense`: a mode is handed the constants of a traced graph as plain numbers."""
    return _read(tensor) if isinstance(tensor, torch.Tensor) else tensor


def call_equal(one: Any, other: Any) -> Any:
    """`aten.equal`, likewise."""
    return _equal(_as_tensor(one), _as_tensor(other))


def _as_tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=_DTYPES[type(value)], device="cpu")


CALLS: dict[Any, Callable[..., Any]] = {
    aten.convolution.default: call_convolution,
    aten._local_scalar_dense.default: call_read,
    aten.equal.default: call_equal,
}
