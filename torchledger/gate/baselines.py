"""Baselines: the numbers of an earlier run, in a file that is committed, and verdicts against them.

The file has an entry for each test, in it a group for the numbers that the program alone decides, and one for each kind
of device and minor version of torch for the others. What a file holds beyond that is kept as it is.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from torchledger.errors import BaselineFileError, ReportWriteError
from torchledger.gate.budgets import check_measured
from torchledger.gate.judging import Outcome, Verdict, judge
from torchledger.gate.machine import Machine, read_machine
from torchledger.gate.quantities import QUANTITIES, WITH_RESCORE, Measured, measure_quantities
from torchledger.gate.tolerances import default_tolerance
from torchledger.journal.decoding import LARGEST
from torchledger.journal.files import UnreadableError, read_json, shown_path, write_text
from torchledger.journal.statements import MemorySnapshot, RunStatement, is_accelerator

FOLDER = "__ledger__"
KIND = "torchledger-baselines"
SCHEMA = 1
ANYWHERE = "any device, any torch"
"""The group of what the program alone decides."""
ROWS = "rows"
"""The key under which a group keeps the largest rows at its peak; they are shown, and held against nothing."""

_CONFLICT = re.compile(rb"^(<{7}|={7}|>{7}|\|{7})( |$)", re.MULTILINE)

Entry = dict[str, dict[str, Any]]
"""The groups of one test."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What one report has to say to a baseline: its values by key, and the machine that they were measured on."""

    values: dict[str, Measured]
    machine: Machine
    peak: MemorySnapshot

    def group_of(self, key: str, groups: Mapping[str, Any]) -> str:
        """The group of an entry that a key's value belongs to: ``ANYWHERE``, or that of this machine.

        What the program alone decides is the same anywhere, but for the part of it that placement or kernels decide:
        a number goes with its machine where some of the bytes lie on another device, or where attention ran in other
        kernels than it did for the number that is there.

        >>> machine = Machine("cpu", "", "2.13.0", simulated=False)
        >>> sample = Sample({"flops": Measured(8, 0, "cpu")}, machine, MemorySnapshot())
        >>> sample.group_of("flops", {}), sample.group_of("peak", {})
        ('any device, any torch', 'cpu, torch 2.13')
        """
        own = self.machine.group
        if QUANTITIES[key].depends_on != "program" or key in groups.get(own, {}):
            return own
        there = groups.get(ANYWHERE, {})
        apart = self.values[key].apart if key in self.values else 0
        if own in groups and key in there:
            return ANYWHERE  # this machine's own number
        if QUANTITIES[key].unit == "bytes":
            return own if apart else ANYWHERE
        return own if key in WITH_RESCORE and there.get("attention_rescore_flops", apart) != apart else ANYWHERE


def baseline_path(module: Path) -> Path:
    """Where the baselines of a test module are.

    >>> baseline_path(Path("tests/test_train.py")).as_posix(), baseline_path(Path("docs/use.md")).name
    ('tests/__ledger__/test_train.json', 'use.md.json')
    """
    name = module.stem if module.suffix == ".py" else module.name
    return module.parent / FOLDER / f"{name}.json"


def take_sample(run: RunStatement) -> Sample:
    """What a baseline keeps of a run. On an accelerator the first of several steps is left out, as a warm-up.

    Raises:
        UsageError: the run has no step.
        FaultyReportError: the ledger failed while it recorded.
    """
    machine = read_machine(check_measured(run))
    if not machine.is_exact and len(run.steps) > 1:
        # Libraries take their workspaces at first use, so that the order of tests would show.
        run = RunStatement(run.steps[1:], run.n_steps - 1, run.environment, run.flops)
    values = measure_quantities(run)
    if not is_accelerator(machine.device):
        for key in ("requested", "allocated", "reserved"):
            values.pop(key, None)  # the same number as the peak, three times more
    return Sample(values, machine, run.peak)


_LATER_ACCOUNTS = ("inference_flops", "communication", "unsharded_parameters")
"""Baselines of before these were accounts lack them; where they are 0 nothing is new."""


