"""Backward formulas that a dispatch mode sends another way, against the profiler's events of the program alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import torchledger as tl
from oracles import profiler_peaks

Formula = Callable[[torch.Tensor], torch.Tensor]


def with_zero(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(torch.arange(x.numel()).view_as(x) == 5, 0.0)


def with_zeros(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(torch.arange(x.numel()).view_as(x) % 5 == 0, 0.0)


def positive(x: torch.Tensor) -> torch.Tensor:
    return x.cos() * 0.1 + 1


FORMULAS: dict[str, Formula] = {
    "cumprod": lambda x: x.sin().cumprod(1),
    "cumprod along the first": lambda x: x.sin().cumprod(0),
    "cumprod with a zero": lambda x: with_zero(x.sin()).cumprod(1),
    "cumprod, dense gradient": lambda x: x.sin().cumprod(-1).square(),
    "two cumprods": lambda x: x.sin().cumprod(1).cos().cumprod(0),
    "prod": lambda x: positive(x).prod(),
    "prod along one": lambda x: positive(x).prod(1),
    "prod along the first, kept": lambda x: positive(x).prod(0, keepdim=True),
    "prod with a zero": lambda x: with_zero(x.cos()).prod(),
    "prod with zeros": lambda x: with_zeros(x.cos()).prod(),
    "prod along one with zeros": lambda x: with_zeros(x.cos()).prod(1),
    "prod, transposed": lambda x: positive(x).t().prod(),
    "take": lambda x: (x @ x.t()).take(torch.arange(64)).square(),
    "take with repeats": lambda x: x.sin().take(torch.zeros(300, dtype=torch.long)),
    "masked_select": lambda x: x.sin().masked_select(torch.eye(*x.shape).bool()),
    "trace": lambda x: x.sin().trace(),
    "max of all": lambda x: x.sin().max(),
    "min of all": lambda x: x.sin().min(),
    "median of all": lambda x: x.sin().median(),
    "aminmax": lambda x: torch.stack(x.sin().aminmax()),
    "clamp by tensors": lambda x: x.sin().clamp(x.cos() * 0.1 - 0.5, x.cos() * 0.1 + 0.5),
    "cummax": lambda x: x.sin().cummax(1).values,
    "matrix_exp": lambda x: torch.linalg.matrix_exp(x.sin() * 0.01),
    "weighted logits": lambda x: F.binary_cross_entropy_with_logits(
        x.sin(), x.cos().abs(), weight=torch.ones_like(x), pos_weight=torch.ones(x.shape[1])
    ),
}


@pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS)
def test_peak_is_that_of_the_program_alone(formula: Formula) -> None:
    x = torch.linspace(0.5, 1.5, 96 * 96).view(96, 96).requires_grad_()

    def run() -> None:
        formula(x).sum().backward()
        x.grad = None

    run()
    least, most = profiler_peaks(run)
    with tl.Ledger() as ledger:
        run()
    memory = ledger.report.steps[0].memory["cpu"]
    assert least - 64 <= memory.peak.total_bytes - memory.start.total_bytes <= most + 64  # boxed numbers
    assert ledger.report.faults == ()


def test_known_peaks() -> None:
    x = torch.rand(256, 256, requires_grad=True)
    with tl.Ledger() as ledger:
        x.sin().cumprod(1).sum().backward()
    memory = ledger.report.steps[0].memory["cpu"]
    assert memory.peak.total_bytes - memory.start.total_bytes == pytest.approx(1638408, abs=64)

    y, w, first = torch.rand(256, 64, requires_grad=True), torch.rand(64, 256), torch.arange(64)
    with tl.Ledger() as ledger:
        (y @ w).take(first).square().sum().backward()
    memory = ledger.report.steps[0].memory["cpu"]
    assert memory.peak.total_bytes - memory.start.total_bytes == pytest.approx(524552, abs=64)


def test_rows_add_up_and_times_are_in_order() -> None:
    x = torch.rand(64, 64, requires_grad=True)
    with tl.Ledger() as ledger:
        (x.sin().cumprod(1).sum() + x.cos().prod(1).sum()).backward()
    memory = ledger.report.steps[0].memory["cpu"]
    points = list(memory.timeline())
    assert all(sum(point.by_category.values()) == point.total_bytes for point in points)
    assert all(held >= 0 for point in points for held in point.by_category.values())
    assert max(point.total_bytes for point in points) == memory.peak.total_bytes
    assert points[-1].total_bytes == memory.end.total_bytes


def test_what_is_left_as_it_ran_is_noted() -> None:
    x, value = torch.rand(64, 64, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    with tl.Ledger() as ledger:
        x.sin().masked_fill(x > 0.5, value).sum().backward()
    notes = ledger.report.steps[0].memory["cpu"].notes
    assert any(note.startswith("MaskedFillBackward1 makes other buffers") for note in notes)
    with tl.Ledger() as ledger:
        (x.sin().cumprod(1).sum() + x.sin().clamp(x, x + 1).sum()).backward()
    assert ledger.report.steps[0].memory["cpu"].notes == ()


@pytest.mark.parametrize("formula", [FORMULAS["cumprod"], FORMULAS["prod along one"]])
def test_with_a_graph_of_the_backward_the_program_takes_the_same_way(formula: Formula) -> None:
    x = torch.rand(64, 64, requires_grad=True)

    def run() -> None:
        (gradient,) = torch.autograd.grad(formula(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()
        x.grad = None

    run()
    with tl.Ledger() as ledger:
        run()
    assert ledger.report.faults == ()


def test_values_are_the_same() -> None:
    def gradients(watched: bool) -> list[torch.Tensor]:
        found = []
        for formula in FORMULAS.values():
            x = torch.linspace(0.5, 1.5, 400).view(20, 20).requires_grad_()
            if watched:
                with tl.Ledger():
                    formula(x).sum().backward()
            else:
                formula(x).sum().backward()
            assert x.grad is not None
            found.append(x.grad)
        return found

    # Other formulas, the same gradients: torch's own paths differ in the last digits.
    for ours, alone in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(ours, alone)
