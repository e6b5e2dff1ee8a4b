"""Recording one step and reconciling it; and models of which each term is known by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import torchledger as tl
from torchledger.read.reconcile.bridge import Bridge


class Hand(NamedTuple):
    """A recorded step, D, and the terms that it must have, all others being 0; ``left`` is what no term claims."""

    step: tl.StepReport
    tokens: int
    terms: dict[str, int]
    left: int = 0
    experts: str | None = None


def record(
    model: Any, run: Callable[[], Any], optimizer: Any = None, *, steps: int = 1, tokens: int | None = None
) -> tl.StepReport:
    """The last of some equal steps, of a ledger without faults."""
    with tl.Ledger(model, optimizer, tokens_per_step=tokens) as ledger:
        for _ in range(steps):
            run()
            ledger.step()
    assert ledger.report.faults == ()
    return ledger.report.steps[-1]


def terms_of(bridge: Bridge) -> dict[str, int]:
    """The terms that are not 0, by name."""
    assert [term.name for term in bridge.terms] == list(dict.fromkeys(term.name for term in bridge.terms))
    assert all(term.why for term in bridge.terms)
    return {term.name: term.value for term in bridge.terms if term.value}


def check(hand: Hand) -> tl.Reconciliation:
    """Each term is what it must be, none is there beside them, and so much is left."""
    found = tl.reconcile(hand.step, experts=hand.experts)
    bridge = found.flops
    n = sum(parameter.n_elements for parameter in hand.step.evidence.parameters.values())
    assert terms_of(bridge) == {name: value for name, value in hand.terms.items() if value}
    assert bridge.predicted == 6 * n * hand.tokens
    assert bridge.measured == hand.step.flops.total
    assert bridge.residual == hand.left
    return found


def size(*parameters: Tensor | nn.Module) -> int:
    """Elements of parameters, or of modules' parameters."""
    return sum(
        sum(p.numel() for p in item.parameters()) if isinstance(item, nn.Module) else item.numel()
        for item in parameters
    )


def freeze(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        module.requires_grad_(False)


class Lora(nn.Module):
    """A frozen linear layer without bias, and a product of two thin matrices beside it."""

    def __init__(self, n_in: int, n_out: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(n_in, n_out, bias=False).requires_grad_(False)
        self.a, self.b = nn.Linear(n_in, rank, bias=False), nn.Linear(rank, n_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def total(model: nn.Module, call: Callable[[Any], Tensor] | None = None, *args: Any) -> Callable[[], None]:
    """One forward and backward of the sum of what a model, or a call of it, gives."""

    def run() -> None:
        out = model(*args) if call is None else call(model)
        out.sum().backward()

    return run


def ids_of(batch: int, seq: int, vocabulary: int = 32) -> Tensor:
    return torch.randint(0, vocabulary, (batch, seq))
