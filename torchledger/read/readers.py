"""What a parameter was to the ops that read it."""

from __future__ import annotations

from torchledger.journal.entries import Journal, ParameterRow, Reader
from torchledger.journal.evidence import READ_AS

_LOOKUPS = frozenset(
    (
        "aten.embedding",
        "aten.embedding_bag",
        "aten._embedding_bag",
        "aten._embedding_bag_forward_only",
        "aten.embedding_renorm_",
        "aten.index",
        "aten.index_select",
        "aten.gather",
        "aten.take",
    )
)
_NORMS = frozenset(
    (
        "aten.native_layer_norm",
        "aten.native_group_norm",
        "aten.native_batch_norm",
        "aten._native_batch_norm_legit",
        "aten._native_batch_norm_legit_no_training",
        "aten._batch_norm_with_update",
        "aten._batch_norm_no_update",
        "aten.cudnn_batch_norm",
        "aten.miopen_batch_norm",
        "aten._fused_rms_norm",
        "aten.rms_norm",
        "aten.layer_norm",
        "aten.group_norm",
        "aten.batch_norm",
        "aten.instance_norm",
    )
)
_STATISTICS = frozenset(
    ("aten.rsqrt", "aten.sqrt", "aten.var", "aten.var_mean", "aten.std", "aten.std_mean", "aten.linalg_vector_norm")
)
_SCALING = ("aten.mul", "aten.add", "aten.div", "aten.addcmul")
_ADDING = ("aten.add", "aten.add_")
_NEAR = 6
"""Blocks between a norm's statistics and the op that scales its result, at most."""
_RANK = {how: rank for rank, how in enumerate(READ_AS)}


def read_as(journal: Journal, in_products: set[int]) -> dict[int, tuple[str, str]]:
    """For each parameter that something read, what it was (one of `READ_AS`) and the op that shows it.

    Args:
        journal: The step.
        in_products: the parameters whose elements were multiplied with rows of something.
    """
    multiplied = {
        (op, module) for op, _, phase, module, *_, parts, _, _ in journal.products if phase == "forward" and parts
    }
    rows = {row.parameter: row for row in journal.parameter_rows}
    found: dict[int, tuple[str, str]] = {}
    for reader in journal.readers:
        how = _how(journal, reader, rows.get(reader.parameter), in_products, multiplied)
        before = found.get(reader.parameter)
        if before is None or _RANK[how] < _RANK[before[0]]:
            found[reader.parameter] = (how, reader.op)
    for parameter in in_products:
        found.setdefault(parameter, ("product", ""))
    if journal.compiled:  # code that no dispatch shows read the others
        for row in journal.parameter_rows:
            found.setdefault(row.parameter, (_by_holder(row), "(compiled)"))
    return found


def _how(
    journal: Journal, reader: Reader, row: ParameterRow | None, in_products: set[int], multiplied: set[tuple[str, int]]
) -> str:
    if reader.how == "product":
        # A list of a fused layer's weights holds its biases too.
        vector = row is not None and row.n_dims < 2 and reader.parameter not in in_products
        if not vector:
            return "product"
    if reader.how in ("product", "addend"):
        # A whole encoder layer in one op has its norms among its arguments.
        return "norm" if row is not None and "Norm" in row.holder else "bias"
    if reader.how == "uncounted":
        return "uncounted"
    if reader.op in _LOOKUPS:
        return "embedding"
    if reader.op in _NORMS or (reader.op.rstrip("_") in _SCALING and _after_statistics(journal, reader)):
        return "norm"
    if reader.op in _ADDING and row is not None and row.n_dims == 1 and _after_product(journal, reader, multiplied):
        return "bias"  # so does a linear layer where its input is not contiguous
    return "elementwise"


def _after_product(journal: Journal, reader: Reader, multiplied: set[tuple[str, int]]) -> bool:
    """Whether a parameter's product, made just before, is what the op adds to."""
    last = journal.blocks[reader.position - 1 : reader.position] if reader.position else []
    return any((block[4], block[3]) in multiplied and block[3] == reader.module for block in last)


def _after_statistics(journal: Journal, reader: Reader) -> bool:
    """Whether a norm's statistics were computed in that module just before."""
    near = journal.blocks[max(reader.position - _NEAR, 0) : reader.position]
    return any(block[4] in _STATISTICS and block[3] == reader.module for block in near)


def _by_holder(row: ParameterRow) -> str:
    if "Embedding" in row.holder:
        return "embedding"
    if "Norm" in row.holder:
        return "norm"
    return "bias" if row.key == "bias" else "elementwise"
