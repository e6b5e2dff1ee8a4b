"""The ledger: the object that users put around a training loop."""

from __future__ import annotations

import datetime
import functools
import inspect
import sys
import threading
import time
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from torchledger import internals
from torchledger.errors import UsageError
from torchledger.gate.budgets import Budget
from torchledger.journal.entries import Journal
from torchledger.journal.rows import Growth
from torchledger.journal.statements import FlopStatement, StepReport, UnrecordedTime
from torchledger.leaving import GuardedExit
from torchledger.read.blind_spots import blind_spots
from torchledger.read.inside import unaudited_lines
from torchledger.read.kept import KeptSteps
from torchledger.read.memory import with_peak_rows
from torchledger.read.steps import StepReader
from torchledger.record import readings
from torchledger.record.arguments import alive, as_list, check_tokens
from torchledger.record.auditing import Auditor
from torchledger.record.environment import describe_environment
from torchledger.record.readings import Readings
from torchledger.record.recording import StepRecorder
from torchledger.record.schedules import Schedule
from torchledger.record.stepping import AfterOptimizer, ByHand, Stepping
from torchledger.record.storages import Cut
from torchledger.report import Report
from torchledger.simulation import active as simulation
from torchledger.simulation.readings import SimulatedReadings

if TYPE_CHECKING:
    from torchledger.simulation.contracts import Device

Function = TypeVar("Function", bound=Callable[..., Any])


