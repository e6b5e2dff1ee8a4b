"""The bridge from 6·N·D of dense models: every named term beside its value by hand, from sizes alone.

D rows; a weight of n elements that meets R rows costs 2·n·R forward, and as much for each of its gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchledger as tl
from models import GPT
from reconciling import Hand, Lora, check, freeze, ids_of, record, terms_of, total

CASES: dict[str, Callable[[], Hand]] = {}


def case(function: Callable[[], Hand]) -> Callable[[], Hand]:
    CASES[function.__name__] = function
    return function


@pytest.mark.parametrize("name", CASES)
def test_terms(name: str) -> None:
    check(CASES[name]())


D = 5
FIRST, MIDDLE, LAST = 8 * 16, 16 * 24, 24 * 4
"""Elements of the weights of `mlp`; its biases have 44."""


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 4))


def trained(model: nn.Module, *, needs_grad: bool = False) -> tl.StepReport:
    return record(model, total(model, None, torch.randn(D, 8, requires_grad=needs_grad)))


BIASES = {"biases": -6 * D * 44}


@case
def plain() -> Hand:
    return Hand(trained(mlp()), D, {**BIASES, "no_input_gradient": -2 * D * FIRST})


@case
def input_that_needs_a_gradient() -> Hand:
    return Hand(trained(mlp(), needs_grad=True), D, BIASES)


@case
def first_frozen() -> Hand:
    model = mlp()
    freeze([model[0]])
    terms = {**BIASES, "frozen": -2 * D * FIRST, "no_input_gradient": -2 * D * (FIRST + MIDDLE)}
    return Hand(trained(model), D, terms)


@case
def middle_frozen() -> Hand:
    model = mlp()
    freeze([model[2]])
    return Hand(trained(model), D, {**BIASES, "frozen": -2 * D * MIDDLE, "no_input_gradient": -2 * D * FIRST})


@case
def last_frozen() -> Hand:
    model = mlp()
    freeze([model[4]])
    return Hand(trained(model), D, {**BIASES, "frozen": -2 * D * LAST, "no_input_gradient": -2 * D * FIRST})


@case
def all_but_the_last_frozen() -> Hand:
    model = mlp()
    freeze([model[0], model[2]])
    terms = {"frozen": -2 * D * (FIRST + MIDDLE), "no_input_gradient": -2 * D * (FIRST + MIDDLE + LAST)}
    return Hand(trained(model), D, {**BIASES, **terms})


@case
def only_a_bias_trained() -> Hand:
    model = mlp().requires_grad_(False)
    model[2].bias.requires_grad_(True)
    terms = {"frozen": -2 * D * (FIRST + MIDDLE + LAST), "no_input_gradient": -2 * D * (FIRST + MIDDLE)}
    return Hand(trained(model), D, {**BIASES, **terms})


def lora(*places: int) -> tuple[nn.Sequential, tl.StepReport]:
    """Frozen layers without biases, some of them with an adapter of rank 2."""
    widths = [8, 16, 24, 4]
    layers = [
        Lora(a, b) if place in places else nn.Linear(a, b, bias=False).requires_grad_(False)
        for place, (a, b) in enumerate(itertools.pairwise(widths))
    ]
    model = nn.Sequential(*layers)
    return model, trained(model)


@case
def lora_first() -> Hand:
    _, step = lora(0)
    no_input = FIRST + 8 * 2  # the base and the adapter's first matrix read the batch
    return Hand(step, D, {"frozen": -2 * D * (FIRST + MIDDLE + LAST), "no_input_gradient": -2 * D * no_input})


@case
def lora_middle() -> Hand:
    _, step = lora(1)
    no_input = FIRST + MIDDLE + 16 * 2  # nothing before it needs a gradient
    return Hand(step, D, {"frozen": -2 * D * (FIRST + MIDDLE + LAST), "no_input_gradient": -2 * D * no_input})


@case
def lora_last() -> Hand:
    _, step = lora(2)
    no_input = FIRST + MIDDLE + LAST + 24 * 2
    return Hand(step, D, {"frozen": -2 * D * (FIRST + MIDDLE + LAST), "no_input_gradient": -2 * D * no_input})


@case
def lora_everywhere() -> Hand:
    _, step = lora(0, 1, 2)
    terms = {"frozen": -2 * D * (FIRST + MIDDLE + LAST), "no_input_gradient": -2 * D * (FIRST + 8 * 2)}
    return Hand(step, D, terms)


# What a parameter was to the ops that read it


class Free(nn.Module):
    """Parameters of the test's own, and a function of them and the batch."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.call = call
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.rand(shape) + 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def free(call: Callable[[Any, Tensor], Tensor], terms: dict[str, int], **shapes: tuple[int, ...]) -> Hand:
    """A step of such a model on D rows of 8 that need a gradient."""
    model = Free(call, **shapes)
    return Hand(trained(model, needs_grad=True), D, terms)


