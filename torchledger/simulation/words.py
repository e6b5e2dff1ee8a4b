"""The word "cuda": what a program asks of tensors and of torch's factories, answered for the simulated device.

Everything here acts only while a simulation runs and the program itself is asking; inside the simulation's own code a
simulated tensor is the meta tensor that it is below.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torchledger import internals
from torchledger.errors import SimulationError
from torchledger.patching import Patches
from torchledger.simulation import host, printing
from torchledger.simulation.blocks import HOST, storage_of
from torchledger.simulation.contracts import Device, Mode
from torchledger.simulation.factories import FROM_VALUES, ORIGINALS, Factories
from torchledger.simulation.keys import GENUINE_META, is_inside, place_device
from torchledger.simulation.printing import TYPE_NAMES

_Tensor = torch.Tensor
_device_of: Any = torch.Tensor.device.__get__
_CPU, _META = torch.device("cpu"), torch.device("meta")
_NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")


class Words(Factories):
    """Answers for one simulation."""

    def __init__(self, device: Device, mode: Mode) -> None:
        self.device = device
        self.mode = mode
        self.live = device.blocks.live
        self.cuda = [torch.device("cuda", index) for index in range(1)]

    def place_of(self, tensor: torch.Tensor) -> int | None:
        """Where a tensor is said to lie; None for a real one."""
        if is_inside():
            return None
        try:
            block = self.live.get(id(storage_of(tensor)))
        except (NotImplementedError, RuntimeError):
            return self.device.place_of_odd(tensor)
        except ValueError:  # a parameter of a lazy module, which answers nothing before its first input
            with torch._C.DisableTorchFunctionSubclass():
                block = self.live.get(id(storage_of(tensor)))
        return None if block is None else block.place

    def device_of(self, tensor: torch.Tensor) -> Any:
        """`Tensor.device`."""
        place = self.place_of(tensor)
        if place is None:
            return _device_of(tensor)
        return _CPU if place == HOST else self.cuda[place]

    def asked(self, device: Any) -> Any:
        """A device that the program names, with what "cuda" and "meta" stand for below.

        Raises:
            RuntimeError: a name that torch does not know.
        """
        if device is None or self.ended or is_inside():
            return device
        if isinstance(device, bool) or not isinstance(device, str | int | torch.device):
            return device
        if isinstance(device, int):
            device = torch.device("cuda", device)
        elif isinstance(device, str):
            device = torch.device(device)
        if device.type == "cuda":
            return place_device(self.device.index_of(device))
        if device.type == "meta" and device.index is None:
            return place_device(GENUINE_META)
        return device

    # Methods of tensors

    def to(self, original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """`Tensor.to` in all its forms."""
        place = self.place_of(tensor)
        other = kwargs.pop("other", None) if "other" in kwargs else args[0] if args else None
        if isinstance(other, _Tensor):
            kwargs = {"device": self.device_of(other), "dtype": other.dtype, **kwargs}
            args = args[1:]
            for name, value in zip(("non_blocking", "copy"), args, strict=False):
                kwargs[name] = value
        else:
            kwargs = _named_to(args, kwargs)
        device = kwargs.pop("device", None)
        if torch.nn.parameter.is_lazy(tensor):
            # Of a lazy module, before its first input: nothing but a dtype and a device.
            return torch.empty(0, dtype=kwargs.get("dtype", tensor.dtype), device=device or self.device_of(tensor))
        target = self.asked(device)
        if target is None:
            return original(tensor, **kwargs)
        if place is not None and _is_there(target, place):
            return original(tensor, **kwargs) if kwargs else tensor
        return original(tensor, device=target, **kwargs)

    def to_cuda(
        self, original: Any, tensor: torch.Tensor, device: Any = None, non_blocking: bool = False,
        memory_format: Any = torch.preserve_format,
    ) -> Any:  # fmt: skip
        """`Tensor.cuda`."""
        return tensor.to(torch.device("cuda") if device is None else device, memory_format=memory_format)

    def to_cpu(self, original: Any, tensor: torch.Tensor, memory_format: Any = torch.preserve_format) -> Any:
        """`Tensor.cpu`."""
        if self.place_of(tensor) == HOST:
            return tensor
        return original(tensor, memory_format=memory_format)

    def type(self, original: Any, tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False) -> Any:
        """`Tensor.type`."""
        if dtype is None:
            named = str(original(tensor))
            if (self.place_of(tensor) or 0) >= 0 and self.place_of(tensor) is not None:
                return f"torch.cuda.{TYPE_NAMES.get(tensor.dtype, named.rpartition('.')[2])}"
            return named if self.place_of(tensor) is None else f"torch.{TYPE_NAMES.get(tensor.dtype)}"
        if isinstance(dtype, str) and dtype.startswith("torch."):
            wanted = {name: known for known, name in TYPE_NAMES.items()}.get(dtype.rpartition(".")[2])
            if wanted is not None:
                return tensor.to("cuda" if ".cuda." in dtype else "cpu", wanted)
        return tensor.to(dtype) if isinstance(dtype, torch.dtype) else original(tensor, dtype)

    def type_as(self, original: Any, tensor: torch.Tensor, other: torch.Tensor) -> Any:
        """`Tensor.type_as`."""
        return tensor.to(self.device_of(other), other.dtype)

    def numpy(self, original: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """`Tensor.numpy`, which no tensor on a device has."""
        place = self.place_of(tensor)
        if place is None:
            return original(tensor, *args, **kwargs)
        if place == HOST:
            host.refuse_reading(tensor, "turned into an array")
        raise TypeError(
            f"can't convert cuda:{place} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
            f"memory first."
        )

    def tolist(self, original: Any, tensor: torch.Tensor) -> Any:
        """`Tensor.tolist`."""
        return original(tensor if self.place_of(tensor) is None else self.device.values.read(tensor))

    def data_ptr(self, original: Any, tensor: torch.Tensor) -> int:
        """`Tensor.data_ptr`: the address that the allocator gave."""
        if self.place_of(tensor) is None:
            return int(original(tensor))
        block = self.live[id(storage_of(tensor))]
        base = block.address or (block.key if block.nbytes else 0)
        return base + int(tensor.storage_offset()) * tensor.element_size() if base else 0

    def get_device(self, original: Any, tensor: torch.Tensor) -> int:
        """`Tensor.get_device`."""
        place = self.place_of(tensor)
        return int(original(tensor)) if place is None else place

    def pin_memory(self, original: Any, tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        """`Tensor.pin_memory`: a copy in host memory, which nothing here can pin."""
        if (self.place_of(tensor) or 0) > HOST and self.place_of(tensor) is not None:
            raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
        return self.device.pin(tensor)

    def is_pinned(self, original: Any, tensor: torch.Tensor, device: Any = None) -> bool:
        """`Tensor.is_pinned`."""
        return self.device.is_pinned(tensor)

    def record_stream(self, original: Any, tensor: torch.Tensor, stream: Any) -> None:
        """`Tensor.record_stream`."""
        block = self.live.get(id(storage_of(tensor)))
        if block is not None and block.address:
            self.device.blocks.settle()
            self.device.allocator.record_stream(block.address, stream.number)

    def deepcopy(self, original: Any, tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
        """`copy.deepcopy` of a tensor that is no parameter."""
        if self.place_of(tensor) is None:
            return original(tensor, memo)
        if not tensor.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the "
                "moment."
            )
        if id(tensor) in memo:
            return memo[id(tensor)]
        with torch.no_grad():
            copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        if tensor.grad is not None:
            copy.grad = self.deepcopy(original, tensor.grad, memo)
        memo[id(tensor)] = copy
        return copy

    def new(self, original: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """`Tensor.new`, which torch keeps for old code: uninitialized, or with the values of a list."""
        if self.place_of(tensor) is None:
            return original(tensor, *args, **kwargs)
        if tensor.layout is torch.sparse_coo:
            return torch.sparse_coo_tensor(*args)
        if len(args) == 1 and isinstance(args[0], list | _Tensor):
            return self.new_tensor(None, tensor, args[0])
        return torch.empty(*(args or (0,)), dtype=tensor.dtype, device=self.device_of(tensor))

    def reduce(self, original: Any, tensor: torch.Tensor, protocol: Any) -> Any:
        """Pickling, which `torch.save` does without."""
        if self.place_of(tensor) is None:
            return original(tensor, protocol)
        raise SimulationError(
            "a tensor of a simulated device cannot be pickled: it has no data. torch.save keeps what it is given in "
            "the simulation, for torch.load."
        )

    def new_tensor(self, original: Any, tensor: torch.Tensor, data: Any, **kwargs: Any) -> Any:
        """`Tensor.new_tensor`."""
        kwargs.setdefault("device", self.device_of(tensor))
        kwargs.setdefault("dtype", tensor.dtype)
        if isinstance(data, _Tensor):
            grad = kwargs.pop("requires_grad", False)
            return data.detach().clone().to(kwargs["device"], kwargs["dtype"]).requires_grad_(grad)
        return torch.tensor(data, **kwargs)

    def repr(self, original: Any, tensor: torch.Tensor, *, tensor_contents: Any = None) -> str:
        """`repr`."""
        if self.place_of(tensor) is None:
            return str(original(tensor, tensor_contents=tensor_contents))
        return printing.describe(self.device, tensor, original)

    def group_tensors(self, lists: Any, with_indices: bool = False) -> dict[Any, Any]:
        """What optimizers sort their tensors with: the keys name devices."""
        groups = internals.group_tensors(lists, with_indices)
        found = {}
        for (device, dtype), (members, indices) in groups.items():
            first = next((t for tensors in members for t in tensors if t is not None), None)
            found[(device if first is None else self.device_of(first), dtype)] = (members, indices)
        return found


def _is_there(target: torch.device, place: int) -> bool:
    """Whether a tensor in that place is where it is asked to go."""
    if place == HOST:
        return target.type == "cpu"
    return target.type == "meta" and target.index == place


def _named_to(args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `Tensor.to(device, dtype, non_blocking, copy, memory_format=)` by name."""
    named = dict(kwargs)
    rest = list(args)
    if rest and (rest[0] is None or isinstance(rest[0], str | int | torch.device)) and not isinstance(rest[0], bool):
        named["device"] = rest.pop(0)
    if rest and (rest[0] is None or isinstance(rest[0], torch.dtype)):
        named["dtype"] = rest.pop(0)
    named.update(zip(("non_blocking", "copy"), rest, strict=False))
    return {name: value for name, value in named.items() if value is not None}


