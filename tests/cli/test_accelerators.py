"""``torchledger accelerators``: the table, dense and sparse apart, with sources."""

from __future__ import annotations

import pytest

from torchledger.accelerators import ACCELERATORS
from torchledger.cli.main import main


def tables(capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    assert main(["accelerators"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return {page.splitlines()[0].split(",")[0]: page.splitlines()[1:] for page in out.split("\n\n")}


def rows_of(lines: list[str]) -> dict[str, dict[str, str]]:
    header = lines[0].replace("links, GB/s", "links").replace("for one", "per").split()
    return {line.split()[0]: dict(zip(header, line.split(), strict=True)) for line in lines[2:]}


def test_all_of_them(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    pages = tables(capsys)
    dense, sparse = rows_of(pages["Dense peaks"]), rows_of(pages["Peaks with 2:4 sparsity"])
    memory = rows_of(pages["Memory"])
    assert list(dense) == list(memory) == list(ACCELERATORS)
    for name, entry in ACCELERATORS.items():
        for rates, row in ((entry.dense, dense[name]), (entry.sparse, sparse.get(name, {}))):
            shown = {rate: float(text.replace(",", "")) * 1e12 for rate, text in row.items() if text not in ("-", name)}
            assert shown == pytest.approx(dict(rates))
        assert memory[name]["per"] == entry.per
        assert any(line.startswith(f"{name} ") and entry.source in line for line in pages["Sources"])
    assert dense["h100-sxm"]["bf16"] == "989.5"
    assert sparse["h100-sxm"]["bf16"] == "1,979"
    assert memory["h100-sxm"] == {"name": "h100-sxm", "per": "card", "GB": "80", "TB/s": "3.35", "links": "900"}
    assert "tpu-v2" not in sparse


def test_a_narrow_page_keeps_what_matters(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["accelerators"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    dense = rows_of(out.split("\n\n")[0].splitlines()[1:])
    assert dense["h100-sxm"]["bf16"] == "989.5"


def test_one(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["accelerators", "h100-sxm", "tpu-v4"]) == 0
    h100, tpu = capsys.readouterr().out.split("\n\n")
    assert "989.5 TFLOP/s, 1,979 with 2:4 sparsity; waits for memory below 295 FLOP a byte" in h100
    assert "1,979 Tops/s, 3,958 with 2:4 sparsity; waits for memory below 591 ops a byte" in h100
    assert "NVIDIA H100 80GB HBM3" in h100
    assert "memory" not in tpu
    assert "for one chip" in tpu


def test_an_unknown_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accelerators", "h100"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Did you mean h100-sxm" in err
