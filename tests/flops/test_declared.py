"""tl.formula: custom ops, overloads, Triton kernels, higher-order ops, and what it refuses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from flops.counting import count
from torchledger.errors import UsageError
from torchledger.flops import declared, registry
from torchledger.flops.registry import Cost, formula, lookup
from torchledger.flops.rules import ENTRIES


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    saved, kernels = dict(declared.DECLARED), dict(declared.KERNELS)
    yield
    declared.DECLARED.clear()
    declared.DECLARED.update(saved)
    declared.KERNELS.clear()
    declared.KERNELS.update(kernels)


@torch.library.custom_op("flops_test::project", mutates_args=())
def project(x: torch.Tensor, w: torch.Tensor, twice: bool = False) -> torch.Tensor:
    return x @ w


@project.register_fake
def _(x: torch.Tensor, w: torch.Tensor, twice: bool = False) -> torch.Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


X, W = torch.ones(8, 16), torch.ones(16, 4)


def by_shapes(x: Any, w: Any, twice: bool = False, *, out_shape: Any) -> int:
    assert (tuple(x), tuple(w), tuple(out_shape)) == ((8, 16), (16, 4), (8, 4))
    return 2 * x[0] * x[1] * w[1] * (1 + twice)


def test_a_custom_op_is_executed_and_uncounted_until_it_has_a_formula() -> None:
    counted = count(lambda: project(X, W))
    assert (counted.total, counted.uncounted) == (0, {"flops_test.project": 1})
    formula(project)(by_shapes)
    counted = count(lambda: project(X, W))
    assert (counted.by_op, counted.uncounted) == ({"flops_test.project": 1024}, {})
    assert count(lambda: project(X, W, True)).total == 2048


@pytest.mark.parametrize(
    "target",
    [project, torch.ops.flops_test.project, torch.ops.flops_test.project.default, [torch.ops.flops_test.project]],
    ids=["custom_op", "packet", "overload", "list"],
)
def test_targets(target: Any) -> None:
    assert formula(target)(by_shapes) is by_shapes
    assert count(lambda: project(X, W)).total == 1024
    assert lookup(torch.ops.flops_test.project.default).operands == (0, 1)


def test_raw_formulas_see_tensors_and_may_return_a_cost() -> None:
    @formula(project, raw=True)
    def _(x: torch.Tensor, w: torch.Tensor, *, out_val: torch.Tensor) -> Cost:
        assert out_val.shape == (8, 4)
        return Cost(int(x.sum()), quality="approximate")

    assert count(lambda: project(X, W)).by_quality == {"approximate": 128}


def test_a_float_becomes_an_int() -> None:
    formula(project)(lambda *args, **kwargs: 10.0)
    assert count(lambda: project(X, W)).total == 10


def test_a_later_formula_replaces_an_earlier_one_and_moves_the_version() -> None:
    before = registry.version
    formula(project)(lambda *args, **kwargs: 1)
    formula(torch.ops.flops_test.project.default)(lambda *args, **kwargs: 2)
    assert count(lambda: project(X, W)).total == 2
    formula(project)(lambda *args, **kwargs: 3)
    assert count(lambda: project(X, W)).total == 3
    assert registry.version == before + 3


def test_one_overload_alone() -> None:
    formula(torch.ops.aten.mm.out)(lambda *args, **kwargs: 7)
    assert count(lambda: torch.mm(X, W)).total == 1024
    assert count(lambda: torch.mm(X, W, out=torch.empty(8, 4))).total == 7
    formula(torch.ops.aten.mm)(lambda *args, **kwargs: 9)
    assert count(lambda: torch.mm(X, W, out=torch.empty(8, 4))).total == 9


def test_aten_ops_can_be_given_other_formulas() -> None:
    formula(torch.ops.aten.relu)(lambda shape, *, out_shape: shape[0])
    assert count(lambda: torch.relu(X)).by_op == {"aten.relu": 8}


def test_what_torch_was_given_counts_too() -> None:
    flop_counter = pytest.importorskip("torch.utils.flop_counter")
    assert lookup(torch.ops.flops_test.project.default).uncounted
    flop_counter.register_flop_formula(torch.ops.flops_test.project)(by_shapes)
    try:
        assert count(lambda: project(X, W)).by_op == {"flops_test.project": 1024}
        formula(project)(lambda *args, **kwargs: 5)
        assert count(lambda: project(X, W)).total == 5
    finally:
        del flop_counter.flop_registry[torch.ops.flops_test.project]


def test_torchs_counter_is_not_imported_for_it() -> None:
    script = "import sys, torchledger.flops.registry as r, torch; r.lookup(torch.ops.aten.mm.default); "
    script += "assert 'torch.utils.flop_counter' not in sys.modules"
    import subprocess

    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    "target", ["mm", torch.mm, 3, None, torch.nn.Linear(2, 2), lambda x: x, [torch.ops.aten.mm, "x"]]
)
def test_wrong_targets(target: Any) -> None:
    with pytest.raises(UsageError, match="it takes an op"):
        formula(target)(by_shapes)


def test_a_formula_must_be_a_function() -> None:
    with pytest.raises(UsageError, match="decorates a function"):
        formula(project)(1024)  # type: ignore[type-var]


# Triton is not installed where these run: kernels are told by the module of their class.


class JITFunction:
    __module__ = "triton.runtime.jit"

    def __init__(self, name: str) -> None:
        self.__name__ = name


class Autotuner:
    __module__ = "triton.runtime.autotuner"

    def __init__(self, fn: Any) -> None:
        self.fn = fn


class TraceableTritonKernelWrapper:
    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel


class HigherOrder(torch._ops.HigherOrderOperator):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for the higher-order op that launches Triton kernels: calls its formula for a kernel."""
    module = ModuleType("torch._higher_order_ops.triton_kernel_wrap")
    kernels: list[Any] = []
    module.kernel_side_table = SimpleNamespace(get_kernel=kernels.__getitem__)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    rule = ENTRIES["triton_kernel_wrapper_mutation"]

    def launch(kernel: Any) -> Any:
        kernels.append(kernel)
        return rule.formula(None, kernel_idx=len(kernels) - 1, grid=[(4,)], kwargs={"x": X, "n": 8})

    return launch


