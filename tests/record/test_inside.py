"""The table of ops that allocate inside themselves, measured by the profiler alone; and what a report says of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchledger as tl
from oracles import bytes_inside_ops
from torchledger.read.inside import count_calls, unaudited_lines
from torchledger.record.inside import ALLOCATING
from torchledger.render.markdown import render_markdown
from torchledger.render.text import render_text

aten = torch.ops.aten
Call = Callable[[], torch.Tensor]


def grows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def image(*, channels: int = 8) -> torch.Tensor:
    return grows(2, channels, 16, 16)


def batch_norm_backward(x: torch.Tensor) -> torch.Tensor:
    """The op that an exported program's batch norm has."""
    ones = torch.ones(8)
    saved = (ones, ones, torch.empty(0, dtype=torch.uint8))
    gradient: torch.Tensor = aten.batch_norm_backward(
        x, x, ones, ones, ones, saved[0], saved[1], True, 1e-5, [True] * 3, saved[2]
    )[0]
    return gradient


ALLOCATE: dict[str, Call] = {
    "convolution convolution_backward": lambda: nn.Conv2d(8, 8, 3)(image()),
    "convolution convolution_backward ": lambda: nn.Conv1d(8, 8, 3)(grows(2, 8, 64)),
    "native_batch_norm_backward": lambda: nn.BatchNorm2d(8)(image()),
    "batch_norm_backward": lambda: batch_norm_backward(torch.randn(2, 8, 16, 16)),
    "native_layer_norm_backward": lambda: nn.LayerNorm(64)(grows(32, 64)),
    "native_group_norm_backward": lambda: nn.GroupNorm(2, 8)(image()),
    "mkldnn_rnn_layer mkldnn_rnn_layer_backward": lambda: nn.LSTM(8, 16)(grows(5, 3, 8))[0],
    "upsample_linear1d": lambda: F.interpolate(grows(2, 8, 64), scale_factor=2, mode="linear"),
    "upsample_bilinear2d": lambda: F.interpolate(image(), scale_factor=2, mode="bilinear"),
    "upsample_bicubic2d": lambda: F.interpolate(image(), scale_factor=2, mode="bicubic"),
    "upsample_trilinear3d": lambda: F.interpolate(grows(2, 4, 8, 8, 8), scale_factor=2, mode="trilinear"),
    "_upsample_bilinear2d_aa": lambda: F.interpolate(image(), size=(8, 8), mode="bilinear", antialias=True),
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward": (
        lambda: F.scaled_dot_product_attention(grows(1, 2, 32, 16), grows(1, 2, 32, 16), grows(1, 2, 32, 16))
    ),
    "_safe_softmax": lambda: aten._safe_softmax(grows(32, 64).detach(), -1),
    "_euclidean_dist": lambda: torch.cdist(grows(64, 16), grows(32, 16)),
    "_trilinear": lambda: nn.Bilinear(16, 16, 8)(grows(64, 16), grows(64, 16)),
    "_embedding_bag _embedding_bag_backward": (
        lambda: nn.EmbeddingBag(100, 16, mode="mean")(torch.randint(0, 100, (32, 8)))
    ),
    "_ctc_loss_backward": (
        lambda: F.ctc_loss(F.log_softmax(grows(50, 4, 20), 2), torch.randint(1, 20, (4, 10)), (50,) * 4, (10,) * 4)
    ),
    "mse_loss": lambda: F.mse_loss(grows(32, 64), torch.rand(32, 64)),
    "smooth_l1_loss": lambda: F.smooth_l1_loss(grows(32, 64), torch.rand(32, 64)),
    "huber_loss": lambda: F.huber_loss(grows(32, 64), torch.rand(32, 64)),
    "binary_cross_entropy_with_logits": (lambda: F.binary_cross_entropy_with_logits(grows(32, 64), torch.rand(32, 64))),
    "logsumexp": lambda: grows(32, 64).logsumexp(1),
    "im2col": lambda: F.unfold(image(), 3),
    "sort": lambda: grows(32, 256).sort(1)[0],
    "kthvalue": lambda: grows(32, 64).kthvalue(3, 1)[0],
    "multinomial": lambda: torch.multinomial(torch.rand(32, 64), 5),
    "_unique2": lambda: torch.unique(torch.randint(0, 99, (64, 100))),
    "linalg_inv_ex": lambda: torch.linalg.inv(torch.eye(32)),
    "linalg_qr": lambda: torch.linalg.qr(torch.rand(32, 16))[0],
    "linalg_matrix_exp": lambda: torch.linalg.matrix_exp(torch.rand(16, 16) * 0.01),
    "_linalg_eigh": lambda: torch.linalg.eigh(torch.eye(32))[0],
    "_linalg_svd": lambda: torch.linalg.svd(torch.rand(32, 32))[1],
}

