"""Whether two runs are of one program at all: what their models have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from fractions import Fraction

from torchledger.journal.evidence import ParameterEvidence
from torchledger.journal.statements import RunStatement
from torchledger.units import format_count, format_number

ALIKE_BY_NAME, ALIKE_BY_SIZE = Fraction(1, 2), Fraction(3, 4)
"""Two models are one, changed, if so many of the fewer weights have the same names, or if so many of the more elements
are in weights of the same sizes: sizes are often the same by chance."""

_WRAPPERS = frozenset(
    ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_model", "base_layer")
)
"""Parts of names that wrappers add: of DDP and FSDP, of compiled and checkpointed modules, of adapters."""

Parameters = Mapping[str, ParameterEvidence]


def explain_unrelated(base: RunStatement, head: RunStatement) -> str:
    """Why two runs are of different programs; empty where they may be one, or where a report has no parameters.

    A model that was changed keeps the names of its parameters (it was widened, or lost layers), or their sizes (it was
    renamed, or wrapped). Where too little is the same by either, no number of one says anything of the other's.

    >>> explain_unrelated(RunStatement(), RunStatement())
    ''
    """
    models = [_weights(_parameters(run)) for run in (base, head)]
    if not all(models):
        return ""
    same_names = _shared(*(Counter(_name(name, row) for name, row in model.items()) for model in models))
    fewest = min(len(model) for model in models)
    sizes = [_elements(model) for model in models]
    same_elements, most = _shared(*sizes), max(size.total() for size in sizes)
    if same_names >= ALIKE_BY_NAME * fewest or same_elements >= ALIKE_BY_SIZE * most:
        return ""
    counts = f"{format_count(len(models[0]))} against {format_number(len(models[1]), 'weight')}"
    return f"different programs ({counts}, of which {format_count(same_names)} have the same name and use)"


def _parameters(run: RunStatement) -> Parameters:
    """Those of the step that has most of them."""
    return max((step.evidence.parameters for step in run.steps), key=len, default={})


def _weights(parameters: Parameters) -> Parameters:
    """The parameters that tell models apart: biases and the like have the same names and sizes in many."""
    return {name: row for name, row in parameters.items() if row.n_dims > 1} or parameters


def _name(name: str, row: ParameterEvidence) -> Hashable:
    return tuple(part for part in name.split(".") if part not in _WRAPPERS), row.n_dims, row.read_as


def _elements(parameters: Parameters) -> Counter[Hashable]:
    """How many elements there are in parameters of each size."""
    sizes: Counter[Hashable] = Counter()
    for row in parameters.values():
        sizes[row.n_dims, row.n_elements] += row.n_elements
    return sizes


def _shared(one: Counter[Hashable], other: Counter[Hashable]) -> int:
    return (one & other).total()
