"""Formulas of autograd that a dispatch mode sends another way, and what the same formulas do without one.

Many formulas ask whether a mode is on. If so they take a path that writes nowhere in place and looks at no value: with
more buffers, of which the program without a ledger has a few. Where the blocks of such a formula are those that its
path under a mode makes, they are read as those of the other path; a formula that another torch writes otherwise is
left as it ran.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from torchledger.journal.entries import FORMULA, Journal, Row


class Path(NamedTuple):
    """A formula's blocks under a mode, in order, by the ops that make them, and which of them it has without one.

    ``kept`` are positions in ``ops``; the others are not there without a mode. Those at ``lasting`` go right after the
    last of ``ops`` has come. The block at ``result``, if that is one, comes where the dropped one at ``at`` does.
    """

    ops: tuple[str, ...]
    kept: tuple[int, ...]
    lasting: tuple[int, ...] = ()
    result: int = -1
    at: int = -1


def _path(ops: str, kept: tuple[int, ...], lasting: tuple[int, ...] = (), result: int = -1, at: int = -1) -> Path:
    return Path(tuple(f"aten.{op}" for op in ops.split()), kept, lasting, result, at)


_CUMPROD = _path(
    # Sums of what follows, over the input; the rest is for inputs that hold a zero.
    "mul eq zeros cumsum eq bitwise_not masked_fill flip cumsum flip div where eq max max zeros_like bitwise_not"
    " bitwise_not masked_fill cumprod ne masked_fill sub gather eq mul sum mul where",
    kept=(0, 1, 7, 8, 9, 28),
    result=28,
    at=10,
)
_PRODUCT = "ones cat cumprod flip cat cumprod"
_ALONG = f"{_PRODUCT} eq sum flip mul mul"
_EVEN = _path("isnan isnan logical_and eq sum div mul", kept=(3, 4, 5, 6))
PATHS: dict[str, tuple[Path, ...]] = {
    "CumprodBackward0": (_CUMPROD,),
    "ProdBackward0": (
        _path(f"{_PRODUCT} flip mul mul", kept=(7, 8)),
        _path(f"clone {_PRODUCT} flip mul mul", kept=(8, 9)),
    ),
    "ProdBackward0 with zeros": (
        _path(f"{_PRODUCT} nonzero flip mul mul", kept=(6, 9), lasting=(6,)),
        _path(f"clone {_PRODUCT} nonzero flip mul mul", kept=(7, 10), lasting=(7,)),
    ),
    "ProdBackward1": (_path(_ALONG, kept=(6, 7, 9, 10), lasting=(6, 7)),),
    "ProdBackward1 with zeros": (_path(_ALONG, kept=tuple(range(11)), lasting=(6, 7)),),
    "MaxBackward1": (_EVEN,),
    "MinBackward1": (_EVEN,),
    "MedianBackward0": (_EVEN,),
    "NanmedianBackward0": (_EVEN,),
    "LinalgMatrixExpBackward0": (_path("cat zeros_like cat cat linalg_matrix_exp", kept=(3, 4)),),
}
"""By the class of the autograd node; where the input's values decide, with them. On CPU alone."""

DATA_DEPENDENT = ("CumprodBackward0", "ProdBackward0", "ProdBackward1")
"""Nodes whose path depends on whether the input holds zeros."""

_CLAMP = (
    ("aten.logical_and", "aten.lt"),
    ("aten.logical_and", "aten.le"),
    ("aten.logical_or", "aten.lt"),
)
IN_PLACE: dict[str, tuple[tuple[str, str], ...]] = {
    "AminmaxBackward0": (("aten.add", "aten.mul"),),
    "Atan2Backward0": (("aten.masked_fill", "aten.reciprocal"),),
    "BinaryCrossEntropyBackward0": (("aten.mul", "aten.logit"),),
    "BinaryCrossEntropyWithLogitsBackward0": (
        ("aten.sub", "aten.sigmoid"),
        ("aten.sub", "aten.add"),
        ("aten.sub", "aten.mul"),
        ("aten.mul", "aten.sub"),
        ("aten.mul", "aten.mul"),
        ("aten.mul", "aten.sigmoid"),
        ("aten.mul", "aten.log_sigmoid_forward"),
    ),
    "ClampBackward0": _CLAMP,
    "ClampBackward1": _CLAMP,
    "CumprodBackward0 with zeros": (
        ("aten.div", "aten.flip"),
        ("aten.mul", "aten.masked_fill"),
        ("aten.mul", "aten.sum"),
    ),
}
"""Ops that a formula does in place without a mode, each with the op of the last block of its size that is alive.

Where that is not what the op writes into, both go together.
"""

