"""SIGTERM ends a program that `torchledger run` runs, with its report. Oracle: Python itself, and real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from torchledger.cli.terminating import TERMINATED, Terminated, until_terminated
from torchledger.report import Report

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no SIGTERM there")
MAIN = "import sys; from torchledger.cli.main import main; sys.exit(main())"
TRAIN = """
import atexit, os, signal, sys, time
import torch
from torch import nn

torch.set_num_threads(1)
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train(n):
    for _ in range(n):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

train(3)
{setup}
print("ready", flush=True)
{rest}
print("ended", flush=True)
"""
STEP = 2 * 4 * 8 * 8 * 2


def terminate(
    folder: Path, rest: str, setup: str = "", *, ours: bool = True, times: int = 1
) -> tuple[int, str, str, Report | None]:
    """Exit code, both outputs and the report of a program that gets SIGTERM once it is ready."""
    script = folder / "train.py"
    script.write_text(TRAIN.format(setup=textwrap.dedent(setup), rest=textwrap.dedent(rest)), encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    words = ["-c", MAIN, "run", "--json", "report.json", "train.py"] if ours else ["train.py"]
    with subprocess.Popen(
        [sys.executable, *words], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(times):
            process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
    path = folder / "report.json"
    return process.returncode, out, err, Report.load(path) if path.exists() else None


@pytest.mark.parametrize(
    "rest",
    [
        "while True: train(1)",
        "time.sleep(600)",
        "for _ in range(10_000): torch.linalg.svd(torch.ones(300, 300))",
        "while True:\n    try: train(1)\n    except Exception: pass",
        "import threading\nevent = threading.Event()\nevent.wait()",
    ],
    ids=["training", "sleeping", "in a long op", "catching all errors", "waiting"],
)
def test_the_report_is_written(tmp_path: Path, rest: str) -> None:
    code, out, err, report = terminate(tmp_path, rest)
    assert code == TERMINATED == 143
    assert "ended" not in out
    assert report is not None
    assert report.n_steps >= 2  # a step that is being read when the signal comes is lost
    assert report.steps[0].flops.total == STEP
    assert report.faults == ()
    assert "Traceback" not in err
    assert "FLOPs" in err


def test_signals_that_come_together(tmp_path: Path) -> None:
    code, _, err, report = terminate(tmp_path, "time.sleep(600)", times=3)
    assert code == TERMINATED
    assert report is not None
    assert "Traceback" not in err


def test_what_the_program_leaves_open_is_closed(tmp_path: Path) -> None:
    setup = """
        try:
            print("ready", flush=True)  # inside, so that the signal finds it there
            time.sleep(600)
        finally:
            print("closed", flush=True)
    """
    code, out, _, report = terminate(tmp_path, "", setup)
    assert (code, out) == (TERMINATED, "closed\n")
    assert report is not None


@pytest.mark.parametrize(
    ("setup", "rest"),
    [
        ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))", "time.sleep(600)"),
        ("signal.signal(signal.SIGTERM, lambda *_: print('handled', flush=True))", "time.sleep(1)"),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", "time.sleep(1)"),
        (
            """
            before = signal.getsignal(signal.SIGTERM)
            def handle(*arguments):
                print("handled", flush=True)
                if callable(before):
                    before(*arguments)
            signal.signal(signal.SIGTERM, handle)
            """,
            "time.sleep(1)",
        ),
    ],
    ids=["exits", "goes on", "ignores", "calls the one before"],
)
def test_a_handler_of_the_programs_own_wins(tmp_path: Path, setup: str, rest: str) -> None:
    expected = terminate(tmp_path, rest, setup, ours=False)
    code, out, _, report = terminate(tmp_path, rest, setup)
    assert (code, out) == expected[:2]
    assert report is not None


def test_children_are_ended_at_once(tmp_path: Path) -> None:
    setup = """
        process = os.fork()
        if not process:
            try:
                time.sleep(60)
            finally:
                os._exit(3)
        time.sleep(0.2)
        os.kill(process, signal.SIGTERM)
        ended = os.waitpid(process, 0)[1]
    """
    rest = """
        try:
            time.sleep(600)
        finally:
            print(ended, flush=True)
    """
    code, out, _, report = terminate(tmp_path, rest, setup)
    assert (code, out) == (TERMINATED, f"{signal.SIGTERM:d}\n")
    assert report is not None


def test_the_handler_is_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with until_terminated():
        assert callable(signal.getsignal(signal.SIGTERM))
    assert signal.getsignal(signal.SIGTERM) is before
    try:
        with pytest.raises(Terminated), until_terminated():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    thread = threading.Thread(target=lambda: until_terminated().__enter__())
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
