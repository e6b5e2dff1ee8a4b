"""Runs a script or a module as Python itself would, inside a context of ours, and says how it ended."""

from __future__ import annotations

import builtins
import contextlib
import importlib.machinery
import importlib.util
import io
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from torchledger.cli.terminating import TERMINATED, Terminated, until_terminated
from torchledger.errors import UsageError
from torchledger.journal.files import shown_path

INTERRUPTED = 130
_PACKAGE = str(Path(__file__).resolve().parent.parent) + os.sep


@dataclass(frozen=True, slots=True)
class Target:
    """What to run: a script's path, or with ``is_module`` a module's name, and the words that it is given."""

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False


@dataclass(frozen=True, slots=True)
class _Program:
    """Code, and what ``__main__``, ``sys.argv`` and ``sys.path`` are while it runs."""

    code: CodeType
    argv0: str
    path0: str
    attributes: dict[str, Any] = field(default_factory=dict)


def run_target(
    target: Target, around: contextlib.AbstractContextManager[object], deliver: Callable[[int], int] | None = None
) -> int:
    """Runs a program to its end inside ``around`` and returns its exit code.

    What it prints passes through. An exception that it does not catch is printed as Python prints it, without our
    frames, and gives 1; an interrupt gives 130, and SIGTERM 143. ``__main__``, ``sys.argv`` and ``sys.path[0]`` are the
    program's from then on, so that what it left for the interpreter's exit still finds them.

    Args:
        target: what to run.
        around: is entered before the program and left after it.
        deliver: called with the exit code once the program has ended, and returns the one to end with. What the program
            failed with is printed after that, so that it is the last thing seen.

    Raises:
        UsageError: there is no such script or module.

    >>> run_target(Target("no/such/script.py"), contextlib.nullcontext())
    Traceback (most recent call last):
    torchledger.errors.UsageError: there is no script no/such/script.py: ...
    """
    check_target(target)
    failure: BaseException | None = None
    try:
        program = _find_module(target) if target.is_module else _compile_script(target)
        module = _become_main(program, target.arguments)
        with until_terminated(), around:
            exec(program.code, module.__dict__)
    except _NoSuchModuleError:
        raise
    except BaseException as error:
        failure = error
    code = _exit_code(failure)
    try:
        return code if deliver is None else deliver(code)
    finally:
        if failure is not None:
            _print_failure(failure)


class _NoSuchModuleError(UsageError):
    """The module that was to run is not there."""


def check_target(target: Target) -> None:
    """Makes sure that there is a script of that name; a module is only found when it runs.

    Raises:
        UsageError: there is none.

    >>> check_target(Target("no/such/script.py"))
    Traceback (most recent call last):
    torchledger.errors.UsageError: there is no script no/such/script.py: ...
    """
    name = target.name
    if target.is_module:
        return
    if not Path(name).exists():
        raise UsageError(f"there is no script {shown_path(name)}: give the path of a Python file, or -m and a module.")
    if Path(name).is_dir() and not (Path(name) / "__main__.py").exists():
        raise UsageError(f"{shown_path(name)} is a folder without a __main__.py: give the path of a Python file.")
    if not os.access(name, os.R_OK):
        raise UsageError(f"{shown_path(name)} cannot be read: give the path of a Python file that can.")


def _compile_script(target: Target) -> _Program:
    path = os.path.abspath(target.name)
    loader: importlib.machinery.SourceFileLoader | importlib.machinery.SourcelessFileLoader
    container = None if _is_source(path) else importlib.machinery.PathFinder.find_spec("__main__", [path])
    if container is not None and container.loader is not None:  # a folder or an archive with a __main__.py
        return _from_spec(container, "__main__", target.name, path)
    if path.endswith(".pyc"):
        loader = importlib.machinery.SourcelessFileLoader("__main__", path)
        code = loader.get_code("__main__")
    else:
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    assert code is not None
    attributes = {"__file__": path, "__cached__": None, "__loader__": loader, "__spec__": None, "__package__": None}
    return _Program(code, target.name, os.path.dirname(os.path.realpath(path)), attributes)


def _is_source(path: str) -> bool:
    return os.path.isfile(path) and path.endswith((".py", ".pyw"))


def _find_module(target: Target) -> _Program:
    _replace_path0(os.getcwd())
    sys.argv[0] = "-m"  # what Python has there while it looks
    name = target.name
    spec = _spec_of(name)
    while spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = _spec_of(name)
    if spec is None or spec.loader is None:
        raise _NoSuchModuleError(f"there is no module {target.name!r} to run: give a name that python -m would run.")
    return _from_spec(spec, name, spec.origin or name, os.getcwd())


def _spec_of(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        raise
    except (ImportError, ValueError):
        if name.startswith(".") or name == "__main__":  # what import itself refuses
            return None
        raise


def _from_spec(spec: importlib.machinery.ModuleSpec, name: str, argv0: str, path0: str) -> _Program:
    code = getattr(spec.loader, "get_code", lambda name: None)(name)
    if code is None:
        raise _NoSuchModuleError(f"{name!r} holds no Python code to run.")
    attributes = {
        "__file__": spec.origin,
        "__cached__": spec.cached,
        "__loader__": spec.loader,
        "__spec__": spec,
        "__package__": spec.parent,
    }
    return _Program(code, argv0, path0, attributes)


def _become_main(program: _Program, arguments: tuple[str, ...]) -> ModuleType:
    module = ModuleType("__main__")
    module.__dict__.update(program.attributes, __builtins__=builtins)
    sys.modules["__main__"] = module
    sys.argv[:] = [program.argv0, *arguments]
    _replace_path0(program.path0)
    return module


def _replace_path0(folder: str) -> None:
    """Puts the program's folder where Python put ours; under ``-P`` it put none."""
    if sys.flags.safe_path:
        return
    sys.path[0:1] = [folder]


def _exit_code(failure: BaseException | None) -> int:
    if isinstance(failure, SystemExit):
        return 0 if failure.code is None else int(failure.code) if isinstance(failure.code, int) else 1
    if isinstance(failure, Terminated):
        return TERMINATED
    return 0 if failure is None else INTERRUPTED if isinstance(failure, KeyboardInterrupt) else 1


def _print_failure(error: BaseException) -> None:
    """Prints what Python would: the text that a program ended itself with, or the traceback."""
    if isinstance(error, Terminated):
        return
    if isinstance(error, SystemExit):
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        return
    _strip_our_frames(error, set())
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception:
        traceback.print_exception(error)


def _strip_our_frames(error: BaseException | None, seen: set[int]) -> None:
    """Takes our own frames out of a traceback and those of its causes."""
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    frames = []
    entry = error.__traceback__
    while entry is not None:
        frames.append(entry)
        entry = entry.tb_next
    theirs = [frame for frame in frames if not _is_ours(frame)]
    # Without a frame of the program the ledger itself failed, unless only this file, which compiles it, is in there.
    if theirs or all(frame.tb_frame.f_code.co_filename == __file__ for frame in frames):
        stripped: TracebackType | None = None
        for frame in reversed(theirs):
            stripped = TracebackType(stripped, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
        error.__traceback__ = stripped
    _strip_our_frames(error.__cause__, seen)
    _strip_our_frames(error.__context__, seen)


def _is_ours(entry: TracebackType) -> bool:
    return os.path.abspath(entry.tb_frame.f_code.co_filename).startswith(_PACKAGE)
