"""The plugin where tests run in several processes: numbers travel, and only the controller writes."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from torchledger.report import Report

pytest.importorskip("xdist")

QUICK = ("-p", "no:cacheprovider", "-p", "no:unraisableexception", "-p", "no:hypothesispytest")

SUITE = """
import os, pytest, torch
import torchledger as tl

@pytest.mark.parametrize("n", range(1, 7))
def test_baseline(ledger, ledger_baseline, n):
    with ledger() as books:
        kept = torch.ones(256 * n)
    ledger_baseline.check(books.report)

@pytest.mark.ledger(peak="1 KiB")
@pytest.mark.parametrize("n", [1, 2])
def test_budget(n):
    torch.ones(256 * n)

@pytest.mark.ledger(peak=1)
@pytest.mark.xfail(raises=tl.BudgetExceeded, strict=True)
def test_expected():
    torch.ones(1)
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    for name in ("CI", "BUILD_NUMBER", "PYTEST_ADDOPTS", "PYTEST_XDIST_AUTO_NUM_WORKERS"):
        monkeypatch.delenv(name, raising=False)
    return pytester


def run(suite: pytest.Pytester, *words: str) -> pytest.RunResult:
    result = suite.runpytest_subprocess(*QUICK, *words)
    assert "INTERNALERROR" not in result.stdout.str() + result.stderr.str()
    return result


def entries(suite: pytest.Pytester) -> dict[str, dict[str, dict[str, int]]]:
    text = (suite.path / "__ledger__" / "test_it.json").read_text("utf-8")
    return json.loads(text)["entries"]  # type: ignore[no-any-return]


def peaks(suite: pytest.Pytester) -> dict[str, int]:
    return {
        test: group["peak"] for test, groups in entries(suite).items() for group in groups.values() if "peak" in group
    }


def test_workers_measure_and_the_controller_writes(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    suite.makepyfile(test_it=SUITE)
    words = ("-n", "2", "--dist", "worksteal", "--junitxml=junit.xml", "--ledger-report=reports.json")
    result = run(suite, *words)
    result.assert_outcomes(passed=7, failed=1, xfailed=1)
    result.stdout.fnmatch_lines(["peak 2.00 KiB > budget 1.00 KiB (+1.00 KiB, +100.0 %) on cpu (*"])
    result.stdout.fnmatch_lines(["baselines: 6 NEW", "9 reports written to *reports.json"])
    result.stdout.fnmatch_lines(["FAILED test_it.py::test_budget?2? - BudgetExceeded: peak 2.*"])
    assert peaks(suite) == {f"test_baseline[{n}]": 1024 * n for n in range(1, 7)}
    found = {}
    for case in ElementTree.parse(suite.path / "junit.xml").iter("testcase"):
        found[case.get("name")] = {p.get("name"): p.get("value") for p in case.iter("property")}
    assert found["test_budget[2]"]["torchledger.peak_bytes"] == "2048"
    document = json.loads((suite.path / "reports.json").read_text("utf-8"))
    assert Report.from_dict(document["reports"]["test_it.py::test_baseline[6]"]).peak.total_bytes == 6 * 1024
    assert len(document["reports"]) == 9
    assert [path.name for path in (suite.path / "__ledger__").iterdir()] == ["test_it.json"]
    assert [path.name for path in suite.path.rglob("*") if path.suffix in (".tmp", ".jsonl")] == []

    # The same without workers gives the same file, byte by byte.
    file = suite.path / "__ledger__" / "test_it.json"
    before = file.read_bytes()
    file.unlink()
    run(suite, "-p", "no:xdist").stdout.fnmatch_lines(["baselines: 6 NEW"])
    assert file.read_bytes() == before

    # And a baseline that no test uses is known to be unused, and goes, only after a whole run that passed.
    suite.makepyfile(test_it=SUITE.replace("range(1, 7)", "range(1, 4)").replace("[1, 2]", "[1]"))
    monkeypatch.setenv("CI", "1")
    result = run(suite, "-n", "2", "-k", "baseline", "--ledger-prune")
    result.stdout.fnmatch_lines(["--ledger-prune removed nothing, *: 2 tests were deselected"])
    assert len(entries(suite)) == 6
    result = run(suite, "-n", "2", "--ledger-prune")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["baselines: 3 PASS", "*: removed test_baseline?4?, test_baseline?5?, test_baseline?6?"]
    )
    assert len(entries(suite)) == 3


def test_tests_have_the_same_names_in_a_group(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import os, pytest, torch

@pytest.fixture
def measured(ledger, ledger_baseline):
    with ledger() as books:
        yield
    ledger_baseline.check(books.report)

@pytest.mark.xdist_group("one")
def test_it(measured):
    torch.ones(int(os.environ.get("SIZE", 8)))
"""
    suite.makepyfile(test_it=code)
    result = run(suite, "-n", "2", "--dist", "loadgroup", "--ledger-report=r.json")
    result.stdout.fnmatch_lines(["baselines: 1 NEW"])
    assert list(entries(suite)) == ["test_it"]
    assert list(json.loads((suite.path / "r.json").read_text("utf-8"))["reports"]) == ["test_it.py::test_it"]
    monkeypatch.setenv("SIZE", "9")
    result = run(suite, "-n", "2", "--dist", "loadgroup", "--import-mode=importlib")
    result.stdout.fnmatch_lines(["*  pytest --ledger-update test_it.py::test_it --import-mode=importlib"])


def test_a_bad_marker_is_a_usage_error_of_the_controller(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_it="import pytest\n@pytest.mark.ledger(peak='24 MBananas')\ndef test_a(): pass\n")
    result = run(suite, "-n", "2")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: test_it.py::test_a: *cannot read '24 MBananas' as a size: write '2GiB'*"])


def test_a_worker_that_dies_takes_no_baseline_with_it(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_it=SUITE.replace("[1, 2]", "[1]"))
    run(suite, "-p", "no:xdist")
    before = Path(suite.path / "__ledger__" / "test_it.json").read_bytes()
    suite.makepyfile(test_it=SUITE.replace("range(1, 7)", "range(1, 3)") + "\ndef test_dies(): os._exit(3)\n")
    result = run(suite, "-n", "2", "--ledger-prune", "--ledger-report=r.json")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["--ledger-prune removed nothing, *: *a worker of pytest-xdist crashed; * tests failed"]
    )
    assert Path(suite.path / "__ledger__" / "test_it.json").read_bytes() == before
    assert json.loads((suite.path / "r.json").read_text("utf-8"))["kind"] == "torchledger-reports"
