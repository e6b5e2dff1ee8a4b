"""Reports made by hand, whose numbers add up: input for renderers, schema and command line."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from torchledger.journal.entries import (
    GRADIENT,
    LATE,
    PARAMETER,
    Batch,
    Block,
    DeviceReading,
    Journal,
    Link,
    Mark,
    ParameterRow,
    Product,
    Reader,
)
from torchledger.journal.statements import (
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
from torchledger.read.totals import FlopTotals
from torchledger.report import Report

MIB = 2**20


def make_flops(own: dict[str, dict[str, int]], *, rescore: int = 0, **more: object) -> FlopStatement:
    """A statement from each module's own FLOPs by phase."""
    phases = {phase: sum(split.get(phase, 0) for split in own.values()) for phase in PHASES}
    total = sum(phases.values())
    modules = {}
    for path, split in own.items():
        below = [
            s for p, s in own.items() if p == path or (p != "(outside)" and (p.startswith(f"{path}.") or not path))
        ]
        inclusive = {phase: sum(s.get(phase, 0) for s in below) for phase in PHASES}
        modules[path] = FlopSplit(**inclusive, self_total=sum(split.values()))
    model = total - phases["recompute"] - rescore
    fields = {"by_op": {"aten.addmm": total // 3, "aten.mm": total - total // 3}, "by_dtype": {"float32": total}}
    fields |= {"by_module": modules, "causal_model": model, **more}
    return FlopStatement(total=total, model=model, attention_rescore=rescore, **phases, **fields)  # type: ignore[arg-type]


def gpt_flops(*, n_blocks: int = 12, recompute: bool = True, scale: int = 1) -> FlopStatement:
    """A model of equal blocks, an embedding that costs nothing and a head."""
    own: dict[str, dict[str, int]] = {"": {}, "wte": {}}
    for block in range(n_blocks):
        for name, n in (
            ("attn.qkv", 3_000_001),
            ("attn.proj", 1_000_003),
            ("mlp.fc", 4_000_007),
            ("mlp.proj", 4_000_007),
        ):
            split = {"forward": n * scale, "backward": 2 * n * scale}
            own[f"blocks.{block}.{name}"] = split | ({"recompute": n * scale} if recompute else {})
        own[f"blocks.{block}.attn"] = {"forward": 500_000 * scale, "backward": 1_250_000 * scale}
        for path in (f"blocks.{block}", f"blocks.{block}.mlp", f"blocks.{block}.ln"):
            own[path] = {}
    own["head"] = {"forward": 7_777_777 * scale, "backward": 15_555_554 * scale}
    own["(outside)"] = {"outside": 12_345 * scale, "optimizer": 17 * scale}
    weight = ParameterFlops(forward=3_000_001, input_grad=3_000_001, weight_grad=3_000_001)
    return make_flops(own, rescore=n_blocks * 250_000 * scale, by_parameter={"blocks.0.attn.qkv.weight": weight})


def make_snapshot(by_module: dict[str, int] | None = None, **categories: int) -> MemorySnapshot:
    total = sum(categories.values())
    modules = {"": total} if by_module is None else by_module
    return MemorySnapshot(total_bytes=total, by_module=modules, **categories)  # type: ignore[arg-type]


def gpt_memory(*, activations: int = 300 * MIB + 12, unexplained: int = 0) -> MemoryStatement:
    """The bytes of one step; the peak lies in the backward."""
    at_rest = {"parameters": 100 * MIB + 4, "buffers": 4096, "optimizer_state": 200 * MIB + 8, "inputs": 8192}
    start = make_snapshot(**at_rest, unexplained=unexplained)
    forward = replace(make_snapshot(**at_rest, activations=activations), phase="forward", module="head", op="aten.mm")
    categories = at_rest | {"gradients": 50 * MIB, "activations": activations, "temporaries": 40 * MIB}
    total = sum(categories.values()) + unexplained
    blocks = {f"blocks.{block}.mlp": activations // 20 for block in range(12)}
    rest = total - sum(blocks.values()) - 77 - (100 * MIB + 4)
    largest = (
        Allocation(100 * MIB, "parameters", "outside", "wte", "aten.empty", (50257, 768), "float32"),
        Allocation(12 * MIB, "activations", "forward", "blocks.0.mlp", "aten.addmm", (8, 1024, 3072), "float32", 12),
    )
    peak = replace(
        make_snapshot(by_module={"": 77, "wte": 100 * MIB + 4, **blocks, "(outside)": rest}, **categories),
        phase="backward",
        module="blocks.11.mlp",
        op="aten.mm",
        largest=largest,
        unexplained=unexplained,
        total_bytes=total,
    )
    step = replace(make_snapshot(**at_rest, gradients=100 * MIB + 4), phase="optimizer", op="aten._foreach_add_")
    return MemoryStatement(
        start=start,
        end=start,
        peak=peak,
        peak_by_phase={"forward": forward, "backward": peak, "optimizer": step},
        copies=(
            Copies("layout", 3 * MIB, 12, "blocks.0.attn"),
            Copies("dtype", MIB, 2, "head"),
            Copies("device", 8192, 1, "(outside)"),
        ),
        requested_peak_bytes=total,
        allocated_peak_bytes=total,
        reserved_peak_bytes=total,
        category_peaks=peak.by_category | {"gradients": 100 * MIB + 4},
        external_bytes=65536,
        notes=("memory inside compiled regions is not known",),
    )


def make_report(*steps: StepReport, **more: object) -> Report:
    totals = FlopTotals()
    for step in steps:
        totals.add(step.flops)
    fields: dict[str, object] = {"n_steps": len(steps), "flops": totals.statement(), "environment": {"torch": "2.13.0"}}
    return Report(steps=steps, **(fields | more))  # type: ignore[arg-type]


def gpt_report(*, n_steps: int = 3, recompute: bool = True, device: str = "cpu", **more: object) -> Report:
    """Some equal steps; the highest peak is in the second."""
    activations = (100 if recompute else 300) * MIB
    steps = []
    for index in range(n_steps):
        memory = {device: gpt_memory(activations=activations + 4 * (index == 1))}
        if device != "cpu":
            memory["cpu"] = MemoryStatement(
                start=make_snapshot(inputs=64), end=make_snapshot(inputs=64), peak=make_snapshot(inputs=96)
            )
        steps.append(StepReport(index, 8192, 0.125, gpt_flops(recompute=recompute), memory))
    return make_report(*steps, **more)


def utilized_report() -> Report:
    """A report with all that MFU asks for."""
    environment = {"torch": "2.13.0", "accelerator": "h100-sxm", "dtype": "bf16"}
    return gpt_report(device="cuda:0", environment=environment, unrecorded=UnrecordedTime(4, 2e-5, 4 * 8192))


def make_journal(index: int = 1) -> Journal:
    """One block that was carried, one met late, two that came, of which one went."""
    return Journal(
        index=index,
        first=10,
        carried={3: tuple(Block(4, "cpu", "outside", 0, "", (1,), "float32"))},
        blocks=[
            tuple(Block(8, "cpu", "outside", 0, "", (2,), "float32", 0)),
            tuple(Block(16, "cpu", "forward", 1, "aten.mm", (2, 2), "float32")),
            tuple(Block(32, "cpu", "forward", 1, "aten.relu", (), "bfloat16")),
        ],
        events=[11, 12, ~11, ~3],
        marks=[tuple(Mark(0, "phase", "forward")), tuple(Mark(2, "backward"))],
        roles={3: PARAMETER, 10: LATE, 11: GRADIENT},
        products=[
            tuple(Product("aten.mm", "float32", "forward", 1, 64, 0, 0, ((0, "forward", 64),))),
            tuple(Product("aten.bmm", "float32", "forward", 1, 8, link=tuple(Link(-1, 5, 0, 0, (32,), (2, 4, 4))))),
        ],
        copies=[("dtype", "cpu", 8, 1)],
        uncounted={"mylib.op": 2},
        modules=["(outside)", "fc"],
        parameters=["fc.weight"],
        sites=["train.py:3"],
        inplace_adds=[(1, 11)],
        readings={"cuda:0": DeviceReading(1, 2, 1, 3, 4, 0)},
        compiled=[1],
        global_excess=3,
        segments=[1],
        enclosing=[-1],
        parameter_rows=[ParameterRow(0, 4, 2, 16, "float32", "cpu", True, "Linear", "weight")],
        readers=[Reader(0, "aten.mm", "product", 1, 2)],
        batches=[Batch(1, True, (2, 4), (2, 4))],
    )


def with_peak(report: RunStatement, factor: Fraction) -> Report:
    """The report with the bytes of every step scaled, as if an edited file gave another peak."""
    steps = []
    for step in report.steps:
        memory = {}
        for device, statement in step.memory.items():
            peak = statement.peak
            change = int(peak.total_bytes * factor) - peak.total_bytes
            lowered = replace(
                peak,
                total_bytes=peak.total_bytes + change,
                activations=peak.activations + change,
                by_module={**peak.by_module, "": peak.by_module.get("", 0) + change},
                largest=(),
            )
            peaks = statement.category_peaks | {"activations": statement.category_peaks["activations"] + change}
            same = {f"{name}_peak_bytes": lowered.total_bytes for name in ("requested", "allocated", "reserved")}
            memory[device] = replace(
                statement, peak=lowered, peak_by_phase={}, category_peaks=peaks, start=lowered, end=lowered, **same
            )
        steps.append(replace(step, memory=memory))
    return make_report(*steps, environment=report.environment)
