"""What a comparison says in single lines: for a headline, a message or an annotation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torchledger.gate.comparison import REPEAT_THE_PEAK, Comparison, Comparisons
from torchledger.gate.differences import Differences, EntryDifference
from torchledger.gate.judging import Outcome, Verdict
from torchledger.gate.machine import Machine
from torchledger.render.names import clean, module_label, shorten
from torchledger.units import format_against, format_bytes, format_count, format_flops, format_number, format_share


def headline(comparisons: Comparisons) -> str:
    """The verdict and the first number behind it, in one line.

    >>> headline(Comparisons(()))
    'NO-MATCH: nothing to compare'
    """
    verdict, found = comparisons.outcome, comparisons.found
    if verdict == Outcome.NO_MATCH:
        unrelated = next((c.unrelated for c in found if c.unrelated), "")
        return f"{verdict}: {unrelated or 'nothing to compare'}"
    n_passed = sum(comparison.outcome == Outcome.PASS for comparison in found)
    passed = f"; {format_count(n_passed)} of {format_count(len(found))} pass" if len(found) > 1 else ""
    n_unmatched = sum(len(comparison.of(Outcome.NO_MATCH)) for comparison in found)
    passed += f"; {format_number(n_unmatched, 'number')} not compared" if n_unmatched else ""
    if verdict == Outcome.PASS:
        return f"{verdict}: nothing grew beyond its tolerance{passed}"
    behind = [(c, item) for c in found for item in told_apart(c) if item.outcome == verdict]
    comparison, first = behind[0]
    where = f"{clean(comparison.name)}: " if comparison.name and len(found) > 1 else ""
    more = f", and {format_count(len(behind) - 1)} more" if len(behind) > 1 else ""
    return f"{verdict}: {where}{quantity_line(first)}{more}{passed}"


def entry_line(entry: EntryDifference) -> str:
    """One difference in one line, as a message has it.

    >>> entry_line(EntryDifference("inputs", "", "aten.ones", "int8", (4,), 0, 2**20, "new", "int8 4: new"))
    '(model) inputs +1.00 MiB: int8 4: new (aten.ones)'
    """
    change = format_bytes(entry.change, signed=True)
    if entry.kind == "rest":
        return f"{entry.category} {change}: {entry.words}"
    op = f" ({clean(entry.op)})" if entry.op else ""
    return f"{module_label(entry.module)} {entry.category} {change}: {clean(entry.words)}{op}"


def causes(comparison: Comparison, item: Verdict) -> Iterator[str]:
    """What moved a number the way that it went, the largest first, each in one line; what no row shows comes last."""
    differences, key = comparison.differences, item.key
    grew = item.change > 0
    if item.unit == "bytes":
        for entry in sorted(differences.entries, key=lambda entry: entry.kind == "rest"):
            if (entry.change > 0) == grew and key in (entry.category, "peak", *REPEAT_THE_PEAK):
                yield entry_line(entry)
    elif item.unit == "flops":
        phase = key.removesuffix("_flops")
        for row in differences.flop_modules:
            if (row.change > 0) == grew and (key in ("flops", "model_flops") or phase in row.words):
                words = f" ({row.words})" if row.words else ""
                yield f"{module_label(row.name)} {format_flops(row.change, signed=True)}{words}"


def main_causes(comparison: Comparison, n_lines: int = 3) -> list[str]:
    """The largest of what moved the first number of bytes, and the first of FLOPs, that the verdict is about."""
    lines = []
    for unit in ("bytes", "flops"):
        behind = [i for i in told_apart(comparison) if i.outcome == comparison.outcome and i.unit == unit]
        found = causes(comparison, behind[0]) if behind and behind[0].change else ()
        lines += [line for line, _ in zip(found, range(n_lines), strict=False)]
    return lines


def quantity_line(item: Verdict) -> str:
    """A number of both runs in one line, with the change.

    >>> from torchledger.gate.judging import judge
    >>> from torchledger.gate.quantities import Measured
    >>> quantity_line(judge("peak", Measured(2 * 2**30 + 2**20, 0, "cpu"), 2 * 2**30))
    'peak 2.000 GiB -> 2.001 GiB (+1.00 MiB, <0.1 %)'
    """
    base, head = both(item)
    changes = ", ".join(filter(None, (change(item), percent(item))))
    return f"{item.key} {base} -> {head}" + (f" ({changes})" if changes else "")


def told_apart(comparison: Comparison) -> list[Verdict]:
    """The quantities without those that only repeat the peak: on a CPU, requested, allocated and reserved bytes do."""
    peak = next((item for item in comparison.verdicts if item.key == "peak"), None)
    return [
        item for item in comparison.verdicts if item.key not in REPEAT_THE_PEAK or peak is None or not _same(item, peak)
    ]


def moved(item: Verdict) -> bool:
    """Whether the number differs, be it within its tolerance."""
    return item.change != 0 or item.outcome in (Outcome.NEW, Outcome.GONE)


def mismatch_lines(comparison: Comparison) -> list[str]:
    """What was not compared and why, a line for each reason.

    >>> mismatch_lines(Comparison("", (), None, ()))
    []
    """
    if comparison.unrelated:
        return [clean(comparison.unrelated)]
    reasons: dict[str, list[str]] = {}
    for item in comparison.of(Outcome.NO_MATCH):
        reasons.setdefault(item.why, []).append(item.key)
    return [f"{', '.join(keys)}: {clean(why)}" for why, keys in reasons.items()]


def instants_label(differences: Differences) -> str:
    """What ran at the peak of the head, and at that of the base if it was something else.

    >>> from torchledger.gate.differences import Instant
    >>> instants_label(Differences(head_instant=Instant("forward", "fc", "aten.addmm")))
    'forward, in fc, at aten.addmm'
    """
    labels = [
        f"{instant.phase}, in {module_label(instant.module)}, at {clean(instant.op)}" if instant.op else instant.phase
        for instant in (differences.base_instant, differences.head_instant)
    ]
    moved = labels[0] and labels[1] and labels[0] != labels[1]
    return f"{labels[1]}; in the base {labels[0]}" if moved else labels[1]


def machines_label(base: Machine, head: Machine) -> str:
    """Where both runs were made, said once where it is the same.

    >>> machine = Machine("cuda:0", "NVIDIA H100", "2.13.0", simulated=False)
    >>> machines_label(machine, machine)
    'cuda:0 (NVIDIA H100), torch 2.13.0'
    """
    labels = []
    for machine in (base, head):
        name = ", ".join(filter(None, (machine.name, "simulated" if machine.simulated else "")))
        label = f"{machine.device} ({name})" if name else machine.device
        labels.append(clean(f"{label}, torch {machine.torch}" if machine.torch else label))
    return labels[0] if labels[0] == labels[1] else f"{labels[1]}, against {labels[0]}"


def tolerance_label(item: Verdict) -> str:
    """A tolerance in words.

    >>> from fractions import Fraction
    >>> from torchledger.gate.judging import judge
    >>> from torchledger.gate.quantities import Measured
    >>> from torchledger.gate.tolerances import Tolerance
    >>> tolerance_label(judge("peak", Measured(1, 0, "cpu"), 1, Tolerance(Fraction(1, 50), 2**20)))
    '2 % or 1.00 MiB'
    """
    tolerance = item.tolerance
    parts = [f"{float(tolerance.relative * 100):g} %"] if tolerance.relative else []
    parts += [item.quantity.format(tolerance.absolute)] if tolerance.absolute else []
    return " or ".join(parts) or "exact"


def _same(item: Verdict, other: Verdict) -> bool:
    return (item.budget, item.measured, item.outcome) == (other.budget, other.measured, other.outcome)


def both(item: Verdict) -> tuple[str, str]:
    """Both numbers, with enough digits to tell them apart."""
    base, head = item.budget, None if item.outcome == Outcome.GONE else item.measured
    if base is None or head is None or item.unit == "count":
        return "-" if base is None else item.quantity.format(base), "-" if head is None else item.quantity.format(head)
    return format_against(base, head, item.quantity.unit)  # type: ignore[arg-type]


def change(item: Verdict) -> str:
    """How much more the head has, in the quantity's unit; empty where nothing moved."""
    return item.quantity.format(item.change, signed=True) if item.change else ""


def percent(item: Verdict) -> str:
    """The change in percent of what was before, with its sign; empty where there is none, or nothing was before."""
    if not item.change or item.budget is None or item.budget <= 0:
        return ""
    share = format_share(item.change, item.budget)
    return f"+{share}" if share[0].isdecimal() and item.change > 0 else share


def listed(names: Iterable[str], n_names: int = 5) -> str:
    """The first names, and how many more there are.

    >>> listed(["a", "b", "c"], n_names=2)
    'a, b and 1 more'
    """
    shown = [shorten(name, 120) for name in names]
    more = f" and {format_count(len(shown) - n_names)} more" if len(shown) > n_names else ""
    return ", ".join(shown[:n_names]) + more
