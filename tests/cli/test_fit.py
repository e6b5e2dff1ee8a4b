"""``torchledger fit``: divisions by hand."""

from __future__ import annotations

import re

import pytest

from torchledger.cli.main import main


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def answers(capsys: pytest.CaptureFixture[str], *words: str) -> list[int]:
    assert main(["fit", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "activations, which grow with the batch and the context length" in out
    assert "communication" in out
    found = re.findall(r"answer +([0-9,]+) parameters", out)
    return [int(number.replace(",", "")) for number in found]


EIGHT = ["--devices", "8", "--accelerator", "h100-sxm"]


def test_eight_h100(capsys: pytest.CaptureFixture[str]) -> None:
    assert answers(capsys, *EIGHT, "--bytes-per-param", "16") == [40_000_000_000]
    assert answers(capsys, *EIGHT) == [40_000_000_000, 32_000_000_000]  # 20 bytes while AdamW steps
    assert answers(capsys, *EIGHT, "--recipe", "adamw-bf16") == [80_000_000_000, 64_000_000_000]
    assert answers(capsys, *EIGHT, "--recipe", "sgd-fp32") == [80_000_000_000]  # its step needs nothing more
    assert answers(capsys, *EIGHT, "--recipe", "frozen-int4") == [1_280_000_000_000]
    assert answers(capsys, *EIGHT, "--bytes-per-param", "0.5") == [1_280_000_000_000]


@pytest.mark.parametrize(
    ("zero", "at_rest", "in_step"), [(1, 4 + 12 / 8, 4 + 16 / 8), (2, 2 + 14 / 8, 2 + 18 / 8), (3, 16 / 8, 20 / 8)]
)
def test_zero(zero: int, at_rest: float, in_step: float, capsys: pytest.CaptureFixture[str]) -> None:
    assert answers(capsys, *EIGHT, "--zero", str(zero)) == [int(80e9 / at_rest), int(80e9 / in_step)]


def test_the_working_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *EIGHT]) == 0
    out = capsys.readouterr().out
    assert "8 × 80,000,000,000 / 16\n" in out
    assert "adamw-bf16-master: 2 weights + 2 gradients + 4 master + 8 moments" in out
    assert main(["fit", *EIGHT, "--zero", "1", "--recipe", "adamw-autocast"]) == 0
    out = capsys.readouterr().out
    assert "80,000,000,000 / 9\n" in out
    assert "ZeRO-1" in out
    assert "autocast holds 2 more" in out
    assert main(["fit", *EIGHT, "--recipe", "adafactor-fp32"]) == 0
    assert "depend on the shapes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--devices", "many", "--accelerator", "l4"], "--devices: cannot read 'many'"),
        (["--devices", "0", "--accelerator", "l4"], "--devices must be at least 1"),
        (["--devices", "8", "--accelerator", "H100"], "Did you mean h100-sxm"),
        (["--devices", "8", "--accelerator", "tpu-v4"], "the memory of tpu-v4 is not on record"),
        ([*EIGHT, "--recipe", "adamw"], "no recipe named 'adamw'. Did you mean adamw-"),
        ([*EIGHT, "--bytes-per-param", "0"], "--bytes-per-param: cannot read '0'"),
        ([*EIGHT, "--bytes-per-param", "16B"], "write '16' or '0.5'"),
        ([*EIGHT, "--bytes-per-param", "nan"], "write '16' or '0.5'"),
        ([*EIGHT, "--bytes-per-param", "16", "--zero", "1"], "spreads the parts of a recipe"),
        ([*EIGHT, "--bytes-per-param", "16", "--recipe", "sgd-fp32"], "not allowed with"),
        ([*EIGHT, "--zero", "4"], "invalid choice"),
        (["--devices", "8"], "required"),
    ],
)
def test_what_is_refused_is_2(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["fit", *words])
    except SystemExit as ended:  # argparse's own
        code = ended.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert says in err
