"""Runs <-> JSON, with a schema number, migrations from older ones, and validation of all that is read."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from torchledger.errors import ReportFileError
from torchledger.journal.checks import (
    check_allocation,
    check_flops,
    check_memory,
    check_run,
    check_snapshot,
    check_split,
    check_tree,
)
from torchledger.journal.compact import decode_journal, encode_journal
from torchledger.journal.decoding import (
    Reader,
    array,
    as_object,
    at_key,
    checked,
    flag,
    integer,
    mapping,
    one_of,
    optional,
    plain,
    real,
    record,
    refuse,
    shown,
    text,
)
from torchledger.journal.evidence import READ_AS, ParameterEvidence, StepEvidence
from torchledger.journal.migrations import MIGRATIONS
from torchledger.journal.rows import AuditedPeak, AuditRow, Growth
from torchledger.journal.statements import (
    CATEGORIES,
    PHASES,
    Allocation,
    Copies,
    FlopSplit,
    FlopStatement,
    MemorySnapshot,
    MemoryStatement,
    ParameterFlops,
    RunStatement,
    StepReport,
    UnrecordedTime,
)

FORMAT = "torchledger-report"
SCHEMA = 2
"""Goes up with every change of the layout; a migration from the older number then joins `MIGRATIONS`."""

_COUNT = integer()
_COUNTS = mapping(_COUNT)
_RANKS = {word: rank for rank, word in enumerate(PHASES + CATEGORIES)}
_IN_ORDER = ("by_module", "by_parameter", "parameters")
"""Tables whose order says something: modules and parameters as they first came."""


def encode_run(run: RunStatement, *, journal: bool = False) -> dict[str, Any]:
    """The run as a dict that JSON can hold; tables are sorted, save those whose order says something.

    >>> encode_run(RunStatement())["schema"]
    2
    """
    document = {
        "format": FORMAT,
        "schema": SCHEMA,
        "n_steps": run.n_steps,
        "peak_step": run.peak_step.index if run.peak_step else None,
        "environment": _encode(run.environment),
        "unrecorded": _encode(run.unrecorded),
        "faults": _encode(run.faults),
        "flops": _encode(run.flops),
        "steps": _encode(run.steps),
        "remainder": _encode(run.remainder),
        "growing": _encode(run.growing),
        "blind_spots": _encode(run.blind_spots),
    }
    if journal:
        document["journals"] = {str(index): encode_journal(run.journals[index]) for index in sorted(run.journals)}
    return document


def decode_run(document: object) -> RunStatement:
    """The run that `encode_run` made a dict of, or that an older torchledger did.

    Raises:
        ReportFileError: the document is no report, is damaged, or is of a newer schema; with the path inside it.

    >>> decode_run(encode_run(RunStatement())) == RunStatement()
    True
    >>> decode_run({"format": "torchledger-report", "schema": 3})
    Traceback (most recent call last):
    torchledger.errors.ReportFileError: written by a newer torchledger (schema 3; this one reads up to 2)...
    """
    entries = _migrate(document)
    journals = as_object(entries.pop("journals", {}), "journals")
    fields: dict[str, Any] = record(dict, _RUN)(entries, "")
    del fields["format"], fields["schema"]
    indices = [step.index for step in fields["steps"]]
    if indices != sorted(set(indices)):
        raise refuse("steps", "are not in the order of their indices")
    known = set(map(str, indices))
    for key in journals:
        if key not in known:
            raise refuse(at_key("journals", key), "belongs to no step of the report")
    fields["journals"] = {int(key): decode_journal(value, at_key("journals", key)) for key, value in journals.items()}
    index = fields.pop("peak_step")
    run = RunStatement(**fields, peak_step=next((step for step in fields["steps"] if step.index == index), None))
    if index != (run.peak_step.index if run.peak_step else None):
        raise refuse("peak_step", f"is {shown(index)}, which is not the step with the highest peak")
    problem = check_run(run)
    if problem:
        raise refuse("", f"the report {problem}")
    return run


def dump_run(run: RunStatement, *, journal: bool = False) -> str:
    """The run as JSON text: ASCII, innermost tables on a line each, the same text for the same run.

    >>> dump_run(RunStatement()).splitlines()[1]
    ' "format": "torchledger-report",'
    """
    document = encode_run(run, journal=journal)
    journals = document.pop("journals", None)
    lines = _pretty(document, "\n")
    if journals is not None:
        packed = json.dumps(journals, separators=(",", ":"), allow_nan=False)
        lines = f'{lines.removesuffix("}").rstrip()},\n "journals": {packed}\n}}'
    return lines + "\n"


def _encode(value: object, *, in_order: bool = False) -> Any:
    if dataclasses.is_dataclass(value):
        return {
            field.name: _encode(getattr(value, field.name), in_order=field.name in _IN_ORDER)
            for field in dataclasses.fields(value)
            if field.name != "timeline_source"
        }
    if isinstance(value, dict):
        keys = list(value) if in_order else sorted(value, key=lambda key: (_RANKS.get(key, len(_RANKS)), key))
        return {key: _encode(value[key]) for key in keys}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    return value


def _pretty(value: Any, newline: str) -> str:
    """JSON text with a line for each entry, down to the tables that hold none; ``newline`` carries the indent."""
    entries = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    if not any(isinstance(entry, dict | list) for entry in entries):
        return json.dumps(value, allow_nan=False)
    within = newline + " "
    texts = [_pretty(entry, within) for entry in entries]
    if isinstance(value, dict):
        texts = [f"{json.dumps(key)}: {text}" for key, text in zip(value, texts, strict=True)]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return opening + within + f",{within}".join(texts) + newline + closing


def _migrate(document: object) -> dict[str, Any]:
    """A copy of the document in today's schema."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ReportFileError(
            f'not a torchledger report: it has no "format": "{FORMAT}". '
            "Give a file that Report.save or torchledger run --json wrote."
        )
    schema = document.get("schema")
    if isinstance(schema, bool) or not isinstance(schema, int) or (schema < SCHEMA and schema not in MIGRATIONS):
        raise refuse("schema", f"is {shown(schema)}, but must be a number from 1 to {SCHEMA}")
    if schema > SCHEMA:
        raise ReportFileError(
            f"written by a newer torchledger (schema {shown(schema)}; this one reads up to {SCHEMA}). "
            "Upgrade torchledger to read it."
        )
    entries = dict(document)
    while schema < SCHEMA:
        entries = MIGRATIONS[schema](entries)
        schema += 1
        entries["schema"] = schema
    return entries


