"""Bridges from a prediction to a measured number, as tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torchledger.read.reconcile.bridge import Bridge
from torchledger.read.reconcile.flops import FLOP_TERMS
from torchledger.read.reconcile.memory import MEMORY_TERMS, PhasePeak
from torchledger.render.names import clean, module_label
from torchledger.render.tables import Column, Facts, Section, Table
from torchledger.units import format_bytes, format_flops, format_share


def reconciliation_sections(flops: Bridge, memory: Bridge, peaks: Iterable[PhasePeak]) -> tuple[Section, ...]:
    """Both bridges, and the peak of each phase; first what must be known to read them."""
    sections: list[Section] = [Facts("Before you read", (("note", flops.caveat),))] if flops.caveat else []
    sections += [
        bridge_table(flops, "FLOPs: from 6·N·D to what the hardware executed"),
        *parts_tables(flops),
        bridge_table(memory, "Bytes: from 16·N to the peak"),
    ]
    peaks = tuple(peaks)
    told = [(peak.phase, peak.advice) for peak in peaks]
    rows = tuple(
        (
            peak.phase,
            f"{peak.total_bytes:,}",
            format_bytes(peak.total_bytes),
            f"{clean(peak.op)} of {module_label(peak.module)}" if peak.op else "its beginning",
            f"{peak.category} {format_bytes(peak.category_bytes)}",
        )
        for peak in peaks
    )
    if rows:
        columns = (
            Column("phase", "text"),
            Column("bytes"),
            Column("", "number", drop=1),
            Column("at", "name"),
            Column("mostly", "text", drop=2),
        )
        sections.append(Table("The peak of each phase", columns, rows))
        advice = tuple((f"the peak, in {phase}", words) for phase, words in told if words)
        sections += [Facts("What would lower it", advice)] if advice else []
    return tuple(sections)


def parts_tables(bridge: Bridge) -> list[Table]:
    """For each term of several parts, a table of them whose last row is the term."""
    columns = (Column("stage", "name"), Column("FLOP"), Column("", "number", drop=2), Column("why", "text"))
    tables = []
    for term in bridge.terms:
        if len(term.parts) < 2:
            continue
        rows = [
            (module_label(name), _signed(n), format_flops(n, signed=True), clean(why)) for name, n, why in term.parts
        ]
        rows.append((term.name, _signed(term.value), format_flops(term.value, signed=True), ""))
        tables.append(Table(f"What {term.name} is made of", columns, tuple(rows), 1))
    return tables


def bridge_table(bridge: Bridge, title: str) -> Table:
    """A bridge, a line a term; what is left over says so."""
    in_units = format_flops if bridge.unit == "flops" else format_bytes
    closed = bridge.closed_form is not None

    def row(name: str, n: int, why: str, closed_form: int | None = None, *, signed: bool = True) -> tuple[str, ...]:
        shown = (_signed(n) if signed else f"{n:,}", in_units(n, signed=signed), why)
        return (name, *shown[:2], *((_signed(closed_form) if closed_form is not None else "",) if closed else ()), why)

    rule, _, numbers = bridge.rule.partition(", ")
    rows = [row("predicted", bridge.predicted, clean(rule), signed=False)]
    rows += [row(term.name, term.value, clean(term.why), term.closed_form) for term in bridge.terms]
    if bridge.residual:
        share = format_share(abs(bridge.residual), bridge.measured)
        rows.append(row("unexplained", bridge.residual, f"{share} of what was measured: no cause has a name"))
    rows.append(row("measured", bridge.measured, "", signed=False))
    unit = "FLOP" if bridge.unit == "flops" else "bytes"
    columns = (
        Column("term", "text"),
        Column(unit),
        Column("", "number", drop=2),
        *((Column("closed form", "number"),) if closed else ()),
        Column("why", "name"),
    )
    notes = [f"predicted from {clean(numbers)}", *map(clean, bridge.notes)] if numbers else [*map(clean, bridge.notes)]
    if not bridge.residual and not bridge.value("unexplained"):
        notes.insert(0, "residual 0: every difference has a name")
    return Table(title, columns, tuple(rows), 1, tuple(notes))


def bridges_beside(bridges: Mapping[str, Bridge], title: str) -> Table:
    """Bridges of several runs, a column each; they have the same terms, 0 where a run does without one."""
    names = list(dict.fromkeys(term.name for bridge in bridges.values() for term in bridge.terms))
    first = next(iter(bridges.values()))
    order = {name: i for i, name in enumerate((*FLOP_TERMS, *MEMORY_TERMS))}
    rows = [("predicted", *(f"{bridge.predicted:,}" for bridge in bridges.values()))]
    names.sort(key=lambda name: order[name])
    rows += [(name, *(_signed(bridge.value(name)) for bridge in bridges.values())) for name in names]
    if any(bridge.residual for bridge in bridges.values()):
        rows.append(("unexplained", *(_signed(bridge.residual) for bridge in bridges.values())))
    rows.append(("measured", *(f"{bridge.measured:,}" for bridge in bridges.values())))
    unit = "FLOP" if first.unit == "flops" else "bytes"
    columns = (Column("term", "text"), *(Column(f"{name}, {unit}") for name in bridges))
    notes = [f"predicted: {first.rule}"]
    if not any(bridge.residual for bridge in bridges.values()):
        notes.append("residual 0: every difference has a name")
    return Table(title, columns, tuple(rows), 1, tuple(map(clean, notes)))


def _signed(n: int) -> str:
    return f"{n:+,}" if n else "0"
