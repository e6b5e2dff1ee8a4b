"""The budget of a test, from its markers: the nearest wins, and their keys merge."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from torchledger.errors import TorchledgerError, UsageError
from torchledger.gate.budgets import Budget, parse_limits, parse_share
from torchledger.units import show_value

NAME = "ledger"
WHERE = "@pytest.mark.ledger"
_ERRORS = 10
"""How many complaints about markers are shown."""
_NAMED = 20
"""How many ids of parameters one of them names."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One marker, or the suite's defaults, read: limits by key, those of some by parameter id."""

    limits: dict[str, int | dict[str, int]]
    tolerance: Fraction | None = None


def read_mark(args: tuple[object, ...], limits: Mapping[str, object]) -> Mark:
    """What a marker says.

    Raises:
        UsageError: it has positional arguments, or a key that is unknown.
        QuantityError: a value cannot be read, with the forms that can.

    >>> read_mark((), {"peak": "1 KiB", "tolerance": "2%"})
    Mark(limits={'peak': 1024}, tolerance=Fraction(1, 50))
    """
    if args:
        given = f"{WHERE}({show_value(args[0])})"
        raise UsageError(f"{given}: name each limit, as in {WHERE}(peak='2 GiB', flops='3 TFLOP').")
    rest = dict(limits)
    tolerance = parse_share(rest.pop("tolerance"), WHERE) if "tolerance" in rest else None
    return Mark(parse_limits(rest, WHERE), tolerance)


def merge_marks(marks: Iterable[Mark], param_id: str | None) -> Budget | None:
    """The budget that markers make together, the nearest first; None if they have no limit.

    Args:
        marks: the nearest first, the suite's defaults last.
        param_id: of the test, where it is parametrised.

    Raises:
        UsageError: a dict by parameter id does not have the test's.

    >>> merge_marks([Mark({"peak": 1}), Mark({"peak": 2, "flops": {"a": 3}}, Fraction(1, 2))], "a").limits
    {'peak': 1, 'flops': 3}
    """
    limits: dict[str, int] = {}
    tolerance = None
    for mark in marks:
        for key, limit in mark.limits.items():
            if key not in limits:
                limits[key] = _of_parameter(key, limit, param_id) if isinstance(limit, dict) else limit
        tolerance = mark.tolerance if tolerance is None else tolerance
    if not limits:
        return None
    return Budget(**limits, tolerance=tolerance)


def find_unknown_ids(mark: Mark, param_ids: Collection[str]) -> Iterator[str]:
    """Complaints about ids in the dicts of a marker that no parameter has; ``param_ids`` must be all of the test's.

    >>> list(find_unknown_ids(Mark({"peak": {"a": 1, "c": 1}}), ["a", "b"]))
    ["@pytest.mark.ledger(peak={...}): no parameter has the id 'c': there are 'a', 'b'."]
    """
    known = frozenset(param_ids)
    for key, limit in mark.limits.items():
        for name in limit if isinstance(limit, dict) else ():
            if name not in known:
                said = f"no parameter has the id {show_value(name)}: there are {_first(param_ids)}"
                yield f"{WHERE}({key}={{...}}): {said}."


def _of_parameter(key: str, limits: Mapping[str, int], param_id: str | None) -> int:
    if param_id is None:
        raise UsageError(f"{WHERE}({key}={{...}}): the test is not parametrised: give one value, such as '2 GiB'.")
    if param_id not in limits:
        said = f"no value for the parameter id {show_value(param_id)}: there are {_first(limits)}"
        raise UsageError(f"{WHERE}({key}={{...}}): {said}.")
    return limits[param_id]


def _first(names: Collection[str]) -> str:
    shown = ", ".join(map(show_value, itertools.islice(names, _NAMED)))
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED:,} more"


class MarkReader:
    """Reads markers, each once: that of a module, or of thousands of parameters, is one object for all its tests."""

    def __init__(self) -> None:
        # With the marker's own dict, whose identity lasts only as long as it does.
        self._known: dict[int, tuple[object, Mark | TorchledgerError]] = {}

    def read(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Mark:
        """What a marker says.

        Raises:
            UsageError: it has positional arguments, a key that is unknown, or a value that fails by itself.
            QuantityError: a value cannot be read, with the forms that can.

        >>> limits = {"peak": "1 KiB"}
        >>> MarkReader().read((), limits)
        Mark(limits={'peak': 1024}, tolerance=None)
        """
        found = self._known.get(id(kwargs))
        if found is None:
            found = self._known[id(kwargs)] = kwargs, _read_or_error(args, kwargs)
        if isinstance(found[1], TorchledgerError):
            raise found[1]
        return found[1]


class MarkedTest(NamedTuple):
    """A test with its markers, the nearest first, each as ``(args, kwargs, whether it is the test's own)``.

    Tests of one ``family`` are one function with different parameters.
    """

    test_id: str
    family: str
    param_id: str | None
    marks: tuple[tuple[tuple[object, ...], Mapping[str, object], bool], ...]


def find_mark_errors(tests: Sequence[MarkedTest], *, whole: bool, selected: Collection[str] | None = None) -> list[str]:
    """What is wrong with the markers of a suite: a line each, which names the test.

    Args:
        tests: all tests that have a marker.
        whole: whether they are all tests of their families, so that an id that none of them has is a mistake.
        selected: the ids of the tests that are to run; all, if left out. What others say is not looked at.

    >>> find_mark_errors([MarkedTest("t.py::test_a", "t.py::test_a", None, (((), {"peek": 1}, True),))], whole=True)
    ["t.py::test_a: @pytest.mark.ledger(peek=1): there is no quantity 'peek': did you mean 'peak'? [usage]"]
    """
    ids: dict[str, dict[str, None]] = {}
    for test in tests:
        ids.setdefault(test.family, {})[test.param_id or ""] = None
    reader = MarkReader()
    unknown: dict[tuple[int, str], str | None] = {}
    errors: dict[str, None] = {}
    for test in tests if selected is None else [test for test in tests if test.test_id in selected]:
        marks: list[Mark] = []
        try:
            for args, kwargs, is_own in test.marks:
                mark = reader.read(args, kwargs)
                if is_own and whole and test.param_id is not None:
                    # Once for all tests of a family: they may be thousands, with as many ids.
                    place = id(kwargs), test.family
                    if place not in unknown:
                        unknown[place] = next(find_unknown_ids(mark, ids[test.family].keys()), None)
                    complaint = unknown[place]
                    if complaint is not None:
                        raise UsageError(complaint)
                marks.append(mark)
            merge_marks(marks, test.param_id)
        except TorchledgerError as error:
            errors[f"{test.test_id}: {error}"] = None
    lines = list(errors)
    return lines if len(lines) <= _ERRORS else [*lines[:_ERRORS], f"and {len(lines) - _ERRORS} more"]


def _read_or_error(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Mark | TorchledgerError:
    try:
        return read_mark(args, kwargs)
    except TorchledgerError as error:
        return error
    except Exception as error:  # from inside somebody's own class
        return UsageError(f"{WHERE}(...): a value cannot be read ({type(error).__name__}): give sizes as '2 GiB'.")
