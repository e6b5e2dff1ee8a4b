"""Small readers of JSON values from elsewhere: each takes a value and the path to it, and gives it back typed.

Whatever does not fit is a `ReportFileError` that says where, what is there, and what should be.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from torchledger.errors import ReportFileError

T = TypeVar("T")
Reader = Callable[[object, str], T]

LARGEST = 10**30
"""No count of FLOPs or bytes that anybody made is larger."""

_DEEPEST = 8


def refuse(path: str, problem: str) -> ReportFileError:
    """The error for what is at ``path``.

    >>> refuse("steps[0].tokens", "is -1").message
    'steps[0].tokens: is -1. The file is damaged, or torchledger did not write it: save the report again.'
    """
    where = f"{path}: " if path else ""
    return ReportFileError(
        f"{where}{problem}. The file is damaged, or torchledger did not write it: save the report again."
    )


def at_key(path: str, key: str) -> str:
    """The path of an entry: names with a dot, everything else quoted in brackets.

    >>> at_key("steps[0]", "flops"), at_key("memory", "cuda:0")
    ('steps[0].flops', 'memory["cuda:0"]')
    """
    if key.isidentifier() and key.isascii() and len(key) <= 60:
        return f"{path}.{key}" if path else key
    return f"{path}[{json.dumps(key if len(key) <= 60 else key[:57] + '...')}]"


def shown(value: object) -> str:
    """What stands in the document, short enough for a message.

    >>> shown({"a": 1}), shown(True), shown("x" * 100)[-6:]
    ('an object', 'true', 'xx..."')
    """
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, int) and abs(value) > LARGEST:
        return "a huge number"
    if not isinstance(value, str | int | float | None):
        return f"a {type(value).__name__}"
    text = json.dumps(value)
    return text if len(text) <= 43 else text[:40] + '..."'


def integer(low: int | None = 0) -> Reader[int]:
    """Reads a whole number of at least ``low``.

    >>> integer()(3, "n")
    3
    """

    def read(value: object, path: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise refuse(path, f"is {shown(value)}, but must be a whole number")
        if low is not None and value < low:
            raise refuse(path, f"is {shown(value)}, but must be at least {low}")
        if abs(value) > LARGEST:
            raise refuse(path, f"is {shown(value)}, which is no count")
        return value

    return read


def real(value: object, path: str) -> float:
    """Reads a finite number of at least 0.

    >>> real(1.5, "seconds")
    1.5
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refuse(path, f"is {shown(value)}, but must be a number")
    if not 0 <= value <= LARGEST:  # which NaN is not
        raise refuse(path, "must be a finite number of at least 0")
    return float(value)


def text(value: object, path: str) -> str:
    """Reads a string.

    >>> text("aten.mm", "op")
    'aten.mm'
    """
    if not isinstance(value, str):
        raise refuse(path, f"is {shown(value)}, but must be a string")
    return value


def flag(value: object, path: str) -> bool:
    """Reads true or false.

    >>> flag(True, "trainable")
    True
    """
    if not isinstance(value, bool):
        raise refuse(path, f"is {shown(value)}, but must be true or false")
    return value


def one_of(words: Collection[str]) -> Reader[str]:
    """Reads one of ``words``.

    >>> one_of({"layout", "dtype"})("dtype", "kind")
    'dtype'
    """

    def read(value: object, path: str) -> str:
        if not isinstance(value, str) or value not in words:
            listed = ", ".join(repr(word) for word in words)
            raise refuse(path, f"is {shown(value)}, but must be one of {listed}")
        return value

    return read


def optional(reader: Reader[T]) -> Reader[T | None]:
    """Reads what ``reader`` reads, or null.

    >>> optional(text)(None, "where") is None
    True
    """
    return lambda value, path: None if value is None else reader(value, path)


def array(reader: Reader[T]) -> Reader[tuple[T, ...]]:
    """Reads a list of what ``reader`` reads.

    >>> array(integer())([2, 3], "shape")
    (2, 3)
    """

    def read(value: object, path: str) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise refuse(path, f"is {shown(value)}, but must be a list")
        return tuple([reader(item, f"{path}[{i}]") for i, item in enumerate(value)])

    return read


def mapping(reader: Reader[T], keys: Collection[str] | None = None) -> Reader[dict[str, T]]:
    """Reads an object whose values ``reader`` reads; its keys are among ``keys``, if those are given.

    >>> mapping(integer())({"aten.mm": 2}, "by_op")
    {'aten.mm': 2}
    """

    def read(value: object, path: str) -> dict[str, T]:
        entries = as_object(value, path)
        if keys is not None:
            for key in entries:
                if key not in keys:
                    raise refuse(path, f"has the unknown key {shown(key)}")
        return {key: reader(entry, at_key(path, key)) for key, entry in entries.items()}

    return read


def record(make: Callable[..., T], readers: Mapping[str, Reader[Any]]) -> Reader[T]:
    """Reads an object with exactly the keys of ``readers`` and gives their values to ``make``.

    >>> record(dict, {"n": integer()})({"n": 1}, "")
    {'n': 1}
    """

    def read(value: object, path: str) -> T:
        entries = as_object(value, path)
        if entries.keys() != readers.keys():
            missing = [key for key in readers if key not in entries]
            unknown = [key for key in entries if key not in readers]
            if missing:
                raise refuse(path, f"lacks the key {shown(missing[0])}")
            raise refuse(path, f"has the unknown key {shown(unknown[0])}")
        return make(**{key: reader(entries[key], at_key(path, key)) for key, reader in readers.items()})

    return read


def checked(reader: Reader[T], check: Callable[[T], str | None]) -> Reader[T]:
    """Reads what ``reader`` reads and refuses it where ``check`` says what is wrong with it.

    >>> checked(integer(), lambda n: "is odd" if n % 2 else None)(4, "n")
    4
    """

    def read(value: object, path: str) -> T:
        found = reader(value, path)
        problem = check(found)
        if problem:
            raise refuse(path, problem)
        return found

    return read


def plain(value: object, path: str, depth: int = 0) -> Any:
    """Reads any JSON value whose numbers are finite and whose nesting is sane.

    >>> plain({"torch": "2.13.0", "threads": [1, 2.5, None]}, "environment")
    {'torch': '2.13.0', 'threads': [1, 2.5, None]}
    """
    if depth > _DEEPEST:
        raise refuse(path, f"is nested deeper than {_DEEPEST} levels")
    if isinstance(value, dict):
        return {key: plain(entry, at_key(path, key), depth + 1) for key, entry in as_object(value, path).items()}
    if isinstance(value, list):
        return [plain(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise refuse(path, "must be a finite number")
    if isinstance(value, int) and abs(value) > LARGEST:
        raise refuse(path, "is too large a number")
    if not isinstance(value, str | int | float | None):
        raise refuse(path, f"is {shown(value)}, which JSON does not have")
    return value


def as_object(value: object, path: str) -> dict[str, Any]:
    """The JSON object that ``value`` must be.

    >>> as_object({}, "steps[0]")
    {}
    """
    if not isinstance(value, dict):
        raise refuse(path, f"is {shown(value)}, but must be an object")
    for key in value:
        if not isinstance(key, str):
            raise refuse(path, f"has the key {shown(key)}, but keys must be strings")
    return value
