"""`torch.save` and `torch.load`: a file of weights that have no data would be worse than none.

What holds tensors of the device is kept in the simulation, by the name of its file, and no file is touched; anything
else is written as ever. Real files are read; what they place on "cuda" is moved to the simulated device.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import weakref
from typing import Any

import torch
from torch.utils import _pytree

from torchledger.errors import SimulationError
from torchledger.patching import Patches
from torchledger.simulation import kept_files
from torchledger.simulation.contracts import Device


class Files:
    """What was saved in one simulation."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.by_path: dict[str, Any] = {}
        self._by_object: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def save(self, original: Any, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        """`torch.save`."""
        if isinstance(obj, torch.nn.Module) and self.holds_simulated([*obj.parameters(), *obj.buffers()]):
            raise SimulationError(
                "torch.save of a whole module is not simulated, only of what holds tensors: save its state_dict()."
            )
        if not self.holds_simulated(obj):
            original(obj, f, *args, **kwargs)
            return
        self.device.note("torch.save: what holds tensors of the device was kept in the simulation; no file was written")
        kept = _snapshot(self.device, obj)
        if isinstance(f, str | os.PathLike):
            self.by_path[os.path.abspath(os.fspath(f))] = kept
        else:
            self._by_object[f] = kept

    def load(self, original: Any, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        """`torch.load`."""
        kept = self.by_path.get(os.path.abspath(os.fspath(f))) if isinstance(f, str | os.PathLike) else None
        if kept is None and not isinstance(f, str | os.PathLike):
            kept = self._by_object.get(f)
        if kept is not None:
            return _restored(kept, map_location)
        on_device: set[int] = set()
        wanted = map_location

        def place(storage: Any, location: str) -> Any:
            if callable(wanted) and not isinstance(wanted, torch.device):
                found = wanted(storage, location)
                return found if found is not None else storage
            target = str(wanted) if wanted is not None else location
            if isinstance(wanted, dict):
                target = str(wanted.get(location, location))
            if target.startswith("cuda"):
                on_device.add(storage._cdata if hasattr(storage, "_cdata") else id(storage))
            return storage

        loaded = original(f, place, *args, **kwargs)
        return _tree(loaded, lambda t: t.cuda() if t.untyped_storage()._cdata in on_device else t)

    def holds_simulated(self, obj: Any) -> bool:
        """Whether an object holds tensors of the device, or host copies of values that nobody computed."""
        live = self.device.blocks.live
        found = False

        def look(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal found
            try:
                found = found or id(tensor.untyped_storage()) in live or self.device.is_assumed(tensor)
            except (NotImplementedError, RuntimeError):
                found = found or tensor.is_cuda
            return tensor

        _tree(obj, look)
        return found


class _Kept:
    """A tensor as a file would hold it: on the host, without data but for what is known, and where it was."""

    def __init__(self, tensor: torch.Tensor, kept: torch.Tensor, place: torch.device) -> None:
        self.kept = kept
        self.place = place
        self.is_parameter = isinstance(tensor, torch.nn.Parameter)
        self.requires_grad = tensor.requires_grad


def _snapshot(device: Device, obj: Any) -> Any:
    """What a file would hold of an object."""
    seen: dict[Any, _Kept] = {}

    def keep(tensor: torch.Tensor) -> Any:
        key = (id(tensor.untyped_storage()), tensor.storage_offset(), tensor.shape, tensor.stride())
        if key not in seen:
            seen[key] = _Kept(tensor, device.copy_to_host(tensor), tensor.device)
        return seen[key]

    return _tree(obj, keep)


def _restored(kept: Any, map_location: Any) -> Any:
    """What loading it gives."""
    made: dict[int, torch.Tensor] = {}

    def restore(leaf: Any) -> Any:
        if not isinstance(leaf, _Kept):
            return leaf
        if id(leaf) not in made:
            place: Any = leaf.place
            if isinstance(map_location, dict):
                place = map_location.get(str(place), place)
            elif isinstance(map_location, str | torch.device):
                place = map_location
            elif map_location is not None:
                place = "cpu"  # a function, which is given storages of the host
            with torch.no_grad():
                tensor = leaf.kept.to(place)
                tensor = tensor.clone() if tensor is leaf.kept else tensor
            tensor = tensor.requires_grad_(leaf.requires_grad)
            made[id(leaf)] = torch.nn.Parameter(tensor, leaf.requires_grad) if leaf.is_parameter else tensor
        return made[id(leaf)]

    return _pytree.tree_map(restore, kept)


def _tree(obj: Any, function: Any) -> Any:
    """An object with its tensors replaced, in containers of all kinds."""
    return _pytree.tree_map(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, obj)


def _install_safetensors(files: Files, patches: Patches) -> None:
    """The other format of weights: it would write what was assumed of them."""
    if importlib.util.find_spec("safetensors") is None:
        return
    module = importlib.import_module("safetensors.torch")
    save, save_file, load_file = module.save, module.save_file, module.load_file

    def save_inside(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if files.holds_simulated(tensors):
            raise SimulationError(
                "safetensors.torch.save of tensors of a simulated device: they have no data. Take save_file, which "
                "keeps them in the simulation."
            )
        return save(tensors, *args, **kwargs)

    def save_file_inside(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
        if files.holds_simulated(tensors):
            files.save(save_file, tensors, filename)
        else:
            save_file(tensors, filename, *args, **kwargs)

    def load_file_inside(filename: Any, device: Any = "cpu", *args: Any, **kwargs: Any) -> Any:
        if (kept := files.by_path.get(os.path.abspath(os.fspath(filename)))) is not None:
            return _restored(kept, torch.device(device))
        loaded = load_file(filename, "cpu", *args, **kwargs)
        return loaded if str(device) == "cpu" else {name: tensor.to(device) for name, tensor in loaded.items()}

    patches.replace_existing(
        module, {"save": save_inside, "save_file": save_file_inside, "load_file": load_file_inside}
    )


def install(device: Device, patches: Patches) -> None:
    """Let `torch.save` and `torch.load` keep in the simulation what belongs to it."""
    files = Files(device)
    save, load = torch.save, torch.load

    def save_inside(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        files.save(save, obj, f, *args, **kwargs)

    def load_inside(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return files.load(load, f, map_location, *args, **kwargs)

    _install_safetensors(files, patches)
    kept_files.install(files.by_path, patches)
    patches.replace(torch, "save", save_inside)
    patches.replace(torch, "load", load_inside)
