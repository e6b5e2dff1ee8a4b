"""A report that the version before wrote still loads, with the numbers that it was saved with."""

from pathlib import Path

import torchledger as tl
from torchledger.journal.entries import SETTLED_SHIFT
from torchledger.journal.statements import CATEGORIES

SAVED = Path(__file__).parent / "data" / "schema1.json"
OLD_CATEGORIES = tuple(name for name in CATEGORIES if name not in ("communication", "unsharded_parameters"))


def test_a_report_of_schema_1_keeps_its_numbers():
    report = tl.Report.load(SAVED)
    assert (report.n_steps, report.flops.total, report.flops.recompute, report.flops.inference) == (3, 18432, 3072, 0)
    peak = report.peak
    assert (peak.total_bytes, peak.parameters, peak.temporaries, peak.other) == (5736, 1120, 1088, 24)
    assert (peak.communication, peak.unsharded_parameters, peak.mapped_bytes) == (0, 0, 0)
    assert (report.remainder, report.growing, report.blind_spots) == (None, (), ())
    assert tl.reconcile(report.steps[-1]).flops.residual == 0


def test_its_journal_still_adds_up_to_its_snapshots():
    report = tl.Report.load(SAVED)
    step = report.steps[-1]
    *_, last = step.memory["cpu"].timeline()
    assert dict(last.by_category) == step.memory["cpu"].end.by_category


def test_categories_in_its_journals_keep_their_names():
    import json

    document = json.loads(SAVED.read_text())
    journal = document["journals"]["2"]
    before = {number: role >> SETTLED_SHIFT for number, role in journal["roles"]}
    after = {number: role >> SETTLED_SHIFT for number, role in tl.Report.load(SAVED).journals[2].roles.items()}
    assert {OLD_CATEGORIES[index - 1] for index in before.values() if index} >= {"parameters", "other"}
    for number, index in before.items():
        assert (CATEGORIES[after[number] - 1] if index else "") == (OLD_CATEGORIES[index - 1] if index else "")


def test_it_is_saved_in_the_schema_of_today(tmp_path):
    report = tl.Report.load(SAVED)
    report.save(tmp_path / "again.json", journal=True)
    assert tl.Report.load(tmp_path / "again.json") == report
