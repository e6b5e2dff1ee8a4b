"""TorchScript: scripted and traced modules under a ledger, and tracing inside one. Numbers are by hand."""

from __future__ import annotations

import copy
import io
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree

import torchledger as tl

pytestmark = pytest.mark.filterwarnings("ignore")
A, B = 2 * 8 * 16 * 16, 2 * 8 * 16 * 4
"""A product of (8, 16) with a weight of (16, 16), and with one of (4, 16)."""


class Net(nn.Module):
    """Products in three parts, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.norm, self.b = nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.b(self.norm(self.c(self.a(x)))))


def convert(kind: str, model: nn.Module) -> nn.Module:
    x = torch.ones(8, 16)
    if kind == "script":
        return torch.jit.script(model)
    if kind == "trace":
        return torch.jit.trace(model, x)
    if kind == "load":
        file = io.BytesIO()
        torch.jit.save(torch.jit.script(model), file)
        file.seek(0)
        return torch.jit.load(file)
    return model


@pytest.mark.parametrize("kind", ["script", "trace", "load"])
def test_a_scripted_child(kind: str, tmp_path: Path) -> None:
    model = nn.Sequential(convert(kind, nn.Linear(16, 16)), nn.Linear(16, 4))
    with tl.Ledger(model) as ledger:
        model(torch.randn(8, 16)).sum().backward()
    report = ledger.report
    assert (report.flops.forward, report.flops.backward, report.flops.total) == (A + B, A + 2 * B, 11_264)
    assert {name: split.self_total for name, split in report.flops.by_module.items()} == {"": 0, "0": 2 * A, "1": 3 * B}
    products = {name: (p.forward, p.input_grad, p.weight_grad) for name, p in report.flops.by_parameter.items()}
    assert products == {"0.weight": (A, 0, A), "1.weight": (B, B, B)}
    memory = report.steps[-1].memory["cpu"]
    assert memory.end.gradients == 4 * (17 * 16 + 17 * 4)
    if kind != "load":  # whose weights lie where the file was read
        assert memory.start.parameters == 4 * (17 * 16 + 17 * 4)
    report.save(tmp_path / "report.json", journal=True)
    assert tl.Report.load(tmp_path / "report.json").flops == report.flops
    assert report.faults == ()


@pytest.mark.parametrize("found", [False, True])
@pytest.mark.parametrize("kind", ["script", "trace", "load"])
def test_a_whole_model_is_told_like_the_eager_one(kind: str, found: bool) -> None:
    """Each step alike: the first runs, those that torch profiles, and those of the graph that it made then."""
    reports = []
    for converted in (False, True):
        torch.manual_seed(0)
        model = convert(kind if converted else "eager", Net())
        optimizer = torch.optim.AdamW(model.parameters())
        with tl.Ledger(*(() if found else (model, optimizer))) as ledger:
            for _ in range(4):
                model(torch.ones(8, 16)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                ledger.step()
        reports.append(ledger.report)
        assert ledger.report.faults == ()
    for eager, scripted in zip(reports[0].steps, reports[1].steps, strict=True):
        assert scripted.flops.by_parameter == eager.flops.by_parameter
        splits = [{m: s for m, s in step.flops.by_module.items() if s.self_total} for step in (eager, scripted)]
        assert splits[0] == splits[1]
        assert scripted.flops.total == eager.flops.total == 5 * A + 3 * B + 2 * 2 * 8 * 4 * 4
        for name in ("parameters", "buffers", "gradients", "optimizer_state")[2 if kind == "load" else 0 :]:
            assert scripted.memory["cpu"].category_peaks[name] == eager.memory["cpu"].category_peaks[name]
        assert tl.reconcile(scripted).flops.residual == 0
        assert {term.name: term.value for term in tl.reconcile(scripted).flops.terms} == {
            term.name: term.value for term in tl.reconcile(eager).flops.terms
        }


def test_what_freezing_made_constant_is_buffers() -> None:
    model = torch.jit.freeze(torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()))
    with tl.Ledger(model) as ledger:
        for _ in range(3):
            with torch.no_grad():
                model(torch.ones(8, 16))
            ledger.step()
    for step in ledger.report.steps:
        assert (step.flops.total, step.memory["cpu"].start.buffers) == (A + B, 4 * (17 * 16 + 17 * 4))


def test_scripted_functions() -> None:
    @torch.jit.script
    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        later = torch.jit.fork(torch.mm, x, weight)
        return (torch.relu(x @ weight) + torch.jit.wait(later)).sum()

    weight = torch.randn(16, 4, requires_grad=True)
    with tl.Ledger() as ledger:
        for _ in range(4):
            function(torch.ones(8, 16), weight).backward()
            ledger.step()
    assert [step.flops.total for step in ledger.report.steps] == [4 * B] * 4
    assert ledger.report.faults == ()


@pytest.fixture
def onednn_fusion() -> Iterator[None]:
    torch.jit.enable_onednn_fusion(True)
    yield
    torch.jit.enable_onednn_fusion(False)


@pytest.mark.usefixtures("onednn_fusion")
def test_products_in_fused_kernels_are_named() -> None:
    def frozen() -> Any:
        return torch.jit.freeze(
            torch.jit.trace(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), x)
        )

    x = torch.ones(8, 16)
    model = frozen()
    with tl.Ledger(model) as ledger, torch.no_grad():
        for _ in range(4):
            model(x)
            ledger.step()
    steps = [(step.flops.total, step.flops.uncounted) for step in ledger.report.steps]
    assert steps[0] == (A + B, {})
    assert steps[-1] in ((0, {"jit.linear": 2}), (A + B, {}))  # where this CPU's library does not fuse
    if not steps[-1][0]:
        model = frozen()
        with torch.no_grad():
            for _ in range(3):
                model(x)
        with pytest.raises(tl.UncountedOpError), tl.Ledger(strict=True), torch.no_grad():
            model(x)


def test_a_library_s_convolution_is_named() -> None:
    model = torch.jit.optimize_for_inference(torch.jit.script(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()).eval()))
    with tl.Ledger() as ledger, torch.no_grad():
        model(torch.ones(1, 1, 8, 8))
    by_library = "prim::mkldnn_convolution" in str(torch.jit.last_executed_optimized_graph())
    flops = ledger.report.flops
    assert (flops.total, flops.uncounted) == ((0, {"jit.mkldnn_convolution": 1}) if by_library else (1296, {}))


# Tracing


MODELS: dict[str, Callable[[], tuple[Any, torch.Tensor]]] = {
    "numbers": lambda: (lambda x: 2.0 * x + 1.0 / x - x.shape[0] // 2, torch.rand(4, 4) + 1),
    "items": lambda: (lambda x: x * float(x.sum()), torch.rand(4, 4)),
    "in place": lambda: (lambda x: x.clone().add_(1).mul_(2), torch.rand(4, 4)),
    "shapes": lambda: ((lambda x: (x @ x.T).view(x.size(0), -1) / x.shape[0] ** 0.5), torch.rand(4, 4)),
    "linear": lambda: (nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), torch.rand(3, 4)),
    "batch norm": lambda: (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.rand(3, 4)),
    "convolution": lambda: (nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).eval(), torch.rand(1, 1, 6, 6)),
    "transposed": lambda: (nn.ConvTranspose1d(4, 4, 3), torch.rand(2, 4, 4)),
    "recurrent": lambda: (nn.LSTM(4, 4), torch.rand(2, 3, 4)),
    "attention": lambda: (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), torch.rand(2, 3, 4)),
}


def trace_and_use(model: Any, x: torch.Tensor) -> tuple[list[str], list[torch.Tensor]]:
    """All that torch makes of a model: traced, printed, saved, loaded, run, differentiated and frozen."""
    traced = torch.jit.trace(model, x)  # which checks itself
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    graphs, values = [str(traced.inlined_graph), str(loaded.code)], []
    for function in (traced, loaded):
        for _ in range(3):
            results = _pytree.tree_leaves(function(x))
            values += [result.detach().clone() for result in results]
            if results[0].requires_grad:
                results[0].sum().backward()
    if isinstance(traced, nn.Module):
        values += [p.grad for p in traced.parameters() if p.grad is not None]
        if not traced.training:
            frozen = torch.jit.freeze(traced)
            graphs.append(str(frozen.graph))
            values += [frozen(x) for _ in range(3)]
    return [re.sub(r" #.*|___torch_mangle_\d+\.|%[\w.]+", "", graph) for graph in graphs], values


@pytest.mark.parametrize("name", MODELS)
def test_tracing_inside_a_ledger(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name]()
    other = copy.deepcopy(model)
    graphs, values = trace_and_use(other, x)
    with tl.Ledger() as ledger:
        traced_graphs, traced_values = trace_and_use(model, x)
    assert traced_graphs == graphs
    assert len(traced_values) == len(values)
    assert all(map(torch.equal, traced_values, values))
    ledger.report.save(tmp_path / "report.json", journal=True)  # no number of it is a traced one
    assert tl.Report.load(tmp_path / "report.json").flops == ledger.report.flops
    assert ledger.report.faults == ()


def test_the_check_of_a_trace_is_counted() -> None:
    """Once to trace; then the trace, the function, and a second trace and its run."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.ones(8, 16)
    for check, runs in ((False, 1), (True, 5)):
        with tl.Ledger(model) as ledger:
            torch.jit.trace(model, x, check_trace=check)
        assert ledger.report.flops.total == runs * (A + B)


