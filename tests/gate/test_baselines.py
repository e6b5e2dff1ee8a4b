"""Baselines away from pytest: groups, tolerances on accelerators, and the text of the file."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synthetic import MIB, gpt_report
from torchledger.errors import BaselineFileError
from torchledger.gate.baselines import (
    ANYWHERE,
    BaselineFile,
    Sample,
    baseline_path,
    judge_sample,
    read_baselines,
    render_baselines,
    take_sample,
    updated_entry,
    write_baselines,
)
from torchledger.gate.machine import Machine
from torchledger.gate.properties import Check, decode_checks, encode_check
from torchledger.gate.quantities import Measured
from torchledger.gate.rows import decode_rows, encode_rows
from torchledger.journal.statements import MemorySnapshot
from torchledger.report import Report

H100 = {"torch": "2.13.1+cu126", "accelerator": "h100-sxm", "devices": {"cuda:0": {"name": "NVIDIA H100 80GB HBM3"}}}


def on_gpu(**more: Any) -> Report:
    return gpt_report(device="cuda:0", environment=H100 | more)


def entry_of(report: Report) -> dict[str, Any]:
    sample = take_sample(report)
    moved = {key: (sample.group_of(key, {}), found.value) for key, found in sample.values.items()}
    return updated_entry(None, moved, encode_rows(sample.peak))


def outcomes(entry: dict[str, Any], report: Report, share: Fraction | None = None) -> dict[str, str]:
    return {verdict.key: verdict.outcome for verdict in judge_sample(entry, take_sample(report), share)}


@pytest.mark.parametrize(
    ("report", "group"),
    [
        (gpt_report(environment={"torch": "2.13.0+cpu"}), "cpu, torch 2.13"),
        (gpt_report(environment={}), "cpu, torch unknown"),
        (on_gpu(), "h100-sxm, torch 2.13"),
        (on_gpu(accelerator=None), "NVIDIA H100 80GB HBM3, torch 2.13"),
        (on_gpu(devices={"cuda:0": {"name": "x", "simulated": True}}), "simulated h100-sxm, torch 2.13"),
        (on_gpu(simulated=True), "simulated h100-sxm, torch 2.13"),
        (gpt_report(environment=H100 | {"simulated": True}), "cpu, torch 2.13"),
    ],
)
def test_groups(report: Report, group: str) -> None:
    assert set(entry_of(report)) == {ANYWHERE, group}


def test_what_needs_neither_device_nor_torch() -> None:
    groups = entry_of(gpt_report())
    assert {"flops", "recompute_flops", "parameters", "buffers", "gradients"} <= set(groups[ANYWHERE])
    (other,) = (group for name, group in groups.items() if name != ANYWHERE)
    assert {"peak", "activations", "temporaries"} <= set(other)
    assert not {"requested", "allocated", "reserved"} & set(other)
    assert {"requested", "allocated", "reserved"} <= set(entry_of(on_gpu())["h100-sxm, torch 2.13"])


def changed(report: Report, key: str, by: int) -> dict[str, Any]:
    entry = entry_of(report)
    next(group for group in entry.values() if key in group)[key] -= by
    return entry


@pytest.mark.parametrize(
    ("key", "by", "outcome"),
    [
        ("peak", MIB, "PASS"),  # 1 % of some 500 MiB is more
        ("peak", 4 * MIB, "PASS"),
        ("peak", 7 * MIB, "REGRESSION"),
        ("peak", -7 * MIB, "WIN"),
        ("autocast_copies", -MIB, "PASS"),  # of nothing 1 % is nothing: the floor holds
        ("autocast_copies", -MIB - 1, "WIN"),
        ("parameters", 1, "REGRESSION"),  # what the program decides is exact anywhere
        ("flops", 1, "REGRESSION"),
        ("flops", -1, "WIN"),
    ],
)
def test_tolerance_on_an_accelerator(key: str, by: int, outcome: str) -> None:
    assert outcomes(changed(on_gpu(), key, by), on_gpu())[key] == outcome


@pytest.mark.parametrize(
    "environment", [{}, H100 | {"devices": {"cuda:0": {"simulated": True}}}], ids=["cpu", "simulated"]
)
def test_cpu_and_simulated_devices_are_exact(environment: dict[str, Any]) -> None:
    device = "cuda:0" if environment else "cpu"
    report = gpt_report(device=device, environment=environment)
    assert set(outcomes(entry_of(report), report).values()) == {"PASS"}
    assert outcomes(changed(report, "peak", 1), report)["peak"] == "REGRESSION"
    assert outcomes(changed(report, "peak", -1), report)["peak"] == "WIN"


def test_the_first_step_on_a_gpu_is_a_warm_up() -> None:
    first = gpt_report(n_steps=1, recompute=False, device="cuda:0").steps[0]
    rest = on_gpu().steps
    report = Report((first, *rest[1:]), 3, H100, on_gpu().flops)
    assert report.peak_step is not None
    assert report.peak_step.index == 0
    assert outcomes(entry_of(on_gpu()), report) == dict.fromkeys(take_sample(report).values, "PASS")
    alone = Report((first,), 1, H100, first.flops)
    assert outcomes(entry_of(on_gpu()), alone)["activations"] == "REGRESSION"


def test_another_kind_of_device() -> None:
    found = outcomes(entry_of(on_gpu()), gpt_report(environment={"torch": "2.13.0"}))
    assert found["peak"] == "NO-MATCH"
    assert found["flops"] == found["parameters"] == "PASS"


def test_what_is_no_longer_measured_is_no_pass() -> None:
    entry = entry_of(gpt_report())
    sample = take_sample(gpt_report())
    del sample.values["activations"]
    assert {v.key: v.outcome for v in judge_sample(entry, sample, None)}["activations"] == "WIN"


def test_paths() -> None:
    assert baseline_path(Path("a/test_x.y.py")) == Path("a/__ledger__/test_x.y.json")
    assert baseline_path(Path("a/README.rst")) == Path("a/__ledger__/README.rst.json")


def test_files_are_written_whole_and_sorted(tmp_path: Path) -> None:
    file = BaselineFile(
        tmp_path / "__ledger__" / "t.json", {"schema": 1, "kind": "torchledger-baselines", "entries": {}}
    )
    file = file.with_entries({"test_ü": entry_of(gpt_report()), "test_a": {}})
    write_baselines(file)
    text = file.path.read_text("utf-8")
    assert text == render_baselines(read_baselines(file.path))
    assert text.index('"test_a"') < text.index('"test_ü"')
    assert all(line.count(":") <= 1 or "|" in line or "torch" in line for line in text.splitlines())
    assert [path.name for path in file.path.parent.iterdir()] == ["t.json"]
    assert not list(file.unknown())
    json.loads(text)


def test_names_that_are_no_text_can_be_written(tmp_path: Path) -> None:
    file = BaselineFile(
        tmp_path / "__ledger__" / "t.json", {"schema": 1, "kind": "torchledger-baselines", "entries": {}}
    )
    file = file.with_entries({"test[\udcff]": {}})
    write_baselines(file)
    assert list(read_baselines(file.path).entries) == ["test[\udcff]"]


def test_a_folder_in_the_place_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(BaselineFileError, match="cannot read"):
        read_baselines(tmp_path)


def test_rows_come_back() -> None:
    peak = gpt_report().peak
    found = decode_rows(encode_rows(peak))
    assert found.total_bytes == peak.total_bytes == sum(encode_rows(peak).values())
    assert found.by_category == peak.by_category
    assert found.largest == peak.largest
    assert decode_rows({"x": 1, "activations | a": 2, "inputs | m | op | nowhere | f | 1 | 1": 3}).total_bytes == 0


words = st.text(max_size=20)
numbers = st.integers(min_value=-(2**70), max_value=2**70)


@given(st.lists(st.builds(Check, words, words, words, words, st.just({"peak": 1}), st.dictionaries(words, numbers))))
def test_checks_travel_as_properties(checks: list[Check]) -> None:
    pairs = [pair for number, check in enumerate(checks, start=1) for pair in encode_check(check, number)]
    assert all(isinstance(value, str | int) for _, value in pairs)
    assert decode_checks([("theirs", "x"), *pairs, ("torchledger.peak_bytes", 3)]) == checks


def test_an_account_that_is_newer_than_a_baseline_is_new_only_where_it_holds_something() -> None:
    entry = {"any device, any torch": {"flops": 4}}
    for value, outcome in ((0, "PASS"), (3, "NEW")):
        values = {"flops": Measured(4, 0, "cpu"), "inference_flops": Measured(value, 0, "cpu")}
        sample = Sample(values, Machine("cpu", "", "2.13.0", simulated=False), MemorySnapshot())
        assert [verdict.outcome for verdict in judge_sample(entry, sample, None)] == ["PASS", outcome]
