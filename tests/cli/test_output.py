"""Every command's page at 80 columns and under an encoding that lacks what it prints."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from runner import HOSTILE, find_commands, find_controls
from synthetic import gpt_report, make_flops, make_report
from torchledger.cli.main import main
from torchledger.cli.output import say
from torchledger.journal.statements import StepReport
from torchledger.report import Report

ROOT = Path(__file__).parents[2]
TRAIN = textwrap.dedent(
    """
    import torch
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(torch.ones(2, 8, device=model.weight.device)).sum().backward()
        optimizer.step()
    """
)
COMMANDS: dict[str, list[str]] = {
    "help": ["--help"],
    "no command": [],
    "show": ["show", "base.json"],
    "show reconciled": ["show", "real.json", "--reconcile", "--tokens", "1k"],
    "show markdown": ["show", "base.json", "--format", "markdown"],
    "compare": ["compare", "base.json", "head.json"],
    "compare github": ["compare", "base.json", "head.json", "--format", "github"],
    "napkin": ["napkin", "--model", "llama-3-8b", "--tokens", "15T", "--accelerator", "H100-SXM", "--seq", "4k"],
    "fit": ["fit", "--devices", "8", "--accelerator", "h100-sxm"],
    "accelerators": ["accelerators"],
    "accelerators h100-sxm": ["accelerators", "h100-sxm"],
    "dtypes": ["dtypes"],
    "run": ["run", "--tokens-per-step", "1k", "train·.py"],
    "dryrun": ["dryrun", "--accelerator", "h100-sxm", "--capacity", "80GB", "train·.py"],
    "missing": ["run", "kein·e.py"],
    "demo": ["demo", "--steps", "1"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("output")
    (path / "train·.py").write_text(TRAIN)
    gpt_report(environment={"torch": "2.13.0", "name": "模型 6·N·D"}).save(path / "base.json")
    gpt_report(recompute=False).save(path / "head.json")
    done = subprocess.run(
        [sys.executable, "-m", "torchledger", "run", "--json", "real.json", "train·.py"],
        cwd=path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return path


def run(folder: Path, words: list[str], encoding: str) -> subprocess.CompletedProcess[bytes]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding, "COLUMNS": "80"}
    command = [sys.executable, "-m", "torchledger", *words]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, check=False)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_stream_that_lacks_characters_costs_nothing(name: str, folder: Path) -> None:
    done = run(folder, COMMANDS[name], "ascii")
    assert done.returncode == {"no command": 2, "missing": 2, "compare": 1, "compare github": 1}.get(name, 0)
    text = (done.stdout + done.stderr).decode("ascii")
    assert "Traceback" not in text
    assert "UnicodeEncodeError" not in text
    if name in ("show reconciled", "demo"):
        assert "6*N*D" in text
    if name not in ("show markdown", "compare github"):
        assert [
            line for line in text.splitlines() if len(line) > 80 and "\\u" not in line and "error: " not in line
        ] == []


def test_say_survives_any_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding, expected in (("ascii", b"6*N - \\u6a21\n"), ("latin-1", "6·N - \\u6a21\n".encode("latin-1"))):
        raw = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding))
        say("6·N − 模")
        assert raw.getvalue() == expected
    text = io.StringIO()
    monkeypatch.setattr(sys, "stderr", text)
    say("::error::6·N", to_stderr=True)
    assert text.getvalue() == "\\x3a:error::6·N\n"
    text.close()
    monkeypatch.setattr(sys, "__stderr__", None)
    say("nowhere to go", to_stderr=True)
    monkeypatch.setattr(sys, "stderr", None)
    say("nowhere to go", to_stderr=True)


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_in_a_report_is_a_command(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    for file, n in (("base", 2), ("head", 4)):
        flops = make_flops({"": {}, name: {"forward": n}}, by_op={name: n}, uncounted={name: 1})
        make_report(StepReport(0, 1, 0.1, flops, {}), faults=(f"x {name}",)).save(tmp_path / f"{file}.json")
    for words in (["show", "base.json"], ["show", "base.json", "--format", "markdown"]):
        assert main([words[0], str(tmp_path / words[1]), *words[2:]]) == 0
        out = capsys.readouterr().out
        assert find_commands(out) == find_controls(out) == []
    assert main(["show", str(tmp_path / "base.json"), "--format", "json"]) == 0
    out = capsys.readouterr().out
    assert find_commands(out) == find_controls(out) == []
    assert Report.from_dict(json.loads(out)) == Report.load(tmp_path / "base.json")
    assert main(["compare", str(tmp_path / "base.json"), str(tmp_path / "head.json")]) == 1
    out = capsys.readouterr().out
    assert all(line.startswith(("::error title=", "::warning title=")) for line in find_commands(out))
    (tmp_path / name.replace("/", "").replace("\0", "")).mkdir(exist_ok=True)
    assert main(["show", str(tmp_path / name)]) == 2
    err = capsys.readouterr().err
    assert find_commands(err) == find_controls(err) == []


def test_counts_are_read_alike_everywhere(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show = ["show", str(folder / "real.json"), "--reconcile", "--tokens"]
    pages = set()
    for tokens in ("4096", "4.096k", "4.096e3", "0.004096M"):
        assert main([*show, tokens]) == 0
        pages.add(capsys.readouterr().out)
    assert len(pages) == 1
    for words, said in (
        ([*show, "many"], "--tokens: cannot read 'many' as a count: write '70B'"),
        ([*show, "0"], "--tokens must be at least 1, not 0."),
        (["run", "--tokens-per-step", "4q", "train·.py"], "--tokens-per-step: cannot read '4q'"),
        (["dryrun", "--accelerator", "t4", "--steps", "x", "train·.py"], "--steps: cannot read 'x'"),
        (["demo", "--steps", "0"], "--steps must be at least 1, not 0."),
    ):
        assert main([str(folder / word) if word.endswith(".py") else word for word in words]) == 2
        assert said in capsys.readouterr().err
