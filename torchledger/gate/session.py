"""What a whole run of tests found, and what becomes of its baseline files: written, kept, named as unused, pruned."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torchledger.errors import BaselineFileError
from torchledger.gate.baselines import (
    ANYWHERE,
    FOLDER,
    BaselineFile,
    Entry,
    read_baselines,
    updated_entry,
    write_baselines,
)
from torchledger.gate.properties import Check, Property, decode_checks

_NAMED = 20
"""How many entries of a file are named in one line."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Which tests a run was about.

    ``collected`` has the names of the tests of each module that has a baseline file, by the file and the test's id, and
    ``passed`` the ids of all that passed. ``orphans`` are baseline files whose module is gone. ``partial`` says why the
    run left tests out, and ``failed`` why it did not pass.
    """

    collected: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    passed: frozenset[str] = frozenset()
    orphans: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Settled:
    """What is to be said at the end of a run, line by line, and whether the run fails by it."""

    lines: tuple[str, ...] = ()
    failed: bool = False


class SessionBook:
    """Collects what tests found against their baselines, wherever they ran, and settles it at the end."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._checks: dict[str, list[Check]] = {}
        self._by_file: dict[str, list[tuple[str, Check]]] | None = None

    def record_test(self, test_id: str, properties: Iterable[Property]) -> None:
        """Takes down what a test found; a later run of the same test replaces it."""
        self._checks[test_id] = decode_checks(properties)
        self._by_file = None

    def settle(self, scope: Scope, *, prune: bool) -> Settled:
        """Writes what is to be written, and says what was found."""
        lines = list(self._summary())
        failed = False
        for name in sorted(self._files() | set(scope.collected) | set(scope.orphans)):
            try:
                lines += self._settle_file(name, scope, prune=prune and not (scope.partial or scope.failed))
            except BaselineFileError as error:
                failed = True
                lines.append(f"ERROR {error.message}")
        if prune and (scope.partial or scope.failed):
            failed = True
            reasons = "; ".join((*scope.partial, *scope.failed))
            lines.append(f"--ledger-prune removed nothing, since it takes a whole run that passed: {reasons}")
        return Settled(tuple(lines), failed)

    def _files(self) -> set[str]:
        return {check.file for checks in self._checks.values() for check in checks}

    def _summary(self) -> Iterator[str]:
        counts = Counter(check.verdict for checks in self._checks.values() for check in checks)
        if counts:
            words = ("PASS", "REGRESSION", "WIN", "NEW", "NO-MATCH")
            yield "baselines: " + ", ".join(f"{counts[word]} {word}" for word in words if counts[word])

    def _settle_file(self, name: str, scope: Scope, *, prune: bool) -> Iterator[str]:
        old = read_baselines(self._root / name)
        entries = dict(old.entries)
        written = []
        for test_id, check in self._checks_of(name):
            if not check.new:
                continue
            if test_id not in scope.passed:
                written.append(f"{check.verdict} {test_id}: not written, since the test did not pass")
                continue
            here = frozenset(check.here.split(","))
            moved = {key: (check.group if key in here else ANYWHERE, value) for key, value in check.new.items()}
            groups = entries.get(check.entry)
            there = ", ".join(repr(group) for group in groups or () if group != ANYWHERE)
            words = f" (it had {there}, not {check.group!r})" if check.verdict == "NO-MATCH" else ""
            entries[check.entry] = updated_entry(groups, moved, check.rows)
            written.append(f"{check.verdict} {test_id}: written to {name}{words}")
        removed: list[str] = []
        unused: list[str] = []
        if not scope.partial:
            for entry in self._unused(name, old, scope):
                usable = prune and not self._is_of_elsewhere(old.entries[entry])
                (removed if usable else unused).append(entry)
        for entry in removed:
            del entries[entry]
        self._write(old, entries)
        yield from written
        yield from self._unused_lines(name, removed, unused, old)

    def _checks_of(self, name: str) -> list[tuple[str, Check]]:
        if self._by_file is None:
            self._by_file = {}
            for test_id in sorted(self._checks):
                for check in self._checks[test_id]:
                    self._by_file.setdefault(check.file, []).append((test_id, check))
        return self._by_file.get(name, [])

    def _write(self, old: BaselineFile, entries: dict[str, Entry]) -> None:
        if entries == old.entries:
            return
        if entries or set(old.document) - {"kind", "schema", "entries"}:
            write_baselines(old.with_entries(entries))
            return
        try:
            old.path.unlink()
        except OSError as error:
            raise BaselineFileError(f"cannot remove {old.path}: {error.strerror or error}.") from None
        with contextlib.suppress(OSError):
            old.path.parent.rmdir()

    def _unused(self, name: str, file: BaselineFile, scope: Scope) -> Iterator[str]:
        """Entries that no test stands for: it is gone, or it passed and did not ask for them."""
        if name in scope.orphans:
            yield from file.entries
        if name not in scope.collected:
            return
        ids = {test: test_id for test_id, test in scope.collected[name].items()}
        used = {check.entry for _, check in self._checks_of(name)}
        for entry in file.entries:
            owner = _owner(entry, ids)
            if owner is None or (ids[owner] in scope.passed and entry not in used):
                yield entry

    def _is_of_elsewhere(self, groups: Entry) -> bool:
        """Whether an entry has numbers of accelerators only, and of none that this run was on."""
        here = {_kind(check.group) for checks in self._checks.values() for check in checks}
        kinds = {_kind(group) for group in groups if group != ANYWHERE}
        return bool(kinds) and not any(kind in here or kind == "cpu" or kind.startswith("simulated ") for kind in kinds)

    def _unused_lines(self, name: str, removed: list[str], unused: list[str], file: BaselineFile) -> Iterator[str]:
        if removed:
            yield f"UNUSED {name}: removed {_names(removed)}"
        if unused:
            hint = "kept; `pytest --ledger-prune` removes what no test uses, after a whole run that passed"
            yield f"UNUSED {name}: {_names(unused)} ({hint})"
        unknown = list(file.unknown())
        if unknown:
            yield f"UNKNOWN {name}: {_names(unknown)} (kept, and held against nothing)"


def find_orphans(folders: Iterable[Path]) -> Iterator[Path]:
    """Baseline files in these ``__ledger__`` folders whose module is no longer beside the folder.

    >>> list(find_orphans([Path("no/such/__ledger__")]))
    []
    """
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            module = folder.parent / path.stem
            if path.is_file() and not module.exists() and not module.with_name(f"{path.stem}.py").exists():
                yield path


def find_folders(tops: Iterable[Path], *, skip: Iterable[str] = ()) -> Iterator[Path]:
    """All ``__ledger__`` folders below these folders, but for those inside hidden folders and those named ``skip``.

    >>> list(find_folders([Path("no/such")]))
    []
    """
    left_out = set(skip)
    for top in tops:
        for place, folders, _ in os.walk(top):
            if FOLDER in folders:
                yield Path(place) / FOLDER
            folders[:] = [name for name in folders if name[:1] != "." and name not in left_out]


def _owner(entry: str, tests: Mapping[str, str]) -> str | None:
    """The test that an entry belongs to: ``test_a#2`` and ``test_a#name`` to ``test_a``."""
    if entry in tests:
        return entry
    lengths = sorted({len(test) for test in tests if len(test) < len(entry)}, reverse=True)
    return next((entry[:n] for n in lengths if entry[n] == "#" and entry[:n] in tests), None)


def _kind(group: str) -> str:
    return group.rpartition(", torch ")[0]


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
