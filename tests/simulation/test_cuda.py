"""`torch.cuda` and `torch.accelerator`, streams, events and random states."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import torchledger as tl
from torchledger.accelerators import ACCELERATORS
from torchledger.errors import SimulationError
from torchledger.simulation.cuda import cublas_workspace_bytes
from torchledger.simulation.device import SimulatedDevice
from torchledger.simulation.facts import assumed_versions, simulated_accelerator


def test_questions_about_the_device(h100: SimulatedDevice) -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.is_initialized()
    assert torch.cuda.device_count() == 1
    assert torch.cuda.current_device() == 0
    torch.cuda.set_device(0)
    torch.cuda.init()
    assert torch.cuda.get_device_name() == torch.cuda.get_device_name("cuda:0") == "NVIDIA H100 80GB HBM3"
    assert torch.cuda.get_device_capability(0) == (9, 0)
    properties = torch.cuda.get_device_properties(torch.device("cuda"))
    assert (properties.major, properties.minor, properties.multi_processor_count) == (9, 0, 132)
    assert torch.cuda.is_bf16_supported()
    assert torch.backends.cudnn.is_available()
    assert torch.backends.cudnn.version() == h100.versions.cudnn_number
    assert torch.version.cuda == h100.versions.cuda
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.cuda.set_device(1)


def test_older_devices() -> None:
    with tl.simulate("t4"):
        assert torch.cuda.get_device_capability() == (7, 5)
        assert not torch.cuda.is_bf16_supported(including_emulation=False)


def test_statistics_agree_with_one_another(h100: SimulatedDevice) -> None:
    x = torch.empty(1 << 20, device="cuda")
    y = torch.empty(3, device="cuda")
    del x
    stats = torch.cuda.memory_stats()
    assert torch.cuda.memory_allocated() == stats["allocated_bytes.all.current"] == 512
    assert torch.cuda.max_memory_allocated() == stats["allocated_bytes.all.peak"] == (4 << 20) + 512
    assert stats["requested_bytes.all.current"] == 12
    assert torch.cuda.memory_reserved() == stats["reserved_bytes.all.current"] == (20 << 20) + (2 << 20)
    assert torch.cuda.mem_get_info()[0] == h100.capacity_bytes - torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 512
    assert "allocated_bytes" in torch.cuda.memory_summary()
    assert sum(segment["total_size"] for segment in torch.cuda.memory_snapshot()) == torch.cuda.memory_reserved()
    torch.cuda.synchronize()
    assert torch.accelerator.is_available()
    del y


def test_blocks_belong_to_streams(h100: SimulatedDevice) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side != torch.cuda.default_stream()
        x = torch.empty(1000, device="cuda")
    address = x.data_ptr()
    del x
    assert torch.empty(1000, device="cuda").data_ptr() != address  # another stream's block
    with torch.cuda.stream(side):
        y = torch.empty(1000, device="cuda")
        assert y.data_ptr() == address
    y.record_stream(torch.cuda.current_stream())
    del y
    assert h100.allocator.stats.active_bytes > h100.allocator.stats.allocated_bytes
    side.wait_stream(torch.cuda.current_stream())
    torch.cuda.current_stream().synchronize()
    torch.cuda.synchronize()


def test_no_time_is_simulated_and_that_is_counted(h100: SimulatedDevice) -> None:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    end.record()
    assert end.query()
    assert start.elapsed_time(end) == 1.0
    assert h100.assumptions["time between two events taken for 1 ms"] == 1


def test_random_states(h100: SimulatedDevice) -> None:
    torch.manual_seed(7)
    assert torch.cuda.initial_seed() == 7
    state = torch.cuda.get_rng_state()
    assert (state.dtype, state.shape) == (torch.uint8, (16,))
    torch.cuda.manual_seed_all(8)
    assert not torch.equal(state, torch.cuda.get_rng_state())
    torch.cuda.set_rng_state(state)
    assert torch.equal(state, torch.cuda.get_rng_state_all()[0])
    with torch.random.fork_rng():
        torch.cuda.manual_seed(9)
    assert torch.equal(state, torch.cuda.get_rng_state())


def test_generators_of_the_device(h100: SimulatedDevice) -> None:
    generator = torch.Generator(device="cuda")
    generator.manual_seed(1)
    assert generator.device == torch.device("cuda", 0)
    assert isinstance(generator, torch.Generator)
    assert torch.randn(3, device="cuda", generator=generator).is_cuda
    assert torch.empty(3, device="cuda").normal_(generator=generator).is_cuda
    assert not isinstance(3, torch.Generator)
    assert torch.Generator().device.type == "cpu"


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_keeps_the_random_state(reentrant: bool, h100: SimulatedDevice) -> None:
    block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).cuda()
    x = torch.randn(4, 8, device="cuda", requires_grad=True)
    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    assert x.grad is not None
    assert x.grad.is_cuda


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loaders_with_pinned_memory(workers: int, h100: SimulatedDevice) -> None:
    data = TensorDataset(torch.arange(16.0).reshape(8, 2), torch.arange(8))
    seen = []
    for x, y in DataLoader(data, 4, shuffle=True, num_workers=workers, pin_memory=True):
        assert x.is_pinned()
        assert torch.equal(x[:, 0], 2.0 * y)  # the data are true
        assert x.to("cuda", non_blocking=True).is_cuda
        seen += y.cuda(non_blocking=True).tolist()
    assert sorted(seen) == list(range(8))


def test_threads_see_the_device(h100: SimulatedDevice) -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append((torch.ones(3).cuda() * 2).device))
    thread.start()
    thread.join()
    assert found == [torch.device("cuda", 0)]


@pytest.mark.parametrize("name", ["CUDAGraph", "graph", "MemPool", "utilization"])
def test_what_is_refused_by_name(name: str, h100: SimulatedDevice) -> None:
    if not hasattr(torch.cuda, name):
        pytest.skip("this torch has none")
    with pytest.raises(SimulationError, match=f"torch.cuda.{name}: .* not simulated"):
        getattr(torch.cuda, name)()


def test_workspace_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert [cublas_workspace_bytes(c) for c in ((7, 5), (8, 0), (9, 0), (10, 0), (12, 0))] == [
        8_519_680, 8_519_680, 33_554_432, 33_554_432, 33_554_432,
    ]  # fmt: skip
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    assert cublas_workspace_bytes((9, 0)) == 8_519_680
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    assert cublas_workspace_bytes((9, 0)) == 0
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "nonsense")
    assert cublas_workspace_bytes((9, 0)) == 0


def test_assumed_versions_are_the_installed_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, cudnn in (
        ("2.9.1+cu128", "9.10.2"),
        ("2.14.1", "9.24.0"),
        ("2.15.0a0", "9.26.0"),
        ("2.8.0", "9.10.2"),
    ):
        monkeypatch.setattr(torch, "__version__", version)
        assert assumed_versions().cudnn == cudnn
    assert assumed_versions().cudnn_number == 91002


def test_every_nvidia_device_can_be_simulated() -> None:
    for name, accelerator in ACCELERATORS.items():
        if accelerator.compute_capability is None:
            continue
        if accelerator.memory_bytes is None:
            with pytest.raises(SimulationError, match="not on record"):
                simulated_accelerator(name)
            continue
        _, facts = simulated_accelerator(name)
        assert 0.93 * accelerator.memory_bytes < facts.memory_bytes < 1.08 * accelerator.memory_bytes, name
    with tl.simulate("l4") as device:
        assert "data sheet's" in device.notes[0]
