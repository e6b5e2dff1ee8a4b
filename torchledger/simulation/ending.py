"""What becomes of tensors that outlive their simulation."""

from __future__ import annotations

import gc
from typing import Any, NoReturn

import torch

from torchledger.errors import SimulationEndedError
from torchledger.simulation.blocks import storage_of
from torchledger.simulation.contracts import Device

_PLAIN = ("__repr__", "__str__", "__del__", "__hash__")


def _refuse(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
    name = getattr(func, "__name__", str(func))
    raise SimulationEndedError(
        f"{name} of a tensor of a simulated device, whose simulation has ended: it has no data. Use such tensors "
        f"inside `with torchledger.simulate(...)`, and make models anew outside."
    )


class EndedTensor(torch.Tensor):
    """A tensor of a simulation that has ended."""

    __torch_function__: Any = classmethod(_refuse)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "<tensor of a simulation that has ended>"


class EndedParameter(torch.nn.Parameter):
    """A parameter of a simulation that has ended."""

    __torch_function__: Any = classmethod(_refuse)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "<parameter of a simulation that has ended>"


_ENDED: dict[type, type] = {torch.Tensor: EndedTensor, torch.nn.Parameter: EndedParameter}


def mark_survivors(device: Device) -> None:
    """Let tensors that outlive the simulation say so when they are used."""
    live = device.blocks.live
    if not live:
        return
    for thing in gc.get_objects():
        ended = _ENDED.get(type(thing))
        if ended is not None:
            try:
                if id(storage_of(thing)) in live:
                    thing.__class__ = ended
            except (NotImplementedError, RuntimeError):
                continue
