"""What the pytest plugin wants to know of a test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchledger.gate.baselines import baseline_path
from torchledger.gate.marks import NAME, MarkedTest
from torchledger.gate.properties import PREFIX, Property


def describe_item(item: pytest.Item) -> MarkedTest:
    """A test with its markers, the nearest first."""
    of_parameters = _parameter_marks(item)
    own = [mark for mark in item.own_markers if mark.name == NAME and mark not in of_parameters]
    marks = tuple((mark.args, mark.kwargs, mark in own) for mark in nearest_marks(item))
    parent = item.parent.nodeid if item.parent is not None else ""
    return MarkedTest(item.nodeid, f"{parent}::{getattr(item, 'originalname', item.name)}", param_id(item), marks)


def nearest_marks(item: pytest.Item) -> list[pytest.Mark]:
    """The markers of a test, the nearest first: those of its parameters are nearer than the function's."""
    of_parameters = _parameter_marks(item)
    return [*of_parameters, *(mark for mark in item.iter_markers(NAME) if mark not in of_parameters)]


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
