"""Decompositions: where a program asks for values alone, the price of those, although a mode makes torch make vectors.

n = 6: eigenvalues of a symmetric matrix 4n³/3 = 288 (9n³ = 1,944 with vectors), of any 10n³ = 2,160 (25n³ = 5,400),
singular values 8n³/3 = 576 (26n³ = 5,616).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torchledger as tl

LA = torch.linalg


def symmetric(*batch: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.eye(6) * 4 + torch.arange(6.0).diag() + 1).expand(*batch, 6, 6).to(dtype).clone()


VALUES: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "eigvalsh": (LA.eigvalsh, 288),
    "svdvals": (LA.svdvals, 576),
    "eigvals": (LA.eigvals, 2160),
    "spectral norm": (lambda a: LA.matrix_norm(a, 2), 576),
    "nuclear norm": (lambda a: LA.norm(a, "nuc"), 576),
    "rank": (LA.matrix_rank, 576),
    "rank of a symmetric one": (lambda a: LA.matrix_rank(a, hermitian=True), 288),
    "condition": (LA.cond, 576),
    "twice": (lambda a: [LA.eigvalsh(a) for _ in range(2)], 576),
}
VECTORS: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "eigh": (LA.eigh, 1944),
    "eigh, values taken": (lambda a: LA.eigh(a)[0], 1944),
    "eigh, values named": (lambda a: LA.eigh(a).eigenvalues, 1944),
    "eig": (LA.eig, 5400),
    "svd": (LA.svd, 5616),
    "svd, values taken": (lambda a: LA.svd(a)[1], 5616),
    "svd, u kept": (lambda a: LA.svd(a)[0], 5616),
}


def flops_of(call: Callable[[], Any]) -> int:
    with tl.Ledger() as ledger:
        call()
    assert ledger.report.faults == ()
    return ledger.report.flops.total


@pytest.mark.parametrize("name", VALUES)
def test_values_alone(name: str) -> None:
    call, flops = VALUES[name]
    assert flops_of(lambda: call(symmetric())) == flops


@pytest.mark.parametrize("name", VECTORS)
def test_with_vectors(name: str) -> None:
    call, flops = VECTORS[name]
    assert flops_of(lambda: call(symmetric())) == flops


def test_batches_and_complex_ones() -> None:
    assert flops_of(lambda: LA.eigvalsh(symmetric(3))) == 3 * 288
    assert flops_of(lambda: LA.svdvals(symmetric(2, dtype=torch.complex64))) == 4 * 2 * 576
    # (9, 4): 4·9·16 − 4·64/3
    assert flops_of(lambda: LA.svdvals(torch.randn(9, 4))) == 490


def test_a_gradient_needs_the_vectors() -> None:
    # Both products of the backward are 2·6·6·6.
    assert flops_of(lambda: LA.eigvalsh(symmetric().requires_grad_()).sum().backward()) >= 1944
    assert flops_of(lambda: LA.eigvalsh(symmetric().requires_grad_())) == 1944


def test_inference_mode() -> None:
    def run() -> None:
        with torch.inference_mode():
            LA.eigvalsh(symmetric())

    assert flops_of(run) == 288


def test_a_parameters_values_are_its_own() -> None:
    model = torch.nn.Linear(6, 6, bias=False)
    with tl.Ledger(model) as ledger, torch.no_grad():
        LA.svdvals(model.weight)
        model(torch.randn(2, 6))
    assert ledger.report.flops.total == 576 + 2 * 2 * 36
