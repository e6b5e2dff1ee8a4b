"""Files of one report or of many, read as runs by name."""

from __future__ import annotations

import os

from torchledger.errors import ReportFileError
from torchledger.journal.decoding import as_object, at_key, integer, refuse, shown
from torchledger.journal.files import read_document, shown_path
from torchledger.journal.schema import decode_run
from torchledger.journal.statements import RunStatement

KIND = "torchledger-reports"
"""What a file of many reports says of itself under ``kind``: its ``reports`` are by the id of their test."""

SCHEMA = 1


def read_runs(path: str | os.PathLike[str]) -> dict[str, RunStatement]:
    """The runs in a file, by test id; the run of a plain report has the name ``""``.

    Raises:
        ReportFileError: the file cannot be read, is broken, holds no report, or is of a newer schema.

    >>> read_runs("no/such/report.json")
    Traceback (most recent call last):
    torchledger.errors.ReportFileError: cannot read no/such/report.json: ...
    """
    document = read_document(path)
    try:
        return decode_runs(document)
    except ReportFileError as error:
        raise ReportFileError(f"{shown_path(path)}: {error.message}") from None


def decode_runs(document: object) -> dict[str, RunStatement]:
    """The runs in a document: one that `encode_run` made, or many under their ids.

    Raises:
        ReportFileError: it is neither, is damaged, or is of a newer schema; with the path inside it.

    >>> decode_runs({"kind": "torchledger-reports", "schema": 1, "reports": {}})
    {}
    """
    if not isinstance(document, dict) or document.get("kind") != KIND:
        return {"": decode_run(document)}
    schema = integer(1)(document.get("schema"), "schema")
    if schema > SCHEMA:
        raise ReportFileError(
            f"written by a newer torchledger (schema {shown(schema)} of many reports; this one reads up to {SCHEMA}). "
            "Upgrade torchledger to read it."
        )
    unknown = [key for key in document if key not in ("kind", "schema", "reports")]
    if unknown:
        raise refuse("", f"has the unknown key {shown(unknown[0])}")
    runs = {}
    for name, entry in as_object(document.get("reports"), "reports").items():
        try:
            runs[name] = decode_run(entry)
        except ReportFileError as error:
            raise ReportFileError(f"{at_key('reports', name)}: {error.message}") from None
    return runs
