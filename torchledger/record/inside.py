"""The ops that allocate inside themselves on the CPU, whatever they are given, and how often they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchledger.record.entries import Entry

ALLOCATING = frozenset(
    f"aten.{name}"
    for name in [
        "convolution",
        "convolution_backward",
        "native_batch_norm_backward",
        "batch_norm_backward",
        "native_layer_norm_backward",
        "native_group_norm_backward",
        "mkldnn_rnn_layer",
        "mkldnn_rnn_layer_backward",
        "upsample_linear1d",
        "upsample_bilinear2d",
        "upsample_bicubic2d",
        "upsample_trilinear3d",
        "_upsample_bilinear2d_aa",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "_safe_softmax",
        "_euclidean_dist",
        "_trilinear",
        "_embedding_bag",
        "_embedding_bag_backward",
        "_ctc_loss_backward",
        "mse_loss",
        "smooth_l1_loss",
        "huber_loss",
        "binary_cross_entropy_with_logits",
        "logsumexp",
        "im2col",
        "sort",
        "kthvalue",
        "multinomial",
        "_unique2",
        "linalg_inv_ex",
        "linalg_qr",
        "linalg_matrix_exp",
        "_linalg_eigh",
        "_linalg_svd",
    ]
)
"""Measured with the profiler: `tests/record/test_inside.py` has an input for each."""


def count_allocating(entry: Entry, counts: dict[str, int]) -> None:
    """Count each call of an op on the CPU, if it allocates inside itself; no other op pays for it."""
    if entry.name in ALLOCATING:
        entry.call = _counted(entry.call, entry.name, counts)


def _counted(call: Callable[..., Any], name: str, counts: dict[str, int]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and first.is_cpu:
            counts[name] = counts.get(name, 0) + 1
        return call(*args, **kwargs)

    return run
