"""The reports of a run of tests, kept aside as they come and put into one file at the end."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from torchledger.journal.files import write_text

KIND = "torchledger-reports"
SCHEMA = 1


class Spool:
    """Reports on their way into one file: each process appends to a file of its own in a shared folder.

    Args:
        folder: of the process that began; a new one, if left out.

    >>> spool = Spool()
    >>> spool.add("t.py::test_a", {"n_steps": 1})
    >>> spool.texts()
    {'t.py::test_a': '{"n_steps": 1}'}
    >>> spool.remove()
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="torchledger-")) if folder is None else folder

    def add(self, test_id: str, report: Mapping[str, object]) -> None:
        """Appends the report of a test; one that is added later under the same name replaces it."""
        with open(self.folder / f"{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps([test_id, json.dumps(report)]) + "\n")

    def texts(self) -> dict[str, str]:
        """The reports of all processes as JSON, by test."""
        found: dict[str, str] = {}
        for path in sorted(self.folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns):
            with open(path, encoding="utf-8") as file:
                for line in file:
                    try:
                        test_id, text = json.loads(line)
                    except ValueError:
                        continue  # the last line of a process that was killed
                    found[test_id] = text
        return dict(sorted(found.items()))

    def write(self, path: Path) -> int:
        """Writes one file with all reports, at once, and returns how many there are.

        Raises:
            ReportWriteError: the file cannot be written.
        """
        texts = self.texts()
        reports = ",\n".join(f"{json.dumps(test_id)}: {text}" for test_id, text in texts.items())
        write_text(path, f'{{"schema": {SCHEMA}, "kind": "{KIND}", "reports": {{\n{reports}\n}}}}\n')
        return len(texts)

    def remove(self) -> None:
        """Removes what was kept aside."""
        shutil.rmtree(self.folder, ignore_errors=True)
