"""Sparse gradients, which autograd stores whole where no mode is on, against the profiler and storages by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchledger as tl
from oracles import profiler_bytes, profiler_peaks, storage_bytes

IDS = torch.randint(0, 200, (4, 8), generator=torch.Generator().manual_seed(0))
OTHERS = torch.randint(0, 200, (3, 8), generator=torch.Generator().manual_seed(1))
Program = Callable[[nn.Module], None]


def lone(table: nn.Module) -> None:
    table(IDS).square().sum().backward()


def expanded(table: nn.Module) -> None:
    table(IDS).sum().backward()  # values without memory of their own: copied in any case


def twice(table: nn.Module) -> None:
    (table(IDS).sum() + table(OTHERS).square().sum()).backward()


def accumulated(table: nn.Module) -> None:
    for ids in (IDS, OTHERS, IDS):
        table(ids).square().sum().backward()


def given(table: nn.Module) -> None:
    table(IDS).backward(torch.ones(4, 8, 16))  # the values are the caller's


def dense_too(table: nn.Module) -> None:
    (table(IDS).sum() + table.weight.square().sum()).backward()  # type: ignore[operator]


def dense_after(table: nn.Module) -> None:
    lone(table)
    table.weight.square().sum().backward()  # type: ignore[operator]


def dense_before(table: nn.Module) -> None:
    table.weight.square().sum().backward()  # type: ignore[operator]
    lone(table)


def ids_gone(table: nn.Module) -> None:
    batch = torch.arange(640) % 7
    table(batch[:32]).square().sum().backward()
    del batch  # the gradient's indices keep all of it
    torch.ones(2000)


def hooked(table: nn.Module) -> None:
    handle = table.weight.register_hook(lambda grad: grad * 2)  # type: ignore[operator]
    lone(table)
    handle.remove()


def recurrent(table: nn.Module) -> None:
    state = torch.zeros(8, 16)
    for ids in IDS:
        state = torch.tanh(table(ids) + state)
    state.square().sum().backward()


def graph_kept(table: nn.Module) -> None:
    table(IDS).square().sum().backward(retain_graph=True)


@pytest.mark.parametrize(
    "program",
    [
        lone,
        expanded,
        twice,
        accumulated,
        given,
        dense_too,
        dense_after,
        dense_before,
        ids_gone,
        hooked,
        recurrent,
        graph_kept,
    ],
)
def test_tables_peak_as_without_a_ledger(program: Program) -> None:
    table = nn.Embedding(200, 16, sparse=True)

    def run() -> None:
        program(table)

    run()
    table.zero_grad(set_to_none=True)
    peak, end = profiler_bytes(run)
    table.zero_grad(set_to_none=True)
    with tl.Ledger(table) as ledger:
        run()
    memory = ledger.report.steps[0].memory["cpu"]
    assert memory.peak.total_bytes - memory.start.total_bytes == pytest.approx(peak, abs=64)  # boxed numbers
    assert memory.end.total_bytes - memory.start.total_bytes == pytest.approx(end, abs=64)
    assert ledger.report.faults == ()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("shape", [(64, 32), (7, 3)])
def test_bags_peak_as_without_a_ledger(mode: str, shape: tuple[int, int]) -> None:
    bag = nn.EmbeddingBag(1000, 64, sparse=mode != "max", mode=mode)
    ids = torch.randint(0, 1000, shape)

    def run() -> None:
        out = bag(ids)
        out.sum().backward()
        bag.weight.grad = None

    run()
    least, most = profiler_peaks(run)
    with tl.Ledger(bag) as ledger:
        run()
    memory = ledger.report.steps[0].memory["cpu"]
    assert least - 64 <= memory.peak.total_bytes - memory.start.total_bytes <= most + 64


def test_a_known_peak_with_what_the_op_makes_inside_itself() -> None:
    bag, ids = nn.EmbeddingBag(1000, 64, sparse=True, mode="sum"), torch.randint(0, 1000, (64, 32))

    def run() -> None:
        bag(ids).sum().backward()
        bag.weight.grad = None

    run()
    peak, _ = profiler_bytes(run)
    assert peak == 542224
    with tl.Ledger(bag) as ledger:
        run()
    memory = ledger.report.steps[0].memory["cpu"]
    assert memory.peak.total_bytes - memory.start.total_bytes == peak
    assert memory.peak.workspace == (64 * 32 + 1) * 8  # the bag of each id, which a sum's forward does not keep


def test_weighted_bags_and_offsets() -> None:
    bag = nn.EmbeddingBag(200, 16, sparse=True, mode="sum", include_last_offset=True)
    ids, offsets, weights = torch.randint(0, 200, (40,)), torch.tensor([0, 10, 20, 40]), torch.rand(40)

    def run() -> None:
        bag(ids, offsets, weights).square().sum().backward()
        bag.weight.grad = None

    run()
    least, most = profiler_peaks(run)
    with tl.Ledger(bag) as ledger:
        run()
    memory = ledger.report.steps[0].memory["cpu"]
    assert least - 64 <= memory.peak.total_bytes - memory.start.total_bytes <= most + 64


def test_a_stored_gradient_is_its_values_and_the_ids_stay_inputs() -> None:
    table = nn.Embedding(200, 16, sparse=True)
    with tl.Ledger(table) as ledger:
        lone(table)
    end = ledger.report.steps[0].memory["cpu"].end
    assert (end.gradients, end.inputs) == (4 * 8 * 16 * 4, 4 * 8 * 8)
    assert table.weight.grad is not None


def test_steps_that_keep_their_gradients() -> None:
    table = nn.Embedding(200, 16, sparse=True)
    sizes = []
    with tl.Ledger(table) as ledger:
        for _ in range(3):
            lone(table)
            assert table.weight.grad is not None
            sizes.append(storage_bytes([table.weight.grad._values(), table.weight.grad._indices()]))
            ledger.step()
        table.weight.grad = None
    steps = [step.memory["cpu"] for step in ledger.report.steps[:3]]
    sizes[0] -= IDS.nbytes  # the first step's indices are the ids themselves
    assert [step.end.gradients for step in steps] == sizes
    assert [step.end.total_bytes for step in steps[:2]] == [step.start.total_bytes for step in steps[1:]]


def test_a_gradient_that_goes_to_two_parameters_is_copied_once() -> None:
    first, second = (torch.zeros(200, 16, requires_grad=True) for _ in range(2))
    with tl.Ledger() as ledger:
        F.embedding(IDS, first + second, sparse=True).square().sum().backward()
    end = ledger.report.steps[0].memory["cpu"].end
    assert first.grad is not None
    assert second.grad is not None
    assert end.gradients == 2 * 2048 + 256
    assert ledger.report.faults == ()


def test_optimizers_of_sparse_gradients() -> None:
    for make in (torch.optim.SparseAdam, torch.optim.SGD, torch.optim.Adagrad):
        table = nn.Embedding(200, 16, sparse=True)
        optimizer = make(list(table.parameters()), lr=0.1)

        def run() -> None:
            lone(table)  # noqa: B023
            optimizer.step()  # noqa: B023
            optimizer.zero_grad()  # noqa: B023

        run()
        _, end = profiler_bytes(run)
        least, most = profiler_peaks(run)
        with tl.Ledger(table, optimizer) as ledger:
            run()
        memory = ledger.report.steps[0].memory["cpu"]
        ours = memory.peak.total_bytes - memory.start.total_bytes
        assert least - 64 <= ours <= most + 64, make
        assert memory.end.total_bytes - memory.start.total_bytes == pytest.approx(end, abs=64)


def test_values_are_the_same() -> None:
    def gradient(watched: bool) -> torch.Tensor:
        torch.manual_seed(0)
        table = nn.Embedding(200, 16, sparse=True)
        if watched:
            with tl.Ledger(table):
                accumulated(table)
        else:
            accumulated(table)
        assert table.weight.grad is not None
        return table.weight.grad.to_dense()

    assert torch.equal(gradient(True), gradient(False))