READ: dict[str, tuple[Callable[[Any, Tensor], Tensor], dict[str, tuple[int, ...]], dict[str, int]]] = {
    "bias_of_another_name": (
        lambda m, x: F.linear(x, m.w, m.offset),
        {"w": (4, 8), "offset": (4,)},
        {"biases": -6 * D * 4},
    ),
    "x_at_w_plus_b": (lambda m, x: x @ m.w + m.b, {"w": (8, 4), "b": (4,)}, {"biases": -6 * D * 4}),
    "w_on_the_left": (lambda m, x: (m.w @ x.T).T, {"w": (4, 8)}, {}),
    "bias_of_addmm": (lambda m, x: torch.addmm(m.b, x, m.w), {"w": (8, 4), "b": (4,)}, {"biases": -6 * D * 4}),
    "einsum": (lambda m, x: torch.einsum("ri,io->ro", x, m.w), {"w": (8, 4)}, {}),
    "einsum_of_heads": (lambda m, x: torch.einsum("ri,hio->rho", x, m.w), {"w": (2, 8, 4)}, {}),
    "bmm_of_stacked": (lambda m, x: torch.bmm(x.expand(2, -1, -1), m.w), {"w": (2, 8, 4)}, {}),
    # The gradient of what a vector is multiplied with is an outer product, which is element-wise work.
    "matrix_times_vector": (lambda m, x: x @ m.w, {"w": (8,)}, {"elementwise": -2 * D * 8}),
    "vector_times_matrix": (
        lambda m, x: m.w @ x.sum(0),
        {"w": (4, 8)},
        {"elementwise": -2 * 32, "reuse": 6 * (1 - D) * 32},
    ),
    "two_vectors": (lambda m, x: m.w @ x.sum(0), {"w": (8,)}, {"elementwise": -4 * 8, "reuse": 6 * (1 - D) * 8}),
    "layer_scale": (lambda m, x: (x @ m.w) * m.scale, {"w": (8, 4), "scale": (4,)}, {"elementwise": -6 * D * 4}),
    "scale_of_one": (lambda m, x: (x @ m.w) * m.scale, {"w": (8, 4), "scale": ()}, {"elementwise": -6 * D}),
    "rms_norm_by_hand": (
        lambda m, x: (x * x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt() * m.g) @ m.w,
        {"w": (8, 4), "g": (8,)},
        {"norms": -6 * D * 8},
    ),
    "layer_norm_by_hand": (
        lambda m, x: ((x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True) * m.g + m.b) @ m.w,
        {"w": (8, 4), "g": (8,), "b": (8,)},
        {"norms": -6 * D * 16},
    ),
    "unused": (lambda m, x: x @ m.w, {"w": (8, 4), "other": (3, 7)}, {"unused": -6 * D * 21}),
    "looked_up_by_indexing": (
        lambda m, x: x @ m.w + m.table[torch.arange(D) % 3],
        {"w": (8, 4), "table": (6, 4)},
        {"embeddings": -6 * D * 24},
    ),
    "looked_up_by_a_slice": (
        lambda m, x: x @ m.w + m.table[:D],
        {"w": (8, 4), "table": (6, 4)},
        {"elementwise": -6 * D * 24},
    ),
    "gathered": (
        lambda m, x: x @ m.w + m.table.index_select(0, torch.arange(D)),
        {"w": (8, 4), "table": (6, 4)},
        {"embeddings": -6 * D * 24},
    ),
    "complex": (
        lambda m, x: torch.view_as_real(x.to(torch.complex64) @ torch.view_as_complex(m.w)),
        {"w": (8, 4, 2)},
        # Of n real elements half as many complex ones, at four real multiply-adds each, in each of three products.
        {"reuse": 6 * D * (4 * 32 - 64)},
    ),
    "cast_weight": (lambda m, x: (x.double() @ m.w.double()).float(), {"w": (8, 4)}, {}),
    "transposed_copy": (lambda m, x: x @ m.w.t().contiguous(), {"w": (4, 8)}, {}),
    "transposed_view": (lambda m, x: x @ m.w.t(), {"w": (4, 8)}, {}),
}