def judge_sample(entry: Mapping[str, Any] | None, sample: Sample, share: Fraction | None) -> tuple[Verdict, ...]:
    """A verdict for each value: ``PASS``, ``REGRESSION``, ``WIN``; ``NEW`` or ``NO-MATCH`` where there is no number.

    Args:
        entry: the groups of the test; None if the file has none.
        sample: what was measured.
        share: by how much of the number each may differ; exact on CPU and simulated devices if None, and on
            accelerators, for what their allocator or kernels decide, 1 % or 1 MiB.

    >>> machine = Machine("cpu", "", "2.13.0", simulated=False)
    >>> sample = Sample({"peak": Measured(8, 0, "cpu")}, machine, MemorySnapshot())
    >>> [verdict.outcome for verdict in judge_sample(None, sample, None)]
    ['NEW']
    """
    groups = entry or {}
    machine = sample.machine
    elsewhere = [name for name in groups if name not in (ANYWHERE, machine.group)]
    why = f"measured on {', '.join(elsewhere)} alone" if elsewhere and machine.group not in groups else ""
    verdicts = []
    for key, quantity in QUANTITIES.items():
        group = sample.group_of(key, groups)
        base = _number(groups, group, key)
        if key not in sample.values and base is None:
            continue
        # What is in the baseline and was not measured now has gone to 0.
        found = sample.values.get(key) or Measured(0, 0, machine.device)
        if base is None and not found.value and key in _LATER_ACCOUNTS and group in groups:
            base = 0
        usual = default_tolerance(quantity, exact=machine.is_exact)
        tolerance = usual if share is None else replace(usual, relative=share)
        missing = why if base is None and group != ANYWHERE else ""
        verdicts.append(judge(key, found, base, tolerance, why=missing))
    return tuple(verdicts)


def find_broken(verdicts: Iterable[Verdict], *, update: bool, ci: bool) -> tuple[Verdict, ...]:
    """The verdicts that fail a test: a ``WIN`` as well, since a stale number would let the next regression through.

    With ``update`` nothing fails; a number that is missing fails in CI, where nobody would commit it.

    >>> find_broken([judge("peak", Measured(8, 0, "cpu"), None)], update=False, ci=False)
    ()
    """
    failing = ("REGRESSION", "WIN", "NEW", "NO-MATCH") if ci else ("REGRESSION", "WIN")
    return () if update else tuple(verdict for verdict in verdicts if verdict.outcome in failing)


def outcome_of(verdicts: Iterable[Verdict]) -> str:
    """The one word for a check: the worst, ``NEW`` before a ``PASS`` since there is something to be written.

    >>> outcome_of([judge("peak", Measured(8, 0, "cpu"), 9), judge("flops", Measured(1, 0, "cpu"), 1)])
    'WIN'
    """
    found = {verdict.outcome for verdict in verdicts}
    return str(next((word for word in Outcome if word in found), Outcome.PASS))


def _number(groups: Mapping[str, Any], group: str, key: str) -> int | None:
    found = groups.get(group, {}).get(key)
    return found if isinstance(found, int) else None


def updated_entry(
    entry: Mapping[str, Any] | None, moved: Mapping[str, tuple[str, int]], rows: Mapping[str, int]
) -> Entry:
    """The entry with what moved, and nothing else changed.

    Args:
        entry: the groups of the test; None if the file has none.
        moved: by key, its group and its new value.
        rows: the largest rows at the peak, for the groups of a device that something moved in.

    >>> updated_entry({"g": {"peak": 1, "inputs": 5}}, {"peak": ("g", 2)}, {})
    {'g': {'peak': 2, 'inputs': 5}}
    """
    groups: Entry = {name: dict(group) for name, group in (entry or {}).items()}
    for key, (group, value) in moved.items():
        groups.setdefault(group, {})[key] = value
        if group != ANYWHERE and rows:
            groups[group][ROWS] = dict(rows)
    return groups


@dataclass(frozen=True, slots=True)
class BaselineFile:
    """The content of a baseline file; ``document`` is all of it, as it was read."""

    path: Path
    document: dict[str, Any]

    @property
    def entries(self) -> dict[str, Entry]:
        """The groups of each test, by the test's name."""
        found: dict[str, Entry] = self.document["entries"]
        return found

    def unknown(self) -> Iterator[str]:
        """The names of what this version does not know, and keeps."""
        yield from (name for name in self.document if name not in ("kind", "schema", "entries"))
        for test, groups in self.entries.items():
            for group, values in groups.items():
                yield from (f"{test}, {group}, {key}" for key in values if key not in QUANTITIES and key != ROWS)

    def with_entries(self, entries: Mapping[str, Entry]) -> BaselineFile:
        """The same file with other entries."""
        return BaselineFile(self.path, self.document | {"entries": dict(entries)})


