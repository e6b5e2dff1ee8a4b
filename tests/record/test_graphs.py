"""Graphs of forwards that ran before the ledger: what they hold are activations, and reading them changes nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchledger as tl
from oracles import profiler_bytes, storage_bytes
from torchledger.record.graphs import saved_below

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


class Masked(nn.Module):
    """A mask that needs no gradient is the graph's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.dropout(self.norm(self.first(x.view(-1, 64))), 0.25)
        return self.last(h.masked_fill(torch.rand(128, 64) > 0.5, 0.0)).max(1).values  # type: ignore[no-any-return]


class Keeping(torch.autograd.Function):
    """Keeps tensors both ways."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.sin())
        ctx.kept = [x.cos()]
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0] * ctx.kept[0]


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Keeping.apply(self.first(x))  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mlp() for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant, preserve_rng_state=False)
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "masked": Masked,
    "custom": Custom,
    "checkpointed": lambda: Checkpointed(False),
    "checkpointed, reentrant": lambda: Checkpointed(True),
    "attention": lambda: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True),
    "recurrent": lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Conv1d(128, 4, 3, padding=1)),
}


@pytest.mark.parametrize("kind", MODELS)
def test_what_a_graph_holds_is_counted_as_activations(kind: str) -> None:
    torch.manual_seed(0)
    model, x = MODELS[kind](), torch.randn(128, 64)
    losses: list[torch.Tensor] = []

    def forward() -> None:
        losses.append(model(x[None] if kind == "attention" else x).square().sum())

    forward()
    losses.clear()
    _, made = profiler_bytes(forward)
    with tl.Ledger(model) as ledger:
        losses.pop().backward()
    assert ledger.report.faults == ()
    memory = ledger.report.steps[0].memory["cpu"]
    start = memory.start
    parameters = storage_bytes(model.parameters())
    assert start.activations == pytest.approx(made, abs=32)  # numbers that ops box
    assert (start.parameters, start.inputs) == (parameters, 128 * 64 * 4)
    assert start.activations == start.total_bytes - parameters - start.inputs
    assert memory.peak.other == memory.end.other == 0


def test_a_forward_before_the_ledger() -> None:
    net, x = mlp(), torch.randn(128, 64)
    loss = net(x).square().sum()
    with tl.Ledger(net) as ledger:
        loss.backward()
    memory = ledger.report.steps[0].memory["cpu"]
    assert (memory.start.total_bytes, memory.peak.total_bytes) == (460_036, 656_904)
    assert memory.start.activations == 460_036 - 132_352 - 32_768


def test_the_profiler_sees_the_same_backward() -> None:
    net, x = mlp(), torch.randn(128, 64)

    def loss() -> torch.Tensor:
        net.zero_grad()
        return net(x).square().sum()  # type: ignore[no-any-return]

    one, other = loss(), loss()
    peak, _ = profiler_bytes(lambda: one.backward(retain_graph=True))
    net.zero_grad()
    with tl.Ledger(net) as ledger:
        other.backward(retain_graph=True)  # the profiler does not see what goes that came before it
    memory = ledger.report.steps[0].memory["cpu"]
    assert memory.peak.total_bytes - memory.start.total_bytes == peak


def test_a_graph_goes_on_inside() -> None:
    cell, x = nn.GRUCell(16, 32), torch.randn(8, 16)
    before = cell(x, torch.zeros(8, 32))
    with tl.Ledger(cell) as ledger:
        hidden = cell(x, before)
        ledger.step()
        hidden.sum().backward()
        ledger.step()
    first, second = (step.memory["cpu"] for step in ledger.report.steps)
    assert first.start.inputs == 8 * 16 * 4
    assert first.start.activations >= 2 * 8 * 32 * 4
    assert first.end.by_category == second.start.by_category
    assert [step.notes for step in ledger.report.steps] == [(), ()]


def test_a_graph_met_in_a_later_step_is_said() -> None:
    net, other, x = mlp(), nn.Linear(8, 8), torch.randn(128, 64)
    loss = net(x).square().sum()
    with tl.Ledger([net, other]) as ledger:
        other(torch.randn(2, 8)).sum().backward()
        ledger.step()
        loss.backward()
        ledger.step()
    first, second = ledger.report.steps
    assert second.memory["cpu"].start.activations - first.memory["cpu"].end.activations == 294_916
    assert "294,916 bytes) of activations were there before" in second.notes[0]


def test_no_hook_runs_and_no_graph_counts_as_used() -> None:
    ran: list[str] = []

    def unpack(packed: Any) -> torch.Tensor:
        ran.append("unpack")
        return packed[0]  # type: ignore[no-any-return]

    net, x = mlp(), torch.randn(128, 64)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.clone(),), unpack):
        loss = net(x).square().sum()
    found = [tensor for tensor, _ in saved_below(loss.grad_fn, 1 << 62, set())]
    assert len(found) >= 4
    assert ran == []
    del found
    with tl.Ledger(net) as ledger:
        loss.backward()
    expected = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    assert ledger.report.steps[0].memory["cpu"].start.activations >= 294_916
    net.zero_grad()
    net(x).square().sum().backward()
    assert all(torch.equal(p.grad, expected[name]) for name, p in net.named_parameters())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_what_was_released_or_changed_in_place_is_passed_over() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    y = x.exp()
    y.sum().backward()
    assert [*saved_below(y.grad_fn, 1 << 62, set())] == []
    z = x.exp()
    with torch.no_grad():
        z.mul_(2)  # a backward would raise now
    assert [(t.shape, own) for t, own in saved_below(z.grad_fn, 1 << 62, set())] == [((4, 4), True)]


def test_a_view_of_a_leaf_is_no_activation() -> None:
    leaf = torch.randn(16, 6, requires_grad=True)
    part, bilinear = leaf[:8], nn.Bilinear(6, 7, 5)
    other = torch.randn(8, 7)
    with tl.Ledger(bilinear) as ledger:
        bilinear(part, other).sum().backward()
    start = ledger.report.steps[0].memory["cpu"].start
    assert (start.inputs, start.activations) == (16 * 6 * 4 + 8 * 7 * 4, 0)
    (row,) = [row for row in start.largest if row.nbytes == 384]
    assert (row.op, row.shape) == ("(before)", (16, 6))


def run_with(*modules: str) -> str:
    program = Path(__file__).with_name("import_independence.py")
    code = (
        "import importlib, runpy, sys\n"
        "for name in sys.argv[2:]: importlib.import_module(name)\n"
        "runpy.run_path(sys.argv[1], run_name='__main__')"
    )
    command = [sys.executable, "-c", code, str(program), *modules]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


@pytest.fixture(scope="module")
def books_alone() -> str:
    return run_with()


@pytest.mark.parametrize(
    "modules",
    [
        ["torch._dynamo", "torch._inductor.output_code"],
        pytest.param(["lightning", "accelerate"], id="trainers"),
        pytest.param(["transformers", "peft"], id="huggingface"),
    ],
)
def test_imports_do_not_change_the_books(modules: list[str], books_alone: str) -> None:
    for module in modules:
        pytest.importorskip(module)
    assert run_with(*modules) == books_alone
    assert "(compiled)" not in books_alone


def test_an_earlier_compilation_does_not_change_the_books() -> None:
    net, x = mlp(), torch.randn(128, 64)
    compiled = torch.compile(lambda t: (t * 2).sin())

    def eager() -> tuple[Any, ...]:
        loss = net(x).square().sum()
        with tl.Ledger(net) as ledger:
            loss.backward()
            net.zero_grad()
            net(x[:64]).sum().backward()
        net.zero_grad()
        return ledger.report.steps[0].memory["cpu"], ledger.report.flops

    before = eager()
    compiled(x)
    with tl.Ledger() as ledger:
        compiled(x)
    assert ledger.report.steps[0].memory["cpu"].end.largest
    assert eager() == before
