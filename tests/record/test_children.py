"""Child processes are named: what they do is in no books of their parent."""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchledger as tl

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")]


def work(number: int = 0) -> int:
    torch.ones(2) + 1
    return number


@pytest.fixture(autouse=True)
def nothing_stays() -> Any:
    kinds: list[tuple[Any, str]] = [(multiprocessing.process.BaseProcess, "start"), (subprocess.Popen, "__init__")]
    before = [getattr(kind, name) for kind, name in kinds]
    yield
    assert [getattr(kind, name) for kind, name in kinds] == before


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_multiprocessing(method: str) -> None:
    with tl.Ledger() as ledger:
        for _ in range(2):
            process: Any = multiprocessing.get_context(method).Process(target=work)  # type: ignore[attr-defined]
            process.start()
            process.join()
    assert process.exitcode == 0
    assert ledger.report.blind_spots == (
        f"2 child processes ran (multiprocessing {method}): what they did is not in these books",
    )


def test_pools() -> None:
    with tl.Ledger() as ledger:
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(2, mp_context=context) as pool:
            assert list(pool.map(work, range(4))) == [0, 1, 2, 3]
        with context.Pool(1) as other:
            assert other.map(work, [5]) == [5]
    assert ledger.report.blind_spots[0].endswith("ran (multiprocessing fork): what they did is not in these books")


def test_a_loader_s_workers_only_make_batches() -> None:
    with tl.Ledger() as ledger:
        for _ in DataLoader(TensorDataset(torch.ones(8, 2)), 4, num_workers=2, multiprocessing_context="fork"):
            pass
    assert ledger.report.blind_spots == ()


def test_forks_and_command_lines() -> None:
    with tl.Ledger() as ledger:
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        subprocess.run(["true"], check=True)
    assert ledger.report.blind_spots == (
        "1 child process ran (fork): what they did is not in these books",
        "1 child process ran (python): what they did is not in these books",
    )


def test_a_budget_doubts_what_it_did_not_see(recwarn: pytest.WarningsRecorder) -> None:
    with tl.Ledger() as ledger:
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        torch.ones(2) + 1
    ledger.report.check(tl.Budget(peak="1 GiB"))
    assert any("a budget holds, but 1 child process ran" in str(w.message) for w in recwarn)
