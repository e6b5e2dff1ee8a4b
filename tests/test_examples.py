"""Every example is short and runs; so does the demo, whose FLOPs are those of a formula by hand."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from torchledger.cli.main import main
from torchledger.demo.model import GPT, GPTConfig
from torchledger.demo.text import draw_batch, map_tokens, write_tokens
from torchledger.demo.training import BATCH, train
from torchledger.errors import UsageError
from torchledger.report import Report

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
KINDS = ("none", "non-reentrant", "reentrant")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "topics.bin"
    write_tokens(path)
    return path


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_is_short(path: Path) -> None:
    assert len(path.read_text("utf-8").splitlines()) < 60


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs_and_leaves_no_files(path: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(path)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert list(tmp_path.iterdir()) == []


def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "2", "--device", "cpu", "--json", str(tmp_path / "demo.json")]) == 0
    printed = capsys.readouterr().out
    assert "bit by bit the same in both runs" in printed
    plain, checkpointed = (Report.load(tmp_path / f"demo-{name}.json") for name in ("none", "non-reentrant"))
    assert f"{checkpointed.steps[-1].flops.recompute:,}" in printed
    assert f"{plain.peak.total_bytes:,}" in printed
    assert plain.flops.model == checkpointed.flops.model
    assert plain.flops.recompute == 0 < checkpointed.flops.recompute
    assert checkpointed.peak.total_bytes < plain.peak.total_bytes
    assert checkpointed.peak.activations < plain.peak.activations
    assert plain.peak.other == checkpointed.peak.other == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo-non-reentrant.json", "demo-none.json"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--steps", "0"], "--steps must be at least 1"),
        (["--device", "abacus"], "give cpu, cuda or cuda:N"),
        (["--device", "meta"], "give cpu, cuda or cuda:N"),
        (["--device", "cuda:99"], "GPUs that torch can use"),
        (["--data", os.devnull], "is no file, or empty"),
        (["--data", os.curdir], "is no file, or empty"),
    ],
)
def test_demo_refuses_nonsense(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "1", *words]) == 2
    assert says in capsys.readouterr().err


def small_gpt(checkpoint: str) -> GPTConfig:
    return GPTConfig(n_layers=2, n_heads=2, width=32, max_seq=64, checkpoint=checkpoint)


@pytest.mark.parametrize("checkpoint", KINDS)
def test_flops_of_the_demo_by_hand(checkpoint: str, text: Path) -> None:
    c = small_gpt(checkpoint)
    step = train(text, c, steps=1, device=CPU).report.steps[0]
    rows = BATCH * c.max_seq
    down = 2 * rows * c.n_layers * 4 * c.width**2
    projections = 3 * down  # qkv and out make 4·d², up and down 4·d² each
    head = 2 * rows * c.width * c.vocabulary
    attention = 4 * BATCH * c.n_layers * c.width * c.max_seq**2
    assert step.flops.forward == projections + attention + head
    assert step.flops.backward - step.flops.attention_rescore == 2 * (projections + attention + head)
    # A non-reentrant checkpoint stops before the last product of a block, which saves nothing.
    expected = {"none": 0, "non-reentrant": projections + attention - down, "reentrant": projections + attention}
    assert step.flops.recompute == expected[checkpoint]
    assert step.flops.uncounted == {}


def test_checkpointing_changes_no_value(text: Path) -> None:
    losses = [train(text, small_gpt(kind), steps=2, device=CPU).losses for kind in KINDS]
    assert losses[0] == losses[1] == losses[2]


def test_weights_are_drawn_from_a_truncated_normal() -> None:
    for module in GPT(GPTConfig()).modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            fan_in = module.weight.shape[1]
            assert module.weight.abs().max() <= 3 / math.sqrt(fan_in)
            assert module.weight.std().item() == pytest.approx(1 / math.sqrt(fan_in), rel=0.05)


def test_tokens_are_written_once_and_mapped(text: Path, tmp_path: Path) -> None:
    tokens = map_tokens(text)
    assert bytes(tokens[:2000].tolist()) == text.read_bytes()[:2000]
    assert len(tokens) == text.stat().st_size > 100_000
    assert write_tokens(tmp_path / "new" / "again.bin") == len(tokens)
    assert (tmp_path / "new" / "again.bin").read_bytes() == text.read_bytes()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["again.bin"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("torchledger.demo.text.os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_tokens(tmp_path / "topics.bin")
    assert list(tmp_path.iterdir()) == []


def test_targets_follow_their_tokens(text: Path) -> None:
    tokens = map_tokens(text)
    x, y = draw_batch(tokens, 4, 32, torch.Generator().manual_seed(1))
    assert x.shape == y.shape == (4, 32)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert bytes(x[0].tolist()) in text.read_bytes()
    with pytest.raises(UsageError, match="one window takes 33"):
        draw_batch(tokens[:32], 4, 32, torch.Generator())
