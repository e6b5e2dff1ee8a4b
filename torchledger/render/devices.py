"""The tables of accelerators and of number formats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torchledger.accelerators import RATE_NAMES, Accelerator
from torchledger.analytic.dtypes import NumberFormat
from torchledger.render.tables import Column, Facts, Section, Table
from torchledger.units import format_count

_NONE = "-"
# On a narrow page the rates that fewest chips have go first.
_DROPS = {"fp16_fp16": 9, "fp8_fp16": 9, "fp64": 8, "fp64_tensor": 8, "int4": 7, "fp4": 6, "fp32": 5, "tf32": 4}


def accelerator_sections(entries: Iterable[Accelerator]) -> tuple[Section, ...]:
    """Dense peaks, peaks with sparsity, memory and sources, each in a table of its own.

    >>> from torchledger.accelerators import ACCELERATORS
    >>> [section.title.split(",")[0] for section in accelerator_sections(ACCELERATORS.values())]
    ['Dense peaks', 'Peaks with 2:4 sparsity', 'Memory', 'Sources']
    """
    listed = list(entries)
    sparse = [entry for entry in listed if entry.sparse]
    return (
        _rate_table("Dense peaks, TFLOP/s (Tops/s for integers)", {e.name: e.dense for e in listed}),
        _rate_table(
            "Peaks with 2:4 sparsity, the figure that data sheets print first: never the divisor of an MFU",
            {e.name: e.sparse for e in sparse},
        ),
        _memory_table(listed),
        Table(
            "Sources",
            (Column("name", "text"), Column("source", "name"), Column("entered", "text", drop=1)),
            tuple((entry.name, entry.source, entry.date) for entry in listed),
        ),
    )


def accelerator_facts(entry: Accelerator) -> Facts:
    """All that is on record of one accelerator.

    >>> from torchledger.accelerators import find_accelerator
    >>> dict(accelerator_facts(find_accelerator("l4")).lines)["dense bf16"]
    '121 TFLOP/s, 242 with 2:4 sparsity; waits for memory below 403 FLOP a byte'
    """
    return Facts(f"{entry.name}: {entry.title}", tuple(_lines_of(entry)))


def _lines_of(entry: Accelerator) -> Iterator[tuple[str, str]]:
    yield "numbers are", f"for one {entry.per}"
    for name, rate in entry.dense.items():
        unit = "Tops/s" if name.startswith("int") else "TFLOP/s"
        sparse = f", {_tera(entry.sparse, name)} with 2:4 sparsity" if name in entry.sparse else ""
        bandwidth = entry.memory_bytes_per_s
        waits = f"; waits for memory below {rate / bandwidth:,.0f} {unit[1:-2]} a byte" if bandwidth else ""
        yield f"dense {name}", f"{_tera(entry.dense, name)} {unit}{sparse}{waits}"
    if entry.memory_bytes is not None:
        yield "memory", f"{format_count(entry.memory_bytes)} bytes by the data sheet"
    if entry.memory_bytes_per_s is not None:
        yield "memory bandwidth", f"{entry.memory_bytes_per_s / 1e12:g} TB/s"
    if entry.interconnect_bytes_per_s is not None:
        yield "links", f"{entry.interconnect_bytes_per_s / 1e9:g} GB/s, both directions added"
    if entry.compute_capability is not None:
        yield "compute capability", ".".join(map(str, entry.compute_capability))
    if entry.device_names:
        yield "reported as", "; ".join(entry.device_names)
    yield "source", f"{entry.source}; entered {entry.date}"


def _tera(rates: Mapping[str, float], name: str) -> str:
    return f"{rates[name] / 1e12:,.6g}" if name in rates else _NONE


def _rate_table(title: str, rates: Mapping[str, Mapping[str, float]]) -> Table:
    used = [name for name in RATE_NAMES if any(name in row for row in rates.values())]
    columns = (Column("name", "text"), *(Column(name, drop=_DROPS.get(name, 0)) for name in used))
    rows = tuple((key, *(_tera(row, name) for name in used)) for key, row in rates.items())
    return Table(title, columns, rows)


def _memory_table(entries: Iterable[Accelerator]) -> Table:
    rows = [
        (
            entry.name,
            entry.per,
            _scaled(entry.memory_bytes, 1e9),
            _scaled(entry.memory_bytes_per_s, 1e12),
            _scaled(entry.interconnect_bytes_per_s, 1e9),
        )
        for entry in entries
    ]
    columns = (Column("name", "text"), Column("for one", "text"), Column("GB"), Column("TB/s"), Column("links, GB/s"))
    return Table("Memory, its bandwidth, and links to other devices, both directions added", columns, tuple(rows))


def _scaled(value: float | None, unit: float) -> str:
    return _NONE if value is None else f"{value / unit:g}"


def format_table(formats: Iterable[NumberFormat]) -> Table:
    """Number formats by what their bits can hold.

    >>> from torchledger.analytic.dtypes import FORMATS
    >>> format_table([FORMATS["bf16"]]).rows
    (('bf16', '16', '8', '8', '3.38953e+38', '1.17549e-38', '0.0078125', '1.00117e-08'),)
    """
    rows = []
    for entry in formats:
        step = entry.relative_step
        rows.append(
            (
                entry.name,
                str(entry.bits),
                str(entry.exponent_bits),
                str(entry.significand_bits),
                f"{entry.largest:.6g}",
                f"{entry.smallest_normal:.6g}",
                _NONE if step is None else f"{step:.6g}",
                f"{entry.round(1e-8):.6g}",
            )
        )
    columns = (
        Column("dtype", "text"),
        Column("bits"),
        Column("exponent", drop=1),
        Column("significand", drop=2),
        Column("largest"),
        Column("least normal", drop=3),
        Column("step"),
        Column("1e-8 is"),
    )
    notes = (
        "significand: its bits with the leading one, which is not stored; least normal: the smallest positive number "
        "with all of them; step: the gap between 1 and the next number, and so the relative step",
        "tf32: what products read of fp32; it takes 32 bits in memory",
        "integers: their step is 1 everywhere; they come with a scale for each tensor, row or block",
    )
    return Table("Number formats", columns, tuple(rows), notes=notes)
