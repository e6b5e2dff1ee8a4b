"""The floors: a module imports from floors below its own, or from its own folder, and never in a circle."""

from __future__ import annotations

import ast
import graphlib
import importlib
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

import torchledger

PACKAGE = Path(torchledger.__file__).parent

# Lowest first. Where a floor has two rows, the second stands on the first.
FLOORS = (
    ("0 words", {"_version", "units", "errors", "accelerators"}),
    ("1 data", {"journal"}),
    ("2 arithmetic", {"analytic", "allocator"}),
    ("3 reading and policy", {"read", "gate"}),
    ("4 rendering", {"render"}),
    ("5 what a user holds", {"report", "reconciliation"}),
    ("6 torch", {"internals", "leaving", "patching"}),
    ("6 torch: formulas", {"flops"}),
    ("7 recording", {"record", "simulation"}),
    ("8 the object that users meet", {"ledger"}),
    ("8 a loop that uses it", {"demo"}),
    ("9 front doors", {"cli", "pytest_plugin", "pytest_fixtures", "pytest_items", "pytest_run"}),
    ("9 front doors: the package", {"", "__main__"}),
)
RANKS = {room: rank for rank, (_, rooms) in enumerate(FLOORS) for room in rooms}
WITHOUT_TORCH = {room for title, rooms in FLOORS if int(title.split()[0]) <= 5 for room in rooms}


class Import(NamedTuple):
    """Module ``source`` imports ``target``, in that line; ``names`` it takes from the package's own ``__init__``."""

    source: str
    target: str
    line: int