@pytest.mark.parametrize("name", READ)
def test_read_as(name: str) -> None:
    call, shapes, terms = READ[name]
    check(free(call, terms, **shapes))


@case
def weight_norm() -> Hand:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))
    # original0 scales; original1 is what the rows are multiplied with.
    terms = {"elementwise": -6 * D * 4, "biases": -6 * D * 4, "no_input_gradient": -2 * D * 32}
    return Hand(trained(model), D, terms)


@case
def two_names() -> Hand:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8, bias=False)
            self.b = nn.Linear(8, 8, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    # One parameter of 64 elements that 2·D rows meet; the first of them needs no input gradient.
    return Hand(trained(Twice()), D, {"reuse": 6 * D * 64, "no_input_gradient": -2 * D * 64})


@case
def one_layer_run_three_times() -> Hand:
    layer = nn.Linear(8, 8)
    x = torch.randn(D, 8)

    def run() -> None:
        layer(layer(layer(x)).relu()).sum().backward()

    step = record(layer, run, tokens=D)
    terms = {"reuse": 6 * 2 * D * 64, "no_input_gradient": -2 * D * 64, "biases": -6 * D * 8}
    return Hand(step, D, terms)


# Forwards and backwards that do not pair


@case
def accumulated() -> Hand:
    model = mlp()
    x = torch.randn(D, 8)

    def run() -> None:
        for _ in range(3):
            model(x).sum().backward()

    step = record(model, run)  # three batches of D make the step's tokens
    return Hand(step, 3 * D, {"biases": -6 * 3 * D * 44, "no_input_gradient": -2 * 3 * D * FIRST})


@case
def evaluation_in_the_step() -> Hand:
    model = mlp()
    x, other = torch.randn(D, 8), torch.randn(7, 8)

    def run() -> None:
        model(x).sum().backward()
        with torch.no_grad():
            model(other)

    n = FIRST + MIDDLE + LAST
    terms = {"reuse": 6 * 7 * n, "no_backward": -4 * 7 * n, "no_input_gradient": -2 * D * FIRST, **BIASES}
    return Hand(record(model, run), D, terms)


@case
def backward_that_never_ran() -> Hand:
    model = mlp()
    x = torch.randn(D, 8)
    n = FIRST + MIDDLE + LAST
    terms = {"no_backward": -4 * D * n + 2 * D * FIRST, "no_input_gradient": -2 * D * FIRST, **BIASES}
    return Hand(record(model, lambda: model(x)), D, terms)


@case
def inference() -> Hand:
    model = mlp()
    x = torch.randn(D, 8)

    def run() -> None:
        with torch.inference_mode():
            model(x)

    return Hand(record(model, run), D, {"no_backward": -4 * D * (FIRST + MIDDLE + LAST), **BIASES})


@case
def detached_branch() -> Hand:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.main, self.side = (nn.Linear(8, 8, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            h = self.trunk(x)
            return self.main(h) + self.side(h.detach())

    # The side branch's input needs no gradient, nor does the trunk's.
    return Hand(trained(Branches()), D, {"no_input_gradient": -2 * D * (64 + 64)})


@case
def branch_left_out_of_the_loss() -> Hand:
    a, b = nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False)
    model = nn.ModuleList([a, b])
    x = torch.randn(D, 8)

    def run() -> None:
        h = a(x)
        b(h)
        h.sum().backward()

    step = record(model, run, tokens=D)
    return Hand(step, D, {"no_input_gradient": -2 * D * 64, "no_backward": -4 * D * 32})


@case
def retained_graph() -> Hand:
    model = mlp()
    x = torch.randn(D, 8)

    def run() -> None:
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    again = 2 * D * (FIRST + 2 * MIDDLE + 2 * LAST)
    return Hand(record(model, run), D, {**BIASES, "no_input_gradient": -2 * D * FIRST, "double_backward": again})


@case
def gradients_of_two_losses_apart() -> Hand:
    trunk, one, two = nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False), nn.Linear(16, 4, bias=False)
    model = nn.ModuleList([trunk, one, two])
    x = torch.randn(D, 8)

    def run() -> None:
        h = trunk(x)
        one(h).sum().backward(retain_graph=True)
        two(h).sum().backward()

    # The trunk's weight gradient runs once for each loss.
    step = record(model, run, tokens=D)
    return Hand(step, D, {"no_input_gradient": -2 * D * FIRST, "double_backward": 2 * D * FIRST})


@case
def gradient_penalty() -> Hand:
    model = nn.Linear(8, 4, bias=False)
    x = torch.randn(D, 8, requires_grad=True)

    def run() -> None:
        y = model(x).pow(2).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        g.pow(2).sum().backward()

    # y = xW; g = 2y·Wᵀ. The second backward goes through g's product (two products), then through y's (two more).
    # The forward's weight gradient is asked for in the second backward alone, the input gradient in both.
    p = 2 * D * 32
    step = record(model, run)
    assert step.flops.total == 6 * p
    return Hand(step, D, {"double_backward": 3 * p})


@case
def lbfgs() -> Hand:
    model = nn.Linear(8, 4, bias=False)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, tolerance_grad=0, tolerance_change=0)
    x, y = torch.randn(D, 8), torch.randn(D, 4)
    calls = 0

    def run() -> None:
        def closure() -> Tensor:
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)

    step = record(model, run, optimizer, tokens=D)
    assert calls > 1
    terms = {"reuse": 6 * (calls - 1) * D * 32, "no_input_gradient": -2 * calls * D * 32}
    return Hand(step, D, terms | {"optimizer": step.flops.optimizer})


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        return grad @ w.T if ctx.needs_input_grad[0] else None, x.T @ grad if ctx.needs_input_grad[1] else None


