"""What ops hold inside themselves, against the profiler alone, without any ledger or mode."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.profiler as autograd_profiler
from torch import nn
from torch.autograd import profiler_legacy
from torch.profiler import ProfilerActivity, profile, schedule

import torchledger as tl
from models import GPT
from oracles import bytes_inside_ops, gradients_of, profiler_bytes
from torchledger.journal.rows import AuditRow
from torchledger.journal.statements import StepReport
from torchledger.render.markdown import render_markdown
from torchledger.render.text import render_text

Step = Callable[[], None]


def small_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 64, 10),
    )  # fmt: skip


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(64, 64), nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.attention(x, x, x)[0]


class Branching(nn.Module):
    """Three gradients meet, which are summed in place where no ledger watches."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(256, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * self.scale
        return h.sin() + h.cos() + h.exp()


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.layers = kind(32, 48, 2, batch_first=True, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)[0]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "small conv net": (small_net, lambda: torch.randn(8, 3, 16, 16)),
    "conv1d": (
        lambda: nn.Sequential(nn.Conv1d(4, 32, 3), nn.BatchNorm1d(32), nn.Tanh()),
        lambda: torch.randn(16, 4, 99),
    ),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(4, 8, 3), nn.GELU()), lambda: torch.randn(2, 4, 20, 20)),
    "upsampling": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.Upsample(scale_factor=4, mode="bilinear"), nn.Conv2d(8, 3, 1)),
        lambda: torch.randn(4, 3, 24, 24),
    ),
    "lstm": (lambda: Recurrent(nn.LSTM), lambda: torch.randn(8, 20, 32)),
    "lstm both ways": (lambda: Recurrent(nn.LSTM, bidirectional=True), lambda: torch.randn(3, 17, 32)),
    "gru": (lambda: Recurrent(nn.GRU), lambda: torch.randn(8, 20, 32)),
    "branches": (Branching, lambda: torch.randn(256, 256)),
    "attention": (Attention, lambda: torch.randn(4, 32, 64)),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True),
        lambda: torch.randn(4, 32, 64),
    ),
    "bf16": (
        lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).bfloat16(),
        lambda: torch.randn(128, 64).bfloat16(),
    ),
}


def make_step(name: str) -> tuple[nn.Module, Step]:
    torch.manual_seed(0)
    make_model, make_input = MODELS[name]
    model, x = make_model(), make_input()

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad()

    step()  # what is made once, is made
    return model, step


def audited(report: tl.Report) -> StepReport:
    (found,) = [step for step in report.steps if step.audit or step.audited_peak]
    return found


@pytest.mark.parametrize("name", MODELS)
def test_the_peak_with_what_ops_hold_is_the_profilers(name: str) -> None:
    _, step = make_step(name)
    peak, _ = profiler_bytes(step)
    model, step = make_step(name)
    with tl.Ledger(model, audit=True) as ledger:
        for _ in range(3):
            step()
            ledger.step()
    report = ledger.report
    assert report.faults == ()
    found = audited(report)
    assert found.index == 1
    assert found.audited_peak is not None
    assert found.audited_peak.total_bytes - found.memory["cpu"].start.total_bytes == peak
    assert found.audited_peak.total_bytes >= found.memory["cpu"].peak.total_bytes


@pytest.mark.parametrize(
    "name", ["small conv net", "conv1d", "transposed", "upsampling", "lstm", "encoder layer", "bf16"]
)
def test_rows_are_what_the_profiler_finds_in_each_op(name: str) -> None:
    _, step = make_step(name)
    expected = bytes_inside_ops(step)
    model, step = make_step(name)
    with tl.Ledger(model, audit=True) as ledger:
        step()
    ours: dict[str, int] = {}
    for row in audited(ledger.report).audit:
        ours[row.op] = max(ours.get(row.op, 0), row.nbytes)
    large = {op: nbytes for op, nbytes in expected.items() if nbytes > 64}
    assert large
    assert {op: nbytes for op, nbytes in ours.items() if nbytes > 64} == large


def test_a_hand_value_for_each_place() -> None:
    # In training the backward of a batch norm holds a buffer as large as its input: where no affine gradient is
    # expanded, one of 4 * 8 * 6 * 6 floats.
    model = nn.Sequential(nn.BatchNorm2d(8), nn.Identity())
    x = torch.randn(4, 8, 6, 6, requires_grad=True)
    with tl.Ledger(model, audit=True) as ledger:
        (model(x) * torch.randn(4, 8, 6, 6)).sum().backward()
    rows = {row.op: row for row in audited(ledger.report).audit}
    row = rows["aten.native_batch_norm_backward"]
    assert row == AuditRow("aten.native_batch_norm_backward", "0", "backward", row.nbytes, 1)
    assert row.nbytes == 4 * 4 * 8 * 6 * 6
    # Bilinear upsampling copies its input and result into another layout.
    up = nn.Upsample(scale_factor=2, mode="bilinear")
    with torch.no_grad(), tl.Ledger(up, audit=True) as ledger:
        up(torch.zeros(2, 8, 10, 10))
        up(torch.zeros(1, 8, 10, 10))
    (row,) = audited(ledger.report).audit
    assert row == AuditRow("aten.upsample_bilinear2d", "", row.phase, 4 * 2 * 8 * (10 * 10 + 20 * 20), 2)
    peak = audited(ledger.report).audited_peak
    assert peak is not None
    assert (peak.op, peak.inside_bytes) == ("aten.upsample_bilinear2d", row.nbytes)
    assert peak.total_bytes == ledger.report.peak.total_bytes + row.nbytes


