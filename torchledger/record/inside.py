"""The ops that allocate inside themselves on the CPU, whatever they are given, and how often they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from torchledger.journal.entries import Journal
from torchledger.record.blind import INSIDE, LOW_PRECISION, BlindSpots
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

PRODUCTS = frozenset(("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm"))
"""They convert operands of 16 bits inside themselves, where the processor has no products of that precision."""


def count_allocating(entry: Entry, blind: BlindSpots) -> None:
    """Let each call of an op on the CPU be noted, if it allocates inside itself; no other op pays for it."""
    if entry.name in ALLOCATING:
        entry.call = _counted(entry.call, entry.name, blind)


def note_low_precision(journals: Iterable[Journal], blind: BlindSpots) -> None:
    """Note the products in 16 bits of the step that has most of them."""
    most = max((_low_precision(journal) for journal in journals), key=lambda counts: sum(counts.values()), default={})
    blind.counts[LOW_PRECISION] = most


def _counted(call: Callable[..., Any], name: str, blind: BlindSpots) -> Callable[..., Any]:
    note = blind.note

    def run(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and first.is_cpu:
            note(INSIDE, name)
        return call(*args, **kwargs)

    return run


def _low_precision(journal: Journal) -> dict[str, int]:
    counts: dict[str, int] = {}
    for _, device, _, _, op, _, dtype, _ in journal.blocks:
        if op in PRODUCTS and device == "cpu" and dtype in ("bfloat16", "float16"):
            counts[op] = counts.get(op, 0) + 1
    return counts
