"""MFU and HFU of a run, where its time and its accelerator are known; otherwise the reason why they are not."""

from __future__ import annotations

from dataclasses import dataclass

from torchledger.analytic.utilization import hfu, mfu
from torchledger.errors import TorchledgerError
from torchledger.journal.statements import RunStatement


@dataclass(frozen=True, slots=True)
class Utilization:
    """Shares of the dense peak, 1.0 being all of it: ``None`` where unknown, for the ``reason`` given.

    ``seconds`` is the wall time of one unrecorded step, 0.0 where none was timed.
    """

    mfu: float | None
    hfu: float | None
    reason: str
    seconds: float = 0.0


def read_utilization(run: RunStatement) -> Utilization:
    """MFU and HFU of one device, from the time of steps that were not recorded and the FLOPs of those that were.

    Recorded steps are slower than the program is by itself, so their time is never used. Where the tokens of all steps
    are known, the FLOPs are scaled by them; else a step that was not recorded counts as the mean of those that were.

    >>> read_utilization(RunStatement()).reason
    'no step was recorded'
    """
    time = run.unrecorded
    seconds = time.duration_s / time.n_steps if time.n_steps else 0.0
    accelerator, dtype = run.environment.get("accelerator"), run.environment.get("dtype")
    if run.n_steps == 0:
        return Utilization(None, None, "no step was recorded", seconds)
    if not isinstance(accelerator, str) or not accelerator:
        return Utilization(None, None, "the accelerator is not known", seconds)
    if not isinstance(dtype, str) or not dtype:
        return Utilization(None, None, "the dtype of the products is not known", seconds)
    if time.n_steps == 0 or time.duration_s <= 0:
        reason = "no step ran unrecorded, and recording slows a step down: leave some out with a schedule"
        return Utilization(None, None, reason, seconds)
    model, total = _flops_of_unrecorded(run)
    try:
        return Utilization(
            mfu(model, time.duration_s, accelerator=accelerator, dtype=dtype),
            hfu(total, time.duration_s, accelerator=accelerator, dtype=dtype),
            "",
            seconds,
        )
    except TorchledgerError as error:
        return Utilization(None, None, error.message.rstrip("."), seconds)


def _flops_of_unrecorded(run: RunStatement) -> tuple[float, float]:
    """Model and hardware FLOPs of the steps that were timed."""
    tokens = [step.tokens for step in run.steps]
    known = sum(n for n in tokens if n is not None)
    if run.unrecorded.tokens and known and None not in tokens:
        flops = [step.flops for step in run.steps]
        scale = run.unrecorded.tokens / known
        return sum(f.model for f in flops) * scale, sum(f.total for f in flops) * scale
    scale = run.unrecorded.n_steps / run.n_steps
    return run.flops.model * scale, run.flops.total * scale
