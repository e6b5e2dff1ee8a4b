"""The fixture ``ledger_baseline``, in suites that pytest runs: verdicts, what is written, kept and removed."""

from __future__ import annotations

import json
import os
import shlex
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchledger.pytest_fixtures  # stays loaded, so that inner runs share it with this process

assert torch.__version__
assert torchledger.pytest_fixtures

QUICK = ("-p", "no:cacheprovider", "-p", "no:unraisableexception", "-p", "no:hypothesispytest")

HEAD = """
import os, pytest, torch

def step(n):
    model = torch.nn.Linear(256, n, bias=False)
    model(torch.zeros(4, 256)).sum().backward()
"""
# The size is read from the environment, so that one project can be run before and after a change.
ONE = """
def test_train(ledger, ledger_baseline):
    with ledger() as books:
        step(int(os.environ.get("SIZE", 8)))
    ledger_baseline.check(books.report)
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    for name in ("CI", "BUILD_NUMBER", "PYTEST_ADDOPTS", "TORCHLEDGER_UPDATE", "TORCHLEDGER_TOLERANCE", "SIZE"):
        monkeypatch.delenv(name, raising=False)
    return pytester


def run(suite: pytest.Pytester, code: str | None = None, *words: str) -> pytest.RunResult:
    if code is not None:
        suite.makepyfile(test_it=HEAD + code)
    return suite.runpytest_inprocess(*QUICK, *words)


def baseline(suite: pytest.Pytester, name: str = "test_it") -> Path:
    return suite.path / "__ledger__" / f"{name}.json"


def entries(suite: pytest.Pytester, name: str = "test_it") -> dict[str, Any]:
    document = json.loads(baseline(suite, name).read_text("utf-8"))
    assert (document["schema"], document["kind"]) == (1, "torchledger-baselines")
    return document["entries"]  # type: ignore[no-any-return]


def edit(suite: pytest.Pytester, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(baseline(suite).read_text("utf-8"))
    change(document["entries"])
    baseline(suite).write_text(json.dumps(document), "utf-8")


def numbers(groups: dict[str, Any]) -> dict[str, int]:
    return {key: n for group in groups.values() for key, n in group.items() if isinstance(n, int)}


# Verdicts


def test_the_first_run_writes_and_the_second_holds(suite: pytest.Pytester) -> None:
    result = run(suite, ONE)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["*= torchledger =*", "baselines: 1 NEW", "NEW test_it.py::test_train: written to __led*"]
    )
    found = numbers(entries(suite)["test_train"])
    # weight and its gradient 256·8 each, input 4·256, by hand; the FLOPs are 2·4·256·8 forward and once more backward
    assert {key: found[key] for key in ("parameters", "gradients", "inputs", "flops", "recompute_flops")} == {
        "parameters": 8192,
        "gradients": 8192,
        "inputs": 4096,
        "flops": 32768,
        "recompute_flops": 0,
    }
    assert all(isinstance(n, int) for n in found.values())
    before = baseline(suite).read_bytes()
    result = run(suite)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["baselines: 1 PASS"])
    assert baseline(suite).read_bytes() == before
    assert [path.name for path in baseline(suite).parent.iterdir()] == ["test_it.json"]


@pytest.mark.parametrize("factor", [0.95, 0.999])
def test_a_lowered_baseline_fails(suite: pytest.Pytester, factor: float) -> None:
    run(suite, ONE)

    def lower(found: dict[str, Any]) -> None:
        for group in found["test_train"].values():
            group.update({key: int(n * factor) for key, n in group.items() if isinstance(n, int)})

    edit(suite, lower)
    before = baseline(suite).read_bytes()
    result = run(suite)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "*REGRESSION: peak * > baseline * (+* %) on cpu (*), torch *",
            "*REGRESSION: parameters *",
            "*At the peak of step 0, in backward at *",
            "*To accept the new numbers, run this and commit __ledger__/test_it.json:",
            "*  pytest --ledger-update test_it.py::test_train*",
            "baselines: 1 REGRESSION",
            "FAILED test_it.py::test_train - BaselineMismatch: REGRESSION: p*",
        ]
    )
    assert baseline(suite).read_bytes() == before


@pytest.mark.parametrize("ci", ["", "true"])
def test_a_win_must_be_committed_too(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, ci: str) -> None:
    run(suite, ONE)
    monkeypatch.setenv("SIZE", "7")
    monkeypatch.setenv("CI", ci)
    result = run(suite)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*WIN: parameters 7.00 KiB < baseline 8.00 KiB (-1.00 KiB, -12.5 %) on *"])
    result.stdout.fnmatch_lines(["*pytest --ledger-update test_it.py::test_train*"])
    result = run(suite, None, "--ledger-update")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["baselines: 1 WIN", "WIN test_it.py::test_train: written to *"])
    assert numbers(entries(suite)["test_train"])["parameters"] == 7 * 1024
    run(suite).assert_outcomes(passed=1)


@pytest.mark.parametrize("variable", ["CI", "BUILD_NUMBER"])
def test_a_missing_baseline_fails_in_ci(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    result = run(suite, ONE)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*NEW: no baseline for peak *, parameters *, buffers *, and * more on cpu*"])
    result.stdout.fnmatch_lines(["*To accept the new numbers*", "*  pytest --ledger-update test_it.py::test_train*"])
    assert not baseline(suite).parent.exists()
    run(suite, None, "--ledger-update").assert_outcomes(passed=1)
    run(suite).assert_outcomes(passed=1)


def test_another_torch_or_device_is_no_match(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    run(suite, ONE)

    def rename(found: dict[str, Any]) -> None:
        groups = found["test_train"]
        groups["cpu, torch 2.8"] = groups.pop(next(name for name in groups if name.startswith("cpu")))

    edit(suite, rename)
    before = baseline(suite).read_bytes()
    monkeypatch.setenv("CI", "1")
    result = run(suite)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*NO-MATCH: no baseline for peak *"])
    assert baseline(suite).read_bytes() == before
    monkeypatch.setenv("CI", "")
    result = run(suite)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["baselines: 1 NO-MATCH", "NO-MATCH *: written to * (it had 'cpu, torch 2.8', not 'cpu, torch *')"]
    )
    found = entries(suite)["test_train"]
    assert len(found) == 3
    assert "cpu, torch 2.8" in found


def test_flops_and_static_bytes_match_on_any_device(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    run(suite, ONE)

    def rename(found: dict[str, Any]) -> None:
        groups = found["test_train"]
        groups["h100-sxm, torch 2.8"] = groups.pop(next(name for name in groups if name.startswith("cpu")))

    edit(suite, rename)
    monkeypatch.setenv("SIZE", "9")
    result = run(suite)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*REGRESSION: parameters 9.00 KiB > baseline 8.00 KiB*", "*REGRESSION: gradients*"])
    result.stdout.fnmatch_lines(["*REGRESSION: flops 36.86 kFLOP > baseline 32.77 kFLOP*"])


def test_what_grew_is_named(suite: pytest.Pytester) -> None:
    code = """
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(64, 256, bias=False)

    def forward(self, x):
        y = self.up(x)
        return (y.double() if os.environ.get("WIDE") else y).sin().sum()

