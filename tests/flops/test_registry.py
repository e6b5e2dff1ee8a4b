"""Rules, composites, containers and the rows that the documentation is made of."""

from __future__ import annotations

import inspect

import pytest
import torch

from flops.counting import count, meta
from torchledger.flops.costs import add_costs, scale
from torchledger.flops.registry import Cost, Rule, is_true_composite, lookup, registered_formulas
from torchledger.flops.rules import ENTRIES, counts
from torchledger.flops.tensors import read_ints

aten = torch.ops.aten


def test_rules() -> None:
    rule = lookup(aten.mm.default)
    assert (rule.name, rule.uncounted, rule.operands) == ("aten.mm", False, (0, 1))
    assert lookup(aten.mm.out) == rule
    assert lookup(aten.addmm.default).operands == (1, 2)
    assert lookup(aten.relu.default) == Rule("aten.relu", None, False, ())


@pytest.mark.parametrize("name", ["linear", "matmul", "einsum", "conv2d", "scaled_dot_product_attention", "inner"])
def test_true_composites(name: str) -> None:
    packet = getattr(aten, name)
    assert is_true_composite(getattr(packet, packet.overloads()[0]))


@pytest.mark.parametrize("name", ["mm", "silu_backward", "convolution", "relu", "native_layer_norm", "_trilinear"])
def test_ops_with_kernels_of_their_own_are_no_composites(name: str) -> None:
    packet = getattr(aten, name)
    assert not is_true_composite(getattr(packet, packet.overloads()[0]))


def test_containers_are_known_and_other_higher_order_ops_uncounted() -> None:
    from torch._higher_order_ops.associative_scan import associative_scan_op

    assert not lookup(torch.ops.higher_order.cond).uncounted
    assert lookup(associative_scan_op).uncounted


def test_every_formula_is_documented() -> None:
    rows = registered_formulas()
    assert [row.name for row in rows] == sorted(ENTRIES)
    for row in rows:
        assert row.text, row.name
        assert row.quality in ("exact", "approximate", "upper_bound", "integer")
        assert row.source
    for entry in ENTRIES.values():
        assert len(inspect.getdoc(entry.formula) or "") > 10


def test_an_op_has_one_formula() -> None:
    with pytest.raises(ValueError, match=r"aten\.mm has a formula already"):
        counts("aten.mm")(lambda *_: 0)


def test_a_name_that_torch_lacks_does_no_harm() -> None:
    try:
        counts("aten.op_of_the_future")(lambda *_: 0)
        assert lookup(aten.mm.default).name == "aten.mm"
    finally:
        del ENTRIES["aten.op_of_the_future"]


def test_costs_add_up_and_keep_the_worst_quality() -> None:
    costs = [3, Cost(5, 1, 2), Cost(7, quality="approximate")]
    assert add_costs(costs) == Cost(15, 1, 2, quality="approximate")
    assert add_costs([*costs, Cost(1, quality="upper_bound")]).quality == "upper_bound"
    assert add_costs([]) == Cost(0)


def test_element_types() -> None:
    assert scale(10, torch.float8_e5m2) == 10
    assert scale(10, torch.complex128) == 40
    assert scale(10, torch.int8) == Cost(10, quality="integer")
    assert scale(10, torch.bool) == Cost(10, quality="integer")


def test_values_are_read_only_where_there_are_some() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert read_ints(torch.tensor([1, 2])) == [1, 2]
    assert read_ints(None) is None
    assert read_ints(meta(2, dtype=torch.int32)) is None
    with FakeTensorMode():
        assert read_ints(torch.zeros(2, dtype=torch.int32)) is None


def test_formulas_of_other_devices_do_not_look_at_values() -> None:
    counted = count(lambda: torch._grouped_mm(meta(24, 16, dtype=torch.bfloat16), meta(2, 16, 8, dtype=torch.bfloat16),
                                              offs=meta(2, dtype=torch.int32)))  # fmt: skip
    assert counted.by_quality == {"upper_bound": 6144}
