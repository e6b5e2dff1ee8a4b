"""What turns a document of an older schema into one of the next.

A migration changes what it must and leaves all else alone: what is damaged is refused afterwards, with its path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SETTLED_SHIFT_1 = 16
N_CATEGORIES_BEFORE_COMMUNICATION = 7
"""Schema 1 had categories 0 to 6 as they are, and two fewer before all others."""


def from_1_to_2(document: dict[str, Any]) -> dict[str, Any]:
    """Inference, communication and unsharded parameters were no accounts of their own; nothing was audited.

    >>> from_1_to_2({"steps": []})["remainder"] is None
    True
    """
    document = {"remainder": None, "growing": [], "blind_spots": [], **document}
    document["flops"] = _with_inference(document.get("flops"))
    document["steps"] = [_step(step) for step in _list(document.get("steps"))]
    if isinstance(journals := document.get("journals"), dict):
        document["journals"] = {key: _journal(journal) for key, journal in journals.items()}
    return document


def _step(step: Any) -> Any:
    if not isinstance(step, dict):
        return step
    step = {"audit": [], "audited_peak": None, "notes": [], **step, "flops": _with_inference(step.get("flops"))}
    if isinstance(memory := step.get("memory"), dict):
        step["memory"] = {device: _memory(statement) for device, statement in memory.items()}
    return step


def _with_inference(flops: Any) -> Any:
    if not isinstance(flops, dict):
        return flops
    flops = {"inference": 0, **flops}
    if isinstance(modules := flops.get("by_module"), dict):
        flops["by_module"] = {
            name: {"inference": 0, **split} if isinstance(split, dict) else split for name, split in modules.items()
        }
    return flops


def _memory(statement: Any) -> Any:
    if not isinstance(statement, dict):
        return statement
    statement = dict(statement)
    for name in ("start", "end", "peak"):
        if name in statement:
            statement[name] = _snapshot(statement[name])
    if isinstance(peaks := statement.get("peak_by_phase"), dict):
        statement["peak_by_phase"] = {phase: _snapshot(snapshot) for phase, snapshot in peaks.items()}
    if isinstance(maxima := statement.get("category_peaks"), dict):
        statement["category_peaks"] = {"communication": 0, "unsharded_parameters": 0, **maxima}
    return statement


def _snapshot(snapshot: Any) -> Any:
    if not isinstance(snapshot, dict):
        return snapshot
    return {"communication": 0, "unsharded_parameters": 0, "mapped_bytes": 0, **snapshot}


def _journal(journal: Any) -> Any:
    """The categories that roles hold as numbers moved up by two behind the autocast copies."""
    if not isinstance(journal, dict) or not isinstance(roles := journal.get("roles"), list):
        return journal
    return {**journal, "roles": [_role(pair) for pair in roles]}


def _role(pair: Any) -> Any:
    match pair:
        # 0 stands for none, so that category i is i + 1.
        case [number, int(role)] if role >> SETTLED_SHIFT_1 > N_CATEGORIES_BEFORE_COMMUNICATION:
            return [number, role + (2 << SETTLED_SHIFT_1)]
    return pair


def _list(value: Any) -> Any:
    return value if isinstance(value, list) else []


MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: from_1_to_2}
"""By schema number: what turns a document of that schema into one of the next."""
