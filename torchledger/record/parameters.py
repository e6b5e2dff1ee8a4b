"""Parameters, buffers, gradients and optimizer state: entered when they are found, and looked through again each step.

No tensor is held, not even weakly: `torch.utils.swap_tensors` refuses tensors with weak references.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchledger import internals
from torchledger.journal.entries import BUFFER, GRADIENT, OPTIMIZER_STATE, PARAMETER, ParameterRow
from torchledger.record.names import OUTSIDE, Names, class_name_of
from torchledger.record.scripts import constants_of
from torchledger.record.storages import Books

_storage_of = torch.Tensor.untyped_storage
_PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.device, torch.dtype, torch.Size)


class ParameterBooks:
    """The modules with registered tensors and the optimizers that one ledger knows."""

    def __init__(self, names: Names, books: Books) -> None:
        self._names = names
        self._books = books
        self._holders: dict[int, weakref.ref[nn.Module]] = {}  # by module number
        self._known: dict[int, tuple[int, weakref.ref[Any], Any]] = {}
        """id(parameter) -> its number, and the module or optimizer and the key where it was found."""
        self._optimizers: dict[int, weakref.ref[Optimizer]] = {}
        self._found: dict[int, weakref.ref[Optimizer]] = {}
        self._rows: dict[int, ParameterRow] = {}
        self._old_rows: dict[int, ParameterRow] = {}
        self._homeless: set[int] = set()
        """Parameters that no module holds, but an optimizer."""
        self._read_this_step: set[int] = set()
        """Optimizers whose state was entered after their step: it is not looked through again when the step ends."""
        self.has_fake_tensors = self.has_subclasses = False

    # Models

    def add_model(self, model: nn.Module) -> None:
        """Enter a model's registered tensors; lazy ones, as soon as they are more than a promise."""
        numbers = self._names.module_numbers
        for module in model.modules():
            if module._parameters or module._buffers:
                number = numbers.get(id(module), OUTSIDE)
                self._holders[number] = weakref.ref(module)
                self._enter_module(number, module)
            elif isinstance(module, torch.jit.ScriptModule) and next(module.parameters(), None) is None:
                for constant in constants_of(module):
                    self._enter(constant, BUFFER, -1, numbers.get(id(module), OUTSIDE))

    def enter_all(self) -> None:
        """At a step's end: tensors that were swapped or registered since, gradients set by hand, optimizer state."""
        self._books.bury()
        self._old_rows, self._rows = self._rows, {}
        for number, reference in list(self._holders.items()):
            module = reference()
            if module is None:  # gone since, but the step was about it
                del self._holders[number]
                modules = self._names.parameter_modules
                self._rows.update((n, row) for n, row in self._old_rows.items() if modules[n] == number)
            else:
                self._enter_module(number, module)
        for key, optimizer_reference in list(self._optimizers.items()):
            if key not in self._read_this_step and (optimizer := optimizer_reference()) is not None:
                self.enter_state(optimizer)
        self._read_this_step.clear()

    def _enter_module(self, module_number: int, module: nn.Module) -> None:
        for key, parameter in module._parameters.items():
            if parameter is None or is_lazy(parameter):
                continue
            number = self.number_of(parameter)
            if number < 0:
                number = self._names.parameter_number(key, module_number)
                self._known[id(parameter)] = (number, weakref.ref(module), key)
            new = self._enter(parameter, PARAMETER, number)
            row = self._old_rows.get(number)
            if row is None or new or row.trainable is not parameter.requires_grad:
                row = self._row(number, parameter, class_name_of(module), key)
            self._rows[number] = row
        for buffer in module._buffers.values():
            if buffer is not None and not is_lazy(buffer):
                self._enter(buffer, BUFFER, -1, module_number)

    def number_of(self, parameter: torch.Tensor) -> int:
        """The number of a parameter, -1 for one that is in no known place."""
        found = self._known.get(id(parameter))
        if found is None:
            return -1
        number, reference, key = found
        holder = reference()
        # The id may be that of another tensor by now.
        if isinstance(holder, nn.Module):
            held = holder._parameters
            there = held.get(key) if isinstance(held, dict) else dict(held.items()).get(key)  # a scripted module's
        elif holder is not None:
            groups = holder.param_groups
            there = groups[key[0]]["params"][key[1]] if key[0] < len(groups) else None
        else:
            there = None
        return number if there is parameter else -1

    def n_elements(self, number: int) -> int:
        """Elements of a parameter, -1 where it is not known."""
        row = self._rows.get(number) or self._old_rows.get(number)
        return -1 if row is None else row.n_elements

    def is_trainable(self, number: int) -> bool:
        """Whether a parameter needs a gradient, as the last step's end (or its finding) saw it."""
        row = self._rows.get(number) or self._old_rows.get(number)
        return row is not None and row.trainable

    def rows(self) -> list[ParameterRow]:
        """What there is of each parameter, as `enter_all` found them."""
        found = dict(self._rows)
        for number, reference, key in self._known.values():
            optimizer = reference() if number in self._homeless and number not in found else None
            if optimizer is not None:
                for parameter in optimizer.param_groups[key[0]]["params"][key[1] : key[1] + 1]:
                    found[number] = self._row(number, parameter, "", "")
        return list(found.values())

    def _row(self, number: int, parameter: torch.Tensor, holder: str, key: str) -> ParameterRow:
        n_elements, dtype = parameter.numel(), parameter.dtype
        books = self._books
        return ParameterRow(
            number,
            n_elements,
            parameter.dim(),
            n_elements * dtype.itemsize,
            books.dtype_name(dtype),
            books.device_name(parameter.device),
            parameter.requires_grad,
            holder,
            key,
        )

    def _enter(self, tensor: torch.Tensor, role: int, number: int, module: int = OUTSIDE) -> bool:
        """Enter a registered tensor, if its storage is not known as such, and its gradient; says whether it was new."""
        books = self._books
        module = self._names.parameter_modules[number] if number >= 0 else module
        try:
            ref = books.live.get(id(_storage_of(tensor)))
        except (RuntimeError, NotImplementedError):  # sparse, wrapped, or inside a function transform
            ref = None
            if internals.is_functorch_wrapped(tensor):
                return False
        new = ref is None or not books.roles.get(ref.number, 0) & role
        if new:
            self.has_fake_tensors = self.has_fake_tensors or type(tensor).__name__ == "FakeTensor"
            self.has_subclasses = self.has_subclasses or internals.has_torch_function(tensor)
            if number >= 0:
                books.enter_parameter(tensor, number, module)
            else:
                books.enter(tensor, role, module)
        if number >= 0 and (gradient := tensor.grad) is not None:
            self._enter_gradient(gradient, module)
        return new

    def _enter_gradient(self, gradient: torch.Tensor, module: int) -> None:
        books = self._books
        try:
            ref = books.live.get(id(_storage_of(gradient)))
        except (RuntimeError, NotImplementedError):
            ref = None
        if ref is None or not books.roles.get(ref.number, 0) & GRADIENT:
            books.enter(gradient, GRADIENT, module)

    # Optimizers

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Know an optimizer: given to the ledger, or found as it steps."""
        if id(optimizer) not in self._optimizers:
            key = id(optimizer)
            known = self._optimizers
            known[key] = weakref.ref(optimizer, lambda _: known.pop(key, None))
        self.enter_parameters_of(optimizer)
        self.enter_state(optimizer)

    def before_step(self, optimizer: Optimizer) -> None:
        """Its parameters may have been swapped, its gradients set by hand, its state loaded."""
        self._books.bury()
        if id(optimizer) not in self._optimizers:
            self.add_optimizer(optimizer)
        else:
            self.enter_parameters_of(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """Its state may be new."""
        self._books.bury()
        self.enter_state(optimizer)
        self._read_this_step.add(id(optimizer))

    def enter_parameters_of(self, optimizer: Optimizer) -> None:
        """Enter the parameters of an optimizer, those of no known model too, and their gradients."""
        for g, group in enumerate(optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                if is_lazy(parameter):
                    continue
                number = self.number_of(parameter)
                if number < 0:
                    name = f"{type(optimizer).__name__}.param_groups.{g}.{i}"
                    number = self._names.parameter_number(name, OUTSIDE)
                    self._known[id(parameter)] = (number, weakref.ref(optimizer), (g, i))
                    self._homeless.add(number)
                self._enter(parameter, PARAMETER, number)

    @internals.unseen
    def versions(self) -> dict[int, tuple[int, bool]]:
        """How often each parameter was written into, and whether it has a gradient, by number."""
        found = {}
        for reference in self._holders.values():
            module = reference()
            for parameter in () if module is None else module._parameters.values():
                if parameter is not None and parameter.requires_grad and not is_lazy(parameter):
                    found[id(parameter)] = (parameter._version, parameter.grad is not None)
        return found

    @internals.unseen
    def search_optimizers(self) -> dict[int, weakref.ref[Optimizer]]:
        """All optimizers that the program has made, also those that have not stepped yet, by id.

        They are asked whom they train, and not entered. A search looks at all objects of the process: it is for the
        first steps.
        """
        self._found = {id(optimizer): weakref.ref(optimizer) for optimizer in live_optimizers()}
        return self._found

    def trains(self, module: nn.Module) -> bool:
        """Whether an optimizer that is known, or was found by a search, trains a parameter of the module."""
        trained = {
            id(parameter)
            for reference in (*self._optimizers.values(), *self._found.values())
            if (optimizer := reference()) is not None
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        return any(id(parameter) in trained for parameter in module.parameters())

    def enter_state(self, optimizer: Optimizer) -> None:
        """Enter every storage that is reachable from ``optimizer.state``."""
        books = self._books
        live, roles = books.live, books.roles
        for key, state in optimizer.state.items():
            number = self.number_of(key) if isinstance(key, torch.Tensor) else -1
            module = self._names.parameter_modules[number] if number >= 0 else OUTSIDE
            for value in state.values() if type(state) is dict else (state,):
                if type(value) is torch.Tensor and value.layout is torch.strided:
                    ref = live.get(id(_storage_of(value)))
                    if ref is None or not roles.get(ref.number, 0) & OPTIMIZER_STATE:
                        books.enter(value, OPTIMIZER_STATE, module)
                elif not isinstance(value, _PLAIN):
                    for tensor in tensors_in(value):
                        books.enter(tensor, OPTIMIZER_STATE, module)

    def forget_all(self) -> None:
        """Watch no module and no optimizer any more."""
        self._holders.clear()
        self._known.clear()
        self._optimizers.clear()
        self._found.clear()


def live_optimizers() -> list[Optimizer]:
    """All optimizers that are alive and have parameters; wrappers that only look like one are left out."""
    found = []
    for candidate in gc.get_objects():
        if issubclass(type(candidate), Optimizer):
            own = candidate.__dict__
            if "state" in own and any(group.get("params") for group in own.get("param_groups", ())):
                found.append(candidate)
    return found


def tensors_in(value: Any, _seen: set[int] | None = None, _depth: int = 0) -> Iterator[torch.Tensor]:
    """All tensors reachable from a value through mappings, sequences, sets and plain objects."""
    seen = set() if _seen is None else _seen
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, _PLAIN) or id(value) in seen or _depth > 20:
        return
    seen.add(id(value))
    inner: list[Any]
    if isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        inner = list(value)
    else:
        inner = list(getattr(value, "__dict__", {}).values())
        inner += [getattr(value, slot) for slot in _slots(type(value)) if hasattr(value, slot)]
    for item in inner:
        yield from tensors_in(item, seen, _depth + 1)


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots
