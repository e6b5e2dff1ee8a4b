"""What programs ask of torch that is no op, and that a simulation does otherwise or refuses by name."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch._dynamo
import torch.distributed
import torch.distributed.device_mesh
import torch.export
import torch.nested
import torch.nn.parallel
import torch.onnx
import torch.profiler

from torchledger.errors import SimulationError
from torchledger.patching import Patches
from torchledger.simulation.contracts import Device


def install(device: Device, patches: Patches) -> None:
    """Refuse what is not simulated, each with what to do instead."""

    def compile_nothing(model: Any = None, **kwargs: Any) -> Any:
        device.note("torch.compile: what it was given runs eagerly; fused kernels would hold fewer temporaries")
        return (lambda function: function) if model is None else model

    def compile_module(self: Any, *args: Any, **kwargs: Any) -> None:
        compile_nothing(self)

    patches.replace(torch, "compile", compile_nothing)
    patches.replace(torch.nn.Module, "compile", compile_module)
    _disable_compiled(patches)
    patches.replace_existing(torch.compiler, {"cudagraph_mark_step_begin": lambda: None})
    patches.replace(torch.nn.parallel, "DistributedDataParallel", _refused_class("DistributedDataParallel", _ONE))
    patches.replace(torch.nn.parallel.distributed, "DistributedDataParallel", torch.nn.parallel.DistributedDataParallel)
    if torch.distributed.is_available():
        original = torch.distributed.distributed_c10d.init_process_group

        def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
            if backend is None or "nccl" in str(backend):
                _refuse("torch.distributed with NCCL", _ONE)
            return original(backend, *args, **kwargs)

        for module in (torch.distributed, torch.distributed.distributed_c10d, torch.distributed.device_mesh):
            patches.replace(module, "init_process_group", init_process_group)
    original_nested = torch.nested.nested_tensor

    def nested_tensor(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device") or "").startswith("cuda") or any(getattr(t, "is_cuda", False) for t in tensors):
            _refuse("a nested tensor", "its kernels read the lengths. Pad the batch in a dry run")
        return original_nested(tensors, *args, **kwargs)

    patches.replace(torch.nested, "nested_tensor", nested_tensor)
    patches.replace(torch.export, "export", _refused("torch.export", _EXPORT))
    patches.replace(torch.onnx, "export", _refused("torch.onnx.export", _EXPORT))
    _install_data_parallel(patches)
    _install_flex(patches)
    _install_profiler(device, patches)


_ONE = "one device is simulated, and nothing that it would send to others. Run the script's single-process form"
_EXPORT = "it traces a program with tensors of its own. Leave it out of a dry run, or export outside the simulation"
_FLEX = (
    "FlexAttention compiles a kernel of its own, which runs on no simulated device. Take "
    "torch.nn.functional.scaled_dot_product_attention in a dry run: it saves the same (q, k, v, output, logsumexp)"
)


def _refuse(what: str, why: str) -> NoReturn:
    raise SimulationError(f"{what} is not simulated: {why}.")


def _refused(name: str, why: str) -> Any:
    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        _refuse(name, why)

    return refused


def _refused_class(name: str, why: str) -> Any:
    def new(cls: Any, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(name, why)

    return type(name, (torch.nn.Module,), {"__new__": new})


def _disable_compiled(patches: Patches) -> None:
    """What was compiled before runs eagerly too."""
    config: Any = torch._dynamo.config
    before = config.disable
    patches.on_restore(lambda: setattr(config, "disable", before))
    config.disable = True


def _install_data_parallel(patches: Patches) -> None:
    """`DataParallel` over one device is that device's module."""

    class DataParallel(torch.nn.Module):
        def __init__(self, module: Any, device_ids: Any = None, output_device: Any = None, dim: int = 0) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.module(*args, **kwargs)

    patches.replace(torch.nn, "DataParallel", DataParallel)
    patches.replace(torch.nn.parallel, "DataParallel", DataParallel)


def _install_flex(patches: Patches) -> None:
    import torch.nn.attention.flex_attention as flex

    original = flex.flex_attention

    def flex_attention(query: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(query, torch.Tensor) and query.is_cuda:
            _refuse("flex_attention", _FLEX)
        return original(query, *args, **kwargs)

    patches.replace(flex, "flex_attention", flex_attention)


def _install_profiler(device: Device, patches: Patches) -> None:
    """The profiler sees what the host does: no kernel runs on the device."""
    kineto: Any = torch.profiler.profiler._KinetoProfile
    original = kineto.__init__

    def init(self: Any, *args: Any, activities: Any = None, **kwargs: Any) -> None:
        device.note("torch.profiler: it records the host alone, and no kernel of the device")
        original(self, *args, activities=[torch.profiler.ProfilerActivity.CPU], **kwargs)

    patches.replace(kineto, "__init__", init)
