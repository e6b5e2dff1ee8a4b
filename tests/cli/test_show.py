"""``torchledger show`` and the command line's own manners: exit codes, one-line errors, closed pipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from synthetic import gpt_report, make_journal
from torchledger._version import __version__
from torchledger.cli.commands import COMMANDS, CommandRow
from torchledger.cli.main import main
from torchledger.ledger import Ledger
from torchledger.render.markdown import render_markdown
from torchledger.report import Report


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "report.json"
    gpt_report(n_steps=8, journals={1: make_journal()}).save(path, journal=True)
    return path


def test_formats(saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    report = Report.load(saved)
    expected = {"text": str(report), "markdown": render_markdown(report), "json": saved.read_text().rstrip("\n")}
    for name, page in expected.items():
        assert main(["show", str(saved), "--format", name]) == 0
        assert capsys.readouterr() == (page + "\n", "")
    assert main(["show", str(saved)]) == 0
    assert capsys.readouterr().out == expected["text"] + "\n"


def test_reconcile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A saved report is reconciled without torch: 6 · 12 · 5, less the gradient of an input that needs none."""
    model = torch.nn.Linear(4, 3, bias=False)
    with Ledger(model) as ledger:
        model(torch.ones(5, 4)).sum().backward()
    ledger.report.save(tmp_path / "report.json")
    assert main(["show", str(tmp_path / "report.json"), "--reconcile"]) == 0
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert ["predicted", "360"] in rows
    assert ["no_input_gradient", "-120"] in rows
    assert ["measured", "240"] in rows
    assert main(["show", str(tmp_path / "report.json"), "--reconcile", "--format", "markdown", "--tokens", "10"]) == 0
    assert "| reuse | -360 |" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "report.json"), "--reconcile", "--format", "json"]) == 2


BROKEN: dict[str, bytes | None] = {
    "missing": None,
    "empty": b"",
    "binary": b"\x00\x01\x02",
    "truncated": b'{"format": "torchledger-report", "schema": 1, "st',
    "foreign": b'{"traceEvents": []}',
    "newer": b'{"format": "torchledger-report", "schema": 99}',
    "damaged": json.dumps({**gpt_report().to_dict(), "n_steps": -1}).encode(),
}


@pytest.mark.parametrize("case", BROKEN)
def test_unreadable_input_is_one_line_and_2(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    content = BROKEN[case]
    if content is not None:
        path.write_bytes(content)
    assert main(["show", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("torchledger: error: ")
    assert str(path) in err
    assert err.count("\n") == 1
    assert "newer" in err if case == "newer" else True


def test_a_folder_is_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tmp_path)]) == 2
    assert "Is a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["bogus"], ["show"], ["show", "a", "b"], ["show", "--format", "xml", "a"], ["--bogus"]]
)
def test_wrong_usage_is_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: torchledger" in capsys.readouterr().err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().err
    for words, said in (
        (["--version"], f"torchledger {__version__}\n"),
        (["--help"], "commands:"),
        (["show", "-h"], "FILE"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
        assert said in capsys.readouterr().out


def test_every_command_has_what_a_command_has() -> None:
    for row in COMMANDS:
        command = row.load()
        assert callable(command.configure)
        assert callable(command.execute)
    assert len({row.name for row in COMMANDS}) == len(COMMANDS)


def test_only_the_command_that_is_called_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    monkeypatch.setattr(CommandRow, "load", lambda row: loaded.append(row.name))
    with pytest.raises(AttributeError):
        main(["show", "x"])
    assert loaded == ["show"]


def run_python(code: str, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, check=False, env=env)


MAIN = "import sys; from torchledger.cli.main import main; sys.exit(main())"


def test_a_reader_that_has_enough_is_no_error(saved: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # which hides the error
    command = [sys.executable, "-c", MAIN, "show", str(saved), "--format", "json"]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert saved.stat().st_size > 2 * 65536  # more than a pipe holds
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0
    process.stderr.close()


def test_names_that_the_terminal_lacks_cost_nothing(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    gpt_report(environment={"名": "模型"}).save(path)
    done = run_python(MAIN, "show", str(path), env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert b"\\u540d \\u6a21\\u578b" in done.stdout
    assert done.stderr == b""


def test_show_starts_without_torch_in_a_fraction_of_a_second(saved: Path) -> None:
    began = time.perf_counter()
    done = run_python(MAIN.replace("sys.exit(main())", "main(); sys.exit('torch' in sys.modules)"), "show", str(saved))
    assert done.returncode == 0
    assert time.perf_counter() - began < 5  # 0.2 s on an idle machine


def test_a_traceback_of_ours_is_no_answer_to_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "a\nb.json"
    done = run_python(MAIN, "show", str(path))
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr
    assert done.stderr.count(b"\n") == 1
