"""What the pytest plugin wants to know of a test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchledger.gate.baselines import baseline_path
from torchledger.gate.marks import NAME, MarkedTest
from torchledger.gate.properties import PREFIX, Property

_PLACE_SWITCHES = ("--doctest-modules", "--noconftest")
_PLACE_OPTIONS = (
    *("-c", "--config-file", "-o", "--override-ini", "--rootdir", "--confcutdir"),
    *("--import-mode", "--doctest-glob"),
)


def describe_item(item: pytest.Item) -> MarkedTest:
    """A test with its markers, the nearest first."""
    # By identity: values of any kind are in there, and not all can be compared.
    own = {id(mark) for mark in item.own_markers} - {id(mark) for mark in _parameter_marks(item)}
    marks = tuple((mark.args, mark.kwargs, id(mark) in own) for mark in nearest_marks(item))
    parent = item.parent.nodeid if item.parent is not None else ""
    return MarkedTest(item.nodeid, f"{parent}::{getattr(item, 'originalname', item.name)}", param_id(item), marks)


def nearest_marks(item: pytest.Item) -> list[pytest.Mark]:
    """The markers of a test, the nearest first: those of its parameters are nearer than the function's."""
    of_parameters = _parameter_marks(item)
    taken = {id(mark) for mark in of_parameters}
    return [*of_parameters, *(mark for mark in item.iter_markers(NAME) if id(mark) not in taken)]


def _parameter_marks(item: pytest.Item) -> list[pytest.Mark]:
    return [mark for mark in getattr(getattr(item, "callspec", None), "marks", ()) if mark.name == NAME]


def param_id(item: pytest.Item) -> str | None:
    """The id of a test's parameters, or None if it has none."""
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else str(callspec.id)


def test_name(item: pytest.Item) -> str:
    """A test's name inside its file: ``TestTrain::test_step[fp32]``."""
    # Not from the id of the node, which pytest-xdist adds a group to.
    chain = item.listchain()
    files = [depth for depth, node in enumerate(chain) if isinstance(node, pytest.File)]
    return "::".join(node.name for node in chain[files[-1] + 1 :]) if files else item.name


test_name.__test__ = False  # type: ignore[attr-defined]  # pytest would collect it where a test module imports it


def plain_id(item: pytest.Item) -> str:
    """A test's id, the same wherever it runs."""
    # pytest-xdist adds a group to the id of the node itself.
    return item.nodeid if item.parent is None else f"{item.parent.nodeid}::{item.name}"


def place_flags(config: pytest.Config) -> list[str]:
    """The flags of this run, as they were given, without which another one might not find its tests."""
    # A worker of pytest-xdist was started with the paths alone.
    given = getattr(config, "workerinput", {}).get("mainargv", ("pytest", *config.invocation_params.args))[1:]
    words: Iterator[str] = iter(map(str, given))
    kept: list[str] = []
    for word in words:
        name, equals, _ = word.partition("=")
        if word in _PLACE_SWITCHES or (word[:2] in ("-c", "-o") and len(word) > 2):
            kept.append(word)
        elif name in _PLACE_OPTIONS:
            kept += [word] if equals else [word, next(words, "")]
    return kept


def replace_properties(item: pytest.Item, properties: list[Property]) -> None:
    """Puts these properties in the place of those of an earlier attempt at the same test."""
    kept = [pair for pair in item.user_properties if not str(pair[0]).startswith(PREFIX)]
    item.user_properties[:] = [*kept, *properties]


def collected_tests(items: list[pytest.Item], root: Path) -> dict[str, dict[str, str]]:
    """The names of the tests of each module that has a baseline file, by the file and the test's id."""
    files: dict[Path, str | None] = {}
    found: dict[str, dict[str, str]] = {}
    for item in items:
        if item.path not in files:
            path = baseline_path(item.path)
            files[item.path] = Path(os.path.relpath(path, root)).as_posix() if path.exists() else None
        name = files[item.path]
        if name is not None:
            found.setdefault(name, {})[item.nodeid] = test_name(item)
    return found