def module_name(path: Path) -> str:
    parts = ("torchledger", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def room(module: str) -> str:
    """The first part of a module's name inside the package: a folder, a file, or "" for the package itself."""
    return module.removeprefix("torchledger").removeprefix(".").split(".")[0]


def folder(module: str) -> str:
    """The folder on whose terms a module imports: its room, or the package's own folder for a plain file."""
    return "" if (PACKAGE / f"{room(module)}.py").exists() else room(module)


def imports_of(module: str, source: str, is_package: bool) -> Iterator[Import]:
    """All imports of a module, also those inside functions and for type checkers."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, base] if base else parts)
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                yield Import(module, submodule if submodule in MODULES else base, node.lineno)


def all_imports() -> list[Import]:
    return [
        found
        for module, path in MODULES.items()
        for found in imports_of(module, path.read_text("utf-8"), path.name == "__init__.py")
    ]


def fault(found: Import) -> str | None:
    """What is wrong with an import, or None."""
    where = f"{found.source}, line {found.line}, imports {found.target}"
    here = room(found.source)
    if found.target.split(".")[0] == "torch" and here in WITHOUT_TORCH:
        return f"{where}: floors 0 to 5 do without torch"
    if found.target.split(".")[0] != "torchledger":
        return None
    if found.target == "torchledger":
        return f"{where}: import the module that has the name, never the package's own __init__"
    there = room(found.target)
    if RANKS[there] > RANKS[here]:
        return f"{where}: {FLOORS[RANKS[there]][0]!r} is above {FLOORS[RANKS[here]][0]!r}"
    if RANKS[there] == RANKS[here] and folder(found.source) != folder(found.target):
        return f"{where}: another folder on the same floor"
    return None


def test_every_module_is_on_a_floor() -> None:
    assert [module for module in MODULES if room(module) not in RANKS] == []


def test_imports_go_down() -> None:
    assert list(filter(None, map(fault, all_imports()))) == []


def test_no_circles() -> None:
    graph: dict[str, set[str]] = {}
    for found in all_imports():
        if found.target in MODULES and found.source not in ("torchledger", found.target):
            graph.setdefault(found.source, set()).add(found.target)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize(
    ("module", "line", "says"),
    [
        ("torchledger.units", "import torch", "without torch"),
        ("torchledger.render.text", "def f():\n    from torch import nn", "without torch"),
        ("torchledger.units", "if TYPE_CHECKING:\n    from torchledger.read import bridge", "above"),
        ("torchledger.read.peaks", "from torchledger.gate.budgets import Budget", "same floor"),
        ("torchledger.read.peaks", "from torchledger import Ledger", "own __init__"),
        ("torchledger.read.peaks", "import torchledger", "own __init__"),
        ("torchledger.read.peaks", "from .. import errors, Ledger", "own __init__"),
        ("torchledger.read.peaks", "from ..ledger import Ledger", "above"),
        ("torchledger.internals", "from torchledger.record.mode import Mode", "above"),
        ("torchledger.read.peaks", "from torchledger import errors", None),
        ("torchledger.read.peaks", "from torchledger.read import categories", None),
        ("torchledger.accelerators", "from torchledger.errors import UsageError", None),
        ("torchledger.record.mode", "import torch, torchledger.internals", None),
    ],
)
def test_the_check_itself(module: str, line: str, says: str | None) -> None:
    faults = list(filter(None, map(fault, imports_of(module, line, is_package=False))))
    assert (len(faults) == 1 and says in faults[0]) if says else not faults


def test_no_public_name_is_a_module_beside_it() -> None:
    beside = {path.stem for path in PACKAGE.iterdir()}
    assert set(torchledger.__all__) & beside == set()


def reconcilable_step() -> torchledger.StepReport:
    weight = torch.nn.Linear(2, 2, bias=False)
    with torchledger.Ledger(weight) as ledger:
        weight(torch.ones(1, 2))
    return ledger.report.steps[0]


# One harmless call for each public function; classes and values are only looked up.
CALLS: dict[str, Callable[[], object]] = {
    "Ledger": lambda: torchledger.Ledger(keep=1),
    "crosscheck": lambda: torchledger.crosscheck(len, ()),
    "find_accelerator": lambda: torchledger.find_accelerator("h100-sxm"),
    "formula": lambda: torchledger.formula("floors_test::op"),
    "hfu": lambda: torchledger.hfu(1e12, 1.0, accelerator="l4", dtype="bf16"),
    "mfu": lambda: torchledger.mfu(1e12, 1.0, accelerator="l4", dtype="bf16"),
    "recipe": lambda: torchledger.recipe("adamw-fp32"),
    "reconcile": lambda: torchledger.reconcile(reconcilable_step()),
    "simulate": lambda: torchledger.simulate("h100-sxm"),
    "schedule": lambda: torchledger.schedule(wait=1, warmup=1, active=1),
}


def test_public_names_survive_the_import_of_every_module() -> None:
    for found in pkgutil.walk_packages(torchledger.__path__, "torchledger."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
    for name in torchledger.__all__:
        value = getattr(torchledger, name)
        beside = isinstance(value, ModuleType) and value.__name__ == f"torchledger.{name}"
        assert not beside, f"{name} is the module of that name"
        if inspect.isfunction(value):
            assert name in CALLS, f"add a call of {name} to CALLS"
        CALLS.get(name, lambda: None)()


def run_python(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_lower_floors_do_not_load_torch() -> None:
    lower = [module for module in MODULES if room(module) in WITHOUT_TORCH]
    code = "import importlib, sys; [importlib.import_module(m) for m in sys.argv[1:]]; print('torch' in sys.modules)"
    assert run_python(code, *lower) == "False\n"


@pytest.mark.parametrize("command", ["show", "compare"])
def test_reading_files_does_not_load_torch(command: str, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom torchledger.cli.main import main\n"
        "try:\n    code = main(sys.argv[1:])\nexcept SystemExit as exit:\n    code = exit.code\n"
        "print(code, 'torch' in sys.modules)"
    )
    paths = [str(tmp_path / "none.json")] * (2 if command == "compare" else 1)
    assert run_python(code, command, *paths).splitlines()[-1] == "2 False"
