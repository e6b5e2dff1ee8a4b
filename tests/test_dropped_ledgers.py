"""Ledgers that nobody leaves: they end themselves, and say so."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchledger as tl
from left_as_found import torch_state


@pytest.fixture(autouse=True)
def found() -> Iterator[None]:
    """Torch is as it was at the end of each test."""
    gc.collect()
    before = torch_state()
    yield
    assert torch_state() == before


def test_a_dropped_ledger_ends_with_a_warning() -> None:
    before = torch_state()
    ledger = tl.Ledger(nn.Linear(8, 8))
    ledger.__enter__()
    torch.ones(8, 8) @ torch.ones(8, 8)
    with pytest.warns(UserWarning, match=r"dropped while it recorded.*with torchledger\.Ledger.*__exit__"):
        del ledger
    assert torch_state() == before


def test_a_rebound_ledger_ends() -> None:
    model = nn.Linear(8, 8)
    ledger = tl.Ledger(model)
    ledger.__enter__()
    with pytest.warns(UserWarning, match="dropped"):
        ledger = tl.Ledger(model)
    with ledger:
        model(torch.ones(8, 8))
    assert ledger.report.flops.total == 2 * 8 * 8 * 8
    assert ledger.report.faults == ()


def test_a_ledger_in_a_cycle_ends_when_garbage_is_collected() -> None:
    class Holder:
        pass

    holder: Any = Holder()
    holder.itself = holder
    holder.ledger = tl.Ledger()
    holder.ledger.__enter__()
    del holder
    with pytest.warns(UserWarning, match="dropped"):
        gc.collect()


def test_collection_inside_an_op_of_its_own() -> None:
    """Garbage is collected where memory is asked for, and that is mostly while a ledger handles an op."""

    class Holder:
        pass

    before = torch_state()
    holder: Any = Holder()
    holder.itself = holder
    holder.ledger = tl.Ledger()
    holder.ledger.__enter__()
    recorder = holder.ledger._recorder
    original = type(recorder).learn

    def learn(self: Any, func: Any) -> Any:
        gc.collect()
        return original(self, func)

    recorder.learn = learn.__get__(recorder)
    del holder, recorder
    with pytest.warns(UserWarning, match="dropped"):
        x = torch.ones(2, 3) + 1
    assert x.sum() == 12
    assert torch_state() == before


def test_collection_inside_an_op_that_is_made_of_others() -> None:
    class Holder:
        pass

    before = torch_state()
    holder: Any = Holder()
    holder.itself = holder
    holder.ledger = tl.Ledger()
    holder.ledger.__enter__()
    recorder = holder.ledger._recorder
    original = type(recorder).learn

    def learn(self: Any, func: Any) -> Any:
        if "linear" not in str(func):
            gc.collect()
        return original(self, func)

    recorder.learn = learn.__get__(recorder)
    del holder, recorder
    with torch.inference_mode(), pytest.warns(UserWarning, match="dropped"):
        x = torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3), torch.ones(4))
    assert x.sum() == 32
    _ = torch.ones(2)  # the next op takes the recorder off, at the latest
    assert torch_state() == before


def test_a_ledger_dropped_on_another_thread() -> None:
    entered, dropped = threading.Event(), threading.Event()
    held: list[Any] = []
    states: list[Any] = []

    def work() -> None:
        before = torch_state()["modes"]
        held.append(tl.Ledger())
        held[0].__enter__()
        entered.set()
        dropped.wait()
        torch.ones(2)
        states.append((before, torch_state()["modes"]))

    thread = threading.Thread(target=work)
    thread.start()
    entered.wait()
    with pytest.warns(UserWarning, match="dropped"):
        held.clear()
    dropped.set()
    thread.join()
    assert states == [([], [])]


def test_generators_that_are_closed_late() -> None:
    model = nn.Linear(8, 8)

    def steps(ledger: tl.Ledger) -> Iterator[int]:
        with ledger:
            for i in range(10):
                model(torch.ones(8, 8))
                ledger.step()
                yield i

    ledger = tl.Ledger(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stepping = steps(ledger)
        next(stepping)
        next(stepping)
        del stepping
        nested = steps(tl.Ledger())
        next(nested)
        cycle = [nested]
        cycle.append(cycle)  # type: ignore[arg-type]
        del cycle, nested
        gc.collect()
    assert ledger.report.n_steps >= 2


def test_an_error_whose_traceback_holds_the_ledger() -> None:
    errors: list[BaseException] = []

    def fail() -> None:
        ledger = tl.Ledger()
        ledger.__enter__()
        try:
            raise ValueError
        except ValueError as error:
            errors.append(error)
            error.held = error  # type: ignore[attr-defined]

    fail()
    errors.clear()
    with pytest.warns(UserWarning, match="dropped"):
        gc.collect()


def test_contexts_that_hold_a_ledger() -> None:
    before = torch_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with contextlib.ExitStack() as stack:
            ledger = stack.enter_context(tl.Ledger())
            assert hasattr(ledger, "__exit__")  # to look is not to leave
            leave = ledger.__exit__
            del leave
            torch.ones(8, 8) @ torch.ones(8, 8)
        with tl.Ledger() as other:
            assert callable(other.__exit__)
            torch.ones(8, 8) @ torch.ones(8, 8)
    assert torch_state() == before
    assert ledger.report.flops.total == other.report.flops.total == 2 * 8 * 8 * 8
    assert issubclass(tl.Ledger, contextlib.AbstractContextManager)


def test_ledgers_that_were_left_or_never_entered_say_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ledger = tl.Ledger()
        del ledger
        with tl.Ledger() as ledger:
            pass
        del ledger
        with pytest.raises(tl.TorchledgerError):
            tl.Ledger(keep=0)
        gc.collect()


@pytest.mark.parametrize(
    "program",
    [
        "ledger = tl.Ledger(); ledger.__enter__(); torch.ones(2)",
        "tl.held = tl.Ledger(); tl.held.__enter__(); torch.ones(2)",
        "ledger = tl.Ledger(); ledger.__enter__(); ledger.itself = ledger; torch.ones(2); raise SystemExit(0)",
    ],
)
def test_the_interpreters_exit(program: str) -> None:
    code = textwrap.dedent(
        f"""
        import torch, torchledger as tl
        {program}
        """
    )
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": root}, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
