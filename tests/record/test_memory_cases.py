"""Bytes of small cases, by hand: public reports, and every kind of storage."""

from __future__ import annotations

import copy
import gc
import itertools
import mmap
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchledger as tl


def memory_of(ledger: tl.Ledger, step: int = -1) -> tl.MemoryStatement:
    assert ledger.report.faults == ()
    return ledger.report.steps[step].memory["cpu"]


def over_start(memory: tl.MemoryStatement) -> tuple[int, int]:
    return memory.peak.total_bytes - memory.start.total_bytes, memory.end.total_bytes - memory.start.total_bytes


@pytest.mark.parametrize(
    ("kind", "held", "peak"),
    [(None, 1_179_652, 1_343_752), ("nonreentrant", 131_076, 888_584), ("reentrant", 131_076, 921_608)],
)
def test_checkpointed_mlps(kind: str | None, held: int, peak: int) -> None:  # pytorch#77284, #147449
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
    x = torch.randn(128, 64, requires_grad=True)

    def forward() -> torch.Tensor:
        h = x
        for block in blocks:
            h = checkpoint(block, h, use_reentrant=kind == "reentrant", preserve_rng_state=False) if kind else block(h)
        return h

    with tl.Ledger(blocks) as ledger:
        h = forward()
        loss = h.sum()
        after_forward = ledger.report.steps[0].memory["cpu"]
        assert after_forward.end.total_bytes - after_forward.start.total_bytes == held
        assert after_forward.end.activations == held
        del h
        loss.backward()
    assert over_start(memory_of(ledger))[0] == peak


def test_autocast_copies() -> None:  # pytorch#48049
    model = nn.Linear(256, 256, bias=False)
    x = torch.randn(8, 256)
    with tl.Ledger(model) as ledger, torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        inside = ledger.report.steps[0].memory["cpu"]
        assert inside.end.total_bytes - inside.start.total_bytes == 139_264
        assert inside.end.autocast_copies == 131_072
    del y


def test_matmul_expands_its_operand() -> None:  # pytorch#154128
    a, b = torch.randn(8, 16, 1, 10), torch.randn(16, 10, 10)
    with tl.Ledger() as ledger:
        c = a @ b
    peak, end = over_start(memory_of(ledger))
    assert (peak, end) == (5_120 + 51_200, 5_120)
    del c


def test_a_loss_that_is_never_let_go() -> None:  # pytorch#17568
    model, x = nn.Linear(64, 64), torch.randn(128, 64)
    total: Any = 0.0
    with tl.Ledger(model) as ledger:
        for _ in range(4):
            total = total + torch.relu(model(x)).sum()
            ledger.step()
    ends = [s.memory["cpu"].end.total_bytes for s in ledger.report.steps]
    growth = [b - a for a, b in itertools.pairwise(ends)]
    assert all(32_768 <= g <= 32_768 + 4 for g in growth)
    end = memory_of(ledger).end
    assert any(row.op == "aten.relu" and row.category == "activations" and row.n_blocks == 4 for row in end.largest)


@pytest.mark.parametrize(
    ("dtype", "after", "peak"), [(torch.float32, 256_008, 768_008), (torch.bfloat16, 128_004, 384_004)]
)
def test_cross_entropy(dtype: torch.dtype, after: int, peak: int) -> None:
    logits = torch.randn(64, 1000, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, 1000, (64,))
    with tl.Ledger() as ledger:
        loss = F.cross_entropy(logits, targets)
        held = over_start(ledger.report.steps[0].memory["cpu"])[1]
        loss.backward()
    # The loss's own output and the total weight beside it.
    assert held == pytest.approx(after, abs=4)
    assert over_start(memory_of(ledger))[0] == pytest.approx(peak, abs=4)


def test_sparse_gradient() -> None:  # pytorch_memlab#27
    model = nn.Embedding(1000, 16, sparse=True)
    ids = torch.randint(0, 1000, (4, 8))
    with tl.Ledger(model) as ledger:
        model(ids).sum().backward()
    assert memory_of(ledger).end.gradients == 256 + 2_048


def test_embedding() -> None:
    model = nn.Embedding(1000, 16)
    ids = torch.randint(0, 1000, (4, 8))
    with tl.Ledger(model) as ledger:
        model(ids).sum().backward()
    memory = memory_of(ledger)
    assert memory.end.gradients == 64_000
    assert memory.end.inputs == 256


