"""Torch function modes and subclasses of the program's see its calls, and none of ours. Oracle: the same loop bare."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import torchledger as tl
from torchledger.ledger import count_steps

SEEN: Counter[str] = Counter()


def name_of(function: Any) -> str:
    owner = getattr(function, "__self__", None)
    return f"{getattr(owner, '__name__', '')}.{getattr(function, '__qualname__', None) or str(function)}"


class Logging(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        SEEN[name_of(func)] += 1
        return func(*args, **(kwargs or {}))


class LoggingTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        SEEN[name_of(func)] += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class LoggingParameter(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        SEEN[name_of(func)] += 1
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@torch.jit.script
def scripted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ weight) + 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.BatchNorm1d(16), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x + self.embedding(torch.arange(4)).sum(0))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, after: Callable[[], None]) -> None:
    for _ in range(2):
        model(torch.randn(4, 8)).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        after()


def with_mode(after: Callable[[], None]) -> None:
    model = Net()
    with Logging():
        train(model, torch.optim.AdamW(model.parameters()), after)


def with_mode_and_many_functions(after: Callable[[], None]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    x = torch.randn(4, 8, requires_grad=True)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    with Logging():
        optimizer.step(closure)
        after()
        checkpoint(model, x, use_reentrant=False).sum().backward()
        checkpoint(model, x, use_reentrant=True).sum().backward()
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        torch.autograd.backward([first.square().sum()])
        with torch.no_grad():
            model.eval()(x)
        with torch.inference_mode():
            model(x)
        torch.zeros(4).untyped_storage().resize_(64)
        copy.deepcopy(model)
        after()
        torch.func.vmap(model)(x)
        torch.func.grad(lambda w: F.linear(x.detach(), w).sum())(torch.randn(3, 8))


def with_scripted_function(after: Callable[[], None]) -> None:
    x, weight = torch.randn(8, 8), torch.randn(8, 8, requires_grad=True)
    with Logging():
        for _ in range(3):
            scripted(x, weight).sum().backward()
            after()


def with_parameters_that_log(after: Callable[[], None]) -> None:
    model = Net()
    for module in model.modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is not None:
                setattr(module, key, LoggingParameter(parameter.detach()))
    train(model, torch.optim.AdamW(model.parameters()), after)
    model(torch.randn(4, 8)).sum().backward()
    model(torch.randn(4, 8)).sum().backward()
    after()


def with_updates_by_hand(after: Callable[[], None]) -> None:
    model = nn.Linear(8, 8)
    model.weight = LoggingParameter(torch.randn(8, 8))
    for _ in range(3):
        model(torch.randn(4, 8)).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]
                parameter.grad = None
        after()


def with_inputs_that_log(after: Callable[[], None]) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        model(torch.randn(4, 8).as_subclass(LoggingTensor)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        after()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 8, 3))
        self.register_buffer("scale", torch.ones(8, 1).as_subclass(LoggingTensor))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.unsqueeze(-1).expand(4, 8, 8)) * self.scale


def with_buffers_that_log(after: Callable[[], None]) -> None:
    model = Scaled()
    train(model, torch.optim.Adam(model.parameters(), foreach=False), after)


def with_convolutions_that_log(after: Callable[[], None]) -> None:
    model = nn.Sequential(nn.Conv1d(8, 8, 1), nn.Conv1d(8, 4, 1))
    for module in model:
        module.weight = LoggingParameter(module.weight.detach())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(4, 8, 8, requires_grad=True)).sum().backward()
        optimizer.step()
        after()


def with_a_default_device(after: Callable[[], None]) -> None:
    model = Net()
    torch.set_default_device("cpu")
    try:
        with Logging():
            train(model, torch.optim.SGD(model.parameters(), lr=0.1), after)
    finally:
        torch.set_default_device(None)


PROGRAMS = [
    with_mode,
    with_mode_and_many_functions,
    with_scripted_function,
    with_parameters_that_log,
    with_updates_by_hand,
    with_inputs_that_log,
    with_buffers_that_log,
    with_convolutions_that_log,
    with_a_default_device,
]


def seen_by(program: Callable[[Callable[[], None]], None], after: Callable[[], None]) -> Counter[str]:
    torch.manual_seed(0)
    SEEN.clear()
    program(after)
    return Counter(SEEN)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("steps", ["by hand", "counted"])
def test_no_call_of_ours_is_seen(program: Callable[[Callable[[], None]], None], steps: str) -> None:
    seen_by(program, lambda: None)  # what torch does once, at a first call
    bare = seen_by(program, lambda: None)
    ledger = tl.Ledger()
    with ledger if steps == "by hand" else count_steps(ledger):
        watched = seen_by(program, ledger.step if steps == "by hand" else lambda: None)
    assert bare
    assert watched - bare == Counter()
    assert bare - watched == Counter()
    assert ledger.report.faults == ()


def test_no_call_of_ours_is_seen_around_the_block() -> None:
    def program(watched: bool) -> None:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        with Logging():
            if watched:
                with tl.Ledger(model, optimizer, stacks=True) as ledger:
                    assert ledger.report.flops.total == 0
                    train(model, optimizer, ledger.step)
                    assert ledger.report.flops.total > 0
                assert "parameters" in str(ledger.report)
            else:
                train(model, optimizer, lambda: None)

    bare = seen_by(lambda _: program(False), lambda: None)
    watched = seen_by(lambda _: program(True), lambda: None)
    assert watched == bare


def test_a_mode_that_refuses_everything_else() -> None:
    class Only(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func not in (F.linear, torch.Tensor.sum):
                raise RuntimeError(f"{func} is none of the program's")
            return func(*args, **(kwargs or {}))

    model, x = nn.Linear(8, 8), torch.ones(8, 8)
    with tl.Ledger() as ledger:
        with Only():
            model(x).sum()
        ledger.step()
    assert ledger.report.faults == ()
    assert ledger.report.flops.total == 2 * 8 * 8 * 8
