"""What a test measured as properties of its item, one scalar each: so it travels between processes, and into JUnit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torchledger.gate.quantities import QUANTITIES, measure_quantities
from torchledger.journal.statements import RunStatement

PREFIX = "torchledger."
_ALWAYS = ("peak", "flops")
_BASELINE = re.compile(
    r"torchledger\.baseline\.(?:([0-9]+)\.)?(file|entry|verdict|group|here|new\.[a-z_]+|row\..*)", re.DOTALL
)

Property = tuple[str, object]


@dataclass(slots=True)
class Check:
    """What one check against a baseline found.

    ``entry`` is its name in the ``file``, ``group`` that of the numbers that depend on the device. What is to be
    written are the ``new`` numbers by key, those ``here`` (keys with commas between) into that group, and the largest
    ``rows`` at the peak.
    """

    file: str = ""
    entry: str = ""
    verdict: str = "PASS"
    group: str = ""
    new: dict[str, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    here: str = ""


def encode_run_properties(run: RunStatement, number: int = 1) -> Iterator[Property]:
    """What the ``number``-th ledger of a test measured: ``torchledger.peak_bytes``, ``torchledger.flops`` and so on.

    Zeros are left out, but for the peak and the FLOPs.

    >>> list(encode_run_properties(RunStatement()))
    [('torchledger.n_steps', 0), ('torchledger.device', 'cpu')]
    """
    prefix = PREFIX if number == 1 else f"{PREFIX}{number}."
    yield f"{prefix}n_steps", run.n_steps
    yield f"{prefix}device", run.main_device
    for key, found in measure_quantities(run).items():
        if found.value or key in _ALWAYS:
            unit = "_bytes" if QUANTITIES[key].unit == "bytes" else ""
            yield f"{prefix}{key}{unit}", found.value


def encode_check(check: Check, number: int = 1) -> Iterator[Property]:
    """The ``number``-th check of a test as properties.

    >>> list(encode_check(Check("f.json", "test_a", "NEW", "cpu, torch 2.13", {"peak": 8})))[-1]
    ('torchledger.baseline.new.peak', 8)
    """
    prefix = f"{PREFIX}baseline." if number == 1 else f"{PREFIX}baseline.{number}."
    for name in ("file", "entry", "verdict", "group", "here"):
        yield prefix + name, getattr(check, name)
    for key, value in check.new.items():
        yield f"{prefix}new.{key}", value
    for row, nbytes in check.rows.items():
        yield f"{prefix}row.{row}", nbytes


def decode_checks(properties: Iterable[Property]) -> list[Check]:
    """The checks among the properties of a test.

    >>> decode_checks(encode_check(Check("f.json", "test_a"))) == [Check("f.json", "test_a")]
    True
    """
    checks: dict[int, Check] = {}
    for name, value in properties:
        found = _BASELINE.fullmatch(name) if isinstance(name, str) else None
        if found is None:
            continue
        check = checks.setdefault(int(found[1] or 1), Check())
        kind, _, rest = found[2].partition(".")
        if kind not in ("new", "row"):
            setattr(check, kind, value)
        elif isinstance(value, int):
            (check.new if kind == "new" else check.rows)[rest] = value
    return [checks[number] for number in sorted(checks)]
