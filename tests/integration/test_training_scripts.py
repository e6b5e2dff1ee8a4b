"""Training scripts as people write them, under `torchledger run`: steps, FLOPs and bytes against counts by hand."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import torchledger as tl
from integration import scripts
from torchledger.journal.statements import CATEGORIES

ROOT = Path(__file__).parents[2]
ROWS, LENGTH, WIDTH, LAYERS, VOCABULARY = 4, 16, 32, 2, 64
N_GPT2 = (VOCABULARY + LENGTH) * WIDTH + LAYERS * (12 * WIDTH**2 + 13 * WIDTH) + 2 * WIDTH
PRODUCTS = 2 * LENGTH * (LAYERS * 12 * WIDTH**2 + VOCABULARY * WIDTH)
SCORES = LAYERS * 2 * 2 * LENGTH * LENGTH * WIDTH
FORWARD = PRODUCTS + SCORES
"""FLOPs of one row: products with weights (the head is tied), and attention's two over the full square."""


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


@functools.cache
def run(name: str, folder: Path, *words: str) -> tl.Report:
    (folder / "train.py").write_text(scripts.COMMON + getattr(scripts, name))
    command = [sys.executable, "-m", "torchledger", "run", "--json", "report.json", "train.py", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = tl.Report.load(folder / "report.json")
    assert report.faults == ()
    return report


def check_books(report: tl.Report) -> None:
    """What holds in any plain loop: nothing kept beyond a step has no name, and steps follow one another exactly."""
    for step in report.steps:
        memory = step.memory["cpu"]
        assert memory.peak.total_bytes == sum(memory.peak.by_category.values())
        assert memory.peak.parameters
        assert tl.reconcile(step).flops.residual == 0
        assert tl.reconcile(step).memory.residual == 0
    for before, after in zip(report.steps, report.steps[1:], strict=False):
        if after.index == before.index + 1:
            ended, began = before.memory["cpu"].end.by_category, after.memory["cpu"].start.by_category
            late = {name: began[name] - ended[name] for name in CATEGORIES if began[name] != ended[name]}
            assert not late or any("late" in note for note in (*after.notes, *after.memory["cpu"].notes)), late


@needs("accelerate")
def test_trainer(tmp_path: Path) -> None:
    report = run("TRAINER", tmp_path)
    assert report.n_steps == 4
    assert [step.flops.forward for step in report.steps] == [ROWS * FORWARD] * 4
    # Evaluation after the second step belongs to it; after the last one, to the remainder.
    assert [step.flops.inference for step in report.steps] == [0, 2 * ROWS * FORWARD, 0, 0]
    assert report.remainder is not None
    assert report.remainder.flops.inference == 2 * ROWS * FORWARD
    assert report.peak.parameters == 4 * N_GPT2
    check_books(report)


@needs("accelerate")
def test_trainer_that_accumulates_gradients(tmp_path: Path) -> None:
    report = run("TRAINER_ACCUMULATES", tmp_path)
    assert [step.flops.forward for step in report.steps] == [3 * 2 * FORWARD] * 3
    check_books(report)


@needs("lightning")
def test_lightning(tmp_path: Path) -> None:
    report = run("LIGHTNING", tmp_path)
    forward = 2 * 8 * (16 * 32 + 32)
    assert [step.flops.forward for step in report.steps] == [forward] * 8
    assert report.remainder is not None
    # The sanity check comes before the first step, and is of two batches.
    assert [step.flops.inference // forward for step in report.steps] == [2, 0, 0, 4, 0, 0, 0, 0]
    assert report.remainder.flops.inference == 4 * forward
    check_books(report)


@needs("lightning")
def test_lightning_with_two_optimizers_by_hand(tmp_path: Path) -> None:
    report = run("LIGHTNING_GAN", tmp_path)
    make, judge = 2 * 8 * 4 * 16, 2 * 8 * 16
    assert [step.flops.forward for step in report.steps] == [make + 3 * judge] * 4
    check_books(report)


@needs("accelerate")
def test_accelerate(tmp_path: Path) -> None:
    report = run("ACCELERATE", tmp_path)
    assert [step.flops.forward for step in report.steps] == [2 * 2 * FORWARD] * 4
    check_books(report)


@needs("peft")
def test_peft(tmp_path: Path) -> None:
    report = run("PEFT", tmp_path)
    adapters = LAYERS * 2 * (WIDTH + 3 * WIDTH)
    adapted = ROWS * (FORWARD + 2 * LENGTH * adapters)
    assert [step.flops.forward for step in report.steps] == [adapted] * 3
    assert report.remainder is not None
    assert report.remainder.flops.inference == adapted
    assert report.peak.parameters == 4 * (N_GPT2 + adapters)
    check_books(report)


@pytest.mark.parametrize("weights", ["fresh", "pretrained", "assign", "numpy"])
def test_weights_from_anywhere_are_parameters(tmp_path: Path, weights: str) -> None:
    report = run("CHECKPOINT", tmp_path, weights)
    assert [step.flops.forward for step in report.steps] == [ROWS * FORWARD] * 3
    for step in report.steps:
        memory = step.memory["cpu"]
        assert memory.peak.parameters == 4 * N_GPT2
        assert memory.external_bytes == 0
    assert {step.memory["cpu"].peak.optimizer_state for step in report.steps[1:]} == {
        2 * 4 * N_GPT2 + 4 * (4 + 12 * LAYERS)
    }
    check_books(report)