def test_train(ledger, ledger_baseline):
    model = Block()
    with ledger(model) as books:
        model(torch.zeros(32, 64)).backward()
    ledger_baseline.check(books.report)
"""
    run(suite, code)
    suite._monkeypatch.setenv("WIDE", "1")
    result = run(suite)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*REGRESSION: activations *",
            "*What changed at the peak since the baseline:",
            "*(model) activations +* KiB: *float64*",
        ]
    )


def test_tolerances(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
@pytest.mark.ledger(tolerance="20%")
def test_marked(ledger, ledger_baseline):
    with ledger() as books:
        step(int(os.environ.get("SIZE", 8)))
    ledger_baseline.check(books.report)

def test_given(ledger, ledger_baseline):
    with ledger() as books:
        step(int(os.environ.get("SIZE", 8)))
    ledger_baseline.check(books.report, tolerance="20%")

def test_exact(ledger, ledger_baseline):
    with ledger() as books:
        step(int(os.environ.get("SIZE", 8)))
    ledger_baseline.check(books.report)
"""
    run(suite, code)
    before = entries(suite)
    monkeypatch.setenv("SIZE", "9")
    result = run(suite)
    result.assert_outcomes(passed=2, failed=1)
    run(suite, None, "--ledger-tolerance=20%").assert_outcomes(passed=3)
    monkeypatch.setenv("TORCHLEDGER_TOLERANCE", "20%")
    run(suite).assert_outcomes(passed=3)
    run(suite, None, "--ledger-tolerance=0.1%").assert_outcomes(passed=2, failed=1)
    # What is within its tolerance does not move the baseline, so that it cannot drift.
    run(suite, None, "--ledger-update").assert_outcomes(passed=3)
    assert entries(suite) == before
    monkeypatch.setenv("TORCHLEDGER_TOLERANCE", "")
    run(suite, None, "--ledger-update").assert_outcomes(passed=3)
    after = entries(suite)
    assert after.pop("test_exact") != before.pop("test_exact")
    assert after == before


