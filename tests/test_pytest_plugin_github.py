"""What a run of tests tells at its end: budgets that are nearly used up, and under GitHub Actions what failed."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch

import torchledger.pytest_fixtures  # stays loaded, so that inner runs share it with this process
from runner import HOSTILE, find_commands, find_controls
from torchledger.render.github import SUMMARY_LIMIT_BYTES

assert torch.__version__
assert torchledger.pytest_fixtures

QUICK = ("-p", "no:cacheprovider", "-p", "no:unraisableexception", "-p", "no:hypothesispytest")

ONES = """
import pytest, torch
import torchledger as tl

def ones(kib):
    return torch.ones(kib * 256)
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    for name in ("CI", "BUILD_NUMBER", "PYTEST_ADDOPTS", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    return pytester


@pytest.fixture
def summary(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(suite.path / "summary.md"))
    monkeypatch.setenv("GITHUB_WORKSPACE", str(suite.path.parent))
    return suite.path / "summary.md"


def run(suite: pytest.Pytester, code: str, *words: str) -> pytest.RunResult:
    suite.makepyfile(test_it=ONES + code)
    return suite.runpytest_inprocess(*QUICK, *words)


def annotations(result: pytest.RunResult) -> list[dict[str, str]]:
    """The commands of a run, as the runner reads them."""
    found = []
    for line in find_commands(result.stdout.str()):
        match = re.fullmatch(r"::(error|warning|notice) ([^:]*)::(.*)", line)
        assert match, line
        properties = dict(pair.split("=", 1) for pair in match[2].split(","))
        found.append({name: unquote(value) for name, value in properties.items()} | {"message": unquote(match[3])})
    return found


BUDGETS = """
@pytest.mark.ledger(peak="4 KiB", flops=0, recompute_flops=0)
def test_nearly():
    ones(4)

@pytest.mark.ledger(peak="8 KiB")
def test_half():
    ones(4)

@pytest.mark.ledger(peak=100, tolerance="10%")
def test_by_its_tolerance():
    torch.ones(27)
"""


def test_budgets_that_are_nearly_used_up_are_told(suite: pytest.Pytester) -> None:
    result = run(suite, BUDGETS)
    result.assert_outcomes(passed=3)
    lines = [line for line in result.stdout.lines if line]
    page = lines[lines.index("Budgets of which 95% or more is used") :][:5]
    assert page[0] == "Budgets of which 95% or more is used"
    assert [line.split() for line in page[3:5]] == [
        ["test_it.py::test_by_its_tolerance", "peak", "108", "B", "100", "B", "108.0", "%"],
        ["test_it.py::test_nearly", "peak", "4.00", "KiB", "4.00", "KiB", "100.0", "%"],
    ]
    assert "test_half" not in result.stdout.str()
    assert all(len(line) <= 80 for line in page)


def test_all_budgets_are_listed_on_request(suite: pytest.Pytester) -> None:
    result = run(suite, BUDGETS, "--ledger-budgets")
    result.stdout.fnmatch_lines(["Budgets, and how much of each was used", "*test_half*peak*4.00 KiB*8.00 KiB*50.0 %"])
    result.stdout.fnmatch_lines(["*test_nearly*recompute_flops*0 FLOP*0 FLOP*"])
    suite.makepyprojecttoml("[tool.torchledger]\nbudgets = true\n")
    run(suite, BUDGETS).stdout.fnmatch_lines(["*test_half*50.0 %"])


def test_a_suite_that_uses_no_budget_up_says_nothing(suite: pytest.Pytester) -> None:
    result = run(suite, "@pytest.mark.ledger(peak=9999)\ndef test_it(): ones(1)\ndef test_plain(): ones(1)\n")
    assert "= torchledger =" not in result.stdout.str()


def test_of_several_ledgers_the_fullest_counts(suite: pytest.Pytester) -> None:
    code = """
@pytest.mark.ledger(peak="4 KiB")
def test_it(ledger):
    for kib in (1, 4, 2):
        with ledger():
            ones(kib)
"""
    run(suite, code).stdout.fnmatch_lines(["*test_it.py::test_it*peak*4.00 KiB*4.00 KiB*100.0 %"])


FAILURES = """
@pytest.mark.ledger(peak="1 KiB", temporaries=10)
def test_over():
    kept = ones(4)

def test_baseline(ledger, ledger_baseline):
    with ledger() as books:
        kept = ones(2)
    ledger_baseline.check(books.report)

@pytest.mark.ledger(peak=1)
@pytest.mark.xfail
def test_expected():
    ones(1)

@pytest.mark.ledger(peak="4 KiB")
def test_fits():
    ones(4)

def test_by_hand(ledger):
    with ledger() as books:
        ones(3)
    books.report.check(tl.Budget(peak=1))

def test_of_its_own():
    assert False
"""


def test_what_failed_is_annotated_and_on_the_page(suite: pytest.Pytester, summary: Path) -> None:
    run(suite, FAILURES.replace("ones(2)", "ones(1)"), "--ledger-update", "-k", "baseline")
    summary.write_text("# what was there\n")
    result = run(suite, FAILURES)
    result.assert_outcomes(passed=1, failed=4, xfailed=1)
    found = annotations(result)
    here = f"{suite.path.name}/test_it.py"
    assert [(line["file"], line["title"]) for line in found] == [
        (here, "torchledger: a budget is exceeded"),
        (here, "torchledger: a number is not the baseline's"),
        (here, "torchledger: a budget is exceeded"),
    ]
    code = (ONES + FAILURES).splitlines()
    for line, name in zip(found, ("over", "baseline", "by_hand"), strict=True):
        assert line["message"].startswith(f"test_it.py::test_{name}: ")
        assert f"def test_{name}(" in " ".join(code[int(line["line"]) - 1 : int(line["line"]) + 2])
    assert found[0]["message"].startswith(
        "test_it.py::test_over: peak 4.00 KiB > budget 1.00 KiB (+3.00 KiB, +300.0 %)"
    )
    assert found[0]["message"].endswith(", and 1 more")
    text = summary.read_text("utf-8")
    assert text.startswith("# what was there\n### torchledger: 3 of 5 measured tests failed\n")
    assert "- baselines: 1 REGRESSION" in text
    assert "| `test_it.py::test_over` | peak 4.00 KiB \\> budget 1.00 KiB" in text
    assert text.count("<details>") == text.count("</details>") == 3
    assert "At the peak of step 0" in text
    assert "| `test_it.py::test_fits` | `peak` | 4.00 KiB | 4.00 KiB | 100.0 % |" in text
    assert "test_of_its_own" not in text


def test_a_run_that_passes_has_a_page_and_no_annotation(suite: pytest.Pytester, summary: Path) -> None:
    result = run(suite, BUDGETS)
    assert annotations(result) == []
    assert summary.read_text("utf-8").startswith("### torchledger: 3 measured tests passed\n")
    summary.unlink()
    run(suite, "def test_plain(): ones(1)\n")
    assert not summary.exists()


def test_elsewhere_nothing_is_written(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(suite.path / "summary.md"))
    result = run(suite, FAILURES)
    assert annotations(result) == []
    assert not (suite.path / "summary.md").exists()


def test_nine_annotations_and_how_many_more(suite: pytest.Pytester, summary: Path) -> None:
    code = "@pytest.mark.ledger(peak=1)\n@pytest.mark.parametrize('n', range(60))\ndef test_it(n):\n    torch.ones(1)\n"
    found = annotations(run(suite, code, "--tb=no"))
    assert len(found) == 10
    assert found[-1]["message"] == "and 51 more"
    text = summary.read_text("utf-8")
    assert "60 of 60 measured tests failed" in text
    assert "and 10 more tests" in text
    assert text.count("<details>") == 20


def test_the_summary_stays_within_its_limit(suite: pytest.Pytester, summary: Path) -> None:
    for room, said in ((1000, False), (10, True)):
        summary.write_bytes(b"x" * (SUMMARY_LIMIT_BYTES - room))
        result = run(suite, FAILURES, "--tb=no")
        assert summary.stat().st_size <= SUMMARY_LIMIT_BYTES
        assert ("summary is full" in result.stdout.str()) is said
        assert result.ret == 1
    text = summary.read_text("utf-8").lstrip("x")
    assert text.count("<details>") == text.count("</details>")


def test_a_summary_that_cannot_be_written_changes_nothing(
    suite: pytest.Pytester, summary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(suite.path / "no" / "summary.md"))
    result = run(suite, BUDGETS)
    assert result.ret == 0
    (found,) = annotations(result)
    assert found["message"] == "cannot write the step's summary: No such file or directory"


def test_names_that_are_commands_are_none(suite: pytest.Pytester, summary: Path) -> None:
    code = f"""
NAMES = {HOSTILE!r}
IDS = [name.replace("#", "") for name in NAMES]  # pytest itself prints these

class Model(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.add_module(name.replace(".", ""), torch.nn.Linear(4, 4))

    def forward(self, x):
        for child in self.children():
            x = child(x)
        return x

@pytest.mark.ledger(peak=1, flops=1)
@pytest.mark.parametrize("name", NAMES, ids=IDS)
def test_it(ledger, name):
    with ledger(Model(name)) as books:
        Model(name)(torch.ones(2, 4)).sum().backward()

@pytest.mark.parametrize("name", NAMES, ids=IDS)
def test_baseline(ledger, ledger_baseline, name):
    model = Model(name)
    with ledger(model) as books:
        model(torch.ones(N, 4)).sum().backward()
    ledger_baseline.check(books.report)
"""
    run(suite, "N = 2\n" + code, "--ledger-update", "-k", "baseline")
    result = run(suite, "N = 3\n" + code, "--ledger-budgets", "-v", "--tb=short")
    found = annotations(result)  # which takes nothing but what we wrote
    assert len(found) == 10
    assert all(line["title"].startswith("torchledger") for line in found)
    text = summary.read_text("utf-8")
    assert find_commands(text) == []
    assert find_controls(text) == []
    ours = [line for line in result.stdout.lines if "Model" not in line]
    assert [line for line in ours if "\x1b" in line] == []


def test_only_the_controller_of_xdist_writes(suite: pytest.Pytester, summary: Path) -> None:
    pytest.importorskip("xdist")
    suite.makepyfile(test_it=ONES + FAILURES, test_other=ONES + BUDGETS)
    result = suite.runpytest_subprocess(*QUICK, "-n", "2", "--ledger-budgets")
    assert len(annotations(result)) == 2  # the baseline is new
    result.stdout.fnmatch_lines(["*test_half*50.0 %"])
    text = summary.read_text("utf-8")
    assert text.count("### torchledger: ") == 1
    assert "2 of 8 measured tests failed" in text


def test_a_bad_marker_of_a_test_that_does_not_run_stops_nothing(suite: pytest.Pytester) -> None:
    code = """
@pytest.mark.ledger(peek="1 KiB")
def test_typo(): pass

@pytest.mark.slow
@pytest.mark.ledger(peak={"a": 1, "z": 1})
@pytest.mark.parametrize("n", [1], ids=["a"])
def test_ids(n): pass

@pytest.mark.ledger(peak="9 KiB")
def test_good(): ones(1)
"""
    for words in (
        ("-k", "good"),
        ("--deselect", "test_it.py::test_typo", "-m", "not slow"),
        ("test_it.py::test_good",),
    ):
        result = run(suite, code, *words)
        result.assert_outcomes(passed=1, deselected=0 if "::" in words[0] else 2)
    for words, said in ((("-k", "typo"), "no quantity 'peek'"), (("-k", "ids"), "no parameter has the id 'z'")):
        result = run(suite, code, *words)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert said in result.stderr.str()
