"""Runs a sample of each differentiable op of torch's own test database: bytes alone, and bytes as a ledger says.

Run as a script, since importing the database changes much of torch's state. Prints JSON.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

import torchledger as tl
from oracles import profiler_peaks

SAMPLES = 1
"""Of each op, at most."""
DENSE = (True,)
"""Whether a dense gradient comes back from the loss, or an expanded one."""
TOLERANCE = 64
"""Bytes. An op may keep boxed numbers, eight bytes each."""


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def copied(value: Any) -> Any:
    """The same arguments, with each tensor that needs a gradient made by an op: no leaf, nor held by the caller."""
    if isinstance(value, torch.Tensor):
        return value.clone() if value.requires_grad and value.layout is torch.strided else value
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(copied, value))
    return type(value)(map(copied, value)) if isinstance(value, list | tuple) else value


def total(out: Any, dense: bool) -> torch.Tensor | None:
    """The sum of all outputs, from which an expanded gradient comes back, or a dense one."""
    loss = None
    for tensor in tensors_in(out):
        if not tensor.requires_grad:
            continue
        real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        real = real if real.layout is torch.strided else real.to_dense()
        part = (real.sin() if dense else real).sum()
        loss = part if loss is None else loss + part
    return loss


def program(op: Callable[..., Any], sample: Any, dense: bool) -> Callable[[], None]:
    """One forward and backward of an op."""

    def run() -> None:
        torch.manual_seed(0)
        loss = total(op(copied(sample.input), *copied(sample.args), **copied(sample.kwargs)), dense)
        if loss is not None:
            loss.backward()
        for tensor in tensors_in((sample.input, sample.args, sample.kwargs)):
            tensor.grad = None

    return run


def ledger_peak(run: Callable[[], None]) -> tuple[int, tuple[str, ...]]:
    """(peak over the start, faults) as a ledger says."""
    with tl.Ledger() as ledger:
        run()
    report = ledger.report
    memory = report.steps[-1].memory.get("cpu") if report.steps else None
    return (memory.peak.total_bytes - memory.start.total_bytes if memory else 0), tuple(map(str, report.faults))


def main() -> None:
    """Print, for each sample that differs, the peaks: least and most by the profiler, and the ledger's."""
    import torch.testing._internal.common_methods_invocations as database

    def seeded(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(0)
        return op(*args, **kwargs)

    database.wrapper_set_seed = seeded  # the database's own keeps a generator's state aside
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    gc.collect()
    gc.freeze()
    found: dict[str, Any] = {"differences": {}, "faults": {}, "skipped": {}, "n_ops": 0}
    only = sys.argv[1:]
    for op in database.op_db:
        if only and op.name not in only:
            continue
        if not op.supports_autograd or torch.float32 not in op.dtypes:
            continue
        check(op, found)
    json.dump(found, sys.stdout)


def check(op: Any, found: dict[str, Any]) -> None:
    """Run the samples of one op."""
    name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
    found["n_ops"] += 1
    torch.manual_seed(0)
    for sample in itertools.islice(op.sample_inputs("cpu", torch.float32, requires_grad=True), SAMPLES):
        for dense in DENSE:
            run = program(op, sample, dense)
            try:
                run()
            except (RuntimeError, ValueError) as error:
                found["skipped"][name] = str(error)[:100]
                continue
            least, most = profiler_peaks(run)
            ours, faults = ledger_peak(run)
            if faults:
                found["faults"][name] = faults
            if not least - TOLERANCE <= ours <= most + TOLERANCE:
                found["differences"].setdefault(name, []).append((least, most, ours))


if __name__ == "__main__":
    main()
