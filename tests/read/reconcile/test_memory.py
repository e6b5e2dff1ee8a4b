"""The bridge from 16·N to the peak: every term beside its bytes by hand, for small models.

Two linear layers without biases and a ReLU: N = 3,072 parameters of P = 12,288 bytes. With few rows the peak lies where
states are many, at the end of backward or in the optimizer; with many rows where the activations are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchledger as tl
from reconciling import Lora, record, terms_of
from synthetic import gpt_memory, make_snapshot
from torchledger.errors import UsageError
from torchledger.journal.evidence import ParameterEvidence, StepEvidence
from torchledger.journal.statements import CATEGORIES, MemoryStatement, StepReport
from torchledger.read.reconcile.memory import MEMORY_TERMS, memory_bridge
from torchledger.render.bridges import bridge_table

FIRST, SECOND = 32 * 64, 64 * 16
N = FIRST + SECOND
FEW, MANY = 2, 512
X = 4 * FEW * 32
"""Bytes of the batch of few rows."""


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 16, bias=False))


def trained(
    model: nn.Module,
    optimizer: Callable[..., Any] | None = None,
    *,
    rows: int = FEW,
    steps: int = 2,
    backwards: int = 1,
    clear: bool = True,
    **options: Any,
) -> tl.StepReport:
    """The last step of a model on ``rows`` rows of the test's dtype."""
    stepper = optimizer([p for p in model.parameters() if p.requires_grad], **options) if optimizer else None
    x = torch.randn(rows, 32, dtype=next(model.parameters()).dtype)

    def run() -> None:
        for _ in range(backwards):
            model(x).sum().backward()
        if stepper is not None:
            stepper.step()
            stepper.zero_grad(set_to_none=clear)

    return record(model, run, stepper, steps=steps)


Expected = tuple[tl.StepReport, str, dict[str, int]]
"""A step, the phase of its peak, and its terms."""
CASES: dict[str, Callable[[], Expected]] = {}


def case(function: Callable[[], Expected]) -> Callable[[], Expected]:
    CASES[function.__name__] = function
    return function


@pytest.mark.parametrize("name", CASES)
def test_terms(name: str) -> None:
    step, phase, terms = CASES[name]()
    bridge = memory_bridge(step)
    assert step.peak.phase == phase
    assert terms_of(bridge) == {term: value for term, value in terms.items() if value}
    n = sum(parameter.n_elements for parameter in step.evidence.parameters.values())
    assert bridge.predicted == 16 * n
    assert bridge.measured == step.peak.total_bytes == sum(step.peak.by_category.values())
    assert bridge.residual == 0
    assert list(terms_of(bridge)) == [term for term in MEMORY_TERMS if term in terms_of(bridge)]


# Recipes: few rows

END_OF_BACKWARD = {"activations": 4, "inputs": X, "temporaries": 4 + 4 * FEW * 64}
"""The loss; the batch; the loss' own gradient and that of the hidden layer, of which the first weight's is made."""


@case
def sgd() -> Expected:
    return trained(mlp(), torch.optim.SGD, lr=0.1), "backward", {"optimizer_recipe": -8 * N, **END_OF_BACKWARD}


@case
def no_optimizer() -> Expected:
    return trained(mlp(), steps=1), "backward", {"optimizer_recipe": -8 * N, **END_OF_BACKWARD}


@case
def momentum() -> Expected:
    step = trained(mlp(), torch.optim.SGD, lr=0.1, momentum=0.9)
    return step, "backward", {"optimizer_recipe": -4 * N, **END_OF_BACKWARD}


@case
def momentum_in_its_first_step() -> Expected:
    step = trained(mlp(), torch.optim.SGD, lr=0.1, momentum=0.9, steps=1)
    return step, "optimizer", {"optimizer_recipe": -4 * N, "inputs": X}


@case
def adam_in_lists() -> Expected:
    step = trained(mlp(), torch.optim.Adam, foreach=True)
    return step, "optimizer", {"optimizer_scalars": 2 * 4, "inputs": X, "temporaries": 4 * N}


@case
def adam_in_lists_in_its_first_step() -> Expected:
    step = trained(mlp(), torch.optim.Adam, foreach=True, steps=1)
    return step, "optimizer", {"optimizer_scalars": 2 * 4, "inputs": X, "temporaries": 4 * N}