@pytest.mark.parametrize(
    ("trains", "needs", "terms"),
    [
        (True, True, {}),
        (True, False, {"no_input_gradient": -2 * D * 64}),
        (False, True, {"frozen": -2 * D * 64}),
    ],
    ids=["both", "weight", "input"],
)
def test_custom_function(trains: bool, needs: bool, terms: dict[str, int]) -> None:
    model = Free(lambda m, x: Multiply.apply(x, m.w), w=(8, 8))
    model.requires_grad_(trains)
    check(Hand(trained(model, needs_grad=needs), D, terms))


@case
def autocast() -> Hand:
    model = mlp()
    x = torch.randn(D, 8)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        out.sum().backward()

    return Hand(record(model, run), D, {**BIASES, "no_input_gradient": -2 * D * FIRST})


# Products that no parameter is part of


@case
def products_of_activations() -> Hand:
    model = Free(lambda m, x: (x @ m.w) @ (x @ m.w).T, w=(8, 4))
    # Two products of the weight on D rows each, and one of D·D·4 with both gradients.
    step = trained(model, needs_grad=True)
    return Hand(step, D, {"reuse": 6 * D * 32, "other_products": 3 * 2 * D * D * 4})


@case
def metrics_outside() -> Hand:
    model = mlp()
    x = torch.randn(D, 8)

    def run() -> None:
        model(x).sum().backward()
        with torch.no_grad():
            x @ x.T

    terms = {**BIASES, "no_input_gradient": -2 * D * FIRST, "other_products": 2 * D * D * 8}
    return Hand(record(model, run), D, terms)