def test_batch_norm_buffers() -> None:  # HTA#222
    model = nn.BatchNorm1d(64)
    with tl.Ledger(model) as ledger:
        model(torch.randn(8, 64))
    peak = memory_of(ledger).peak
    assert (peak.parameters, peak.buffers) == (512, 520)


def test_bucket_views_count_once() -> None:  # pytorch#41954
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    flat = torch.zeros(2 * 4096)
    for i, p in enumerate(model.parameters()):
        p.grad = flat[4096 * i : 4096 * (i + 1)].view(64, 64)
    with tl.Ledger(model) as ledger:
        model(torch.randn(8, 64)).sum().backward()
    assert memory_of(ledger).start.gradients == memory_of(ledger).end.gradients == 32_768


def test_saved_tensor_hooks_leak_nothing_of_ours() -> None:  # pytorch#115255
    layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
    x = torch.randn(16, 32, requires_grad=True)
    kept = []

    def run() -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            h = x
            for layer in layers:
                h = torch.relu(layer(h))
        kept.append(weakref.ref(h.untyped_storage()))
        h.sum().backward()

    run()
    alone = kept.pop()() is not None
    with tl.Ledger(layers) as ledger:
        run()
    assert (kept.pop()() is not None) == alone
    assert memory_of(ledger).peak.activations >= 3 * 16 * 32 * 4


@pytest.mark.parametrize(
    ("copy_it", "nbytes"),
    [
        (lambda x: x.reshape(-1), 0),
        (lambda x: x.t().reshape(-1), 8_192),
        (lambda x: x.t().contiguous(), 8_192),
        (lambda x: x[:1].expand(64, 32).reshape(-1), 8_192),
        (lambda x: x.to(torch.float32), 0),
        (lambda x: x.clone(), 0),
    ],
)
def test_layout_copies(copy_it: Callable[[torch.Tensor], torch.Tensor], nbytes: int) -> None:
    x = torch.randn(64, 32)
    with tl.Ledger() as ledger:
        copy_it(x)
    assert sum(c.nbytes for c in memory_of(ledger).copies if c.kind == "layout") == nbytes


def test_dtype_copies_are_named_by_module() -> None:
    class Casting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to(torch.float64).to(torch.bfloat16)

    model = nn.Sequential(Casting())
    with tl.Ledger(model) as ledger:
        model(torch.randn(64, 32))
    (row,) = memory_of(ledger).copies
    assert (row.kind, row.nbytes, row.calls, row.module) == ("dtype", 64 * 32 * (8 + 2), 2, "0")


@pytest.mark.parametrize(
    ("context", "live", "peak"),
    [(torch.enable_grad, 262_144, None), (torch.no_grad, 32_768, 65_536), (torch.inference_mode, 32_768, 65_536)],
)
def test_no_grad(context: Callable[[], Any], live: int, peak: int | None) -> None:
    layers = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(64, 64), nn.GELU())))
    x = torch.randn(128, 64)
    with tl.Ledger(layers) as ledger, context():
        y = layers(x)
    got_peak, got_live = over_start(memory_of(ledger))
    assert got_live == live
    assert peak is None or got_peak == peak
    del y


def test_gradient_accumulation() -> None:
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 64)
    with tl.Ledger(model, optimizer) as ledger:
        for _ in range(3):
            for _ in range(2):
                model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            ledger.step()
    for step in ledger.report.steps:
        memory = step.memory["cpu"]
        assert memory.category_peaks["gradients"] == 16_384
        assert memory.peak.other == memory.end.other == 0


def test_residual_mlp() -> None:
    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.a, self.b = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.b(F.gelu(self.a(self.norm(x))))

    model, x = MLP(), torch.randn(128, 64)
    with tl.Ledger(model) as ledger:
        y = model(x)
        forward = ledger.report.steps[0].memory["cpu"]
        assert over_start(forward) == (361_472, 328_704)
        y.sum().backward()
    assert over_start(memory_of(ledger))[0] == 525_576
    del y


# Optimizers


