"""The registry against what did not come from it: torch's own counter where that is right, and the profiler.

The profiler sees the products that an op's kernel calls inside itself, which no dispatch mode sees.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations_with_replacement
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from flops.counting import count


def mlp() -> Tensor:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))(torch.ones(8, 16, requires_grad=True))


def cnn() -> Tensor:
    layers = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.ConvTranspose2d(8, 4, 3), nn.Conv2d(4, 2, 1))
    return layers(torch.ones(2, 3, 9, 9, requires_grad=True))


def attention() -> Tensor:
    x = torch.ones(2, 8, 16, requires_grad=True)
    return (x @ x.mT).softmax(-1) @ x + torch.einsum("bij,bik->bjk", x, x).sum()


@pytest.mark.parametrize("model", [mlp, cnn, attention])
def test_as_torchs_counter_where_that_is_right(model: Callable[[], Tensor]) -> None:
    with FlopCounterMode(display=False) as theirs:
        model().sum().backward()
    ours = count(lambda: model().sum().backward())
    assert ours.total == theirs.get_total_flops() > 0
    theirs_by_op = {str(op): flops for op, flops in theirs.get_flop_counts()["Global"].items()}
    assert dict(ours.by_op) == theirs_by_op


def test_where_torchs_counter_is_wrong() -> None:
    conv = nn.Conv2d(8, 8, 3, padding=1, groups=8)

    def run() -> None:
        conv(torch.ones(2, 8, 10, 10, requires_grad=True)).sum().backward()

    with FlopCounterMode(display=False) as theirs:
        run()
    assert count(run).total == 86_400
    assert theirs.get_total_flops() >= 86_400


PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::_addmm_activation": 1, "aten::baddbmm": 1}


def profiled(call: Callable[[], Any]) -> int:
    """FLOPs of the products that the profiler sees, from their shapes, those inside other products left out."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        call()
    total = 0
    for event in profiler.events():
        parent = event.cpu_parent
        while parent is not None and parent.name not in PRODUCTS:
            parent = parent.cpu_parent
        if event.name in PRODUCTS and parent is None:
            a, b = event.input_shapes[PRODUCTS[event.name] : PRODUCTS[event.name] + 2]
            flops = 2 * b[-1]
            for size in a:
                flops *= size
            total += flops
    return total


ENCODER = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2).eval()
HEADS = nn.MultiheadAttention(64, 4, batch_first=True).eval()
PADDING = torch.tensor([[False] * 5 + [True] * 4, [False] * 9])
X = torch.ones(2, 9, 64)


@pytest.mark.parametrize(
    "call",
    [
        lambda: ENCODER(X),
        lambda: ENCODER(X, src_key_padding_mask=PADDING),
        lambda: HEADS(X, X, X),
        lambda: HEADS(X, X, X, need_weights=False),
        lambda: F.bilinear(torch.ones(8, 5), torch.ones(8, 6), torch.ones(3, 5, 6)),
        lambda: torch.ops.aten._trilinear(
            torch.ones(4, 5, 6), torch.ones(5, 6), torch.ones(4), [], [0], [1, 2], [1, 2], 0
        ),
        lambda: torch.cdist(torch.ones(40, 5), torch.ones(30, 5)),
        lambda: torch.ops.aten._cdist_forward(torch.ones(2, 30, 5), torch.ones(2, 20, 5), 2.0, None),
        lambda: F.affine_grid(torch.ones(2, 2, 3), [2, 3, 4, 5], align_corners=False),
        lambda: F.affine_grid(torch.ones(2, 3, 4), [2, 1, 3, 4, 5], align_corners=False),
        lambda: F.scaled_dot_product_attention(X, X, X, attn_mask=torch.ones(9, 9, requires_grad=True)),
    ],
)  # fmt: skip
def test_as_the_profiler_sees_inside_kernels(call: Callable[[], Any]) -> None:
    with torch.no_grad():
        assert count(call).total == profiled(call) > 0


SAMPLES: dict[str, Callable[[], Any]] = {
    "grid_sample": lambda: F.grid_sample(torch.ones(1, 2, 5, 5), torch.zeros(1, 4, 4, 2), align_corners=False),
    "embedding_bag": lambda: nn.EmbeddingBag(10, 4)(torch.zeros(2, 3, dtype=torch.long)),
    "interpolate": lambda: F.interpolate(torch.ones(1, 2, 5, 5), scale_factor=2.0, mode="bilinear"),
    "layer_norm": lambda: F.layer_norm(torch.ones(4, 8), [8]),
    "group_norm": lambda: F.group_norm(torch.ones(4, 8, 3), 2),
    "batch_norm": lambda: nn.BatchNorm2d(3)(torch.ones(2, 3, 4, 4)),
    "ctc_loss": lambda: F.ctc_loss(
        torch.zeros(9, 2, 5), torch.ones(2, 3, dtype=torch.long), torch.tensor([9, 9]), torch.tensor([3, 3])
    ),
    "cross": lambda: torch.linalg.cross(torch.ones(4, 3), torch.ones(4, 3)),
    "pdist": lambda: torch.pdist(torch.ones(40, 5)),
    "cdist": lambda: torch.cdist(torch.ones(40, 5), torch.ones(30, 5), p=1.0),
    "cumprod": lambda: torch.cumprod(torch.ones(5, 5), 0),
    "lerp": lambda: torch.lerp(torch.ones(5), torch.ones(5), torch.ones(5)),
    "prelu": lambda: F.prelu(torch.ones(2, 3), torch.ones(3)),
    "histogram": lambda: torch.histogram(torch.ones(5), 3),
    "lu_unpack": lambda: torch.lu_unpack(torch.eye(4), torch.tensor([1, 2, 3, 4], dtype=torch.int32)),
    "adam": lambda: torch.optim.Adam([nn.Parameter(torch.ones(3), requires_grad=True)]).step(),
}  # fmt: skip


def test_trilinear_as_the_profiler_sees_it() -> None:
    """All ways to spread three tensors over three dimensions, each summed and unrolled along every dimension."""
    sizes = (2, 3, 4)
    subsets = [[d for d in range(3) if bits >> d & 1] for bits in range(8)]
    tried = 0
    for number, missing in enumerate(combinations_with_replacement(subsets[:7], 3)):
        if set.intersection(*map(set, missing)):
            continue
        tensors = [torch.ones([sizes[d] for d in range(3) if d not in some]) for some in missing]
        arguments = (*tensors, *missing, subsets[number % 8], number % 3)
        assert count(lambda a=arguments: torch.ops.aten._trilinear(*a)).total == profiled(
            lambda a=arguments: torch.ops.aten._trilinear(*a)
        ), arguments
        tried += 1
    assert tried > 20


@pytest.mark.parametrize("name", SAMPLES)
def test_known_zeros_call_no_product(name: str) -> None:
    assert profiled(SAMPLES[name]) == 0
    counted = count(SAMPLES[name])
    assert (counted.total, counted.uncounted) == (0, {})
