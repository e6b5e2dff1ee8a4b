"""``reconcile``: a step's FLOPs and bytes beside the arithmetic on a napkin, with a name for every difference."""

from __future__ import annotations

from dataclasses import dataclass

from torchledger.analytic.transformer import TransformerSpec
from torchledger.errors import UsageError
from torchledger.journal.statements import StepReport
from torchledger.read.reconcile.bridge import Bridge
from torchledger.read.reconcile.flops import flop_bridge
from torchledger.read.reconcile.memory import PhasePeak, memory_bridge, phase_peaks
from torchledger.render.bridges import reconciliation_sections
from torchledger.render.text import page_width, render_sections


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """Two bridges: from 6·N·D to the measured FLOPs, and from 16·N to the measured peak.

    ``print(reconciliation)`` shows both as tables. ``phase_peaks`` has the peak of each phase, and what would lower the
    highest.
    """

    flops: Bridge
    memory: Bridge
    phase_peaks: tuple[PhasePeak, ...] = ()

    def __str__(self) -> str:
        return render_sections(reconciliation_sections(self.flops, self.memory, self.phase_peaks), page_width())


def reconcile(
    step: StepReport,
    *,
    tokens: int | str | None = None,
    spec: TransformerSpec | None = None,
    experts: str | None = None,
) -> Reconciliation:
    """The bridges from 6·N·D to a step's FLOPs and from 16·N to its peak bytes, cause by cause.

    Each term comes from what the step itself shows: which parameters took part in which products, on how many rows, and
    with which gradients; what was recomputed; what lies between activations. What no term claims is the residual.

    Args:
        step: One of ``report.steps``, of a loaded report too.
        tokens: D; ``tokens_per_step`` if left out, else the elements of the first integer input of the model, else the
            batch size. ``"positions"``: for each parameter, the output positions that its products met. The prediction
            is then 6·ΣnD, and ``reuse`` is 0, which is what a convolutional net's FLOPs are best held against.
        spec: A model's sizes: each FLOP term then stands beside its closed form.
        experts: A regular expression that finds the names of experts' parameters, where they are neither under
            ``experts`` nor in one tensor of three dimensions.

    Raises:
        UsageError: ``step`` is no step, has no parameters, or its tokens are not known; ``spec`` or ``experts`` is of
            the wrong kind.

    Source: Kaplan et al. 2020, "Scaling laws for neural language models", section 2.1 (6·N·D); Rajbhandari et al. 2020,
    "ZeRO", section 3.1 (16·N).

    >>> from torchledger.journal.evidence import ParameterEvidence, StepEvidence
    >>> from torchledger.journal.statements import FlopStatement, MemorySnapshot, MemoryStatement
    >>> weight = ParameterEvidence(12, 2, 48, "float32", "cpu", True, "product", "aten.mm", 60, 0, 0, 0, 60, 0, 60)
    >>> step = StepReport(0, 5, 0.0, FlopStatement(total=240, forward=120, backward=120), {"cpu": MemoryStatement()},
    ...     StepEvidence({"weight": weight}))
    >>> bridge = reconcile(step).flops
    >>> bridge.predicted, [(term.name, term.value) for term in bridge.terms], bridge.residual
    (360, [('no_input_gradient', -120)], 0)
    """
    if not isinstance(step, StepReport):
        raise UsageError(
            f"reconcile({type(step).__name__}): give one step, such as report.steps[-1], or report.peak_step."
        )
    if spec is not None and not isinstance(spec, TransformerSpec):
        raise UsageError(f"reconcile(spec={type(spec).__name__}): give a torchledger.TransformerSpec.")
    return Reconciliation(
        flops=flop_bridge(step, tokens=tokens, spec=spec, experts=experts),
        memory=memory_bridge(step),
        phase_peaks=phase_peaks(step),
    )
