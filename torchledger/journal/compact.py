"""Journals <-> JSON-able dicts: rows of numbers, with a table of the strings that they repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple
from typing import Any

from torchledger.journal.decoding import (
    Reader,
    array,
    as_object,
    at_key,
    flag,
    integer,
    mapping,
    optional,
    record,
    refuse,
    shown,
    text,
)
from torchledger.journal.entries import (
    LATE,
    SETTLED_SHIFT,
    Batch,
    Block,
    DeviceReading,
    Journal,
    ParameterRow,
    Product,
    ProductRow,
    Row,
)
from torchledger.journal.entries import Reader as JournalReader
from torchledger.journal.statements import CATEGORIES

_COUNT = integer()
_ANY = integer(None)


def encode_journal(journal: Journal) -> dict[str, Any]:
    """The journal as a dict that JSON can hold.

    >>> decode_journal(encode_journal(Journal(index=3)), "journals") == Journal(index=3)
    True
    """
    strings: dict[str, int] = {}

    def word(value: str) -> int:
        return strings.setdefault(value, len(strings))

    def block(row: Row) -> list[Any]:
        b = Block(*row)
        sizes = list(b.shape)
        return [b.nbytes, word(b.device), word(b.phase), b.module, word(b.op), sizes, word(b.dtype), b.site]

    def product(row: ProductRow) -> list[Any]:
        p = Product(*row)
        parts = [[parameter, word(kind), flops] for parameter, kind, flops in p.parts]
        numbers = [p.module, p.flops, p.rescore, p.causal_excess]
        link = [*p.link[:4], *map(list, p.link[4:])]
        return [word(p.op), word(p.dtype), word(p.phase), *numbers, parts, word(p.quality), link]

    return {
        "index": journal.index,
        "first": journal.first,
        "carried": [[number, *block(b)] for number, b in sorted(journal.carried.items())],
        "blocks": [block(b) for b in journal.blocks],
        "events": list(journal.events),
        "marks": [[position, word(kind), word(value)] for position, kind, value in journal.marks],
        "roles": [list(pair) for pair in sorted(journal.roles.items())],
        "products": [product(p) for p in journal.products],
        "copies": [[word(kind), word(device), n, module] for kind, device, n, module in journal.copies],
        "uncounted": dict(sorted(journal.uncounted.items())),
        "modules": list(journal.modules),
        "parameters": list(journal.parameters),
        "sites": list(journal.sites),
        "inplace_adds": [list(pair) for pair in journal.inplace_adds],
        "readings": {device: list(astuple(reading)) for device, reading in sorted(journal.readings.items())},
        "compiled": list(journal.compiled),
        "global_excess": journal.global_excess,
        "segments": list(journal.segments),
        "enclosing": list(journal.enclosing),
        "parameter_rows": [list(row) for row in journal.parameter_rows],
        "readers": [[r.parameter, word(r.op), word(r.how), r.module, r.position] for r in journal.readers],
        "batches": [[b.module, b.graph, list(b.integers), list(b.first)] for b in journal.batches],
        "strings": list(strings),
    }


def decode_journal(value: object, path: str) -> Journal:
    """The journal that `encode_journal` made a dict of.

    Raises:
        ReportFileError: the value is no journal: a wrong type, a missing or unknown key, an index that points nowhere,
            a block that goes before it came.

    >>> decode_journal({}, "journals")
    Traceback (most recent call last):
    torchledger.errors.ReportFileError: journals: lacks the key "strings". ...
    """
    entries = as_object(value, path)
    tables: dict[str, tuple[str, ...]] = {}
    for name in ("strings", "modules", "parameters", "sites"):
        if name not in entries:
            raise refuse(path, f"lacks the key {shown(name)}")
        tables[name] = array(text)(entries[name], at_key(path, name))
    decoded = _journal_reader(tables)(value, path)
    _check_life(decoded, path)
    return decoded


def _journal_reader(tables: dict[str, tuple[str, ...]]) -> Reader[Journal]:
    strings = tables["strings"]

    def word(value: object, path: str) -> str:
        return strings[_below(len(strings))(value, path)]

    module = _below(len(tables["modules"]), -1)
    site = _below(len(tables["sites"]), -1)
    block_fields = (_COUNT, word, word, module, word, array(_COUNT), word, site)
    parameter = _below(len(tables["parameters"]))
    part = _row(_tuple, parameter, word, _COUNT)
    product_fields = (word, word, word, module, _COUNT, _COUNT, _COUNT, array(part), word, _link)
    pair = _row(_tuple, _COUNT, _below((len(CATEGORIES) + 1) << SETTLED_SHIFT))
    names = array(text)

    def make(**fields: Any) -> Journal:
        del fields["strings"]
        fields["roles"] = dict(fields["roles"])
        fields["carried"] = dict(fields["carried"])
        lists: dict[str, Any] = {name: list(v) if isinstance(v, tuple) else v for name, v in fields.items()}
        return Journal(**lists)

    return record(
        make,
        {
            "index": _COUNT,
            "first": _COUNT,
            "carried": array(_row(lambda number, *cells: (number, cells), _COUNT, *block_fields)),
            "blocks": array(_row(_tuple, *block_fields)),
            "events": array(_ANY),
            "marks": array(_row(_tuple, _COUNT, word, word)),
            "roles": array(pair),
            "products": array(_row(_tuple, *product_fields)),
            "copies": array(_row(_tuple, word, word, _COUNT, module)),
            "uncounted": mapping(_COUNT),
            "modules": names,
            "parameters": names,
            "sites": names,
            "inplace_adds": array(_row(_tuple, _COUNT, _ANY)),
            "readings": mapping(
                _row(DeviceReading, *[_COUNT] * 6, optional(_COUNT), optional(_COUNT), flag, optional(_COUNT))
            ),
            "compiled": array(module),
            "global_excess": _COUNT,
            "segments": array(_COUNT),
            "enclosing": array(_ANY),
            "parameter_rows": array(_row(ParameterRow, parameter, *[_COUNT] * 3, text, text, flag, text, text)),
            "readers": array(_row(JournalReader, parameter, word, word, module, _COUNT)),
            "batches": array(_row(Batch, module, flag, array(_COUNT), array(_COUNT))),
            "strings": names,
        },
    )


def _link(value: object, path: str) -> tuple[Any, ...]:
    """An empty list, or a link."""
    return () if value == [] else _LINK(value, path)


def _tuple(*cells: Any) -> tuple[Any, ...]:
    return cells


def _row(make: Callable[..., Any], *readers: Reader[Any]) -> Reader[Any]:
    """Reads a list of as many values as there are readers."""

    def read(value: object, path: str) -> Any:
        if not isinstance(value, list) or len(value) != len(readers):
            raise refuse(path, f"must be a list of {len(readers)} values")
        return make(*[reader(cell, path) for reader, cell in zip(readers, value, strict=True)])

    return read


_LINK = _row(_tuple, _ANY, _COUNT, _ANY, _COUNT, array(_COUNT), array(_COUNT))


def _below(length: int, low: int = 0) -> Reader[int]:
    """Reads an index into a table of that length."""
    number = integer(low)

    def read(value: object, path: str) -> int:
        found = number(value, path)
        if found >= length:
            raise refuse(path, f"holds the index {shown(found)} into a table of {length}")
        return found

    return read


def _check_life(journal: Journal, path: str) -> None:
    """Refuses events and positions that cannot be: each block comes before it goes, and no event is out of range."""
    known = set(journal.numbers())
    for name, numbers in _block_references(journal):
        for number in numbers:
            if number not in known:
                raise refuse(at_key(path, name), f"names block {shown(number)}, which is not in the journal")
    alive = set(journal.carried) | {number for number, roles in journal.roles.items() if roles & LATE}
    for position, event in enumerate(journal.events):
        number = event if event >= 0 else ~event
        if (event >= 0) == (number in alive):
            problem = "comes while it is alive" if event >= 0 else "goes before it came"
            raise refuse(f"{at_key(path, 'events')}[{position}]", f"block {number} {problem}")
        alive ^= {number}
    if max((position for position, _, _ in journal.marks), default=0) > len(journal.events):
        raise refuse(at_key(path, "marks"), "has a position behind the last event")


def _block_references(journal: Journal) -> Iterable[tuple[str, Sequence[int]]]:
    yield "events", [event if event >= 0 else ~event for event in journal.events]
    yield "roles", list(journal.roles)