@case
def muon() -> Hand:
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))
    optimizer = torch.optim.Muon(model.parameters(), lr=0.01)
    x = torch.randn(D, 8)

    def run() -> None:
        model(x).sum().backward()
        optimizer.step()

    def newton_schulz(m: int, n: int) -> int:  # m <= n
        return 5 * (4 * m * m * n + 2 * m**3)

    terms = {"no_input_gradient": -2 * D * FIRST, "optimizer": newton_schulz(8, 16) + newton_schulz(4, 16)}
    return Hand(record(model, run, optimizer), D, terms)


# GPT

L, B, T, E, V = 2, 2, 12, 16, 32
N_TOKENS = B * T
BLOCK = 12 * E * E
GPT_TERMS = {
    "attention": 12 * L * B * T * T * E,
    "attention_rescore": 2 * L * B * T * T * E,
    "norms": -6 * N_TOKENS * (2 * L + 1) * 2 * E,
    "biases": -6 * N_TOKENS * L * 9 * E,
    "embeddings": -6 * N_TOKENS * T * E,
}


def gpt(*, kind: str | None = None, change: Callable[[GPT], Any] = lambda model: None) -> tl.StepReport:
    model = GPT(n_layers=L, width=E, n_heads=2, vocabulary=V, seq=T, kind=kind)
    change(model)
    ids = ids_of(B, T, V)
    return record(model, total(model, None, ids, ids))


def untie(model: GPT) -> None:
    model.head.weight = nn.Parameter(model.head.weight.clone())


@case
def gpt_tied() -> Hand:
    return Hand(gpt(), N_TOKENS, GPT_TERMS)


@case
def gpt_untied() -> Hand:
    return Hand(gpt(change=untie), N_TOKENS, {**GPT_TERMS, "embeddings": -6 * N_TOKENS * (T + V) * E})


@case
def gpt_frozen_embeddings() -> Hand:
    def change(model: GPT) -> None:
        untie(model)
        freeze([model.tokens, model.positions])

    # Nothing else: the first norm still needs the gradient of its input's products.
    return Hand(gpt(change=change), N_TOKENS, {**GPT_TERMS, "embeddings": -6 * N_TOKENS * (T + V) * E})


@case
def gpt_frozen_first_block() -> Hand:
    def change(model: GPT) -> None:
        untie(model)
        freeze([model.tokens, model.positions, model.blocks[0]])

    terms = {
        **GPT_TERMS,
        "embeddings": -6 * N_TOKENS * (T + V) * E,
        "frozen": -2 * N_TOKENS * BLOCK,
        "no_input_gradient": -2 * N_TOKENS * BLOCK,
        # The first block's attention has a forward alone, of 4 of the 12.
        "attention": 12 * B * T * T * E + 4 * B * T * T * E,
        "attention_rescore": 2 * B * T * T * E,
    }
    return Hand(gpt(change=change), N_TOKENS, terms)


@case
def gpt_frozen_last_block() -> Hand:
    terms = {**GPT_TERMS, "frozen": -2 * N_TOKENS * BLOCK}
    return Hand(gpt(change=lambda model: freeze([model.blocks[-1]])), N_TOKENS, terms)


def test_the_reasons_have_names() -> None:
    terms = {term.name: term.why for term in check(gpt_tied()).flops.terms}
    assert terms["embeddings"] == f"6·D·n of {T * E} parameters only looked up"
    assert terms_of(tl.reconcile(gpt()).flops)
