"""The word "cuda": what a program asks of tensors and factories."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchledger.simulation.device import SimulatedDevice

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(3, device="cuda"),
        lambda: torch.zeros(3, device="cuda:0"),
        lambda: torch.ones(3, device=torch.device("cuda")),
        lambda: torch.full((3,), 2.0, device=0),
        lambda: torch.rand(3, device="cuda", dtype=torch.float16),
        lambda: torch.randint(5, (3,), device="cuda"),
        lambda: torch.arange(3, device="cuda"),
        lambda: torch.eye(3, device="cuda"),
        lambda: torch.tensor([1, 2, 3], device="cuda"),
        lambda: torch.tensor([1.0, 2.0], device="cuda", requires_grad=True),
        lambda: torch.as_tensor([1, 2], device="cuda"),
        lambda: torch.asarray([1, 2], device="cuda"),
        lambda: torch.zeros_like(torch.ones(3), device="cuda"),
        lambda: torch.ones(3).new_zeros(2, device="cuda"),
        lambda: torch.ones(3).to("cuda"),
        lambda: torch.ones(3).to(CUDA, torch.bfloat16),
        lambda: torch.ones(3).to(0),
        lambda: torch.ones(3).to(device="cuda", dtype=torch.half, non_blocking=True, copy=True),
        lambda: torch.ones(3).to(torch.empty(1, device="cuda")),
        lambda: torch.ones(3).cuda(),
        lambda: torch.ones(3).cuda(0, non_blocking=True),
        lambda: torch.ones(3).type_as(torch.ones(1, device="cuda")),
        lambda: torch.ones(3).type("torch.cuda.HalfTensor"),
        lambda: torch.cuda.FloatTensor(3),
        lambda: torch.zeros(3, device="cuda").new_tensor([1.0]),
        lambda: torch.zeros(3, device="cuda").new_empty(2),
        lambda: torch.zeros(3, device="cuda").new(2),
        lambda: nn.Linear(3, 3, device="cuda").weight,
        lambda: nn.Linear(3, 3).cuda().bias,
        lambda: nn.Linear(3, 3, device="meta").to_empty(device="cuda").weight,
        lambda: nn.Parameter(torch.ones(3, device="cuda")),
        lambda: copy.deepcopy(torch.ones(3, device="cuda")),
        lambda: copy.deepcopy(nn.Linear(3, 3).cuda()).weight,
        lambda: torch.hann_window(4, device="cuda"),
    ],
)
def test_ways_onto_the_device(make: Callable[[], torch.Tensor], h100: SimulatedDevice) -> None:
    tensor = make()
    assert tensor.device == CUDA
    assert tensor.is_cuda
    assert not tensor.is_cpu
    assert not tensor.is_meta
    assert tensor.get_device() == 0
    assert isinstance(tensor, torch.Tensor)
    assert type(tensor) in (torch.Tensor, nn.Parameter)
    assert torch.cuda.memory_allocated() >= 512
    assert "device='cuda:0'" in repr(tensor)
    del tensor
    assert torch.cuda.memory_allocated() == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3, device="cuda").cpu(),
        lambda: torch.ones(3, device="cuda").to("cpu"),
        lambda: torch.zeros_like(torch.ones(3, device="cuda"), device="cpu"),
        lambda: torch.ones(3),
        lambda: torch.tensor([1.0]),
        lambda: nn.Linear(3, 3).cuda().cpu().weight,
    ],
)
def test_ways_off_the_device(make: Callable[[], torch.Tensor], h100: SimulatedDevice) -> None:
    tensor = make()
    assert tensor.device.type == "cpu"
    assert not tensor.is_cuda
    tensor.detach().numpy()
    assert torch.cuda.memory_allocated() == 0


def test_modules_keep_their_parameters(h100: SimulatedDevice) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert model.cuda() is model
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert all(type(p) is nn.Parameter and p.is_leaf and p.requires_grad for p in model.parameters())
    assert optimizer.param_groups[0]["params"][0].is_cuda
    assert model[1].running_mean.is_cuda
    model.half()
    assert model[0].weight.dtype is torch.float16


def test_what_is_there_already_is_not_copied(h100: SimulatedDevice) -> None:
    x = torch.ones(3, device="cuda")
    assert x.to("cuda") is x
    assert x.cuda() is x
    assert x.to("cuda:0", torch.float32) is x
    assert x.to(x) is x
    assert x.to("cuda", copy=True) is not x
    y = torch.ones(3)
    assert y.to("cpu") is y
    assert y.cpu() is y


def test_device_contexts(h100: SimulatedDevice) -> None:
    with torch.device("cuda"):
        model = nn.Linear(4, 4)
        assert torch.zeros(2).is_cuda
        assert torch.tensor([1]).is_cuda
        assert not torch.zeros(2, device="cpu").is_cuda
        with torch.device("cpu"):
            assert not torch.zeros(2).is_cuda
    assert model.weight.is_cuda
    assert not torch.zeros(2).is_cuda
    torch.set_default_device("cuda")
    assert torch.zeros(2).is_cuda
    assert torch.get_default_device().type == "cuda"


def test_meta_stays_meta(h100: SimulatedDevice) -> None:
    x = torch.empty(3, device="meta")
    assert x.device.type == "meta"
    assert x.is_meta
    assert (x + x).is_meta
    assert torch.ones(3, device="cuda").to("meta").is_meta
    with torch.device("meta"):
        assert nn.Linear(2, 2).weight.is_meta
    assert torch.cuda.memory_allocated() == 0


@pytest.mark.parametrize(
    "use",
    [
        lambda x, y: x + y,
        torch.mm,
        lambda x, y: torch.cat([x, y]),
        lambda x, y: x.add_(y),
        nn.functional.linear,
        lambda x, y: torch.where(x > 0, x, y),
        lambda x, y: nn.Linear(4, 4)(x),
    ],
)
def test_two_devices_are_refused_as_a_device_refuses_them(use: Any, h100: SimulatedDevice) -> None:
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cpu"):
        use(torch.ones(4, 4, device="cuda"), torch.ones(4, 4))


def test_what_may_lie_on_the_host(h100: SimulatedDevice) -> None:
    x = torch.ones(4, 4, device="cuda")
    assert (x * torch.tensor(2.0)).is_cuda
    assert x[torch.tensor([0, 1])].is_cuda
    x[torch.tensor([0])] = torch.zeros(4, device="cuda")
    x.copy_(torch.ones(4, 4))
    host = torch.zeros(4, 4)
    host.copy_(x)
    assert host.sum() == 16 or h100.assumptions


def test_other_devices_and_arrays_are_refused(h100: SimulatedDevice) -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(3, device="cuda:1")
    x = torch.ones(3, device="cuda")
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        x.numpy()
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        x.pin_memory()


def test_addresses_are_the_allocators(h100: SimulatedDevice) -> None:
    x = torch.ones(100, device="cuda")
    assert x.data_ptr()
    assert x[10:].data_ptr() - x.data_ptr() == 40
    assert x.data_ptr() != torch.ones(100, device="cuda").data_ptr()
    assert x.view(10, 10).data_ptr() == x.data_ptr()


def test_printing(h100: SimulatedDevice) -> None:
    assert repr(torch.tensor([1, 2], device="cuda")) == "tensor([1, 2], device='cuda:0')"
    loss = nn.Linear(4, 1).cuda()(torch.randn(2, 4, device="cuda")).mean()
    assert repr(loss) == "tensor(1., device='cuda:0', grad_fn=<MeanBackward0>)"
    assert f"{loss:.2f} {loss.item()}" == "1.00 1.0"
    assert repr(torch.randn(9, 9, device="cuda")) == "tensor(..., device='cuda:0', size=(9, 9), dtype=torch.float32)"
