"""Files that `torch.save` keeps in the simulation, as the rest of the program sees them.

Programs save under one name and rename to another, ask how large a checkpoint is, and delete old ones.
"""

from __future__ import annotations

import os
import os.path
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree

from torchledger.patching import Patches

KEPT_BYTES = 1024
"""What a kept file is said to have beside its tensors."""


def install(kept: dict[str, Any], patches: Patches) -> None:
    """Let `os` know of kept files.

    Args:
        kept: What is kept, by absolute path; renaming and deleting change it.
        patches: Where to note what is replaced.
    """
    for name in ("rename", "replace"):
        patches.replace(os, name, _moving(getattr(os, name), kept))
    for name in ("remove", "unlink"):
        patches.replace(os, name, _removing(getattr(os, name), kept))
    for name in ("exists", "isfile", "lexists"):
        patches.replace(os.path, name, _asking(getattr(os.path, name), kept, lambda value: True))
    patches.replace(os.path, "getsize", _asking(os.path.getsize, kept, _count_bytes))


def _key(path: Any) -> str | None:
    try:
        text = os.fspath(path)
    except TypeError:
        return None
    return os.path.abspath(text) if isinstance(text, str) else None


def _moving(original: Callable[..., Any], kept: dict[str, Any]) -> Callable[..., Any]:
    def move(src: Any, dst: Any, **kwargs: Any) -> Any:
        source, target = _key(src), _key(dst)
        if source in kept and target is not None:
            kept[target] = kept.pop(source)
            return None
        return original(src, dst, **kwargs)

    return move


def _removing(original: Callable[..., Any], kept: dict[str, Any]) -> Callable[..., Any]:
    def remove(path: Any, **kwargs: Any) -> Any:
        if (key := _key(path)) in kept:
            del kept[key]
            return None
        return original(path, **kwargs)

    return remove


def _asking(original: Callable[..., Any], kept: dict[str, Any], answer: Callable[[Any], Any]) -> Callable[..., Any]:
    def ask(path: Any) -> Any:
        key = _key(path) if kept else None
        return answer(kept[key]) if key in kept else original(path)

    return ask


def _count_bytes(value: Any) -> int:
    kept = (getattr(leaf, "kept", None) for leaf in _pytree.tree_leaves(value))
    tensors = [tensor for tensor in kept if isinstance(tensor, torch.Tensor)]
    return KEPT_BYTES + sum(tensor.numel() * tensor.element_size() for tensor in tensors)
