"""Answers of the napkin with their working: the formula, the numbers that went in, and what is left out."""

from __future__ import annotations

from dataclasses import dataclass

from torchledger.accelerators import Accelerator
from torchledger.analytic.napkin import device_hours, max_params, training_days, training_flops
from torchledger.analytic.recipes import Recipe
from torchledger.errors import UsageError
from torchledger.units import format_count, format_flops


@dataclass(frozen=True, slots=True)
class Estimate:
    """One answer.

    Args:
        title: the question.
        answer: with its unit.
        formula: in letters and words.
        numbers: the formula with the numbers filled in.
        leaves_out: what the true number has and this one has not, or the other way round.
    """

    title: str
    answer: str
    formula: str
    numbers: str
    leaves_out: tuple[str, ...]


def estimate_training_flops(n_params: int, n_tokens: int, *, what: str = "parameters") -> Estimate:
    """FLOPs of training by 6·N·D; ``what`` names the N parameters.

    >>> estimate_training_flops(70 * 10**9, 15 * 10**12).numbers
    '6 × 70,000,000,000 × 15,000,000,000,000'
    """
    flops = training_flops(n_params, n_tokens)
    return Estimate(
        title="FLOPs of training",
        answer=f"{format_count(flops)} FLOP ({format_flops(flops)})",
        formula=f"6 × {what} × tokens: 2 forward, 4 backward, 1 multiply-add = 2 FLOP",
        numbers=f"6 × {format_count(n_params)} × {format_count(n_tokens)}",
        leaves_out=(
            "attention's scores and values, which grow with the context length: 12 × layers × heads × head width × "
            "context length for each token",
            "the recompute of activation checkpointing: up to 2 × parameters × tokens",
            "and it counts tables that are only looked up, norms, biases and an input gradient of the first layer, "
            "none of which a product computes",
        ),
    )


def estimate_training_time(
    n_params: int, n_tokens: int, *, devices: int, accelerator: Accelerator, dtype: str, mfu: float
) -> tuple[Estimate, Estimate]:
    """Days on that many devices, and device-hours.

    Raises:
        UsageError: no dense peak for ``dtype`` is on record, or a number is out of its range.

    >>> from torchledger.accelerators import find_accelerator
    >>> h100 = find_accelerator("h100-sxm")
    >>> time, cost = estimate_training_time(
    ...     70 * 10**9, 15 * 10**12, devices=1024, accelerator=h100, dtype="bf16", mfu=0.5
    ... )
    >>> time.answer
    '143.92659381842682 days'
    """
    days = training_days(n_params, n_tokens, devices=devices, accelerator=accelerator, dtype=dtype, mfu=mfu)
    hours = device_hours(n_params, n_tokens, accelerator=accelerator, dtype=dtype, mfu=mfu)
    flops = format_count(training_flops(n_params, n_tokens))
    peak = f"{accelerator.peak_flops_per_s(dtype):,.0f}"
    left_out = (
        "what FLOPs of training leave out, above",
        "communication, input and idle devices, restarts and evaluation, as far as the MFU was measured without them",
    )
    time = Estimate(
        title=f"Time on {format_count(devices)} × {accelerator.name}, {dtype}",
        answer=f"{days} days",
        formula="FLOPs / (devices × dense peak FLOP/s × MFU) / 86,400",
        numbers=f"{flops} / ({format_count(devices)} × {peak} × {mfu}) / 86,400",
        leaves_out=left_out,
    )
    cost = Estimate(
        title="Cost",
        answer=f"{hours:,.0f} device-hours",
        formula="FLOPs / (dense peak FLOP/s × MFU) / 3,600, on however many devices",
        numbers=f"{flops} / ({peak} × {mfu}) / 3,600",
        leaves_out=left_out[1:],
    )
    return time, cost


def estimate_largest_model(
    *, devices: int, accelerator: Accelerator, bytes_per_param: float, recipe: Recipe | None = None, zero: int = 0
) -> tuple[Estimate, ...]:
    """The largest model whose weights, gradients and optimizer state fit, at rest and in the optimizer's step.

    Args:
        devices: how many, all alike.
        accelerator: the entry of the table; its data sheet's memory counts.
        bytes_per_param: bytes for each parameter, all parts together; ``recipe`` overrides it.
        recipe: where the bytes come from, if from one.
        zero: the ZeRO stage that spreads a recipe; 0 spreads everything evenly, as stage 3 does.

    Raises:
        UsageError: the memory of the accelerator is not on record, or a stage was given without a recipe.

    >>> from torchledger.accelerators import find_accelerator
    >>> h100 = find_accelerator("h100-sxm")
    >>> estimate_largest_model(devices=8, accelerator=h100, bytes_per_param=16)[0].answer
    '40,000,000,000 parameters'
    """
    if accelerator.memory_bytes is None:
        raise UsageError(f"the memory of {accelerator.name} is not on record.")
    cluster = _Cluster(devices, accelerator.name, accelerator.memory_bytes)
    if recipe is None:
        if zero:
            raise UsageError("a ZeRO stage spreads the parts of a recipe: name one in place of bytes a parameter.")
        return (cluster.largest("Largest model", bytes_per_param, ""),)
    spread = recipe.sharded(zero=zero, n=devices) if zero else recipe
    at_rest = cluster.largest("Largest model, at rest", spread.bytes_per_param, _parts_of(recipe), zero)
    try:
        in_step = spread.bytes_in_step()
    except UsageError:  # frozen weights, or an optimizer without a foreach implementation
        return (at_rest,)
    if in_step == spread.bytes_per_param:
        return (at_rest,)
    said = "at rest, and the temporaries of a foreach step, CUDA's default; a fused step has none"
    return at_rest, cluster.largest("Largest model, while the optimizer steps", in_step, said, zero)


def _parts_of(recipe: Recipe) -> str:
    parts = {name: getattr(recipe, name) for name in ("weights", "gradients", "master", "moments")}
    said = f"{recipe.name}: {' + '.join(f'{value} {name}' for name, value in parts.items() if value)}"
    if recipe.is_approximate:
        said += "; its moments depend on the shapes"
    if recipe.copies:
        said += f"; autocast holds {recipe.copies} more for each matmul weight between forward and backward"
    return said


@dataclass(frozen=True, slots=True)
class _Cluster:
    devices: int
    name: str
    memory: int

    def largest(self, title: str, nbytes: float, said: str, zero: int = 0) -> Estimate:
        """The largest model at so many bytes a parameter: on each device under ZeRO, else of all memory together."""
        share = 1 if zero else self.devices
        n_params = max_params(share * self.memory, nbytes)
        per_param = f"{float(nbytes):g}"
        over = f"{format_count(self.devices)} × " if not zero else ""
        where = f" on each of {format_count(self.devices)} devices, ZeRO-{zero}" if zero else ""
        return Estimate(
            title=f"{title}, on {format_count(self.devices)} × {self.name}",
            answer=f"{format_count(n_params)} parameters",
            formula=f"{'' if zero else 'devices × '}memory / bytes a parameter{where}" + (f" ({said})" if said else ""),
            numbers=f"{over}{format_count(self.memory)} / {per_param}",
            leaves_out=(
                "activations, which grow with the batch and the context length, and logits",
                "buffers of communication, workspaces, the device's context, and what an allocator rounds up",
                *(
                    ()
                    if zero
                    else ("copies that each device has for itself: everything is spread evenly, as by ZeRO-3",)
                ),
            ),
        )