def install(device: Device, mode: Mode, patches: Patches) -> None:
    """Let the word "cuda" mean the simulated device."""
    internals.device_constructors()  # torch keeps the set that it makes at the first call: not of our functions
    words = Words(device, mode)
    device.words = words
    patches.on_restore(lambda: setattr(words, "ended", True))
    _keep_default_device(patches)
    _install_properties(words, patches)
    methods: dict[str, Callable[..., Any]] = {
        "to": words.to,
        "cuda": words.to_cuda,
        "cpu": words.to_cpu,
        "type": words.type,
        "type_as": words.type_as,
        "numpy": words.numpy,
        "tolist": words.tolist,
        "data_ptr": words.data_ptr,
        "get_device": words.get_device,
        "pin_memory": words.pin_memory,
        "is_pinned": words.is_pinned,
        "record_stream": words.record_stream,
        "new_tensor": words.new_tensor,
        "new": words.new,
        "__reduce_ex__": words.reduce,
        "__deepcopy__": words.deepcopy,
        "__repr__": words.repr,
        **dict.fromkeys(_NEW, words.factory),
    }
    for name, method in methods.items():
        patches.replace(_Tensor, name, _method(getattr(_Tensor, name), method))
    routed = {}
    for name, original in ORIGINALS.items():
        kind = words.sparse if name.startswith("sparse_") else words.from_values
        new = _function(original, kind if name in FROM_VALUES else words.factory)
        routed[original] = new
        patches.replace(torch, name, new)
    _install_device_context(routed, patches)
    patches.replace(torch._C, internals.group_tensors.__name__, words.group_tensors)
    patches.replace(torch._C._nn, internals.parse_to.__name__, parse_to)
    _install_builtins(routed, patches)


