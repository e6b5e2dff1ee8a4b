"""Entry and exit, the allocator behind it, and running out of memory."""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchledger as tl
from torchledger import internals
from torchledger.errors import (
    SimulationEndedError,
    SimulationError,
    TorchVersionError,
    UnknownAcceleratorError,
    UsageError,
)
from torchledger.simulation import active
from torchledger.simulation.keys import Backend
from torchledger.simulation.memory import torch_size


def names_of_torch() -> dict[tuple[str, str], Any]:
    """Everything that a simulation may replace."""
    owners: list[Any] = [
        torch, torch.Tensor, torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams, torch.cuda.nvtx,
        torch.accelerator, torch.backends.cudnn, torch.backends.cuda, torch.nn, torch.nn.Module, torch.nn.parallel,
        torch.distributed, torch.nested, torch.version, torch.utils._device.DeviceContext, threading.Thread,
    ]  # fmt: skip
    return {(owner.__name__, name): value for owner in owners for name, value in vars(owner).items()}


@pytest.fixture
def everything_is_put_back() -> Any:
    with tl.simulate("h100-sxm"):  # what torch imports late is there from now on
        model = nn.Linear(2, 2).cuda()
        torch.optim.SGD(model.parameters()).zero_grad()
    before = names_of_torch()
    generator = torch.get_rng_state()
    yield
    after = names_of_torch()
    assert [key for key in after if after[key] is not before.get(key)] == []
    assert before.keys() == after.keys()
    assert active.current() is None
    assert internals.current_dispatch_modes() == []
    assert not torch.is_autocast_enabled("hpu")
    assert not internals.has_backend_fallback(internals.DispatchKey.AutocastHPU)
    for op in ("linear", "dropout", "softmax.int", "scaled_dot_product_attention"):
        assert not internals.has_kernel_for_key(f"aten::{op}", "AutogradHPU")
    assert torch.equal(generator, torch.get_rng_state())


def test_all_is_put_back(everything_is_put_back: None) -> None:
    with tl.simulate("h100-sxm") as device:
        model = nn.Linear(8, 8, device="cuda")
        model(torch.ones(2, 8, device="cuda")).sum().backward()
        torch.set_default_device("cpu")
        torch.set_default_device(None)
        assert active.current() is device


def test_all_is_put_back_after_an_error(everything_is_put_back: None) -> None:
    class OwnError(Exception):
        pass

    def fail() -> None:
        with tl.simulate("a100-sxm"), torch.autocast("cuda", torch.bfloat16):
            torch.ones(3, device="cuda")
            raise OwnError

    with pytest.raises(OwnError):
        fail()


def test_all_is_put_back_when_entering_fails(everything_is_put_back: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchledger.simulation.saving.install", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), tl.simulate("h100-sxm"):
        pass


def test_one_after_another_and_never_nested() -> None:
    for _ in range(3):
        with tl.simulate("h100-sxm") as device:
            assert torch.cuda.memory_allocated() == 0
            torch.ones(1000, device="cuda")
            with pytest.raises(UsageError, match="cannot be nested"), tl.simulate("h100-sxm"):
                pass
            assert active.current() is device


def test_the_default_device_ends_with_the_simulation() -> None:
    before = torch.get_default_device()
    with tl.simulate("h100-sxm"):
        torch.set_default_device("cuda")
        assert torch.zeros(2).is_cuda
    assert torch.get_default_device() == before
    assert not torch.zeros(2).is_cuda


def test_a_ledger_is_entered_inside() -> None:
    with tl.Ledger(), pytest.raises(UsageError, match="enter the simulation first"):
        tl.simulate("h100-sxm").__enter__()
    assert active.current() is None


def test_the_profiler_records_the_host_alone() -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with tl.simulate("h100-sxm") as device, torch.profiler.profile(activities=activities) as profiler:
        torch.ones(3, device="cuda") + 1
    assert any("aten::add" in event.key for event in profiler.key_averages())
    assert any("profiler" in note for note in device.notes)


def test_what_outlives_the_simulation_says_so() -> None:
    with tl.simulate("h100-sxm"):
        model, x = nn.Linear(4, 4).cuda(), torch.ones(2, 4, device="cuda")
    for use in (lambda: x + 1, lambda: model(torch.ones(2, 4)), x.sum, lambda: x[0], lambda: model.to("cpu")):
        with pytest.raises(SimulationEndedError, match="simulation has ended"):
            use()
    assert "ended" in repr(x)
    assert isinstance(model.weight, nn.Parameter)


def test_a_program_that_holds_our_functions_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with tl.simulate("h100-sxm"):
        zeros, tensor = torch.zeros, torch.tensor
        assert zeros(2, device="cuda").is_cuda
    assert zeros(2, device="cpu").tolist() == [0, 0]
    assert tensor([1, 2]).tolist() == [1, 2]


def test_functions_that_a_module_took_by_name_before(monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(sys)("took_by_name")
    module.zeros, module.is_available = torch.zeros, torch.cuda.is_available  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "took_by_name", module)
    with tl.simulate("h100-sxm"):
        assert module.zeros(2, device="cuda").is_cuda
        assert module.is_available()
    assert module.zeros is torch.zeros


def test_unknown_and_unfit_accelerators() -> None:
    with pytest.raises(UnknownAcceleratorError):
        tl.simulate("h101").__enter__()
    with pytest.raises(SimulationError, match="only NVIDIA"):
        tl.simulate("mi300x").__enter__()
    with pytest.raises(UsageError, match="'worst' or 'balanced'"):
        tl.simulate("h100-sxm", data_dependent="some").__enter__()
    assert active.current() is None


def test_a_missing_private_name_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "_missing_for_simulation", ["torch._C._no_such_name"])
    with pytest.raises(TorchVersionError, match=r"_no_such_name.*simulated devices"), tl.simulate("h100-sxm"):
        pass
    assert active.current() is None


