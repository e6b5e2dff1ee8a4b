"""Numbers for modules and parameters while recording, and their names afterwards.

While a step runs a module is a number; names are made when a step ends, since only then it is known which modules are
roots. Modules are held weakly: a ledger keeps no model alive. The numbers of a model that is gone are given to the next
one of its class, so that a loop which makes a module in each step needs constant memory.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

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
    model: weakref.ref[nn.Module] | None
    """None: all modules of that class, however many."""


@dataclass(slots=True)
class Names:
    """Who is who: every module and parameter that a ledger has met, by number."""

    lock: Any = field(default_factory=threading.RLock)
    """Other threads meet models too."""
    module_numbers: dict[int, int] = field(default_factory=dict)
    """id(module) -> number, while the module lives."""
    parameter_modules: list[int] = field(default_factory=list)
    """The number of the module that holds each parameter."""
    scripted: set[int] = field(default_factory=set)
    """The numbers of scripted and traced modules, whose parts call one another unseen."""
    n_roots: int = 0
    _parameter_keys: list[str] = field(default_factory=list)
    _parameter_numbers: dict[tuple[int, str], int] = field(default_factory=dict)
    _roots: list[_Root] = field(default_factory=list)
    _modules: list[tuple[int, str]] = field(default_factory=lambda: [(-1, OUTSIDE_MODULE)])
    """(root, path in it) by number."""
    _numbers: dict[tuple[int, str], int] = field(default_factory=dict)
    _watch: dict[int, weakref.ref[nn.Module]] = field(default_factory=dict)

    def add_root(self, model: nn.Module, *, given: bool) -> None:
        """Name a model and all modules in it; those already known (from a part called before) are renamed."""
        with self.lock:
            self._add_root(model, given)

    def _add_root(self, model: nn.Module, given: bool) -> None:
        class_name = class_name_of(model)
        if not given and next(model.parameters(), None) is None:
            root = self._root(class_name, major=False, model=None)
        else:
            root = self._root(class_name, major=True, model=weakref.ref(model))
        self.n_roots += 1
        for path, module in model.named_modules():
            clean = clean_path(path)
            known = self.module_numbers.get(id(module))
            if known is None:
                self._remember(module, self._number(root, clean))
            elif self._modules[known][0] != root and self._modules[known][1] == "":
                self._retire(known, root, clean)
            if isinstance(module, torch.jit.ScriptModule):
                self.scripted.add(self.module_numbers[id(module)])

    def _root(self, class_name: str, *, major: bool, model: weakref.ref[nn.Module] | None) -> int:
        """A root of that class whose model is gone (or any, of a minor class), or a new one."""
        for index, root in enumerate(self._roots):
            if root.class_name == class_name and root.major is major and (root.model is None or root.model() is None):
                root.model = model
                return index
        self._roots.append(_Root(class_name, major, model))
        return len(self._roots) - 1

    def _retire(self, number: int, root: int, path: str) -> None:
        """A root that turned out to be a part of another model: its names move below the new root."""
        old = self._modules[number][0]
        for i, (owner, inner) in enumerate(self._modules):
            if owner == old:
                self._modules[i] = (root, join_path(path, inner))
                self._numbers[self._modules[i]] = i
        self._roots[old].major = False

    def add_passing(self, module: nn.Module, parent: int) -> int:
        """The number of a module that is registered nowhere: made during a forward, and named after its class."""
        with self.lock:
            owner, path = self._modules[parent]
            name = join_path(path if parent else "", class_name_of(module))
            number = self._number(owner, name)
            self._remember(module, number)
            return number

    def parameter_number(self, key: str, module: int) -> int:
        """The number of the parameter of that name in a module (or alone, with module `OUTSIDE`)."""
        with self.lock:
            number = self._parameter_numbers.get((module, key))
            if number is None:
                number = self._parameter_numbers[module, key] = len(self._parameter_keys)
                self._parameter_keys.append(key)
                self.parameter_modules.append(module)
            return number

    def owner_in_script(self, parameter: int, module: int) -> int:
        """Whose product of a parameter is that ``module`` ran: the holder's, if it is a scripted one too."""
        owner = self.parameter_modules[parameter]
        return owner if owner in self.scripted else module

    def module_paths(self) -> list[str]:
        """The path of each module by number: the root model is ``""``; of several, each begins with its class name."""
        with self.lock:
            prefixes = self._prefixes()
            return [path if owner < 0 else join_path(prefixes[owner], path) for owner, path in self._modules]

    def parameter_paths(self) -> list[str]:
        """The name of each parameter by number."""
        with self.lock:
            paths = self.module_paths()
            return [
                join_path(paths[module], key) if module else key
                for key, module in zip(self._parameter_keys, self.parameter_modules, strict=True)
            ]

    def roots(self) -> tuple[int, list[nn.Module]]:
        """How many models have been named, and those that are alive."""
        with self.lock:
            found = [root.model() for root in self._roots if root.model is not None]
            return self.n_roots, [model for model in found if model is not None]

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

    def _number(self, root: int, path: str) -> int:
        number = self._numbers.get((root, path))
        if number is None:
            number = self._numbers[root, path] = len(self._modules)
            self._modules.append((root, path))
        return number

    def _remember(self, module: nn.Module, number: int) -> None:
        key = id(module)
        numbers, watch = self.module_numbers, self._watch

        def forget(_: object) -> None:  # an id may be used again
            numbers.pop(key, None)
            watch.pop(key, None)

        numbers[key] = number
        watch[key] = weakref.ref(module, forget)

    def forget_all(self) -> None:
        """Watch no module any more."""
        self.module_numbers.clear()
        self._watch.clear()


def join_path(prefix: str, path: str) -> str:
    """Two parts of a path, either of which may be empty.

    >>> join_path("blocks", "0"), join_path("", "head")
    ('blocks.0', 'head')
    """
    return f"{prefix}.{path}" if prefix and path else prefix or path


def class_name_of(module: nn.Module) -> str:
    """The class of a module; of a scripted or traced one, that which it was made from.

    >>> class_name_of(nn.Linear(2, 2))
    'Linear'
    """
    original = getattr(module, "original_name", "") if isinstance(module, torch.jit.ScriptModule) else ""
    return original or type(module).__name__


def clean_path(path: str) -> str:
    """A path without the wrapper that `torch.compile` puts around a module.

    >>> clean_path("_orig_mod.blocks.0")
    'blocks.0'
    """
    return ".".join(part for part in path.split(".") if part != "_orig_mod")
