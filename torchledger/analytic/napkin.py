"""The arithmetic that fits on a napkin: what a training run costs, and what fits into memory.

N parameters, D tokens. Counts may be written as people write them (``"70B"``, ``"15T"``) and sizes likewise
(``"80GB"``); integers and text give exact integers.
"""

from __future__ import annotations

import math
from fractions import Fraction
from numbers import Integral, Real
from typing import overload

from torchledger.accelerators import Accelerator, find_accelerator
from torchledger.analytic.dtypes import tensor_bytes as tensor_bytes
from torchledger.errors import UsageError
from torchledger.units import parse_bytes, parse_count

__all__ = ["device_hours", "max_params", "tensor_bytes", "training_days", "training_flops"]

SECONDS_PER_DAY = 86_400
SECONDS_PER_HOUR = 3_600


@overload
def training_flops(n_params: int | str, n_tokens: int | str) -> int: ...  # type: ignore[overload-overlap]
@overload
def training_flops(n_params: float | str, n_tokens: float | str) -> float: ...
def training_flops(n_params: float | str, n_tokens: float | str) -> float:
    """FLOPs of training, 6·N·D: an exact integer, or a float where one was given.

    A product with N weights is 2·N FLOP a token (1 multiply-add = 2), and its backward pass has two of that size: one
    for the gradient of the weights, one for that of the input. Attention's own products are left out.

    Args:
        n_params: parameters, all of which take part in a product once a token.
        n_tokens: tokens of the whole run.

    Raises:
        QuantityError: a count cannot be read.
        UsageError: a count is negative or not finite.

    Source: Kaplan et al. 2020, "Scaling laws for neural language models", section 2.1.

    >>> training_flops(70e9, 15e12), training_flops("70B", "15T")
    (6.3e+24, 6300000000000000000000000)
    """
    return 6 * _count("n_params", n_params) * _count("n_tokens", n_tokens)


def training_days(
    n_params: float | str,
    n_tokens: float | str,
    *,
    devices: int | str,
    accelerator: str | Accelerator,
    dtype: str = "bf16",
    mfu: float = 0.5,
) -> float:
    """Days that training takes: 6·N·D over what all devices reach of their dense peak.

    Args:
        n_params: parameters, all of which take part in a product once a token.
        n_tokens: tokens of the whole run.
        devices: how many accelerators work.
        accelerator: a name such as ``h100-sxm``, or an entry of the table.
        dtype: the type of the products, whose dense peak counts.
        mfu: the share of the peak that the model's FLOPs reach, in (0, 1].

    Raises:
        QuantityError: a count cannot be read.
        UnknownAcceleratorError: no accelerator of that name is on record.
        UsageError: no dense peak for ``dtype`` is on record, or a number is out of its range.

    Source: the definition of MFU (Chowdhery et al. 2022, "PaLM", appendix B), solved for the time.

    >>> training_days(70e9, 15e12, devices=1024, accelerator="h100-sxm")
    143.92659381842682
    """
    rate = _flops_per_s(accelerator, dtype, mfu) * _devices(devices)
    return training_flops(n_params, n_tokens) / rate / SECONDS_PER_DAY


def device_hours(
    n_params: float | str,
    n_tokens: float | str,
    *,
    accelerator: str | Accelerator,
    dtype: str = "bf16",
    mfu: float = 0.5,
) -> float:
    """Device-hours that training takes, on however many devices: 6·N·D over what one reaches of its dense peak.

    Args:
        n_params: parameters, all of which take part in a product once a token.
        n_tokens: tokens of the whole run.
        accelerator: a name such as ``h100-sxm``, or an entry of the table.
        dtype: the type of the products, whose dense peak counts.
        mfu: the share of the peak that the model's FLOPs reach, in (0, 1].

    Raises:
        QuantityError: a count cannot be read.
        UnknownAcceleratorError: no accelerator of that name is on record.
        UsageError: no dense peak for ``dtype`` is on record, or a number is out of its range.

    Source: the definition of MFU (Chowdhery et al. 2022, "PaLM", appendix B), solved for the time.

    >>> round(device_hours("70B", "15T", accelerator="h100-sxm"))
    3537140
    """
    return training_flops(n_params, n_tokens) / _flops_per_s(accelerator, dtype, mfu) / SECONDS_PER_HOUR


def max_params(n_bytes: float | str, bytes_per_param: float = 16) -> int:
    """The largest number of parameters whose weights, gradients and optimizer state fit into ``n_bytes``.

    Activations, workspaces and what the allocator rounds up are left out: a real model has to be smaller.

    Args:
        n_bytes: memory of all devices together, over which everything is spread evenly.
        bytes_per_param: 16 for AdamW in fp32 and in bf16 with fp32 master weights; `torchledger.recipe` has others.

    Raises:
        QuantityError: the size cannot be read.
        UsageError: ``n_bytes`` are negative or not finite, or ``bytes_per_param`` is not a finite number above 0.

    >>> max_params(8 * 80e9), max_params("80GB", 8)
    (40000000000, 10000000000)
    """
    if _number("bytes_per_param", bytes_per_param) == 0:
        raise UsageError("bytes_per_param must be above 0.")
    size = parse_bytes(n_bytes) if isinstance(n_bytes, str) else _number("n_bytes", n_bytes)
    return int(Fraction(size) // exact_ratio(bytes_per_param))


def exact_ratio(value: float) -> Fraction:
    """``value`` as the fraction that was meant, where a division made it: 16/3 and not its nearest float.

    >>> exact_ratio(16 / 3), exact_ratio(4.1875)
    (Fraction(16, 3), Fraction(67, 16))
    """
    exact = Fraction(value)
    near = exact.limit_denominator(10**7)
    return near if float(near) == value else exact


def _flops_per_s(accelerator: str | Accelerator, dtype: str, mfu: float) -> float:
    if not 0 < mfu <= 1:
        raise UsageError(f"mfu must be a number above 0 and at most 1, not {mfu!r}.")
    device = accelerator if isinstance(accelerator, Accelerator) else find_accelerator(accelerator)
    return device.peak_flops_per_s(dtype) * mfu


def _devices(devices: int | str) -> int:
    n = parse_count(devices)
    if n < 1:
        raise UsageError(f"devices must be at least 1, not {devices!r}.")
    return n


def _count(name: str, value: float | str) -> float:
    return parse_count(value) if isinstance(value, str) else _number(name, value)


def _number(name: str, value: float) -> float:
    if isinstance(value, bool) or not (isinstance(value, Real) and math.isfinite(value) and value >= 0):
        raise UsageError(f"{name} must be a finite number of at least 0, not {value!r}.")
    return int(value) if isinstance(value, Integral) else float(value)
