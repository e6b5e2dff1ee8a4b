"""Files of one report or of many."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from synthetic import gpt_report
from torchledger.errors import ReportFileError
from torchledger.gate.report_files import decode_runs, read_runs
from torchledger.journal.schema import encode_run


def many(**reports: object) -> dict[str, Any]:
    return {"kind": "torchledger-reports", "schema": 1, "reports": reports}


def test_both_kinds_are_read(tmp_path: Path) -> None:
    report = gpt_report()
    path = tmp_path / "report.json"
    report.save(path)
    assert read_runs(path) == {"": decode_runs(encode_run(report))[""]}
    path.write_text(json.dumps(many(**{"tests/a.py::test[模型-::]": report.to_dict(), "b": report.to_dict()})))
    found = read_runs(path)
    assert list(found) == ["tests/a.py::test[模型-::]", "b"]
    assert found["b"].peak == report.peak


BROKEN: dict[str, tuple[object, str]] = {
    "foreign": ({"traceEvents": []}, "not a torchledger report"),
    "newer": ({**many(), "schema": 2}, "newer torchledger"),
    "no schema": ({"kind": "torchledger-reports", "reports": {}}, "schema: is null"),
    "schema of another kind": ({**many(), "schema": True}, "schema: is true"),
    "a list": ({**many(), "reports": []}, "reports: is a list"),
    "none": ({"kind": "torchledger-reports", "schema": 1}, "reports: is null"),
    "more": ({**many(), "extra": 1}, 'unknown key "extra"'),
    "one is foreign": (many(a={}), "reports.a: not a torchledger report"),
    "one is damaged": (many(**{"a b": {**gpt_report().to_dict(), "n_steps": -1}}), r'reports\["a b"\]: n_steps: is -1'),
}


@pytest.mark.parametrize("case", BROKEN)
def test_anything_else_is_refused_with_its_place(case: str, tmp_path: Path) -> None:
    document, says = BROKEN[case]
    path = tmp_path / "report.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ReportFileError, match=says) as refused:
        read_runs(path)
    assert str(path) in refused.value.message