def test_a_trace_that_fails_its_check_says_so() -> None:
    with tl.Ledger() as ledger, pytest.raises(torch.jit.TracingCheckError):
        torch.jit.trace(lambda x: x * torch.randint(1 << 30, (1,)).item(), torch.ones(2))
    assert ledger.report.faults == ()


@pytest.mark.parametrize("strict", [False, True])
def test_export_inside_a_ledger(strict: bool) -> None:
    import torch._dynamo  # else it is found as it runs

    model, x = Net().eval(), torch.ones(8, 16)
    with tl.Ledger() as ledger:
        exported = torch.export.export(model, (x,), strict=strict)
        before = ledger.report.flops.total
        exported.module()(x).sum().backward()
        loss = torch.fx.symbolic_trace(model)(x).sum()
    assert (before, ledger.report.faults) == (0, ())
    assert ledger.report.flops.total == 7 * A + 4 * B + 3 * 2 * 8 * 4 * 4
    assert loss.requires_grad
    handler: Any = torch._dynamo.callback.callback_handler
    assert (handler.start_callbacks, handler.end_callbacks) == ([], [])
    assert handler.__dict__.get("clear") is None


def test_nothing_of_ours_stays_in_torchscript() -> None:
    kinds: list[Any] = [torch._C.ScriptMethod, torch._C.ScriptFunction, torch._C.Graph, torch._C.Node]
    before = [dict(vars(kind)) for kind in kinds]
    with warnings.catch_warnings(), tl.Ledger():
        torch.jit.script(nn.Linear(2, 2))(torch.ones(2, 2))
    assert [dict(vars(kind)) for kind in kinds] == before
