"""FLOPs of a transformer's matrix products, forward and in training, as exact integers (1 multiply-add = 2 FLOP).

The letters are those of `torchledger.analytic.architecture`. Every weight product reads D = B·T rows; attention's two
products go over pairs of a query and a key.
"""

from __future__ import annotations

from typing import TypedDict, Unpack

from torchledger.analytic.architecture import Architecture, count_parameters
from torchledger.errors import UsageError

CHECKPOINTS = ("none", "selective", "full")
ATTENTIONS = ("math", "fused")


class ExecutionOptions(TypedDict, total=False):
    """How a training step is executed and counted, where it is not plainly.

    Args:
        attention: ``math``; or ``fused``, whose backward computes the scores once more.
        early_stop: whether recompute ends with the last tensor that backward needs, as in a non-reentrant checkpoint,
            rather than with the segment.
        causal: count only the pairs of a query and a key that a causal mask (and a window) leaves, in place of the
            full square.
    """

    attention: str
    early_stop: bool
    causal: bool


def count_pairs(seq: int, *, causal: bool, window: int = 0) -> int:
    """Pairs of a query and a key in one sequence: the full square, or only those that a causal mask leaves.

    Args:
        seq: T.
        causal: whether a query meets only keys up to its own; a window counts only then.
        window: how many keys a query meets at most; 0 is all.

    >>> count_pairs(4, causal=False), count_pairs(4, causal=True), count_pairs(4, causal=True, window=2)
    (16, 10, 7)
    """
    if not causal:
        return seq * seq
    reach = min(window or seq, seq)
    return reach * (reach + 1) // 2 + (seq - reach) * reach


def forward_flops_by_part(a: Architecture, batch: int, seq: int, *, causal: bool = False) -> dict[str, int]:
    """FLOPs of a forward pass by part, of all layers together; they add up to the whole.

    >>> gpt = Architecture(vocabulary=8, width=4, n_layers=1, n_heads=1, max_seq=2)
    >>> forward_flops_by_part(gpt, 1, 2)
    {'projections': 256, 'scores': 32, 'values': 32, 'routers': 0, 'feed_forward': 512, 'head': 128}
    """
    a.check_seq(batch, seq)
    counts = count_parameters(a)
    tokens = batch * seq
    per_product = 2 * batch * a.n_layers * a.q_width * count_pairs(seq, causal=causal, window=a.window)
    return {
        "projections": 2 * tokens * counts.attention,
        "scores": per_product,
        "values": per_product,
        "routers": 2 * tokens * counts.routers,
        "feed_forward": 2 * tokens * (counts.feed_forward + _active_experts(a, counts.experts)),
        "head": 2 * tokens * counts.head,
    }


def _active_experts(a: Architecture, experts: int) -> int:
    return experts // a.n_experts * a.n_active_experts if a.n_experts else 0


def training_flops_by_cause(
    a: Architecture,
    batch: int,
    seq: int,
    checkpoint: str = "none",
    *,
    attention: str = "math",
    early_stop: bool = False,
    causal: bool = False,
) -> dict[str, int]:
    """FLOPs of a training step by what makes them; they add up to what the hardware executes.

    Args:
        a: the model.
        batch: B.
        seq: T.
        checkpoint: ``none``; ``selective``, attention's two products once more; ``full``, every layer once more.
        attention: see `ExecutionOptions`.
        early_stop: likewise.
        causal: likewise.

    Raises:
        UsageError: there is no such checkpointing or attention, or the model cannot take such a batch.

    >>> gpt = Architecture(vocabulary=8, width=4, n_layers=1, n_heads=1, max_seq=2)
    >>> training_flops_by_cause(gpt, 1, 2, "full", early_stop=True)
    {'forward': 960, 'backward': 1920, 'recompute': 832, 'early_stop': -256, 'attention_rescore': 0}
    """
    check_word("checkpoint", checkpoint, CHECKPOINTS)
    check_word("attention", attention, ATTENTIONS)
    parts = forward_flops_by_part(a, batch, seq, causal=causal)
    forward = sum(parts.values())
    core = parts["scores"] + parts["values"]
    recompute = {"none": 0, "selective": core, "full": forward - parts["head"]}[checkpoint]
    saved = _saved_by_early_stop(a, parts, checkpoint, attention) if early_stop else 0
    return {
        "forward": forward,
        "backward": 2 * forward,
        "recompute": recompute,
        "early_stop": -saved,
        "attention_rescore": parts["scores"] if attention == "fused" else 0,
    }


def _saved_by_early_stop(a: Architecture, parts: dict[str, int], checkpoint: str, attention: str) -> int:
    """What comes after the last tensor that backward needs of a segment.

    A layer ends with the second product of its feed-forward network, unless a dropout (whose mask is saved) or the
    weighted sum of experts follows; attention's core ends with its second product, unless one kernel does it all.
    """
    if checkpoint == "selective":
        return parts["values"] if attention == "math" else 0
    if checkpoint == "none" or a.dropout or a.n_experts:
        return 0
    return parts["feed_forward"] // a.n_ff_matrices


def bridge_from_6nd(
    a: Architecture, batch: int, seq: int, checkpoint: str = "none", **how: Unpack[ExecutionOptions]
) -> dict[str, int]:
    """What leads from 6·N·D to the FLOPs of a training step, by cause: 6·N·D and all terms add up to them.

    Args and Raises: those of `training_flops_by_cause`.

    >>> gpt = Architecture(vocabulary=8, width=4, n_layers=1, n_heads=1, max_seq=2)
    >>> terms = bridge_from_6nd(gpt, 1, 2)
    >>> terms["attention"], terms["embeddings"], terms["norms"], terms["biases"]
    (192, -96, -288, -432)
    >>> 6 * count_parameters(gpt).total * 2 + sum(terms.values()) == 3 * 960
    True
    """
    causes = training_flops_by_cause(a, batch, seq, checkpoint, **how)
    parts = forward_flops_by_part(a, batch, seq, causal=how.get("causal", False))
    counts = count_parameters(a)
    six_d = 6 * batch * seq
    return {
        "attention": 3 * (parts["scores"] + parts["values"]),
        "embeddings": -six_d * counts.looked_up,
        "norms": -six_d * counts.norms,
        "biases": -six_d * counts.biases,
        "inactive_experts": -six_d * (counts.experts - _active_experts(a, counts.experts)),
        "recompute": causes["recompute"],
        "early_stop": causes["early_stop"],
        "attention_rescore": causes["attention_rescore"],
    }


def check_word(name: str, value: str, known: tuple[str, ...]) -> None:
    """Refuses a word that is none of those known.

    Raises:
        UsageError: it is not.

    >>> check_word("checkpoint", "full", CHECKPOINTS)
    """
    if value not in known:
        raise UsageError(f"{name} must be {', '.join(known[:-1])} or {known[-1]}, not {value!r}.")
