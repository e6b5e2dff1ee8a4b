"""Sparse gradients, convolutions, recurrent layers, files, and what is refused by name."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchledger as tl
from torchledger.errors import SimulationError
from torchledger.simulation.device import SimulatedDevice


def requested() -> int:
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def train_sparse(device: str, optimizer: Any) -> tl.Report:
    torch.manual_seed(0)
    model = nn.Embedding(1000, 16, sparse=True).to(device)
    optim = optimizer(model.parameters())
    ids = torch.randint(0, 1000, (4, 8)).to(device)
    with tl.Ledger(model, optim) as ledger:
        for _ in range(2):
            model(ids).sum().backward()
            gradient = model.weight.grad
            assert gradient is not None
            assert gradient.is_sparse
            assert gradient.device.type == device
            assert gradient._nnz() == 32
            assert gradient._values().shape == (32, 16)
            del gradient
            optim.step()
            optim.zero_grad()
            ledger.step()
    assert ledger.report.faults == ()
    return ledger.report


@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, lambda p: torch.optim.SGD(p, lr=0.1)])
def test_sparse_gradients(optimizer: Any) -> None:
    # pytorch_memlab#27: Embedding(1000,16,sparse=True), ids (4,8): gradients 256 + 2,048
    real = train_sparse("cpu", optimizer)
    with tl.simulate("h100-sxm"):
        simulated = train_sparse("cuda", optimizer)
        assert requested() == 0
    for a, b in zip(real.steps, simulated.steps, strict=True):
        cpu, cuda = a.memory["cpu"], b.memory["cuda:0"]
        assert cuda.category_peaks["gradients"] == cpu.category_peaks["gradients"] >= 256 + 2_048
        assert cuda.end.by_category == cpu.end.by_category
        assert cuda.peak.unexplained == 0


def test_channels_last(h100: SimulatedDevice) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)).cuda()
    x = torch.randn(2, 3, 16, 16, device="cuda")
    assert model(x).is_contiguous()
    model.to(memory_format=torch.channels_last)
    out = model(x.to(memory_format=torch.channels_last))
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert not out.is_contiguous()
    out.sum().backward()
    gradient = model[0].weight.grad
    assert gradient is not None
    assert gradient.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_one_op(kind: Any, h100: SimulatedDevice) -> None:
    model = kind(8, 16, 2, batch_first=True, bidirectional=True).cuda()
    x = torch.randn(4, 5, 8, device="cuda", requires_grad=True)
    with tl.Ledger(model) as ledger:
        out = model(x)[0]
        assert out.shape == (4, 5, 32)
        out.sum().backward()
    assert "aten._cudnn_rnn" in ledger.report.flops.by_op
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
    assert any("reserve space" in note for note in h100.notes)


def test_saving_keeps_in_the_simulation_what_has_no_data(tmp_path: Path, h100: SimulatedDevice) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 64, device="cuda")).sum().backward()
    optimizer.step()
    before = requested()
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(b"precious")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, path)
    assert path.read_bytes() == b"precious"
    assert requested() == before
    assert "no file was written" in h100.notes[-1]
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    assert loaded["epoch"] == 3
    assert loaded["model"]["0.weight"].device.type == "cpu"
    assert loaded["model"]["1.num_batches_tracked"].item() == 1
    assert requested() == before
    loaded = torch.load(path)
    assert loaded["model"]["0.weight"].is_cuda
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    assert torch.load(buffer)["0.weight"].shape == (64, 64)
    with pytest.raises(SimulationError, match=r"state_dict\(\)"):
        torch.save(model, path)
    with pytest.raises(SimulationError, match="cannot be pickled"):
        pickle.dumps(torch.ones(3, device="cuda"))


def test_real_files_are_real(tmp_path: Path) -> None:
    path = tmp_path / "real.pt"
    weights = nn.Linear(3, 3).state_dict()
    torch.save(weights, path)
    with tl.simulate("h100-sxm"):
        assert torch.equal(torch.load(path)["weight"], weights["weight"])
        model = nn.Linear(3, 3).cuda()
        model.load_state_dict(torch.load(path, map_location="cuda"))
        assert model.weight.is_cuda
        assert torch.load(path, map_location=torch.device("cuda"))["bias"].is_cuda
        torch.save({"x": torch.arange(3)}, tmp_path / "host.pt")
    assert torch.load(tmp_path / "host.pt")["x"].tolist() == [0, 1, 2]


def test_compiling_runs_eagerly_and_says_so(h100: SimulatedDevice) -> None:
    model = torch.compile(nn.Linear(4, 4).cuda())
    assert model(torch.ones(2, 4, device="cuda")).is_cuda

    @torch.compile(mode="max-autotune")
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert double(torch.ones(2, device="cuda")).is_cuda
    model.compile()
    assert "runs eagerly" in h100.notes[0]


def test_what_is_refused_by_name(h100: SimulatedDevice) -> None:
    model = nn.Linear(4, 4).cuda()
    with pytest.raises(SimulationError, match="DistributedDataParallel is not simulated"):
        nn.parallel.DistributedDataParallel(model)
    with pytest.raises(SimulationError, match="NCCL is not simulated"):
        torch.distributed.init_process_group("nccl")
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.ones(1, 1, 16, 16, device="cuda")
    with pytest.raises(SimulationError, match="FlexAttention"):
        flex_attention(q, q, q)
    with pytest.raises(SimulationError, match="nested tensor"):
        torch.nested.nested_tensor([q[0, 0], q[0, 0]])
    assert nn.DataParallel(model)(torch.ones(2, 4, device="cuda")).is_cuda


def test_an_op_without_a_meta_kernel_says_what_to_do(h100: SimulatedDevice) -> None:
    library = torch.library.Library("torchledger_simulated", "FRAGMENT")
    try:
        library.define("mystery(Tensor a) -> Tensor")
        library.impl("mystery", lambda a: a.clone(), "CPU")
        with pytest.raises(SimulationError, match=r"mystery.*register_fake"):
            torch.ops.torchledger_simulated.mystery(torch.ones(3, device="cuda"))
        library.impl("mystery", lambda a: a.clone(), "Meta")
        assert torch.ops.torchledger_simulated.mystery(torch.ones(3, device="cuda")).is_cuda
    finally:
        library._destroy()


@pytest.mark.parametrize(
    ("name", "options", "transient"),
    [
        ("AdamW", {"foreach": True}, 49_152),
        ("AdamW", {"foreach": False}, 81_920),
        ("AdamW", {"fused": True}, 0),
        ("AdamW", {}, 49_152),
        ("SGD", {"lr": 0.1}, 0),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, 49_152),
        ("Adagrad", {"foreach": True}, 2 * 49_152),
        ("RMSprop", {"foreach": True}, 49_152),
        ("NAdam", {"foreach": True}, 49_152),
        ("Adadelta", {"foreach": True}, 2 * 49_152),
    ],
)
def test_transients_of_optimizer_steps(
    name: str, options: dict[str, Any], transient: int, h100: SimulatedDevice
) -> None:
    # AdamW over 1-D parameters of 4,096 and 8,192 elements, second step: foreach 49,152, for-loop 81,920, fused 0.
    parameters = [nn.Parameter(torch.ones(n, device="cuda")) for n in (4096, 8192)]
    optimizer = getattr(torch.optim, name)(parameters, **options)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        torch.cuda.reset_peak_memory_stats()
        before = requested()
        optimizer.step()
    assert torch.cuda.memory_stats()["requested_bytes.all.peak"] - before == transient


def test_clipping_is_done_for_all_gradients_at_once(h100: SimulatedDevice) -> None:
    model = nn.Linear(8, 8).cuda()
    model(torch.ones(2, 8, device="cuda")).sum().backward()
    seen = []

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func.overloadpacket))
            return func(*args, **(kwargs or {}))

    with Ops():
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert "aten._foreach_norm" in seen
    assert "aten._foreach_mul_" in seen
