"""Values: known, assumed, and those of host tensors without data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchledger as tl
from torchledger.errors import SimulatedValueError
from torchledger.simulation.device import SimulatedDevice

IDS = [[1, 2, 0, 0], [3, 0, 0, 0]]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.ne(0).sum(-1),
        lambda x: x[:, 1:] * 2 - 1,
        lambda x: (x == 0).any(),
        lambda x: x.max(1).indices,
        lambda x: x.cumsum(0).flip(0),
        lambda x: torch.where(x > 0, x, -100),
        lambda x: x.masked_fill(x == 0, -1),
        lambda x: F.pad(x, (1, 0)),
        lambda x: x.t().contiguous().view(-1),
        lambda x: torch.cat([x, x]).unique(),
        lambda x: x.to(torch.int32).add_(5),
        lambda x: x.clone().index_fill_(1, torch.tensor([0], device=x.device), 7),
        lambda x: (lambda y: (y.__setitem__(0, 9), y)[1])(x.clone()),
        lambda x: torch.arange(4, device=x.device).expand(2, 4) + x,
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.tril(torch.ones(3, 3, dtype=torch.bool, device=x.device)),
        lambda x: torch.repeat_interleave(x[0], x[0]),
        lambda x: x.flatten().bincount(),
        lambda x: x.float().mean(),
    ],
)
def test_small_integers_are_what_they_would_be(
    function: Callable[[torch.Tensor], torch.Tensor], h100: SimulatedDevice
) -> None:
    assert function(torch.tensor(IDS, device="cuda")).tolist() == function(torch.tensor(IDS)).tolist()
    assert not h100.assumptions


def test_what_depends_on_weights_is_assumed_and_counted(h100: SimulatedDevice) -> None:
    x = torch.randn(4, 4, device="cuda")
    assert x.sum().item() == 1.0
    assert bool((x > 0).any()) is False
    assert x.argmax().item() == 1
    assert x.tolist() == [[1.0] * 4] * 4
    assert float(x[0, 0]) == 1.0
    assert not torch.isnan(x).any()
    assert h100.assumptions["float taken for 1.0"] == 3
    assert h100.assumptions["bool taken for False"] == 2
    assert h100.assumptions["integer taken for 1"] == 1


def test_a_known_value_is_forgotten_when_something_unknown_is_written(h100: SimulatedDevice) -> None:
    x = torch.tensor([1, 2, 3], device="cuda")
    x[0] = torch.randint(9, (), device="cuda")
    assert x.tolist() == [1, 1, 1]
    assert h100.assumptions["integer taken for 1"] == 1
    x.zero_()
    assert x.tolist() == [0, 0, 0]
    y = torch.zeros((), device="cuda")
    y += 2
    assert y.item() == 2
    y.copy_(torch.tensor(5.0))
    assert y.item() == 5


def test_step_counters_on_the_device_count(h100: SimulatedDevice) -> None:
    model = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    for _ in range(3):
        model(torch.ones(2, 4, device="cuda")).sum().backward()
        optimizer.step()
    state = optimizer.state[model.weight]
    assert state["step"].is_cuda
    assert state["step"].item() == 3
    norm = nn.BatchNorm1d(4).cuda()
    norm(torch.ones(2, 4, device="cuda"))
    assert norm.num_batches_tracked.item() == 1


# Host tensors without data


class Big(nn.Module):
    def __init__(self, read: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1024, 1024) * 0.02)
        self.linear = nn.Linear(1024, 1024)
        self.register_buffer("mask", torch.tril(torch.ones(1024, 1024)))
        self.register_buffer("positions", torch.arange(16))
        if read:
            self.weight[0, 0].item()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) @ self.weight


def test_weights_take_no_host_memory(h100: SimulatedDevice) -> None:
    model = Big()
    assert model.weight.device.type == "cpu"
    assert model.linear.weight.device.type == "cpu"
    for tensor in (model.weight, model.linear.weight, model.mask):
        assert torch.Tensor.untyped_storage(tensor).device.type == "meta"
    assert model.positions.tolist() == list(range(16))  # small ones are real
    assert model.linear.bias.untyped_storage().device.type == "cpu"
    assert torch.cuda.memory_allocated() == 0
    parameter = model.weight
    model.cuda()
    assert model.weight is parameter
    assert h100.allocator.stats.requested_bytes == 4 * (3 * 1024 * 1024 + 1024) + 16 * 8
    model(torch.ones(2, 1024, device="cuda")).sum().backward()
    model.cpu()
    assert torch.cuda.memory_stats()["requested_bytes.all.current"] == h100.hidden_bytes


def test_reading_them_is_a_clear_error(h100: SimulatedDevice) -> None:
    with pytest.raises(SimulatedValueError, match=r"0-dim, float32.*constructor makes have no data"):
        Big(read=True)
    model = Big()
    for use in (model.weight.detach().numpy, model.weight.tolist, lambda: bool(model.weight.sum() > 0)):
        with pytest.raises(SimulatedValueError, match="have no data"):
            use()
    real = torch.zeros(1024, 1024)
    with pytest.raises(SimulatedValueError, match="copied into a tensor with data"):
        real.copy_(model.weight)
    with pytest.raises(SimulatedValueError, match="tensors without data"):
        real.add_(model.weight)
    assert "size=(1024, 1024)" in repr(model.weight)


def test_large_host_tensors_elsewhere_are_real(h100: SimulatedDevice) -> None:
    x = torch.ones(1024, 1024)
    assert x.sum().item() == 1024 * 1024
    assert torch.randperm(1 << 18).sort().values.equal(torch.arange(1 << 18))


def test_the_host_is_a_device_of_the_ledger_too(h100: SimulatedDevice) -> None:
    model = Big()
    with tl.Ledger(model) as ledger, torch.no_grad():
        out = model(torch.ones(2, 1024))
    memory = ledger.report.steps[0].memory["cpu"]
    assert memory.start.parameters == 4 * (2 * 1024 * 1024 + 1024)
    assert out.device.type == "cpu"
    assert not ledger.report.faults
    assert ledger.report.flops.forward == 2 * 2 * 2 * 1024 * 1024


# Shapes that depend on values


def keep(mode: str, function: Any) -> tuple[Any, dict[str, int]]:
    with tl.simulate("h100-sxm", data_dependent=mode) as device:
        return function(), dict(device.assumptions)


@pytest.mark.parametrize(("mode", "rows"), [("worst", 100), ("balanced", 50)])
def test_unknown_masks(mode: str, rows: int) -> None:
    def function() -> Any:
        x = torch.randn(100, 4, device="cuda", requires_grad=True)
        mask = x[:, 0] > 0
        picked = x[mask]
        picked.sum().backward()
        x.detach()[mask] = 0.0
        return picked.shape, mask.nonzero().shape, torch.masked_select(x, mask[:, None]).shape, x.grad is not None

    found, assumptions = keep(mode, function)
    assert found == ((rows, 4), (rows, 1), (rows * 4,), True)
    assert sum(assumptions.values()) >= 3


def test_known_masks_are_exact_under_either_assumption() -> None:
    for mode in ("worst", "balanced"):
        (shape, values), assumptions = keep(
            mode,
            lambda: ((torch.arange(10, device="cuda") > 6).nonzero().shape, torch.arange(9, device="cuda").unique()),
        )
        assert shape == (3, 1)
        assert not assumptions
        assert values is not None


def route(tokens: int = 64, experts: int = 8, k: int = 2) -> list[int]:
    """A router as mixture-of-experts models have it: how many rows each expert sees."""
    scores = torch.randn(tokens, experts, device="cuda")
    chosen = scores.softmax(-1).topk(k, -1).indices
    masks = F.one_hot(chosen, num_classes=experts).permute(2, 1, 0)
    return [torch.where(masks[expert])[1].numel() for expert in range(experts)]


def test_routers() -> None:
    assert keep("balanced", route)[0] == [16] * 8
    assert keep("worst", route)[0] == [128] * 8

    def counts() -> list[int]:
        chosen = torch.randn(64, 8, device="cuda").topk(2).indices
        return torch.bincount(chosen.flatten(), minlength=8).tolist()

    assert keep("balanced", counts)[0] == [16] * 8
    assert keep("worst", counts)[0] == [128] + [0] * 7


def test_equality_of_unknown_tensors(h100: SimulatedDevice) -> None:
    x = torch.randn(3, device="cuda")
    assert torch.equal(x, x)
    assert not torch.equal(x, x + 1)
    assert not torch.equal(x, x[:2])
    assert torch.equal(torch.arange(3, device="cuda"), torch.arange(3, device="cuda"))


@pytest.mark.parametrize("shape", [(), (4, 4), (1024, 1024)])
def test_nothing_is_infinite(shape: tuple[int, ...], h100: SimulatedDevice) -> None:
    x = torch.randn(shape, device="cuda").exp()
    assert torch.isfinite(x).all()
    assert bool(torch.isfinite(x).cpu().all())
    assert not (~torch.isfinite(x)).any()
    assert not torch.isnan(x).any()
    assert not torch.isinf(x).any()
    assert (~torch.isnan(x)).all()
    assert (~(torch.isinf(x) | torch.isnan(x))).all()
    assert (x == x).all()
    assert (x != float("inf")).all()
    assert not (x > 0).any(), "what no such rule covers stays False"
    assert not (torch.isfinite(x) & (x > 0)).all()
    assert h100.assumptions["bool taken for True"] > 0


def test_a_mask_that_is_written_is_assumed_anew(h100: SimulatedDevice) -> None:
    x = torch.randn(4, device="cuda")
    mask = torch.isfinite(x)
    mask.copy_(x > 0)
    assert not mask.all()


def test_logic_that_follows_from_one_operand(h100: SimulatedDevice) -> None:
    """As a loop over tokens ends that stops at an unknown end mark, or else after so many."""
    unknown = torch.randn(3, device="cuda").argmax(0, keepdim=True).expand(3).contiguous() == 2
    done = unknown | torch.full((3,), True, device="cuda")
    assert done.tolist() == [True] * 3
    assert (torch.ones(3, dtype=torch.int64, device="cuda") & ~done).max() == 0
    assert (unknown & torch.zeros(3, dtype=torch.bool, device="cuda")).tolist() == [False] * 3
    unknown |= done
    assert unknown.tolist() == [True] * 3
    assert not h100.assumptions
