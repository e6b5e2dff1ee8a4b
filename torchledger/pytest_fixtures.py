"""What the pytest plugin puts around a test that has a budget: its ledgers, its baselines, and the verdict.

Imported when the first such test runs, and not before.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import shlex
import warnings
from collections.abc import Callable, Generator, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from torchledger.errors import BaselineFileError, BaselineMismatch, BudgetExceeded, UsageError
from torchledger.gate.baselines import (
    ROWS,
    BaselineFile,
    baseline_path,
    find_broken,
    judge_sample,
    outcome_of,
    read_baselines,
    take_sample,
)
from torchledger.gate.budgets import Budget, find_doubts, judge_budget, parse_limits, parse_share
from torchledger.gate.config import TABLE, Settings, is_ci
from torchledger.gate.judging import Verdict
from torchledger.gate.marks import Mark, MarkReader, merge_marks
from torchledger.gate.properties import Check, Property, encode_check, encode_run_properties
from torchledger.gate.quantities import measure_quantities
from torchledger.gate.results import encode_budget
from torchledger.gate.rows import decode_rows, encode_rows, trim_rows
from torchledger.ledger import Ledger, count_steps
from torchledger.pytest_items import nearest_marks, param_id, place_flags, test_name
from torchledger.render.verdicts import accept_budget, broken_only, render_broken
from torchledger.report import Report


class LedgerMaker:
    """What the fixture ``ledger`` is: call it as `torchledger.Ledger`; the test's budget holds for what it makes."""

    def __init__(self) -> None:
        self.ledgers: list[Ledger] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Ledger:
        """A new ledger; the arguments are those of `torchledger.Ledger`."""
        made = Ledger(*args, **kwargs)
        self.ledgers.append(made)
        return made


class BaselineChecker:
    """What the fixture ``ledger_baseline`` is."""

    def __init__(
        self, item: pytest.Item, settings: Settings, reader: MarkReader, files: dict[Path, BaselineFile]
    ) -> None:
        self._item, self._settings, self._reader, self._files = item, settings, reader, files
        self.checks: list[Check] = []
        self.reports: list[Report] = []
        self.n_taken_down = 0
        """How many of the checks are among the properties of the test."""

    def check(self, report: Report, name: str | None = None, *, tolerance: str | None = None) -> tuple[Verdict, ...]:
        """Holds a report against the committed baseline of this test; a verdict for each number, if all are kept.

        Args:
            report: what was measured.
            name: tells the checks of one test apart, where there are several; else they are numbered.
            tolerance: a percentage by which numbers may differ; left out, that of the marker or of the settings, else
                none on CPU and simulated devices and 1 % or 1 MiB on accelerators.

        Raises:
            BaselineMismatch: a number is higher or lower than the committed one, or in CI there is none.
            BaselineFileError: the baseline file cannot be read.
            UsageError: no step was recorded, or two checks have one name.
        """
        __tracebackhide__ = True
        if not isinstance(report, Report):
            raise UsageError(f"ledger_baseline.check({type(report).__name__}): give a Report, such as ledger.report.")
        share = self._share(tolerance)
        sample = take_sample(report)
        path = baseline_path(self._item.path)
        entry = self._entry_name(name)
        if path not in self._files:
            try:
                self._files[path] = read_baselines(path)
            except BaselineFileError as error:
                raise error.with_traceback(None) from None  # at the line of the test
        groups = self._files[path].entries.get(entry)
        verdicts = judge_sample(groups, sample, share)
        broken = find_broken(verdicts, update=self._settings.update, ci=is_ci(os.environ))
        check = Check(
            Path(os.path.relpath(path, self._item.config.rootpath)).as_posix(),
            entry,
            outcome_of(verdicts),
            sample.machine.group,
        )
        self.checks.append(check)
        self.reports.append(report)
        if broken:
            base = decode_rows((groups or {}).get(sample.machine.group, {}).get(ROWS, {}))
            accept = f"To accept the new numbers, run this and commit {check.file}:\n  {self._command()}"
            text = render_broken(report, broken, base=base, head=trim_rows(sample.peak), accept=accept)
            raise BaselineMismatch(text, broken)
        check.new = {verdict.key: verdict.measured for verdict in broken_only(verdicts)}
        here = [key for key in check.new if sample.group_of(key, groups or {}) == sample.machine.group]
        if here:
            check.here, check.rows = ",".join(here), encode_rows(sample.peak)
        return verdicts

    def _share(self, tolerance: str | None) -> Fraction | None:
        if tolerance is not None:
            return parse_share(tolerance, "ledger_baseline.check")
        marks = (self._reader.read(mark.args, mark.kwargs) for mark in nearest_marks(self._item))
        near = next((mark.tolerance for mark in marks if mark.tolerance is not None), None)
        if near is None and self._settings.tolerance is not None:
            return parse_share(self._settings.tolerance, "tolerance")
        return near

    def _entry_name(self, name: str | None) -> str:
        test, taken = test_name(self._item), {check.entry for check in self.checks}
        if name is not None:
            entry = f"{test}#{name}"
            if not isinstance(name, str) or not name or entry in taken:
                raise UsageError(f"ledger_baseline.check(name={name!r}): give each check of a test a name of its own.")
            return entry
        names = (test if number == 1 else f"{test}#{number}" for number in itertools.count(len(taken) + 1))
        return next(name for name in names if name not in taken)

    def _command(self) -> str:
        place = Path(os.path.relpath(self._item.path, self._item.config.invocation_params.dir))
        words = [f"{place}::{test_name(self._item)}"]
        if "[" in str(place):
            # pytest takes a bracket in a path for the begin of parameters: what it can be given is a folder above.
            above = next(folder for folder in place.parents if "[" not in str(folder))
            words = [str(above), "-k", str(getattr(self._item, "originalname", place.stem))]
        return shlex.join(["pytest", "--ledger-update", *words, *place_flags(self._item.config)])


