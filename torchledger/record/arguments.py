"""What users hand to a ledger, checked."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from torchledger.errors import UsageError

Alive = TypeVar("Alive")


def check_tokens(where: str, tokens: Any) -> None:
    """Refuse what is no number of tokens.

    Raises:
        UsageError: not a whole number, or below 0.
    """
    if tokens is None or (isinstance(tokens, int) and not isinstance(tokens, bool) and tokens >= 0):
        return
    raise UsageError(f"{where}={tokens!r}): give a whole number of tokens, 0 or more.")


def alive(references: list[weakref.ref[Alive]]) -> Iterator[Alive]:
    """What is still alive of what was referred to."""
    for reference in references:
        if (found := reference()) is not None:
            yield found


def as_list(value: Any, kind: type, name: str, wanted: str) -> list[Any]:
    """One thing or several, as a list.

    Raises:
        UsageError: one of them is not of the right kind.
    """
    if value is None:
        return []
    items: Sequence[Any]
    if isinstance(value, kind) or hasattr(value, "param_groups"):
        items = [value]
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes | torch.Tensor):
        items = list(value)
    else:
        items = [value]
    for item in items:
        if not isinstance(item, kind) and not (name == "optimizer" and hasattr(item, "param_groups")):
            given = f"the class {item.__name__}" if isinstance(item, type) else f"a {type(item).__name__}"
            hint = " Pass the optimizer itself, not its parameters." if isinstance(item, torch.nn.Parameter) else ""
            raise UsageError(f"Ledger({name}=...): {given} is not {wanted}.{hint}")
    return list(items)
