"""What a comparison says in single lines: for a headline, a message or an annotation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torchledger.gate.comparison import REPEAT_THE_PEAK, Comparison, Comparisons, Machine, QuantityVerdict, Verdict
from torchledger.gate.differences import Differences, EntryDifference
from torchledger.render.names import clean, module_label, shorten
from torchledger.units import format_apart, format_bytes, format_count, format_flops, format_share


def headline(comparisons: Comparisons) -> str:
    """The verdict and the first number behind it, in one line.

    >>> headline(Comparisons(()))
    'NO-MATCH: nothing to compare'
    """
    verdict, found = comparisons.verdict, comparisons.found
    if verdict is Verdict.NO_MATCH:
        return f"{verdict}: nothing to compare"
    n_passed = sum(comparison.verdict is Verdict.PASS for comparison in found)
    passed = f"; {format_count(n_passed)} of {format_count(len(found))} pass" if len(found) > 1 else ""
    n_unmatched = sum(len(comparison.of(Verdict.NO_MATCH)) for comparison in found)
    passed += f"; {format_count(n_unmatched)} numbers not compared" if n_unmatched else ""
    if verdict is Verdict.PASS:
        return f"{verdict}: nothing grew beyond its tolerance{passed}"
    behind = [(c, item) for c in found for item in told_apart(c) if item.verdict is verdict]
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


def causes(comparison: Comparison, item: QuantityVerdict) -> Iterator[str]:
    """What moved a number the way that it went, the largest first, each in one line."""
    differences, key = comparison.differences, item.quantity.key
    grew = item.change > 0
    if item.quantity.unit == "bytes":
        for entry in differences.entries:
            if (entry.change > 0) == grew and key in (entry.category, "peak", *REPEAT_THE_PEAK):
                yield entry_line(entry)
    elif item.quantity.unit == "flops":
        phase = key.removesuffix("_flops")
        for row in differences.flop_modules:
            if (row.change > 0) == grew and (key in ("flops", "model_flops") or phase in row.words):
                words = f" ({row.words})" if row.words else ""
                yield f"{module_label(row.name)} {format_flops(row.change, signed=True)}{words}"


def main_causes(comparison: Comparison, n_lines: int = 3) -> list[str]:
    """The largest of what moved the first number of bytes, and the first of FLOPs, that the verdict is about."""
    lines = []
    for unit in ("bytes", "flops"):
        behind = [i for i in told_apart(comparison) if i.verdict is comparison.verdict and i.quantity.unit == unit]
        found = causes(comparison, behind[0]) if behind and behind[0].change else ()
        lines += [line for line, _ in zip(found, range(n_lines), strict=False)]
    return lines


def quantity_line(item: QuantityVerdict) -> str:
    """A number of both runs in one line, with the change.

    >>> from torchledger.gate.quantities import Measured, find_quantity
    >>> measured = [Measured(n, 0, "cpu") for n in (2 * 2**30, 2 * 2**30 + 2**20)]
    >>> quantity_line(QuantityVerdict(find_quantity("peak"), Verdict.REGRESSION, *measured))
    'peak 2.000 GiB -> 2.001 GiB (+1.00 MiB, <0.1 %)'
    """
    base, head = both(item)
    changes = ", ".join(filter(None, (change(item), percent(item))))
    return f"{item.quantity.key} {base} -> {head}" + (f" ({changes})" if changes else "")


def told_apart(comparison: Comparison) -> list[QuantityVerdict]:
    """The quantities without those that only repeat the peak: on a CPU, requested, allocated and reserved bytes do."""
    peak = next((item for item in comparison.verdicts if item.quantity.key == "peak"), None)
    return [
        item
        for item in comparison.verdicts
        if item.quantity.key not in REPEAT_THE_PEAK or peak is None or not _same(item, peak)
    ]


def moved(item: QuantityVerdict) -> bool:
    """Whether the number differs, be it within its tolerance."""
    return item.change != 0 or item.verdict in (Verdict.NEW, Verdict.GONE)


def mismatch_lines(comparison: Comparison) -> list[str]:
    """What was not compared and why, a line for each reason.

    >>> mismatch_lines(Comparison("", (), None, ()))
    []
    """
    reasons: dict[str, list[str]] = {}
    for item in comparison.of(Verdict.NO_MATCH):
        reasons.setdefault(item.why, []).append(item.quantity.key)
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


def tolerance_label(item: QuantityVerdict) -> str:
    """A tolerance in words.

    >>> from fractions import Fraction
    >>> from torchledger.gate.quantities import find_quantity
    >>> from torchledger.gate.tolerances import Tolerance
    >>> item = QuantityVerdict(find_quantity("peak"), Verdict.PASS, None, None, Tolerance(Fraction(1, 50), 2**20))
    >>> tolerance_label(item)
    '2 % or 1.00 MiB'
    """
    tolerance = item.tolerance
    parts = [f"{float(tolerance.relative * 100):g} %"] if tolerance.relative else []
    parts += [item.quantity.format(tolerance.absolute)] if tolerance.absolute else []
    return " or ".join(parts) or "exact"


def _same(item: QuantityVerdict, other: QuantityVerdict) -> bool:
    one, two = ((i.base and i.base.value, i.head and i.head.value, i.verdict) for i in (item, other))
    return one == two


def both(item: QuantityVerdict) -> tuple[str, str]:
    """Both numbers, with enough digits to tell them apart."""
    base, head = item.base, item.head
    if base is None or head is None or item.quantity.unit == "count":
        return item.quantity.format(base.value) if base else "-", item.quantity.format(head.value) if head else "-"
    return format_apart(base.value, head.value, item.quantity.unit)


def change(item: QuantityVerdict) -> str:
    """How much more the head has, in the quantity's unit; empty where nothing moved."""
    return item.quantity.format(item.change, signed=True) if item.change else ""


def percent(item: QuantityVerdict) -> str:
    """The change in percent of what was before, with its sign; empty where there is none, or nothing was before."""
    if not item.change or item.base is None or item.base.value <= 0:
        return ""
    share = format_share(item.change, item.base.value)
    return f"+{share}" if share[0].isdecimal() and item.change > 0 else share


def listed(names: Iterable[str], n_names: int = 5) -> str:
    """The first names, and how many more there are.

    >>> listed(["a", "b", "c"], n_names=2)
    'a, b and 1 more'
    """
    shown = [shorten(name, 120) for name in names]
    more = f" and {format_count(len(shown) - n_names)} more" if len(shown) > n_names else ""
    return ", ".join(shown[:n_names]) + more