class Watch:
    """Measures one call of a test, and then holds what its ledgers recorded against its budget.

    Without the fixture ``ledger`` the whole call is measured, with it each ledger that it made.
    """

    def __init__(
        self,
        item: pytest.Item,
        settings: Settings,
        reader: MarkReader,
        find_fixtures: Callable[[], tuple[LedgerMaker | None, BaselineChecker | None]],
    ) -> None:
        self._find_fixtures = find_fixtures
        self.raised: BudgetExceeded | None = None
        marks = [reader.read(mark.args, mark.kwargs) for mark in nearest_marks(item)]
        share = None if settings.tolerance is None else parse_share(settings.tolerance, "tolerance")
        suite = Mark(parse_limits(settings.limits, TABLE), share)
        self.budget = merge_marks([*marks, suite], param_id(item))
        self._is_marked = bool(marks)
        is_measured = self._is_marked or self.budget is not None
        self._own = count_steps(Ledger()) if is_measured and find_fixtures()[0] is None else None
        self._reports: list[Report] | None = None

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Records what runs inside, unless the test has ledgers of its own."""
        with self._own or contextlib.nullcontext():
            yield

    def hold(self) -> None:
        """Holds what was recorded against the budget.

        Raises:
            BudgetExceeded: a number lies above it.
            UsageError: nothing was recorded.
        """
        __tracebackhide__ = True
        if self.budget is None:
            return
        maker, _ = self._find_fixtures()
        if self._is_marked and maker is not None and not maker.ledgers:
            raise UsageError(
                "the test has a budget and asks for the fixture `ledger`, but made no ledger with it, so nothing was "
                "measured: write `with ledger(model, optimizer) as books:`, or leave the fixture out, which measures "
                "the whole call."
            )
        reports = self.reports()
        for number, report in enumerate(reports, start=1):
            broken = tuple(broken_only(judge_budget(report, self.budget)))
            if broken:
                which = f"Measured by ledger {number} of the {len(reports)} of this test. " if len(reports) > 1 else ""
                text = render_broken(report, broken, accept=which + accept_budget(broken))
                self.raised = BudgetExceeded(text, broken)
                raise self.raised
        self._warn(reports, self.budget)

    def reports(self) -> list[Report]:
        """What the ledgers recorded so far; read once."""
        if self._reports is None:
            maker, _ = self._find_fixtures()
            # A test may have asked for the fixture while it ran: then its ledgers count, and not the whole call.
            ledgers = maker.ledgers if maker is not None else [self._own] if self._own is not None else []
            self._reports = [ledger.report for ledger in ledgers]
        return self._reports

    def look_again(self) -> None:
        """Forgets what was read, if there may be more by now: a fixture's ledger is open until its teardown."""
        if self._find_fixtures()[0] is not None:
            self._reports = None

    def results(self) -> tuple[list[Report], list[Property]]:
        """All that the test measured, and as properties of its item."""
        _, checker = self._find_fixtures()
        held = [report for report in self.reports() if report.n_steps]
        reports = held + [report for report in (checker.reports if checker else ()) if report not in held]
        properties = [
            pair for number, report in enumerate(reports, start=1) for pair in encode_run_properties(report, number)
        ]
        limits = {} if self.budget is None else self.budget.limits
        for number in range(1, len(held) + 1):
            properties += encode_budget(limits, number)
        for number, check in enumerate(checker.checks if checker else (), start=1):
            properties += encode_check(check, number)
        if checker is not None:
            checker.n_taken_down = len(checker.checks)
        return reports, properties

    def _warn(self, reports: list[Report], budget: Budget) -> None:
        doubts = {doubt: None for report in reports for doubt in find_doubts(report, budget.limits)}
        for doubt in doubts:
            warnings.warn(f"torchledger: a budget holds, but {doubt}", stacklevel=1)
        if self._is_marked and not any(
            found.value for report in reports for found in measure_quantities(report).values()
        ):
            warnings.warn("torchledger: a budget holds, but the test ran no op of torch on its thread", stacklevel=1)


@contextlib.contextmanager
def watched_method(item: pytest.Item, watch: Watch) -> Generator[None, None, None]:
    """Measures the method of a unittest class alone: its ``setUp`` and ``tearDown`` run inside the same call."""
    assert isinstance(item, pytest.Function)
    function: Callable[..., Any] = item.obj
    wrapped = _wrap(function, watch)
    item.obj = wrapped
    if inspect.iscoroutinefunction(function):
        setattr(item.instance, item.name, wrapped)  # unittest looks this one up by itself
    try:
        yield
    finally:
        item.obj = function
        if inspect.iscoroutinefunction(function):
            delattr(item.instance, item.name)


def _wrap(function: Callable[..., Any], watch: Watch) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            with watch.measuring():
                result = await function(*args, **kwargs)
            watch.hold()
            return result

        return call_async

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        with watch.measuring():
            result = function(*args, **kwargs)
        watch.hold()
        return result

    return call
