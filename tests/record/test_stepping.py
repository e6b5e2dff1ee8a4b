"""When steps end: counted by hand from what each program does, for programs that know nothing of a ledger."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchledger as tl
from torchledger.ledger import EnoughSteps, count_steps

ROWS, WIDTH = 8, 16
PRODUCT = 2 * ROWS * WIDTH * WIDTH
"""FLOPs of one product of a square layer."""


def batch() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH)


def layer() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=False)


@contextmanager
def counting(stop_after: int | None = None) -> Iterator[tl.Ledger]:
    ledger = count_steps(tl.Ledger(), stop_after)
    try:
        with ledger:
            yield ledger
    except EnoughSteps:
        pass


def flops(report: tl.Report) -> list[tuple[int, int, int]]:
    """(forward, backward, inference) of each step, in products of one layer."""
    return [tuple(getattr(s.flops, p) // PRODUCT for p in ("forward", "backward", "inference")) for s in report.steps]


def make_sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, **options)


def test_plain_loop() -> None:
    model = layer()
    optimizer = make_sgd(model)
    with counting() as ledger:
        for _ in range(4):
            optimizer.zero_grad()
            model(batch()).square().mean().backward()
            optimizer.step()
    assert flops(ledger.report) == [(1, 1, 0)] * 4
    assert ledger.report.remainder is None


def test_gradients_that_are_dropped_after_the_last_step_are_dropped_in_it() -> None:
    model = layer()
    optimizer = make_sgd(model)
    with counting() as ledger:
        for _ in range(2):
            model(batch()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [step.memory["cpu"].end.gradients for step in ledger.report.steps] == [0, 0]
    assert ledger.report.remainder is None


def test_a_closure_is_a_step() -> None:
    model = layer()
    optimizer = make_sgd(model)
    with counting() as ledger:
        for _ in range(4):
            x = batch()

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
            del closure, x
    report = ledger.report
    assert flops(report) == [(1, 1, 0)] * 4
    for step in report.steps[1:]:  # the batch is the one that the step reads
        assert step.memory["cpu"].category_peaks["inputs"] == 4 * ROWS * WIDTH
        # The closure of the next step drops them.
        assert step.memory["cpu"].start.gradients == step.memory["cpu"].end.gradients == 4 * WIDTH * WIDTH
    assert report.remainder is None


def test_lbfgs_evaluates_its_closure_many_times_in_one_step() -> None:
    model, x = layer(), batch()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, tolerance_grad=0, tolerance_change=0)
    calls: list[int] = []

    def closure() -> torch.Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with counting() as ledger:
        for _ in range(3):
            optimizer.step(closure)
    per_step = [forward for forward, _, _ in flops(ledger.report)]
    assert len(per_step) == 3
    assert sum(per_step) == len(calls)


class Sam(torch.optim.Optimizer):
    """Two closures a step, and another optimizer's step between them."""

    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        self.base = torch.optim.SGD(parameters, lr=1e-3)
        super().__init__(parameters, {})

    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        self.base.step()
        with torch.enable_grad():
            closure()


def test_only_the_outermost_optimizer_step_counts() -> None:
    model = layer()
    optimizer = Sam(model.parameters())
    with counting() as ledger:
        for _ in range(3):
            x = batch()

            def closure(x: torch.Tensor = x) -> None:
                model.zero_grad()
                model(x).square().mean().backward()

            optimizer.step(closure)
    assert flops(ledger.report) == [(2, 2, 0)] * 3


@pytest.mark.parametrize("with_optimizer_at_hand", [False, True])
def test_updates_by_hand(with_optimizer_at_hand: bool) -> None:
    model = layer()
    other = make_sgd(layer()) if with_optimizer_at_hand else None
    with counting() as ledger:
        for _ in range(5):
            model(batch()).square().mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    assert p.grad is not None
                    p.sub_(0.01 * p.grad)
                    p.grad = None
    report = ledger.report
    assert flops(report) == [(1, 1, 0)] * 5
    assert report.remainder is None
    assert "note" not in report.environment
    del other


def test_functions_without_modules() -> None:
    w = torch.randn(WIDTH, WIDTH, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=1e-3)
    with counting() as ledger:
        for _ in range(3):
            (batch() @ w).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert flops(ledger.report) == [(1, 1, 0)] * 3


def test_accumulated_gradients_are_one_step() -> None:
    model = layer()
    optimizer = make_sgd(model)
    with counting() as ledger:
        for i in range(12):
            model(batch()).square().mean().backward()
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    assert flops(ledger.report) == [(4, 4, 0)] * 3


