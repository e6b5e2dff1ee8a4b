"""``torchledger napkin``: figures worked out by hand, numbers as people write them, one line for what is refused."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from torchledger.cli.main import main

LECTURE = ["--params", "70B", "--tokens", "15T"]
CLUSTER = ["--devices", "1024", "--accelerator", "h100-sxm", "--mfu", "0.5"]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["napkin", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_the_answer_shows_its_working(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, *LECTURE, *CLUSTER)
    assert "6,300,000,000,000,000,000,000,000 FLOP (6.30 YFLOP)" in out
    assert "6 × 70,000,000,000 × 15,000,000,000,000" in out
    assert "143.92659381842682 days" in out
    assert "6,300,000,000,000,000,000,000,000 / (1,024 × 989,500,000,000,000 × 0.5) / 86,400" in out
    assert "3,537,140 device-hours" in out
    assert "leaves out" in out
    assert "context length" in out
    assert "communication" in out


@pytest.mark.parametrize(
    ("params", "tokens"), [("70B", "15T"), ("70e9", "15e12"), ("70000000000", "15000B"), ("0.07T", "15e+12")]
)
def test_numbers_as_people_write_them(params: str, tokens: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--params", params, "--tokens", tokens, *CLUSTER)
    assert out == run(capsys, *LECTURE, *CLUSTER)


def test_shares_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    device = ["--devices", "1024", "--accelerator", "h100-sxm"]
    half = run(capsys, *LECTURE, *device)
    for mfu in ("0.5", "50%", "50 %", "50.0%"):
        assert run(capsys, *LECTURE, *device, "--mfu", mfu) == half
    one = run(capsys, *LECTURE, "--accelerator", "t4", "--dtype", "fp16")
    assert one == run(capsys, *LECTURE, "--accelerator", "t4", "--dtype", "fp16", "--devices", "1")
    assert "(1 × 65,000,000,000,000 × 0.5)" in one
    assert "days" not in run(capsys, *LECTURE)


def test_a_model_in_place_of_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--model", "llama-3-8B", "--tokens", "15T")
    assert "6 × 8,030,261,248 × 15,000,000,000,000" in out
    mixture = run(capsys, "--model", "mixtral-8x7B", "--tokens", "1T")
    assert "6 × parameters that one token meets × tokens" in mixture
    assert "6 × 12,879,925,248 × 1,000,000,000,000" in mixture


def test_one_model_by_all_rules(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--model", "gpt2-124M", "--seq", "1024")
    figures = {
        "6ND  ": "764,558,180,352",
        "6ND without positions": "759,726,342,144",
        "6ND, non-embedding": "522,584,064,000",
        "PaLM, nanoGPT": "875,690,459,136",
        "Megatron-LM  ": "816,962,863,104",
        "llm.c": "822,540,238,848",
        "Chinchilla": "1,113,446,154,240",
        "torchledger": "874,944,921,600",
    }
    for name, figure in figures.items():
        assert any(line.startswith(name) and figure in line for line in out.splitlines()), name
    assert "Hoffmann et al. 2022" in out
    assert "half of attention's square" in out
    assert "FLOPs of training" not in out
    assert "FLOPs of training" in run(capsys, "--model", "gpt2-124M", "--seq", "1024", "--tokens", "1B")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--params", "70G", "--tokens", "1T"], "--params: cannot read '70G' as a count: write '70B', '1.5T'"),
        (["--params", "70B", "--tokens", "lots"], "--tokens: cannot read 'lots'"),
        (["--params", "1,000", "--tokens", "1T"], "--params: cannot read '1,000'"),
        (["--params", "-7B", "--tokens", "1T"], "expected one argument"),
        (["--params", "0", "--tokens", "1T"], "--params must be at least 1, not 0."),
        (["--tokens", "1T"], "--params is missing"),
        (["--params", "1B"], "--tokens is missing"),
        ([*LECTURE, "--devices", "8"], "--devices goes with --accelerator"),
        ([*LECTURE, "--mfu", "0.5"], "--mfu goes with --accelerator"),
        ([*LECTURE, "--accelerator", "h100"], "Did you mean h100-sxm"),
        ([*LECTURE, "--accelerator", "t4"], "no dense peak for 'bf16' on record for t4"),
        ([*LECTURE, "--accelerator", "l4", "--mfu", "50"], "--mfu: cannot read '50' as a share: write '0.5' or '50%'"),
        ([*LECTURE, "--accelerator", "l4", "--mfu", "0"], "--mfu: cannot read '0'"),
        ([*LECTURE, "--accelerator", "l4", "--devices", "0"], "--devices must be at least 1"),
        ([*LECTURE, "--accelerator", "l4", "--devices", "1.5"], "--devices: cannot read '1.5'"),
        ([*LECTURE, "--model", "gpt2-124M"], "give one of them"),
        ([*LECTURE, "--seq", "8"], "--seq goes with --model"),
        (["--model", "gpt2-125M", "--seq", "8"], "there are: 124M, 355M"),
        (["--model", "bert", "--seq", "8"], "there are: gpt2-124M"),
        (["--model", "gpt2-124M", "--seq", "2048"], "longer than the table of 1024"),
    ],
)
def test_what_is_refused_is_one_line_and_2(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["napkin", *words])
    except SystemExit as ended:  # argparse's own
        code = ended.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert says in err
    if "usage:" not in err:
        assert err.startswith("torchledger: error: ")
        assert err.count("\n") == 1


COMMANDS = [
    ["napkin", *LECTURE, *CLUSTER],
    ["napkin", "--model", "gpt2-124M", "--seq", "1024"],
    ["fit", "--devices", "8", "--accelerator", "h100-sxm"],
    ["dtypes"],
    ["accelerators"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_it_starts_without_torch_in_a_fraction_of_a_second(words: list[str]) -> None:
    code = "import sys; from torchledger.cli.main import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert time.perf_counter() - began < 5  # 0.2 s on an idle machine
