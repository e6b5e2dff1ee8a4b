"""The pytest plugin: the marker ``ledger``, the fixtures ``ledger`` and ``ledger_baseline``, and their options.

It decides nothing: `torchledger.gate` does. What is not asked for is not imported, so that a suite without budgets pays
for no more than this file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from torchledger.errors import BudgetExceeded, TorchledgerError
from torchledger.gate.config import FILE, OPTIONS, read_table, resolve_settings
from torchledger.pytest_run import OUTPUT, Run

if TYPE_CHECKING:
    from torchledger.pytest_fixtures import BaselineChecker, LedgerMaker, Watch

_MARKER = "ledger"
_RUN = pytest.StashKey[Run]()
_MAKER = pytest.StashKey["LedgerMaker"]()
_CHECKER = pytest.StashKey["BaselineChecker"]()
_WATCH = pytest.StashKey["Watch"]()


# Options and settings


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the flags of the table of options."""
    group = parser.getgroup("torchledger", "budgets and baselines of training steps (torchledger)")
    for option in OPTIONS:
        action: dict[str, Any] = {"action": "store_true"} if option.kind == "switch" else {"metavar": option.metavar}
        group.addoption(option.flag, dest=f"ledger_{option.key}", default=None, help=option.help, **action)


def pytest_configure(config: pytest.Config) -> None:
    """Reads the settings, and makes the marker known."""
    config.addinivalue_line(
        "markers",
        f"{_MARKER}(peak='2 GiB', activations=..., flops='3 TFLOP', tolerance='2%'): the most that a training step "
        "of the test may cost, in bytes by category and in FLOPs by phase (torchledger)",
    )
    file = config.inipath if config.inipath is not None and config.inipath.name == FILE else config.rootpath / FILE
    flags = {option.key: config.getoption(f"ledger_{option.key}", None) for option in OPTIONS}
    folders = config.invocation_params.dir, file.parent
    try:
        run = Run(config, resolve_settings(flags, os.environ, read_table(file), folders))
        run.open_spool()
    except TorchledgerError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[_RUN] = run
    config.pluginmanager.register(run, "torchledger-run")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes what was kept aside."""
    run = config.stash.get(_RUN, None)
    if run is not None and run.spool is not None and not run.is_worker:
        run.spool.remove()


# Collection


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
    """Reads the markers of what is to run, once others have added theirs: a bad one stops the run before it starts."""
    found = list(items)
    yield
    config.stash[_RUN].note_left_out(len(found) - len(items))
    marked = [item for item in found if item.get_closest_marker(_MARKER) is not None]
    if not marked:
        return
    from torchledger.gate.marks import find_mark_errors
    from torchledger.pytest_items import describe_item

    # Where only some tests of a module were asked for, not all parameter ids are known.
    whole = not any("::" in arg for arg in config.args) and not config.getoption("lf", False)
    selected = {item.nodeid for item in items}
    errors = find_mark_errors([describe_item(item) for item in marked], whole=whole, selected=selected)
    if not errors:
        return
    text = "\n".join(errors)
    if not config.stash[_RUN].is_worker:
        raise pytest.UsageError(text)
    # Raised here it would reach the user as an internal error of the worker: its controller raises it.
    config.workeroutput[OUTPUT] = {"error": text}  # type: ignore[attr-defined]
    items.clear()


# One test


@pytest.fixture
def ledger(request: pytest.FixtureRequest) -> Iterator[LedgerMaker]:
    """Makes ledgers: call it as torchledger.Ledger. The test's budget is held against each of them."""
    from torchledger.pytest_fixtures import LedgerMaker

    maker = request.node.stash[_MAKER] = LedgerMaker()
    yield maker
    del request.node.stash[_MAKER]


@pytest.fixture
def ledger_baseline(request: pytest.FixtureRequest) -> Iterator[BaselineChecker]:
    """Holds a report against the committed baseline of the test: ledger_baseline.check(report)."""
    from torchledger.pytest_fixtures import BaselineChecker

    run = request.config.stash[_RUN]
    checker = request.node.stash[_CHECKER] = BaselineChecker(request.node, run.settings, run.reader, run.files)
    yield checker
    # A fixture that measures around the test checks after it: in its setup, or in its teardown.
    if checker.n_taken_down < len(checker.checks):
        watch = request.node.stash.get(_WATCH, None) or _watch(run, request.node)
        watch.look_again()
        _take_down(run, request.node, watch)
    del request.node.stash[_CHECKER]


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Measures the test, if it has a budget, and holds it: a test's own failure comes first."""
    __tracebackhide__ = True
    run = item.config.stash[_RUN]
    has_budget = item.get_closest_marker(_MARKER) is not None or bool(run.settings.limits)
    if not has_budget and _MAKER not in item.stash and _CHECKER not in item.stash:
        try:
            return (yield)
        finally:
            if _MAKER in item.stash or _CHECKER in item.stash:  # asked for while it ran
                _take_down(run, item, _watch(run, item))
    from torchledger.pytest_fixtures import watched_method

    watch = _watch(run, item)
    try:
        if _is_unittest(item):
            with watched_method(item, watch):
                return (yield)
        with watch.measuring():
            result = yield
        watch.hold()
        return result
    finally:
        _take_down(run, item, watch)


def _watch(run: Run, item: pytest.Item) -> Watch:
    from torchledger.pytest_fixtures import Watch

    def find_fixtures() -> tuple[LedgerMaker | None, BaselineChecker | None]:
        return item.stash.get(_MAKER, None), item.stash.get(_CHECKER, None)

    return Watch(item, run.settings, run.reader, find_fixtures)


def _is_unittest(item: pytest.Item) -> bool:
    unittest = sys.modules.get("unittest")
    return unittest is not None and isinstance(getattr(item, "instance", None), unittest.TestCase)


def _take_down(run: Run, item: pytest.Item, watch: Watch) -> None:
    """Makes what was measured known: as properties of the test, and in the file of reports."""
    from torchledger.pytest_items import plain_id, replace_properties

    item.stash[_WATCH] = watch
    reports, properties = watch.results()
    replace_properties(item, properties)
    if run.spool is not None:
        name = plain_id(item)
        for number, report in enumerate(reports, start=1):
            run.spool.add(name if number == 1 else f"{name}#{number}", report.to_dict())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Shows a broken budget as its text, at the test's own place; what the test is worth stays as pytest found it."""
    report = yield
    if call.excinfo is not None and isinstance(call.excinfo.value, BudgetExceeded):
        from torchledger.gate.results import encode_broken

        report.user_properties.append(encode_broken(call.excinfo.value.message))
    watch = item.stash.get(_WATCH, None)
    if watch is not None and call.when == "teardown":
        del item.stash[_WATCH]  # items live as long as the run, and reports are large
    if watch is None or call.excinfo is None or not isinstance(call.excinfo.value, BudgetExceeded):
        return report
    if call.excinfo.value is watch.raised:
        report.longrepr = call.excinfo.getrepr(style="value")
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        crash.message = crash.message.removeprefix(f"{BudgetExceeded.__module__}.")  # one line has room for little
        if call.excinfo.value is watch.raised:
            crash.path, crash.lineno = str(item.path), (item.location[1] or 0) + 1
    if item.config.get_verbosity() > 0:
        report.sections += [("torchledger", str(found)) for found in watch.results()[0]]
    return report
