"""Recompute and early stop: each kind of checkpoint, segment by segment, from sizes alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import torchledger as tl
from models import GPT
from reconciling import Hand, check, ids_of, record, total

D = 5
A, B = 16 * 24, 24 * 16
"""The two weights of a block."""
once = 2 * D  # FLOPs of a product for each element of its weight


class Block(nn.Module):
    """Two products; ``end`` is what stands behind the last of them."""

    def __init__(self, end: nn.Module | None = None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 24, bias=False), nn.Linear(24, 16, bias=False)
        self.end = end or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.b(F.gelu(self.a(x))))


def run(call: Callable[[nn.Module, Tensor], Tensor], blocks: Any, *, needs_grad: bool = True) -> tl.StepReport:
    """One step of blocks that are called so; twice, since the first tells the ledger that there are checkpoints."""
    model = nn.ModuleList(blocks)
    x = torch.randn(D, 16, requires_grad=needs_grad)

    def step() -> None:
        h = x
        for block in model:
            h = call(block, h)
        h.sum().backward()

    return record(model, step, steps=2, tokens=D)


reentrant = functools.partial(checkpoint, use_reentrant=True)
nonreentrant = functools.partial(checkpoint, use_reentrant=False)


def late(block: nn.Module, h: Tensor) -> Tensor:
    with set_checkpoint_early_stop(False):
        return nonreentrant(block, h)


CALLS: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], dict[str, int]]] = {
    "none": (lambda block, h: block(h), {}),
    "reentrant": (reentrant, {"recompute": once * (A + B)}),
    # What the last product makes is no saved tensor.
    "nonreentrant": (nonreentrant, {"recompute": once * (A + B), "early_stop": -once * B}),
    "early_stop_off": (late, {"recompute": once * (A + B)}),
}


@pytest.mark.parametrize("n_blocks", [1, 3])
@pytest.mark.parametrize("name", CALLS)
def test_kinds(name: str, n_blocks: int) -> None:
    call, each = CALLS[name]
    step = run(call, [Block() for _ in range(n_blocks)])
    check(Hand(step, D, {term: n_blocks * value for term, value in each.items()}))


def test_dropout_behind_the_last_product() -> None:
    # Its mask is saved: nothing is left to stop early for.
    check(Hand(run(nonreentrant, [Block(nn.Dropout(0.5))]), D, {"recompute": once * (A + B)}))


def test_one_linear_layer_alone() -> None:
    # It saves its input and its weight, which the hook sees as it begins: the product never runs again.
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(16, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x)

    step = run(nonreentrant, [Alone(), Alone()])
    assert step.flops.recompute == 0
    check(Hand(step, D, {"recompute": 2 * once * 256, "early_stop": -2 * once * 256}))


def test_first_block_of_a_batch_that_needs_no_gradient() -> None:
    blocks = [Block() for _ in range(2)]
    terms = {"recompute": 2 * once * (A + B), "early_stop": -2 * once * B, "no_input_gradient": -once * A}
    check(Hand(run(nonreentrant, blocks, needs_grad=False), D, terms))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoint_of_a_batch_that_needs_no_gradient() -> None:
    # Its function makes no graph at all: the parameters in it get no gradient, and nothing is recomputed.
    model = nn.ModuleList([Block(), nn.Linear(16, 4, bias=False)])
    x = torch.randn(D, 16)

    def once_through() -> None:
        model[1](reentrant(model[0], x)).sum().backward()

    step = record(model, once_through, steps=2, tokens=D)
    terms = {"no_backward": -2 * once * (A + B), "no_input_gradient": -once * 64}
    check(Hand(step, D, terms))


def test_selective_checkpoint_keeps_products() -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    def call(block: nn.Module, h: Tensor) -> Tensor:
        return nonreentrant(block, h, context_fn=functools.partial(create_selective_checkpoint_contexts, policy))

    check(Hand(run(call, [Block(), Block()]), D, {}))  # no product runs again


def test_selective_checkpoint_recomputes_one_of_two_products() -> None:
    seen = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is torch.ops.aten.mm.default:
            seen.append(ctx.is_recompute)
            if args[1].shape == (16, 24):
                return CheckpointPolicy.MUST_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE

    def call(block: nn.Module, h: Tensor) -> Tensor:
        return nonreentrant(block, h, context_fn=functools.partial(create_selective_checkpoint_contexts, policy))

    step = run(call, [Block(), Block()])
    assert step.flops.recompute == 2 * once * A
    check(Hand(step, D, {"recompute": 2 * once * A}))


def test_frozen_block_in_each_kind() -> None:
    for call, more in (
        (reentrant, {"recompute": 2 * once * (A + B)}),
        (nonreentrant, {"recompute": 2 * once * (A + B), "early_stop": -2 * once * B}),
    ):
        blocks = [Block(), Block().requires_grad_(False)]
        check(Hand(run(call, blocks), D, {**more, "frozen": -once * (A + B)}))


@pytest.mark.parametrize("retained", [False, True], ids=["apart", "retained"])
def test_recomputed_twice(retained: bool) -> None:
    block = Block()
    x = torch.randn(D, 16, requires_grad=True)

    def step() -> None:
        out = nonreentrant(block, x)
        out.sum().backward(retain_graph=True)
        out.sum().backward()

    report = record(block, step, steps=2, tokens=D)
    terms = {"recompute": 2 * once * (A + B), "early_stop": -2 * once * B, "double_backward": 2 * once * (A + B)}
    check(Hand(report, D, terms))


def test_penalty_through_a_checkpoint() -> None:
    block = Block()
    x = torch.randn(D, 16, requires_grad=True)

    def step() -> None:
        (g,) = torch.autograd.grad(nonreentrant(block, x).pow(2).sum(), x, create_graph=True)
        g.pow(2).sum().backward()

    # The first backward runs two input gradients; the second one four products through those, and the forward's four.
    # Both recompute the first product and stop.
    terms = {"recompute": 2 * once * (A + B), "early_stop": -2 * once * B, "double_backward": 3 * once * (A + B)}
    check(Hand(record(block, step, steps=2, tokens=D), D, terms))


class Two(nn.Module):
    """Two blocks, each in a checkpoint of its own."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.call = Block(), Block(), call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.last, self.call(self.first, x))


