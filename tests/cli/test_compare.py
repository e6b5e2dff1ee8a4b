"""``torchledger compare``: exit codes, formats, GitHub Actions, and files that are none."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import pytest

from runner import find_commands
from synthetic import gpt_report, make_flops, make_report, with_peak
from torchledger.cli.compare import FORMATS
from torchledger.cli.main import main
from torchledger.journal.statements import StepReport
from torchledger.render.github import SUMMARY_LIMIT_BYTES
from torchledger.report import Report


class Files(NamedTuple):
    """A report, and the same with its peak lowered by 5 %."""

    base: str
    lower: str


@pytest.fixture
def files(tmp_path: Path) -> Files:
    report = gpt_report()
    report.save(tmp_path / "base.json")
    with_peak(report, Fraction(95, 100)).save(tmp_path / "lower.json")
    return Files(str(tmp_path / "base.json"), str(tmp_path / "lower.json"))


@pytest.fixture(autouse=True)
def no_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def summary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    return tmp_path / "summary.md"


def save_many(path: Path, reports: dict[str, Report]) -> str:
    document = {name: report.to_dict() for name, report in reports.items()}
    path.write_text(json.dumps({"kind": "torchledger-reports", "schema": 1, "reports": document}))
    return str(path)


@pytest.mark.parametrize("format_", FORMATS)
def test_a_base_lowered_by_5_percent_fails_the_gate(
    format_: str, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", files.lower, files.base, "--format", format_]) == 1
    out, err = capsys.readouterr()
    assert "REGRESSION: peak 465.51 MiB" in out.splitlines()[0]
    assert "::error" not in out
    assert err == ""
    assert main(["compare", files.base, files.base, "--format", format_]) == 0
    assert "PASS" in capsys.readouterr().out.splitlines()[0]
    assert main(["compare", files.base, files.lower, "--format", format_]) == 0
    assert "WIN" in capsys.readouterr().out.splitlines()[0]


def test_tolerances_by_key(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    enough = ["--tolerance", "peak=6%", "--tolerance", "activations=25MiB"]
    assert main(["compare", files.lower, files.base, *enough]) == 0
    assert main(["compare", files.lower, files.base, *enough, "--tolerance=reserved=0"]) == 1
    assert main(["compare", files.lower, files.base, *enough[:2], "--tolerance=activations=24MiB"]) == 1
    assert "activations" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["2"], "KEY=2%"),
        (["peak=2"], "'10MiB' or '0'"),
        (["peak=24 MBananas"], "'10MiB' or '0'"),
        (["peek=2%"], "did you mean 'peak'"),
        (["peak=2%", "peak=3%"], "gives peak twice"),
    ],
)
def test_wrong_tolerances_are_2(words: list[str], says: str, files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    given = [option for word in words for option in ("--tolerance", word)]
    assert main(["compare", files.base, files.base, *given]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1


BROKEN: dict[str, bytes | None] = {
    "missing": None,
    "empty": b"",
    "binary": b"\x00\x01\x02",
    "truncated": json.dumps(gpt_report().to_dict()).encode()[:5000],
    "foreign": b'{"traceEvents": []}',
    "newer": b'{"format": "torchledger-report", "schema": 99}',
    "newer many": b'{"kind": "torchledger-reports", "schema": 99, "reports": {}}',
    "damaged": json.dumps({**gpt_report().to_dict(), "n_steps": -1}).encode(),
    "damaged many": b'{"kind": "torchledger-reports", "schema": 1, "reports": {"a": {}}}',
    "deep": b'{"kind":' + b"[" * 100_000,
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("side", [0, 1])
def test_unreadable_input_is_one_line_and_2(
    case: str, side: int, files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str], summary: Path
) -> None:
    path = tmp_path / "report.json"
    content = BROKEN[case]
    if content is not None:
        path.write_bytes(content)
    words = [files.base, files.base]
    words[side] = str(path)
    assert main(["compare", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("torchledger: error: ")
    assert str(path) in err
    assert err.count("\n") == 1
    assert not summary.exists()


def test_nothing_to_compare_is_3(files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Report().save(tmp_path / "none.json")
    assert main(["compare", files.base, str(tmp_path / "none.json")]) == 3
    assert capsys.readouterr().out.startswith("NO-MATCH: nothing to compare")
    one = save_many(tmp_path / "one.json", {"test_a": gpt_report()})
    other = save_many(tmp_path / "other.json", {"test_b": gpt_report()})
    assert main(["compare", one, other]) == 3
    out = capsys.readouterr().out
    assert "only in base  test_a" in out
    assert "only in head  test_b" in out


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("actions", ["", "true"])
def test_whoever_reads_no_further_still_gets_the_verdict(format_: str, actions: str, files: Files) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "torchledger", "compare", files.lower, files.base, "--format", format_]
    environment = {**os.environ, "GITHUB_ACTIONS": actions}
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=environment, check=False)
    os.close(writer)
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr


def test_many_reports(files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = gpt_report()
    lower = with_peak(report, Fraction(95, 100))
    base = save_many(tmp_path / "b.json", {"test_a": report, "test_b": lower, "test_old": report})
    head = save_many(tmp_path / "h.json", {"test_a": report, "test_b": report, "test_new": report})
    assert main(["compare", base, head]) == 1
    out = capsys.readouterr().out
    assert out.startswith(
        "REGRESSION: test_b: peak 465.51 MiB -> 490.01 MiB (+24.50 MiB, +5.3 %), and 1 more; 1 of 2 pass"
    )
    assert "only in base  test_old" in out
    assert "only in head  test_new" in out
    single = save_many(tmp_path / "s.json", {"test_a": report})
    assert main(["compare", files.lower, single]) == 1


def test_under_github_actions(files: Files, summary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary.write_text("# what was there\n")
    for format_ in FORMATS:
        assert main(["compare", files.lower, files.base, "--format", format_]) == 1
        out, err = capsys.readouterr()
        annotations = err if format_ == "markdown" else out
        assert sum(line.startswith("::error title=") for line in annotations.splitlines()) == 2
        assert "::error" not in (out if format_ == "markdown" else err)
    text = summary.read_text("utf-8")
    assert text.startswith("# what was there\n### torchledger: REGRESSION: peak ")
    assert text.count("### torchledger") == 3
    assert "</details>" in text


def test_the_summary_stays_within_its_limit(files: Files, summary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for room in (100_000, 1000, 10, -10):
        summary.write_bytes(b"x" * (SUMMARY_LIMIT_BYTES - room))
        assert main(["compare", files.lower, files.base]) == 1
        size = summary.stat().st_size
        assert size <= max(SUMMARY_LIMIT_BYTES, SUMMARY_LIMIT_BYTES - room)
        assert ("summary is full" in capsys.readouterr().err) is (room <= 10)
        assert (size > SUMMARY_LIMIT_BYTES - room) is (room > 10)


def test_a_summary_that_cannot_be_written_does_not_change_the_verdict(
    files: Files, summary: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary.parent / "no" / "summary.md"))
    assert main(["compare", files.lower, files.base]) == 1
    assert "cannot write the step's summary" in capsys.readouterr().err
    monkeypatch.delenv("GITHUB_STEP_SUMMARY")
    assert main(["compare", files.base, files.base]) == 0
    assert capsys.readouterr().err == ""


def test_a_module_named_like_a_command_is_none(
    tmp_path: Path, summary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, n in (("base", 2), ("head", 4)):
        flops = make_flops({"": {}, "::set-env name=A::b": {"forward": n}, "\n::error::c": {"forward": n}})
        make_report(StepReport(0, 1, 0.1, flops, {})).save(tmp_path / f"{name}.json")
    assert main(["compare", str(tmp_path / "base.json"), str(tmp_path / "head.json")]) == 1
    out = capsys.readouterr().out
    commands = find_commands(out)
    assert commands
    assert all(line.startswith("::error title=torchledger%3A ") for line in commands)
    assert "\\x3a:set-env name=A" in out


def run_main(
    *words: str, env: dict[str, str] | None = None, code: str = "sys.exit(main())"
) -> subprocess.CompletedProcess[bytes]:
    program = f"import sys; from torchledger.cli.main import main; {code}"
    return subprocess.run([sys.executable, "-c", program, *words], capture_output=True, check=False, env=env)


def test_it_starts_without_torch_in_a_fraction_of_a_second(files: Files) -> None:
    began = time.perf_counter()
    done = run_main("compare", files.lower, files.base, code="print(main(), 'torch' in sys.modules)")
    assert done.stdout.splitlines()[-1] == b"1 False"
    assert time.perf_counter() - began < 5  # 0.2 s on an idle machine


def test_no_colour_and_any_encoding(files: Files) -> None:
    environment = {"PYTHONIOENCODING": "ascii", "NO_COLOR": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    done = run_main("compare", files.lower, files.base, env=environment)
    assert (done.returncode, done.stderr) == (1, b"")
    assert b"\x1b" not in done.stdout


def test_a_reader_that_has_enough_is_no_error_and_gets_the_verdict(tmp_path: Path) -> None:
    names = [f"tests/test_{'long' * 30}.py::test_{i}" for i in range(60)]
    report = gpt_report(n_steps=1)
    base = save_many(tmp_path / "b.json", dict.fromkeys(names, with_peak(report, Fraction(95, 100))))
    head = save_many(tmp_path / "h.json", dict.fromkeys(names, report))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # which hides the error
    command = [sys.executable, "-m", "torchledger", "compare", base, head, "--format", "github"]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 1
    process.stderr.close()


def test_a_traceback_of_ours_is_no_answer_to_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "a\nb.json"
    done = run_main("compare", str(path), str(path))
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_commands_of_the_ready_workflow_can_be_carried_out(files: Files) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with pre-commit, which is part of the extra 'dev'")
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "ci-gate.md").read_text("utf-8")
    workflow, hooks = (
        yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    )
    steps = [step.get("run", "") for step in workflow["jobs"]["compare"]["steps"]]
    commands = [line.strip() for step in steps for line in step.splitlines() if "torchledger compare" in line]
    commands.append(hooks["repos"][0]["hooks"][0]["entry"].split(" && ")[1].rstrip("'"))
    assert len(commands) == 2
    for command in commands:
        words = [word for word in shlex.split(command)[1:] if not word.endswith(".json")]
        assert main([words[0], files.base, files.base, *words[1:]]) == 0
