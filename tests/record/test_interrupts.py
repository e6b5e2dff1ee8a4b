"""Interrupts, wherever they come: torch is as it was, and a ledger works after it.

They are raised at the n-th line of ours that runs, for n over all of a block; and by a signal at random moments.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

import torchledger as tl
from left_as_found import torch_state

OURS = (os.path.dirname(tl.__file__), _python_dispatch.__file__)
STEPS = 2
FLOPS = STEPS * 2 * 3 * (2 * 4 * 4 + 3 * 4 * 2)  # the first layer's input needs no gradient


class Interrupter:
    """Raises KeyboardInterrupt at the n-th line of ours that runs while it is on."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.n_lines = 0
        self.on = False
        self.where = ""

    def __enter__(self) -> Interrupter:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        self._count(frame)
        return self._line

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self._count(frame)
        return self._line

    def _count(self, frame: FrameType) -> None:
        if not self.on or self.where:
            return
        self.n_lines += 1
        if self.n_lines == self.at:
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
            raise KeyboardInterrupt


class Loop:
    """A model, its optimizer, and a block of two steps in four parts."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.x = torch.ones(3, 4)

    def run(self, ledger: tl.Ledger, begins: Callable[[str], None] = lambda part: None) -> None:
        begins("entering")
        with ledger:
            begins("training")
            for _ in range(STEPS):
                self.model(self.x).sum().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                begins("ending a step")
                ledger.step()
                begins("training")
            begins("leaving")
        begins("done")


def interrupt(loop: Loop, part: str, at: int) -> tuple[Interrupter, bool, tl.Ledger]:
    """Run the block with an interrupt at that line of a part; whether it came through, and the ledger."""
    ledger = tl.Ledger(loop.model, loop.optimizer)

    def begins(name: str) -> None:
        interrupter.on = name == part

    with Interrupter(at) as interrupter:
        try:
            loop.run(ledger, begins)
        except KeyboardInterrupt:
            return interrupter, True, ledger
    return interrupter, False, ledger


@pytest.fixture
def loop() -> Loop:
    loop = Loop()
    loop.run(tl.Ledger(loop.model, loop.optimizer))  # what torch and we do once
    return loop


def positions(loop: Loop, part: str, most: int) -> range:
    """At most so many lines of a part, evenly over it."""
    n_lines = interrupt(loop, part, -1)[0].n_lines
    assert n_lines > 100
    return range(1, n_lines + 1, max(1, n_lines // most))


@pytest.mark.parametrize(
    ("part", "most"), [("entering", 250), ("training", 250), ("ending a step", 100), ("leaving", 400)]
)
@pytest.mark.filterwarnings("ignore:Exception ignored")
def test_an_interrupt_at_any_line(loop: Loop, part: str, most: int) -> None:
    before = torch_state()
    interrupted = 0
    for at in positions(loop, part, most):
        interrupter, came, ledger = interrupt(loop, part, at)
        assert torch_state() == before, interrupter.where
        if not interrupter.where:  # a run may have a line or two less than the one that was counted
            continue
        interrupted += 1
        assert came or "gone" in interrupter.where or "forget" in interrupter.where, interrupter.where
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert ledger.report.n_steps <= STEPS + 1
            del ledger
    assert interrupted > 50
    loop.optimizer.zero_grad()
    ledger = tl.Ledger(loop.model, loop.optimizer)
    loop.run(ledger)
    assert ledger.report.flops.total == FLOPS
    assert ledger.report.faults == ()


def test_a_ledger_works_again_after_an_interrupt(loop: Loop) -> None:
    for part in ("entering", "training", "ending a step", "leaving"):
        for at in positions(loop, part, 15):
            _, _, ledger = interrupt(loop, part, at)
            n_steps, flops = ledger.report.n_steps, ledger.report.flops.total
            loop.optimizer.zero_grad()
            loop.run(ledger)
            assert ledger.report.n_steps == n_steps + STEPS
            assert ledger.report.flops.total == flops + FLOPS
            assert sum(ledger.report.peak.by_category.values()) == ledger.report.peak.total_bytes


def test_a_ledger_goes_on_after_an_interrupt_that_the_program_catches(loop: Loop) -> None:
    """The modules and backwards that ran are over, so what follows is where it belongs."""
    ledger = tl.Ledger(loop.model, loop.optimizer)
    with Interrupter(-1) as counter:
        counter.on = True
        with ledger:
            loop.model(loop.x).sum().backward()
    for at in range(1, counter.n_lines, max(1, counter.n_lines // 150)):
        with tl.Ledger(loop.model, loop.optimizer) as ledger:
            with Interrupter(at) as interrupter:
                interrupter.on = True
                with contextlib.suppress(KeyboardInterrupt):
                    loop.model(loop.x).sum().backward()
            assert ledger._recorder is not None
            assert ledger._recorder.place.stack == [], interrupter.where
            assert ledger._recorder.runs == [], interrupter.where
            loop.optimizer.zero_grad()
            ledger.step()
            loop.model(loop.x).sum().backward()
            loop.optimizer.zero_grad()
            ledger.step()
        step = ledger.report.steps[-1]
        assert step.flops.total == FLOPS // STEPS, interrupter.where
        assert step.flops.by_module["0"].forward == 2 * 3 * 4 * 4, interrupter.where


def test_modes_of_the_programs_own_stay(loop: Loop) -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Mode(), Mode(), tl.Ledger():
        before = torch_state()
        for part in ("entering", "leaving"):
            for at in positions(loop, part, 60):
                where = interrupt(loop, part, at)[0].where
                assert torch_state() == before, where


def wrap_modules() -> Any:
    """Patch the module calls as another tool would."""
    ours = nn.Module.__call__

    def call(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    return call


def test_an_interrupt_while_a_patch_of_another_tool_lies_on_ours(loop: Loop) -> None:
    original = nn.Module.__call__
    for at in positions(loop, "leaving", 40):
        ledger = tl.Ledger()
        with Interrupter(at) as interrupter, contextlib.suppress(KeyboardInterrupt), ledger:
            loop.model(loop.x)
            theirs = wrap_modules()
            interrupter.on = True
        assert nn.Module.__call__ is theirs
        nn.Module.__call__ = original  # type: ignore[method-assign]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")
@pytest.mark.filterwarnings("ignore:Exception ignored")
def test_signals_at_random_moments(loop: Loop) -> None:
    generator = random.Random(0)
    armed = False

    def handle(number: int, frame: FrameType | None) -> None:
        if armed:
            raise KeyboardInterrupt

    before, handler = torch_state(), signal.signal(signal.SIGALRM, handle)
    came = 0
    try:
        for _ in range(400):
            ledger = tl.Ledger(loop.model, loop.optimizer)
            armed = True
            try:
                signal.setitimer(signal.ITIMER_REAL, generator.uniform(1e-5, 0.02))
                for _ in range(200):
                    loop.run(ledger)
            except KeyboardInterrupt:
                came += 1
            finally:
                armed = False
            assert torch_state() == before
            assert ledger.report.faults == ()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert came > 390  # Python loses one that comes in a destructor or in a callback of the collector
    loop.optimizer.zero_grad()
    loop.run(ledger := tl.Ledger(loop.model, loop.optimizer))
    assert ledger.report.flops.total == FLOPS


def test_interrupts_of_another_thread(loop: Loop) -> None:
    """As a notebook's stop button or a watchdog raises them."""
    generator = random.Random(1)
    before = torch_state()
    modes: list[Any] = []

    def work(ready: threading.Event) -> None:
        ledger = tl.Ledger(loop.model, loop.optimizer)
        try:
            ready.set()
            for _ in range(1000):
                loop.run(ledger)
        except KeyboardInterrupt:
            modes.append(torch_state()["modes"])

    for _ in range(10):
        ready = threading.Event()
        thread = threading.Thread(target=work, args=(ready,))
        thread.start()
        ready.wait()
        time.sleep(generator.uniform(0.005, 0.03))
        assert thread.ident is not None
        raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
        assert raise_in(ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt)) == 1
        thread.join()
    assert modes == [[]] * 10
    assert torch_state() == before


@pytest.fixture(autouse=True)
def no_tracer() -> Iterator[None]:
    """Another tracer (a debugger's, coverage's) would be lost."""
    tracer = sys.gettrace()
    yield
    sys.settrace(tracer)