@pytest.mark.parametrize(
    ("outer", "inner", "due", "saved"),
    [
        # Everything twice: with the outer one, and with its own. The outer one stops before the last block runs at all,
        # since that saves its input; each inner one stops before its last product.
        (nonreentrant, nonreentrant, 4 * (A + B), (A + B) + 2 * B),
        # The outer one makes no graph, and once more runs all of it. Only then are there inner ones, which stop early.
        (reentrant, nonreentrant, 4 * (A + B), 2 * B),
        (nonreentrant, reentrant, 4 * (A + B), 0),
        (reentrant, reentrant, 4 * (A + B), 0),
        (late, late, 4 * (A + B), 0),
    ],
    ids=["both_stop", "inner_stops", "outer_has_no_need_to", "reentrant", "early_stop_off"],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_nested(outer: Any, inner: Any, due: int, saved: int) -> None:
    step = run(outer, [Two(inner)])
    check(Hand(step, D, {"recompute": once * due, "early_stop": -once * saved}))


def test_nested_three_deep() -> None:
    def call(block: nn.Module, h: Tensor) -> Tensor:
        return nonreentrant(lambda h: nonreentrant(lambda h: nonreentrant(block, h), h), h)

    # Three times the block is due. The outer two stop where the next one begins, which saves its input.
    terms = {"recompute": 3 * once * (A + B), "early_stop": -once * (2 * (A + B) + B)}
    check(Hand(run(call, [Block()]), D, terms))


@pytest.mark.parametrize("kind", ["reentrant", "nonreentrant"])
def test_gpt(kind: str) -> None:
    n_layers, batch, seq, e, v = 2, 2, 12, 16, 32
    model = GPT(n_layers=n_layers, width=e, n_heads=2, vocabulary=v, seq=seq, kind=kind)
    ids = ids_of(batch, seq, v)
    step = record(model, total(model, None, ids, ids), steps=2)
    d = batch * seq
    terms = {
        "attention": 12 * n_layers * batch * seq * seq * e,
        "attention_rescore": 2 * n_layers * batch * seq * seq * e,
        "norms": -6 * d * (2 * n_layers + 1) * 2 * e,
        "biases": -6 * d * n_layers * 9 * e,
        "embeddings": -6 * d * seq * e,
        "recompute": n_layers * (2 * d * 12 * e * e + 4 * batch * seq * seq * e),
    }
    if kind == "nonreentrant":
        terms["early_stop"] = -n_layers * 2 * d * 4 * e * e
    check(Hand(step, d, terms))
