"""Forked children: nothing records in them, and nothing is left. Oracle: a child of a process without a ledger."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import torchledger as tl
from left_as_found import torch_state

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]
PRODUCT = 2 * 8 * 8 * 8


def named_state() -> dict[str, str]:
    """The state in words that mean the same in parent and child."""
    return {name: repr(value) for name, value in torch_state().items()}


def in_child(work: Callable[[], Any]) -> Any:
    """What `work` returns in a forked child."""
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        try:
            os.write(writing, pickle.dumps(work()))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        result = file.read()
    os.waitpid(process, 0)
    return pickle.loads(result)


def work_hard() -> None:
    """A loop without a backward, which torch allows a child only if its parent has run none on other threads."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        model(torch.ones(8, 8))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()


@pytest.fixture(autouse=True, scope="module")
def imports_made_once() -> None:
    """An optimizer's first step imports a good part of torch: here, and not in each child."""
    work_hard()


class Items(Dataset[Any]):
    """Says in each item what a worker sees."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        work_hard()
        return named_state()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        work_hard()
        yield named_state()


@pytest.mark.parametrize("inside", ["block", "module", "backward"])
def test_a_child_is_as_without_a_ledger(inside: str) -> None:
    before = named_state() | ({"grad mode": "False"} if inside == "backward" else {})
    results = []

    class Forks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if inside == "module":
                results.append(in_child(lambda: (work_hard(), named_state())[1]))
            return x * 2

    def hook(gradient: torch.Tensor) -> None:
        if inside == "backward":  # where torch allows a child no backward
            results.append(in_child(lambda: (torch.ones(8, 8) @ torch.ones(8, 8), named_state())[1]))

    with tl.Ledger() as ledger:
        x = torch.ones(8, 8, requires_grad=True)
        x.register_hook(hook)
        Forks()(x).sum().backward()
        if inside == "block":
            results.append(in_child(lambda: (work_hard(), named_state())[1]))
        assert ledger._recorder is not None
        assert ledger._recorder.n_forks == 1
    assert results == [before]


def test_the_books_of_the_parent_go_on() -> None:
    x = torch.ones(8, 8)
    with tl.Ledger() as ledger:
        x @ x
        in_child(lambda: [x @ x for _ in range(10)])
        x @ x
    assert ledger.report.flops.total == 2 * PRODUCT
    assert ledger.report.faults == ()


def test_nothing_is_kept_in_a_child() -> None:
    def work() -> tuple[int, int]:
        recorder = found[0]
        n_events = len(recorder.books.events)
        for _ in range(100):
            torch.ones(8) + 1
        return len(recorder.books.events) - n_events, len(recorder.books.live) + len(recorder.books.unread)

    with tl.Ledger() as ledger:
        kept = torch.ones(8)
        found: list[Any] = [ledger._recorder]
        assert in_child(work) == (0, 0)
        assert len(found[0].books.unread) == 1
        del kept


def test_the_ledger_is_harmless_in_a_child() -> None:
    def work() -> tuple[Any, ...]:
        ledger.step()
        torch.ones(8, 8) @ torch.ones(8, 8)
        ledger.step(tokens=5)
        state = named_state()
        ledger.__exit__(None, None, None)
        ledger.__exit__(None, None, None)
        return state, named_state(), ledger.report.flops.total, ledger.report.n_steps

    before = named_state()
    with tl.Ledger() as ledger:
        torch.ones(8, 8) @ torch.ones(8, 8)
        ledger.step()
        state, after, flops, n_steps = in_child(work)
    assert state == after == before
    assert (flops, n_steps) == (PRODUCT, 1)


def test_a_child_may_have_a_ledger_of_its_own() -> None:
    def work() -> tuple[int, int]:
        with tl.Ledger() as own:
            torch.ones(8, 8) @ torch.ones(8, 8)
        ledger.__exit__(None, None, None)
        with ledger:
            torch.ones(8, 8) @ torch.ones(8, 8)
        return own.report.flops.total, ledger.report.flops.total

    with tl.Ledger() as ledger:
        torch.ones(8, 8) @ torch.ones(8, 8)
        ledger.step()
        assert in_child(work) == (PRODUCT, 2 * PRODUCT)


def test_leaving_by_an_exception_in_a_child() -> None:
    reading, writing = os.pipe()
    before = named_state()
    process = 1
    try:
        with tl.Ledger() as ledger:
            torch.ones(8, 8) @ torch.ones(8, 8)
            process = os.fork()
            if not process:
                raise SystemExit(0)
    except SystemExit:
        os.write(writing, pickle.dumps((named_state() == before, ledger.report.n_steps)))
    finally:
        if not process:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        assert pickle.loads(file.read()) == (True, 0)
    os.waitpid(process, 0)
    assert ledger.report.flops.total == PRODUCT


def test_a_fork_on_another_thread() -> None:
    import threading

    before = named_state()
    results: list[Any] = []
    with tl.Ledger() as ledger:
        thread = threading.Thread(target=lambda: results.append(in_child(lambda: (work_hard(), named_state())[1])))
        thread.start()
        thread.join()
        torch.ones(8, 8) @ torch.ones(8, 8)
    assert results == [before]
    assert ledger.report.flops.total == PRODUCT


@pytest.mark.parametrize("data", [Items(), Stream()])
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_of_data_loaders(data: Any, persistent: bool) -> None:
    before = named_state()
    model = nn.Linear(8, 8)
    loader = DataLoader(
        data,
        batch_size=None,
        num_workers=2,
        persistent_workers=persistent,
        multiprocessing_context="fork",
    )
    seen = []
    with tl.Ledger(model) as ledger:
        for _ in range(2):
            for item in loader:
                model(torch.ones(8, 8))
                seen.append(item)
    assert ledger.report.faults == ()
    assert ledger.report.flops.total == len(seen) * PRODUCT
    assert seen
    assert all(item == before for item in seen)


def put_state(queue: Any) -> None:
    work_hard()
    queue.put(named_state())


def test_processes_of_multiprocessing() -> None:
    before = named_state()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with tl.Ledger():
        process = context.Process(target=put_state, args=(queue,))
        process.start()
        assert queue.get() == before
        process.join()
    assert process.exitcode == 0


def test_a_child_of_two_ledgers_and_a_mode_of_the_programs() -> None:
    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Mode() as mode:
        before = named_state()
        with tl.Ledger(), Mode() as inner, tl.Ledger():
            state = in_child(named_state)
            assert [m for m in torch_state()["modes"] if isinstance(m, Mode)] == [mode, inner]
        assert named_state() == before
    without = {name: value for name, value in state.items() if name != "modes"}
    assert without == {name: value for name, value in before.items() if name != "modes"}
    assert state["modes"] == repr([mode, inner])


def test_nothing_is_printed_in_a_child(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tl.Ledger():
            torch.ones(8)
            in_child(work_hard)
    sys.stderr.flush()
    assert "Exception ignored" not in capfd.readouterr().err
