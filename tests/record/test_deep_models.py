"""Models as deep as Python's recursion limit allows work under a ledger too. Oracle: the same program bare."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchledger as tl
from left_as_found import torch_state


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.use_reentrant = inner, use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)  # type: ignore[no-any-return]


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x).relu()


def nest(depth: int, wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model: nn.Module = nn.Linear(4, 4)
    for _ in range(depth):
        model = wrap(model)
    return model


def train(model: nn.Module) -> torch.Tensor:
    x = torch.ones(2, 4, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    return x.grad


def works(make: Callable[[int], nn.Module], depth: int) -> bool:
    model = make(depth)
    try:
        train(model)
    except RecursionError:
        return False
    return True


def deepest(make: Callable[[int], nn.Module]) -> int:
    """How deep a model may be without a ledger, called from here."""
    low, high = 1, 2000
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if works(make, middle) else (low, middle)
    return low


@pytest.fixture(params=[300, 1000])
def limit(request: pytest.FixtureRequest) -> Iterator[int]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(request.param)
    yield request.param
    sys.setrecursionlimit(before)


NESTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "sequential": nn.Sequential,
    "residual": Residual,
    "checkpointed": lambda inner: Checkpointed(inner, use_reentrant=False),
    "reentrant": lambda inner: Checkpointed(inner, use_reentrant=True),
}


@pytest.mark.parametrize("how", NESTS)
def test_what_is_deep_enough_bare_is_deep_enough_watched(how: str, limit: int) -> None:
    wrap = NESTS[how]
    train(nest(2, wrap))

    def make(depth: int) -> nn.Module:
        return nest(depth, wrap)

    depth = deepest(make)
    torch.manual_seed(0)
    expected = train(make(depth))
    torch.manual_seed(0)
    model = make(depth)
    before = torch_state()
    with tl.Ledger() as ledger:
        gradient = train(model)
    assert torch_state() == before
    assert sys.getrecursionlimit() == limit
    assert torch.equal(gradient, expected)
    assert ledger.report.faults == ()
    assert ledger.report.flops.forward == 2 * 2 * 4 * 4


def test_two_ledgers_and_a_tool_that_wraps_modules_too(monkeypatch: pytest.MonkeyPatch) -> None:
    original = nn.Module.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__call__", call)

    def make(depth: int) -> nn.Module:
        return nest(depth, nn.Sequential)

    model = make(deepest(make))
    with tl.Ledger() as outer, tl.Ledger() as inner:
        train(model)
    assert outer.report.flops.total == inner.report.flops.total > 0
    assert outer.report.faults == inner.report.faults == ()


def test_the_programs_own_limit_stays() -> None:
    before = sys.getrecursionlimit()
    try:
        with tl.Ledger():
            sys.setrecursionlimit(before + 77)
            with tl.Ledger():
                assert sys.getrecursionlimit() == before + 77
        assert sys.getrecursionlimit() == before + 77
    finally:
        sys.setrecursionlimit(before)


def test_endless_recursion_still_ends() -> None:
    def fall(n: int) -> int:
        return fall(n + 1) + 1

    with tl.Ledger(), pytest.raises(RecursionError):
        fall(0)