PLAIN: dict[str, Call] = {
    "linear": lambda: nn.Linear(64, 32)(grows(16, 64)).relu(),
    "bmm": lambda: torch.bmm(grows(4, 16, 16), grows(4, 16, 16)).tanh(),
    "layer_norm": lambda: F.layer_norm(torch.ones(32, 64), (64,)),
    "softmax": lambda: F.softmax(grows(32, 64), 1),
    "cross_entropy": lambda: F.cross_entropy(grows(32, 64), torch.randint(0, 64, (32,))),
    "embedding": lambda: nn.Embedding(100, 16)(torch.randint(0, 100, (8, 4))),
    "dropout": lambda: F.dropout(grows(32, 64)),
    "gelu": lambda: F.gelu(grows(32, 64)),
    "silu": lambda: F.silu(grows(32, 64)),
    "max_pool": lambda: F.max_pool2d(image(), 2),
    "avg_pool": lambda: F.avg_pool2d(image(), 2),
    "gather": lambda: grows(32, 64).gather(1, torch.zeros(32, 4, dtype=torch.long)),
    "cat": lambda: torch.cat([grows(8, 8), grows(8, 8)]),
    "pad": lambda: F.pad(image(), (1, 1, 1, 1)),
    "cumsum": lambda: grows(32, 64).cumsum(1),
}


def backward(call: Call) -> None:
    y = call()
    if y.requires_grad:
        y.backward(torch.ones_like(y) if y.dim() else None)


def measured(call: Call) -> set[str]:
    backward(call)
    return {op for op, nbytes in bytes_inside_ops(lambda: backward(call)).items() if nbytes > 64}


@pytest.mark.parametrize("ops", ALLOCATE)
def test_what_the_table_names_allocates_inside_itself(ops: str) -> None:
    assert {f"aten.{name}" for name in ops.split()} <= measured(ALLOCATE[ops])


@pytest.mark.parametrize("name", PLAIN)
def test_what_it_does_not_name_does_not(name: str) -> None:
    found = measured(PLAIN[name])
    assert not found & ALLOCATING
    assert not found


def test_each_op_of_the_table_is_measured() -> None:
    tested = {f"aten.{name}" for ops in ALLOCATE for name in ops.split()}
    assert tested == ALLOCATING


def test_a_report_says_which_ran() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    x = torch.randn(2, 3, 8, 8)
    with tl.Ledger(model) as ledger:
        for _ in range(3):
            for _ in range(2):
                model(x).sum().backward()
            ledger.step()
    (line,) = ledger.report.blind_spots
    assert line.startswith(
        "6 calls of aten.convolution, 6 of aten.convolution_backward, 6 of aten.native_batch_norm_backward allocate"
    )
    assert "Ledger(audit=True)" in line
    for page in (render_text(ledger.report, width=1000), render_markdown(ledger.report)):
        assert page.index("Not seen") > page.index("Largest rows")
        assert "6 calls of aten" in page
    assert tl.Report.from_dict(ledger.report.to_dict()).blind_spots == (line,)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_plain_loop_has_none_and_another_device_neither(device: str) -> None:
    with tl.Ledger() as ledger:
        nn.Linear(8, 8, device=device)(torch.ones(4, 8, device=device)).relu().sum().backward()
        if device == "meta":
            nn.Conv2d(3, 4, 3, device=device)(torch.ones(1, 3, 8, 8, device=device))
    assert ledger.report.blind_spots == ()


def test_products_in_16_bits_are_named() -> None:
    a = torch.ones(16, 16, dtype=torch.bfloat16)
    with tl.Ledger() as ledger:
        for n in (1, 3, 2):
            for _ in range(n):
                _ = a @ a
            ledger.step()
    (line,) = ledger.report.blind_spots
    assert line.startswith("2 calls of aten.mm in 16 bits")  # of the last step; no other journal is kept
    assert ledger.report.blind_spots == (line,)


def test_most_calls_come_first_and_the_others_are_counted() -> None:
    assert unaudited_lines({}, []) == ()
    assert unaudited_lines({"a": 1, "b": 4}, [])[0].startswith("4 calls of b, 1 of a allocate")
    assert count_calls({str(i): 10 - i for i in range(9)}).endswith("5 of 5 and 9 of 3 other ops")


def test_the_values_are_the_programs() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 4))
    x = torch.randn(2, 3, 8, 8)
    plain = model(x)
    with tl.Ledger():
        watched = model(x)
    assert torch.equal(plain, watched)
