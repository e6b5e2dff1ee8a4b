"""``torchledger dtypes``: every row against the format that it shows."""

from __future__ import annotations

import pytest

from torchledger.analytic.dtypes import FORMATS
from torchledger.cli.main import main


def test_every_format_has_its_row(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["dtypes"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.split()[0] in FORMATS}
    assert list(rows) == list(FORMATS)
    assert rows["fp32"] == ["32", "8", "24", "3.40282e+38", "1.17549e-38", "1.19209e-07", "1e-08"]
    assert rows["bf16"] == ["16", "8", "8", "3.38953e+38", "1.17549e-38", "0.0078125", "1.00117e-08"]
    assert rows["fp16"] == ["16", "5", "11", "65504", "6.10352e-05", "0.000976562", "0"]
    assert rows["fp8_e4m3"] == ["8", "4", "4", "448", "0.015625", "0.125", "0"]
    assert rows["fp8_e5m2"] == ["8", "5", "3", "57344", "6.10352e-05", "0.25", "0"]
    assert rows["int4"] == ["4", "0", "3", "7", "1", "-", "0"]
    assert max(map(len, out.splitlines())) <= 100
