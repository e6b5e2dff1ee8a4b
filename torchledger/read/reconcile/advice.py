"""What would lower a peak, from what lies there."""

from __future__ import annotations

from math import prod

from torchledger.journal.evidence import StepEvidence
from torchledger.journal.statements import Allocation, MemorySnapshot
from torchledger.units import format_bytes

_LOSSES = ("softmax", "nll_loss", "cross_entropy", "_loss")
_STATES = ("parameters", "gradients", "optimizer_state", "buffers")


def weigh(category: str, snapshot: MemorySnapshot) -> tuple[bool, int]:
    """How much a category matters: what a step makes comes before the model's states, if it is a tenth of the total."""
    nbytes = snapshot.by_category[category]
    return (category not in _STATES and nbytes * 10 >= snapshot.total_bytes, nbytes)


def give_advice(phase: str, category: str, snapshot: MemorySnapshot, evidence: StepEvidence, device: str) -> str:
    """What would lower a peak whose most telling category is this one, in words."""
    logits = find_logits(snapshot)
    of_logits = sum(row.nbytes for row in logits)
    if category in ("activations", "temporaries") and 2 * of_logits >= snapshot.by_category[category]:
        n = sum(row.n_blocks for row in logits)
        held = f"{n} of {' x '.join(f'{size:,}' for size in logits[0].shape)} at once, {format_bytes(of_logits)}"
        return f"compute the loss in chunks of rows: logits and their gradients are there more than once ({held})"
    if category == "activations":
        if phase == "recompute":
            return "checkpoint smaller segments: all that one of them saves is there at once"
        return "checkpoint activations, use a smaller batch, or keep them in 16 bits (autocast)"
    if category == "temporaries":
        if phase == "optimizer":
            return "a fused optimizer (fused=True), or foreach=False: the foreach lists are transient"
        return "a smaller batch, or kernels that hold less inside: nothing needs these once the op is over"
    if category == "autocast_copies":
        return "keep the weights themselves in 16 bits, with an fp32 master in the optimizer"
    if category == "inputs":
        return "a smaller batch, or one that is brought to the device when it is needed"
    if category in _STATES:
        return _of_states(category, phase, snapshot, evidence, device)
    return "look at its rows in the report: what is kept, and by whom"


def find_logits(snapshot: MemorySnapshot) -> list[Allocation]:
    """The rows of loss ops, and what another op made once in that very size: logits and what is made of them."""
    rows = [row for row in snapshot.largest if row.category not in _STATES and row.category != "inputs"]
    of_losses = [row for row in rows if any(word in row.op for word in _LOSSES)]
    # Attention's softmax is one too, but what has its size is not all of one step's rows.
    of_losses = [row for row in of_losses if not row.op.startswith(("aten._softmax", "aten._safe_softmax"))]
    if not of_losses:
        return []
    size = max(prod(row.shape) for row in of_losses)
    rows = [row for row in rows if prod(row.shape) == size]
    # What several layers make is no logits, though it may have their size.
    once = {op for op in {row.op for row in rows} if sum(row.n_blocks for row in rows if row.op == op) == 1}
    return sorted((row for row in rows if row in of_losses or row.op in once), key=lambda row: len(row.shape))


def _of_states(category: str, phase: str, snapshot: MemorySnapshot, evidence: StepEvidence, device: str) -> str:
    if category == "buffers":
        return "look at its rows in the report: which buffers are kept on the device, and need to be"
    frozen = sum(p.nbytes for p in evidence.parameters.values() if not p.trainable and p.device == device)
    if 2 * frozen > sum(snapshot.by_category[name] for name in _STATES):
        wide = sorted({p.dtype for p in evidence.parameters.values() if not p.trainable and p.device == device})
        return (
            f"keep the frozen weights in fewer bits: {format_bytes(frozen)} in {', '.join(wide)}, which no optimizer "
            f"touches (bfloat16, 8 or 4 bits)"
        )
    if category == "gradients":
        if phase == "forward":
            return "zero_grad(set_to_none=True) before the forward, or fewer accumulated gradients in fp32"
        return (
            "use each gradient as soon as it is there (an optimizer in a hook of the backward), or shard them (ZeRO-2)"
        )
    return "shard the states (ZeRO), or a recipe of fewer bytes a parameter (torchledger fit --recipe)"
