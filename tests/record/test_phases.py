"""Phases: hand-counted FLOPs of forward, backward, recompute, optimizer and outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import torchledger as tl
from models import Residual

ROWS = 8
LINEAR = 2 * ROWS * 16 * 64
"""One product of a `Residual`, forward."""


def phases(flops: tl.FlopStatement) -> tuple[int, int, int, int, int]:
    return flops.forward, flops.backward, flops.recompute, flops.optimizer, flops.outside


def run_blocks(call: Callable[[nn.Module, torch.Tensor], torch.Tensor], n_blocks: int = 3) -> tl.FlopStatement:
    torch.manual_seed(0)
    model = nn.ModuleList(Residual() for _ in range(n_blocks))
    x = torch.randn(ROWS, 16, requires_grad=True)
    with tl.Ledger(model) as ledger:
        h = x
        for block in model:
            h = call(block, h)
        h.sum().backward()
    assert ledger.report.faults == ()
    return ledger.report.flops


F3 = 6 * LINEAR  # the forward of three blocks


def test_facts_three_blocks() -> None:
    # facts: F = 98,304; none 3F; non-reentrant 3F + 49,152; reentrant 4F.
    assert F3 == 98_304
    assert phases(run_blocks(lambda block, h: block(h))) == (F3, 2 * F3, 0, 0, 0)
    nonreentrant = run_blocks(lambda block, h: checkpoint(block, h, use_reentrant=False))
    assert phases(nonreentrant) == (F3, 2 * F3, F3 // 2, 0, 0)
    reentrant = run_blocks(lambda block, h: checkpoint(block, h, use_reentrant=True))
    assert phases(reentrant) == (F3, 2 * F3, F3, 0, 0)
    assert reentrant.model == 3 * F3
    assert reentrant.total == 4 * F3


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_plain_function(reentrant: bool) -> None:
    w = torch.randn(16, 16, requires_grad=True)
    x = torch.randn(ROWS, 16, requires_grad=True)

    def function(h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            h.detach() @ h.detach().T  # a product that no graph holds: first, where nothing tells recompute yet
        return (h @ w).sin() @ w

    with tl.Ledger() as ledger:
        for _ in range(2):  # the second time the ledger knows that checkpoints are about
            checkpoint(function, x, use_reentrant=reentrant).sum().backward()
            ledger.step()
    product, extra = 2 * ROWS * 16 * 16, 2 * ROWS * ROWS * 16
    flops = ledger.report.steps[1].flops
    # Under plain no_grad no graph grows: outside, but inside a reentrant checkpoint's own function.
    assert (flops.forward, flops.outside) == ((2 * product + extra, 0) if reentrant else (2 * product, extra))
    assert flops.backward == 4 * product
    assert flops.recompute == (2 if reentrant else 1) * product + extra


@pytest.mark.parametrize("reentrant", [False, True])
def test_custom_function_inside_a_checkpointed_function(reentrant: bool) -> None:
    class Multiply(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = ctx.saved_tensors
            return g @ b.T, a.T @ g

    w = torch.randn(16, 16, requires_grad=True)
    x = torch.randn(ROWS, 16, requires_grad=True)
    with tl.Ledger() as ledger:
        out = checkpoint(lambda h: Multiply.apply(Multiply.apply(h, w), w).sin(), x, use_reentrant=reentrant)
        out.sum().backward()
    product = 2 * ROWS * 16 * 16
    assert phases(ledger.report.flops) == (2 * product, 4 * product, 2 * product, 0, 0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_nested_checkpoints(reentrant: bool) -> None:
    def call(block: nn.Module, h: torch.Tensor) -> torch.Tensor:
        def inner(h: torch.Tensor) -> torch.Tensor:
            return checkpoint(block, h, use_reentrant=reentrant).sin()

        return checkpoint(inner, h, use_reentrant=reentrant)

    flops = run_blocks(call)
    assert (flops.forward, flops.backward) == (F3, 2 * F3)
    # Outer and inner segments are each run again; non-reentrant ones may stop early.
    assert flops.recompute == 2 * F3 if reentrant else F3 <= flops.recompute <= 2 * F3


def test_selective_checkpointing_recomputes_what_it_did_not_save() -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE

    def call(block: nn.Module, h: torch.Tensor) -> torch.Tensor:
        return checkpoint(
            block, h, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
        )

    assert phases(run_blocks(call)) == (F3, 2 * F3, 0, 0, 0)


def test_hand_written_checkpoint() -> None:
    class Checkpoint(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
            ctx.block = block
            ctx.save_for_backward(x)
            with torch.no_grad():
                return block(x)

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> tuple[None, torch.Tensor | None]:
            (x,) = ctx.saved_tensors
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                y = ctx.block(x)
            torch.autograd.backward(y, g)
            return None, x.grad

    assert phases(run_blocks(Checkpoint.apply)) == (F3, 2 * F3, F3, 0, 0)


@pytest.mark.parametrize("kind", [None, "reentrant", "nonreentrant"])
def test_gradient_penalty(kind: str | None) -> None:
    torch.manual_seed(0)
    block = Residual()
    x = torch.randn(ROWS, 16, requires_grad=True)
    with tl.Ledger(block) as ledger:
        y = checkpoint(block, x, use_reentrant=False) if kind == "nonreentrant" else block(x)
        (g,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
        g.pow(2).sum().backward()
    flops = ledger.report.flops
    assert flops.forward == 2 * LINEAR
    # First backward: two input gradients. Second: each of those products has two gradients, and the forward's four
    # products of weights and inputs follow, less the one to x through b's output that needs none twice.
    assert flops.backward >= 2 * LINEAR + 4 * LINEAR
    assert (flops.recompute > 0) == (kind == "nonreentrant")
    assert flops.outside == 0


def test_recompute_under_create_graph() -> None:
    # Grad mode is on in the whole backward: only the modules that run tell recompute.
    block = Residual()
    x = torch.randn(ROWS, 16, requires_grad=True)
    with tl.Ledger(block) as ledger:
        y = checkpoint(block, x, use_reentrant=False)
        torch.autograd.grad(y.sum(), x, create_graph=True)
    assert phases(ledger.report.flops) == (2 * LINEAR, 2 * LINEAR, LINEAR, 0, 0)


def test_gradient_accumulation_and_optimizer_products() -> None:
    class Rotating(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    if p.ndim == 2:
                        p.grad @ p.grad.T
            super().step(closure)

    model = nn.Linear(16, 4, bias=False)
    optimizer = Rotating(model.parameters(), lr=0.1)
    x = torch.randn(ROWS, 16)
    with tl.Ledger(model, optimizer) as ledger:
        for _ in range(2):
            model(x).sum().backward()
        optimizer.step()
    product = 2 * ROWS * 16 * 4
    assert phases(ledger.report.flops) == (2 * product, 2 * product, 0, 2 * 4 * 4 * 16, 0)


def test_optimizer_inside_backward() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    optimizers = {p: torch.optim.AdamW([p], foreach=False) for p in model.parameters()}

    def hook(p: torch.Tensor) -> None:
        optimizers[p].step()  # type: ignore[index]
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    x = torch.randn(ROWS, 16)
    with tl.Ledger(model, list(optimizers.values())) as ledger:
        for _ in range(2):
            model(x).sum().backward()
            ledger.step()
    memory = ledger.report.steps[1].memory["cpu"]
    assert memory.peak_by_phase.keys() == {"forward", "backward", "optimizer"}
    # The gradients of one layer are alive at a time: one node makes both.
    assert memory.category_peaks["gradients"] == (16 * 16 + 16) * 4
    assert memory.end.gradients == 0
    assert memory.end.other == 0
    assert memory.start.total_bytes == memory.end.total_bytes


def test_lbfgs_closures() -> None:
    model = nn.Linear(16, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x, y = torch.randn(ROWS, 16), torch.randn(ROWS, 4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    with tl.Ledger(model, optimizer) as ledger:
        optimizer.step(closure)
    flops = ledger.report.flops
    product = 2 * ROWS * 16 * 4
    assert flops.forward == flops.backward
    assert flops.forward % product == 0
    assert flops.forward >= 2 * product
    assert flops.optimizer > 0  # dot products of directions
    assert flops.outside == 0


def test_optimizer_that_raises_does_not_stay_the_phase() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise RuntimeError("no")

    model = nn.Linear(16, 4)
    failing = Failing(model.parameters(), lr=0.1)
    x = torch.randn(ROWS, 16)
    with tl.Ledger(model, failing) as ledger:
        model(x).sum().backward()
        with pytest.raises(RuntimeError, match="no"):
            failing.step()
        model(x).sum().backward()
    product = 2 * ROWS * 16 * 4
    assert phases(ledger.report.flops) == (2 * product, 2 * product, 0, 0, 0)


def test_outside_is_what_no_module_and_no_graph_runs() -> None:
    a = torch.randn(8, 8)
    w = torch.randn(8, 8, requires_grad=True)
    with tl.Ledger() as ledger:
        a @ a
        loss = (a @ w).sum()
        a @ a
        loss.backward()
        with torch.no_grad():
            w @ w
    assert phases(ledger.report.flops) == (1024, 1024, 0, 0, 3 * 1024)


def test_eval_under_no_grad_is_forward() -> None:
    model = nn.Linear(16, 4).eval()
    for context in (torch.no_grad, torch.inference_mode):
        with tl.Ledger(model) as ledger, context():
            model(torch.randn(ROWS, 16))
        assert phases(ledger.report.flops) == (2 * ROWS * 16 * 4, 0, 0, 0, 0)


def test_create_graph_backward_is_no_recompute() -> None:
    model = nn.Linear(16, 4, bias=False)
    x = torch.randn(ROWS, 16, requires_grad=True)
    with tl.Ledger(model) as ledger:
        model(x).sum().backward(create_graph=True)
    product = 2 * ROWS * 16 * 4
    assert phases(ledger.report.flops) == (product, 2 * product, 0, 0, 0)
    for p in (x, *model.parameters()):
        p.grad = None  # the graph holds its own leaves


def test_functional_transforms() -> None:
    w, x = torch.randn(16, 4), torch.randn(ROWS, 16)
    with tl.Ledger() as ledger:
        torch.func.grad(lambda w: (x @ w).sin().sum())(w)
    flops = ledger.report.flops
    product = 2 * ROWS * 16 * 4
    assert (flops.forward, flops.backward, flops.outside) == (product, product, 0)
