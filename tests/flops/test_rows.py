"""Each formula against numbers counted by hand."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from flops.counting import Counted, Row, count
from torchledger.flops.registry import registered_formulas
from torchledger.flops.rules import ENTRIES

FAMILIES = (
    "matmul",
    "grouped",
    "conv",
    "attention",
    "packed_attention",
    "recurrent",
    "sparse",
    "linalg",
    "quantized",
    "compiled",
)
ROWS: list[Row] = [row for family in FAMILIES for row in import_module(f"flops.rows.{family}").ROWS]

# Many of these ops are deprecated or in beta, and say so.
pytestmark = pytest.mark.filterwarnings("ignore")


def exists(name: str) -> bool:
    namespace, _, op = name.rpartition(".")
    return not namespace or hasattr(getattr(torch.ops, namespace), op)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.op}-{row.flops}")
def test_row(row: Row) -> None:
    if row.run and not exists(row.op):
        pytest.skip(f"torch {torch.__version__} has no {row.op}")
    counted = count(row.call) if row.run else call_formula(row)
    assert counted.by_op[row.op] == row.flops
    assert counted.by_quality[row.quality] == sum(counted.by_op.values())
    assert counted.rescore == row.rescore
    assert counted.excess == row.excess
    if row.parts is not None:
        assert tuple((part.kind, part.flops) for part in counted.parts) == row.parts


def call_formula(row: Row) -> Counted:
    counted = Counted()
    result, *args = row.call()
    kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
    counted.add(row.op, ENTRIES[row.op].formula(result, *args, **kwargs))
    return counted


def test_each_op_has_a_row() -> None:
    declared_by_users = {"triton_kernel_wrapper_functional", "triton_kernel_wrapper_mutation"}
    assert {row.op for row in ROWS} == set(ENTRIES) - declared_by_users


def test_ran_is_said_of_the_ops_that_a_row_runs() -> None:
    assert {row.name for row in registered_formulas() if row.ran} == {row.op for row in ROWS if row.run}
