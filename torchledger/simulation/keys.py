"""What sets a simulated tensor apart: the dispatch keys of a backend that nobody has."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchledger import internals
from torchledger.errors import SimulationError

META = torch.device("meta")
GENUINE_META = 99
"""The index that marks a device as the one that the program itself calls ``meta``; see `place_device`."""
_PROBES = ("aten::empty.memory_format", "aten::add.Tensor", "aten::mm", "aten::_to_copy", "aten::copy_")
_make_subclass = internals.make_subclass
_meta_included, _include_meta = internals.meta_included, internals.include_meta
_get_ident = threading.get_ident


class Backend:
    """The backend whose keys are borrowed.

    Raises:
        SimulationError: every backend that could lend its keys has kernels in this process.
    """

    def __init__(self) -> None:
        for name in ("HPU", "XPU"):
            taken = [op for op in _PROBES if internals.has_kernel_for_key(op, name)]
            if not taken:
                break
        else:
            raise SimulationError(
                "both backends whose dispatch keys a simulated device could borrow (HPU and XPU) have kernels in this "
                "process. Simulate in a Python without the extension that brings them."
            )
        self.name = name
        self.device = torch.device(name.lower())
        self.key = getattr(internals.DispatchKey, name)
        self.autocast_key = getattr(internals.DispatchKey, f"Autocast{name}")

    def rekey(self, tensor: torch.Tensor) -> torch.Tensor:
        """A simulated tensor on the storage of a meta tensor."""
        return _make_subclass(torch.Tensor, tensor, False, device_for_backend_keys=self.device)


_depths: dict[int, int] = {}
"""How deep each thread is inside the simulation's own code."""


def is_inside() -> bool:
    """Whether this thread is inside the simulation's own code, where a simulated tensor is a meta tensor."""
    return _get_ident() in _depths


@contextmanager
def inside() -> Iterator[None]:
    """A context in which simulated tensors are what they are below: meta tensors, run by meta kernels."""
    thread = _get_ident()
    depth = _depths.get(thread, 0)
    was_included = _meta_included()
    _depths[thread] = depth + 1
    _include_meta(True)
    try:
        yield
    finally:
        _include_meta(was_included)
        if depth:
            _depths[thread] = depth
        else:
            del _depths[thread]


def place_device(index: int) -> torch.device:
    """How a simulated device is named where torch itself must read the name: meta tensors drop the index."""
    return torch.device("meta", index)