def test_keys_that_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "has_kernel_for_key", lambda op, key: key == "HPU")
    assert Backend().name == "XPU"
    monkeypatch.setattr(internals, "has_kernel_for_key", lambda op, key: True)
    with pytest.raises(SimulationError, match="have kernels in this process"):
        Backend()


@pytest.mark.parametrize("keys", ["HPU", "XPU"])
def test_either_backend_lends_its_keys(keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has = internals.has_kernel_for_key
    if keys == "XPU":
        monkeypatch.setattr(internals, "has_kernel_for_key", lambda op, key: key == "HPU" or has(op, key))
    with tl.simulate("h100-sxm") as device:
        assert device.backend.name == keys
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
        parameter = model[0].weight
        model.cuda()
        assert model[0].weight is parameter
        with torch.autocast("cuda", torch.bfloat16):
            out = model(torch.ones(2, 8, device="cuda"))
        assert out.dtype is torch.bfloat16
        out.sum().backward()
        assert parameter.grad is not None
        assert parameter.grad.is_cuda


# Memory


def test_blocks_come_and_go_with_storages() -> None:
    with tl.simulate("h100-sxm") as device:
        x = torch.empty(1000, device="cuda")
        view = x[10:]
        assert torch.cuda.memory_allocated() == 4096
        assert device.allocator.stats.requested_bytes == 4000
        del x
        assert torch.cuda.memory_allocated() == 4096
        del view
        assert torch.cuda.memory_allocated() == 0
        assert torch.cuda.memory_reserved() == 2 << 20
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 0
        assert torch.cuda.max_memory_allocated() == 4096


def test_the_allocators_settings_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with tl.simulate("h100-sxm", allocator_conf="roundup_power2_divisions:4"):
        x = torch.empty(614_400, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_allocated() == 655_360  # the table in torch's own notes
        del x
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with tl.simulate("h100-sxm") as device:
        assert device.allocator.settings.expandable_segments


def test_capacity() -> None:
    with tl.simulate("h100-sxm") as device:
        assert device.total_bytes - device.capacity_bytes == 500 << 20
        free, total = torch.cuda.mem_get_info()
        assert (free, total) == (device.capacity_bytes, device.total_bytes)
        assert total == torch.cuda.get_device_properties(0).total_memory
    with tl.simulate("h100-sxm", capacity_bytes="1 GiB") as device:
        assert device.capacity_bytes == 1 << 30


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096), nn.Linear(4096, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


def test_out_of_memory_in_torchs_words_with_what_holds_the_memory() -> None:
    with tl.simulate("h100-sxm", capacity_bytes="256 MiB"):
        model = nn.Sequential(Wide(), Wide()).cuda()
        inputs = [torch.empty(3000, 1024, device="cuda")]
        ledger = tl.Ledger(model)

        def train() -> None:
            with ledger:
                for _ in range(3):
                    model(inputs[0]).sum().backward()

        with pytest.raises(torch.OutOfMemoryError) as caught:
            train()
        text = str(caught.value)
        assert text.startswith(
            "CUDA out of memory. Tried to allocate 46.88 MiB. GPU 0 has a total capacity of 256.00 MiB"
        )
        for words in ("of which", "is allocated by PyTorch", "is reserved by PyTorch but unallocated"):
            assert words in text
        (note,) = caught.value.__notes__
        for words in ("parameters", "activations", "inputs", "aten.gelu", "forward", "up"):
            assert words in note
        report = ledger.report
        assert report.n_steps == 1
        assert report.peak.activations >= 3000 * 4096 * 4
        # The device goes on: what the failed step held is gone with its frames.
        inputs.clear()
        del caught
        gc.collect()
        assert torch.cuda.memory_allocated() < 110 << 20
        model(torch.ones(2, 1024, device="cuda"))


def test_sizes_in_messages() -> None:
    assert [torch_size(n) for n in (12, 2048, 3 << 20, 5 << 30)] == ["12 bytes", "2.00 KiB", "3.00 MiB", "5.00 GiB"]


def test_the_report_says_that_it_is_a_simulation() -> None:
    with tl.simulate("h100-sxm") as device:
        model = nn.Linear(8, 8).cuda()
        with tl.Ledger(model) as ledger:
            model(torch.ones(2, 8, device="cuda")).sum().backward()
    environment = ledger.report.environment
    assert environment["accelerator"] == "h100-sxm"
    assert environment["simulated"] is True
    assert environment["assumed_versions"]["cudnn"] == device.versions.cudnn
    assert "workspaces of cuDNN" in environment["not_modelled"]
    assert environment["devices"]["cuda:0"]["name"] == "NVIDIA H100 80GB HBM3"
    assert ledger.report.main_device == "cuda:0"
    assert "simulated" in str(ledger.report)
    assert tl.Report.load is not None
