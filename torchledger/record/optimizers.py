"""Optimizers: their parameters, gradients and state, entered before and after each step."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from torchledger.journal.entries import GRADIENT, OPTIMIZER_STATE, PARAMETER
from torchledger.record.names import OUTSIDE, Names
from torchledger.record.storages import Books

_storage_of = torch.Tensor.untyped_storage
_PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.device, torch.dtype, torch.Size)


class Owner(Protocol):
    """What entering an optimizer needs of the recorder."""

    names: Names
    books: Books

    def enter_parameter(self, tensor: torch.Tensor, name: str, module: int) -> None:
        """Enter one parameter, with its gradient."""


class OptimizerBooks:
    """The optimizers and parameters that one ledger knows."""

    def __init__(self, recorder: Owner) -> None:
        self._recorder = recorder
        self._numbers: dict[int, int] = {}  # id(parameter) -> number, while it lives
        self._parameters: dict[int, weakref.ref[torch.Tensor]] = {}
        self._optimizers: dict[int, weakref.ref[Optimizer]] = {}
        self._read_this_step: set[int] = set()
        """Optimizers whose state was entered after their step: it is not looked through again when the step ends."""

    def add(self, optimizer: Optimizer) -> None:
        """Know an optimizer: given to the ledger, or found as it steps."""
        if id(optimizer) not in self._optimizers:
            key = id(optimizer)
            known = self._optimizers
            known[key] = weakref.ref(optimizer, lambda _: known.pop(key, None))
        self.enter_parameters(optimizer)
        self.enter_state(optimizer)

    def parameter_number(self, parameter: torch.Tensor, name: str, module: int) -> int:
        """The number of a parameter, a new one at its first registered path."""
        key = id(parameter)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self._recorder.names.add_parameter(name, module)
            numbers, alive = self._numbers, self._parameters

            def forget(_: object) -> None:
                numbers.pop(key, None)
                alive.pop(key, None)

            alive[key] = weakref.ref(parameter, forget)
        return number

    def before_step(self, optimizer: Optimizer) -> None:
        """Its parameters may have been swapped, its gradients set by hand, its state loaded."""
        if id(optimizer) not in self._optimizers:
            self.add(optimizer)
        else:
            self.enter_parameters(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """Its state may be new."""
        self.enter_state(optimizer)
        self._read_this_step.add(id(optimizer))

    def enter_all(self) -> None:
        """At a step's end: parameters that were swapped, gradients set by hand, state of all optimizers."""
        books = self._recorder.books
        live, roles = books.live, books.roles
        for key, ref in list(self._parameters.items()):
            parameter = ref()
            if parameter is None:
                continue
            try:
                found = live.get(id(_storage_of(parameter)))
            except (RuntimeError, NotImplementedError):
                found = None
            if found is None or not roles.get(found.number, 0) & PARAMETER:
                books.enter_parameter(parameter, self._numbers[key], self._module_of(self._numbers[key]))
            if parameter.grad is not None:
                self._enter_gradient(parameter.grad)
        for key, optimizer_ref in list(self._optimizers.items()):
            if key not in self._read_this_step and (optimizer := optimizer_ref()) is not None:
                self.enter_state(optimizer)
        self._read_this_step.clear()

    def enter_parameters(self, optimizer: Optimizer) -> None:
        """Enter the parameters of an optimizer, those of no known model too, and their gradients."""
        recorder = self._recorder
        books = recorder.books
        live, roles, numbers = books.live, books.roles, self._numbers
        for g, group in enumerate(optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                number = numbers.get(id(parameter))
                if number is None:
                    name = f"{type(optimizer).__name__}.param_groups.{g}.{i}"
                    recorder.enter_parameter(parameter, name, OUTSIDE)
                    continue
                try:
                    found = live.get(id(_storage_of(parameter)))
                except (RuntimeError, NotImplementedError):
                    found = None
                if found is None or not roles.get(found.number, 0) & PARAMETER:
                    books.enter_parameter(parameter, number, self._module_of(number))
                gradient = parameter.grad
                if gradient is not None:
                    self._enter_gradient(gradient)

    def _module_of(self, number: int) -> int:
        return self._recorder.names.parameter_modules[number] if number >= 0 else OUTSIDE

    def _enter_gradient(self, gradient: torch.Tensor) -> None:
        books = self._recorder.books
        try:
            ref = books.live.get(id(_storage_of(gradient)))
        except (RuntimeError, NotImplementedError):
            ref = None
        if ref is None or not books.roles.get(ref.number, 0) & GRADIENT:
            books.enter(gradient, GRADIENT)

    def enter_state(self, optimizer: Optimizer) -> None:
        """Enter every storage that is reachable from ``optimizer.state``."""
        books = self._recorder.books
        live, roles = books.live, books.roles
        for key, state in optimizer.state.items():
            module = self._module_of(self._numbers.get(id(key), -1))
            for value in state.values() if type(state) is dict else (state,):
                if type(value) is torch.Tensor and value.layout is torch.strided:
                    ref = live.get(id(_storage_of(value)))
                    if ref is not None and roles.get(ref.number, 0) & OPTIMIZER_STATE:
                        continue
                    books.enter(value, OPTIMIZER_STATE, module)
                elif not isinstance(value, _PLAIN):
                    for tensor in tensors_in(value):
                        books.enter(tensor, OPTIMIZER_STATE, module)


def tensors_in(value: Any, _seen: set[int] | None = None, _depth: int = 0) -> Iterator[torch.Tensor]:
    """All tensors reachable from a value through mappings, sequences, sets and plain objects."""
    seen = set() if _seen is None else _seen
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, _PLAIN) or id(value) in seen or _depth > 20:
        return
    seen.add(id(value))
    inner: Any
    if isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        inner = list(value)
    else:
        inner = list(getattr(value, "__dict__", {}).values())
        for slot in _slots(type(value)):
            if hasattr(value, slot):
                inner.append(getattr(value, slot))
    for item in inner:
        yield from tensors_in(item, seen, _depth + 1)


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots
