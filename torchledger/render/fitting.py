"""A dry run's verdict as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torchledger.read.fitting import BatchTrial, Fit
from torchledger.render.names import clean, module_label
from torchledger.render.tables import Column, Facts, Section, Table
from torchledger.units import format_bytes, format_share


def fit_sections(fit: Fit, accelerator: str) -> tuple[Section, ...]:
    """The verdict, and what would change it."""
    sections: list[Section] = [Facts(_verdict(fit, accelerator), tuple(_lines(fit)))]
    if fit.alternatives:
        rows = tuple(
            (
                other.settings or "torch's defaults",
                f"{other.replayed.reserved_bytes:,}",
                format_bytes(other.replayed.reserved_bytes),
                "fits" if other.replayed.fits else "out of memory",
            )
            for other in fit.alternatives
        )
        columns = (Column("PYTORCH_CUDA_ALLOC_CONF", "text"), Column("reserved, bytes"), Column(""), Column("", "text"))
        note = "" if fit.fits else "The requests up to where this run ended; what would have come after is not known."
        sections.append(Table("The same requests under other settings", columns, rows, notes=(note,) if note else ()))
    return tuple(sections)


def _verdict(fit: Fit, accelerator: str) -> str:
    capacity = format_bytes(fit.capacity_bytes)
    if fit.fits:
        share = format_share(fit.spare_bytes, fit.capacity_bytes)
        return f"Fits on {accelerator}: {format_bytes(fit.spare_bytes)} of {capacity} to spare ({share})"
    return (
        f"Does not fit on {accelerator}: out of memory, with {format_bytes(fit.reserved_bytes)} of {capacity} reserved"
    )


def _lines(fit: Fit) -> Iterator[tuple[str, str]]:
    yield "capacity", f"{fit.capacity_bytes:,} bytes for the allocator"
    yield "reserved", f"{fit.reserved_bytes:,} bytes at its peak"
    yield "requested", f"{fit.requested_bytes:,} bytes at the peak of the steps"
    if fit.op:
        which = "the peak lies" if fit.fits else "the highest instant before it lies"
        where = f"in {fit.phase}, {clean(fit.op)} of {module_label(fit.module)}"
        yield "where", f"{which} in step {fit.step}, {where}"
    if fit.checkpointed is not None:
        found = fit.checkpointed
        change = format_bytes(found.peak_bytes - found.measured_peak_bytes, signed=True)
        yield (
            "checkpointing",
            f"with each of the {found.n_blocks} blocks of {clean(found.group) or 'the model'} checkpointed, about "
            f"{format_bytes(found.peak_bytes)} requested at the peak ({change})",
        )


def batch_table(name: str, trials: Iterable[BatchTrial]) -> Table:
    """What came of each value that was tried."""
    rows = tuple(
        (
            f"{trial.value:,}",
            "-" if trial.reserved_bytes is None else f"{trial.reserved_bytes:,}",
            "-" if trial.reserved_bytes is None else format_bytes(trial.reserved_bytes),
            "fits" if trial.fits else "out of memory",
        )
        for trial in sorted(trials)
    )
    columns = (Column(clean(name)), Column("reserved, bytes"), Column(""), Column("", "text"))
    return Table(f"Values of {clean(name)}", columns, rows)
