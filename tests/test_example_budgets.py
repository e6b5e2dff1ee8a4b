"""The example project with budgets and a committed baseline: it passes as it is, and its gate can fail."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROJECT = Path(__file__).parent.parent / "examples" / "budgets"
# The baseline has the numbers of this version of torch; another one finds no match, and writes its own.
IS_COMMITTED = torch.__version__.startswith("2.13.")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return shutil.copytree(PROJECT, tmp_path / "budgets", ignore=shutil.ignore_patterns("__pycache__"))


def run(project: Path, *words: str, ci: str = "", where: str = ".") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CI": ci, "BUILD_NUMBER": "", "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
    return subprocess.run(command, cwd=project / where, env=environment, capture_output=True, text=True, check=False)


def baseline(project: Path) -> Path:
    return project / "tests" / "__ledger__" / "test_training.json"


def scale(project: Path, factor: float) -> None:
    """Scales all numbers of the baseline, as if an earlier run had measured them."""
    document = json.loads(baseline(project).read_text("utf-8"))
    for groups in document["entries"].values():
        for group in groups.values():
            group.update({key: int(n * factor) for key, n in group.items() if isinstance(n, int)})
    baseline(project).write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", "utf-8")


def test_files_are_short() -> None:
    files = [path for path in PROJECT.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.name for path in files} == {"pyproject.toml", "model.py", "test_training.py", "test_training.json"}
    written = [path for path in files if path.suffix != ".json"]  # the baseline is not
    assert all(len(path.read_text("utf-8").splitlines()) < 60 for path in written)


@pytest.mark.parametrize("where", [".", "tests"])
def test_it_passes_and_changes_nothing(project: Path, where: str) -> None:
    before = baseline(project).read_bytes()
    done = run(project, ci="1" if IS_COMMITTED else "", where=where)
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout
    assert not IS_COMMITTED or "baselines: 1 PASS" in done.stdout
    assert not IS_COMMITTED or baseline(project).read_bytes() == before


def test_the_gate_fails_on_a_lowered_baseline(project: Path) -> None:
    committed = baseline(project).read_bytes()
    scale(project, 0.95)
    lowered = baseline(project).read_bytes()
    done = run(project)
    assert done.returncode == 1
    assert "REGRESSION: flops 193.92 MFLOP > baseline 184.22 MFLOP (+9.70 MFLOP, +5.3 %)" in done.stdout
    assert not IS_COMMITTED or "REGRESSION: peak 4.15 MiB > baseline 3.94 MiB (+0.21 MiB, +5.3 %)" in done.stdout
    assert "pytest --ledger-update tests/test_training.py::test_nothing_has_changed" in done.stdout
    assert baseline(project).read_bytes() == lowered
    assert run(project, "--ledger-update").returncode == 0
    assert not IS_COMMITTED or baseline(project).read_bytes() == committed


def test_a_budget_fails(project: Path) -> None:
    file = project / "tests" / "test_training.py"
    file.write_text(file.read_text("utf-8").replace('"64": "7 MiB"', '"64": "1 MiB"'), "utf-8")
    done = run(project, "-k", "memory")
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout
    assert "> budget 1.00 MiB" in done.stdout


def test_a_suite_wide_budget_is_in_its_settings(project: Path) -> None:
    settings = project / "pyproject.toml"
    settings.write_text(settings.read_text("utf-8").replace("uncounted_ops", "uncountedops"), "utf-8")
    done = run(project)
    assert done.returncode == 4
    assert "unknown key 'uncountedops': did you mean 'uncounted_ops'" in done.stderr