@pytest.mark.parametrize(
    ("options", "transient"), [({"foreach": True}, 49_152), ({"foreach": False}, 81_920), ({"fused": True}, 0)]
)
def test_adamw_transients(options: dict[str, Any], transient: int) -> None:
    parameters = [nn.Parameter(torch.randn(n)) for n in (4096, 8192)]
    optimizer = torch.optim.AdamW(parameters, **options)
    with tl.Ledger(None, optimizer) as ledger:
        for _ in range(2):
            for p in parameters:
                p.grad = torch.ones_like(p)
            optimizer.step()
            optimizer.zero_grad()
            ledger.step()
    memory = memory_of(ledger)
    n = 4 * (4096 + 8192)
    at_rest = 4 * n + 8  # weights, gradients, two moments, two step counters
    assert memory.peak_by_phase["optimizer"].total_bytes - at_rest == transient
    assert memory.end.optimizer_state == 2 * n + 8
    assert memory.end.other == 0


@pytest.mark.parametrize(
    ("make", "states"),
    [
        (lambda ps: torch.optim.SGD(ps, lr=0.1), 0),
        (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), 1),
        (torch.optim.RMSprop, 1),
        (torch.optim.Adagrad, 1),
        (torch.optim.Adam, 2),
        (lambda ps: torch.optim.Adam(ps, amsgrad=True), 3),
        (torch.optim.NAdam, 2),
        (torch.optim.RAdam, 2),
    ],
)
def test_states_at_rest(make: Callable[[Any], torch.optim.Optimizer], states: int) -> None:
    model = nn.Linear(64, 64, bias=False)
    optimizer = make(model.parameters())
    with tl.Ledger(model, optimizer) as ledger:
        for _ in range(2):
            model(torch.randn(8, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            ledger.step()
    end = memory_of(ledger).end
    assert end.optimizer_state - states * 16_384 in range(17)  # and a few scalars
    assert end.other == 0


def test_state_made_in_a_constructor_is_there_at_the_start() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 32))
    optimizer = torch.optim.Adagrad(model.parameters())
    with tl.Ledger(model, optimizer) as ledger:
        model(torch.randn(8, 64)).sum().backward()
    assert memory_of(ledger).start.optimizer_state == 4 * (64 * 128 + 128 + 128 * 32 + 32) + 4 * 4
    adam = torch.optim.Adam(model.parameters())
    model.zero_grad()
    with tl.Ledger(model, adam) as ledger:
        model(torch.randn(8, 64)).sum().backward()
        adam.step()
    memory = memory_of(ledger)
    assert (memory.start.optimizer_state, memory.end.optimizer_state) == (0, 99_584 + 16)