_PHASE = one_of(("", *PHASES))

_SPLIT = checked(
    record(FlopSplit, dict.fromkeys((*PHASES, "self_total"), _COUNT)),
    check_split,
)

_PRODUCTS = record(ParameterFlops, dict.fromkeys(("forward", "input_grad", "weight_grad", "recompute"), _COUNT))

_FLOPS: Reader[FlopStatement] = checked(
    record(
        FlopStatement,
        {
            **dict.fromkeys(("total", "model", *PHASES, "attention_rescore", "causal_model"), _COUNT),
            **dict.fromkeys(("int_ops", "approximate", "upper_bound", "compiled_regions", "global_excess"), _COUNT),
            **dict.fromkeys(("by_op", "by_dtype", "uncounted", "compiled_in"), _COUNTS),
            "by_module": mapping(_SPLIT),
            "by_parameter": mapping(_PRODUCTS),
        },
    ),
    check_flops,
)

_ALLOCATION = checked(
    record(
        Allocation,
        {
            "nbytes": _COUNT,
            "category": one_of(CATEGORIES),
            "phase": _PHASE,
            "module": text,
            "op": text,
            "shape": array(_COUNT),
            "dtype": text,
            "n_blocks": integer(1),
            "where": optional(text),
        },
    ),
    check_allocation,
)