def run_gan(steps: int, n_critic: int = 1, idle: bool = False) -> None:
    generator, critic, head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
    of_generator, of_critic = make_sgd(generator), make_sgd(nn.Sequential(critic, head))
    never = make_sgd(layer()) if idle else None
    for _ in range(steps):
        for _ in range(n_critic):
            with torch.no_grad():
                fake = generator(batch())
            head(critic(fake)).mean().backward()  # what only the first half of a cycle reads
            of_critic.step()
            of_critic.zero_grad()
        critic(generator(batch())).mean().backward()
        of_generator.step()
        of_generator.zero_grad()
        of_critic.zero_grad()
    del never


@pytest.mark.parametrize("idle", [False, True])
def test_two_optimizers_are_one_cycle(idle: bool) -> None:
    with counting() as ledger:
        run_gan(3, idle=idle)
    # Two forwards each; an input gradient and two weight gradients each. What is sampled before a training forward
    # belongs to the step before it.
    assert flops(ledger.report) == [(4, 6, 2), (4, 6, 1), (4, 6, 0)]
    for step in ledger.report.steps:
        assert {how.read_as for name, how in step.evidence.parameters.items() if "bias" in name} == {"bias"}


def test_a_cycle_ends_where_an_optimizer_steps_again() -> None:
    with counting() as ledger:
        run_gan(2, n_critic=3)
    # The last critic step and the generator's are one cycle.
    assert flops(ledger.report) == [(2, 3, 2), (2, 3, 1), (4, 6, 1), (2, 3, 1), (2, 3, 1), (4, 6, 0)]


def test_an_optimizer_that_never_steps_does_not_matter() -> None:
    model, idle = layer(), layer()
    optimizer, never = make_sgd(model), make_sgd(idle)
    with counting() as ledger:
        for _ in range(4):
            model(batch()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    report = ledger.report
    assert flops(report) == [(1, 1, 0)] * 4
    for step in report.steps:
        assert tl.reconcile(step).flops.residual == 0
    first, *later = (step.flops.by_parameter for step in report.steps)
    assert all(found == first for found in later)
    del never


def test_one_after_the_other() -> None:
    first, second = layer(), layer()
    optimizers = make_sgd(first), make_sgd(second)
    with counting() as ledger:
        for model, optimizer in zip((first, second), optimizers, strict=True):
            for _ in range(3):
                model(batch()).square().mean().backward()
                optimizer.step()
    assert flops(ledger.report) == [(1, 1, 0), (1, 1, 0), (2, 2, 0), (1, 1, 0), (1, 1, 0)]


def test_evaluation_ends_no_step_and_is_inference() -> None:
    model = layer()
    optimizer = make_sgd(model)
    with counting() as ledger:
        for _ in range(3):
            for _ in range(2):
                model(batch()).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                for _ in range(5):
                    model(batch())
    report = ledger.report
    assert flops(report) == [(1, 1, 0), (1, 1, 5), (1, 1, 0), (1, 1, 5), (1, 1, 0), (1, 1, 0)]
    assert report.remainder is not None
    assert report.remainder.flops.inference == 5 * PRODUCT == report.remainder.flops.total
    assert report.remainder.flops.model == 0
    assert "inference" in report.steps[1].memory["cpu"].peak_by_phase


def test_an_evaluation_before_any_optimizer_is_inference_all_the_same() -> None:
    model = layer()
    with counting() as ledger:
        with torch.inference_mode():
            model(batch())
        optimizer = make_sgd(model)
        for _ in range(2):
            model(batch()).square().mean().backward()
            optimizer.step()
    report = ledger.report
    assert flops(report) == [(1, 1, 1), (1, 1, 0)]
    weight = report.steps[0].flops.by_parameter["weight"]
    assert weight.forward == PRODUCT
    assert tl.reconcile(report.steps[0]).flops.residual == 0


class Student(nn.Module):
    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.body, self.teacher = layer(), teacher

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        return (self.body(x) - target).square().mean()


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_teachers_forward_is_a_forward(frozen: bool, idle: bool) -> None:
    student = Student(layer().requires_grad_(not frozen))
    optimizer = make_sgd(student.body)
    never = make_sgd(layer()) if idle else None
    with counting() as ledger:
        for _ in range(2):
            student(batch()).backward()
            optimizer.step()
    assert ledger.report.faults == ()
    assert flops(ledger.report) == [(2, 1, 0)] * 2
    del never


def test_the_first_pass_of_a_reentrant_checkpoint_is_a_forward() -> None:
    model = nn.Sequential(layer(), layer())
    optimizer = make_sgd(model)
    with tl.Ledger(model, optimizer) as ledger:
        x = batch().requires_grad_()
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True).sum().backward()
        optimizer.step()
    assert flops(ledger.report) == [(2, 4, 0)]
    assert ledger.report.flops.recompute == 2 * PRODUCT


def test_an_evaluation_by_hand_is_inference_where_any_optimizer_trains_the_model() -> None:
    model, other = layer(), layer()
    optimizer = make_sgd(model)
    with tl.Ledger() as ledger, torch.no_grad():
        model(batch())
        other(batch())
    assert flops(ledger.report) == [(1, 0, 1)]
    del optimizer


