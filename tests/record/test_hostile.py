"""Programs that a ledger must survive, and must not change."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

import torchledger as tl
from models import Residual
from oracles import profiler_bytes
from torchledger.errors import UsageError

PRODUCT = 2 * 8 * 8 * 8


def assert_sound(ledger: tl.Ledger) -> None:
    assert ledger.report.faults == ()
    for step in ledger.report.steps:
        for memory in step.memory.values():
            assert sum(memory.peak.by_category.values()) == memory.peak.total_bytes


# Peaks where gradients meet


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(500, 64), nn.Linear(64, 500, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.embedding(ids)), ids)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = self.cell(x).tanh()
        return x.sum()


@pytest.mark.parametrize("make", [lambda: (Tied(), torch.arange(8)), lambda: (Recurrent(), torch.randn(2, 16))])
def test_gradients_of_reused_weights_do_not_add_in_place(make: Any) -> None:
    # A linear layer's weight gradient is a transposed view: the engine cannot add into it.
    torch.manual_seed(0)
    model, x = make()

    def run() -> None:
        model(x).backward()
        model.zero_grad(set_to_none=True)

    run()
    peak, _ = profiler_bytes(run, between_ops=True)
    with tl.Ledger(model) as ledger:
        run()
    memory = ledger.report.steps[0].memory["cpu"]
    assert memory.peak.total_bytes - memory.start.total_bytes == pytest.approx(peak, abs=16)


# Tensors that come without an op


def test_tensors_made_of_lists_are_made_now() -> None:
    values = list(range(10_000))
    model = nn.Linear(4, 4)
    with tl.Ledger(model) as ledger:
        for _ in range(3):
            labels = torch.tensor(values)
            assert labels.sum() > 0
            model(torch.as_tensor([[1.0, 2.0, 3.0, 4.0]])).sum().backward()
            model.zero_grad()
            del labels
            ledger.step()
    assert_sound(ledger)
    memory = ledger.report.steps[-1].memory["cpu"]
    assert memory.start.total_bytes == memory.end.total_bytes == 4 * 20
    assert memory.peak.total_bytes >= 80_000


# Models that a ledger cannot enter at once


@pytest.mark.parametrize("given", [True, False])
def test_lazy_modules(given: bool) -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyLinear(8))
    with tl.Ledger(model if given else None) as ledger:
        for _ in range(2):
            model(torch.randn(8, 8)).sum().backward()
            model.zero_grad()
            ledger.step()
    assert_sound(ledger)
    step = ledger.report.steps[1]
    assert step.peak.parameters == 2 * 4 * 72
    assert step.flops.by_parameter["0.weight"] == tl.ParameterFlops(PRODUCT, 0, PRODUCT, 0)


@pytest.mark.parametrize("given", [True, False])
def test_function_transforms_of_modules(given: bool) -> None:
    model = nn.Linear(8, 8)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    x = torch.randn(8, 8)
    with tl.Ledger(model if given else None) as ledger:
        torch.func.grad(lambda w: functional_call(model, w, (x,)).sum())(weights)
        torch.func.vmap(lambda row: functional_call(model, weights, (row,)))(x)
        torch.func.jvp(lambda x: functional_call(model, weights, (x,)), (x,), (x,))
    assert_sound(ledger)
    assert ledger.report.main_device == "cpu"


def test_a_model_that_cannot_be_entered_is_a_fault_of_the_ledger() -> None:
    class Hostile(nn.Linear):
        def named_modules(self, *args: Any, **kwargs: Any) -> Any:
            raise KeyError("named_modules")

    model = Hostile(8, 8)
    for ledger in (tl.Ledger(), tl.Ledger(model)):
        with ledger:
            model(torch.randn(8, 8))
        assert any("named_modules" in fault for fault in ledger.report.faults)
        assert ledger.report.flops.total == PRODUCT


def test_swapped_tensors() -> None:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(TwoTensor(torch.randn(4, 4), torch.randn(4, 4)))
    with tl.Ledger(model) as ledger:
        model.to(torch.float64)
    model.to(torch.float32)
    assert_sound(ledger)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        plain = nn.Linear(4, 4)
        with tl.Ledger(plain) as ledger:
            plain.to(torch.float64)
            plain(torch.randn(2, 4, dtype=torch.float64))
            ledger.step()
        plain.to(torch.float32)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert ledger.report.steps[0].memory["cpu"].end.parameters == 8 * 20


# Ledgers used in odd ways


def test_a_ledger_entered_again_adds_steps() -> None:
    model = nn.Linear(8, 4)
    ledger = tl.Ledger(model)
    for rows in (4, 4000, 8):
        with ledger:
            model(torch.randn(rows, 8)).sum().backward()
            model.zero_grad()
    report = ledger.report
    assert (report.n_steps, [s.index for s in report.steps]) == (3, [0, 1, 2])
    assert report.peak_step is not None
    assert report.peak_step.index == 1
    assert report.peak.inputs == 4000 * 8 * 4


def test_interleaved_exits() -> None:
    x = torch.randn(8, 8)
    a, b = tl.Ledger(), tl.Ledger()
    a.__enter__()
    b.__enter__()
    x @ x
    a.__exit__(None, None, None)
    x @ x
    b.__exit__(None, None, None)
    assert (a.report.flops.total, b.report.flops.total) == (PRODUCT, 2 * PRODUCT)
    assert torch._C._len_torch_dispatch_stack() == 0
    from torch.utils import _python_dispatch

    assert not _python_dispatch._is_in_torch_dispatch_mode


def test_turns_of_two_threads_leave_no_flag() -> None:
    from torch.utils import _python_dispatch

    before = _python_dispatch._is_in_torch_dispatch_mode
    a, b = tl.Ledger(), tl.Ledger()
    entered, left = threading.Event(), threading.Event()

    def work() -> None:
        with b:
            entered.set()
            left.wait()

    thread = threading.Thread(target=work)
    with a:
        thread.start()
        entered.wait()
    left.set()
    thread.join()
    assert _python_dispatch._is_in_torch_dispatch_mode == before


def test_left_on_another_thread() -> None:
    call = nn.Module.__call__
    ledger = tl.Ledger()
    entered, left = threading.Event(), threading.Event()
    seen: list[Any] = []

    def work() -> None:
        ledger.__enter__()
        entered.set()
        left.wait()
        seen.append(torch.ones(2) + 1)

    thread = threading.Thread(target=work)
    thread.start()
    entered.wait()
    with pytest.raises(UsageError, match="another thread"):
        ledger.__exit__(None, None, None)
    assert nn.Module.__call__ is call
    left.set()
    thread.join()
    assert seen[0].tolist() == [2, 2]
    with tl.Ledger() as again:
        torch.ones(8, 8) @ torch.ones(8, 8)
    assert again.report.flops.total == PRODUCT


def test_other_modes_see_nothing_of_ours() -> None:
    model = nn.Linear(8, 8)
    with tl.Ledger(model) as outer, tl.Ledger(model):
        pass
    assert outer.report.flops.total == 0
    with FlopCounterMode(display=False) as counter, tl.Ledger(model):
        pass
    assert counter.get_total_flops() == 0


def test_generator_functions_are_refused() -> None:
    ledger = tl.Ledger()
    with pytest.raises(UsageError, match="generator"):

        @ledger
        def produce() -> Iterator[int]:
            yield 1


@pytest.mark.parametrize("tokens", [-5, "many", 1.5, True])
def test_step_refuses_odd_tokens(tokens: Any) -> None:
    with tl.Ledger() as ledger, pytest.raises(UsageError, match="tokens"):
        ledger.step(tokens=tokens)


def test_calls_on_other_threads_are_reported() -> None:
    ledger = tl.Ledger()
    started, done = threading.Event(), threading.Event()

    @ledger
    def wait() -> None:
        started.set()
        done.wait()

    @ledger
    def other() -> None:
        torch.ones(2)

    thread = threading.Thread(target=wait)
    thread.start()
    started.wait()
    other()
    done.set()
    thread.join()
    assert any("another thread" in fault for fault in ledger.report.faults)


# Loops


def test_modules_made_in_each_step_take_constant_memory() -> None:
    model = nn.Linear(8, 8)
    with tl.Ledger(keep=2) as ledger:
        for _ in range(50):
            head = nn.Linear(8, 2)
            nn.MSELoss()(head(model(torch.randn(4, 8))), torch.zeros(4, 2)).backward()
            ledger.step()
        recorder = ledger._recorder
        assert recorder is not None
        assert len(recorder.names.module_paths()) < 10
        assert len(recorder.names.parameter_paths()) < 10
    assert_sound(ledger)


def test_cond_has_a_backward() -> None:
    w = torch.randn(8, 8, requires_grad=True)
    with tl.Ledger() as ledger:
        torch.cond(torch.tensor(True), lambda x: x @ w, lambda x: x + w, (torch.randn(8, 8),)).sum().backward()
    flops = ledger.report.flops
    assert flops.forward == PRODUCT
    assert flops.recompute == 0
    assert flops.backward > 0


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_reports_of_compiled_functions_load_again(backend: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = nn.Linear(8, 8)
    function = torch.compile(model, backend=backend)
    with tl.Ledger(model) as ledger:
        for _ in range(3):
            function(torch.randn(8, 8)).sum().backward()
            model.zero_grad()
            ledger.step()
    regions = [step.flops.compiled_regions for step in ledger.report.steps]
    interpreted = backend == "aot_eager" and torch.__version__.startswith("2.9.")  # which runs node by node there
    assert regions[1] == regions[2]
    assert regions[2] >= (0 if interpreted else 1)
    ledger.report.save(tmp_path / "report.json", journal=True)
    assert tl.Report.load(tmp_path / "report.json").to_dict() == ledger.report.to_dict()
    assert pickle.loads(pickle.dumps(ledger.report)).flops == ledger.report.flops


def test_storage_patches_of_others_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        seen.append(size)
        return super(torch.UntypedStorage, self).resize_(size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", resize_)
    with tl.Ledger() as ledger:
        x = torch.zeros(100)
        x.untyped_storage().resize_(4000)
    assert seen == [4000]
    assert torch.UntypedStorage.__dict__["resize_"] is resize_
    assert ledger.report.peak.total_bytes == 4400  # old and new together while it is copied
    del x


def test_a_failed_optimizer_step_holds_nothing() -> None:
    import weakref

    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise RuntimeError("no")

    model = Residual()
    optimizer = Failing(model.parameters(), lr=0.1)
    with tl.Ledger(model, optimizer):

        def closure() -> None:
            pass

        held = weakref.ref(closure)
        with contextlib.suppress(RuntimeError):
            optimizer.step(closure)
        del closure
        assert held() is None


def test_leaving_inside_an_inference_mode() -> None:
    ledger = tl.Ledger()
    ledger.__enter__()
    with torch.inference_mode():
        torch.ones(8, 8) @ torch.ones(8, 8)
        ledger.__exit__(None, None, None)
        torch.ones(8, 8) @ torch.ones(8, 8)
    assert (torch.ones(2) + 1).tolist() == [2, 2]
    assert torch._C._len_torch_dispatch_stack() == 0
    assert ledger.report.flops.total == PRODUCT
