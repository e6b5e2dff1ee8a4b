"""Which share of the devices' peak a training run reached: MFU and HFU.

Source of both definitions: Chowdhery et al. 2022, "PaLM", appendix B, with the numerators that the functions name.
"""

from __future__ import annotations

import math

from torchledger.accelerators import Accelerator, find_accelerator
from torchledger.errors import UsageError


def mfu(flops: float, seconds: float, *, accelerator: str | Accelerator, dtype: str, devices: int = 1) -> float:
    """Model FLOPs utilization: the share of the dense peak that the model's own FLOPs make up, 1.0 being all of it.

    Take ``flops`` from ``report.flops.model``: without recompute, and without what fused attention computes twice.
    Above 0.5 is good for a dense transformer, 0.05 is poor.

    Args:
        flops: model FLOPs that all devices executed together (1 multiply-add = 2 FLOP).
        seconds: the wall time that they took, from steps that no ledger recorded.
        accelerator: a name such as ``h100-sxm``, or an entry of the table.
        dtype: the type of the products: ``bf16`` or ``bfloat16``, ``fp32`` or ``float32``; ``tf32`` only when it is on.
        devices: how many accelerators worked.

    Raises:
        UnknownAcceleratorError: no accelerator of that name is on record.
        UsageError: no dense peak for ``dtype`` is on record; or ``flops`` are negative, or ``seconds`` or ``devices``
            are not positive.

    >>> round(mfu(6 * 70e9 * 15e12, 86400 * 144, accelerator="h100-sxm", dtype="bf16", devices=1024), 4)
    0.4997
    """
    return _utilization(flops, seconds, accelerator, dtype, devices)


def hfu(flops: float, seconds: float, *, accelerator: str | Accelerator, dtype: str, devices: int = 1) -> float:
    """Hardware FLOPs utilization: the share of the dense peak that all executed FLOPs make up, 1.0 being all of it.

    Take ``flops`` from ``report.flops.total``: with the recompute of activation checkpointing. Without recompute and
    fused attention it is the same number as `mfu`.

    Args:
        flops: FLOPs that all devices executed together (1 multiply-add = 2 FLOP).
        seconds: the wall time that they took, from steps that no ledger recorded.
        accelerator: a name such as ``h100-sxm``, or an entry of the table.
        dtype: the type of the products: ``bf16`` or ``bfloat16``, ``fp32`` or ``float32``; ``tf32`` only when it is on.
        devices: how many accelerators worked.

    Raises:
        UnknownAcceleratorError: no accelerator of that name is on record.
        UsageError: no dense peak for ``dtype`` is on record; or ``flops`` are negative, or ``seconds`` or ``devices``
            are not positive.

    >>> hfu(989.5e12, 2.0, accelerator="h100-sxm", dtype="bfloat16")
    0.5
    """
    return _utilization(flops, seconds, accelerator, dtype, devices)


def _utilization(flops: float, seconds: float, accelerator: str | Accelerator, dtype: str, devices: int) -> float:
    if not (math.isfinite(flops) and flops >= 0):
        raise UsageError(f"flops must be a finite number of at least 0, not {flops!r}.")
    if not (math.isfinite(seconds) and seconds > 0):
        raise UsageError(f"seconds must be a finite number above 0, not {seconds!r}.")
    if devices < 1:
        raise UsageError(f"devices must be at least 1, not {devices!r}.")
    device = accelerator if isinstance(accelerator, Accelerator) else find_accelerator(accelerator)
    return flops / (seconds * devices * device.peak_flops_per_s(dtype))
