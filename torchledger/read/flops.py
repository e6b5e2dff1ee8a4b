"""From the products of a journal to a statement of FLOPs."""

from __future__ import annotations

from collections import Counter, defaultdict

from torchledger.journal.entries import Journal
from torchledger.journal.statements import OUTSIDE_MODULE, PHASES, FlopSplit, FlopStatement, ParameterFlops

_PHASE_INDEX = {phase: index for index, phase in enumerate(PHASES)}
_RECOMPUTE, _INFERENCE = _PHASE_INDEX["recompute"], _PHASE_INDEX["inference"]


def flop_statement(journal: Journal) -> FlopStatement:
    """Add up the products of a step: by phase, op, dtype, module and parameter.

    ``model = total - recompute - inference - attention_rescore``; integer products are in ``int_ops`` alone.
    """
    phases = [0] * len(PHASES)
    by_op: dict[str, int] = defaultdict(int)
    by_dtype: dict[str, int] = defaultdict(int)
    modules: dict[int, list[int]] = {}
    parameters: dict[int, list[int]] = {}
    quality = {"exact": 0, "approximate": 0, "upper_bound": 0, "integer": 0}
    rescore = causal_excess = 0
    for op, dtype, phase, module, flops, again, excess, parts, how, _ in journal.products:
        quality[how] += flops
        if how == "integer":
            continue
        index = _PHASE_INDEX[phase]
        phases[index] += flops
        by_op[op] += flops
        by_dtype[dtype] += flops
        own = modules.get(module)
        if own is None:
            own = modules[module] = [0] * len(PHASES)
        own[index] += flops
        if index != _RECOMPUTE and index != _INFERENCE:
            rescore += again
            causal_excess += excess
        for parameter, kind, share in parts:
            account = parameters.get(parameter)
            if account is None:
                account = parameters[parameter] = [0, 0, 0, 0]
            account[3 if index == _RECOMPUTE and kind == "forward" else _KINDS[kind]] += share
    total = sum(phases)
    model = total - phases[_RECOMPUTE] - phases[_INFERENCE] - rescore
    return FlopStatement(
        total=total,
        model=model,
        **dict(zip(PHASES, phases, strict=True)),
        attention_rescore=rescore,
        causal_model=model - causal_excess,
        int_ops=quality["integer"],
        approximate=quality["approximate"],
        upper_bound=quality["upper_bound"],
        compiled_regions=len(journal.compiled),
        global_excess=journal.global_excess,
        by_op=dict(sorted(by_op.items())),
        by_dtype=dict(sorted(by_dtype.items())),
        by_module=module_tree(modules, journal.modules),
        by_parameter={journal.parameters[n]: ParameterFlops(*parameters[n]) for n in sorted(parameters)},
        uncounted=dict(sorted(journal.uncounted.items())),
        compiled_in=dict(sorted(Counter(journal.modules[module] for module in journal.compiled).items())),
    )


_KINDS = {"forward": 0, "input_grad": 1, "weight_grad": 2}


def module_tree(own: dict[int, list[int]], paths: list[str]) -> dict[str, FlopSplit]:
    """Inclusive FLOPs by module path, with what each module did itself in ``self_total``.

    A module's parent is the longest registered path that its own begins with; the root model is ``""``.
    """
    registered = set(paths)
    inclusive: dict[str, list[int]] = {}
    self_totals: dict[str, int] = defaultdict(int)
    if "" in registered:
        inclusive[""] = [0] * len(PHASES)
    for number, flops in own.items():
        path = paths[number]
        self_totals[path] += sum(flops)
        for name in ancestors(path, registered):
            account = inclusive.setdefault(name, [0] * len(PHASES))
            for index, value in enumerate(flops):
                account[index] += value
    order = {path: index for index, path in reversed(list(enumerate(paths)))}
    return {
        name: _split(inclusive[name], self_totals[name]) for name in sorted(inclusive, key=lambda name: order[name])
    }


def _split(by_phase: list[int], self_total: int) -> FlopSplit:
    return FlopSplit(**dict(zip(PHASES, by_phase, strict=True)), self_total=self_total)


def ancestors(path: str, registered: set[str]) -> list[str]:
    """A module's path and those of the modules that hold it.

    >>> ancestors("blocks.0.mlp", {"", "blocks.0", "blocks.0.mlp"})
    ['blocks.0.mlp', 'blocks.0', '']
    """
    found = [path]
    if path == OUTSIDE_MODULE or not path:
        return found
    inner = path
    while "." in inner:
        inner = inner.rpartition(".")[0]
        if inner in registered:
            found.append(inner)
    if "" in registered:
        found.append("")
    return found