@case
def adam_one_by_one() -> Expected:
    step = trained(mlp(), torch.optim.Adam, foreach=False)
    # Twice a parameter's bytes and once the one's before: the first alone, or the second behind it.
    largest = max(2 * 4 * FIRST, 2 * 4 * SECOND + 4 * FIRST)
    return step, "optimizer", {"optimizer_scalars": 2 * 4, "inputs": X, "temporaries": largest}


@case
def adam_fused() -> Expected:
    step = trained(mlp(), torch.optim.Adam, fused=True)
    return step, "backward", {"optimizer_scalars": 2 * 4, **END_OF_BACKWARD}


@case
def adamw_before_its_first_step() -> Expected:
    model = mlp()
    x = torch.randn(FEW, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    step = record(model, lambda: model(x).sum().backward(), optimizer)
    return step, "backward", {"optimizer_recipe": -8 * N, **END_OF_BACKWARD}


@case
def amsgrad() -> Expected:
    step = trained(mlp(), torch.optim.Adam, foreach=True, amsgrad=True)
    terms = {"optimizer_recipe": 4 * N, "optimizer_scalars": 2 * 4, "inputs": X, "temporaries": 4 * N}
    return step, "optimizer", terms


@case
def bf16() -> Expected:
    step = trained(mlp().bfloat16(), torch.optim.AdamW, foreach=True)
    terms = {
        "weights_dtype": -2 * N,
        "gradients_dtype": -2 * N,
        "optimizer_recipe": -4 * N,
        "optimizer_scalars": 2 * 4,
        "inputs": X // 2,
        "temporaries": 2 * N,
    }
    return step, "optimizer", terms


@case
def double() -> Expected:
    step = trained(mlp().double(), torch.optim.SGD, lr=0.1)
    terms = {
        "weights_dtype": 4 * N,
        "gradients_dtype": 4 * N,
        "optimizer_recipe": -8 * N,
        **{name: 2 * value for name, value in END_OF_BACKWARD.items()},
    }
    return step, "backward", terms


# Gradients


HIDDEN_BYTES = 4 * MANY * 64
MIDDLE_OF_BACKWARD = {
    "activations": 4 + HIDDEN_BYTES,  # the loss, and what the ReLU made
    "inputs": 4 * MANY * 32,
    "temporaries": 4 + 2 * HIDDEN_BYTES,  # the loss' gradient, and those of what the ReLU made and what it took
}


@case
def gradients_are_none() -> Expected:
    step = trained(mlp(), torch.optim.SGD, lr=0.1, rows=MANY)
    terms = {"gradients_absent": -4 * FIRST, "optimizer_recipe": -8 * N, **MIDDLE_OF_BACKWARD}
    return step, "backward", terms


@case
def gradients_are_kept() -> Expected:
    step = trained(mlp(), torch.optim.SGD, lr=0.1, rows=MANY, clear=False)
    return step, "backward", {"optimizer_recipe": -8 * N, **MIDDLE_OF_BACKWARD}


@case
def gradients_accumulate() -> Expected:
    step = trained(mlp(), torch.optim.SGD, lr=0.1, rows=MANY, backwards=3)
    return step, "backward", {"optimizer_recipe": -8 * N, **MIDDLE_OF_BACKWARD}


@case
def first_layer_frozen() -> Expected:
    model = mlp()
    model[0].requires_grad_(False)
    step = trained(model, torch.optim.Adam, foreach=True)
    terms = {
        "gradients_absent": -4 * FIRST,
        "optimizer_recipe": -8 * FIRST,
        "optimizer_scalars": 4,
        "inputs": X,
        "temporaries": 4 * SECOND,
    }
    return step, "optimizer", terms


@case
def lora() -> Expected:
    model = nn.Sequential(Lora(32, 64, rank=4))
    step = trained(model, torch.optim.Adam, foreach=True)
    adapter = 32 * 4 + 4 * 64
    terms = {
        "gradients_absent": -4 * FIRST,
        "optimizer_recipe": -8 * FIRST,
        "optimizer_scalars": 2 * 4,
        "inputs": X,
        "temporaries": 4 * adapter,
    }
    return step, "optimizer", terms


@case
def sparse_gradients() -> Expected:
    model = nn.Embedding(1000, 16, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    ids = torch.randperm(1000)[:32].reshape(4, 8).clone()

    def run() -> None:
        model(ids).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    # 32 rows of 16, and an index of eight bytes for each; the optimizer makes the same again, coalesced, and works on
    # rows: six times.
    terms = {
        "gradients_absent": -4 * (16_000 - 32 * 16),
        "gradients_dtype": 8 * 32,
        "inputs": 8 * 32,
        "temporaries": 8 * 32 + 6 * 4 * 32 * 16,
    }
    return record(model, run, optimizer, steps=2), "optimizer", terms


# Beyond the model's states


@case
def buffers() -> Expected:
    model = nn.Sequential(nn.BatchNorm1d(32, affine=False), nn.Linear(32, 64, bias=False))
    step = trained(model, torch.optim.Adam, foreach=True)
    # Mean and variance of 32, and a count of 8 bytes.
    terms = {"optimizer_scalars": 4, "inputs": X, "buffers": 2 * 4 * 32 + 8, "temporaries": 4 * FIRST}
    return step, "optimizer", terms


@case
def autocast_copies() -> Expected:
    model = mlp()
    x = torch.randn(FEW, 32)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            model(x).sum().backward()

    step = record(model, run)
    # The last gradient in bf16 and in fp32; the loss and its own gradient are in bf16.
    terms = {
        "optimizer_recipe": -8 * N,
        "autocast_copies": 2 * N,  # until autocast ends
        "inputs": X,
        "activations": 2,
        "temporaries": 2 * FIRST + 2,
    }
    return step, "backward", terms


@case
def other() -> Expected:
    model = mlp()
    x = torch.randn(FEW, 32)
    kept: list[Tensor] = []

    def run() -> None:
        kept.append(torch.zeros(1000))
        kept[-1] += 1
        model(x).sum().backward()

    step = record(model, run)
    return step, "backward", {"optimizer_recipe": -8 * N, "other": 4000, **END_OF_BACKWARD}


# What no CPU shows


def step_with(**memory: MemoryStatement) -> StepReport:
    weight = ParameterEvidence(1000, 2, 4000, "float32", "cuda:0", True, "product", "aten.mm")
    devices = {name.replace("_", ":"): statement for name, statement in memory.items()}
    return StepReport(3, 5, 0.0, tl.FlopStatement(), devices, StepEvidence({"w": weight}))


def test_workspace_and_rounding() -> None:
    peak = make_snapshot(parameters=4000, workspace=8_519_680)
    statement = MemoryStatement(
        start=peak, end=peak, peak=peak, requested_peak_bytes=8_523_680, allocated_peak_bytes=8_523_776,
        reserved_peak_bytes=20_971_520,
    )  # fmt: skip
    bridge = memory_bridge(step_with(cuda_0=statement, cpu=gpt_memory()))
    assert terms_of(bridge) == {"gradients_absent": -4000, "optimizer_recipe": -8000, "workspace": 8_519_680}
    assert (bridge.measured, bridge.residual) == (8_523_680, 0)
    assert "block rounding adds 96 B to the allocated peak" in bridge.notes[1]
    assert memory_bridge(step_with(cuda_0=statement)).notes[0] == "the peak lies in the start"


def test_what_no_account_claims_has_a_term() -> None:
    peak = replace(make_snapshot(parameters=4000), unexplained=77, total_bytes=4077)
    statement = MemoryStatement(start=peak, end=peak, peak=peak)
    bridge = memory_bridge(step_with(cuda_0=statement))
    assert terms_of(bridge) == {"gradients_absent": -4000, "optimizer_recipe": -8000, "unexplained": 77}
    assert bridge.residual == 0
    assert "every difference has a name" not in " ".join(bridge_table(bridge, "Bytes").notes)


def test_every_account_has_a_term() -> None:
    bytes_of = {name: 1000 + i for i, name in enumerate(CATEGORIES)}
    peak = replace(make_snapshot(**bytes_of), gradient_elements=1000)
    statement = MemoryStatement(start=peak, end=peak, peak=peak)
    bridge = memory_bridge(step_with(cuda_0=statement))
    states = ("parameters", "gradients", "optimizer_state")
    assert {name: bridge.value(name) for name in CATEGORIES if name not in states} == {
        name: n for name, n in bytes_of.items() if name not in states
    }
    assert (bridge.measured, bridge.residual) == (sum(bytes_of.values()), 0)


@pytest.mark.parametrize("device", ["cuda:1", "meta"])
def test_a_device_without_bytes(device: str) -> None:
    with pytest.raises(UsageError, match=f"step 3 has no parameters, or nothing on '{device}'"):
        memory_bridge(step_with(cpu=gpt_memory()), device)
