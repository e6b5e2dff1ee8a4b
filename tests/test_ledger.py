"""The object that users hold: steps, schedules, nesting, decorators, threads, and what it leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchledger as tl
from models import GPT, Residual
from oracles import gradients_of
from torchledger.errors import UncountedOpError, UsageError

ROWS = 8
LINEAR = 2 * ROWS * 16 * 64


def run_once(model: nn.Module, x: torch.Tensor | None = None) -> None:
    model(torch.randn(ROWS, 16) if x is None else x).sum().backward()


def test_steps_and_totals() -> None:
    model = Residual()
    with tl.Ledger(model, tokens_per_step=ROWS, keep=2) as ledger:
        for i in range(5):
            run_once(model)
            ledger.step(tokens=i if i == 4 else None)
    report = ledger.report
    assert (report.n_steps, [s.index for s in report.steps]) == (5, [1, 3, 4])  # the last two, and the highest peak's
    assert report.flops.forward == 5 * 2 * LINEAR
    assert [s.tokens for s in report.steps] == [ROWS, ROWS, 4]
    assert report.flops.by_module["a"].forward == 5 * LINEAR


def test_what_runs_after_the_last_step_is_the_remainder() -> None:
    model = Residual()
    with tl.Ledger(model) as ledger:
        x = torch.randn(ROWS, 16)
        run_once(model, x)
        ledger.step()
        del x
    assert ledger.report.n_steps == 1
    with tl.Ledger(model) as ledger:
        run_once(model)
        ledger.step()
        run_once(model)
    report = ledger.report
    assert (report.n_steps, len(report.steps)) == (1, 1)
    assert report.remainder is not None
    assert report.remainder.index == 1
    assert report.remainder.flops.total == report.steps[-1].flops.total == report.flops.total


def test_reading_a_loss_after_the_last_step_makes_no_step() -> None:
    model = Residual()
    with tl.Ledger(model) as ledger:
        loss = model(torch.randn(ROWS, 16)).sum()
        loss.backward()
        ledger.step()
        assert isinstance(loss.item(), float)
    assert ledger.report.n_steps == 1


def test_steps_that_are_not_whole_are_noted() -> None:
    model = Residual()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tl.Ledger(model, optimizer) as ledger:
        for _ in range(3):
            run_once(model)
            optimizer.step()
    assert "3 optimizer steps" in ledger.report.environment["note"]
    assert "3 optimizer steps" in " ".join(str(ledger.report).split())

    def stop() -> None:
        raise KeyError("stop")

    ledger = tl.Ledger(model)
    with contextlib.suppress(KeyError), ledger:
        run_once(model)
        ledger.step()
        run_once(model)
        stop()
    assert ledger.report.environment["note"] == "step 1 was cut short by KeyError"
    ledger = tl.Ledger(model)
    with contextlib.suppress(SystemExit), ledger:  # as a script ends that went well
        run_once(model)
        sys.exit(0)
    assert "note" not in ledger.report.environment


def test_the_block_is_one_step_without_any_call() -> None:
    with tl.Ledger() as ledger:
        pass
    assert ledger.report.n_steps == 1
    assert ledger.report.flops.total == 0


def test_report_is_readable_inside_the_block() -> None:
    model = Residual()
    with tl.Ledger(model) as ledger:
        run_once(model)
        assert ledger.report.flops.forward == 2 * LINEAR
        run_once(model)
        assert ledger.report.flops.forward == 4 * LINEAR
        ledger.step()
        run_once(model)
        assert ledger.report.n_steps == 1
    assert ledger.report.n_steps == 1
    assert ledger.report.remainder.flops.forward == 2 * LINEAR


def test_schedule_records_active_steps_alone() -> None:
    model = Residual()
    seen = []
    with tl.Ledger(model, tokens_per_step=ROWS, schedule=tl.schedule(wait=1, warmup=1, active=2, repeat=1)) as ledger:
        for _ in range(6):
            seen.append(torch._C._len_torch_dispatch_stack())
            run_once(model)
            ledger.step()
    assert seen == [0, 0, 1, 1, 0, 0]
    report = ledger.report
    assert [s.index for s in report.steps] == [2, 3]
    assert report.unrecorded.n_steps == 3  # the program's first step is not timed
    assert report.unrecorded.tokens == 3 * ROWS
    assert report.unrecorded.duration_s > 0
    assert report.flops.forward == 4 * LINEAR


@pytest.mark.parametrize("arguments", [{"active": 0}, {"active": 1, "wait": -1}, {"active": True}, {"active": 1.5}])
def test_schedule_refuses(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="schedule"):
        tl.schedule(**arguments)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"model": 3}, "torch.nn.Module"),
        ({"model": "abc"}, "torch.nn.Module"),
        ({"optimizer": [nn.Linear(1, 1)]}, "Optimizer"),
        ({"optimizer": nn.Linear(1, 1).parameters()}, "not its parameters"),
        ({"model": nn.Linear}, "the class Linear"),
        ({"keep": 0}, "keep"),
        ({"tokens_per_step": -1}, "tokens"),
        ({"tokens_per_step": 1.5}, "tokens"),
        ({"schedule": 3}, "schedule"),
    ],
)
def test_ledger_refuses(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        tl.Ledger(**arguments)


def test_step_outside_the_block_and_entering_twice_are_refused() -> None:
    ledger = tl.Ledger()
    with pytest.raises(UsageError, match="outside"):
        ledger.step()
    with ledger, pytest.raises(UsageError, match="already"), ledger:
        pass
    assert torch._C._len_torch_dispatch_stack() == 0


def test_nested_ledgers_both_see_all() -> None:
    model = Residual()
    with tl.Ledger(model) as outer:
        run_once(model)
        with tl.Ledger(model) as inner:
            run_once(model)
            inner.step()
        run_once(model)
    assert inner.report.flops.forward == 2 * LINEAR
    assert outer.report.flops.forward == 6 * LINEAR
    assert inner.report.flops.by_module == {
        k: v for k, v in inner.report.flops.by_module.items() if k in ("", "a", "b")
    }
    assert outer.report.flops.by_parameter["a.weight"].weight_grad == 3 * LINEAR


def test_decorator() -> None:
    model = Residual()
    ledger = tl.Ledger(model)

    @ledger
    def train(n: int) -> int:
        """Trains."""
        run_once(model)
        return train(n - 1) if n else 7

    assert train.__doc__ == "Trains."
    assert train(1) == 7
    assert train(0) == 7
    assert ledger.report.flops.forward == 3 * 2 * LINEAR
    assert ledger.report.n_steps == 2


def test_decorator_of_a_coroutine() -> None:
    model = Residual()
    ledger = tl.Ledger(model)

    @ledger
    async def train() -> None:
        run_once(model)

    asyncio.run(train())  # type: ignore[arg-type]
    assert ledger.report.flops.forward == 2 * LINEAR


def test_other_threads_do_not_disturb() -> None:
    model, other = Residual(), nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            other(torch.randn(4, 16)).sum().backward()

    thread = threading.Thread(target=work)
    with tl.Ledger(model) as ledger:
        thread.start()
        try:
            for _ in range(20):
                run_once(model)
                ledger.step()
        finally:
            stop.set()
            thread.join()
    for step in ledger.report.steps:
        assert (step.flops.forward, step.flops.backward) == (2 * LINEAR, 3 * LINEAR)
        assert set(step.flops.by_module) == {"", "a", "b"}
    assert ledger.report.faults == ()


def test_two_threads_with_a_ledger_each() -> None:
    models, ledgers = [Residual(), Residual()], [tl.Ledger(), tl.Ledger()]

    def work(i: int) -> None:
        with ledgers[i] as ledger:
            for _ in range(20):
                run_once(models[i])
                ledger.step()

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ledger in ledgers:
        assert ledger.report.flops.forward == 20 * 2 * LINEAR
        assert set(ledger.report.flops.by_module) == {"", "a", "b"}


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loaders(workers: int) -> None:
    data = TensorDataset(torch.randn(32, 16))
    model = Residual()
    with tl.Ledger(model) as ledger:
        for (x,) in DataLoader(data, batch_size=ROWS, num_workers=workers):
            run_once(model, x)
            ledger.step()
    for step in ledger.report.steps:
        memory = step.memory["cpu"]
        assert memory.peak.inputs >= ROWS * 16 * 4
        assert memory.end.other == 0
    assert ledger.report.flops.forward == 4 * 2 * LINEAR


# What it leaves behind


def leftovers() -> dict[str, Any]:
    from torch.optim import optimizer as optim

    return {
        "call": nn.Module.__call__,
        "backward": torch.autograd._engine_run_backward,
        "inductor": getattr(sys.modules.get("torch._inductor.output_code"), "CompiledFxGraph", nn.Module).__call__,
        "resize": torch.UntypedStorage.__dict__.get("resize_"),
        "hooks": (len(optim._global_optimizer_pre_hooks), len(optim._global_optimizer_post_hooks)),
        "module hooks": len(nn.modules.module._global_forward_hooks),
        "modes": torch._C._len_torch_dispatch_stack(),
    }


@pytest.mark.parametrize("raise_in", [None, "forward", "backward", "block"])
def test_nothing_is_left_behind(raise_in: str | None) -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if raise_in == "forward":
                raise KeyError("forward")
            return x * 1

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            if raise_in == "backward":
                raise KeyError("backward")
            return g * 1

    before = leftovers()
    model = Residual()
    ledger = tl.Ledger(model)
    with contextlib.nullcontext() if raise_in is None else pytest.raises(KeyError, match=raise_in), ledger:
        Failing.apply(model(torch.randn(ROWS, 16))).sum().backward()
        if raise_in == "block":
            raise KeyError("block")
    assert leftovers() == before
    assert ledger.report.flops.forward == 2 * LINEAR
    assert ledger.report.n_steps == 1


LAYERS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "linear": lambda: (nn.Linear(16, 8), torch.randn(4, 16)),
    "convolution": lambda: (nn.Conv2d(3, 4, 3, padding=1, groups=1), torch.randn(2, 3, 8, 8)),
    "grouped transposed convolution": lambda: (
        nn.ConvTranspose2d(8, 16, 3, stride=2, groups=4),
        torch.randn(2, 8, 5, 5),
    ),
    "batch norm": lambda: (nn.BatchNorm2d(3), torch.randn(4, 3, 6, 6)),
    "group norm": lambda: (nn.GroupNorm(2, 4), torch.randn(4, 4, 6)),
    "LSTM": lambda: (nn.LSTM(8, 16, 2), torch.randn(5, 3, 8)),
    "GRU": lambda: (nn.GRU(8, 16), torch.randn(5, 3, 8)),
    "attention": lambda: (Once(nn.MultiheadAttention(16, 4, batch_first=True), 3), torch.randn(2, 5, 16)),
    "encoder": lambda: (nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True), torch.randn(2, 5, 16)),
    "SiLU": lambda: (nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8), nn.Mish()), torch.randn(4, 8)),
    "dropout": lambda: (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), torch.randn(4, 8)),
    "bilinear": lambda: (Once(nn.Bilinear(8, 8, 4), 2), torch.randn(4, 8)),
    "upsampling": lambda: (
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Upsample(scale_factor=2, mode="bilinear")),
        torch.randn(1, 1, 8, 8),
    ),
    "pooling": lambda: (nn.Sequential(nn.Conv1d(2, 2, 3), nn.MaxPool1d(2)), torch.randn(2, 2, 12)),
    "tanh of a weight norm": lambda: (
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Tanh()),
        torch.randn(4, 8),
    ),
    "embedding": lambda: (nn.Embedding(10, 4, max_norm=1.0), torch.arange(6)),
}


class Once(nn.Module):
    """Feeds one input several times."""

    def __init__(self, inner: nn.Module, n: int) -> None:
        super().__init__()
        self.inner, self.n = inner, n

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(*[x] * self.n)


@pytest.mark.parametrize("name", LAYERS)
def test_values_and_gradients_are_bit_for_bit_the_same(name: str) -> None:
    def run() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model, x = LAYERS[name]()
        out = model(x)
        out = out[0] if isinstance(out, tuple) else out
        out.square().sum().backward()
        return out.detach(), gradients_of(model)

    out, gradients = run()
    with tl.Ledger() as ledger:
        watched, watched_gradients = run()
    assert torch.equal(out, watched)
    assert gradients.keys() == watched_gradients.keys()
    assert all(torch.equal(gradients[k], watched_gradients[k]) for k in gradients)
    assert ledger.report.faults == ()
    memory = ledger.report.steps[0].memory["cpu"]
    assert sum(memory.peak.by_category.values()) == memory.peak.total_bytes


def test_random_numbers_are_the_programs_own() -> None:
    torch.manual_seed(0)
    alone = torch.randn(3)
    torch.manual_seed(0)
    with tl.Ledger():
        watched = torch.randn(3)
    assert torch.equal(alone, watched)


def test_two_runs_write_the_same() -> None:
    def run() -> dict[str, Any]:
        torch.manual_seed(0)
        model = GPT(n_layers=2, kind="nonreentrant")
        optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.randint(0, 256, (2, 64))
        with tl.Ledger(model, optimizer) as ledger:
            for _ in range(2):
                model(ids, ids).backward()
                optimizer.step()
                optimizer.zero_grad()
                ledger.step()
        found = ledger.report.to_dict()
        found.pop("environment")
        for step in found["steps"]:
            step.pop("duration_s")
        return found

    assert json.dumps(run()) == json.dumps(run())


def test_memory_of_the_ledger_is_constant() -> None:
    model = Residual()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(ROWS, 16)

    def count() -> int:
        gc.collect()
        return len(gc.get_objects())

    with tl.Ledger(model, optimizer, keep=5) as ledger:
        counts = []
        for i in range(1200):
            run_once(model, x)
            optimizer.step()
            optimizer.zero_grad()
            ledger.step()
            if i in (200, 700, 1199):
                counts.append(count())
        recorder = ledger._recorder
        assert recorder is not None
        assert len(recorder.places[threading.get_ident()].log.numbers) < 100
        assert len(recorder.books.roles) < 100
    assert max(counts) - min(counts) < 50


def test_growing_batches_keep_exact_books() -> None:
    model = Residual()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tl.Ledger(model, optimizer) as ledger:
        for rows in (4, 4, 8, 8, 4):
            run_once(model, torch.randn(rows, 16))
            optimizer.step()
            optimizer.zero_grad()
            ledger.step()
    report = ledger.report
    assert [s.flops.forward for s in report.steps] == [2 * LINEAR * r // ROWS for r in (4, 4, 8, 8, 4)]
    assert [s.memory["cpu"].peak.inputs for s in report.steps] == [r * 16 * 4 for r in (4, 4, 8, 8, 4)]
    assert report.peak_step is not None
    assert report.peak_step.index == 2
    assert list(report.peak_step.memory["cpu"].timeline())
    assert list(report.steps[-1].memory["cpu"].timeline())


# Ops without a formula


@pytest.fixture
def multiply() -> Iterator[Any]:
    library = torch.library.Library("torchledger_tests", "FRAGMENT")
    library.define("multiply(Tensor a, Tensor b) -> Tensor")
    library.impl("multiply", lambda a, b: a @ b, "CompositeExplicitAutograd")
    yield torch.ops.torchledger_tests.multiply
    library._destroy()


def test_uncounted_ops_run_and_are_named(multiply: Any) -> None:
    a, b = torch.randn(8, 16), torch.randn(16, 4)
    with tl.Ledger() as ledger:
        out = multiply(a, b)
    assert torch.equal(out, a @ b)
    assert ledger.report.flops.total == 0
    assert ledger.report.flops.uncounted == {"torchledger_tests.multiply": 1}
    with pytest.raises(UncountedOpError, match=r"torchledger_tests\.multiply"), tl.Ledger(strict=True):
        multiply(a, b)


def test_a_formula_counts_a_custom_op(multiply: Any) -> None:
    @tl.formula(multiply)
    def count(a: tuple[int, int], b: tuple[int, int], *, out_shape: Any = None) -> int:
        return 2 * a[0] * a[1] * b[1]

    with tl.Ledger(strict=True) as ledger:
        multiply(torch.randn(8, 16), torch.randn(16, 4))
    assert ledger.report.flops.total == 1024
    assert ledger.report.flops.uncounted == {}


def test_strict_lets_an_ordinary_loop_pass() -> None:
    model = GPT(n_layers=1)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 256, (1, 64))
    with tl.Ledger(model, optimizer, strict=True):
        model(ids, ids).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def test_a_fault_of_the_ledger_does_not_take_the_step_down(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("inside")

    model = Residual()
    with tl.Ledger(model) as ledger:
        assert ledger._recorder is not None
        monkeypatch.setattr(ledger._recorder, "describe_new", fail)
        monkeypatch.setattr("torchledger.record.mode.post_product", fail)
        run_once(model)
    assert any("ZeroDivisionError" in fault for fault in ledger.report.faults)
    assert model.a.weight.grad is not None


@pytest.mark.parametrize("method", ["meet", "enter", "resized", "add"])
def test_a_fault_in_the_books_does_not_take_the_step_down(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("inside")

    model = Residual()
    optimizer = torch.optim.AdamW(model.parameters())
    x, out = torch.randn(ROWS, 16), torch.empty(0)
    with tl.Ledger(model) as ledger:
        assert ledger._recorder is not None
        monkeypatch.setattr(ledger._recorder.books, method, fail)
        for _ in range(2):
            run_once(model, x)
        out.add_(1)
        torch.add(torch.ones(3), 1, out=out)
        out.untyped_storage().resize_(400)
        optimizer.step()
    assert any("ZeroDivisionError" in fault for fault in ledger.report.faults)
    assert out[:3].tolist() == [2, 2, 2]


def test_a_misplaced_op_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("inside")

    model = Residual()
    with tl.Ledger(model) as ledger:
        monkeypatch.setattr(ledger._recorder, "locate_in_backward", fail)
        run_once(model)
    assert any("could not be placed" in fault for fault in ledger.report.faults)


def test_uncounted_flops_of_a_failing_formula() -> None:
    @tl.formula(torch.ops.aten.cos)
    def broken(*_: Any, **__: Any) -> int:
        raise ValueError("broken")

    try:
        with tl.Ledger() as ledger:
            torch.randn(3).cos()
        assert ledger.report.flops.uncounted == {"aten.cos": 1}
    finally:
        tl.formula(torch.ops.aten.cos)(lambda *_, **__: 0)


def test_functions_of_the_loop_that_have_no_model() -> None:
    w = torch.randn(16, 4, requires_grad=True)
    with tl.Ledger() as ledger:
        for _ in range(3):
            loss = F.cross_entropy(torch.randn(ROWS, 16) @ w, torch.zeros(ROWS, dtype=torch.long))
            loss.backward()
            with torch.no_grad():
                w -= 0.1 * w.grad  # type: ignore[operator]
            w.grad = None
            ledger.step()
    step = ledger.report.steps[-1]
    assert (step.flops.forward, step.flops.backward) == (2 * ROWS * 16 * 4, 2 * ROWS * 16 * 4)
    assert step.memory["cpu"].start.total_bytes == step.memory["cpu"].end.total_bytes
