"""Module calls and backwards on threads that no ledger was entered on: counted, and told in the report."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _python_dispatch

import torchledger as tl


def on_a_thread(work: Callable[[], Any]) -> None:
    """Run it there and wait; what it raises, this raises."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    before = nn.Module.__call__, torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    yield
    assert (nn.Module.__call__, torch.autograd._engine_run_backward) == before  # type: ignore[attr-defined]
    assert not _python_dispatch._is_in_torch_dispatch_mode


def products(report: Any) -> dict[str, tuple[int, int, int]]:
    return {name: (p.forward, p.input_grad, p.weight_grad) for name, p in report.flops.by_parameter.items()}


def test_a_backward_on_another_thread() -> None:
    model, x = nn.Linear(16, 4), torch.ones(8, 16, requires_grad=True)
    with tl.Ledger(model) as ledger:
        loss = model(x).sum()
        on_a_thread(loss.backward)
    report = ledger.report
    assert (report.flops.forward, report.flops.backward, report.flops.total) == (1024, 2048, 3072)
    assert products(report) == {"weight": (1024, 1024, 1024)}
    assert {name: split.self_total for name, split in report.flops.by_module.items()} == {"": 3072}
    assert report.blind_spots == (
        "1 backward ran on 1 other thread: their FLOPs are counted, what they allocated is not",
    )
    assert report.faults == ()


@pytest.mark.parametrize("n_threads", [1, 4])
def test_forwards_of_a_pool_and_one_backward(n_threads: int) -> None:
    """Nodes of several threads carry the same numbers; the parameters behind them tell them apart."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    head = nn.Linear(4, 4)
    a, b, c = 2 * 8 * 16 * 16, 2 * 8 * 16 * 4, 2 * 8 * 4 * 4
    together = threading.Barrier(n_threads)

    def run_part(x: torch.Tensor) -> torch.Tensor:
        together.wait(10)
        return model(x)

    with tl.Ledger([model, head]) as ledger, ThreadPoolExecutor(n_threads) as pool:
        for _ in range(3):
            parts = list(pool.map(run_part, torch.ones(8, 16).chunk(4)))
            head(torch.cat(parts)).sum().backward()
            ledger.step()
    for step in ledger.report.steps:
        assert (step.flops.forward, step.flops.backward) == (a + b + c, a + 2 * b + 2 * c)
        assert products(step) == {
            "Sequential.0.weight": (a, 0, a),
            "Sequential.2.weight": (b, b, b),
            "Linear.weight": (c, c, c),
        }
    assert ledger.report.blind_spots[0].startswith(f"12 module calls ran on {n_threads} other thread")
    assert ledger.report.faults == ()


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as Python lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty")
def test_training_on_many_threads_at_once() -> None:
    """Each has its own graph, beside that of the ledger's thread: all of it is counted, whatever runs when."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

    def train(x: torch.Tensor) -> None:
        model(x).square().sum().backward()

    with tl.Ledger(model) as ledger, ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            waiting = pool.map(train, torch.ones(64, 16).chunk(8))
            train(torch.ones(8, 16))
            list(waiting)
            ledger.step()
    report = ledger.report
    a, b = 2 * 8 * 16 * 16, 2 * 8 * 16 * 4
    assert report.faults == ()
    assert [step.flops.total for step in report.steps] == [9 * (2 * a + 3 * b)] * 10
    assert products(report) == {"0.weight": (90 * a, 0, 90 * a), "2.weight": (90 * b, 90 * b, 90 * b)}
    assert tl.reconcile(report.steps[-1]).flops.residual == 0
    assert report.blind_spots[0].startswith("80 module calls and 80 backwards ran on ")
    assert report.faults == ()


def test_a_backward_on_a_thread_that_has_a_graph_of_its_own() -> None:
    """The numbers of its own nodes are those of the other graph's."""
    first, second = nn.Linear(16, 4), nn.Linear(16, 6)
    x = torch.ones(8, 16, requires_grad=True)
    with tl.Ledger([first, second]) as ledger, ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            own = pool.submit(lambda: second(x).sum()).result()
            loss = first(x).sum()
            pool.submit(loss.backward).result()
            pool.submit(own.backward).result()
            ledger.step()
    n = 2 * 8 * 16
    for step in ledger.report.steps:
        assert products(step) == {"Linear.weight": (4 * n, 4 * n, 4 * n), "Linear2.weight": (6 * n, 6 * n, 6 * n)}
        totals = {name: split.self_total for name, split in step.flops.by_module.items() if split.self_total}
        assert totals == {"Linear": 12 * n, "Linear2": 18 * n}