def test_several_checks_in_one_test(suite: pytest.Pytester) -> None:
    code = """
def test_it(ledger, ledger_baseline):
    with ledger() as a: step(1)
    with ledger() as b: step(2)
    ledger_baseline.check(a.report)
    ledger_baseline.check(b.report)
    ledger_baseline.check(b.report, "named")
    with pytest.raises(Exception, match="a name of its own"):
        ledger_baseline.check(b.report, "named")
    with pytest.raises(Exception, match="give a Report"):
        ledger_baseline.check(b)
"""
    run(suite, code).assert_outcomes(passed=1)
    assert sorted(entries(suite)) == ["test_it", "test_it#2", "test_it#named"]
    run(suite).stdout.fnmatch_lines(["baselines: 3 PASS"])


def test_a_number_as_a_name_and_checks_that_are_numbered(suite: pytest.Pytester) -> None:
    code = """
def test_it(ledger, ledger_baseline):
    with ledger() as a: step(1)
    with ledger() as b: step(2)
    ledger_baseline.check(a.report, "2")
    ledger_baseline.check(b.report)
"""
    run(suite, code).assert_outcomes(passed=1)
    assert sorted(entries(suite)) == ["test_it#2", "test_it#3"]
    run(suite).stdout.fnmatch_lines(["baselines: 2 PASS"])


FIXTURES = """
@pytest.fixture
def measured(ledger, ledger_baseline):
    with ledger() as books:
        yield
    ledger_baseline.check(books.report)

@pytest.fixture
def checked(ledger, ledger_baseline):
    with ledger() as books:
        step(int(os.environ.get("SIZE", 8)))
    ledger_baseline.check(books.report)

def test_after(measured):
    step(int(os.environ.get("SIZE", 8)))

def test_before(checked):
    pass
"""


def test_fixtures_that_check_around_the_test(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(suite, FIXTURES + "def test_fails(measured):\n    step(1)\n    assert 0\n")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["baselines: 3 NEW", "NEW *::test_after: written*", "NEW *::test_fails: not written*"])
    assert sorted(entries(suite)) == ["test_after", "test_before"]
    run(suite, FIXTURES).stdout.fnmatch_lines(["baselines: 2 PASS"])
    monkeypatch.setenv("SIZE", "9")
    result = run(suite)
    result.assert_outcomes(passed=1, errors=2)
    result.stdout.fnmatch_lines(["baselines: 2 REGRESSION"])
    run(suite, None, "--ledger-update").stdout.fnmatch_lines(["REGRESSION *::test_after: written*"])
    run(suite).stdout.fnmatch_lines(["baselines: 2 PASS"])


def test_nothing_measured_is_no_pass(suite: pytest.Pytester) -> None:
    code = """
def test_it(ledger, ledger_baseline):
    ledger_baseline.check(ledger().report)
"""
    run(suite, code).stdout.fnmatch_lines(["*no step was recorded*"])


# Updates


