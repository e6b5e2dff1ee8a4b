"""Compiled functions: the same FLOPs, and the same compile state afterwards."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import torchledger as tl
from torchledger.record.compiled import products_inside

FORWARD = 2 * 8 * (16 * 32 + 32 * 4)
# Torch 2.9 guards compiled code on the dispatch keys that any mode sets: no call under one finds code compiled outside.
GUARDED_ON_MODES = not hasattr(torch._C._dynamo.guards, "set_is_in_mode_without_ignore_compile_internals")


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_same_flops_and_still_compiled(backend: str, whole: bool) -> None:  # pytorch#190286, #140909, #128199
    interpreted = backend == "aot_eager" and torch.__version__ < (2, 10)  # node by node, no compiled code runs
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 4, bias=False))
    function = (
        torch.compile(model, backend=backend) if whole else torch.compile(lambda x: model(x) * 1, backend=backend)
    )
    x = torch.randn(8, 16, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with tl.Ledger(model) as ledger:
            for _ in range(2):  # cold and warm
                function(x).sum().backward()
                ledger.step()
    for step in ledger.report.steps:
        assert (step.flops.forward, step.flops.backward, step.flops.total) == (FORWARD, 2 * FORWARD, 30_720)
        assert step.flops.uncounted == {}
        if not interpreted:
            assert step.flops.compiled_regions >= 1
            assert step.flops.compiled_in == {"" if whole else "(outside)": step.flops.compiled_regions}
            assert step.memory["cpu"].notes
        assert set(step.flops.by_parameter) == {"0.weight", "2.weight"}
        assert set(step.flops.by_module) <= {"", "(outside)"}
    assert GUARDED_ON_MODES or counters["stats"]["unique_graphs"] == 1
    if GUARDED_ON_MODES:
        function(x).sum().backward()  # outside now: may compile once more
    frames, graphs = dict(counters["frames"]), counters["stats"]["unique_graphs"]
    function(x).sum().backward()
    assert (dict(counters["frames"]), counters["stats"]["unique_graphs"]) == (frames, graphs)
    assert ledger.report.faults == ()


def test_products_in_generated_kernels_are_named() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    function = torch.compile(flex_attention)
    q, k, v = (torch.randn(1, 2, 256, 16) for _ in range(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = function(q, k, v)
        with tl.Ledger() as ledger:
            assert torch.equal(function(q, k, v), expected)
    flops = ledger.report.flops
    assert flops.compiled_regions == 1
    assert sum(flops.uncounted.values()) == 1
    assert next(iter(flops.uncounted)).startswith("inductor.")


@pytest.mark.parametrize(
    ("function", "shapes", "inside"),
    [
        (torch.mv, [(8, 16), (16,)], True),
        (lambda a, b: torch.bmm(a, b).relu(), [(4, 1, 16), (4, 16, 8)], True),
        (lambda a, b: torch.bmm(a, b).relu() + 1, [(4, 8, 8), (4, 8, 8)], False),
        (lambda a, b: torch.relu(a @ b) * 2, [(8, 16), (16, 8)], False),
        (lambda x, w: torch.nn.functional.conv2d(x, w * 2), [(1, 3, 8, 8), (4, 3, 3, 3)], False),
    ],
)
def test_products_written_out_as_sums_are_named(function: Any, shapes: list[tuple[int, ...]], inside: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function)
    operands = [torch.randn(shape) for shape in shapes]
    compiled(*operands)
    with tl.Ledger() as ledger:
        compiled(*operands)
    flops = ledger.report.flops
    assert bool(flops.uncounted) == inside
    assert (flops.total == 0) == inside
    if inside:
        with pytest.raises(tl.UncountedOpError), tl.Ledger(strict=True):
            compiled(*operands)


def test_a_function_compiled_before_stays_compiled_inside() -> None:
    torch._dynamo.reset()
    counters.clear()
    model = nn.Linear(16, 4)
    function = torch.compile(model, backend="aot_eager")
    x = torch.randn(8, 16)
    function(x).sum().backward()
    frames = dict(counters["frames"])
    with tl.Ledger(model) as ledger:
        function(x).sum().backward()
    function(x)
    compiled_inside = int(GUARDED_ON_MODES)
    assert dict(counters["frames"]) == {kind: count + compiled_inside for kind, count in frames.items()}
    assert ledger.report.flops.forward == 2 * 8 * 16 * 4


SDPA = "cpp_fused__scaled_dot_product_flash_attention_for_cpu_backward_threshold_backward_0"


@pytest.mark.parametrize(
    ("kernel", "named"),
    [
        (SDPA, False),
        ("triton_poi_fused__scaled_dot_product_efficient_attention_add_1", False),
        ("triton_poi_fused_scaled_dot_product_attention_2", False),
        ("triton_red_fused__scaled_dot_product_cudnn_attention_backward_mul_3", False),
        ("cpp_fused_dot_0", True),
        ("triton_per_fused_dot_mul_1", True),
        ("triton_poi_fused__scaled_dot_product_flash_attention_mm_2", True),
        ("cpp_fused_addmm_relu_3", True),
        ("triton_tem_fused__scaled_dot_product_attention_4", True),
    ],
)
def test_a_kernel_named_after_attention_holds_no_product(kernel: str, named: bool) -> None:
    source = f"{kernel} = async_compile.cpp_pybinding([], '''body''')\n\ndef call(args):\n    {kernel}(buf0)\n"
    found = products_inside(SimpleNamespace(source_code=source))
    assert found == ((f"inductor.{kernel}",) if named else ())


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def inner(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=False)


class Attending(Checkpointed):
    """Scores and values have no parameter; the output's weight has as many elements as the values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def inner(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return super().inner(x + self.out(y.transpose(1, 2).flatten(2)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("kind", [Checkpointed, Attending])
