"""Answers of the napkin, and the table of one model by published rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torchledger.analytic.estimates import Estimate
from torchledger.analytic.rules import PublishedCount
from torchledger.render.tables import Column, Facts, Table
from torchledger.units import format_count, format_flops, format_share


def estimate_sections(estimates: Iterable[Estimate]) -> Iterator[Facts]:
    """Each answer with its formula, its numbers and what it leaves out.

    >>> [facts.lines[0] for facts in estimate_sections([Estimate("Cost", "3 days", "a / b", "6 / 2", ("c",))])]
    [('answer', '3 days')]
    """
    for estimate in estimates:
        lines = [("answer", estimate.answer), ("formula", estimate.formula), ("numbers", estimate.numbers)]
        keys = ["leaves out", *[""] * (len(estimate.leaves_out) - 1)]
        yield Facts(estimate.title, (*lines, *zip(keys, estimate.leaves_out, strict=True)))


def rule_sections(rules: Iterable[PublishedCount], title: str) -> tuple[Table, Facts, Facts]:
    """FLOPs by each rule beside the first one, then each rule's formula and source, and what it leaves out.

    >>> table, *_ = rule_sections([PublishedCount("6ND", 12, "6·N·D", "paper", "attention")], "One model")
    >>> table.rows
    (('6ND', '12', '12 FLOP', '100.0 %'),)
    """
    listed = list(rules)
    first = listed[0].flops if listed else 0
    rows = [(r.name, format_count(r.flops), format_flops(r.flops), format_share(r.flops, first)) for r in listed]
    columns = (Column("rule", "text"), Column("FLOP"), Column("", drop=2), Column("of the first", drop=1))
    return (
        Table(title, columns, tuple(rows)),
        Facts("Formulas", tuple((rule.name, f"{rule.formula} [{rule.source}]") for rule in listed)),
        Facts("What they leave out", tuple((rule.name, rule.leaves_out) for rule in listed)),
    )
