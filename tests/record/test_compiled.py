"""Compiled functions: the same FLOPs, and the same compile state afterwards."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import torchledger as tl

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