def test_an_update_shows_in_a_diff_just_what_moved(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_train(ledger, ledger_baseline, name):
    with ledger() as books:
        kept = torch.ones(16 + (name == "b") * int(os.environ.get("SIZE", 0)))
    ledger_baseline.check(books.report)
"""
    run(suite, code)
    before = baseline(suite).read_text("utf-8").splitlines()
    monkeypatch.setenv("SIZE", "1")
    run(suite, None, "--ledger-update").stdout.fnmatch_lines(
        ["baselines: 2 PASS, 1 REGRESSION", "REGRESSION *b?: written*"]
    )
    after = baseline(suite).read_text("utf-8").splitlines()
    assert len(before) == len(after)
    moved = [(a.strip(), b.strip()) for a, b in zip(before, after, strict=True) if a != b]
    rows = [pair for pair in moved if "|" in pair[0]]
    assert [pair for pair in moved if pair not in rows] == [
        ('"other": 64,', '"other": 68,'),
        ('"peak": 64,', '"peak": 68,'),
    ]
    assert [b for _, b in rows] == ['"other | (outside) | aten.ones | outside | float32 | 17 | 1": 68']
    assert baseline(suite).read_bytes().endswith(b"}\n")


def test_a_part_of_a_suite_updates_a_part_of_the_file(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    code = ONE + ONE.replace("test_train", "test_other")
    run(suite, code)
    before = entries(suite)
    monkeypatch.setenv("SIZE", "9")
    run(suite, None, "--ledger-update", "-k", "test_other").assert_outcomes(passed=1, deselected=1)
    after = entries(suite)
    assert after["test_train"] == before["test_train"]
    assert after["test_other"] != before["test_other"]


def test_a_test_that_fails_writes_nothing(suite: pytest.Pytester) -> None:
    code = """
def check(ledger, ledger_baseline):
    with ledger() as books: step(1)
    ledger_baseline.check(books.report)

def test_fails(ledger, ledger_baseline):
    check(ledger, ledger_baseline)
    assert 0

@pytest.mark.xfail
def test_xfails(ledger, ledger_baseline):
    check(ledger, ledger_baseline)
    assert 0

@pytest.mark.xfail
def test_passes_against_expectation(ledger, ledger_baseline):
    check(ledger, ledger_baseline)

def test_skips(ledger, ledger_baseline):
    check(ledger, ledger_baseline)
    pytest.skip("late")

@pytest.fixture
def teardown():
    yield
    assert 0

def test_teardown(ledger, ledger_baseline, teardown):
    check(ledger, ledger_baseline)

@pytest.mark.ledger(peak=1)
def test_budget(ledger, ledger_baseline):
    check(ledger, ledger_baseline)

def test_passes(ledger, ledger_baseline):
    check(ledger, ledger_baseline)
"""
    result = run(suite, code, "--ledger-update")
    assert list(entries(suite)) == ["test_passes"]
    result.stdout.fnmatch_lines(["NEW test_it.py::test_fails: not written, since the test did not pass"])


def test_reruns(suite: pytest.Pytester) -> None:
    pytest.importorskip("pytest_rerunfailures")
    code = """
attempts = []

@pytest.mark.flaky(reruns=2)
def test_it(ledger, ledger_baseline):
    attempts.append(1)
    with ledger() as books: step(3)
    ledger_baseline.check(books.report)
    assert len(attempts) == 2
"""
    result = run(suite, code)
    result.stdout.fnmatch_lines(["baselines: 1 NEW", "*1 passed, 1 rerun*"])
    assert list(entries(suite)) == ["test_it"]


# Files that are not as they should be


BROKEN = {
    "truncated": (lambda text: text[: len(text) // 2], "not JSON, or cut off (line *"),
    "empty": (lambda text: "", "it is empty"),
    "merged": (
        lambda text: text.replace('      "cpu', '<<<<<<< HEAD\n      "cpu', 1),
        "it has the marks of a merge conflict",
    ),
    "merged at the top": (
        lambda text: f"<<<<<<< HEAD\n{text}=======\n{text}>>>>>>> x\n",
        "it has the marks of a merge con*",
    ),
    "twice": (lambda text: text.replace('"peak"', '"other"'), 'the key "other" stands twice in one object'),
    "text": (lambda text: text.replace('"peak": ', '"peak": "'), "not JSON*"),
    "a word": (
        lambda text: edited(text, "peak", "12"),
        'the entry "test_train", *: "peak" is "12", not a whole number',
    ),
    "a float": (lambda text: edited(text, "flops", 1.5), '*: "flops" is 1.5, not a whole number'),
    "negative": (lambda text: edited(text, "peak", -5), '*: "peak" is -5, which nothing can have measured'),
    "huge": (lambda text: edited(text, "flops", 10**31), '*: "flops" is 1000*, which nothing can have measured'),
    "a huge row": (lambda text: edited(text, "rows", {"a": -(10**31)}), '*: "a" is -1000*, which nothing can have*'),
    "true": (lambda text: edited(text, "flops", True), '*: "flops" is true, not a whole number'),
    "a list": (lambda text: "[]", "it does not begin with '{'"),
    "another kind": (lambda text: "{}", '"kind" is null, not "torchledger-baselines"'),
    "newer": (lambda text: text.replace('"schema": 1', '"schema": 2'), "a newer torchledger wrote it*"),
    "no schema": (lambda text: text.replace('"schema": 1', '"schema": "1"'), '"schema" is "1", not 1'),
    "no entries": (lambda text: '{"kind": "torchledger-baselines", "schema": 1}', '"entries" is no object'),
    "flat": (
        lambda text: text.replace('"test_train": {', '"test_train": {"cpu": 1,'),
        'the entry "test_train" is no object*',
    ),
    "NaN": (lambda text: text.replace('"peak": ', '"peak": NaN, "x": '), "it holds NaN, which is no JSON number"),
    "binary": (lambda text: "\x00\x01", "it does not begin*"),
}


def edited(text: str, key: str, value: object) -> str:
    document = json.loads(text)
    for group in document["entries"]["test_train"].values():
        if key in group:
            group[key] = value
    return json.dumps(document)


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("words", [(), ("--ledger-update",), ("--ledger-prune",)], ids=["run", "update", "prune"])
def test_a_broken_file_is_an_error_and_stays(suite: pytest.Pytester, kind: str, words: tuple[str, ...]) -> None:
    if not baseline(suite).exists():
        run(suite, ONE)
    change, says = BROKEN[kind]
    baseline(suite).write_text(change(baseline(suite).read_text("utf-8")), "utf-8")
    before = baseline(suite).read_bytes()
    result = run(suite, None, *words)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [f"E *BaselineFileError: *test_it.json is no baseline file: {says}. It was left as it is.*"]
    )
    assert "INTERNALERROR" not in result.stdout.str()
    assert baseline(suite).read_bytes() == before


@pytest.mark.parametrize("name", ["test_it", "test_gone"])
def test_what_is_no_file_is_not_waited_for(suite: pytest.Pytester, name: str) -> None:
    baseline(suite).parent.mkdir()
    os.mkfifo(baseline(suite, name))
    result = run(suite, ONE, "--ledger-update")
    if name == "test_it":
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(["E *BaselineFileError: cannot read *test_it.json: it is no regular file*"])
        assert "def read_baselines" not in result.stdout.str()
    else:
        result.assert_outcomes(passed=1)
    assert stat.S_ISFIFO(baseline(suite, name).stat().st_mode)


def test_what_is_not_known_is_kept_and_named(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    run(suite, ONE)
    document = json.loads(baseline(suite).read_text("utf-8"))
    document["comment"] = "ours"
    document["entries"]["test_train"]["tpu, torch 9.9"] = {"peak": 5, "flux": 7, "note": "x"}
    baseline(suite).write_text(json.dumps(document), "utf-8")
    monkeypatch.setenv("SIZE", "9")
    result = run(suite, None, "--ledger-update")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["UNKNOWN __ledger__/test_it.json: comment, test_train, tpu, torch 9.9, flux*"])
    after = json.loads(baseline(suite).read_text("utf-8"))
    assert after["comment"] == "ours"
    assert after["entries"]["test_train"]["tpu, torch 9.9"] == {"peak": 5, "flux": 7, "note": "x"}
    assert after != document


def test_a_key_that_was_taken_out_is_new_again(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    run(suite, ONE)
    edit(suite, lambda found: [group.pop("peak", None) for group in found["test_train"].values()])
    monkeypatch.setenv("CI", "1")
    run(suite).stdout.fnmatch_lines(["*NEW: no baseline for peak * on cpu*"])


@pytest.mark.parametrize("words", [(), ("--ledger-update",)])
def test_a_folder_that_cannot_be_written(suite: pytest.Pytester, words: tuple[str, ...]) -> None:
    (suite.path / "__ledger__").write_text("a file in its place")  # rights would not stop root
    result = run(suite, ONE, *words)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["ERROR cannot write *test_it.json: *"])
    assert "INTERNALERROR" not in result.stdout.str()
    assert (suite.path / "__ledger__").read_text() == "a file in its place"


def test_thousands_of_entries(suite: pytest.Pytester) -> None:
    run(suite, ONE)

    def multiply(found: dict[str, Any]) -> None:
        for n in range(5000):
            found[f"test_other[{n}]"] = {"any device, any torch": {"flops": n}}

    edit(suite, multiply)
    result = run(suite, None, "-k", "test_train")
    result.assert_outcomes(passed=1)
    result = run(suite)
    result.stdout.fnmatch_lines(["UNUSED __ledger__/test_it.json: test_other?0?, * and 4980 more (kept; *"])
    assert len(entries(suite)) == 5001


NAMES = ["a/b", "../../x", 'say "hi"', "ü ñ 漢", "back\\slash", "a::b", "[x]", "#2", "a | b", "x" * 300, ""]


def test_hostile_names(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"""
@pytest.mark.parametrize("name", {NAMES!r})
def test_größe(ledger, ledger_baseline, name):
    with ledger() as books: step(2)
    ledger_baseline.check(books.report)
"""
    run(suite, code).assert_outcomes(passed=len(NAMES))
    assert len(entries(suite)) == len(NAMES)
    assert [path.name for path in (suite.path / "__ledger__").iterdir()] == ["test_it.json"]
    monkeypatch.setenv("CI", "1")
    result = run(suite, None, "--ledger-prune")
    result.assert_outcomes(passed=len(NAMES))
    result.stdout.fnmatch_lines([f"baselines: {len(NAMES)} PASS"])
    assert len(entries(suite)) == len(NAMES)


# Places


def test_two_modules_of_one_name(suite: pytest.Pytester) -> None:
    for folder in ("one", "two"):
        place = suite.mkdir(folder)
        (place / "test_same.py").write_text(
            HEAD + ONE.replace('"SIZE", 8', f'"SIZE", {len(folder + folder[0])}'), "utf-8"
        )
    result = run(suite, None, "--import-mode=importlib")
    result.assert_outcomes(passed=2)
    assert (suite.path / "one" / "__ledger__" / "test_same.json").exists()
    assert (suite.path / "two" / "__ledger__" / "test_same.json").exists()
    run(suite, None, "--import-mode=importlib").stdout.fnmatch_lines(["baselines: 2 PASS"])


def test_a_root_that_is_not_the_current_folder(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    suite.makepyprojecttoml("[tool.pytest.ini_options]\n")
    tests = suite.mkdir("tests")
    (tests / "test_it.py").write_text(HEAD + ONE, "utf-8")
    monkeypatch.chdir(tests)
    run(suite).assert_outcomes(passed=1)
    assert (tests / "__ledger__" / "test_it.json").exists()
    monkeypatch.setenv("SIZE", "9")
    run(suite).stdout.fnmatch_lines(
        ["*commit tests/__ledger__/test_it.json:", "*  pytest --ledger-update test_it.py::test_train*"]
    )
    monkeypatch.chdir("/")
    result = run(suite, None, str(tests))
    result.stdout.fnmatch_lines(["*  pytest --ledger-update *tests/test_it.py::test_train*"])
    run(suite, None, str(tests), "--ledger-update", f"--rootdir={suite.path / 'tests'}").assert_outcomes(passed=1)
    run(suite, None, str(tests)).assert_outcomes(passed=1)


def test_the_command_that_is_shown_can_be_run(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
class TestIt:
    @pytest.mark.parametrize("name", ["it's a/b \\"c\\""])
    def test_train(self, ledger, ledger_baseline, name):
        with ledger() as books:
            step(int(os.environ.get("SIZE", 8)))
        ledger_baseline.check(books.report)
"""
    run(suite, code)
    monkeypatch.setenv("SIZE", "9")
    result = run(suite)
    line = next(line for line in result.outlines if "--ledger-update" in line)
    words = shlex.split(line.removeprefix("E"))
    assert words[0] == "pytest"
    run(suite, None, *words[1:]).assert_outcomes(passed=1)
    run(suite).assert_outcomes(passed=1)


def test_the_command_has_what_it_takes_to_find_the_test(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = """
>>> import os, torch
>>> with getfixture("ledger")() as books:
...     kept = torch.ones(int(os.environ.get("SIZE", 8)))
>>> _ = getfixture("ledger_baseline").check(books.report)
"""
    (suite.path / "use.md").write_text(example, "utf-8")
    (suite.path / "mod.py").write_text(f'def f():\n    """{example}    """\n', "utf-8")
    (suite.path / "other.ini").write_text("[pytest]\npython_files = check_*.py\n", "utf-8")
    inside = suite.mkdir("a b") / "ü [1]"
    inside.mkdir()
    (inside / "check_it.py").write_text(HEAD + ONE, "utf-8")
    given = ["-c", "other.ini", "--doctest-modules", "--doctest-glob=*.md"]
    run(suite, None, *given).assert_outcomes(passed=3)
    monkeypatch.setenv("SIZE", "9")
    result = run(suite, None, *given)
    result.assert_outcomes(failed=3)
    lines = [line.removeprefix("E").strip() for line in result.outlines]
    commands = {line for line in lines if line.startswith("pytest --ledger-update")}
    assert len(commands) == 3
    for command in commands:
        run(suite, None, *shlex.split(command)[1:]).assert_outcomes(passed=1)
    run(suite, None, *given).assert_outcomes(passed=3)


# Unused entries


def two_tests(suite: pytest.Pytester) -> None:
    run(suite, ONE + ONE.replace("test_train", "test_gone"))
    assert sorted(entries(suite)) == ["test_gone", "test_train"]
    suite.makepyfile(test_it=HEAD + ONE)


def test_unused_entries_are_named_and_kept(suite: pytest.Pytester) -> None:
    two_tests(suite)
    result = run(suite)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["baselines: 1 PASS", "UNUSED __ledger__/test_it.json: test_gone (kept; *--ledger-prune*"]
    )
    run(suite, None, "--ledger-update")
    assert sorted(entries(suite)) == ["test_gone", "test_train"]


def test_prune_removes_them_after_a_whole_run_that_passed(suite: pytest.Pytester) -> None:
    two_tests(suite)
    result = run(suite, None, "--ledger-prune")
    result.assert_outcomes(passed=1)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["UNUSED __ledger__/test_it.json: removed test_gone"])
    assert sorted(entries(suite)) == ["test_train"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-k", "train"], "1 test was deselected"),
        (["--deselect", "test_it.py::test_second"], "1 test was deselected; --deselect was given"),
        (["test_it.py::test_train"], "only test_it.py::test_train was asked for"),
        (["test_it.py"], "only test_it.py was asked for"),
        (["--ignore=x"], "--ignore was given"),
        (["--lf"], "--lf was given"),
        (["-m", "not slow"], "1 test was deselected"),
    ],
)
def test_prune_is_refused_after_a_part(suite: pytest.Pytester, words: list[str], says: str) -> None:
    two_tests(suite)
    suite.makepyfile(test_it=HEAD + ONE + "@pytest.mark.slow\ndef test_second(): pass\n")
    result = suite.runpytest_inprocess(*QUICK[2:], "--ledger-prune", *words)
    result.stdout.fnmatch_lines([f"--ledger-prune removed nothing, since it takes a whole run that passed: {says}*"])
    assert sorted(entries(suite)) == ["test_gone", "test_train"]
    assert result.ret == 1


