"""Bridges as tables: a line a term, what is left over, closed forms beside."""

from __future__ import annotations

import pytest

from torchledger.read.reconcile.bridge import Bridge, Drafts, Term
from torchledger.read.reconcile.memory import PhasePeak
from torchledger.render.bridges import bridge_table, reconciliation_sections
from torchledger.render.tables import Facts, Table
from torchledger.render.text import render_sections

TERMS = (Term("attention", 1_500, "scores"), Term("frozen", -300, "no weight gradient"))


def make_bridge(measured: int = 7_200, *, closed: bool = False, unit: str = "flops") -> Bridge:
    terms = tuple(term._replace(closed_form=term.value + 1) for term in TERMS) if closed else TERMS
    rule = "6·N·D, N 100 parameters, D 10 tokens (given)"
    return Bridge(6_000, terms, measured, unit, rule, ("a note",), 7_202 if closed else None)


def cells(table: Table) -> dict[str, tuple[str, ...]]:
    return {row[0]: tuple(row) for row in table.rows}


def test_a_line_for_each_term() -> None:
    table = bridge_table(make_bridge(), "FLOPs")
    rows = cells(table)
    assert list(rows) == ["predicted", "attention", "frozen", "measured"]
    assert [row[1] for row in rows.values()] == ["6,000", "+1,500", "-300", "7,200"]
    assert rows["predicted"][-1] == "6·N·D"
    assert rows["frozen"][-1] == "no weight gradient"
    assert table.notes[0] == "residual 0: every difference has a name"
    assert table.notes[1:] == ("predicted from N 100 parameters, D 10 tokens (given)", "a note")


@pytest.mark.parametrize(("measured", "left", "share"), [(8_000, "+800", "10"), (7_000, "-200", "2.9")])
def test_what_is_left_says_so(measured: int, left: str, share: str) -> None:
    table = bridge_table(make_bridge(measured), "FLOPs")
    row = cells(table)["unexplained"]
    assert row[1] == left
    assert row[-1].startswith(share)
    assert "no cause has a name" in row[-1]
    assert not any("residual 0" in note for note in table.notes)


def test_lines_add_up() -> None:
    for measured in (7_200, 9_999, 1):
        rows = cells(bridge_table(make_bridge(measured), "FLOPs"))
        numbers = {name: int(row[1].replace(",", "")) for name, row in rows.items()}
        assert numbers.pop("measured") == sum(numbers.values())


def test_closed_forms_have_a_column_of_their_own() -> None:
    plain, beside = (bridge_table(make_bridge(closed=closed), "FLOPs") for closed in (False, True))
    assert [column.title for column in plain.columns] == ["term", "FLOP", "", "why"]
    assert [column.title for column in beside.columns] == ["term", "FLOP", "", "closed form", "why"]
    assert {name: row[3] for name, row in cells(beside).items() if row[3]} == {"attention": "+1,501", "frozen": "-299"}


def test_bytes_are_in_their_units() -> None:
    table = bridge_table(make_bridge(unit="bytes"), "Bytes")
    assert table.columns[1].title == "bytes"
    assert cells(table)["attention"][2] == "+1.46 KiB"


def test_names_cannot_write_to_the_terminal() -> None:
    bridge = Bridge(1, (Term("uncounted", 0, "mylib.\x1b[31mop (2 calls)"),), 1, rule="6·N·D, N 1")
    assert "\x1b" not in render_sections([bridge_table(bridge, "FLOPs")], 200)


def test_phases_below_the_bridges() -> None:
    peaks = [
        PhasePeak("forward", 2048, "", "", "parameters", 1024, "shard"),
        PhasePeak("backward", 4096, "blocks.0", "aten.mm", "activations", 3072, "checkpoint"),
    ]
    sections = reconciliation_sections(make_bridge(), make_bridge(unit="bytes"), peaks)
    assert len(sections) == 4
    table, facts = sections[2:]
    assert isinstance(table, Table)
    assert isinstance(facts, Facts)
    assert [row[3] for row in table.rows] == ["its beginning", "aten.mm of blocks.0"]
    assert [row[4] for row in table.rows] == ["parameters 1.00 KiB", "activations 3.00 KiB"]
    assert len(reconciliation_sections(make_bridge(), make_bridge(), [])) == 2


def test_drafts_keep_the_order_of_their_names() -> None:
    drafts = Drafts(("a", "b", "c", "d"))
    drafts.add("c", 5)
    drafts.add("a", -2)
    drafts.add("a", 2)
    drafts.explain("b", "one")
    drafts.explain("b", "two")
    assert drafts.terms() == (Term("b", 0, "one; two"), Term("c", 5, ""))
    assert drafts.terms({"d": 7}) == (Term("b", 0, "one; two", 0), Term("c", 5, "", 0), Term("d", 0, "", 7))
    assert drafts.value("c") == 5


def test_a_bridge_of_no_terms() -> None:
    bridge = Bridge(6, (), 7)
    assert (bridge.residual, bridge.value("reuse")) == (1, 0)
