"""Runs <-> JSON. Every mutation of a good document is refused by name of the place, or read back as it stands."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synthetic import gpt_flops, gpt_report, make_journal, make_report, make_snapshot, utilized_report
from torchledger.errors import ReportFileError
from torchledger.journal import schema
from torchledger.journal.schema import MIGRATIONS, SCHEMA, decode_run, dump_run, encode_run
from torchledger.journal.statements import MemoryStatement, StepReport
from torchledger.report import Report

REPORTS = {
    "empty": make_report(),
    "cpu": gpt_report(faults=("a", "b")),
    "cuda": utilized_report(),
    "unicode": make_report(environment={"名": "模型\x1b\ud800", "nested": {"a": [1, 2.5, None, True]}}),
}
Document = dict[str, Any]


@pytest.mark.parametrize("name", REPORTS)
def test_what_is_written_is_read(name: str) -> None:
    report = REPORTS[name]
    text = dump_run(report)
    assert text.isascii()
    assert Report.from_dict(json.loads(text)) == report
    assert json.loads(text) == encode_run(report)
    assert dump_run(Report.from_dict(json.loads(text))) == text


def test_the_same_run_gives_the_same_text() -> None:
    flops = gpt_flops()
    turned = dataclasses.replace(flops, by_op=dict(reversed(flops.by_op.items())))
    memory = {device: MemoryStatement(peak=make_snapshot(inputs=n)) for device, n in (("cpu", 1), ("cuda:0", 2))}
    texts = {
        dump_run(make_report(StepReport(0, 1, 0.5, f, m), environment=e))
        for f in (flops, turned)
        for m in (memory, dict(reversed(memory.items())))
        for e in ({"a": {"x": 1, "y": 2}, "b": 2}, {"b": 2, "a": {"y": 2, "x": 1}})
    }
    assert len(texts) == 1


def test_modules_keep_their_order() -> None:
    report = gpt_report()
    loaded = Report.from_dict(json.loads(dump_run(report)))
    assert list(loaded.steps[0].flops.by_module) == list(report.steps[0].flops.by_module)
    assert list(loaded.steps[0].flops.by_module)[2] == "blocks.0.attn.qkv"


def test_integers_are_exact() -> None:
    step = StepReport(
        0, None, 0.0, gpt_flops(scale=10**18 + 1), {"cpu": MemoryStatement(peak=make_snapshot(inputs=2**63 + 1))}
    )
    loaded = Report.from_dict(json.loads(dump_run(make_report(step))))
    assert loaded.flops.total == gpt_flops().total * (10**18 + 1)
    assert loaded.peak.total_bytes == 2**63 + 1


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a document."""
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield from places(entry, (*path, key))


def put(document: Document, path: tuple[Any, ...], value: Any) -> Document:
    changed = copy.deepcopy(document)
    here: Any = changed
    for key in path[:-1]:
        here = here[key]
    here[path[-1]] = value
    return changed


SMALL = encode_run(gpt_report(n_steps=1, environment={"torch": "2"}))
PLACES = [path for path in places(SMALL) if path and path[0] != "environment"]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(PLACES),
    st.sampled_from([None, True, -1, 1.5, "x", [], {}, [1], {"a": 1}, float("nan"), 10**40, (), {1: 2}]),
)
def test_no_foreign_value_gets_through(path: tuple[Any, ...], value: Any) -> None:
    document = put(SMALL, path, value)
    try:
        run = decode_run(document)
    except ReportFileError as error:
        run, message = None, str(error)
    if run is not None:  # what was read is what stands there
        assert encode_run(run) == document
    else:
        assert "\n" not in message
        assert len(message) < 400


TABLES = {"by_op", "by_dtype", "uncounted", "by_module", "by_parameter", "peak_by_phase", "category_peaks", "memory"}


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(
        [path for path in PLACES if isinstance(path[-1], str) and path[-2:-1] not in {(t,) for t in TABLES}]
    )
)
def test_no_key_of_a_record_may_be_missing(path: tuple[Any, ...]) -> None:
    document = copy.deepcopy(SMALL)
    here: Any = document
    for key in path[:-1]:
        here = here[key]
    del here[path[-1]]
    with pytest.raises(
        ReportFileError, match="not a torchledger" if path == ("format",) else "lacks the key|schema: is"
    ):
        decode_run(document)


def edit(change: Callable[[Document], object]) -> Document:
    document = encode_run(gpt_report())
    change(document)
    return document


