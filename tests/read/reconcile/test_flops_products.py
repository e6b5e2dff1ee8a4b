"""The bridge from 6·N·D of products of an unusual kind: of three operands, batched, and attention's that is cut.

Every named term beside its value by hand; a term that is named nowhere is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchledger as tl
from reconciling import Hand, check, record, total

# Bilinear: x1 (N, I1), weight (O, I1, I2), x2 (N, I2). h = x1·W takes 2·N·O·I1·I2, y = h·x2 2·N·O·I2, and each of the
# three gradients as much as h. 6·N·D has h and two gradients.


def bilinear(n: int, i1: int, i2: int, o: int, *needs: bool, frozen: bool = False, bias: bool = True) -> Hand:
    model = nn.Bilinear(i1, i2, o, bias=bias)
    model.weight.requires_grad_(not frozen)
    x1, x2 = (torch.randn(n, i, requires_grad=need) for i, need in zip((i1, i2), needs, strict=True))
    h, y = 2 * n * o * i1 * i2, 2 * n * o * i2
    terms = {
        "biases": -6 * n * o * bias,
        "other_products": y + (h if all(needs) else 0),
        "no_input_gradient": 0 if any(needs) else -h,
        "frozen": -h * frozen,
    }
    return Hand(record(model, total(model, None, x1, x2)), n, terms)


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("sizes", [(8, 6, 7, 5), (3, 2, 9, 4), (5, 1, 3, 2), (2, 4, 4, 1)])
def test_bilinear(sizes: tuple[int, int, int, int], needs: tuple[bool, bool]) -> None:
    check(bilinear(*sizes, *needs))


def test_bilinear_by_its_numbers() -> None:
    hand = bilinear(8, 6, 7, 5, True, True)
    assert hand.step.flops.total == 14_000
    check(hand)
    check(bilinear(8, 6, 7, 5, True, True, frozen=True, bias=False))


def test_bilinear_twice_and_without_a_backward() -> None:
    model = nn.Bilinear(4, 3, 2, bias=False)
    x1, x2 = torch.randn(5, 4), torch.randn(5, 3)
    h, y = 2 * 5 * 24, 2 * 5 * 6
    step = record(model, lambda: model(x1, model(x1, x2).repeat(1, 2)[:, :3]).sum().backward(), tokens=5)
    # The second call's x2 needs a gradient, which is its one input gradient.
    check(Hand(step, 5, {"reuse": 3 * h, "other_products": 2 * y, "no_input_gradient": -h}))
    check(
        Hand(record(model, lambda: model(x1, x2)), 5, {"other_products": y, "no_input_gradient": -h, "no_backward": -h})
    )


# Batched products


class Free(nn.Module):
    def __init__(self, call: Callable[[Any, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.call, self.w = call, nn.Parameter(torch.randn(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.w, x)


HEADS: dict[str, tuple[Callable[[Any, Tensor], Tensor], tuple[int, ...]]] = {
    "bth,hnd->btnd": (lambda w, x: torch.einsum("bth,hnd->btnd", x, w), (16, 4, 4)),
    "bth,nhd->btnd": (lambda w, x: torch.einsum("bth,nhd->btnd", x, w), (4, 16, 4)),
    "bth,nhd->bnt": (lambda w, x: torch.einsum("bth,nhd->bnt", x, w[:, :, :1]), (4, 16, 1)),
    "a batch of one": (lambda w, x: torch.bmm(x.flatten(0, 1)[None], w), (1, 16, 8)),
    "broadcast": (lambda w, x: torch.bmm(x, w.expand(2, -1, -1)), (1, 16, 8)),
    "of heads": (lambda w, x: torch.einsum("btnd,ndk->btnk", x.unflatten(-1, (4, 4)), w), (4, 4, 4)),
}


@pytest.mark.parametrize("needs", [True, False])
@pytest.mark.parametrize("name", HEADS)
def test_a_weight_that_all_rows_meet_is_reuse(name: str, needs: bool) -> None:
    call, shape = HEADS[name]
    model = Free(call, *shape)
    n, rows, d = model.w.numel(), 16, 8
    step = record(model, total(model, None, torch.randn(2, 8, 16, requires_grad=needs)), tokens=d)
    check(Hand(step, d, {"reuse": 6 * (rows - d) * n, "no_input_gradient": 0 if needs else -2 * rows * n}))


@pytest.mark.parametrize(("n_experts", "capacity"), [(4, 4), (4, 6), (8, 1)])
def test_experts_in_one_tensor(n_experts: int, capacity: int) -> None:
    """Rows are sorted into E batches of C: D rows met E·C/E = C of each of the E matrices."""
    d = 16
    model = Free(lambda w, x: torch.bmm(x[: n_experts * capacity].view(n_experts, capacity, 8), w), n_experts, 8, 5)
    x = torch.randn(max(d, n_experts * capacity), 8, requires_grad=True)
    step = record(model, total(model, None, x), tokens=d)
    check(Hand(step, d, {"inactive_experts": 6 * n_experts * 40 * (capacity - d)}))


# Attention, of B sequences, H heads of width W, T positions: S scores a row

B, T, H, W = 2, 8, 4, 4


def softmax(scores: Tensor) -> Tensor:
    return scores.softmax(-1)


def sinks_of(scores: Tensor) -> Tensor:
    column = torch.ones(H, requires_grad=True).view(1, H, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def two_sinks_in_front(scores: Tensor) -> Tensor:
    return torch.cat([scores.new_zeros(*scores.shape[:3], 2), scores], -1).softmax(-1)[..., 2:]


def padded(scores: Tensor) -> Tensor:
    return F.pad(scores, (0, 3)).softmax(-1)[..., :-3].float()


WAYS = {"plain": softmax, "sink": sinks_of, "two": two_sinks_in_front, "padded": padded}


class Attention(nn.Module):
    """A projection of q, and keys and values as they come."""

    def __init__(self, call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.call, self.q = call, nn.Linear(H * W, H * W, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (H, W)).transpose(1, 2) for t in (self.q(x), x, x))
        return self.call(q, k, v)


def attention(call: Callable[[Tensor, Tensor, Tensor], Tensor], pairs: int, *, grad: bool = True) -> None:
    """``pairs`` of queries and keys a sequence and head, averaged over scores and values."""
    model = Attention(call)
    x = torch.randn(B, T, H * W, requires_grad=True)
    n, d = model.q.weight.numel(), B * T
    value = 4 * B * H * W * pairs
    if grad:
        step = record(model, total(model, None, x), tokens=d)
        check(Hand(step, d, {"attention": 3 * value}))
        return
    with torch.no_grad():
        step = record(model, lambda: model(x), tokens=d)
    check(Hand(step, d, {"attention": value, "no_backward": -4 * d * n}))


@pytest.mark.parametrize("grad", [True, False], ids=["trained", "forward"])
@pytest.mark.parametrize("way", WAYS)
def test_attention_with_columns_more(way: str, grad: bool) -> None:
    attention(lambda q, k, v: WAYS[way](q @ k.transpose(-1, -2)) @ v, T * T, grad=grad)


def test_sinks_by_their_number() -> None:
    model = Attention(lambda q, k, v: sinks_of(q @ k.transpose(-1, -2)) @ v)
    step = record(model, total(model, None, torch.randn(B, T, H * W, requires_grad=True)), tokens=B * T)
    assert tl.reconcile(step).flops.value("attention") == 24_576


def windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All scores, of which each four queries use six or four columns."""
    scores = q @ k.transpose(-1, -2)
    parts = [
        scores[..., i : i + 4, max(i - 2, 0) : i + 4].softmax(-1) @ v[..., max(i - 2, 0) : i + 4, :] for i in (0, 4)
    ]
    return torch.cat(parts, 2)


