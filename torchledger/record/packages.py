"""AOTInductor: packages, and compiled code in C++ alone, which call torch without any dispatch."""

from __future__ import annotations

import re
import weakref
from pathlib import Path
from typing import Any

from torchledger import internals
from torchledger.record.scripts import Replace, Watched, is_product

_CALL = re.compile(r"\baoti_torch_[a-z]+_(\w+)\(")
_paths: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""The files of packages that were loaded while a ledger recorded."""
_in_shims: dict[str, tuple[str, ...]] = {}


def watch_packages(replace: Replace, watched: Watched) -> None:
    """Tell watchers when a package is about to run on their thread, by its name, and what comes out of it."""
    for kind in internals.packages():
        replace(kind, "__init__", _watched_init(kind.__init__))
        for name in ("run", "boxed_run"):
            if name in kind.__dict__:
                replace(kind, name, _watched_run(getattr(kind, name), watched))


def _watched_init(original: Any) -> Any:
    def init(self: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        original(self, path, *args, **kwargs)
        if isinstance(path, str):
            _paths[self] = path

    return init


def _watched_run(original: Any, watched: Watched) -> Any:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        watchers = watched()
        if not watchers:
            return original(self, *args, **kwargs)
        name = _name_of(self)
        for watcher in watchers:
            watcher.package_runs(name)
        results = original(self, *args, **kwargs)
        for watcher in watchers:
            watcher.package_ran(name, results)
        return results

    return run


def _name_of(package: Any) -> str:
    """``aoti.`` and the name of its file; of one that was loaded before any ledger recorded, ``aoti.package``."""
    stem = Path(_paths.get(package, "package")).name.partition(".")[0]
    return f"aoti.{re.sub(r'[^A-Za-z0-9_-]', '_', stem)[:60] or 'package'}"


def products_in_shims(graph: Any) -> tuple[str, ...]:
    """Names of the products that generated C++ calls past the dispatcher: ``inductor.addmm_out``."""
    source = getattr(graph, "source_code", None)
    if not isinstance(source, str) or "aoti_torch_" not in source:
        return ()
    found = _in_shims.get(source)
    if found is None:
        if len(_in_shims) > 200:
            _in_shims.clear()
        calls = _CALL.findall(source)
        found = _in_shims[source] = tuple(f"inductor.{op}" for op in calls if is_product(op.removesuffix("_out")))
    return found