def peak(document: Document) -> Document:
    return document["steps"][1]["memory"]["cpu"]["peak"]


CASES: dict[str, tuple[Callable[[Document], object], str]] = {
    "a negative count": (lambda d: d["flops"].update(total=-5), "flops.total: is -5, but must be at least 0"),
    "a float": (lambda d: d["flops"].update(total=1.0), "flops.total: is 1.0, but must be a whole number"),
    "a bool": (lambda d: d.update(n_steps=True), "n_steps: is true, but must be a whole number"),
    "a huge number": (lambda d: d.update(n_steps=10**31), "n_steps: is a huge number, which is no count"),
    "a missing key": (lambda d: d["steps"][0].pop("tokens"), 'steps[0]: lacks the key "tokens"'),
    "an unknown key": (lambda d: d["steps"][0].update(color=1), 'steps[0]: has the unknown key "color"'),
    "an unknown phase": (
        lambda d: d["steps"][0]["memory"]["cpu"]["peak_by_phase"].update(lunch={}),
        'steps[0].memory.cpu.peak_by_phase: has the unknown key "lunch"',
    ),
    "an unknown category": (lambda d: peak(d)["largest"][0].update(category="junk"), 'largest[0].category: is "junk"'),
    "a time that is none": (
        lambda d: d["steps"][0].update(duration_s=float("nan")),
        "steps[0].duration_s: must be a finite",
    ),
    "infinity inside": (
        lambda d: d["environment"].update(x=[float("inf")]),
        "environment.x[0]: must be a finite number",
    ),
    "a list for an object": (lambda d: d.update(flops=[]), "flops: is a list, but must be an object"),
    "an object for a list": (lambda d: d.update(steps={}), "steps: is an object, but must be a list"),
    "phases": (lambda d: d["steps"][1]["flops"].update(forward=1), "steps[1].flops: has phases that add up to"),
    "ops": (lambda d: d["steps"][1]["flops"]["by_op"].pop("aten.mm"), "steps[1].flops: has ops that add up to"),
    "dtypes": (lambda d: d["steps"][1]["flops"].update(by_dtype={}), "steps[1].flops: has dtypes that add up to 0"),
    "modules": (
        lambda d: d["steps"][1]["flops"]["by_module"].pop("head"),
        "steps[1].flops: has modules that add up to",
    ),
    "a parent": (
        lambda d: d["steps"][1]["flops"]["by_module"]["blocks.3"].update(forward=7),
        "steps[1].flops: has the module '' whose children and own ops add up to",
    ),
    "the model's share": (
        lambda d: d["steps"][1]["flops"].update(model=1),
        "total - recompute - inference - attention_rescore",
    ),
    "a part above its whole": (
        lambda d: d["flops"].update(approximate=10**12),
        "flops: has approximate above the total",
    ),
    "categories": (lambda d: peak(d).update(inputs=1), "steps[1].memory.cpu.peak: has categories that add up to"),
    "bytes of modules": (lambda d: peak(d)["by_module"].pop("wte"), "peak: has modules that add up to"),
    "rows": (lambda d: peak(d)["largest"][0].update(nbytes=2**40), "peak: has rows of parameters that add up to"),
    "blocks": (lambda d: peak(d)["largest"][1].update(n_blocks=5), "largest[1]: has 12582912 bytes in 5 equal blocks"),
    "an end above the peak": (
        lambda d: d["steps"][1]["memory"]["cpu"]["end"].update(
            total_bytes=2**40, inputs=2**40 - 314576908, by_module={}
        ),
        "steps[1].memory.cpu: has 1099511627776 bytes at its end, above the peak of",
    ),
    "a phase above the peak": (
        lambda d: d["steps"][1]["memory"]["cpu"]["peak_by_phase"]["forward"].update(
            total_bytes=2**40, inputs=2**40 - 419434512, by_module={}
        ),
        "in the phase forward, above the peak of",
    ),
    "a category above its peak": (
        lambda d: d["steps"][1]["memory"]["cpu"]["category_peaks"].update(parameters=5),
        "has a peak of 5 for parameters, which also held 104857604",
    ),
    "fewer steps than there are": (lambda d: d.update(n_steps=2), "the report has 3 steps, but n_steps of 2"),
    "sums over the steps": (
        lambda d: [d["flops"].update(int_ops=5)],
        "the report has flops.int_ops of 5, but its steps add up to 0",
    ),
    "the wrong peak step": (lambda d: d.update(peak_step=0), "peak_step: is 0, which is not the step with the highest"),
    "no such peak step": (lambda d: d.update(peak_step=77), "peak_step: is 77"),
    "no peak step": (lambda d: d.update(peak_step=None), "peak_step: is null"),
    "a step twice": (lambda d: d["steps"][1].update(index=0), "steps: are not in the order of their indices"),
    "a foreign journal": (lambda d: d.update(journals={"9": {}}), 'journals["9"]: belongs to no step'),
    "an odd journal key": (lambda d: d.update(journals={"01": {}}), 'journals["01"]: belongs to no step'),
    "a broken journal": (lambda d: d.update(journals={"1": {}}), 'journals["1"]: lacks the key "strings"'),
    "schema 0": (lambda d: d.update(schema=0), "schema: is 0, but must be a number from 1 to 2"),
    "schema true": (lambda d: d.update(schema=True), "schema: is true"),
    "no schema": (lambda d: d.pop("schema"), "schema: is null"),
    "a long name": (lambda d: d["flops"]["by_op"].update({"x" * 999 + "\n": -1}), 'xxx..."]: is -1'),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_said_with_its_place(case: str) -> None:
    change, message = CASES[case]
    with pytest.raises(ReportFileError) as refused:
        decode_run(edit(change))
    assert message in refused.value.message
    assert "The file is damaged, or torchledger did not write it" in refused.value.message
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("foreign", [None, 5, "text", [], {}, {"format": "memray"}, {"schema": 1}, [{"schema": 1}]])
def test_foreign_documents(foreign: Any) -> None:
    with pytest.raises(ReportFileError, match="not a torchledger report"):
        decode_run(foreign)


def test_a_newer_schema_is_told_from_a_broken_file() -> None:
    for later in (SCHEMA + 1, 10**40):
        with pytest.raises(ReportFileError, match=r"written by a newer torchledger \(schema .*Upgrade torchledger"):
            decode_run({"format": schema.FORMAT, "schema": later, "whatever": 1})


def test_an_allocator_may_count_less_than_the_ledger() -> None:
    start = make_snapshot(inputs=100)
    peak = make_snapshot(inputs=100, unexplained=-20)
    memory = MemoryStatement(start=start, end=start, peak=peak, category_peaks={"inputs": 100, "unexplained": -20})
    report = make_report(StepReport(0, None, 0.0, gpt_flops(), {"cuda:0": memory}))
    assert Report.from_dict(report.to_dict()) == report


def test_steps_that_were_not_kept() -> None:
    kept = gpt_report(n_steps=1)
    report = dataclasses.replace(kept, n_steps=50, flops=gpt_report(n_steps=3).flops)
    assert Report.from_dict(report.to_dict()) == report
    with pytest.raises(ReportFileError, match="but its steps add up to"):
        decode_run(dataclasses.replace(gpt_report(n_steps=3), n_steps=50, flops=kept.flops).to_dict())


def test_modules_found_late_are_no_tree_in_the_sums() -> None:
    document = edit(lambda d: d["flops"]["by_module"]["blocks.3"].update(forward=7))
    assert decode_run(document).flops.by_module["blocks.3"].forward == 7


def test_older_schemas_are_migrated_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    document = encode_run(gpt_report())
    calls = []

    def rename(old: Document) -> Document:
        calls.append(old["schema"])
        return {("n_steps" if key == "steps_recorded" else key): value for key, value in old.items()}

    first = SCHEMA
    monkeypatch.setattr(schema, "SCHEMA", first + 2)
    monkeypatch.setitem(MIGRATIONS, first, rename)
    monkeypatch.setitem(MIGRATIONS, first + 1, rename)
    old = {("steps_recorded" if key == "n_steps" else key): value for key, value in document.items()}
    assert decode_run(old) == decode_run({**document, "schema": first + 2})
    assert calls == [first, first + 1]
    assert old["schema"] == first  # the given dict is left alone


def test_there_is_a_migration_from_every_older_schema() -> None:
    assert sorted(MIGRATIONS) == list(range(1, SCHEMA))


def test_a_document_is_not_changed_by_reading_it() -> None:
    document = encode_run(gpt_report(journals={1: make_journal()}), journal=True)
    before = copy.deepcopy(document)
    decode_run(document)
    assert document == before