def parse_to(*args: Any, **kwargs: Any) -> Any:
    """What `Module.to` reads its arguments with: a mere number is an accelerator, of which this process has none."""
    first = args[0] if args else kwargs.get("device")
    if isinstance(first, int) and not isinstance(first, bool):
        device = torch.device("cuda", first)
        args, kwargs = ((device, *args[1:]), kwargs) if args else (args, {**kwargs, "device": device})
    return internals.parse_to(*args, **kwargs)


def _install_builtins(routed: dict[Any, Any], patches: Patches) -> None:
    """`torch.jit.script` knows torch's functions by their ids: our own are the same ops to it."""
    table = internals.script_builtins()
    known = {id(new): table[id(old)] for old, new in routed.items() if id(old) in table}
    patches.on_restore(lambda: [table.pop(key, None) for key in known])
    table.update(known)


def _install_properties(words: Words, patches: Patches) -> None:
    def is_cuda(tensor: torch.Tensor) -> bool:
        return (place := words.place_of(tensor)) is not None and place >= 0

    def is_cpu(tensor: torch.Tensor) -> bool:
        place = words.place_of(tensor)
        return _device_of(tensor).type == "cpu" if place is None else place == HOST

    def is_meta(tensor: torch.Tensor) -> bool:
        return words.place_of(tensor) is None and _device_of(tensor).type == "meta"

    patches.replace(_Tensor, "device", property(words.device_of))
    patches.replace(_Tensor, "is_cuda", property(is_cuda))
    patches.replace(_Tensor, "is_cpu", property(is_cpu))
    patches.replace(_Tensor, "is_meta", property(is_meta))


def _keep_default_device(patches: Patches) -> None:
    """Let what the program does with `torch.set_default_device` end with the simulation."""
    holder = internals.global_device_context
    had, before = hasattr(holder, "device_context"), getattr(holder, "device_context", None)

    def restore() -> None:
        if getattr(holder, "device_context", None) is not before:
            torch.set_default_device(before.device if before is not None else None)
        if not had and hasattr(holder, "device_context"):
            del holder.device_context  # torch 2.9 cannot tell the default device where it is None

    patches.on_restore(restore)


def _method(original: Any, new: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_inside():
            return original(self, *args, **kwargs)
        return new(original, self, *args, **kwargs)

    return method


def _function(original: Any, new: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return new(original, *args, **kwargs)

    return function


def _install_device_context(routed: dict[Any, Any], patches: Patches) -> None:
    """`with torch.device("cuda")`: the mode hands its device to torch's own functions, past ours."""
    context = internals.DeviceContext
    original = context.__torch_function__

    def torch_function(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if is_inside():
            return func(*args, **kwargs)
        if func in routed:
            if kwargs.get("device") is None and func in internals.device_constructors():
                kwargs["device"] = self.device
            return routed[func](*args, **kwargs)
        return original(self, func, types, args, kwargs)

    patches.replace(context, "__torch_function__", torch_function)
