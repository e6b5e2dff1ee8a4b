"""Factories: what makes tensors, on the host or on the simulated device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchledger.simulation.contracts import Device
from torchledger.simulation.keys import GENUINE_META, is_inside

_Tensor = torch.Tensor
_CPU, _META = torch.device("cpu"), torch.device("meta")
FROM_VALUES = (
    "tensor",
    "as_tensor",
    "asarray",
    "scalar_tensor",
    "sparse_coo_tensor",
    "sparse_csr_tensor",
    "frombuffer",
)
_FACTORY_NAMES = (
    "empty empty_like empty_strided empty_permuted full full_like ones ones_like zeros zeros_like rand rand_like "
    "randn randn_like randint randint_like randperm arange range linspace logspace eye tril_indices triu_indices "
    "normal bartlett_window blackman_window hamming_window hann_window kaiser_window"
)
_FACTORIES = tuple(_FACTORY_NAMES.split())
ORIGINALS: dict[str, Any] = {name: getattr(torch, name) for name in (*_FACTORIES, *FROM_VALUES) if hasattr(torch, name)}
"""Torch's own factories, by name."""


class Factories:
    """Answers of one simulation to factories."""

    device: Device
    ended = False
    """Whether the simulation is over: a module that it imported may hold our functions for good."""

    def place_of(self, tensor: torch.Tensor) -> int | None:
        """Where a tensor is said to lie; None for a real one."""
        raise NotImplementedError

    def device_of(self, tensor: torch.Tensor) -> Any:
        """`Tensor.device`."""
        raise NotImplementedError

    def asked(self, device: Any) -> Any:
        """A device that the program names, with what "cuda" and "meta" stand for below."""
        raise NotImplementedError

    def factory(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A factory that fills what it makes without reading anything."""
        device = kwargs.get("device")
        if device is not None and not self.ended and not is_inside():
            kwargs["device"] = self.asked(device)
            generator = kwargs.get("generator")
            if generator is not None and kwargs["device"].type == "meta":
                del kwargs["generator"]
        return self._pinned(original, args, kwargs)

    def from_values(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A factory that takes values: it makes a host tensor, which is then moved."""
        device = kwargs.get("device")
        if self.ended or is_inside():
            return original(*args, **kwargs)
        if args and isinstance(args[0], list | tuple):
            args = (self._with_numbers(args[0]), *args[1:])
        if device is None:
            if kwargs.get("pin_memory"):
                return self._pinned(original, args, kwargs)
            if args and isinstance(args[0], _Tensor) and self.place_of(args[0]) is not None:
                return self._from_simulated(original, *args, **kwargs)
            return original(*args, **kwargs)
        target = self.asked(device)
        if target is None or target.type != "meta":
            if args and isinstance(args[0], _Tensor) and self.place_of(args[0]) is not None:
                return self._from_simulated(original, *args, **kwargs)
            return original(*args, **{**kwargs, "device": target})
        if target.index == GENUINE_META:
            return original(*args, **{**kwargs, "device": _META})
        grad = kwargs.pop("requires_grad", False)
        if args and isinstance(args[0], _Tensor) and self.place_of(args[0]) is not None:
            return self._from_simulated(original, *args, **{**kwargs, "requires_grad": grad})
        kwargs.pop("pin_memory", None)
        made = original(*args, **{**kwargs, "device": _CPU}).to(torch.device("cuda", target.index))
        return made.requires_grad_() if grad else made

    def _with_numbers(self, data: Any) -> Any:
        """Nested lists with the numbers in place of the tensors of the device that hold them."""
        if isinstance(data, list | tuple):
            kept = [self._with_numbers(item) for item in data]
            return data if all(new is old for new, old in zip(kept, data, strict=True)) else kept
        return data.tolist() if isinstance(data, _Tensor) and self.place_of(data) is not None else data

    def _pinned(self, original: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """What a factory makes, without asking torch to pin it: it has nothing to pin it with."""
        if self.ended or not kwargs.get("pin_memory"):
            return original(*args, **kwargs)
        out = original(*args, **{**kwargs, "pin_memory": False})
        if self.place_of(out) is not None:
            raise RuntimeError(f"Only dense CPU tensors can be pinned, not one of {self.device_of(out)}")
        self.device.note_pinned(out)
        return out

    def sparse(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`sparse_coo_tensor` of parts that lie on the device; torch sees that they do."""
        if self.ended or is_inside() or not any(self.place_of(a) is not None for a in args if isinstance(a, _Tensor)):
            return self.from_values(original, *args, **kwargs)
        kwargs.pop("device", None)
        return original(*args, **kwargs)

    def _from_simulated(self, original: Any, data: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`torch.tensor(x)` copies; `as_tensor(x)` only where it must."""
        grad = kwargs.pop("requires_grad", False)
        device = kwargs.pop("device", None) or self.device_of(data)
        out = data.to(device=device, dtype=kwargs.pop("dtype", None) or data.dtype)
        if original is ORIGINALS["tensor"] and out is data:
            out = data.detach().clone()
        return out.requires_grad_() if grad else out
