"""The whole ledger on cases of public reports: FLOPs by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchledger as tl


def flops_of(run: Callable[[], Any], *models: nn.Module) -> tl.FlopStatement:
    with tl.Ledger(list(models)) as ledger:
        run()
    assert ledger.report.faults == ()
    assert ledger.report.flops.uncounted == {}
    return ledger.report.flops


def test_attention_on_cpu() -> None:  # pytorch#195460
    q, k, v = (torch.randn(2, 4, 32, 16, requires_grad=True) for _ in range(3))
    flops = flops_of(lambda: F.scaled_dot_product_attention(q, k, v).sum().backward())
    assert (flops.forward, flops.backward) == (524_288, 1_310_720)
    assert flops.model == 524_288 + 1_048_576
    assert flops.attention_rescore == 262_144
    assert flops.causal_model == flops.model


def test_causal_attention_has_both_counts() -> None:
    q, k, v = (torch.randn(2, 4, 32, 16, requires_grad=True) for _ in range(3))
    flops = flops_of(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward())
    assert flops.model == 3 * 524_288
    assert flops.causal_model * 32 * 32 == flops.model * (32 * 33 // 2)


@pytest.mark.parametrize("training", [True, False])
def test_encoder_layer(training: bool) -> None:  # olmoearth_pretrain#605, ptflops#101
    model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).train(training)
    x = torch.randn(2, 32, 64)
    with torch.set_grad_enabled(training):
        flops = flops_of(lambda: model(x), model)
    assert flops.total == flops.forward == 4_718_592


def test_attention_five_ways() -> None:  # DeepSpeed#4723, calflops#26
    q, k, v = (torch.randn(2, 4, 16, 8) for _ in range(3))

    def by_bmm() -> torch.Tensor:
        a = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).softmax(-1)
        return torch.bmm(a, v.flatten(0, 1))

    ways = [
        lambda: (q @ k.transpose(-1, -2)).softmax(-1) @ v,
        by_bmm,
        lambda: torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v),
        lambda: F.scaled_dot_product_attention(q, k, v),
        lambda: torch.matmul(
            torch.baddbmm(torch.zeros(8, 16, 16), q.flatten(0, 1), k.flatten(0, 1).mT), v.flatten(0, 1)
        ),
    ]
    assert {flops_of(way).model for way in ways} == {4 * 2 * 4 * 16 * 16 * 8}


@pytest.mark.parametrize("need_weights", [True, False])
def test_multi_head_attention_fast_path_counts_as_the_slow_one(need_weights: bool) -> None:
    model = nn.MultiheadAttention(64, 4, batch_first=True)
    x = torch.randn(2, 32, 64)
    slow = flops_of(lambda: model(x, x, x, need_weights=need_weights), model)
    model.eval()
    with torch.no_grad():
        fast = flops_of(lambda: model(x, x, x, need_weights=need_weights), model)
    assert slow.total == fast.total == 2 * 64 * 64 * 192 + 4 * 2 * 32 * 32 * 64 + 2 * 64 * 64 * 64


def test_grouped_convolution_backward() -> None:  # pytorch#183405
    model = nn.Conv2d(8, 8, 3, padding=1, groups=8)
    x = torch.randn(2, 8, 10, 10, requires_grad=True)
    assert flops_of(lambda: model(x).sum().backward(), model).total == 86_400


def test_grouped_transposed_convolution() -> None:  # DeepSpeed#8323, fvcore#78
    model = nn.ConvTranspose2d(8, 16, 3, stride=2, groups=4)
    x = torch.randn(2, 8, 10, 10, requires_grad=True)
    flops = flops_of(lambda: model(x).sum().backward(), model)
    assert (flops.forward, flops.total) == (115_200, 345_600)


def test_lstm() -> None:  # fvcore#117
    model = nn.LSTM(16, 32, 2, bias=False)
    x = torch.randn(10, 4, 16, requires_grad=True)
    flops = flops_of(lambda: model(x)[0].sum().backward(), model)
    assert (flops.forward, flops.total) == (1_146_880, 3_440_640)
    rows = flops.by_parameter
    assert set(rows) == {f"weight_{kind}_l{layer}" for kind in ("ih", "hh") for layer in (0, 1)}
    assert sum(row.forward for row in rows.values()) == 1_146_880


def test_inference_mode() -> None:  # pytorch#126268, #138508
    linear = nn.Linear(16, 4)

    def run() -> None:
        with torch.inference_mode():
            linear(torch.randn(8, 16))
            F.conv2d(torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3))
            torch.bmm(torch.randn(2, 3, 4), torch.randn(2, 4, 5))
            torch.mv(torch.randn(8, 16), torch.randn(16))

    assert flops_of(run, linear).total == 1_024 + 7_776 + 240 + 256


def test_vectors_and_in_place_products() -> None:
    a, b, v = torch.randn(4, 5), torch.randn(5, 6), torch.randn(5)
    x, y = torch.randn(3, 4, 5), torch.randn(3, 5, 6)
    assert flops_of(lambda: torch.dot(v, v)).total == 2 * 5
    assert flops_of(lambda: torch.addmv(torch.zeros(4), a, v)).total == 2 * 20
    assert flops_of(lambda: torch.addbmm(torch.zeros(4, 6), x, y)).total == 2 * 3 * 120
    assert flops_of(lambda: torch.zeros(4, 6).addmm_(a, b)).total == 2 * 120
    assert flops_of(lambda: torch.zeros(3, 4, 6).baddbmm_(x, y)).total == 2 * 3 * 120
    assert flops_of(lambda: torch.mm(a, b, out=torch.empty(4, 6))).total == 2 * 120


def test_one_linear_three_times() -> None:  # DeepSpeed#7256
    layer = nn.Linear(100, 100)
    model = nn.ModuleDict({"a": layer, "b": layer, "c": layer})
    x = torch.randn(1, 100)
    flops = flops_of(lambda: [model[k](x) for k in "abc"], model)
    assert flops.total == flops.by_module["a"].total == 60_000
    assert flops.by_parameter == {"a.weight": tl.ParameterFlops(forward=60_000)}


def test_grouped_query_attention() -> None:  # pytorch#177169, torchtitan#2055
    q, k, v = torch.randn(1, 8, 64, 32), torch.randn(1, 2, 64, 32), torch.randn(1, 2, 64, 32)
    assert flops_of(lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)).total == 4_194_304


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_measure_the_same(tied: bool) -> None:  # trl#6708, torchtitan#274
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50, bias=False))
    if tied:
        model[1].weight = model[0].weight  # type: ignore[assignment]
    ids = torch.arange(8)
    assert flops_of(lambda: model(ids).sum().backward(), model).total == 3 * 2 * 8 * 16 * 50


def test_cond_runs_the_branch_that_is_taken() -> None:
    x = torch.randn(8, 8)
    taken = flops_of(lambda: torch.cond(torch.tensor(True), lambda x: x @ x, lambda x: x @ x @ x, (x,)))
    assert taken.total == 1_024


def test_integer_products_are_in_no_total() -> None:
    a = torch.randint(-4, 4, (32, 16), dtype=torch.int8)
    b = torch.randint(-4, 4, (16, 8), dtype=torch.int8)
    flops = flops_of(lambda: torch._int_mm(a, b))
    assert (flops.total, flops.int_ops, flops.by_op) == (0, 2 * 32 * 16 * 8, {})
