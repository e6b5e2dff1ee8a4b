"""``torchledger run``: a real program, its own output and exit code, and the report beside them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from torchledger.cli.main import main
from torchledger.cli.run import rank_path, read_rank
from torchledger.report import Report

TRAIN = textwrap.dedent(
    """
    import sys
    import torch
    from torch import nn

    print("begins", sys.argv[1:], __name__)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        loss = model(torch.ones(5, 8)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print("ends")
    if "fail" in sys.argv:
        try:
            model(torch.ones(5, 7))
        except RuntimeError as error:
            raise ValueError("of the program") from error
    sys.exit(5 if "five" in sys.argv else None)
    """
)
# Two products of 5 rows; the first has no input gradient.
FORWARD = 2 * 5 * (8 * 16 + 16 * 4)
BACKWARD = 2 * 5 * (8 * 16 + 2 * 16 * 4)


MAIN = "import sys; from torchledger.cli.main import main; sys.exit(main())"
# A ledger that starts without torch, for what has nothing to do with it.
LIGHT = """
import sys, types
from synthetic import gpt_report
class Ledger:
    def __init__(self, tokens_per_step=None, audit=False): pass
    def __enter__(self): return self
    def __exit__(self, *error): pass
    report = property(lambda self: gpt_report())
sys.modules["torchledger.ledger"] = types.SimpleNamespace(Ledger=Ledger, count_steps=lambda ledger: ledger)
"""


def run(folder: Path, *words: str, light: bool = False, **environ: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    (folder / "train.py").write_text(TRAIN)
    env = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}", "OMP_NUM_THREADS": "1", **environ}
    command = [sys.executable, "-c", LIGHT + MAIN if light else MAIN, "run", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=300)


def test_a_script_that_knows_nothing_of_us(tmp_path: Path) -> None:
    done = run(tmp_path, "--json", "out.json", "train.py", "--json", "-h")
    assert (done.returncode, done.stdout) == (0, "begins ['--json', '-h'] __main__\nends\n")
    report = Report.load(tmp_path / "out.json")
    assert report.n_steps == 3  # each ended when a forward began after an optimizer step
    for step in report.steps:
        assert (step.flops.forward, step.flops.backward, step.flops.recompute) == (FORWARD, BACKWARD, 0)
    assert list(report.steps[0].flops.by_module) == ["", "0", "2"]
    assert report.faults == ()
    assert "hardware total" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_report_is_written_even_when_the_script_fails(tmp_path: Path) -> None:
    done = run(tmp_path, "--json=out.json", "-m", "train", "fail")
    assert (done.returncode, done.stdout) == (1, "begins ['fail'] __main__\nends\n")
    page, _, traceback = done.stderr.partition("Traceback (most recent call last):\n")
    assert "hardware total" in page
    assert "RuntimeError: " in traceback
    assert f"{os.sep}torchledger{os.sep}" not in traceback  # ours are not among its frames
    assert done.stderr.endswith("\nValueError: of the program\n")  # the last thing seen
    assert Report.load(tmp_path / "out.json").flops.forward >= 3 * FORWARD


def test_exit_codes_pass_through_and_each_rank_writes_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "five.py").write_text("raise SystemExit(5)")
    for rank, printed in (("0", True), ("3", False)):  # only rank 0 prints
        environ = {"RANK": rank, "WORLD_SIZE": "8", "LOCAL_RANK": rank}
        done = run(tmp_path, "--json", "out.json", "five.py", light=True, **environ)
        assert (done.returncode, done.stdout) == (5, "")
        assert ("hardware total" in done.stderr) == printed
        assert Report.load(tmp_path / f"out.rank{rank}.json").n_steps == 3
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing to run"),
        (["--"], "nothing to run"),
        (["-m"], "nothing to run"),
        (["--json", "/no/such/folder/out.json", __file__], "its folder does not exist"),
        (["--json", ".", __file__], "it is a folder"),
    ],
)
def test_what_cannot_work_is_said_before_anything_runs(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


def test_a_missing_script_is_wrong_usage_and_needs_no_torch(tmp_path: Path) -> None:
    code = MAIN.replace("sys.exit(main())", "print(main(), 'torch' in sys.modules)")
    command = [sys.executable, "-c", code, "run", "--json", str(tmp_path / "out.json"), "none.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "2 False\n"
    assert done.stderr.startswith("torchledger: error: there is no script none.py")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_missing_module_is_wrong_usage(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "none", light=True)
    assert done.returncode == 2
    assert done.stderr.startswith("torchledger: error: there is no module 'none' to run")


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "1"},
        {"RANK": "x", "WORLD_SIZE": "2"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"RANK": "²", "WORLD_SIZE": "2"},
    ],
)
def test_what_is_no_rank(environ: dict[str, str]) -> None:
    assert read_rank(environ) is None


def test_ranks() -> None:
    assert read_rank({"RANK": "0", "WORLD_SIZE": "1"}) == 0
    assert rank_path("a.b/report", 2).as_posix() == "a.b/report.rank2"
    assert rank_path("r{rank}/x{rank}.json", 2).as_posix() == "r2/x2.json"


def test_a_fault_of_ours_never_hides_how_the_program_ended(tmp_path: Path) -> None:
    (tmp_path / "break.py").write_text(
        "import sys\nfrom torchledger.ledger import Ledger\n"
        "Ledger.report = property(lambda self: 1 / 0)\nsys.exit(int(sys.argv[1]))\n"
    )
    for code, expected in (("6", 6), ("0", 2)):
        done = run(tmp_path, "break.py", code, light=True)
        assert done.returncode == expected
        assert "torchledger: fault: the report could not be made" in done.stderr


def test_a_report_that_cannot_be_written_after_all(tmp_path: Path) -> None:
    (tmp_path / "gone.py").write_text("import os, sys\nos.rmdir('out')\nsys.exit(int(sys.argv[1]))")
    for code, expected in (("0", 2), ("6", 6)):
        (tmp_path / "out").mkdir()
        done = run(tmp_path, "--json", "out/report.json", "gone.py", code, light=True)
        assert done.returncode == expected
        assert "torchledger: error: cannot write" in done.stderr
        assert "hardware total" in done.stderr  # nothing is lost


def test_a_child_that_comes_out_at_the_end_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "fork.py").write_text("import os, sys\nif os.fork():\n    os.wait()\nelse:\n    sys.exit(3)\n")
    done = run(tmp_path, "fork.py", light=True)
    assert done.returncode == 0
    assert done.stderr.count("hardware total") == 1


def test_the_report_goes_where_it_was_asked_to_whatever_the_program_does(tmp_path: Path) -> None:
    (tmp_path / "away.py").write_text("import os, sys\nos.chdir('/')\nsys.stdout.close()\nsys.stderr = None")
    done = run(tmp_path, "--json", "{rank}.json", "away.py", light=True)
    assert done.returncode == 0
    assert Report.load(tmp_path / "0.json").n_steps == 3
    assert "hardware total" in done.stderr


def test_the_program_reads_our_input(tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text("import sys; print(sys.stdin.read(), end='')")
    (tmp_path / "train.py").write_text("")
    command = [sys.executable, "-c", LIGHT + MAIN, "run", "echo.py"]
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}"}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, input=b"\x00\xff\n".replace(b"\xff", b"x"), capture_output=True, check=False
    )
    assert done.stdout == b"\x00x\n"


ENDINGS = {
    "raise ValueError('what went wrong')": (1, "ValueError: what went wrong\n"),
    "import sys; sys.exit('what went wrong')": (1, "what went wrong\n"),
    "raise KeyboardInterrupt": (130, "KeyboardInterrupt\n"),
    "def f(:": (1, "SyntaxError: invalid syntax\n"),
    "import no_such_module": (1, "ModuleNotFoundError: No module named 'no_such_module'\n"),
    "import sys; sys.excepthook = lambda *a: print('hook', a[1], file=sys.stderr); 1 / 0": (
        1,
        "hook division by zero\n",
    ),
}


@pytest.mark.parametrize("source", ENDINGS)
def test_what_a_program_failed_with_is_the_last_thing_seen(source: str, tmp_path: Path) -> None:
    code, last = ENDINGS[source]
    (tmp_path / "fails.py").write_text(source)
    done = run(tmp_path, "fails.py", light=True)
    assert done.returncode == code
    assert done.stderr.endswith(last)
    assert done.stderr.index("hardware total") < done.stderr.index(last)


@pytest.mark.parametrize("source", ["", "import torch", "import sys; sys.exit(3)", "raise ValueError('early')"])
def test_a_run_in_which_nothing_ran_says_so_in_two_lines(source: str, tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text(source)
    done = run(tmp_path, "empty.py", COLUMNS="100")
    page = done.stderr.partition("Traceback")[0].strip().splitlines()
    assert page[0] == "torchledger: nothing was recorded"
    assert page[1].startswith("  steps  ")
    assert len(page) == 2


def test_an_audit_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "net = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(800, 2))\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "for _ in range(3):\n"
        "    net(torch.randn(4, 8, 10, 10, requires_grad=True)).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    done = run(tmp_path, "--audit", "--json", "out.json", "net.py")
    assert done.returncode == 0, done.stderr
    report = Report.load(tmp_path / "out.json")
    assert [bool(step.audit) for step in report.steps] == [False, True, False]
    row = report.steps[1].audit[0]
    assert (row.op, row.module, row.phase) == ("aten.native_batch_norm_backward", "0", "backward")
    assert row.nbytes == 4 * 4 * 8 * 10 * 10
    assert "Held inside ops" in done.stderr
    assert (report.blind_spots, report.growing, report.faults) == ((), (), ())