def test_a_checkpoint_inside_a_compiled_region_is_recompute(kind: type[Checkpointed], backend: str) -> None:
    if backend == "aot_eager" and torch.__version__ < (2, 10):
        pytest.skip("runs node by node")
    torch._dynamo.reset()
    blocks = nn.Sequential(kind(), kind())
    rows = 2 * 8
    x = torch.randn(2, 8, 16, requires_grad=True)
    # The last product of a segment is not needed again.
    linear = 2 * rows * 16 * 64
    attention = 2 * rows * 16 * (48 + 16) + 2 * (2 * 2 * 8 * 8 * 16) if kind is Attending else 0
    for block in blocks:
        block.compile(backend=backend)
    blocks(x).sum().backward()
    with tl.Ledger(blocks, strict=True) as ledger:
        blocks(x).sum().backward()
    (step,) = ledger.report.steps
    forward = 2 * (2 * linear + attention)
    flops = step.flops
    assert (flops.forward, flops.backward, flops.recompute) == (forward, 2 * forward, 2 * (linear + attention))
    assert flops.model == 3 * forward
    bridge = tl.reconcile(step, tokens=rows).flops
    assert (bridge.value("recompute"), bridge.residual) == (2 * (linear + attention), 0)


@pytest.mark.filterwarnings("ignore")
def test_attention_with_a_random_state_inside_a_checkpoint() -> None:
    torch._dynamo.reset()

    class Fused(Checkpointed):
        def inner(self, x: Tensor) -> Tensor:
            q = self.up(x).unflatten(-1, (4, 16)).transpose(1, 2)
            return self.down(F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2))

    model = Fused()
    x = torch.randn(2, 8, 16, requires_grad=True)
    model.compile(backend="aot_eager")
    model(x).sum().backward()
    with tl.Ledger(model, strict=True) as ledger:
        model(x).sum().backward()
    flops = ledger.report.steps[0].flops
    scores, linear = 2 * 2 * 4 * 8 * 8 * 16, 2 * 16 * 16 * 64
    assert flops.uncounted == {}
    assert (flops.forward, flops.recompute) == (2 * linear + 2 * scores, linear + 2 * scores)
    assert flops.backward == 4 * linear + 5 * scores