def read_baselines(path: Path) -> BaselineFile:
    """The baselines in a file, checked whole; without any entry if there is no such file.

    Raises:
        BaselineFileError: the file cannot be read, is broken, half merged, or of a newer schema.

    >>> read_baselines(Path("no/such/__ledger__/test_train.json")).entries
    {}
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise BaselineFileError(f"cannot read {shown_path(path)}: it is no regular file. Move it out of the way.")
        document = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        return BaselineFile(path, {"kind": KIND, "schema": SCHEMA, "entries": {}})
    except OSError as error:
        raise BaselineFileError(f"cannot read {shown_path(path)}: {error.strerror or error}.") from None
    except UnreadableError as error:
        raise _broken(path, "it has the marks of a merge conflict" if _is_conflict(path) else str(error)) from None
    problem = _problem(document)
    if problem:
        raise _broken(path, problem)
    assert isinstance(document, dict)
    return BaselineFile(path, document)


def write_baselines(file: BaselineFile) -> None:
    """Writes a baseline file at once: sorted, one value a line, so that a diff shows just what moved.

    Raises:
        BaselineFileError: the file or its folder cannot be written.
    """
    try:
        file.path.parent.mkdir(exist_ok=True)
        write_text(file.path, render_baselines(file))
    except OSError as error:
        cause = (error.__cause__ if isinstance(error, ReportWriteError) else None) or error
        reason = getattr(cause, "strerror", None) or str(cause)
        raise BaselineFileError(
            f"cannot write {shown_path(file.path)}: {reason}. Make room for it, and run with --ledger-update."
        ) from None


def render_baselines(file: BaselineFile) -> str:
    """The text of a baseline file.

    >>> print(render_baselines(BaselineFile(Path("x.json"), {"schema": 1, "kind": KIND, "entries": {}})), end="")
    {
      "entries": {},
      "kind": "torchledger-baselines",
      "schema": 1
    }
    """
    text = json.dumps(file.document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # names of files that are no text
        text = json.dumps(file.document, indent=2, sort_keys=True) + "\n"
    return text


def _broken(path: Path, problem: str) -> BaselineFileError:
    name = shown_path(path)
    return BaselineFileError(
        f"{name} is no baseline file: {problem}. It was left as it is. Mend it, or bring back the committed one with "
        f"`git checkout -- {shlex.quote(name)}`; to begin anew, delete it."
    )


def _is_conflict(path: Path) -> bool:
    try:
        return _CONFLICT.search(path.read_bytes()) is not None
    except OSError:
        return False


def _problem(document: object) -> str | None:
    """What keeps a document from being baselines of this schema, or None."""
    if not isinstance(document, dict):
        return "it holds no object"
    if document.get("kind") != KIND:
        return f'"kind" is {_shown(document.get("kind"))}, not "{KIND}"'
    schema = document.get("schema")
    if isinstance(schema, bool) or not isinstance(schema, int) or schema < 1:
        return f'"schema" is {_shown(schema)}, not {SCHEMA}'
    if schema > SCHEMA:
        return f'a newer torchledger wrote it ("schema" is {_shown(schema)}; this one reads up to {SCHEMA})'
    entries = document.get("entries")
    if not isinstance(entries, dict):
        return '"entries" is no object'
    for test, groups in entries.items():
        if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
            return f"the entry {_shown(test)} is no object of objects"
        for group, values in groups.items():
            problem = _group_problem(values)
            if problem:
                return f"the entry {_shown(test)}, {_shown(group)}: {problem}"
    return None


def _group_problem(values: Mapping[str, object]) -> str | None:
    rows = values.get(ROWS, {})
    if not isinstance(rows, dict):
        return f'"{ROWS}" is no object'
    numbers = {key: value for key, value in values.items() if key in QUANTITIES} | rows
    for key, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int):
            return f"{_shown(key)} is {_shown(value)}, not a whole number"
        if not -LARGEST <= value <= LARGEST or (value < 0 and _is_positive(key)):
            return f"{_shown(key)} is {_shown(value)}, which nothing can have measured"
    return None


def _is_positive(key: str) -> bool:
    # What is read off an allocator may be a difference, and what is left of a category's rows is one.
    return key in QUANTITIES and QUANTITIES[key].depends_on != "allocator"


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
