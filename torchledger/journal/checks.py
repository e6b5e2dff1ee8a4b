"""What must hold inside a statement: each check returns what is wrong with it, or None.

They say that lines sum to their totals: a report in which they do not was damaged, and no table of it would add up.
"""

from __future__ import annotations

from collections.abc import Collection

from torchledger.journal.statements import (
    CATEGORIES,
    OUTSIDE_MODULE,
    PHASES,
    Allocation,
    FlopSplit,
    FlopStatement,
    MemorySnapshot,
    MemoryStatement,
    RunStatement,
)

_FLOP_NUMBERS = ("total", "model", *PHASES, "attention_rescore", "causal_model", "int_ops", "global_excess")
_READ_OFF = ("workspace", "unexplained")
"""Categories that come from an allocator's reading rather than from events."""


def check_flops(flops: FlopStatement) -> str | None:
    """That the phases, ops, dtypes and modules each add up to the total.

    >>> check_flops(FlopStatement(total=3, model=3, forward=2))
    'has phases that add up to 2, not to the total of 3'
    """
    total = flops.total
    sums = {
        "phases": sum(getattr(flops, phase) for phase in PHASES),
        "ops": sum(flops.by_op.values()),
        "dtypes": sum(flops.by_dtype.values()),
        "modules": sum(split.self_total for split in flops.by_module.values()),
    }
    for name, found in sums.items():
        if found != total:
            return f"has {name} that add up to {found}, not to the total of {total}"
    model = total - flops.recompute - flops.inference - flops.attention_rescore
    if flops.model != model:
        return f"has model of {flops.model}, but total - recompute - inference - attention_rescore is {model}"
    for name in ("causal_model", "approximate", "upper_bound"):
        if getattr(flops, name) > total:
            return f"has {name} above the total of {total}"
    return None


def check_tree(flops: FlopStatement) -> str | None:
    """That each module's total is its children's plus its own.

    >>> check_tree(FlopStatement(total=3, by_module={"": FlopSplit(forward=4, self_total=3)}))
    "has the module '' whose children and own ops add up to 3, not to its total of 4"
    """
    modules = flops.by_module
    below = {module: split.self_total for module, split in modules.items()}
    for module, parent in parents_of(modules).items():
        if parent is not None:
            below[parent] += modules[module].total
    for module, split in modules.items():
        if below[module] != split.total:
            own = f"children and own ops add up to {below[module]}, not to its total of {split.total}"
            return f"has the module {module!r} whose {own}"
    return None


def parents_of(modules: Collection[str]) -> dict[str, str | None]:
    """For each module the nearest of ``modules`` above it: the longest path that it begins with, at a dot.

    >>> parents_of(["", "blocks.0.mlp", "blocks.0", "(outside)"])
    {'': None, '(outside)': None, 'blocks.0': '', 'blocks.0.mlp': 'blocks.0'}
    """
    found: dict[str, str | None] = {}
    above: list[str] = []
    # In this order all that is below a module follows it, so that no path need be cut at each of its dots.
    for module in sorted(modules, key=lambda module: module.split(".") if module else []):
        while above and above[-1] and not module.startswith(f"{above[-1]}."):
            above.pop()
        found[module] = above[-1] if above and module != OUTSIDE_MODULE else None
        above.append(module)
    return found


def check_split(split: FlopSplit) -> str | None:
    """That a module's own ops cost no more than the module.

    >>> check_split(FlopSplit(forward=1, self_total=2))
    'has a self_total of 2 in a total of 1'
    """
    if split.self_total > split.total:
        return f"has a self_total of {split.self_total} in a total of {split.total}"
    return None


def check_snapshot(snapshot: MemorySnapshot) -> str | None:
    """That the categories add up to the total, and the modules too, where there are any.

    >>> check_snapshot(MemorySnapshot(total_bytes=8, inputs=4))
    'has categories that add up to 4, not to the total of 8'
    """
    total = snapshot.total_bytes
    found = sum(snapshot.by_category.values())
    if found != total:
        return f"has categories that add up to {found}, not to the total of {total}"
    found = sum(snapshot.by_module.values())
    if snapshot.by_module and found != total:
        return f"has modules that add up to {found}, not to the total of {total}"
    rows: dict[str, int] = {}
    for row in snapshot.largest:
        rows[row.category] = rows.get(row.category, 0) + row.nbytes
    for category, nbytes in rows.items():
        if nbytes > snapshot.by_category[category]:
            return f"has rows of {category} that add up to {nbytes}, more than {snapshot.by_category[category]}"
    return None


def check_allocation(row: Allocation) -> str | None:
    """That equal blocks divide their sum.

    >>> check_allocation(Allocation(7, "inputs", "forward", "", "aten.mm", (), "float32", n_blocks=2))
    'has 7 bytes in 2 equal blocks'
    """
    return f"has {row.nbytes} bytes in {row.n_blocks} equal blocks" if row.nbytes % row.n_blocks else None


def check_memory(memory: MemoryStatement) -> str | None:
    """That the peak is the highest instant, and each category's peak the highest of its values.

    >>> check_memory(MemoryStatement(end=MemorySnapshot(total_bytes=1, other=1)))
    'has 1 bytes at its end, above the peak of 0'
    """
    instants = {"start": memory.start, "end": memory.end, **memory.peak_by_phase}
    # An allocator is not read at every instant, so that its part at one says nothing about another.
    read_off = any(s.by_category[name] for s in (memory.peak, *instants.values()) for name in _READ_OFF)
    for name, snapshot in instants.items():
        if not read_off and snapshot.total_bytes > memory.peak.total_bytes:
            where = f"at its {name}" if name in ("start", "end") else f"in the phase {name}"
            return f"has {snapshot.total_bytes} bytes {where}, above the peak of {memory.peak.total_bytes}"
    for category in (name for name in CATEGORIES if name in memory.category_peaks and name not in _READ_OFF):
        highest = max(s.by_category[category] for s in (memory.peak, *instants.values()))
        if memory.category_peaks[category] < highest:
            return f"has a peak of {memory.category_peaks[category]} for {category}, which also held {highest}"
    return None


def check_run(run: RunStatement) -> str | None:
    """That the sums over all steps are those of the kept ones, or at least as much where some were not kept.

    >>> check_run(RunStatement(n_steps=0, flops=FlopStatement(total=1, outside=1)))
    'has flops.total of 1, but its steps add up to 0'
    """
    if run.n_steps < len(run.steps):
        return f"has {len(run.steps)} steps, but n_steps of {run.n_steps}"
    for name in _FLOP_NUMBERS:
        total, kept = getattr(run.flops, name), sum(getattr(step.flops, name) for step in run.steps)
        if total < kept or (total != kept and run.n_steps == len(run.steps)):
            return f"has flops.{name} of {total}, but its steps add up to {kept}"
    return None
