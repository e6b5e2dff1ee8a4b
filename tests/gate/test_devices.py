"""An unchanged program on a CPU and on a device: no verdict on what placement or kernels decide."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import torchledger as tl
from torchledger.gate.baselines import judge_sample, take_sample, updated_entry
from torchledger.gate.comparison import Comparison, compare_reports, compare_runs
from torchledger.gate.judging import Outcome
from torchledger.report import Report


class Attention(nn.Module):
    """With dropout it is fused on a device alone, where it computes scores again."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(64, 192), nn.Linear(64, 64), dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        return self.out(y.transpose(1, 2).flatten(2))


class OnTheHost(nn.Module):
    """Its table stays on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(100, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x).to(self.head.weight.device))

    def to(self, *args: Any, **kwargs: Any) -> OnTheHost:
        self.head.to(*args, **kwargs)
        return self


def mlp(width: int = 256) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64))


Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Program:
    """A training loop that knows of its device no more than its name."""

    model: Callable[[], nn.Module]
    optimizer: Optimizer
    batch: Callable[[], torch.Tensor]
    batch_stays: bool = False


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


PROGRAMS = {
    "adamw": Program(mlp, adamw, lambda: torch.randn(8, 64)),
    "sgd": Program(mlp, sgd, lambda: torch.randn(8, 64)),
    "attention": Program(Attention, adamw, lambda: torch.randn(2, 16, 64)),
    "attention with dropout": Program(lambda: Attention(0.1), adamw, lambda: torch.randn(2, 16, 64)),
    "encoder layer": Program(
        lambda: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), adamw, lambda: torch.randn(2, 16, 64)
    ),
    "batch norm": Program(
        lambda: nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)),
        adamw,
        lambda: torch.randn(4, 1, 8, 8),
    ),
    "a table on the host": Program(OnTheHost, sgd, lambda: torch.randint(0, 100, (4, 8)), batch_stays=True),
}


def train(program: Program, device: str) -> Report:
    torch.manual_seed(0)
    model = program.model().to(device)
    optimizer = program.optimizer(model.parameters())
    with tl.Ledger(model, optimizer) as ledger:
        for _ in range(2):
            batch = program.batch()
            loss = model(batch if program.batch_stays else batch.to(device)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ledger.step()
    return ledger.report


@functools.cache
def both(name: str) -> tuple[Report, Report]:
    on_cpu = train(PROGRAMS[name], "cpu")
    with tl.simulate("h100-sxm"):
        return on_cpu, train(PROGRAMS[name], "cuda")


def outcomes(comparison: Comparison) -> dict[str, str]:
    return {item.key: str(item.outcome) for item in comparison.verdicts}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("turned", [False, True])
def test_an_unchanged_program_has_no_verdict_but_pass(name: str, turned: bool) -> None:
    base, head = reversed(both(name)) if turned else both(name)
    comparison = compare_runs(base, head)
    found = outcomes(comparison)
    assert set(found.values()) == {"PASS", "NO-MATCH"}
    assert comparison.outcome == Outcome.PASS
    assert compare_reports({"": base}, {"": head}).exit_code == 0
    assert {"model_flops", "forward_flops"} <= {key for key, outcome in found.items() if outcome == "PASS"}
    assert {found[key] for key in ("peak", "optimizer_state", "inputs", "activations", "reserved")} == {"NO-MATCH"}


def test_what_differs_is_named() -> None:
    found = compare_runs(*both("attention with dropout"))
    why = {item.key: item.why for item in found.verdicts}
    assert why["flops"] == why["backward_flops"] == "attention runs in other kernels: cpu against cuda"
    assert outcomes(compare_runs(*both("adamw")))["flops"] == "PASS"
    why = {item.key: item.why for item in compare_runs(*both("a table on the host")).verdicts}
    assert why["parameters"] == why["gradients"] == "a part lies on another device: cpu against cuda"
    assert outcomes(compare_runs(*both("adamw")))["parameters"] == "PASS"


@pytest.mark.parametrize("name", ["adamw", "attention with dropout"])
def test_a_changed_program_is_still_found(name: str) -> None:
    base, _ = both(name)
    program = PROGRAMS[name]
    if name == "adamw":
        program = Program(lambda: mlp(257), program.optimizer, program.batch)
    else:
        program = Program(program.model, program.optimizer, lambda: torch.randn(2, 17, 64))
    with tl.simulate("h100-sxm"):
        comparison = compare_runs(base, train(program, "cuda"))
    assert comparison.outcome == Outcome.REGRESSION
    assert outcomes(comparison)["model_flops"] == "REGRESSION"


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("turned", [False, True])
def test_baselines_of_one_machine_say_nothing_false_on_another(name: str, turned: bool) -> None:
    runs = tuple(reversed(both(name))) if turned else both(name)
    entry: dict[str, Any] = {}
    for run in runs:
        sample = take_sample(run)
        verdicts = judge_sample(entry, sample, None)
        if entry:
            # Bytes of which a part was elsewhere went to the first machine's own group: of these there is none yet.
            new = {"NEW"} if turned and name == "a table on the host" else set()
            assert {verdict.outcome for verdict in verdicts} == {"PASS", "NO-MATCH"} | new
        moved = {v.key: (sample.group_of(v.key, entry), v.measured) for v in verdicts if v.outcome != "PASS"}
        entry = updated_entry(entry, moved, {})
    for run in runs:  # both are in the file now, and neither has overwritten the other
        assert {verdict.outcome for verdict in judge_sample(entry, take_sample(run), None)} == {"PASS"}
    assert set(entry) == {"any device, any torch", *(take_sample(run).machine.group for run in runs)}