class Blockwise:
    """A quantized state as a library would keep it: tensors in attributes and slots."""

    __slots__ = ("__dict__", "codes")

    def __init__(self, like: torch.Tensor) -> None:
        self.codes = torch.zeros(like.numel(), dtype=torch.uint8)
        self.scales = {"absmax": [torch.ones(like.numel() // 64)]}


class Quantizing(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if "nested" not in self.state[p]:
                    self.state[p]["nested"] = [{"moment": Blockwise(p)}, (Blockwise(p),)]
        super().step(closure)


def test_nested_and_quantized_state() -> None:
    model = nn.Linear(64, 64, bias=False)
    optimizer = Quantizing(model.parameters(), lr=0.1)
    with tl.Ledger(model, optimizer) as ledger:
        for _ in range(2):
            model(torch.randn(8, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            ledger.step()
    end = memory_of(ledger).end
    assert (end.optimizer_state, end.other) == (2 * (4096 + 4 * 64), 0)


def test_loaded_state_is_state() -> None:
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    with tl.Ledger(model, optimizer) as ledger:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert memory_of(ledger).end.optimizer_state == 2 * 16_384 + 4


# Storages


def test_views_keep_their_whole_storage() -> None:
    with tl.Ledger() as ledger:
        row = torch.zeros(1000, 16)[3]
    memory = memory_of(ledger)
    assert memory.end.total_bytes == 64_000
    assert memory.end.other == 64_000
    del row


def test_data_swaps_are_parameters() -> None:
    model = nn.Linear(64, 64, bias=False)
    with tl.Ledger(model) as ledger:
        model.weight.data = torch.randn(64, 64, dtype=torch.float64)
        ledger.step()
    memory = memory_of(ledger, 0)
    assert (memory.start.parameters, memory.end.parameters, memory.end.other) == (16_384, 32_768, 0)


def test_a_model_made_inside_is_parameters_at_the_end() -> None:
    with tl.Ledger() as ledger:
        model = nn.Linear(64, 64)
        model(torch.randn(2, 64))
    end = memory_of(ledger).end
    assert end.parameters == 16_640
    assert end.other == 0


def test_resize() -> None:
    x = torch.empty(0)
    with tl.Ledger() as ledger:
        y = torch.zeros(100)
        y.resize_(1000)
        y.untyped_storage().resize_(8000)
        torch.add(torch.ones(3000), 1, out=x)
    assert memory_of(ledger).end.total_bytes == 8000 + 12_000
    assert memory_of(ledger).peak.total_bytes == 8000 + 2 * 12_000


def test_ema_copies_and_metrics_are_other() -> None:
    model = nn.Linear(64, 64, bias=False)
    ema = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = []
    with tl.Ledger(model, optimizer) as ledger:
        for _ in range(2):
            y = model(torch.randn(8, 64))
            y.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for e, p in zip(ema.parameters(), model.parameters(), strict=True):
                    e.lerp_(p, 0.01)
            history.append(y.detach().square().mean(1))
            ledger.step()
    end = memory_of(ledger).end
    assert end.other == 16_384 + 2 * 8 * 4
    assert end.parameters == 16_384
    rows = {(row.op, row.nbytes) for row in end.largest if row.category == "other"}
    assert ("aten.mean", 64) in rows


def test_external_storages(tmp_path: Path) -> None:
    array = np.zeros((64, 16), dtype=np.float32)
    path = tmp_path / "tokens.bin"
    np.arange(4096, dtype=np.int64).tofile(path)
    mapped = torch.from_file(str(path), size=4096, dtype=torch.int64)
    memory_mapped = torch.from_numpy(np.memmap(path, dtype=np.int64, mode="r+"))
    with path.open("r+b") as file:
        view = mmap.mmap(file.fileno(), 0)
        buffer = torch.frombuffer(view, dtype=torch.int64)
        with tl.Ledger() as ledger:
            torch.from_numpy(array).sum()
            (mapped[:8] + memory_mapped[:8] + buffer[:8]).sum()
            torch.from_dlpack(array).sum()
        del buffer
    memory = memory_of(ledger)
    assert memory.external_bytes >= 3 * 32_768
    assert memory.external_bytes <= 3 * 32_768 + 2 * 4096
    assert memory.peak.total_bytes <= 3 * 64 + 4 + 8


def test_shared_memory_counts() -> None:
    x = torch.zeros(1024).share_memory_()
    with tl.Ledger() as ledger:
        y = x + 1
    assert memory_of(ledger).start.total_bytes == 4096
    assert memory_of(ledger).external_bytes == 0
    del y


def test_custom_function_keeps_activations() -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            kept, dropped = x * 3, x * 4
            ctx.save_for_backward(kept)
            return kept + dropped

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            (kept,) = ctx.saved_tensors
            return g * kept

    x = torch.randn(1024, requires_grad=True)
    with tl.Ledger() as ledger:
        Scaled.apply(x).sum().backward()
    memory = memory_of(ledger)
    assert memory.peak_by_phase["backward"].activations == 4096 + 4
    assert memory.end.gradients == 4096
    assert memory.end.other == 0


def test_nothing_is_kept_alive() -> None:
    model = nn.Linear(64, 64)
    with tl.Ledger(model) as ledger:
        y = model(torch.randn(8, 64))
        y.sum().backward()
        ledger.step()
        y = model(torch.randn(8, 64))
        y.sum().backward()
    storages = [weakref.ref(t.untyped_storage()) for t in (y, model.weight, model.weight.grad)]  # type: ignore[union-attr]
    whole = weakref.ref(model)
    report = ledger.report
    del model, y
    gc.collect()
    assert whole() is None
    assert all(ref() is None for ref in storages)
    assert (report.n_steps, report.remainder is None) == (1, False)


def test_stacks_name_the_users_line() -> None:
    with tl.Ledger(stacks=True) as ledger:
        x = torch.zeros(1000)  # here
    (row,) = memory_of(ledger).end.largest
    assert row.where is not None
    file, _, line = row.where.rpartition(":")
    assert Path(file).name == Path(__file__).name
    assert "# here" in Path(__file__).read_text().splitlines()[int(line) - 1]
    del x


def test_meta_device_has_a_statement_of_its_own() -> None:
    with torch.device("meta"):
        model = nn.Linear(1024, 1024)
    with tl.Ledger(model) as ledger:
        model(torch.empty(8, 1024, device="meta")).sum().backward()
    assert set(ledger.report.steps[0].memory) == {"meta"}
    assert ledger.report.peak.parameters == 4 * (1024 * 1024 + 1024)
    assert ledger.report.peak.gradients > 0