@pytest.mark.parametrize(
    "extra",
    [
        "def test_fails(): assert 0",
        "raise RuntimeError",
        "@pytest.fixture\ndef f(): assert 0\ndef test_errors(f): pass",
    ],
)
def test_prune_is_refused_after_a_failure(suite: pytest.Pytester, extra: str) -> None:
    two_tests(suite)
    (suite.path / "test_extra.py").write_text(f"import pytest\n{extra}\n")
    result = run(suite, None, "--ledger-prune")
    result.stdout.fnmatch_lines(["--ledger-prune removed nothing, *: *"])
    assert sorted(entries(suite)) == ["test_gone", "test_train"]


@pytest.mark.parametrize(
    ("conftest", "says"),
    [
        ("def pytest_collection_modifyitems(items): items[:] = items[:1]", "1 test was deselected"),
        (
            "import pytest\ndef pytest_runtest_teardown(item): pytest.exit('enough', returncode=0)",
            "the run was interrupted",
        ),
    ],
    ids=["taken out", "ended"],
)
def test_prune_is_refused_after_a_part_that_nobody_spoke_of(suite: pytest.Pytester, conftest: str, says: str) -> None:
    two_tests(suite)
    suite.makepyfile(test_it=HEAD + ONE + "def test_second(): pass\n")
    suite.makeconftest(conftest)
    result = run(suite, None, "--ledger-prune")
    result.stdout.fnmatch_lines([f"--ledger-prune removed nothing, since it takes a whole run that passed: {says}*"])
    assert sorted(entries(suite)) == ["test_gone", "test_train"]
    assert result.ret == 1