OTHERWISE = ("LinalgHouseholderProductBackward0", "MaskedFillBackward1", "OrmqrBackward0")
"""Nodes that hold other buffers under a mode, of sizes that depend on values or are few: told as they ran."""

NODES = frozenset(name.partition(" ")[0] for name in (*PATHS, *IN_PLACE, *OTHERWISE))
"""The autograd nodes whose formulas a dispatch mode sends another way."""


def rewrite_formulas(journal: Journal) -> Journal:
    """The journal with each known formula as it is without a mode; the same one where there is none.

    The marks of formulas that are left as they ran stay.
    """
    spans = list(formulas(journal))
    if not spans:
        return journal
    events, marks = list(journal.events), journal.marks
    for name, begin, end in reversed(spans):
        window = events[begin:end]
        instead = _without_mode(journal, name, window)
        if instead is None:
            continue
        events[begin:end] = instead
        gone = len(window) - len(instead)
        marks = [
            (
                _moved(position, begin, end, gone),
                kind,
                "" if (position, kind, value) == (begin, FORMULA, name) else value,
            )
            for position, kind, value in marks
        ]
    return replace(journal, events=events, marks=marks)


def formulas(journal: Journal) -> Iterator[tuple[str, int, int]]:
    """(node, first event, event behind the last) of each formula."""
    name, begin = "", 0
    for position, kind, value in journal.marks:
        if kind == FORMULA:
            if name:
                yield name, begin, position
            name, begin = value, position
    if name:
        yield name, begin, len(journal.events)


def _moved(position: int, begin: int, end: int, gone: int) -> int:
    """Where a mark is once so many events between two others are gone."""
    return position - gone if position >= end else min(position, max(end - gone, begin))


def _without_mode(journal: Journal, name: str, events: list[int]) -> list[int] | None:
    """The events of one formula, as they are without a mode; None where that is not known."""
    rows = {event: journal.blocks[event - journal.first] for event in events if event >= 0}
    if name in IN_PLACE:
        return _in_place(events, rows, IN_PLACE[name])
    for path in PATHS.get(name, ()):
        born = list(rows)[: len(path.ops)]
        if tuple(rows[number][4] for number in born) == path.ops and rows[born[0]][1] == "cpu":
            return _on_path(events, born, path)
    return None


def _on_path(events: list[int], born: list[int], path: Path) -> list[int] | None:
    dropped = {number for i, number in enumerate(born) if i not in path.kept}
    lasting = [born[i] for i in path.lasting]
    if not {~number for number in (*dropped, *lasting)} <= set(events):
        return None  # something holds what the other path would never have made
    result = born[path.result] if path.at >= 0 else None
    found: list[int] = []
    for event in events:
        if result is not None and event == born[path.at]:
            found.append(result)
        elif event != result and (event if event >= 0 else ~event) not in dropped and ~event not in lasting:
            found.append(event)
        if event == born[-1]:
            found += [~number for number in lasting]
    return found


def _in_place(events: list[int], rows: dict[int, Row], pairs: tuple[tuple[str, str], ...]) -> list[int]:
    """Let the block that each of these ops would have written into go just before its result comes."""
    events, alive = list(events), dict[int, None]()
    for event in list(events):
        if event < 0:
            alive.pop(~event, None)
            continue
        nbytes, op = rows[event][0], rows[event][4]
        old = next((old for old in reversed(alive) if rows[old][0] == nbytes), None)
        alive[event] = None
        if old is not None and (op, rows[old][4]) in pairs and ~old in events:
            came, went = events.index(event), events.index(~old)
            events[came : went + 1] = [~old, *events[came:went]]
            del alive[old]
    return events
