"""``torchledger dryrun``: the verdict on a GPU that is not there, against sizes by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torchledger.cli.batches import BatchRange, find_largest, parse_batch, with_value
from torchledger.cli.main import main
from torchledger.errors import UsageError

SCRIPT = """
import sys
import torch
from torch import nn

rows = int(sys.argv[sys.argv.index("--rows") + 1]) if "--rows" in sys.argv else 1024
steps = int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else 5
model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)]).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(steps):
    model(torch.ones(rows, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step)
print("end")
"""
MIB = 2**20
ACCELERATOR = ["--accelerator", "h100-sxm"]


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_fits(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    assert main(["dryrun", *ACCELERATOR, "--json", str(path), script]) == 0
    out = lines_of(capsys)
    assert [line for line in out if line.startswith("step ")] == ["step 0", "step 1"]
    assert "end" not in out, "the program ends with its second step"
    assert any(line.startswith("Fits on h100-sxm: ") for line in out)
    report = json.loads(path.read_text())
    assert report["n_steps"] == 2
    assert report["environment"]["simulated"] is True
    # Weights of 4 MiB, gradients of all four; x and the outputs of four layers; two workspaces of 32 MiB.
    peak = report["steps"][1]["memory"]["cuda:0"]["peak"]
    assert peak["parameters"] == 16 * MIB
    assert peak["workspace"] >= 64 * MIB
    assert peak["unexplained"] == 0


def test_too_small(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dryrun", *ACCELERATOR, "--capacity", "40MB", script]) == 1
    out = "\n".join(lines_of(capsys))
    assert "Does not fit on h100-sxm: out of memory" in out
    assert "CUDA out of memory. Tried to allocate" in out
    assert "expandable_segments:True" in out


def test_steps_and_settings(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--steps", "3", "--alloc-conf", "expandable_segments:True"]
    assert main(["dryrun", *ACCELERATOR, *words, script]) == 0
    out = lines_of(capsys)
    assert [line for line in out if line.startswith("step ")] == ["step 0", "step 1", "step 2"]
    assert any(line.startswith("torch's defaults") for line in out), "the others are replayed"


def test_a_program_that_ends_before_its_steps(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dryrun", *ACCELERATOR, "--steps", "9", script, "--steps", "1"]) == 0
    out = lines_of(capsys)
    assert "end" in out
    assert any(line.startswith("Fits on") for line in out)


def test_a_program_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import torch\nx = torch.ones(3, device='cuda')\nraise SystemExit(7)\n")
    assert main(["dryrun", *ACCELERATOR, str(path)]) == 7
    path.write_text("import torch\nx = torch.ones(3, device='cuda')\nraise ValueError('no')\n")
    assert main(["dryrun", *ACCELERATOR, str(path)]) == 1
    captured = capsys.readouterr()
    assert "ValueError: no" in captured.err
    assert "whether it fits is not known" in captured.out


def test_the_largest_batch(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With room for outputs of 16 MiB, which are 4,096 rows: one more row takes segments of 18 MiB."""
    path = tmp_path / "report.json"
    assert main(["dryrun", *ACCELERATOR, "--json", str(path), script, "--rows", "4096"]) == 0
    steps = json.loads(path.read_text())["steps"]
    capacity = max(step["memory"]["cuda:0"]["reserved_peak_bytes"] for step in steps)
    words = ["--capacity", str(capacity), "--batch", "rows=4095:4098"]
    assert main(["dryrun", *ACCELERATOR, *words, script]) == 0
    assert lines_of(capsys)[-1] == "The largest rows that fits on h100-sxm is 4,096."


USAGE = {
    "no accelerator": ["x.py"],
    "an unknown accelerator": ["--accelerator", "h1000", "{script}"],
    "no script": ACCELERATOR,
    "a missing script": [*ACCELERATOR, "no/such.py"],
    "steps": [*ACCELERATOR, "--steps", "0", "{script}"],
    "a capacity": [*ACCELERATOR, "--capacity", "24 MBananas", "{script}"],
    "settings": [*ACCELERATOR, "--alloc-conf", "expandable:True", "{script}"],
    "a range": [*ACCELERATOR, "--batch", "rows=9:1", "{script}"],
    "no range": [*ACCELERATOR, "--batch", "rows", "{script}"],
    "a folder": [*ACCELERATOR, "--json", "no/such/folder/r.json", "{script}"],
}


@pytest.mark.parametrize("case", USAGE)
def test_usage(case: str, script: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["dryrun", *[word.format(script=script) for word in USAGE[case]]])
    except SystemExit as ended:
        code = int(str(ended.code))
    assert code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "error:" in err


def test_batch_words() -> None:
    assert parse_batch("n=1:1") == BatchRange("n", 1, 1)
    for bad in ("n=0:3", "n=3:1", "n=1", "=1:2", "n=1:x", "n=1:2:3"):
        with pytest.raises(UsageError):
            parse_batch(bad)
    assert with_value(["--batch_size", "4", "x"], "batch-size", 9) == ["--batch_size", "9", "x"]
    assert with_value(["-b", "4"], "b", 9) == ["-b", "9"]
    assert with_value(["--n=4"], "--n", 9) == ["--n=9"]


@pytest.mark.parametrize("limit", [0, 1, 2, 5, 31, 32, 33, 63, 64, 99])
def test_find_largest(limit: int) -> None:
    tried: list[int] = []

    def fits(value: int) -> bool:
        tried.append(value)
        return value <= limit

    assert find_largest(1, 64, fits) == (None if limit < 1 else min(limit, 64))
    assert len(tried) == len(set(tried)) <= 14


LOOPS = {
    "closures": """
def closure():
    optimizer.zero_grad()
    loss = model(torch.ones(8, 64, device="cuda")).sum()
    loss.backward()
    return loss
while True:
    optimizer.step(closure)
""",
    "LBFGS": """
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2, tolerance_grad=0, tolerance_change=0)
def closure():
    optimizer.zero_grad()
    loss = model(torch.ones(8, 64, device="cuda")).square().sum()
    loss.backward()
    return loss
while True:
    optimizer.step(closure)
""",
    "updates by hand": """
del optimizer
while True:
    model(torch.ones(8, 64, device="cuda")).sum().backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
            p.grad = None
""",
    "an idle optimizer": """
idle = torch.optim.SGD([torch.zeros(1, device="cuda", requires_grad=True)], lr=0.1)
while True:
    model(torch.ones(8, 64, device="cuda")).sum().backward()
    optimizer.step()
""",
}


@pytest.mark.parametrize("loop", LOOPS)
def test_loops_that_never_end_are_ended_after_their_steps(
    loop: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, path = tmp_path / "train.py", tmp_path / "report.json"
    made = "import torch\nmodel = torch.nn.Linear(64, 64, bias=False, device='cuda')\n"
    script.write_text(f"{made}optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n{LOOPS[loop]}")
    assert main(["dryrun", *ACCELERATOR, "--steps", "3", "--json", str(path), str(script)]) == 0
    report = json.loads(path.read_text())
    assert report["n_steps"] == 3
    forwards = [step["flops"]["forward"] / (2 * 8 * 64 * 64) for step in report["steps"]]
    assert forwards == ([2, 2, 2] if loop == "LBFGS" else [1, 1, 1])
    assert report["remainder"] is None
