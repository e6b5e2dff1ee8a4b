"""Numbers for modules and parameters while recording, and their names afterwards.

While a step runs a module is a number; names are made when a step ends, since only then it is known which modules are
roots. Modules and parameters are held weakly: a ledger keeps no model alive.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from torchledger.journal.statements import OUTSIDE_MODULE

OUTSIDE = 0
"""The number of "no module"."""


@dataclass(slots=True)
class _Root:
    class_name: str
    major: bool
    """Given to the ledger, or a model with parameters; a criterion without any is minor."""


@dataclass(slots=True)
class Names:
    """Who is who: every module and parameter that a ledger has met, by number."""

    module_numbers: dict[int, int] = field(default_factory=dict)
    """id(module) -> number, while the module lives."""
    parameter_names: list[tuple[int, str]] = field(default_factory=list)
    """(root or -1, name within it) by number."""
    parameter_modules: list[int] = field(default_factory=list)
    """The number of the module that holds each parameter."""
    _roots: list[_Root] = field(default_factory=list)
    _modules: list[tuple[int, str]] = field(default_factory=lambda: [(-1, OUTSIDE_MODULE)])
    _passing: dict[tuple[int, str], int] = field(default_factory=dict)
    _watch: dict[int, weakref.ref[nn.Module]] = field(default_factory=dict)

    def add_root(self, model: nn.Module, *, given: bool) -> None:
        """Name a model and all modules in it; those already known (from a part called before) are renamed."""
        major = given or next(model.parameters(), None) is not None
        root = len(self._roots)
        self._roots.append(_Root(type(model).__name__, major))
        for path, module in model.named_modules():
            name = (root, _clean(path))
            known = self.module_numbers.get(id(module))
            if known is None:
                self._register(module, name)
            elif self._modules[known][0] != root and self._modules[known][1] == "":
                self._retire(known, root, name[1])

    def _retire(self, number: int, root: int, path: str) -> None:
        """A root that turned out to be a part of another model: its names move below the new root."""
        old = self._modules[number][0]
        for i, (owner, inner) in enumerate(self._modules):
            if owner == old:
                self._modules[i] = (root, _join(path, inner))
        for i, (owner, inner) in enumerate(self.parameter_names):
            if owner == old:
                self.parameter_names[i] = (root, _join(path, inner))
        self._roots[old].major = False

    def add_passing(self, module: nn.Module, parent: int) -> int:
        """The number of a module that is registered nowhere: made during a forward, and named after its class."""
        key = (parent, type(module).__name__)
        number = self._passing.get(key)
        if number is None:
            owner, path = self._modules[parent] if parent else (-1, "")
            number = self._passing[key] = len(self._modules)
            self._modules.append((owner, _join(path, key[1])))
        self._remember(module, number)
        return number

    def add_parameter(self, name: str, module: int) -> int:
        """The number of a new parameter, named within the root of its module (or alone, with module `OUTSIDE`)."""
        owner = self._modules[module][0] if module else -1
        self.parameter_names.append((owner, name))
        self.parameter_modules.append(module)
        return len(self.parameter_names) - 1

    def module_paths(self) -> list[str]:
        """The path of each module by number: the root model is ``""``; of several, each begins with its class name."""
        prefixes = self._prefixes()
        return [path if owner < 0 else _join(prefixes[owner], path) for owner, path in self._modules]

    def parameter_paths(self) -> list[str]:
        """The name of each parameter by number."""
        prefixes = self._prefixes()
        return [name if owner < 0 else _join(prefixes[owner], name) for owner, name in self.parameter_names]

    def _prefixes(self) -> list[str]:
        majors = [root for root in self._roots if root.major]
        plain = majors[0] if len(majors) == 1 else None
        if not majors and len(self._roots) == 1:
            plain = self._roots[0]
        counts: Counter[str] = Counter()
        prefixes = []
        for root in self._roots:
            counts[root.class_name] += 1
            n = counts[root.class_name]
            prefixes.append("" if root is plain else root.class_name if n == 1 else f"{root.class_name}{n}")
        return prefixes

    def _register(self, module: nn.Module, name: tuple[int, str]) -> int:
        number = len(self._modules)
        self._modules.append(name)
        self._remember(module, number)
        return number

    def _remember(self, module: nn.Module, number: int) -> None:
        key = id(module)
        numbers, watch = self.module_numbers, self._watch

        def forget(_: object) -> None:  # an id may be used again
            numbers.pop(key, None)
            watch.pop(key, None)

        numbers[key] = number
        watch[key] = weakref.ref(module, forget)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, torch.Tensor, bool]]:
    """(name, module that holds it, tensor, whether it is a parameter) for each registered tensor, first path first."""
    for path, module in model.named_modules():
        clean = _clean(path)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield _join(clean, name), module, parameter, True
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield _join(clean, name), module, buffer, False


def _join(prefix: str, path: str) -> str:
    return f"{prefix}.{path}" if prefix and path else prefix or path


def _clean(path: str) -> str:
    """A path without the wrapper that `torch.compile` puts around a module."""
    return ".".join(part for part in path.split(".") if part != "_orig_mod")
