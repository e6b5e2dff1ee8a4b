"""Running somebody's model and leaving no trace: on copies of its tensors, with everything else put back."""

from __future__ import annotations

import copy
import inspect
import random
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from torchledger.errors import UsageError

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set)


@dataclass(frozen=True)
class Borrowed:
    """A model, the arguments of one call of it, and all tensors that either holds, each once."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    modules: tuple[nn.Module, ...]
    tensors: tuple[Tensor, ...]

    def copies(self) -> list[Tensor]:
        """A copy of each tensor: a leaf that requires a gradient where its original does."""
        return [_copied(tensor) for tensor in self.tensors]

    @contextmanager
    def running_on(self, copies: Sequence[Tensor]) -> Iterator[Callable[[], Any]]:
        """Gives a function that calls the model on ``copies``; its backward, if any, belongs inside as well.

        Parameters, buffers, tensor attributes and arguments are the copies, so that nothing is written into the
        originals and no gradient reaches them. Attributes of the modules, hooks and registrations among them, are as
        before afterwards (those that are plain containers: with the contents that they had), and so are gradients.
        """
        by_original = {id(tensor): twin for tensor, twin in zip(self.tensors, copies, strict=True)}

        def lend(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return by_original[id(leaf)]
            return leaf if isinstance(leaf, nn.Module) else _copied_object(leaf)

        args, kwargs = tree_map(lend, (self.args, self.kwargs))
        with _attributes_put_back(self.modules), _gradients_put_back(self.tensors):
            for module in self.modules:
                _lend_tensors(module, by_original)
            yield lambda: self.model(*args, **kwargs)


def borrow(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Borrowed:
    """The model, out of the wrappers that compile or distribute it, with the tensors that it and its arguments hold.

    A function's modules are those that it is a method of, names, or is given.

    Raises:
        UsageError: it is nothing to call, a TorchScript module, or has parameters without a shape.
    """
    parallel = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    while isinstance(model, nn.Module) and (isinstance(model, parallel) or _is_compiled(model)):
        model = model.module if isinstance(model, parallel) else model._modules["_orig_mod"]  # type: ignore[assignment]
    if not callable(model):
        raise UsageError(f"crosscheck({type(model).__name__}): give a module, or a function of tensors.")
    roots = (*_modules_named(model), *(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, nn.Module)))
    modules = tuple(dict.fromkeys(module for root in roots for module in root.modules()))
    if any(isinstance(module, torch.jit.ScriptModule) for module in modules):
        raise UsageError("crosscheck() was given a TorchScript module: give it the module that it was made from.")
    held = (tensor for module in modules for tensor in _tensors_of(module))
    given = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    tensors = {id(tensor): tensor for tensor in (*held, *given)}
    if any(is_lazy(tensor) for tensor in tensors.values()):
        raise UsageError("crosscheck() was given a lazy module without shapes: run it once before.")
    return Borrowed(model, args, kwargs, modules, tuple(tensors.values()))


@contextmanager
def surroundings_put_back(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Put back the states of all random generators, and run eagerly what `torch.compile` would compile.

    So that what runs inside takes the same random numbers each time, and the function is compiled when its owner runs
    it. Generators are those of Python, numpy, the CPU and the accelerators that hold ``tensors``.
    """
    python = random.getstate()
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    numpy_state = numpy.get_state() if numpy is not None else None
    by_type: dict[str, set[int]] = {}
    for device in (tensor.device for tensor in tensors):
        if device.index is not None and device.type not in ("cpu", "meta"):
            by_type.setdefault(device.type, set()).add(device.index)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for kind, indices in by_type.items():
            stack.enter_context(torch.random.fork_rng(devices=sorted(indices), device_type=kind))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.set_state(numpy_state)


def tensors_in(value: Any, _seen: set[int] | None = None) -> Iterator[Tensor]:
    """The tensors that a model's output holds, in tuples, dicts, data classes and other objects."""
    seen = set() if _seen is None else _seen
    if id(value) in seen or isinstance(value, nn.Module | type | ModuleType | FunctionType):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    leaves, structure = tree_flatten(value)
    if structure.is_leaf():
        leaves = list(value.values()) if isinstance(value, dict) else list(getattr(value, "__dict__", {}).values())
    for leaf in leaves:
        yield from tensors_in(leaf, seen)


def _modules_named(model: Callable[..., Any]) -> Iterator[nn.Module]:
    if isinstance(model, nn.Module):
        yield model
        return
    if isinstance(owner := getattr(model, "__self__", None), nn.Module):
        yield owner
    function = inspect.unwrap(getattr(model, "__func__", model))
    if inspect.isfunction(function):
        named = inspect.getclosurevars(function)
        for value in (*named.nonlocals.values(), *named.globals.values()):
            if isinstance(value, nn.Module):
                yield value


def _is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules and hasattr(module, "dynamo_ctx")


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """The tensors that a module itself holds: registered, as plain attributes, and in those that are containers."""
    for value in module.__dict__.values():
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        yield from (item for item in inside if isinstance(item, Tensor))


def _lend_tensors(module: nn.Module, by_original: dict[int, Tensor]) -> None:
    attributes = module.__dict__
    if attributes.get("_compiled_call_impl") is not None:  # as Module.compile() leaves it
        attributes["_compiled_call_impl"] = None
    for name, value in attributes.items():
        if isinstance(value, Tensor):
            attributes[name] = by_original.get(id(value), value)
        elif type(value) is tuple and any(id(item) in by_original for item in value):
            attributes[name] = tuple(by_original.get(id(item), item) for item in value)
        elif type(value) is list:
            value[:] = [by_original.get(id(item), item) for item in value]
        elif type(value) in _CONTAINERS and isinstance(value, dict):
            for key, item in value.items():
                if isinstance(item, nn.Module) and _is_compiled(item):
                    value[key] = item._modules["_orig_mod"]
                elif id(item) in by_original:
                    value[key] = by_original[id(item)]


@contextmanager
def _attributes_put_back(modules: Sequence[nn.Module]) -> Iterator[None]:
    kept = [
        (module.__dict__, dict(module.__dict__), [(v, v.copy()) for v in module.__dict__.values() if _is_container(v)])
        for module in modules
    ]
    try:
        yield
    finally:
        for attributes, before, containers in kept:
            for name in attributes.keys() - before.keys():
                del attributes[name]
            attributes.update(before)
            for container, contents in containers:
                if isinstance(container, list):
                    container[:] = contents
                else:
                    container.clear()
                    container.update(contents)


@contextmanager
def _gradients_put_back(tensors: Sequence[Tensor]) -> Iterator[None]:
    """For originals that the model reaches by a way of its own."""
    kept = [(tensor, tensor.grad) for tensor in tensors if tensor.is_leaf and tensor.requires_grad]
    for tensor, _ in kept:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, gradient in kept:
            tensor.grad = gradient


def _is_container(value: Any) -> bool:
    return type(value) in _CONTAINERS


def _copied(tensor: Tensor) -> Tensor:
    twin = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin.requires_grad_(tensor.requires_grad)


def _copied_object(value: Any) -> Any:
    """A cache, say, that a call grows; what cannot be copied is lent as it is."""
    try:
        return copy.deepcopy(value)
    except Exception:
        return value
