"""The report as an object: what it says of a run, and that a file gives it back."""

from __future__ import annotations

import copy
import json
import os
import pickle
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from synthetic import MIB, gpt_flops, gpt_memory, gpt_report, make_journal, make_report, make_snapshot, utilized_report
from torchledger.analytic.utilization import hfu, mfu
from torchledger.errors import JournalMissingError, ReportFileError, ReportWriteError
from torchledger.journal import files
from torchledger.journal.statements import MemorySnapshot, MemoryStatement, StepReport, UnrecordedTime
from torchledger.read.totals import add_flops
from torchledger.report import Report


def step(index: int, **peaks: int) -> StepReport:
    memory = {d.replace("_", ":"): MemoryStatement(peak=make_snapshot(inputs=n)) for d, n in peaks.items()}
    return StepReport(index, None, 0.1, gpt_flops(n_blocks=1), memory)


def test_an_empty_report() -> None:
    report = Report()
    assert report.steps == ()
    assert report.peak == MemorySnapshot()
    assert report.peak_step is None
    assert report.main_device == "cpu"
    assert report.mfu is None
    assert "none was recorded" in str(report)
    assert Report.from_dict(report.to_dict()) == report


def test_the_peak_is_the_highest_on_the_main_device() -> None:
    report = make_report(step(0, cpu=900, cuda_0=10), step(1, cpu=50, cuda_0=30, cuda_1=20), step(2, cuda_0=30))
    assert report.main_device == "cuda:0"
    assert report.peak.total_bytes == 30
    assert report.peak_step is report.steps[1]  # the first of equals
    cpu = make_report(step(0, cpu=900), step(1, cpu=50))
    assert (cpu.main_device, cpu.peak.total_bytes) == ("cpu", 900)


def test_the_peak_step_is_kept_among_the_steps() -> None:
    peak = step(3, cpu=900)
    report = Report(steps=(step(7, cpu=5), step(8, cpu=6)), n_steps=9, peak_step=peak)
    assert [s.index for s in report.steps] == [3, 7, 8]
    assert report.peak_step == peak
    assert report.peak.total_bytes == 900
    tie = Report(steps=(step(0, cpu=5), step(1, cpu=5)), n_steps=2, peak_step=step(1, cpu=5))
    assert tie.peak_step is tie.steps[1]


def test_a_step_without_memory() -> None:
    report = make_report(step(0), peak_step=step(0))
    assert report.peak_step is None
    assert report.peak.total_bytes == 0
    assert Report.from_dict(report.to_dict()) == report


def test_sums_of_statements() -> None:
    first, second = gpt_flops(), gpt_flops(n_blocks=2, recompute=False)
    both = add_flops(first, second)
    assert both.total == first.total + second.total
    assert both.causal_model == first.causal_model + second.causal_model
    for table in ("by_op", "by_dtype"):
        assert sum(getattr(both, table).values()) == both.total
    assert (
        both.by_module["blocks.1"].forward == first.by_module["blocks.1"].forward + second.by_module["blocks.1"].forward
    )
    assert both.by_module["blocks.9"] == first.by_module["blocks.9"]
    assert both.by_module[""].self_total == first.by_module[""].self_total + second.by_module[""].self_total
    assert both.by_parameter["blocks.0.attn.qkv.weight"].weight_grad == 2 * 3_000_001
    assert list(both.by_module) == list(first.by_module)
    assert first == gpt_flops()  # left alone


def test_utilization_takes_the_time_of_unrecorded_steps() -> None:
    report = utilized_report()
    model, total = report.steps[0].flops.model, report.steps[0].flops.total
    assert report.mfu == pytest.approx(mfu(4 * model, 2e-5, accelerator="h100-sxm", dtype="bf16"))
    assert report.hfu == pytest.approx(hfu(4 * total, 2e-5, accelerator="h100-sxm", dtype="bf16"))
    half = replace(report, unrecorded=UnrecordedTime(4, 2e-5, 2 * 8192))  # half the tokens
    assert half.mfu == pytest.approx(report.mfu / 2)
    no_tokens = replace(report, unrecorded=UnrecordedTime(2, 2e-5, None))
    assert no_tokens.mfu == pytest.approx(report.mfu / 2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"unrecorded": UnrecordedTime()}, "no step ran unrecorded"),
        ({"environment": {"dtype": "bf16"}}, "accelerator is not known"),
        ({"environment": {"accelerator": "h100-sxm"}}, "dtype of the products is not known"),
        ({"environment": {"accelerator": "abacus", "dtype": "bf16"}}, "abacus"),
        ({"environment": {"accelerator": "t4", "dtype": "fp8"}}, "fp8"),
        ({"environment": {"accelerator": ["h100-sxm"], "dtype": "bf16"}}, "accelerator is not known"),
    ],
)
def test_an_unknown_utilization_has_its_reason(change: dict[str, Any], reason: str) -> None:
    report = replace(utilized_report(), **change)
    assert report.mfu is None
    assert report.hfu is None
    (line,) = [line for line in str(report).splitlines() if line.lstrip().startswith("MFU, HFU")]
    assert "N/A: " in line
    assert reason in " ".join(str(report).split())