def chunks_of_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = [q @ part.transpose(-1, -2) for part in k.split(4, 2)]
    weights = torch.cat(scores, -1).softmax(-1).split(4, -1)
    return torch.stack([w @ part for w, part in zip(weights, v.split(4, 2), strict=True)]).sum(0)


def columns_left_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2))[..., 2:].softmax(-1) @ v[..., 2:, :]


def zero_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A key and a value of zeros, of which the score is known."""
    weights = F.pad(q @ k.transpose(-1, -2), (0, 1)).softmax(-1)
    return weights @ F.pad(v, (0, 0, 0, 1))


CUT: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], int]] = {
    # pairs of the scores and of the values, their mean
    "windows": (windows, (T * T + 4 * 4 + 4 * 6) // 2),
    "chunks_of_keys": (chunks_of_keys, T * T),
    "columns_left_out": (columns_left_out, (T * T + T * (T - 2)) // 2),
    "zero_key": (zero_key, (T * T + T * (T + 1)) // 2),
}


@pytest.mark.parametrize("grad", [True, False], ids=["trained", "forward"])
@pytest.mark.parametrize("name", CUT)
def test_attention_that_is_cut(name: str, grad: bool) -> None:
    call, pairs = CUT[name]
    attention(call, pairs, grad=grad)


@pytest.mark.parametrize("options", [{"add_zero_attn": True}, {"add_bias_kv": True}], ids=["zero", "bias"])
@pytest.mark.parametrize("weights", [True, False])
def test_multihead_attention_with_a_key_more(options: dict[str, bool], weights: bool) -> None:
    e = H * W
    model = nn.MultiheadAttention(e, H, bias=False, batch_first=True, **options)
    x = torch.randn(B, T, e, requires_grad=True)
    d = B * T
    step = record(model, lambda: model(x, x, x, need_weights=weights)[0].sum().backward(), tokens=d)
    pairs = T * (T + 1)
    bias = 2 * e if "add_bias_kv" in options else 0
    terms = {
        "attention": 12 * B * e * pairs,
        "attention_rescore": 0 if weights else 2 * B * e * pairs,
        "elementwise": -6 * d * bias,
    }
    check(Hand(step, d, terms))


def test_products_before_an_unrelated_softmax_are_no_attention() -> None:
    class Gram(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.gate = nn.Linear(16, 16, bias=False), nn.Linear(16, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            x = self.w(x)
            gram = x @ x.transpose(-1, -2)
            return (gram @ x) * self.gate(x).softmax(-1).sum()

    model = Gram()
    step = record(model, total(model, None, torch.randn(B, T, 16, requires_grad=True)), tokens=B * T)
    check(Hand(step, B * T, {"other_products": 3 * 2 * 2 * B * T * T * 16}))