def test_a_transformer_has_its_scratch_alone() -> None:
    model = GPT(n_layers=2)
    ids = torch.randint(0, 256, (2, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    with tl.Ledger(model, optimizer, audit=True) as ledger:
        for _ in range(2):
            model(ids, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
            ledger.step()
    found = audited(ledger.report)
    assert {row.op.removesuffix("_backward") for row in found.audit if row.nbytes > 1024} == {
        "aten._scaled_dot_product_flash_attention_for_cpu"
    }
    assert {row.module for row in found.audit if "attention" in row.op} == {"blocks.0", "blocks.1"}
    assert found.audited_peak is not None
    assert found.audited_peak.total_bytes == found.memory["cpu"].peak.total_bytes
    assert found.audited_peak.inside_bytes == 0


def test_the_audited_step_is_kept() -> None:
    model, step = make_step("small conv net")
    with tl.Ledger(model, audit=True, keep=1) as ledger:
        for _ in range(5):
            step()
            ledger.step()
    report = ledger.report
    assert audited(report).index == 1
    assert len(report.steps) <= 3
    assert tl.Report.from_dict(report.to_dict()) == report
    assert report.blind_spots == ()
    for page in (render_text(report), render_markdown(report)):
        assert "Held inside ops" in page
        assert "native_batch_norm_backward" in page


def test_a_watched_program_computes_the_same() -> None:
    model, _ = make_step("small conv net")
    x = torch.randn(2, 3, 16, 16)

    def run() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(x).square().mean().backward()
        return gradients_of(model)

    model.eval()
    plain = run()
    with tl.Ledger(model, audit=True):
        watched = run()
    assert all(torch.equal(plain[name], watched[name]) for name in plain)


def hooks() -> tuple[Any, Any]:
    return autograd_profiler._enable_profiler, profiler_legacy._enable_profiler_legacy


def test_nothing_is_left_behind_after_an_exception() -> None:
    before = hooks()
    model, step = make_step("small conv net")
    ledger = tl.Ledger(model, audit=True)

    @ledger
    def fail() -> None:
        step()
        model(torch.randn(2, 4, 16, 16))

    with pytest.raises(RuntimeError, match="channels"):
        fail()
    assert hooks() == before
    assert not torch.autograd._profiler_enabled()
    assert audited(ledger.report).audit


def n_events(run: Callable[[], Any]) -> tuple[int, Any]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    return len(profiler.events()), result


def test_a_program_that_profiles_goes_first() -> None:
    before = hooks()
    model, step = make_step("small conv net")

    def around() -> tl.Ledger:
        with tl.Ledger(model, audit=True) as ledger:
            for _ in range(2):
                step()
                ledger.step()
        return ledger

    n_with_ledger, _ = n_events(lambda: around_without_audit(model, step))
    n, ledger = n_events(around)
    assert n == n_with_ledger
    assert "no step could be audited" in ledger.report.blind_spots[0]
    assert "aten.convolution_backward" in ledger.report.blind_spots[1]
    with tl.Ledger(model, audit=True) as ledger:
        for _ in range(2):
            step()
            n_inside, _ = n_events(step)
            ledger.step()
    assert n_inside > 20
    assert "a profiler of its own" in ledger.report.blind_spots[0]
    assert ledger.report.faults == ()
    assert "no step could be audited" in str(ledger.report)
    assert hooks() == before


def around_without_audit(model: nn.Module, step: Step) -> None:
    with tl.Ledger(model) as ledger:
        for _ in range(2):
            step()
            ledger.step()


def test_a_profiler_that_warms_up_is_left_alone() -> None:
    model, step = make_step("small conv net")
    ready = []
    with (
        tl.Ledger(model, audit=True) as ledger,
        profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=1, warmup=2, active=1, repeat=1),
            on_trace_ready=lambda p: ready.append(len(p.events())),
        ) as profiler,
    ):
        for _ in range(5):
            step()
            ledger.step()
            profiler.step()
    assert len(ready) == 1
    assert ready[0] > 20
    assert audited(ledger.report).audit


def test_other_steps_are_not_marked() -> None:
    model, step = make_step("small conv net")
    with tl.Ledger(model, audit=True) as ledger:
        for index in range(4):
            step()
            recorder = ledger._recorder
            assert recorder is not None
            assert (recorder.audit is not None) == (index < 2)
            assert torch.autograd._profiler_enabled() == (index < 2)
            ledger.step()


def test_threads_and_inner_ledgers() -> None:
    model, step = make_step("small conv net")
    reports = []

    def work() -> None:
        with tl.Ledger(model, audit=True) as ledger:
            step()
        reports.append(ledger.report)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    with tl.Ledger(model, audit=True) as outer, tl.Ledger(model, audit=True) as inner:
        step()
    alone, both = audited(reports[0]).audit, audited(outer.report).audit
    assert [row for row in alone if row.nbytes > 64] == [row for row in both if row.nbytes > 64]
    assert "another profiler is on" in inner.report.blind_spots[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_is_not_profiled() -> None:
    model, _ = make_step("small conv net")
    with tl.Ledger(model, audit=True):
        torch.ones(3)
        child = os.fork()
        if child == 0:
            os._exit(int(torch.autograd._profiler_enabled()))
        _, status = os.waitpid(child, 0)
        assert torch.autograd._profiler_enabled()
    assert os.waitstatus_to_exitcode(status) == 0
