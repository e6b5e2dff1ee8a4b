"""Copies that a program makes, perhaps without knowing: `clone` and `_to_copy`."""

from __future__ import annotations

from typing import Any

import torch

from torchledger.journal.entries import AUTOCAST_COPY
from torchledger.record.storages import Books

_STACK = 3
"""Dimensions of a stack of matrices."""
_storage_of = torch.Tensor.untyped_storage


def note_copy(books: Books, name: str, args: Any, kwargs: Any, out: Any, module: int) -> None:
    """`clone`, `_to_copy`, `index`: follow a parameter into its copy, and post copies that the user may not know of."""
    source = args[0]
    if name == "aten._weight_norm_interface":
        out = out[0]  # what a weight is multiplied as
    if not isinstance(source, torch.Tensor) or not isinstance(out, torch.Tensor):
        return  # shape inference copies plain numbers
    if out.layout is not torch.strided or source.layout is not torch.strided:
        return
    storage = _storage_of(out)
    parameter = books.parameter_of(source)
    picks = name.startswith("aten.index")
    # Matrices picked out of a stack, such as experts, are still weights; rows of a table are what was looked up.
    if parameter >= 0 and (not picks or source.dim() >= _STACK):
        books.tag_parameter(storage, parameter, out.storage_offset())
    if picks or name == "aten._weight_norm_interface":
        return
    kind = ""
    if name == "aten._to_copy":
        if out.device != source.device:
            kind = "device"
        elif out.dtype is not source.dtype:
            kind = "dtype"
            if parameter >= 0 and _autocast_is_on(out.device.type):
                number = books.live[id(storage)].number
                books.roles[number] = books.roles.get(number, 0) | AUTOCAST_COPY
        elif out.stride() != source.stride():
            kind = "layout"
    else:
        wanted = (kwargs or {}).get("memory_format")
        if wanted not in (None, torch.preserve_format) and not source.is_contiguous(memory_format=wanted):
            kind = "layout"
    if kind:
        books.copies.append((kind, books.device_name(out.device), storage.nbytes(), module))


def _autocast_is_on(device_type: str) -> bool:
    """Whether the program is inside autocast (inside dispatch the flag itself reads off)."""
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return nesting > 0 or torch.is_autocast_enabled(device_type)
