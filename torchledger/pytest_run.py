"""What the pytest plugin does about a whole run: it gathers what tests found, and settles it at the end.

Under pytest-xdist tests run in workers, and only their controller writes files.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from torchledger.errors import TorchledgerError
from torchledger.gate.config import Settings

if TYPE_CHECKING:
    from torchledger.gate.baselines import BaselineFile
    from torchledger.gate.marks import MarkReader
    from torchledger.gate.results import Failure, Use
    from torchledger.gate.session import Scope, SessionBook
    from torchledger.gate.spool import Spool

CHECKS = "torchledger.baseline."
"""What the names of all properties begin with that come from a baseline."""
OUTPUT = "torchledger"
SPOOL = "torchledger_spool"
"""The keys under which a worker and its controller hand things to one another."""


class Run:
    """One run of pytest, registered as a plugin of its own: some of its hooks are not told which run they are of."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self.config = config
        self.settings = settings
        self.is_worker = hasattr(config, "workerinput")
        self.files: dict[Path, BaselineFile] = {}
        self.spool: Spool | None = None
        self._book: SessionBook | None = None
        self._collected: dict[str, dict[str, str]] = {}
        self._passed: set[str] = set()
        self._n_deselected = 0
        self._trouble: list[str] = []
        self._lines: list[str] = []
        self._uses: dict[str, list[Use]] = {}
        self._failures: dict[str, Failure] = {}
        self._measured: set[str] = set()

    def open_spool(self) -> None:
        """Begins to keep reports aside, if a file of them is wanted.

        Raises:
            ReportWriteError: that file cannot be written.
        """
        path = self.settings.report
        if path is None or self.config.getoption("collectonly", False):
            return
        from torchledger.gate.spool import Spool
        from torchledger.journal.files import check_writable

        if self.is_worker:
            self.spool = Spool(Path(self.config.workerinput[SPOOL]))  # type: ignore[attr-defined]
        else:
            check_writable(path)
            self.spool = Spool()

    @functools.cached_property
    def reader(self) -> MarkReader:
        """Reads the markers of all tests."""
        from torchledger.gate.marks import MarkReader

        return MarkReader()

    # What happens on the way

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Counts the tests that were left out: a run without them says nothing about unused baselines."""
        self._n_deselected += len(items)

    def note_left_out(self, n_tests: int) -> None:
        """Counts tests that were taken out of the list of tests without a word to `pytest_deselected`."""
        self._n_deselected = max(self._n_deselected, n_tests)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Takes down what a test found, wherever it ran."""
        if report.when == "call":
            # An xfailed test has passed in no sense that would make its numbers worth keeping.
            passed = report.passed and not hasattr(report, "wasxfail")
            (self._passed.add if passed else self._passed.discard)(report.nodeid)
        elif report.failed:
            self._passed.discard(report.nodeid)
        self._take_results(report)
        # Fixtures check before and after the call; in a setup there may yet be what an earlier attempt found.
        checks = [pair for pair in report.user_properties if str(pair[0]).startswith(CHECKS)]
        if checks and report.when != "setup":
            self._open_book().record_test(report.nodeid, checks)

    def _take_results(self, report: pytest.TestReport) -> None:
        """Takes down how much of its budgets a test used, and what it says if it failed by one."""
        ours = [pair for pair in report.user_properties if str(pair[0]).startswith("torchledger.")]
        if report.when == "setup":  # what is there may be of an earlier attempt
            self._failures.pop(report.nodeid, None)
            ours = [pair for pair in ours if pair[0] == "torchledger.broken"]
        if not ours:
            return
        from torchledger.gate.results import BROKEN, Failure, decode_uses

        self._measured.add(report.nodeid)
        text = dict(ours).get(BROKEN)
        if report.failed and text is not None:
            file, line, _ = report.location
            self._failures[report.nodeid] = Failure(report.nodeid, file, (line or 0) + 1, str(text))
        self._uses[report.nodeid] = [] if report.nodeid in self._failures else decode_uses(report.nodeid, ours)

    def pytest_keyboard_interrupt(self) -> None:
        """Takes down that the run ended early, by a key or by `pytest.exit`, which may call it a success."""
        self._trouble.append("the run was interrupted")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tells a worker where reports are kept aside."""
        if self.spool is not None:
            node.workerinput[SPOOL] = str(self.spool.folder)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Takes what a worker hands over when it ends."""
        output = getattr(node, "workeroutput", None)
        if error or output is None:
            self._trouble.append("a worker of pytest-xdist crashed")
            return
        found = output.get(OUTPUT, {})
        if "error" in found:
            raise pytest.UsageError(found["error"])
        self._n_deselected = max(self._n_deselected, found.get("n_deselected", 0))
        for name, tests in found.get("collected", {}).items():
            self._collected.setdefault(name, {}).update(tests)

    # The end

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Writes the files that are to be written, and keeps what there is to say for the summary."""
        if self.config.getoption("collectonly", False):
            return
        if self.is_worker:
            self._hand_over(session)
            return
        failed = False
        if self._book is not None or self.settings.prune:
            outcome = self._open_book().settle(self._scope(session, int(exitstatus)), prune=self.settings.prune)
            self._lines += outcome.lines
            failed = outcome.failed
        if self.spool is not None and self.settings.report is not None:
            try:
                n_reports = self.spool.write(self.settings.report)
                self._lines.append(f"{n_reports} report{'s' * (n_reports != 1)} written to {self.settings.report}")
            except TorchledgerError as error:
                self._lines.append(f"ERROR {error}")
                failed = True
        if failed and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Says what became of budgets and baselines, and tells GitHub; nothing where none are used."""
        if self.is_worker or not (self._lines or self._measured):
            return
        from torchledger.render.names import clean, inert
        from torchledger.render.step_summary import is_github
        from torchledger.render.suite import budget_table
        from torchledger.render.text import page_width, render_sections

        page = [inert(clean(line)) for line in self._lines]
        table = budget_table((use for uses in self._uses.values() for use in uses), every=self.settings.budgets)
        if table is not None:
            page += render_sections([table], page_width()).splitlines()
        if page:
            terminalreporter.section("torchledger")
            for line in page:
                terminalreporter.write_line(line)
        if is_github(os.environ):
            self._tell_github(terminalreporter)

    def _tell_github(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Adds a page to the step's summary, and annotates the tests that failed."""
        from torchledger.render.step_summary import append_summary
        from torchledger.render.suite import failure_annotations, render_suite

        failures = [replace(failure, file=self._path_for_github(failure.file)) for failure in self._failures.values()]
        uses = [use for found in self._uses.values() for use in found]
        problem = append_summary(render_suite(failures, uses, self._lines, len(self._measured)), os.environ)
        problems = [line for line in self._lines if line.startswith("ERROR ")] + ([problem] if problem else [])
        for line in failure_annotations(failures, problems):
            terminalreporter.write_line(line)

    def _path_for_github(self, file: str) -> str:
        """A test's file as seen from the folder of the repository."""
        workspace = os.environ.get("GITHUB_WORKSPACE") or str(self.config.rootpath)
        try:
            path = os.path.relpath(self.config.rootpath / file, workspace)
        except ValueError:  # on another drive
            return file
        return Path(file if path.startswith("..") else path).as_posix()

    def _hand_over(self, session: pytest.Session) -> None:
        if self._book is None and not self.settings.prune:
            return
        from torchledger.pytest_items import collected_tests

        self.config.workeroutput[OUTPUT] = {  # type: ignore[attr-defined]
            "n_deselected": self._n_deselected,
            "collected": collected_tests(session.items, self.config.rootpath),
        }

    def _open_book(self) -> SessionBook:
        if self._book is None:
            from torchledger.gate.session import SessionBook

            self._book = SessionBook(self.config.rootpath)
        return self._book

    def _scope(self, session: pytest.Session, exitstatus: int) -> Scope:
        """Which tests this run was about."""
        from torchledger.gate.session import Scope, find_folders, find_orphans
        from torchledger.pytest_items import collected_tests

        items = getattr(session, "items", [])
        collected = self._collected or collected_tests(items, self.config.rootpath)
        folders = {(self.config.rootpath / name).parent for name in collected}
        if self.settings.prune:
            tops = [Path(arg.partition("::")[0]) for arg in self.config.args]
            folders.update(find_folders(tops, skip=self.config.getini("norecursedirs")))
        orphans = tuple(Path(os.path.relpath(path, self.config.rootpath)).as_posix() for path in find_orphans(folders))
        failed = [f"{session.testsfailed} test{'s' * (session.testsfailed != 1)} failed"] if session.testsfailed else []
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            failed.append("no test ran")
        elif exitstatus != pytest.ExitCode.OK and not failed:
            failed.append(f"the run ended with exit code {exitstatus}")
        return Scope(collected, frozenset(self._passed), orphans, tuple(self._left_out()), tuple(failed))

    def _left_out(self) -> Iterator[str]:
        """Why tests were left out of this run."""
        option = self.config.getoption
        if self._n_deselected:
            yield f"{self._n_deselected} {'test was' if self._n_deselected == 1 else 'tests were'} deselected"
        for name in ("--lf", "--sw", "--ignore", "--ignore-glob", "--deselect"):
            if option(name.strip("-").replace("-", "_").replace("sw", "stepwise"), None):
                yield f"{name} was given"
        if self.config.args_source is self.config.ArgsSource.ARGS:
            narrow = [arg for arg in self.config.args if not Path(arg).is_dir()]
            if narrow:
                yield f"only {', '.join(narrow[:3])} was asked for"
        yield from self._trouble
