"""Backward on a thread of its own, as an engine runs it for a GPU: a stand-in, since none is at hand."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import torchledger as tl
from models import GPT


@pytest.fixture
def device_thread(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The engine runs on one other thread, with the caller's modes, while the caller waits; nested runs stay there."""
    engine: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    home = threading.get_ident()
    used: list[int] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != home:
            return engine(*args, **kwargs)
        modes = _get_current_dispatch_mode_stack()
        results: list[Any] = []

        def work() -> None:
            used.append(threading.get_ident())
            torch.randn(2, requires_grad=True).sin().cos()  # numbers of nodes differ from thread to thread
            for mode in modes:
                torch._C._push_on_torch_dispatch_stack(mode)
            try:
                results.append(engine(*args, **kwargs))
            finally:
                for _ in modes:
                    torch._C._pop_torch_dispatch_stack(None)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return results[0]

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", run)
    return used


def measure(kind: str | None) -> tl.StepReport:
    torch.manual_seed(0)
    model: nn.Module = GPT(n_layers=3, kind=kind)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 256, (2, 64))
    with tl.Ledger(model, optimizer) as ledger:
        for _ in range(2):
            model(ids, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
            ledger.step()
    assert ledger.report.faults == ()
    return ledger.report.steps[1]


ALONE = {kind: measure(kind) for kind in (None, "reentrant", "nonreentrant")}


@pytest.mark.parametrize("kind", [None, "reentrant", "nonreentrant"])
def test_books_are_the_same(kind: str | None, device_thread: list[int]) -> None:
    step = measure(kind)
    assert len(device_thread) == 2
    assert step.flops == ALONE[kind].flops
    theirs, ours = ALONE[kind].memory["cpu"], step.memory["cpu"]
    assert ours.peak == theirs.peak
    assert ours.category_peaks == theirs.category_peaks
    assert ours.end == theirs.end