def test_save_and_load(tmp_path: Path) -> None:
    report = gpt_report(faults=("lost a hook",), unrecorded=UnrecordedTime(2, 0.25, None))
    path = tmp_path / "report.json"
    report.save(path)
    assert Report.load(path) == report
    assert Report.load(str(path)).to_dict() == report.to_dict()
    assert list(tmp_path.iterdir()) == [path]
    before = path.read_bytes()
    Report.load(path).save(path)
    assert path.read_bytes() == before


def test_journals_travel_only_when_asked_for(tmp_path: Path) -> None:
    journal = make_journal(1)
    report = gpt_report(journals={1: journal})
    expected = list(report.steps[1].memory["cpu"].timeline())
    assert [point.total_bytes for point in expected] == [12, 28, 60, 44, 40]
    report.save(tmp_path / "with.json", journal=True)
    report.save(tmp_path / "without.json")
    loaded = Report.load(tmp_path / "with.json")
    assert loaded.journals == {1: journal}
    assert list(loaded.steps[1].memory["cpu"].timeline()) == expected
    for bare in (loaded.steps[0], Report.load(tmp_path / "without.json").steps[1]):
        with pytest.raises(JournalMissingError, match="journal=True"):
            bare.memory["cpu"].timeline()
    for twin in (pickle.loads(pickle.dumps(loaded)), copy.deepcopy(loaded)):
        assert list(twin.steps[1].memory["cpu"].timeline()) == expected


def test_a_timeline_that_a_step_has_is_left_alone() -> None:
    own = replace(gpt_memory(), timeline_source=lambda: iter(()))
    steps = (StepReport(1, 1, 0.1, gpt_flops(), {"cpu": own, "cuda:0": gpt_memory()}),)
    report = make_report(*steps, journals={1: make_journal()})
    assert list(report.steps[0].memory["cpu"].timeline()) == []
    assert len(list(report.steps[0].memory["cuda:0"].timeline())) == 1
    assert report.peak_step is report.steps[0]


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(ReportWriteError, match=r"cannot write .*report\.json: No space left on device"):
        gpt_report().save(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_save_says_why_it_cannot(tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path / "none" / "report.json", "its folder does not exist"),
        (tmp_path, "it is a folder"),
        ("bad\0name", "null"),
    ):
        for act in (gpt_report().save, files.check_writable):
            with pytest.raises(ReportWriteError, match=reason):
                act(path)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_save_keeps_rights_and_follows_links(tmp_path: Path) -> None:
    path, link = tmp_path / "report.json", tmp_path / "link.json"
    umask = os.umask(0o022)
    try:
        gpt_report().save(path)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    path.chmod(0o600)
    link.symlink_to(path)
    gpt_report(n_steps=1).save(link)
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Report.load(path).n_steps == 1


def test_save_into_a_device() -> None:
    gpt_report().save(os.devnull)
    assert os.path.exists(os.devnull)
    assert not os.path.isfile(os.devnull)


def test_check_writable_leaves_nothing(tmp_path: Path) -> None:
    files.check_writable(tmp_path / "report.json")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old.json").write_text("old")
    files.check_writable(tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text() == "old"


def test_load_names_the_file_and_the_place(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(path.name)
    document = gpt_report().to_dict()
    document["steps"][1]["memory"]["cpu"]["peak"]["inputs"] = -1
    path.write_text(json.dumps(document))
    with pytest.raises(ReportFileError) as refused:
        Report.load(path)
    assert f"{path}: steps[1].memory.cpu.peak.inputs: is -1, but must be at least 0." in str(refused.value)


def test_repr_is_one_line() -> None:
    report = gpt_report()
    assert (
        repr(report)
        == f"<Report of 3 steps: {report.flops.total:,} FLOP, peak of {report.peak.total_bytes:,} bytes on cpu>"
    )
    assert report.peak.total_bytes > 490 * MIB
    assert gpt_memory().peak.total_bytes == report.peak.total_bytes + 200 * MIB + 8
