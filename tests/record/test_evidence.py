"""Evidence of products that are hard to place, and of what parameters become before they are multiplied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchledger as tl
from models import GPT
from reconciling import Hand, Lora, check, freeze, ids_of, record, total

D = 5
CASES: dict[str, Callable[[], Hand]] = {}


def case(function: Callable[[], Hand]) -> Callable[[], Hand]:
    CASES[function.__name__] = function
    return function


@pytest.mark.parametrize("name", CASES)
def test_terms(name: str) -> None:
    check(CASES[name]())


class Free(nn.Module):
    """Square matrices of 8 and a function of them and of D rows."""

    def __init__(self, call: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.call = call
        self.w = nn.ParameterList([torch.randn(shape) for shape in shapes or ((8, 8), (8, 8))])

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, *self.w)


def trained(model: nn.Module, *, needs_grad: bool = True) -> tl.StepReport:
    return record(model, total(model, None, torch.randn(D, 8, requires_grad=needs_grad)))


class TwoProducts(torch.autograd.Function):
    """One node of two products, whose backward runs four."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        h = x @ a
        ctx.save_for_backward(x, a, b, h)
        return h @ b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, a, b, h = ctx.saved_tensors
        middle = grad @ b.T
        return middle @ a.T, x.T @ middle, h.T @ grad


def test_two_products_of_one_node() -> None:
    step = trained(Free(TwoProducts.apply))
    check(Hand(step, D, {}))
    one = tl.ParameterFlops(2 * D * 64, 2 * D * 64, 2 * D * 64, 0)
    assert step.flops.by_parameter == {"w.0": one, "w.1": one}


def test_two_products_of_one_node_and_one_weight() -> None:
    # The same weight twice: 2·D rows.
    step = trained(Free(lambda x, a: TwoProducts.apply(x, a, a), (8, 8)))
    check(Hand(step, D, {"reuse": 6 * D * 64}))


def test_a_product_of_two_parameters_is_the_first_ones() -> None:
    model = Free(lambda x, a, b: a @ b + x.sum())
    step = record(model, total(model, None, torch.randn(D, 8)))
    one = 2 * 8 * 64
    assert step.flops.by_parameter == {"w.0": tl.ParameterFlops(one, one, one, 0)}
    # Eight columns for the first; none for the second, whose gradient is the first one's input gradient.
    check(Hand(step, D, {"reuse": 6 * (8 - D) * 64 - 6 * D * 64}))


@case
def matrices_on_the_left() -> Hand:
    return Hand(trained(Free(lambda x, a, b: b.T @ (a @ x.T))), D, {})


@case
def slices_of_a_stack() -> Hand:
    def call(x: Tensor, stack: Tensor) -> Tensor:
        for matrix in stack:
            x = x @ matrix
        return x

    return Hand(trained(Free(call, (4, 8, 8))), D, {})


@case
def experts_picked_by_index() -> Hand:
    def call(x: Tensor, stack: Tensor) -> Tensor:
        return torch.bmm(x[:, None], stack[torch.arange(len(x)) % 3])[:, 0]

    # Of four experts each row meets one.
    return Hand(trained(Free(call, (4, 8, 8))), D, {"inactive_experts": -6 * D * 3 * 64})


@case
def spectral_norm() -> Hand:
    model = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4, bias=False))
    n, d = 32, D
    terms = {
        # Two vectors meet the weight without a graph, one with it; then D rows meet what it is divided by.
        "reuse": 6 * (3 * n - d * n),
        "no_backward": -4 * 2 * n,
        "no_input_gradient": -2 * n,
        "elementwise": -2 * n,
        # Rows times the divided weight, forward and for the weight, and a product of two vectors of 4.
        "other_products": 2 * 2 * d * n + 2 * 4,
    }
    return Hand(trained(model, needs_grad=False), d, terms)


@case
def two_models() -> Hand:
    generator, critic = nn.Linear(8, 6, bias=False), nn.Linear(6, 1, bias=False)
    x = torch.randn(D, 8)

    def run() -> None:
        fake = generator(x)
        critic(fake.detach()).sum().backward()
        critic(fake).sum().backward()

    terms = {"reuse": 6 * D * 6, "no_input_gradient": -2 * D * (48 + 6)}
    return Hand(record(nn.ModuleList([generator, critic]), run, tokens=D), D, terms)


E, ROWS = 16, 12


@case
def multi_head_attention() -> Hand:
    model = nn.MultiheadAttention(E, 2, batch_first=True)
    x = torch.randn(2, 6, E)
    step = record(model, lambda: model(x, x, x)[0].sum().backward(), tokens=ROWS)
    terms = {
        "attention": 12 * 2 * 6 * 6 * E,
        "biases": -6 * ROWS * 4 * E,
        "no_input_gradient": -2 * ROWS * 3 * E * E,
    }
    return Hand(step, ROWS, terms)


@case
def fused_encoder_layer() -> Hand:
    model = nn.TransformerEncoderLayer(E, 2, 32, batch_first=True).eval()
    x = torch.randn(2, 6, E)

    def run() -> None:
        with torch.no_grad():
            model(x)

    terms = {
        "attention": 4 * 2 * 6 * 6 * E,
        "norms": -6 * ROWS * 4 * E,
        "biases": -6 * ROWS * (4 * E + 32 + E),
        "no_backward": -4 * ROWS * (4 * E * E + 2 * 32 * E),
    }
    return Hand(record(model, run, tokens=ROWS), ROWS, terms)