_SNAPSHOT = checked(
    record(
        MemorySnapshot,
        {
            "total_bytes": _COUNT,
            **dict.fromkeys(CATEGORIES, _COUNT),
            # What an allocator counts, less what the ledger does: below 0 where the ledger counts too much.
            "unexplained": integer(None),
            "by_module": mapping(integer(None)),
            "phase": _PHASE,
            "module": text,
            "op": text,
            "largest": array(_ALLOCATION),
            **dict.fromkeys(("gradient_elements", "optimizer_scalars", "mapped_bytes"), _COUNT),
        },
    ),
    check_snapshot,
)

_COPIES = record(
    Copies, {"kind": one_of(("layout", "dtype", "device")), "nbytes": _COUNT, "calls": _COUNT, "module": text}
)

_MEMORY = checked(
    record(
        MemoryStatement,
        {
            **dict.fromkeys(("start", "end", "peak"), _SNAPSHOT),
            "peak_by_phase": mapping(_SNAPSHOT, PHASES),
            "copies": array(_COPIES),
            **dict.fromkeys(("requested_peak_bytes", "allocated_peak_bytes", "reserved_peak_bytes"), _COUNT),
            "category_peaks": mapping(integer(None), CATEGORIES),
            "external_bytes": _COUNT,
            "notes": array(text),
        },
    ),
    check_memory,
)

_PARAMETER = record(
    ParameterEvidence,
    {
        **dict.fromkeys((field.name for field in dataclasses.fields(ParameterEvidence)), _COUNT),
        **dict.fromkeys(("dtype", "device", "op"), text),
        "trainable": flag,
        "read_as": one_of(READ_AS),
    },
)

_EVIDENCE = record(
    StepEvidence,
    {
        "parameters": mapping(_PARAMETER),
        **dict.fromkeys(("attention", "other_products", "double_backward", "recompute_due"), _COUNT),
        "tokens": optional(_COUNT),
        "tokens_from": text,
        "sequence_length": _COUNT,
    },
)

_AUDIT = record(
    AuditRow, {**dict.fromkeys(("op", "module"), text), "phase": _PHASE, **dict.fromkeys(("nbytes", "calls"), _COUNT)}
)

_AUDITED_PEAK = record(
    AuditedPeak,
    {**dict.fromkeys(("op", "module"), text), "phase": _PHASE, "total_bytes": _COUNT, "inside_bytes": _COUNT},
)

_STEP = record(
    StepReport,
    {
        "index": _COUNT,
        "tokens": optional(_COUNT),
        "duration_s": real,
        "flops": checked(_FLOPS, check_tree),
        "memory": mapping(_MEMORY),
        "evidence": _EVIDENCE,
        "audit": array(_AUDIT),
        "audited_peak": optional(_AUDITED_PEAK),
        "notes": array(text),
    },
)

_GROWTH = record(
    Growth,
    {
        "category": one_of(CATEGORIES),
        **dict.fromkeys(("module", "op"), text),
        **dict.fromkeys(("bytes_per_step", "since_step"), _COUNT),
        "shape": array(_COUNT),
        "dtype": text,
        "where": optional(text),
    },
)

_RUN = {
    "format": text,
    "schema": _COUNT,
    "n_steps": _COUNT,
    "peak_step": optional(_COUNT),
    "environment": mapping(plain),
    "unrecorded": record(UnrecordedTime, {"n_steps": _COUNT, "duration_s": real, "tokens": optional(_COUNT)}),
    "faults": array(text),
    # Modules can be found late, so that a sum over steps need not be a tree.
    "flops": _FLOPS,
    "steps": array(_STEP),
    "remainder": optional(_STEP),
    "growing": array(_GROWTH),
    "blind_spots": array(text),
}
