"""What a step of training may cost: run `pytest` in the folder above."""

from typing import Any

import pytest
import torch
from model import Network, train_step

BATCH = 256


def train(width: int, n_steps: int, recompute: bool = False, books: Any = None) -> None:
    model = Network(width, recompute=recompute)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(n_steps):
        train_step(model, optimizer, torch.randn(BATCH, width), torch.zeros(BATCH, dtype=torch.long))
        if books is not None:
            books.step()


# Without a fixture the whole call is measured, here as one step.
@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.ledger(peak={"32": "3 MiB", "64": "7 MiB"}, recompute_flops=0)
def test_memory_of_a_step(width: int) -> None:
    train(width, n_steps=1)


# With the fixture each ledger that it makes is held, here over its three steps.
@pytest.mark.ledger(activations="1 MiB", recompute_flops="40 MFLOP", other=0)
def test_checkpointing_saves_activations(ledger: Any) -> None:
    with ledger() as books:
        train(64, n_steps=3, recompute=True, books=books)


# Held against the numbers in __ledger__, which are committed: any change must be.
def test_nothing_has_changed(ledger: Any, ledger_baseline: Any) -> None:
    with ledger() as books:
        train(64, n_steps=2, books=books)
    ledger_baseline.check(books.report)