def test_prune_keeps_what_was_skipped_or_expected_to_fail(suite: pytest.Pytester) -> None:
    code = ONE + ONE.replace("test_train", "test_second") + ONE.replace("test_train", "test_third")
    run(suite, code)
    marked = code.replace("def test_second", "@pytest.mark.skip\ndef test_second")
    marked = marked.replace("def test_third", "@pytest.mark.xfail(run=False)\ndef test_third")
    result = run(suite, marked, "--ledger-prune")
    result.assert_outcomes(passed=1, skipped=1, xfailed=1)
    assert len(entries(suite)) == 3
    assert "UNUSED" not in result.stdout.str()


def test_prune_keeps_what_only_another_device_can_measure(suite: pytest.Pytester) -> None:
    run(suite, ONE)
    group = {"h100-sxm, torch 2.13": {"peak": 1}, "any device, any torch": {"flops": 1}}
    edit(suite, lambda found: found.update({"test_cuda": group, "test_cpu": {"cpu, torch 2.1": {"peak": 1}}}))
    run(suite, None, "--ledger-prune").stdout.fnmatch_lines(["*removed test_cpu", "*test_cuda (kept*"])
    assert sorted(entries(suite)) == ["test_cuda", "test_train"]


def test_prune_and_a_check_that_is_no_longer_made(suite: pytest.Pytester) -> None:
    run(suite, ONE + "    ledger_baseline.check(books.report, 'second')\n")
    assert sorted(entries(suite)) == ["test_train", "test_train#second"]
    run(suite, ONE, "--ledger-prune").stdout.fnmatch_lines(["*removed test_train#second"])