def test_why_is_known_of_other_threads_too() -> None:
    """The terms of the bridge are those of the same step on the ledger's thread."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).requires_grad_(True)
    model[0].requires_grad_(False)

    def train() -> None:
        loss = model(torch.ones(8, 16)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    bridges = []
    for run in (lambda work: work(), on_a_thread):
        with tl.Ledger(model) as ledger:
            run(train)
        bridges.append(tl.reconcile(ledger.report.steps[-1], tokens=8).flops)
    assert bridges[0].residual == bridges[1].residual == 0
    terms = [{term.name: term.value for term in bridge.terms} for bridge in bridges]
    assert terms[0] == terms[1]
    assert terms[0]["double_backward"] == 2 * 8 * 16 * 4


def test_an_evaluation_on_another_thread_is_inference() -> None:
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @torch.no_grad()
    def evaluate() -> None:
        model(torch.ones(8, 16))

    with tl.Ledger(model, optimizer) as ledger:
        model(torch.ones(8, 16)).sum().backward()
        optimizer.step()
        on_a_thread(evaluate)
    flops = ledger.report.flops
    assert (flops.forward, flops.backward, flops.inference, flops.model) == (1024, 1024, 1024, 2048)


def test_a_model_that_only_another_thread_runs() -> None:
    model, teacher = nn.Linear(16, 4), nn.Linear(16, 6, bias=False)
    x = torch.ones(8, 16)
    with tl.Ledger() as ledger:
        for _ in range(2):
            on_a_thread(lambda: teacher(x))
            model(x).sum().backward()
            ledger.step()
    modules = {name: split.self_total for name, split in ledger.report.flops.by_module.items() if split.self_total}
    assert list(modules.values()).count(2 * 2 * 8 * 16 * 6) == 1
    assert ledger.report.flops.total == 2 * 2 * 8 * 16 * (6 + 4 + 4)
    with tl.Ledger(model) as ledger:  # which has nothing to do with it
        on_a_thread(lambda: teacher(x).sum().backward())
        model(x)
    assert (ledger.report.flops.total, set(ledger.report.flops.by_module)) == (1024, {""})
    assert ledger.report.blind_spots == (
        "1 module call and 1 backward of other models ran on other threads: they are not in these books",
    )


def test_a_loader_s_thread_costs_nothing() -> None:
    """What it does outside of modules is not seen, and what its transforms do is no product."""
    batches: Queue[Any] = Queue()
    transform = nn.Sequential(nn.ReLU(), nn.Flatten())

    def load() -> None:
        for _ in range(3):
            batches.put(transform(torch.ones(8, 4, 4)) + 0)
        batches.put(None)

    model = nn.Linear(16, 4)
    with tl.Ledger(model) as ledger:
        thread = threading.Thread(target=load)
        thread.start()
        while (batch := batches.get()) is not None:
            model(batch).sum().backward()
            ledger.step()
        thread.join()
    assert {step.flops.total for step in ledger.report.steps[:3]} == {2 * 1024}
    assert products(ledger.report.steps[0]) == {"weight": (1024, 0, 1024)}
    assert ledger.report.steps[1].memory["cpu"].peak.by_category["inputs"] >= 8 * 16 * 4
    assert ledger.report.blind_spots[0].startswith("3 module calls of other models ran on other threads")
    assert ledger.report.faults == ()


def test_what_wraps_a_model_is_no_other_model() -> None:
    model = nn.Linear(16, 4)
    wrapped = nn.Sequential(model, nn.ReLU())
    with tl.Ledger(model) as ledger:
        on_a_thread(lambda: wrapped(torch.ones(8, 16)).sum().backward())
    assert ledger.report.flops.total == 2 * 1024
    assert ledger.report.blind_spots[0].startswith("1 module call and 1 backward ran on 1 other thread:")


def test_what_raises_and_what_is_still_running() -> None:
    model, x = nn.Linear(16, 4), torch.ones(8, 16)
    started, done = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = model(x)
            started.set()
            assert done.wait(10)
            return model(x) + y

    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            model(x)
            raise ValueError("of the program's own")

    def run_raising() -> list[Any]:
        with pytest.raises(ValueError, match="program's own"):
            Raises()(x)
        return _python_dispatch._get_current_dispatch_mode_stack()

    left = []
    thread = threading.Thread(target=lambda: left.append((Waits()(x), len(run_raising()))))
    with tl.Ledger() as ledger:
        on_a_thread(run_raising)
        thread.start()
        assert started.wait(10)
    done.set()
    thread.join()
    assert left[0][1] == 0
    report = ledger.report
    assert report.flops.total == 1024
    assert report.blind_spots[1:] == ("1 call on other threads still ran when the recording ended: not in these books",)
    assert report.faults == ()


def test_uncounted_and_strict_on_another_thread() -> None:
    @torch.library.custom_op("torchledger_tests::elsewhere", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    class Custom(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return op(x)

    model = Custom()
    with tl.Ledger() as ledger:
        on_a_thread(lambda: model(torch.ones(2)))
    assert ledger.report.flops.uncounted == {"torchledger_tests.elsewhere": 1}
    with tl.Ledger(strict=True), pytest.raises(tl.UncountedOpError):
        on_a_thread(lambda: model(torch.ones(2)))


def test_values_and_nested_ledgers_and_optimizers() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(16, 4), torch.randn(8, 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train() -> torch.Tensor:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        return model.weight.detach().clone()

    start = model.state_dict()["weight"].clone()
    plain = train()
    with torch.no_grad():
        model.weight.copy_(start)
    found: list[torch.Tensor] = []
    with tl.Ledger(model) as outer, tl.Ledger() as inner:
        on_a_thread(lambda: found.append(train()))
    assert torch.equal(found[0], plain)
    for report in (outer.report, inner.report):
        assert report.flops.total == 2 * 1024
        assert "1 optimizer step ran on other threads" in report.blind_spots[1]
        assert report.faults == ()


def test_a_thread_with_a_ledger_of_its_own_is_its_own() -> None:
    model, x = nn.Linear(16, 4), torch.ones(8, 16)
    reports = []

    def work() -> None:
        with tl.Ledger(model) as ledger:
            model(x)
        reports.append(ledger.report)

    with tl.Ledger(model) as ledger:
        on_a_thread(work)
    assert (reports[0].flops.total, reports[0].blind_spots) == (1024, ())
    assert (ledger.report.flops.total, ledger.report.blind_spots) == (0, ())
