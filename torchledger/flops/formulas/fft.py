"""Fast Fourier transforms. n: points of one transform, all its dimensions together; S: elements of the whole input."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2, prod
from typing import Any

from torch import Tensor

from torchledger.flops.rules import Cost, counts

SOURCE = "FFTW's benchmark convention"


def transform_cost(points: Tensor, dims: Sequence[int], per_point: float) -> Cost:
    """``per_point``·S·log2 n, rounded: S/n transforms of n·log2 n butterfly steps."""
    n = prod(points.shape[d] for d in dims)
    return Cost(round(per_point * points.numel() * log2(n)) if n > 1 else 0, quality="approximate")


@counts("aten._fft_c2c", operands=(0,), quality="approximate", source=SOURCE)
def fft_c2c(result: Tensor, x: Tensor, dims: Sequence[int], /, *_: Any, **__: Any) -> Cost:
    """5·S·log2 n.

    A radix-2 step combines two numbers by one complex product (6 FLOPs) and two complex sums (4): 5 a number, log2 n
    times.  x (*S) complex.
    """
    return transform_cost(x, dims, 5)


@counts("aten._fft_r2c", operands=(0,), quality="approximate", source=SOURCE)
def fft_r2c(result: Tensor, x: Tensor, dims: Sequence[int], /, *_: Any, **__: Any) -> Cost:
    """2.5·S·log2 n.

    Half a complex transform: real inputs give a symmetric result.  x (*S) real.
    """
    return transform_cost(x, dims, 2.5)


@counts("aten._fft_c2r", operands=(0,), quality="approximate", source=SOURCE)
def fft_c2r(result: Tensor, x: Tensor, dims: Sequence[int], /, *_: Any, **__: Any) -> Cost:
    """2.5·S·log2 n.

    Half a complex transform.  result (*S) real.
    """
    return transform_cost(result, dims, 2.5)
