"""Reading many steps gives what reading each alone gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchledger as tl
from models import GPT, Residual
from torchledger.journal.entries import Journal
from torchledger.read import steps
from torchledger.read.steps import StepReader, StepReading, read_journal


@pytest.mark.parametrize("kind", [None, "nonreentrant"])
def test_repeated_steps_read_as_if_alone(kind: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = GPT(n_layers=2, kind=kind)
    optimizer = torch.optim.AdamW(model.parameters())
    pairs: list[tuple[StepReading, StepReading]] = []
    read = StepReader.read
    alone = []

    def both(self: StepReader, journal: Journal, allocators: None = None) -> StepReading:
        before = journal.roles.copy()
        found = read(self, journal, allocators)
        assert journal.roles == before
        pairs.append((found, read_journal(journal)))
        return found

    def count(journal: Journal, allocators: None = None) -> StepReading:
        alone.append(journal.index)
        return read_journal(journal, allocators)

    monkeypatch.setattr(StepReader, "read", both)
    monkeypatch.setattr(steps, "read_journal", count)
    with tl.Ledger(model, optimizer) as ledger:
        for rows in (2, 2, 2, 2, 3, 3, 3, 2):
            ids = torch.randint(0, 256, (rows, 64))
            model(ids, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
            ledger.step()
    assert len(pairs) == 8
    for together, by_itself in pairs:
        assert together == by_itself
    assert 3 not in alone  # it was taken for a repetition, rightly
    assert {4, 7} <= set(alone)


def test_a_step_that_differs_in_one_op_is_no_repetition() -> None:
    model = Residual()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 16)
    with tl.Ledger(model, optimizer) as ledger:
        for i in range(5):
            y = model(x)
            (y.sin() if i == 3 else y.cos()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            ledger.step()
    ops = [
        {row.op for row in step.memory["cpu"].peak_by_phase["forward"].largest if row.module == "(outside)"}
        for step in ledger.report.steps
    ]
    assert "aten.sin" in ops[3]
    assert "aten.sin" not in ops[4]


def test_uncounted_ops_of_one_step_do_not_spill_into_others() -> None:
    library = torch.library.Library("torchledger_steps", "FRAGMENT")
    library.define("same(Tensor a) -> Tensor")
    library.impl("same", lambda a: a.clone(), "CompositeExplicitAutograd")
    model = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    try:
        with tl.Ledger(model) as ledger:
            for i in range(4):
                torch.ops.torchledger_steps.same(x) if i == 2 else x.clone()
                ledger.step()
    finally:
        library._destroy()
    assert [s.flops.uncounted for s in ledger.report.steps] == [{}, {}, {"torchledger_steps.same": 1}, {}]