class Ledger:
    """Keeps the books of the training loop inside its block: every FLOP and every byte, by account.

    Args:
        model: The module or modules that are trained; left out, they are found as they run.
        optimizer: The optimizer or optimizers; likewise.
        tokens_per_step: Tokens that one step trains on, for FLOPs a token; `step(tokens=...)` overrides it.
        strict: Raise `UncountedOpError` at the first op whose cost is unknown.
        schedule: Which steps to record (`torchledger.schedule`); all, if left out.
        keep: How many of the last steps' reports are kept, besides the one with the highest peak.
        stacks: Note the user's file and line of each allocation (slower).
        audit: Run one step under the profiler's memory events too (the second that is recorded, or else the first), and
            list what ops hold inside themselves on the CPU, which no dispatch shows: ``StepReport.audit``.

    Raises:
        UsageError: an argument is of the wrong kind.
        TorchVersionError: the installed torch lacks a name that recording stands on.

    >>> model = torch.nn.Linear(4, 3, bias=False)
    >>> with Ledger(model) as ledger:
    ...     model(torch.ones(2, 4)).sum().backward()
    >>> ledger.report.flops.forward  # 2 * rows * in * out
    48
    """

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Module] | None = None,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        *,
        tokens_per_step: int | None = None,
        strict: bool = False,
        schedule: Schedule | None = None,
        keep: int = 100,
        stacks: bool = False,
        audit: bool = False,
    ) -> None:
        models = as_list(model, nn.Module, "model", "a torch.nn.Module or a list of them")
        optimizers = as_list(optimizer, Optimizer, "optimizer", "a torch.optim.Optimizer or a list of them")
        # Weakly: a ledger keeps neither alive.
        self._models = [weakref.ref(item) for item in models]
        self._optimizers = [weakref.ref(item) for item in optimizers]
        check_tokens("Ledger(tokens_per_step", tokens_per_step)
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise UsageError(f"Ledger(keep={keep!r}): give the number of step reports to keep, 1 or more.")
        if schedule is not None and not isinstance(schedule, Schedule):
            raise UsageError(f"Ledger(schedule={schedule!r}): make one with torchledger.schedule(wait=, active=, ...).")
        self._tokens_per_step = tokens_per_step
        self._strict, self._stacks = strict, stacks
        self._stepping: Stepping = ByHand()
        self._schedule = schedule
        self._kept = KeptSteps(keep)
        self._remainder: StepReport | None = None
        self._readings: Readings | SimulatedReadings = Readings(
            readings.cuda_statistics, readings.cublas_workspace_bytes
        )
        self._reader = StepReader()
        self._growing: tuple[Growth, ...] | None = None
        self._auditor = Auditor() if audit else None
        self._allocating: dict[str, int] = {}
        self._recorder: StepRecorder | None = None
        self._simulated: Device | None = None
        self._active = self._forked = False
        self._held_exit: weakref.ref[Any] | None = None
        self._index = 0
        self._unrecorded = UnrecordedTime()
        self._faults: list[str] = []
        self._unseen: Counter[str] = Counter()
        self._functions_before = internals.torch_function_state()
        self._began = 0.0
        self._step_called = False
        self._created = ""
        self._notes: deque[str] = deque(maxlen=10)

    # The block

    def __enter__(self) -> Ledger:
        if self._active:
            raise UsageError("this Ledger is already recording: leave its block first, or make another Ledger.")
        self._functions_before = internals.torch_function_state()
        try:
            self._active = True
            self._forked = self._step_called = False
            self._created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            self._begin_step()
            return self
        except BaseException:
            self._leave()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            recorder = self._recorder
            try:
                if recorder is not None and not isinstance(error, EnoughSteps):  # what it began with is no step
                    self._end_last_step(recorder, error)
            except Exception as fault:  # a fault of ours must not hide the program's own error
                self._fault("the last step could not be read", fault)
            stopped = self._leave()
        except BaseException:
            self._leave()  # an interrupt came between: do what is left
            raise
        if not stopped and error is None:
            raise UsageError(
                "a Ledger was left on another thread than it was entered on: what ran since is in its report. Enter "
                "and leave it on one thread."
            )

    if not TYPE_CHECKING:
        __exit__ = GuardedExit(__exit__)

    def _leave(self) -> bool:
        """Record no more; False if this is not the thread that recording was started on."""
        stopped = self._stop_recording()
        if stopped and internals.torch_function_state() != self._functions_before:
            # An interrupt ended a block of ours at the line that leaves it.
            internals.set_torch_function_state(self._functions_before)
        self._active, self._held_exit = False, None
        return stopped

    def __del__(self) -> None:
        if getattr(self, "_recorder", None) is None or sys.is_finalizing():
            return
        is_held = self._held_exit is not None  # by a `with` statement of a generator, which goes together with it
        try:
            self._leave()
        finally:
            if not is_held:
                warnings.warn(
                    "a Ledger was dropped while it recorded: it has stopped, and its report is lost. Record inside "
                    "`with torchledger.Ledger(...) as ledger:`, or call ledger.__exit__(None, None, None) at the end.",
                    UserWarning,
                    stacklevel=2,
                )

    def __call__(self, function: Function) -> Function:
        """Decorate a function: each call of it runs inside this ledger, and is a step unless it says otherwise.

        Raises:
            UsageError: a generator function, which would record its caller too between two values.
        """
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise UsageError(
                f"a Ledger cannot decorate {function.__name__}, a generator function: what its caller does between two "
                f"values would be recorded too. Put `with ledger:` around the loop that consumes it."
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def run_async(*args: Any, **kwargs: Any) -> Any:
                with self._unless_active():
                    return await function(*args, **kwargs)

            return run_async  # type: ignore[return-value]

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._unless_active():
                return function(*args, **kwargs)

        return run  # type: ignore[return-value]

    def step(self, tokens: int | None = None) -> None:
        """End a step.

        Args:
            tokens: Tokens that the step trained on, in place of ``tokens_per_step``.

        Raises:
            UsageError: outside the ledger's block.
        """
        check_tokens("step(tokens", tokens)
        if not self._active:
            raise UsageError("Ledger.step() outside the block: call it inside `with Ledger(...) as ledger:`.")
        self._step_called = True
        recorder = self._recorder
        if recorder is None:
            self._end_unrecorded_step(tokens)
        else:
            try:
                self._end_recorded_step(tokens)
            except Exception as fault:
                self._fault(f"step {self._index} could not be read", fault)
                recorder.cut(self._index)
                recorder.books.roles = {n: r for n, r in recorder.books.roles.items() if n in recorder.books.carried}
        self._index += 1
        self._begin_step()

    def assert_budget(self, budget: Budget | None = None, /, **limits: Any) -> None:
        """Hold what has been recorded so far against a budget, or against limits that are given as to `Budget`.

        Inside the block these are the steps that have ended, or the running one if none has.

        Raises:
            BudgetExceeded: a number lies above its budget.
            UsageError: there is no budget, or nothing was recorded.
            QuantityError: a limit cannot be read.

        >>> with Ledger() as ledger:
        ...     ones = torch.ones(1024)
        ...     ledger.assert_budget(peak="4 KiB", flops=0)
        """
        __tracebackhide__ = True
        if budget is not None and limits:
            raise UsageError("Ledger.assert_budget(): give a Budget, or limits such as peak='2 GiB', but not both.")
        self.report.check(Budget(**limits) if budget is None else budget)

    @property
    def report(self) -> Report:
        """What has been recorded; inside the block, the steps that have ended (or the running one, if none has)."""
        kept = self._kept
        try:
            steps, peak_step = kept.steps(), kept.with_rows()
        except Exception as fault:
            self._fault("the rows at the peak could not be read", fault)
            steps, peak_step = kept.steps(rows=False), kept.peak_step
        flops, n_steps, journals = kept.flops(), kept.n_steps, dict(kept.journals)
        if not n_steps and self._recorder is not None:
            journal = internals.unseen(self._recorder.journal)(self._index)
            running, _ = self._read(journal, None, StepReader())
            running = with_peak_rows(running, journal)
            steps, flops, n_steps, peak_step = (running,), running.flops, 1, running
            journals = {running.index: journal}
        if self._auditor is not None:
            steps, peak_step = self._auditor.annotate(steps, peak_step)
        return Report(
            steps=steps,
            n_steps=n_steps,
            environment=self._environment(flops),
            flops=flops,
            peak_step=peak_step,
            unrecorded=self._unrecorded,
            faults=tuple(self._faults + (self._recorder.faults if self._recorder else [])),
            remainder=self._remainder,
            journals=journals,
            growing=self._reader.growing() if self._growing is None else self._growing,
            blind_spots=(
                *blind_spots(self._unseen + Counter(self._recorder.unseen if self._recorder else {})),
                *self._unaudited(journals, steps),
            ),
        )

    def _unaudited(self, journals: Mapping[int, Journal], steps: tuple[StepReport, ...]) -> tuple[str, ...]:
        """What is not known of the ops that allocate inside themselves, unless a step was audited."""
        if any(step.audited_peak is not None for step in steps):
            return ()
        problem = self._auditor.problem if self._auditor is not None else ""
        return (*([problem] if problem else []), *unaudited_lines(self._allocating, journals.values()))

    # Steps

    def _begin_step(self) -> None:
        wanted = self._schedule is None or self._schedule.records(self._index)
        if wanted and self._recorder is None:
            self._start_recording()
        elif not wanted:
            self._stop_recording()
            _synchronize()
        self._began = time.perf_counter()

    @internals.unseen
    def _start_recording(self) -> None:
        if self._forked:
            return
        self._reader, self._growing = StepReader(), None
        recorder = StepRecorder(strict=self._strict, stacks=self._stacks)
        recorder.allocating = self._allocating
        recorder.stepping = self._stepping
        self._stepping.attach(recorder.books, recorder.parameters)
        ledger = weakref.ref(self)

        def end_step(at: Cut) -> None:
            if (owner := ledger()) is not None:
                owner._end_step_at(at)

        def forked() -> None:
            if (owner := ledger()) is not None:
                owner._recorder, owner._forked = None, True

        recorder.end_step, recorder.when_forked = end_step, forked
        try:
            for model in alive(self._models):
                recorder.add_model(model, given=True)
            for optimizer in alive(self._optimizers):
                recorder.parameters.add_optimizer(optimizer)
        except Exception as fault:
            recorder.fault("a model or an optimizer could not be entered", fault)
        if (device := simulation.current()) is not None:
            if not isinstance(self._readings, SimulatedReadings):
                self._readings = SimulatedReadings(device)
            self._simulated = device
        self._readings.begin(_cuda_devices())
        self._recorder = recorder  # first: an interrupt leaves it to be stopped
        recorder.start()
        if self._auditor is not None:
            self._auditor.begin(recorder)

    def _stop_recording(self) -> bool:
        """Stop; False if this is not the thread that recording was started on. May be called again."""
        recorder = self._recorder
        if recorder is None:
            return True
        if isinstance(self._readings, SimulatedReadings):
            self._readings.close()
        recorder.end_audit()
        stopped = recorder.stop()
        self._unseen.update(recorder.unseen)
        recorder.unseen = {}  # once, if this is called again
        self._faults.extend(fault for fault in recorder.faults if fault not in self._faults)
        self._recorder = None  # last: until then an interrupt leaves it to be stopped
        return stopped

    def _end_recorded_step(self, tokens: int | None, at: Cut | None = None, note: str = "") -> None:
        """Read the open step, to its end or to an earlier moment, and keep it."""
        recorder = self._recorder
        assert recorder is not None
        audit = recorder.end_audit()
        journal, step = self._close(tokens, at)
        self._kept.add(replace(step, notes=(*step.notes, note)) if note else step, journal)
        if self._auditor is not None:
            if audit is not None:
                self._auditor.read(audit, journal, step, at)
            self._auditor.begin(recorder)

    @internals.unseen
    def _close(self, tokens: int | None, at: Cut | None = None) -> tuple[Journal, StepReport]:
        recorder = self._recorder
        assert recorder is not None
        recorder.parameters.enter_all()
        journal = recorder.cut(self._index, at)
        step, settled = self._read(journal, tokens, self._reader)
        recorder.books.settle(settled)
        return journal, step

    def _end_step_at(self, at: Cut) -> None:
        """End a step where the policy says that it ended; the program goes on, or has made enough steps."""
        self._step_called = True
        try:
            self._end_recorded_step(None, at)
        except Exception as fault:
            self._fault(f"step {self._index} could not be read", fault)
        self._index += 1
        self._began = time.perf_counter()
        stop_after = self._stepping.stop_after
        if stop_after is not None and self._index >= stop_after:
            raise EnoughSteps

    def _end_last_step(self, recorder: StepRecorder, error: BaseException | None) -> None:
        """The block ends: its last step ends too, if one runs, and what came after it is the remainder."""
        cut_short = error is not None and not (isinstance(error, SystemExit) and not error.code)
        if (at := self._stepping.finish()) is not None:
            self._step_called = True
            self._end_recorded_step(None, at)
            self._index += 1
        if self._step_called and not recorder.has_run():
            return
        if not self._step_called or (cut_short and recorder.trains()):
            note = ""
            if cut_short:
                note = f"step {self._index} was cut short by {type(error).__name__}"
            elif isinstance(self._stepping, ByHand):
                note = _note_of_many(self._index, recorder.optimizer_steps, recorder.n_backwards)
            self._end_recorded_step(None, note=note)
            if note:
                self._notes.append(note)
            self._index += 1
        else:
            self._growing = self._reader.growing()
            _, self._remainder = self._close(None)

    def _read(self, journal: Journal, tokens: int | None, reader: StepReader) -> tuple[StepReport, dict[int, int]]:
        duration = time.perf_counter() - self._began
        on_cuda = any(device.startswith("cuda") for device in self._device_names())
        reading = reader.read(journal, self._readings.end if on_cuda else None)
        return StepReport(
            index=journal.index,
            tokens=tokens if tokens is not None else self._tokens_per_step,
            duration_s=duration,
            flops=reading.flops,
            memory=reading.memory,
            evidence=reading.evidence,
            notes=reading.notes,
        ), reading.settled

    def _device_names(self) -> Iterable[str]:
        return self._recorder.books.device_names.values() if self._recorder else ()

    def _end_unrecorded_step(self, tokens: int | None) -> None:
        _synchronize()
        before = self._unrecorded
        counted = tokens if tokens is not None else self._tokens_per_step
        if self._index == 0:
            return  # a program's very first step pays for what every program pays once
        self._unrecorded = UnrecordedTime(
            before.n_steps + 1,
            before.duration_s + time.perf_counter() - self._began,
            None if counted is None else (before.tokens or 0) + counted,
        )

    def _environment(self, flops: FlopStatement) -> dict[str, Any]:
        environment = describe_environment(sorted(self._kept.devices or set(self._device_names())), self._created)
        if self._simulated is not None:
            environment["devices"]["cuda:0"] = self._simulated.describe_properties()
            environment.update(self._simulated.describe())
        environment["dtype"] = max(flops.by_dtype, key=lambda name: (flops.by_dtype[name], name), default=None)
        environment["tokens_per_step"] = self._tokens_per_step
        if self._notes:
            environment["note"] = "; ".join(self._notes)
        return environment

    def _fault(self, what: str, error: BaseException) -> None:
        text = f"{what}: {type(error).__name__}: {error}"
        if text not in self._faults:
            self._faults.append(text)

    def _unless_active(self) -> Any:
        if not self._active:
            return self
        recorder = self._recorder
        if recorder is not None and recorder.place.thread != threading.get_ident():
            self._fault("a call on another thread was not recorded", RuntimeError("one thread at a time"))
        return _Nothing()


class EnoughSteps(BaseException):
    """Ends a program that was to run for so many steps: no error, so that no ``except Exception`` keeps it going."""


def count_steps(ledger: Ledger, stop_after: int | None = None) -> Ledger:
    """Make a ledger end its steps by itself, for programs that know nothing of it (see `AfterOptimizer`).

    Args:
        ledger: One that has not been entered.
        stop_after: How many steps the program may make before `EnoughSteps` is raised in it; None: as many as it does.
    """
    ledger._stepping = AfterOptimizer(stop_after)
    return ledger


def _note_of_many(index: int, optimizer_steps: int, n_backwards: int) -> str:
    """What a block without a call of `Ledger.step` should know, if it made several steps."""
    how = f"{optimizer_steps} optimizer steps"
    if not optimizer_steps:
        how, optimizer_steps = f"{n_backwards} backwards and no optimizer step", n_backwards
    return f"step {index} holds {how}: call ledger.step() to tell them apart" if optimizer_steps > 1 else ""


class _Nothing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def _cuda_devices() -> list[str]:
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return []
    return [f"cuda:{i}" for i in range(torch.cuda.device_count())]


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
