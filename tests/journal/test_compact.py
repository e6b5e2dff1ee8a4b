"""Journals <-> JSON."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synthetic import make_journal
from torchledger.errors import ReportFileError
from torchledger.journal.compact import decode_journal, encode_journal
from torchledger.journal.entries import LATE, READ_BY_FORWARD, Journal


def test_what_is_written_is_read() -> None:
    journal = make_journal()
    document = json.loads(json.dumps(encode_journal(journal)))
    assert decode_journal(document, "journals") == journal
    assert encode_journal(decode_journal(document, "journals")) == document


def test_every_field_of_a_journal_is_written() -> None:
    fields = {field.name for field in dataclasses.fields(Journal)}
    assert set(encode_journal(Journal())) == fields | {"strings"}
    full = make_journal()
    empty = [f.name for f in dataclasses.fields(Journal) if getattr(full, f.name) == getattr(Journal(), f.name)]
    assert empty == [], "make_journal should hold something of everything"


def test_order_has_no_meaning_in_tables() -> None:
    journal, turned = make_journal(), make_journal()
    turned.roles = dict(reversed(turned.roles.items()))
    assert json.dumps(encode_journal(turned)) == json.dumps(encode_journal(journal))


def test_a_storage_may_go_and_come_again() -> None:
    journal = make_journal()
    journal.events += [11, ~11]
    assert decode_journal(encode_journal(journal), "") == journal


def test_what_was_there_before_may_go() -> None:
    journal = Journal(
        first=3,
        carried={1: (8, "cpu", "forward", 0, "aten.mm", (2,), "float32", -1)},
        blocks=[
            (16, "cpu", "", 0, "(before)", (4,), "float32", -1),
            (4, "cpu", "outside", 0, "aten.ones", (), "float32", -1),
        ],
        roles={3: LATE, 4: READ_BY_FORWARD},
        events=[4, ~3, ~1, ~4],
        modules=[""],
    )
    assert decode_journal(encode_journal(journal), "") == journal
    journal.roles = {4: READ_BY_FORWARD}  # no longer met late: then it goes without having come
    with pytest.raises(ReportFileError, match="block 3 goes before it came"):
        decode_journal(encode_journal(journal), "")


CASES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no row": (lambda j: j["blocks"].append(5), "j.blocks[3]: must be a list of 8 values"),
    "a short row": (lambda j: j["blocks"][0].pop(), "j.blocks[0]: must be a list of 8 values"),
    "a negative size": (lambda j: j["blocks"][0].__setitem__(0, -8), "j.blocks[0]: is -8, but must be at least 0"),
    "no such string": (lambda j: j["blocks"][0].__setitem__(1, 99), "holds the index 99 into a table of 14"),
    "no such module": (lambda j: j["blocks"][0].__setitem__(3, 2), "holds the index 2 into a table of 2"),
    "no such parameter": (lambda j: j["products"][0][7][0].__setitem__(0, 1), "holds the index 1 into a table of 1"),
    "no such block": (lambda j: j["events"].append(13), "j.events: names block 13, which is not in the journal"),
    "no such block went": (lambda j: j["events"].append(-1), "j.events: names block 0"),
    "twice": (lambda j: j["events"].append(12), "j.events[4]: block 12 comes while it is alive"),
    "gone twice": (lambda j: j["events"].append(~11), "j.events[4]: block 11 goes before it came"),
    "roles of nothing": (lambda j: j["roles"].append([77, 1]), "j.roles: names block 77"),
    "a mark outside": (lambda j: j["marks"].append([5, 0, 0]), "j.marks: has a position behind the last event"),
    "an unknown key": (lambda j: j.update(color=1), 'j: has the unknown key "color"'),
    "a missing key": (lambda j: j.pop("events"), 'j: lacks the key "events"'),
    "no modules": (lambda j: j.pop("modules"), 'j: lacks the key "modules"'),
    "a reading": (lambda j: j["readings"]["cuda:0"].pop(), 'j.readings["cuda:0"]: must be a list of 10 values'),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_said_with_its_place(case: str) -> None:
    change, message = CASES[case]
    document = encode_journal(make_journal())
    change(document)
    with pytest.raises(ReportFileError) as refused:
        decode_journal(document, "j")
    assert message in refused.value.message


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_foreign_value_crashes_the_reader(data: st.DataObject) -> None:
    document: Any = copy.deepcopy(encode_journal(make_journal()))
    here = document
    while True:
        key = data.draw(st.sampled_from(sorted(here) if isinstance(here, dict) else range(len(here))))
        if isinstance(here[key], dict | list) and here[key] and data.draw(st.booleans()):
            here = here[key]
            continue
        here[key] = data.draw(st.sampled_from([None, True, -1, 10**40, 1.5, "x", [], {}, [[]], float("nan")]))
        break
    try:
        decoded = decode_journal(document, "")
    except ReportFileError:
        return
    assert encode_journal(decoded)["events"] == document["events"]