# Checkpoints, adapters, autocast and compilers together

L, B, T, V = 2, 2, 8, 32
N_TOKENS = B * T
GPT_TERMS = {
    "attention": 12 * L * B * T * T * E,
    "attention_rescore": 2 * L * B * T * T * E,
    "norms": -6 * N_TOKENS * (2 * L + 1) * 2 * E,
    "embeddings": -6 * N_TOKENS * T * E,
}
FORWARD = L * (2 * N_TOKENS * 12 * E * E + 4 * B * T * T * E)
"""Of all blocks."""
LAST = L * 2 * N_TOKENS * 4 * E * E
"""The last products of blocks."""


@pytest.mark.parametrize("kind", ["reentrant", "nonreentrant"])
def test_adapters_in_checkpointed_blocks(kind: str) -> None:
    rank = 2
    model = GPT(L, E, 2, V, T, kind)
    freeze([model])
    for block in model.blocks:
        block.qkv = Lora(E, 3 * E, rank)
    # Without any input that needs a gradient a reentrant checkpoint would train nothing.
    model.tokens.weight.requires_grad_(kind == "reentrant")
    ids = ids_of(B, T, V)
    step = record(model, total(model, None, ids, ids), steps=2)
    adapter = rank * E + rank * 3 * E
    head = 0 if kind == "reentrant" else V * E
    terms = {
        **GPT_TERMS,
        "biases": -6 * N_TOKENS * L * 6 * E,
        "frozen": -2 * N_TOKENS * (L * 12 * E * E + head),
        "recompute": FORWARD + L * 2 * N_TOKENS * adapter,
    }
    if kind == "nonreentrant":
        terms["early_stop"] = -LAST
        terms["no_input_gradient"] = -2 * N_TOKENS * (3 * E * E + rank * E)  # the first norm has nothing to train
    check(Hand(step, N_TOKENS, terms))


@pytest.mark.parametrize("kind", ["reentrant", "nonreentrant"])
def test_autocast_in_checkpointed_blocks(kind: str) -> None:
    model, ids = GPT(L, E, 2, V, T, kind), ids_of(B, T, V)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, ids)
        loss.backward()

    stop = {"early_stop": -LAST} if kind == "nonreentrant" else {}
    terms = {**GPT_TERMS, "biases": -6 * N_TOKENS * L * 9 * E, "recompute": FORWARD, **stop}
    check(Hand(record(model, run, steps=2), N_TOKENS, terms))


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_transformer() -> None:
    torch._dynamo.reset()
    model, ids = GPT(L, E, 2, V, T), ids_of(B, T, V)
    compiled = torch.compile(model, backend="aot_eager")
    step = record(model, lambda: compiled(ids, ids).backward(), steps=2)
    check(Hand(step, N_TOKENS, {**GPT_TERMS, "biases": -6 * N_TOKENS * L * 9 * E}))


# What stays unexplained, and why


def test_bilinear_has_a_product_of_its_own_inside() -> None:
    # One op contracts the weight with both inputs: the second contraction, of results, has no parameter, nor gradients.
    model = nn.Bilinear(5, 6, 7, bias=False)
    a, b = torch.randn(4, 5), torch.randn(4, 6)
    step = record(model, lambda: model(a, b).sum().backward())
    once = 2 * 4 * 210
    check(Hand(step, 4, {"no_input_gradient": -once, "other_products": 2 * 4 * 7 * 6}))


@case
def a_weight_that_is_scaled_first() -> Hand:
    # What reaches the product is no parameter any more: the products are named, if not as the weight's.
    terms = {"elementwise": -6 * D * 64, "other_products": 2 * 2 * D * 64}
    return Hand(trained(Free(lambda x, w: F.linear(x, w * 0.5), (8, 8)), needs_grad=False), D, terms)


# Containers: one node for all their ops, whose backward runs the forward again


def over_cond(x: Tensor, w: Tensor) -> Tensor:
    return torch.cond(torch.tensor(True), lambda a, b: (a @ b).relu(), lambda a, b: a @ b @ b, (x, w))


def over_the_other_branch(x: Tensor, w: Tensor) -> Tensor:
    return torch.cond(torch.tensor(False), lambda a, b: a @ b @ b, lambda a, b: (a @ b.t()).relu(), (x, w))


def over_map(x: Tensor, w: Tensor) -> Tensor:
    return torch._higher_order_ops.map(lambda a, b: (a @ b).relu(), x[:, None], w)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", [over_cond, over_the_other_branch, over_map])
def test_what_a_container_computes_again_is_recompute(call: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch._dynamo.reset()
    step = trained(Free(call, (8, 8)))
    once = 2 * D * 64
    flops = step.flops
    assert (flops.forward, flops.backward, flops.recompute) == (once, 2 * once, once)
    check(Hand(step, D, {"recompute": once}))


@pytest.mark.filterwarnings("ignore")
def test_products_without_parameters_in_a_container() -> None:
    torch._dynamo.reset()

    def gram(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        return torch.cond(torch.tensor(True), lambda a: (a @ a.t()).relu(), lambda a: a @ a.t() * 2, (y,))

    step = trained(Free(gram, (8, 8)))
    product = 2 * D * D * 8
    check(Hand(step, D, {"recompute": product, "other_products": 3 * product}))
