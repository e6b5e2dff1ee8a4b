"""`torch.cuda`: what programs ask of it, answered for the simulated device."""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, NoReturn

import torch
import torch.accelerator
import torch.backends.cuda
import torch.backends.cudnn
import torch.cuda
import torch.utils.checkpoint

from torchledger.allocator.statistics import AllocatorStats
from torchledger.allocator.workspaces import count_workspace_bytes
from torchledger.errors import SimulationError
from torchledger.patching import Patches
from torchledger.simulation import generators, streams
from torchledger.simulation.contracts import Device, Mode
from torchledger.simulation.printing import TYPE_NAMES


def cublas_workspace_bytes(capability: tuple[int, int]) -> int:
    """What cuBLAS takes from the simulated allocator, for each handle and stream, in bytes.

    >>> cublas_workspace_bytes((9, 0)), cublas_workspace_bytes((8, 0))
    (33554432, 8519680)
    """
    return count_workspace_bytes(capability[0], os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """What `torch.cuda.get_device_properties` gives."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    warp_size: int = 32
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    regs_per_multiprocessor: int = 65536
    gcnArchName: str = ""  # noqa: N815


class _Queries:
    """The functions of `torch.cuda`, by their names there."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def init(self) -> None:
        pass

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        self._index(device)

    def get_device_name(self, device: Any = None) -> str:
        self._index(device)
        return self._device.name

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        self._index(device)
        return self._device.capability

    def get_device_properties(self, device: Any = None) -> DeviceProperties:
        self._index(device)
        facts, (major, minor) = self._device.facts, self._device.capability
        return DeviceProperties(self._device.name, major, minor, self._device.total_bytes, facts.n_multiprocessors)

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return including_emulation or self._device.capability >= (8, 0)

    def is_tf32_supported(self) -> bool:
        return self._device.capability >= (8, 0)

    def synchronize(self, device: Any = None) -> None:
        self._device.allocator.synchronize()

    def empty_cache(self) -> None:
        self._device.blocks.settle()
        self._device.allocator.empty_cache()

    def memory_allocated(self, device: Any = None) -> int:
        return self._stats(device).allocated_bytes

    def max_memory_allocated(self, device: Any = None) -> int:
        return self._stats(device).peak_allocated_bytes

    def memory_reserved(self, device: Any = None) -> int:
        return self._stats(device).reserved_bytes

    def max_memory_reserved(self, device: Any = None) -> int:
        return self._stats(device).peak_reserved_bytes

    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self._index(device)
        self._device.blocks.settle()
        self._device.allocator.reset_peak_stats()

    reset_max_memory_allocated, reset_max_memory_cached = reset_peak_memory_stats, reset_peak_memory_stats

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        free = self._device.capacity_bytes - self._stats(device).reserved_bytes
        return free, self._device.total_bytes

    def memory_stats(self, device: Any = None) -> OrderedDict[str, Any]:
        """The flat statistics, those that the model of the allocator keeps."""
        stats = self._stats(device)
        found: dict[str, Any] = {}
        for kind in ("allocated_bytes", "requested_bytes", "active_bytes", "reserved_bytes"):
            found[f"{kind}.all.current"] = getattr(stats, kind)
            found[f"{kind}.all.peak"] = getattr(stats, f"peak_{kind}")
        found["segment.all.current"], found["segment.all.peak"] = stats.n_segments, stats.peak_n_segments
        for kind in ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free", "num_sync_all_streams"):
            found[kind] = getattr(stats, kind)
        return OrderedDict(sorted(found.items()))

    def memory_summary(self, device: Any = None, abbreviated: bool = False) -> str:
        stats = self.memory_stats(device)
        return "\n".join(f"{name:<28} {value:>20,}" for name, value in stats.items())

    def memory_snapshot(self, *args: Any, **kwargs: Any) -> Any:
        self._device.blocks.settle()
        return self._device.allocator.snapshot()

    def _snapshot(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Without a history: nothing records one."""
        return {"segments": self.memory_snapshot(), "device_traces": [[]], "allocator_settings": {}}

    def memory_stats_as_nested_dict(self, device: Any = None) -> dict[str, Any]:
        nested: dict[str, Any] = {}
        for name, value in self.memory_stats(device).items():
            *outer, last = name.split(".")
            place = nested
            for part in outer:
                place = place.setdefault(part, {})
            place[last] = value
        return nested

    def reset_accumulated_memory_stats(self, device: Any = None) -> None:
        """What it resets (bytes allocated and freed so far) is not counted here."""
        self._index(device)

    def get_allocator_backend(self) -> str:
        return "native"

    def get_sync_debug_mode(self) -> int:
        return 0

    def set_sync_debug_mode(self, debug_mode: Any) -> None:
        pass

    def set_per_process_memory_fraction(self, fraction: float, device: Any = None) -> None:
        self._device.allocator.set_memory_fraction(fraction)

    def _stats(self, device: Any) -> AllocatorStats:
        self._index(device)
        self._device.blocks.settle()
        return self._device.allocator.stats

    def _index(self, device: Any) -> int:
        if device is None or device == -1:
            return 0
        return self._device.index_of(device if isinstance(device, torch.device) else torch.device(
            device if isinstance(device, str) else f"cuda:{int(device)}"
        ))  # fmt: skip


_REFUSED = {
    "CUDAGraph": "CUDA graphs",
    "graph": "CUDA graphs",
    "make_graphed_callables": "CUDA graphs",
    "graph_pool_handle": "CUDA graphs",
    "MemPool": "private memory pools",
    "use_mem_pool": "private memory pools",
    "CUDAPluggableAllocator": "other allocators",
    "change_current_allocator": "other allocators",
    "caching_allocator_alloc": "memory that no tensor holds",
    "utilization": "what a driver measures while kernels run",
    "temperature": "what a driver measures while kernels run",
    "memory_usage": "what a driver measures while kernels run",
    "device_memory_used": "what a driver measures while kernels run",
    "power_draw": "what a driver measures while kernels run",
    "clock_rate": "what a driver measures while kernels run",
    "cudart": "the CUDA runtime",
}


def _refuse(name: str, what: str, module: str = "torch.cuda") -> Any:
    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        raise SimulationError(f"{module}.{name}: {what} are not simulated. Leave it out of a dry run.")

    if isinstance(getattr(torch.cuda, name, None), type):  # annotations and isinstance need a class
        return type(name, (), {"__new__": refused})
    return refused


def _find_unanswered(module: ModuleType, answered: dict[str, Any]) -> dict[str, Any]:
    """The public functions of a module that would ask the driver and are not answered here, each refused by name."""
    found = {}
    for name, function in vars(module).items():
        if name.startswith("_") or name in answered or not isinstance(function, FunctionType):
            continue
        asks = [n for n in function.__code__.co_names if n.startswith("_cuda") or "pynvml" in n or n == "cudart"]
        if asks and function.__module__.startswith(("torch.cuda", "torch.backends.cuda")):
            found[name] = _refuse(name, "answers of a driver", function.__module__)
    return found


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


@contextlib.contextmanager
def _range(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def install(device: Device, mode: Mode, patches: Patches) -> None:
    """Let `torch.cuda` and `torch.accelerator` speak of the simulated device."""
    queries = _Queries(device)
    names = {name: getattr(queries, name) for name in dir(queries) if not name.startswith("_")}
    random = generators.make_functions(device)
    refused = {name: _refuse(name, what) for name, what in _REFUSED.items()}
    others: dict[str, Any] = {
        "_lazy_init": _nothing,
        "_lazy_call": lambda call, **kwargs: None,
        "_is_in_bad_fork": lambda: False,
        "is_current_stream_capturing": lambda: False,
        "ipc_collect": _nothing,
        "can_device_access_peer": lambda a, b: False,
        "get_arch_list": lambda: ["sm_{}{}".format(*device.capability)],
    }
    replacing = names | random | refused | others | streams.make_classes(device)
    for module in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams):
        patches.replace_existing(module, replacing)
        patches.replace_existing(module, _find_unanswered(module, replacing))
    patches.replace_existing(torch.backends.cuda, _find_unanswered(torch.backends.cuda, {}))
    patches.replace_existing(torch.cuda.memory, {"_record_memory_history": _nothing, "_snapshot": queries._snapshot})
    patches.replace_existing(
        torch.cuda.nvtx, {"range_push": _nothing, "range_pop": _nothing, "mark": _nothing, "range": _range}
    )
    _install_types(patches)
    _install_accelerator(queries, patches)
    patches.replace(torch, "Generator", generators.make_generator(torch.Generator))
    patches.replace(torch.version, "cuda", device.versions.cuda)
    patches.replace(torch._C, "_cuda_clearCublasWorkspaces", device.clear_workspaces)
    patches.replace_existing(torch.backends.cuda, {"is_built": lambda: True})
    patches.replace_existing(
        torch.backends.cudnn,
        {
            "is_available": lambda: True,
            "version": lambda: device.versions.cudnn_number,
            "is_acceptable": lambda tensor: False,
        },
    )
    checkpointing: Any = torch.utils.checkpoint.DefaultDeviceType
    before = getattr(checkpointing, "_default_device_type", None)
    patches.on_restore(lambda: setattr(checkpointing, "_default_device_type", before))


def _install_accelerator(queries: _Queries, patches: Patches) -> None:
    memory = (
        "empty_cache memory_stats memory_allocated max_memory_allocated memory_reserved max_memory_reserved "
        "reset_peak_memory_stats"
    )
    names = {name: getattr(queries, name) for name in (*memory.split(), "is_available", "device_count", "synchronize")}
    names |= {
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": lambda: 0,
        "current_device_idx": lambda: 0,
        "set_device_index": queries.set_device,
        "set_device_idx": queries.set_device,
        "get_memory_info": queries.mem_get_info,
        "current_stream": lambda of=None: torch.cuda.current_stream(),
        "set_stream": torch.cuda.set_stream,
    }
    patches.replace_existing(torch.accelerator, names)
    if hasattr(torch.accelerator, "memory"):
        patches.replace_existing(torch.accelerator.memory, names)


def _install_types(patches: Patches) -> None:
    """`torch.cuda.FloatTensor` and its like."""
    for dtype, name in TYPE_NAMES.items():
        patches.replace(torch.cuda, name, _legacy_type(name, dtype))


def _legacy_type(name: str, dtype: torch.dtype) -> Any:
    class LegacyType(type):
        def __call__(cls, *args: Any) -> torch.Tensor:
            if len(args) == 1 and isinstance(args[0], list | tuple | torch.Tensor):
                return torch.tensor(args[0], dtype=dtype, device="cuda")
            return torch.empty(*(args or (0,)), dtype=dtype, device="cuda")

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype is dtype

    return LegacyType(name, (), {"dtype": dtype, "is_cuda": True})