@pytest.mark.parametrize(
    "wrap", [lambda k: k, Autotuner, TraceableTritonKernelWrapper], ids=["bare", "tuned", "wrapped"]
)
def test_triton_kernels(launch: Any, wrap: Any) -> None:
    kernel = JITFunction("scale_kernel")
    with pytest.raises(registry.UnknownCostError) as unknown:
        launch(wrap(kernel))
    assert unknown.value.name == "triton.scale_kernel"

    @formula(wrap(kernel))
    def _(*args: Any, kwargs: dict[str, Any], out_shape: Any, **others: Any) -> int:
        assert (kwargs["x"], out_shape) == ((8, 16), None)
        return 2 * kwargs["n"]

    assert launch(wrap(kernel)) == Cost(16, name="triton.scale_kernel")
    assert launch(Autotuner(Autotuner(kernel))).flops == 16


def test_triton_kernels_that_torch_was_given(launch: Any) -> None:
    flop_counter = pytest.importorskip("torch.utils.flop_counter")
    kernel = JITFunction("other_kernel")
    flop_counter.flop_registry[kernel] = flop_counter.shape_wrapper(lambda *args, **kwargs: 3)
    try:
        assert launch(kernel) == Cost(3, name="triton.other_kernel")
    finally:
        del flop_counter.flop_registry[kernel]


def test_higher_order_ops() -> None:
    op = HigherOrder("flops_test_higher_order")
    op.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)(lambda x, w: x @ w)
    op.fallthrough(torch._C.DispatchKey.AutogradCPU)
    counted = count(lambda: op(X, W))
    assert (counted.total, counted.uncounted) == (0, {"flops_test_higher_order": 1})
    formula(op)(by_shapes)
    assert count(lambda: op(X, W)).by_op == {"flops_test_higher_order": 1024}
