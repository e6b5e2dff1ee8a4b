"""What a journal says, settled: frozen values that can be printed, saved and compared.

Every number is an integer (times are floats) and carries its unit in its name or in its docstring: ``flops`` are
FLOP (1 multiply-add = 2), everything in a memory statement is bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchledger.errors import JournalMissingError
from torchledger.journal.entries import Journal
from torchledger.journal.evidence import StepEvidence
from torchledger.journal.rows import AuditedPeak, AuditRow, Growth

PHASES = ("forward", "backward", "recompute", "optimizer", "inference", "outside")
"""The phases of a step, in the order in which tables show them."""

CATEGORIES = (
    "parameters",
    "buffers",
    "gradients",
    "optimizer_state",
    "inputs",
    "activations",
    "autocast_copies",
    "communication",
    "unsharded_parameters",
    "temporaries",
    "workspace",
    "other",
    "unexplained",
)
"""The accounts that bytes are posted to, in the order in which tables show them."""

OUTSIDE_MODULE = "(outside)"
"""The name under which work outside any module is posted."""


@dataclass(frozen=True, slots=True)
class FlopSplit:
    """FLOPs of one module or of one step, by phase.

    ``self_total`` is what the module's own ops cost, without its children; the phase fields include the children.
    """

    forward: int = 0
    backward: int = 0
    recompute: int = 0
    optimizer: int = 0
    inference: int = 0
    outside: int = 0
    self_total: int = 0

    @property
    def total(self) -> int:
        """FLOPs of all phases."""
        return self.forward + self.backward + self.recompute + self.optimizer + self.inference + self.outside


@dataclass(frozen=True, slots=True)
class ParameterFlops:
    """FLOPs of the products in which one parameter took part.

    ``forward``: its forward products; ``recompute``: the same, run again under activation checkpointing;
    ``input_grad``: the products that give the gradient of the other operand; ``weight_grad``: those that give its own.
    """

    forward: int = 0
    input_grad: int = 0
    weight_grad: int = 0
    recompute: int = 0


@dataclass(frozen=True, slots=True)
class FlopStatement:
    """FLOPs of one step, or of several added.

    ``total`` is what the hardware executed, ``model`` leaves out recompute, ``inference`` (forwards with grad mode off
    of modules that an optimizer trains) and ``attention_rescore`` (the score product that fused attention backward runs
    again). ``causal_model`` is ``model`` with causal fused attention counted over
    its real pairs. ``int_ops`` are integer products and in no total. ``approximate`` and ``upper_bound`` are the parts
    of ``total`` that come from such formulas. ``by_module`` is inclusive: children are in their parents.
    ``total`` is this rank's; ``global_excess`` is what products of distributed tensors cost on all ranks beyond it.
    ``compiled_regions`` that ran are, by module, in ``compiled_in``.
    """

    total: int = 0
    model: int = 0
    forward: int = 0
    backward: int = 0
    recompute: int = 0
    optimizer: int = 0
    inference: int = 0
    outside: int = 0
    attention_rescore: int = 0
    causal_model: int = 0
    int_ops: int = 0
    approximate: int = 0
    upper_bound: int = 0
    compiled_regions: int = 0
    global_excess: int = 0
    by_op: dict[str, int] = field(default_factory=dict)
    by_dtype: dict[str, int] = field(default_factory=dict)
    by_module: dict[str, FlopSplit] = field(default_factory=dict)
    by_parameter: dict[str, ParameterFlops] = field(default_factory=dict)
    uncounted: dict[str, int] = field(default_factory=dict)
    compiled_in: dict[str, int] = field(default_factory=dict)

    @property
    def global_total(self) -> int:
        """``total``, with products of distributed tensors counted over the whole tensors, all ranks together."""
        return self.total + self.global_excess


@dataclass(frozen=True, slots=True)
class Allocation:
    """One row of what is alive at an instant: ``n_blocks`` equal blocks and their sum ``nbytes``.

    ``op`` made them in ``phase`` and ``module``; ``shape`` and ``dtype`` are those of the tensor that was made with the
    storage. ``where`` is the user's file and line, with ``stacks=True``.
    """

    nbytes: int
    category: str
    phase: str
    module: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    n_blocks: int = 1
    where: str | None = None


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """The bytes alive at one instant, by category; ``total_bytes`` is their sum.

    ``phase``, ``module`` and ``op`` name what ran at that instant. ``by_module`` and ``largest`` say which module made
    what is alive; ``by_module`` adds up to ``total_bytes``.
    """

    total_bytes: int = 0
    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    inputs: int = 0
    activations: int = 0
    autocast_copies: int = 0
    communication: int = 0
    unsharded_parameters: int = 0
    temporaries: int = 0
    workspace: int = 0
    other: int = 0
    unexplained: int = 0
    by_module: dict[str, int] = field(default_factory=dict)
    phase: str = ""
    module: str = ""
    op: str = ""
    largest: tuple[Allocation, ...] = ()
    gradient_elements: int = 0
    """Elements of the gradients that are there; indices of sparse ones do not count."""
    optimizer_scalars: int = 0
    """Bytes of single numbers in the optimizer's state, such as its step counts."""
    mapped_bytes: int = 0
    """Of ``parameters`` and ``buffers``, what lies in mapped files: an allocator's own count is smaller by that."""

    @property
    def by_category(self) -> dict[str, int]:
        """Bytes of each category, in table order; they add up to ``total_bytes``."""
        return {name: getattr(self, name) for name in CATEGORIES}


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies that one module made: ``kind`` is ``layout``, ``dtype`` or ``device``."""

    kind: str
    nbytes: int
    calls: int
    module: str


@dataclass(frozen=True, slots=True)
class TimelinePoint:
    """The bytes alive after one event of a step."""

    event: int
    total_bytes: int
    by_category: Mapping[str, int]
    phase: str


@dataclass(frozen=True, slots=True)
class MemoryStatement:
    """The bytes of one device in one step.

    ``start`` holds all that existed before the step, ``peak`` is the highest instant, ``end`` what is left.
    ``requested`` is what ops asked for, ``allocated`` what the allocator's blocks hold and ``reserved`` what it took
    from the driver; on CPU all three are the same. ``category_peaks`` has each category's own maximum, wherever the
    total's peak lies. ``external_bytes`` is the highest sum of storages that the allocator did not give (numpy arrays,
    mapped files), in no total.
    """

    start: MemorySnapshot = MemorySnapshot()
    end: MemorySnapshot = MemorySnapshot()
    peak: MemorySnapshot = MemorySnapshot()
    peak_by_phase: dict[str, MemorySnapshot] = field(default_factory=dict)
    copies: tuple[Copies, ...] = ()
    requested_peak_bytes: int = 0
    allocated_peak_bytes: int = 0
    reserved_peak_bytes: int = 0
    category_peaks: dict[str, int] = field(default_factory=dict)
    external_bytes: int = 0
    notes: tuple[str, ...] = ()
    """What the numbers leave out, in words (a compiled region, say)."""
    timeline_source: Callable[[], Iterator[TimelinePoint]] | None = field(default=None, repr=False, compare=False)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of parameters and buffers at the peak that lie in mapped files, and so in no allocator's count."""
        return self.peak.mapped_bytes

    def timeline(self) -> Iterator[TimelinePoint]:
        """The bytes alive after each event of the step, in order.

        Raises:
            JournalMissingError: the step's journal was not kept (only the last step's and the highest peak's are), or
                the report was saved without it.
        """
        if self.timeline_source is None:
            raise JournalMissingError()
        return self.timeline_source()


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step: its FLOPs and its bytes on each device (``"cpu"``, ``"cuda:0"``, ``"meta"``).

    ``duration_s`` is the wall time of a step that was being recorded: slower than the step by itself.
    """

    index: int
    tokens: int | None
    duration_s: float
    flops: FlopStatement
    memory: dict[str, MemoryStatement]
    evidence: StepEvidence = field(default_factory=StepEvidence)
    """Why the FLOPs are not 6·N·D: what `torchledger.reconcile` reads."""
    audit: tuple[AuditRow, ...] = ()
    """What ops held inside themselves, where the step was audited; in no total."""
    audited_peak: AuditedPeak | None = None
    """The CPU's peak with what ops held inside themselves, where the step was audited."""
    notes: tuple[str, ...] = ()
    """What is to be known of the step, in words: that it was cut short, or what a later step learnt of it."""

    @property
    def main_device(self) -> str:
        """The device with the highest peak, an accelerator before the CPU."""
        return main_device({device: m.peak.total_bytes for device, m in self.memory.items()})

    @property
    def peak(self) -> MemorySnapshot:
        """The highest instant on the main device."""
        statement = self.memory.get(self.main_device)
        return statement.peak if statement else MemorySnapshot()