def test_what_an_evaluation_leaves_has_its_phase(tmp_path: Path) -> None:
    model = layer()
    kept = []
    with tl.Ledger(model) as ledger:
        with torch.no_grad():
            kept.append(model(batch()))
        optimizer = make_sgd(model)
        for _ in range(2):
            model(batch()).mean().backward()
            optimizer.step()
            ledger.step()
    for step in ledger.report.steps:
        rows = [
            row.phase for row in step.peak.largest if row.category in ("other", "temporaries") and row.op == "aten.mm"
        ]
        assert "inference" in rows
    ledger.report.save(tmp_path / "report.json")
    assert tl.Report.load(tmp_path / "report.json") == ledger.report


class TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.late = layer(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, late: bool) -> torch.Tensor:
        return self.late(x) if late else self.body(x)


def test_what_only_the_remainder_reads_is_unused_in_the_last_step() -> None:
    model = TwoParts()
    optimizer, never = make_sgd(model), make_sgd(layer())
    with counting() as ledger:
        model(batch(), late=False).mean().backward()
        optimizer.step()
        model(batch(), late=True)
    report = ledger.report
    assert report.remainder is not None
    assert report.steps[0].evidence.parameters["late.bias"].read_as == "unused"
    assert report.remainder.evidence.parameters["late.bias"].read_as == "bias"
    del never


def test_sampling_inside_a_training_step_is_inference() -> None:
    model = layer()
    optimizer = make_sgd(model)
    with tl.Ledger(model, optimizer) as ledger:
        with torch.no_grad():
            sample = model(batch())
        model(sample).sum().backward()
        optimizer.step()
    assert flops(ledger.report) == [(1, 1, 1)]
    memory = ledger.report.steps[0].memory["cpu"]
    assert memory.peak_by_phase["inference"].phase == "inference"


def test_enough_steps_end_the_program() -> None:
    model = layer()
    optimizer = make_sgd(model)
    n_forwards = 0
    with counting(stop_after=2) as ledger:
        while True:
            model(batch()).square().mean().backward()
            optimizer.step()
            n_forwards += 1
    assert n_forwards == 2
    assert flops(ledger.report) == [(1, 1, 0)] * 2


def test_what_failed_in_training_is_a_step_and_what_failed_after_it_is_not() -> None:
    model = layer()
    optimizer = make_sgd(model)
    for fails_in_training in (True, False):
        ledger = count_steps(tl.Ledger())

        def train(fails: bool = fails_in_training) -> None:
            model(batch()).square().mean().backward()
            optimizer.step()
            if fails:
                model(batch()).square().mean().backward()
            raise ValueError("of the program")

        with pytest.raises(ValueError, match="of the program"):
            ledger(train)()
        report = ledger.report
        assert len(report.steps) == 1 + fails_in_training
        assert bool(report.steps[-1].notes) is fails_in_training


def test_by_hand_a_block_of_many_steps_is_told_so() -> None:
    model = layer()
    for make, words in ((make_sgd, "3 optimizer steps"), (None, "3 backwards and no optimizer step")):
        optimizer = make(model) if make else None
        with tl.Ledger(model) as ledger:
            for _ in range(3):
                model(batch()).square().mean().backward()
                if optimizer:
                    optimizer.step()
        assert ledger.report.n_steps == 1
        assert f"step 0 holds {words}: call ledger.step()" in ledger.report.environment["note"]


def test_the_same_values_and_bytes_whoever_counts() -> None:
    """A step that is cut in retrospect has the bytes of one that is cut at once."""

    def train(idle: bool) -> tl.Report:
        torch.manual_seed(0)
        model = nn.Sequential(layer(), nn.GELU(), layer())
        optimizer = torch.optim.AdamW(model.parameters())
        never = copy.deepcopy(optimizer) if idle else None
        with counting() as ledger:
            for _ in range(4):
                model(batch()).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        del never
        return ledger.report

    at_once, later = train(False), train(True)
    for one, other in zip(at_once.steps[1:], later.steps[1:], strict=True):
        assert one.memory["cpu"] == other.memory["cpu"]
        assert one.flops == other.flops
        assert one.evidence == other.evidence


def test_a_model_that_is_gone_when_the_program_ends_was_in_its_last_step() -> None:
    def train() -> None:
        model = layer()
        optimizer = make_sgd(model)
        for _ in range(2):
            model(batch()).square().mean().backward()
            optimizer.step()

    with counting() as ledger:
        train()
    assert flops(ledger.report) == [(1, 1, 0)] * 2
    for step in ledger.report.steps:
        assert list(step.evidence.parameters) == ["weight"]
        assert tl.reconcile(step).flops.residual == 0
