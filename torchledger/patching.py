"""Changes to torch and Python that are made for a while, and taken back.

An interrupt may come between any two lines. So what takes a change back is noted before the change is made, does
nothing where none was made, may run twice, and is forgotten only once it has run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

_INHERITED = object()
_TRIES = 3


class _Replaced(NamedTuple):
    owner: Any
    name: str
    old: Any
    new: Any

    def put_back(self) -> None:
        """Put the old value back, unless somebody has replaced ours since."""
        if self.owner.__dict__.get(self.name) is self.new:
            if self.old is _INHERITED:
                delattr(self.owner, self.name)
            else:
                setattr(self.owner, self.name, self.old)


class Patches:
    """What was changed, in order."""

    def __init__(self) -> None:
        self._replaced: list[_Replaced] = []
        self._actions: list[Callable[[], object]] = []

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Put something of ours in a place of torch's. What is inherited is put back by deleting ours."""
        self._replaced.append(_Replaced(owner, name, owner.__dict__.get(name, _INHERITED), new))
        setattr(owner, name, new)

    def replace_existing(self, owner: Any, names: dict[str, Any]) -> None:
        """Put several in place, those that this torch has."""
        for name, new in names.items():
            if hasattr(owner, name):
                self.replace(owner, name, new)

    def replace_imported(self) -> None:
        """Replace functions also where other modules hold them by a name of their own (`from torch import zeros`)."""
        ours = {
            id(item.old): item
            for item in self._replaced
            if isinstance(item.owner, ModuleType) and callable(item.old) and item.old is not _INHERITED
        }
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] in ("torch", "torchledger", "builtins") or type(module) is not ModuleType:
                continue
            for key, value in list(vars(module).items()):
                item = ours.get(id(value))
                if item is not None and value is item.old:
                    self.replace(module, key, item.new)

    def on_restore(self, action: Callable[[], object]) -> None:
        """Do that when all replacements are put back.

        Args:
            action: Takes a change back that the caller makes after this call; it may be called twice, or without the
                change.
        """
        self._actions.append(action)

    def restore(self) -> None:
        """Take everything back, the last change first; what fails, or interrupts, is raised after the rest.

        May be called again where an interrupt ended it early.
        """
        raised: BaseException | None = None
        tries = 0
        while self._replaced or self._actions:
            try:
                while self._replaced:
                    self._replaced[-1].put_back()
                    self._replaced.pop()
                while self._actions:
                    self._actions[-1]()
                    self._actions.pop()
                    tries = 0
            except BaseException as error:
                raised = raised or error
                tries += 1
                if tries == _TRIES:
                    (self._replaced or self._actions).pop()
                    tries = 0
        if raised is not None:
            raise raised