def main_device(peak_bytes: Mapping[str, int]) -> str:
    """The name of the device that a report is about: the one with the highest peak, an accelerator before all others.

    >>> main_device({"cpu": 10, "cuda:0": 5, "cuda:1": 7})
    'cuda:1'
    """
    used = {device: n for device, n in peak_bytes.items() if n} or peak_bytes
    return max(sorted(used), key=lambda device: (is_accelerator(device), used[device]), default="cpu")


def is_accelerator(device: str) -> bool:
    """Whether a device is neither the CPU nor ``meta``.

    >>> is_accelerator("cuda:0"), is_accelerator("meta")
    (True, False)
    """
    return device not in ("cpu", "meta")


@dataclass(frozen=True, slots=True)
class UnrecordedTime:
    """Wall time of steps that a schedule left unrecorded, synchronised at their ends: what MFU is computed from."""

    n_steps: int = 0
    duration_s: float = 0.0
    tokens: int | None = None


@dataclass(frozen=True)
class RunStatement:
    """A whole run: the steps that were kept, and what holds over all of them.

    ``n_steps`` and ``flops`` cover every recorded step, ``steps`` those that were kept, by index: ``peak_step``, which
    has the highest peak on ``main_device``, is always among them. ``environment`` holds plain values (the keys
    ``accelerator`` and ``dtype`` are read for the utilization), ``faults`` what went wrong inside the ledger itself,
    and ``journals`` the journals behind ``timeline()``, by step index.
    ``remainder`` is what ran after the last step ended, None if nothing did; it is in no sum. ``growing`` names what
    grows step after step, ``blind_spots`` what ran and was not seen.
    """

    steps: tuple[StepReport, ...] = ()
    n_steps: int = 0
    environment: dict[str, Any] = field(default_factory=dict)
    flops: FlopStatement = field(default_factory=FlopStatement)
    peak_step: StepReport | None = None
    unrecorded: UnrecordedTime = UnrecordedTime()
    faults: tuple[str, ...] = ()
    remainder: StepReport | None = None
    growing: tuple[Growth, ...] = ()
    blind_spots: tuple[str, ...] = ()
    journals: Mapping[int, Journal] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        given = () if self.peak_step is None else (self.peak_step,)
        steps = {step.index: step for step in (*given, *self.steps)}
        object.__setattr__(self, "steps", tuple(steps[index] for index in sorted(steps)))
        device = self.main_device
        peaks = {step.index: step.memory[device].peak.total_bytes for step in self.steps if device in step.memory}
        most = max(peaks.values(), default=0)
        highest = [index for index, peak in peaks.items() if peak == most]
        chosen = next((step.index for step in given if step.index in highest), highest[0] if highest else None)
        object.__setattr__(self, "peak_step", None if chosen is None else steps[chosen])

    @property
    def main_device(self) -> str:
        """The device with the highest peak of all steps, an accelerator before the CPU."""
        peaks: dict[str, int] = {}
        for step in self.steps:
            for device, statement in step.memory.items():
                peaks[device] = max(peaks.get(device, 0), statement.peak.total_bytes)
        return main_device(peaks)

    @property
    def peak(self) -> MemorySnapshot:
        """The highest instant of all steps on the main device."""
        step = self.peak_step
        return step.memory[self.main_device].peak if step else MemorySnapshot()