def test_files_whose_module_is_gone(suite: pytest.Pytester) -> None:
    sub = suite.mkdir("sub")
    (sub / "test_old.py").write_text(HEAD + ONE, "utf-8")
    run(suite, ONE)
    (sub / "test_old.py").unlink()
    file = sub / "__ledger__" / "test_old.json"
    run(suite, None, "--ledger-update").assert_outcomes(passed=1)
    assert file.exists()
    result = run(suite, None, "--ledger-prune", "-k", "train and not x", "--ignore=y")
    assert file.exists()
    result = run(suite, None, "--ledger-prune")
    result.stdout.fnmatch_lines(["UNUSED sub/__ledger__/test_old.json: removed test_train"])
    assert not file.exists()
    assert baseline(suite).exists()


def test_collect_only_writes_nothing(suite: pytest.Pytester) -> None:
    two_tests(suite)
    before = baseline(suite).read_bytes()
    result = run(suite, None, "--collect-only", "--ledger-update", "--ledger-prune", "--ledger-report=r.json")
    assert result.ret == 0
    assert baseline(suite).read_bytes() == before
    assert not (suite.path / "r.json").exists()


def test_last_failed_keeps_everything(suite: pytest.Pytester) -> None:
    code = ONE + "\ndef test_other(): assert 0\n"
    suite.makepyfile(test_it=HEAD + code)
    suite.runpytest_inprocess(*QUICK[2:])
    before = baseline(suite).read_bytes()
    for _ in range(2):
        suite.runpytest_inprocess(*QUICK[2:], "--lf", "--ledger-update", "--ledger-prune")
    assert baseline(suite).read_bytes() == before
