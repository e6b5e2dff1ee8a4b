"""The estimate of a peak with checkpointing, against the peak of the same model with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchledger import Ledger
from torchledger.read.checkpointed import estimate_checkpointed
from torchledger.report import Report

WIDTH, ROWS = 64, 256


class Deep(nn.Module):
    def __init__(self, n_blocks: int, *, checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(n_blocks)
        )
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.checkpointed else block(x)
        return x


def measure(model: nn.Module, x: torch.Tensor) -> Report:
    with Ledger(model) as ledger:
        model(x).square().mean().backward()
    return ledger.report


def test_against_the_model_with_checkpoints() -> None:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    plain = measure(Deep(8, checkpointed=False), x)
    real = measure(Deep(8, checkpointed=True), x).peak.total_bytes
    found = estimate_checkpointed(plain.journals[0], "cpu")
    assert found is not None
    assert (found.group, found.n_blocks, found.measured_peak_bytes) == ("blocks", 8, plain.peak.total_bytes)
    # Of each block: the wide output of the first layer and that of GELU.
    assert found.saved_bytes == 8 * 2 * ROWS * 4 * WIDTH * 4
    assert abs(found.peak_bytes - real) < 0.1 * (plain.peak.total_bytes - real)


CASES: dict[str, Callable[[], nn.Module]] = {
    "one block": lambda: Deep(1, checkpointed=False),
    "no blocks": lambda: nn.Linear(WIDTH, WIDTH),
    "checkpointed already": lambda: Deep(3, checkpointed=True),
}


@pytest.mark.parametrize("case", CASES)
def test_nothing_to_estimate(case: str) -> None:
    report = measure(CASES[case](), torch.randn(ROWS, WIDTH, requires_grad=True))
    assert estimate_checkpointed(report.journals[0], "cpu") is None


def test_without_a_backward() -> None:
    model = Deep(3, checkpointed=False)
    with Ledger(model) as ledger:
        out = model(torch.randn(ROWS, WIDTH))
    assert out.shape == (ROWS, WIDTH)
    assert estimate_checkpointed(ledger.report.journals[0], "cpu") is None
