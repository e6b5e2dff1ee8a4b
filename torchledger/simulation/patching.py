"""Names of torch's that are replaced for a while, and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_INHERITED = object()


class Patches:
    """What was replaced, in order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Put something of ours in a place of torch's. What is inherited is put back by deleting ours."""
        old = owner.__dict__.get(name, _INHERITED)
        setattr(owner, name, new)

        def restore() -> None:
            if owner.__dict__.get(name) is not new:
                return  # somebody has replaced it since
            if old is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, old)

        self._undo.append(restore)

    def replace_existing(self, owner: Any, names: dict[str, Any]) -> None:
        """Put several in place, those that this torch has."""
        for name, new in names.items():
            if hasattr(owner, name):
                self.replace(owner, name, new)

    def on_restore(self, action: Callable[[], object]) -> None:
        """Do that too, when all is put back."""
        self._undo.append(action)

    def restore(self) -> None:
        """Put everything back, the last first; what fails is raised after the rest."""
        failed: BaseException | None = None
        while self._undo:
            try:
                self._undo.pop()()
            except BaseException as error:
                failed = failed or error
        if failed is not None:
            raise failed
