"""Tensors that are not plain: wrappers, nested, fake, distributed, sparse, complex, quantized."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import torchledger as tl

PRODUCT = 2 * 8 * 16 * 16


@pytest.fixture
def linear() -> nn.Linear:
    return nn.Linear(16, 16)


def assert_books(ledger: tl.Ledger) -> None:
    report = ledger.report
    assert report.faults == ()
    assert report.flops.uncounted == {}
    for step in report.steps:
        for memory in step.memory.values():
            assert sum(memory.peak.by_category.values()) == memory.peak.total_bytes


def test_jagged_tensors(linear: nn.Linear) -> None:
    x = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)], layout=torch.jagged, requires_grad=True)
    with tl.Ledger(linear) as ledger:
        linear(x).values().sum().backward()
    assert_books(ledger)
    flops = ledger.report.flops
    assert (flops.forward, flops.backward) == (PRODUCT, 2 * PRODUCT)
    assert flops.by_parameter["weight"] == tl.ParameterFlops(PRODUCT, PRODUCT, PRODUCT, 0)


def test_strided_nested_tensors(linear: nn.Linear) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)])
    with tl.Ledger(linear) as ledger, torch.no_grad():
        linear(x)
    assert_books(ledger)
    assert ledger.report.flops.total == PRODUCT


def test_wrappers_are_seen_through(linear: nn.Linear) -> None:
    x = TwoTensor(torch.randn(8, 16), torch.randn(8, 16))
    with tl.Ledger(linear) as ledger:
        linear(x).sum().backward()
    assert_books(ledger)
    assert ledger.report.flops.forward == 2 * PRODUCT  # one for each of the two tensors inside
    assert ledger.report.steps[0].memory["cpu"].peak.inputs == 2 * 8 * 16 * 4


@pytest.mark.parametrize("around", [True, False])
def test_fake_tensors(around: bool) -> None:
    def loop(ledger: tl.Ledger | None = None) -> None:
        model = nn.Linear(1000, 1000)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.randn(8, 1000)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if ledger is not None:
                ledger.step()

    if around:
        with FakeTensorMode(), tl.Ledger() as ledger:
            loop(ledger)
    else:
        with tl.Ledger() as ledger, FakeTensorMode():
            loop(ledger)
    assert_books(ledger)
    step = ledger.report.steps[1]
    assert step.flops.total == 2 * 2 * 8 * 1000 * 1000
    assert step.peak.parameters == 4_004_000
    assert step.peak.optimizer_state == 2 * 4_004_000 + 8


@pytest.fixture
def mesh() -> Iterator[object]:
    from torch.distributed.tensor import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


def test_distributed_tensors_count_this_ranks_part_once(mesh: object) -> None:  # torchtitan#1989, OLMo-core#680
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters())
    with tl.Ledger(model, optimizer) as ledger:
        for _ in range(2):
            model(torch.randn(8, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            ledger.step()
    assert_books(ledger)
    local = 2 * 8 * 16 * 8
    step = ledger.report.steps[1]
    assert (step.flops.forward, step.flops.backward) == (2 * local, 3 * local)
    assert step.flops.global_total == 4 * step.flops.total
    assert step.flops.by_parameter == {
        "0.weight": tl.ParameterFlops(local, 0, local, 0),
        "2.weight": tl.ParameterFlops(local, local, local, 0),
    }
    end = step.memory["cpu"].end
    weights = 4 * (16 * 8 + 8 + 8 * 16 + 16)
    assert (end.parameters, end.other) == (weights, 0)
    assert end.optimizer_state == 2 * weights + 4 * 4


def test_a_product_on_distributed_leaves_outside_any_module_is_forward(mesh: object) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    x = distribute_tensor(torch.randn(8, 16), mesh, [Replicate()])  # type: ignore[arg-type]
    w = nn.Parameter(distribute_tensor(torch.randn(32, 16), mesh, [Shard(0)]))  # type: ignore[arg-type]
    with tl.Ledger() as ledger:
        nn.functional.linear(x, w).sum().backward()
    assert_books(ledger)
    assert (ledger.report.flops.forward, ledger.report.flops.outside) == (2 * 8 * 16 * 8, 0)


def test_sparse_and_complex_operands() -> None:
    a = torch.eye(16).to_sparse().requires_grad_()
    b = torch.randn(16, 4)
    with tl.Ledger() as ledger:
        torch.sparse.mm(a, b).sum().backward()
    assert_books(ledger)
    assert ledger.report.flops.forward == 2 * 16 * 4
    with tl.Ledger() as ledger:
        torch.randn(4, 5, dtype=torch.complex64) @ torch.randn(5, 6, dtype=torch.complex64)
    assert_books(ledger)
    assert ledger.report.flops.total == 4 * 2 * 120


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr", "to_mkldnn"])
def test_odd_layouts_do_not_disturb(layout: str) -> None:
    x = torch.randn(8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tl.Ledger() as ledger:
            y = getattr(x, layout)()
            torch.equal(y.to_dense(), x)
    assert_books(ledger)
    del y


def test_quantized_tensors_do_not_disturb() -> None:
    with tl.Ledger() as ledger:
        q = torch.quantize_per_tensor(torch.randn(16, 16), 0.1, 0, torch.qint8)
        q.dequantize().sum()
    assert_books(ledger)
    assert ledger.report.steps[0].memory["cpu"].peak.total_bytes >= 256


def test_zero_sized_and_scalar_tensors() -> None:
    model = nn.Linear(0, 4)
    with tl.Ledger(model) as ledger, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(torch.randn(8, 0)).sum().backward()
        torch.tensor(3.0) * 2
    assert_books(ledger)
    assert ledger.report.flops.total == 0
