"""Large host tensors that a model's constructor makes: simulated too, so that weights take no host memory."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import nn

from torchledger.errors import SimulatedValueError
from torchledger.simulation.blocks import HOST
from torchledger.simulation.contracts import Device, Mode
from torchledger.simulation.operators import Operator

SMALLEST_WITHOUT_DATA = 1 << 20
"""Host tensors of at least so many bytes have no data, where a module's constructor makes them."""
LARGEST_READ = 1 << 26
"""Copies from the device of more bytes than that are host tensors without data."""
_DEEPEST = 200


def make_without_data(mode: Mode, operator: Operator, args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """A host tensor without data in place of a large one that a module's constructor asks for, else None."""
    if not _constructor(sys._getframe(2)):
        return None
    out = mode.results.make(operator, args, {**kwargs, "device": torch.device("meta"), "pin_memory": False})
    if not isinstance(out, torch.Tensor) or out.untyped_storage().nbytes() < SMALLEST_WITHOUT_DATA:
        return None
    mode.blocks.enter(out, HOST)
    return out


def default_place(device: Device) -> int:
    """Where a tensor lies that torch makes like another, whose place it lost on the way."""
    return HOST if _constructor(sys._getframe(2)) and not device.has_tensors() else 0


def check_target(mode: Mode, operator: Operator, args: Any, place: int) -> None:
    """Refuse to write into a tensor with data what nobody knows.

    Raises:
        SimulatedValueError: the op reads host tensors without data and writes into one with data.
    """
    if place != HOST or not args:
        return
    target = args[0][0] if isinstance(args[0], list | tuple) and args[0] else args[0]
    if isinstance(target, torch.Tensor) and mode.block_of(target) is None:
        refuse_reading(target, f"written by {operator.name}, from tensors without data")


def refuse_reading(tensor: torch.Tensor, what: str) -> NoReturn:
    """Raise the error for values that a host tensor does not have.

    Raises:
        SimulatedValueError: always.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = "x".join(map(str, tensor.shape)) or "0-dim"
    raise SimulatedValueError(
        f"a host tensor ({shape}, {dtype}) was {what}: in a simulation, host tensors of "
        f"{SMALLEST_WITHOUT_DATA // 1024} KiB and more that a module's constructor makes have no data, so that weights "
        f"take no memory. Make it outside the constructor, or smaller, or do without its values."
    )


def _constructor(frame: FrameType | None) -> bool:
    """Whether a module's constructor runs, some frames up."""
    for _ in range(_DEEPEST):
        if frame is None:
            return False
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), nn.Module):
            return True
        frame = frame.f_back
    return False
