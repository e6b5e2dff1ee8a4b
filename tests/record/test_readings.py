"""What an allocator counts, beside what was dispatched; a stand-in takes the place of `torch.cuda.memory_stats`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchledger as tl
from torchledger.record import readings
from torchledger.record.readings import Readings, cublas_workspace_bytes


class Allocator:
    """Flat statistics as `torch.cuda.memory_stats` gives them, moved by hand."""

    def __init__(self) -> None:
        self.current = dict.fromkeys(("requested_bytes", "allocated_bytes", "reserved_bytes"), 0)
        self.peak = dict(self.current)

    def hold(self, **bytes_by_kind: int) -> None:
        for kind, nbytes in bytes_by_kind.items():
            self.current[kind] = nbytes
            self.peak[kind] = max(self.peak[kind], nbytes)

    def __call__(self, device: str) -> dict[str, int] | None:
        if device != "cuda:0":
            return None
        found = {}
        for kind, nbytes in self.current.items():
            found[f"{kind}.all.current"] = nbytes
            found[f"{kind}.all.peak"] = self.peak[kind]
        return found


def test_a_peak_of_this_step_is_the_allocators() -> None:
    allocator = Allocator()
    allocator.hold(requested_bytes=1000, allocated_bytes=1024, reserved_bytes=4096)
    reads = Readings(allocator, lambda _: 100)
    reads.begin(["cuda:0", "cpu"])
    allocator.hold(requested_bytes=5000, allocated_bytes=6000, reserved_bytes=8192)
    allocator.hold(requested_bytes=1300, allocated_bytes=1500, reserved_bytes=8192)
    found = reads.end({"cuda:0": (1000, 4700, 1000), "cpu": (1, 2, 1)})
    assert set(found) == {"cuda:0"}
    reading = found["cuda:0"]
    assert (reading.requested_start, reading.requested_peak, reading.requested_end) == (1000, 5000, 1300)
    assert (reading.allocated_peak, reading.reserved_peak) == (6000, 8192)
    assert reading.workspace == 200  # two handles of 100; the other 100 stay unexplained


def test_a_peak_of_an_earlier_step_is_not_taken_for_this_ones() -> None:
    allocator = Allocator()
    allocator.hold(requested_bytes=9000, allocated_bytes=9216, reserved_bytes=16384)
    allocator.hold(requested_bytes=1000, allocated_bytes=1024, reserved_bytes=16384)
    reads = Readings(allocator, lambda _: 0)
    reads.begin(["cuda:0"])
    allocator.hold(requested_bytes=1300, allocated_bytes=1536, reserved_bytes=16384)
    reading = reads.end({"cuda:0": (1000, 4700, 1100)})["cuda:0"]
    assert reading.requested_peak == 4700 + 200  # what it holds beyond the dispatched bytes at the end
    assert reading.allocated_peak == 1536
    assert reading.reserved_peak == 16384


def test_a_programs_own_reset_is_seen() -> None:
    allocator = Allocator()
    allocator.hold(requested_bytes=9000)
    allocator.hold(requested_bytes=1000)
    reads = Readings(allocator, lambda _: 0)
    reads.begin(["cuda:0"])
    allocator.peak["requested_bytes"] = 1000
    allocator.hold(requested_bytes=6000)
    allocator.hold(requested_bytes=1000)
    assert reads.end({"cuda:0": (1000, 5900, 1000)})["cuda:0"].requested_peak == 6000


@pytest.mark.parametrize(
    ("config", "nbytes"), [(":4096:2:16:8", 8_519_680), (":4096:8", 33_554_432), ("nonsense", 0), (":0:0", 0)]
)
def test_workspace_configuration(config: str, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    assert cublas_workspace_bytes("cuda:0") == nbytes


@pytest.mark.parametrize(("capability", "nbytes"), [((8, 0), 8_519_680), ((9, 0), 33_554_432), ((12, 0), 33_554_432)])
def test_workspace_by_architecture(capability: Any, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert cublas_workspace_bytes("cuda:0") == nbytes
    assert cublas_workspace_bytes("cpu") == 0


@pytest.fixture
def meta_as_cuda(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    """Tensors on `meta` take the part of tensors on a GPU, and a hand-moved allocator that of its allocator."""
    allocator = Allocator()
    monkeypatch.setattr("torchledger.ledger._cuda_devices", lambda: ["cuda:0"])
    monkeypatch.setattr(readings, "cuda_statistics", allocator)
    monkeypatch.setattr(
        "torchledger.record.storages.Books.device_name",
        lambda self, device: self.device_names.setdefault(device, "cuda:0" if device.type == "meta" else "cpu"),
    )
    monkeypatch.setattr(readings, "cublas_workspace_bytes", lambda _: 1_000)
    return allocator


def test_a_step_on_a_device_with_an_allocator(meta_as_cuda: Allocator) -> None:
    with torch.device("meta"):
        model = nn.Linear(64, 64, bias=False)
    x = torch.empty(8, 64, device="meta")
    there = 64 * 64 * 4 + 8 * 64 * 4
    meta_as_cuda.hold(requested_bytes=there, allocated_bytes=there + 512, reserved_bytes=2**21)
    with tl.Ledger(model) as ledger:
        model(x).sum().backward()
        # What a real allocator would have held at the peak: the dispatched bytes, two workspaces, and 300 more.
        dispatched = ledger.report.steps[0].memory["cuda:0"].peak
        high = dispatched.total_bytes - dispatched.unexplained - dispatched.workspace + 2_300
        meta_as_cuda.hold(requested_bytes=high, allocated_bytes=high + 1_000, reserved_bytes=2**22)
        meta_as_cuda.hold(requested_bytes=there + 16_384 + 2_300, allocated_bytes=20_000, reserved_bytes=2**22)
    memory = ledger.report.steps[0].memory["cuda:0"]
    assert ledger.report.main_device == "cuda:0"
    assert (memory.requested_peak_bytes, memory.allocated_peak_bytes, memory.reserved_peak_bytes) == (
        high,
        high + 1_000,
        2**22,
    )
    assert (memory.peak.workspace, memory.peak.unexplained) == (2_000, 300)
    assert memory.peak.total_bytes == high
    assert sum(memory.peak.by_category.values()) == sum(memory.peak.by_module.values()) == high
    assert memory.start.unexplained == 0
    assert memory.end.workspace + memory.end.unexplained == 2_300
    assert "unexplained" in str(ledger.report)


def test_repeated_steps_have_readings_of_their_own(meta_as_cuda: Allocator) -> None:
    with torch.device("meta"):
        model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.empty(8, 64, device="meta")
    with tl.Ledger(model, optimizer) as ledger:
        for i in range(4):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            meta_as_cuda.hold(requested_bytes=10**6 + i, allocated_bytes=10**6 + 2 * i, reserved_bytes=2**21)
            meta_as_cuda.hold(requested_bytes=20_000 + i)
            ledger.step()
    peaks = [step.memory["cuda:0"].peak for step in ledger.report.steps]
    assert [peak.total_bytes for peak in peaks] == [10**6 + i for i in range(4)]
    assert len({peak.activations for peak in peaks[1:]}) == 1
    for step in ledger.report.steps:
        for snapshot in (step.memory["cuda:0"].start, step.peak, step.memory["cuda:0"].end):
            assert sum(snapshot.by_category.values()) == snapshot.total_bytes


def test_out_of_memory_says_what_holds_the_memory() -> None:
    library = torch.library.Library("torchledger_oom", "FRAGMENT")
    library.define("fail(Tensor a) -> Tensor")

    def fail(a: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    library.impl("fail", fail, "CompositeExplicitAutograd")

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.torchledger_oom.fail(self.linear(x).relu())  # type: ignore[no-any-return]

    model, x = Layer(), torch.randn(1024, 64)
    try:
        with tl.Ledger(model) as ledger, pytest.raises(torch.OutOfMemoryError) as caught:
            model(x)
    finally:
        library._destroy()
    (note,) = caught.value.__notes__
    assert "256.00 KiB" in note  # the activations, twice
    for word in ("parameters", "activations", "inputs", "linear", "aten.relu", "torchledger_oom.fail", "forward"):
        assert word in note
    assert ledger.report.n_steps == 1
    assert ledger.report.peak.activations > 0
