"""Bytes that a transformer saves for backward, tensor by tensor, as exact integers.

The letters are those of `torchledger.analytic.architecture`. The model is made of PyTorch's own ops, one kernel each:
``linear``, ``layer_norm`` or ``rms_norm``, ``gelu``/``silu``/``relu``, ``dropout``, ``softmax``, ``cross_entropy``. A
tensor that two ops save counts once; parameters, token ids, targets, the scalars of the loss and the seeds of random
generators do not count. What each op saves is in its derivative (tools/autograd/derivatives.yaml of PyTorch); the sum
for a GPT layer is that of Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models",
section 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torchledger.analytic.architecture import Architecture
from torchledger.analytic.products import ATTENTIONS, CHECKPOINTS, check_word
from torchledger.errors import UsageError

CONVENTIONS = ("cuda", "cpu", "meta", "paper")
_INDEX_BYTES = 8
_LOGSUMEXP_BYTES = 4
_PADDED = 32


class Saved(NamedTuple):
    """Tensors of one kind: their bytes on one device, were nothing split.

    ``split`` is how tensor parallelism treats them: ``heads`` (over the ranks), ``rows`` (only with sequence
    parallelism), ``never``. ``in_core`` says that selective recomputation makes them again.
    """

    name: str
    nbytes: int
    split: Literal["heads", "rows", "never"] = "heads"
    in_core: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """How tensors are saved.

    Args:
        element: bytes of an element of an activation.
        convention: whose kernels: ``cuda`` (dropout masks of one byte, statistics of norms in fp32), ``cpu`` (masks and
            statistics in the activations' dtype), ``meta`` (masks in that dtype, statistics in fp32), ``paper``
            (Korthikanti et al.: masks of one byte; no statistics, causal mask or indices). RMS norms are one kernel on
            CUDA, several ops elsewhere.
        attention: ``math`` (scores in memory) or ``fused``.
        causal_mask: whether each layer of ``math`` attention makes a mask of bools.

    Raises:
        UsageError: a word is not known, or there is no such fused attention.
    """

    element: int
    convention: str = "cuda"
    attention: str = "math"
    causal_mask: bool = True

    def __post_init__(self) -> None:
        check_word("convention", self.convention, CONVENTIONS)
        check_word("attention", self.attention, ATTENTIONS)
        if self.attention == "fused" and self.convention == "meta":
            raise UsageError("on the meta device attention is never fused: take the convention cpu or cuda, or math.")

    @property
    def mask(self) -> int:
        """Bytes of an element of a dropout mask."""
        return 1 if self.convention in ("cuda", "paper") else self.element

    @property
    def statistic(self) -> int:
        """Bytes of a statistic of a LayerNorm."""
        if self.convention == "paper":
            return 0
        return self.element if self.convention == "cpu" else max(self.element, 4)

    @property
    def is_efficient(self) -> bool:
        """Whether fused attention is CUDA's memory-efficient kernel, the only one in fp32, which pads its sums."""
        return self.convention == "cuda" and self.element >= 4

    @property
    def wide(self) -> int:
        """Bytes of an element that an RMS norm computes in: fp32 at least."""
        return max(self.element, 4)


def saved_by_layer(a: Architecture, batch: int, seq: int, how: Saving, checkpoint: str = "none") -> list[Saved]:
    """The tensors that one layer saves, its input among them.

    With ``full`` checkpointing that is only its input; with ``selective`` attention's core (scores, softmax, dropout,
    their product with the values) is left out.

    >>> gpt = Architecture(vocabulary=8, width=4, n_layers=1, n_heads=1, max_seq=2)
    >>> [saved.nbytes for saved in saved_by_layer(gpt, 1, 2, Saving(element=2), "full")]
    [16]
    """
    check_word("checkpoint", checkpoint, CHECKPOINTS)
    a.check_seq(batch, seq)
    tokens = batch * seq
    if checkpoint == "full":
        return [Saved("layer input", tokens * a.width * how.element, "rows")]
    rows = [
        *_norm(a.norm, "attention norm", tokens, a.width, how),
        Saved("attention input", tokens * a.width * how.element, "rows"),
        *_attention(a, batch, seq, how, checkpoint),
        Saved("attention output", tokens * a.q_width * how.element),
        *_dropout("attention", a.dropout, tokens * a.width, how),
        *_norm(a.norm, "feed-forward norm", tokens, a.width, how),
        Saved("feed-forward input", tokens * a.width * how.element, "rows"),
        *(_experts(a, tokens, how) if a.n_experts else _feed_forward(a, tokens, how.element)),
        *_dropout("feed-forward", a.dropout, tokens * a.width, how),
    ]
    return [row for row in rows if row.nbytes and not (row.in_core and checkpoint == "selective")]


def saved_around_layers(a: Architecture, batch: int, seq: int, how: Saving, loss_element: int) -> list[Saved]:
    """The tensors that the embeddings, the last norm, the head and the loss save.

    >>> gpt = Architecture(vocabulary=8, width=4, n_layers=1, n_heads=1, max_seq=2)
    >>> [(saved.name, saved.nbytes) for saved in saved_around_layers(gpt, 1, 2, Saving(element=4), 4)][-1]
    ('log-softmax', 64)
    """
    a.check_seq(batch, seq)
    tokens = batch * seq
    looked_up = a.positions == "learned" and how.convention != "paper"
    rows = [
        Saved("position ids", seq * _INDEX_BYTES if looked_up else 0, "never"),
        Saved("rotary tables", 2 * seq * a.head_width * how.element if a.positions == "rotary" else 0, "never"),
        *_dropout("embedding", a.embedding_dropout, tokens * a.width, how),
        *_norm(a.norm, "last norm", tokens, a.width, how),
        Saved("head input", tokens * a.width * how.element, "rows"),
        Saved("log-softmax", tokens * a.vocabulary * loss_element),
    ]
    return [row for row in rows if row.nbytes]


def _norm(
    kind: str, name: str, n_rows: int, width: int, how: Saving, split: Literal["rows", "heads"] = "rows"
) -> list[Saved]:
    """A LayerNorm saves its input, means and reciprocal deviations; an RMS norm its input and reciprocal roots.

    Where no kernel does it all, an RMS norm is made of ops: it saves its input in fp32 (a copy, if that is wider) and
    what its scale is multiplied with.
    """
    elements = n_rows * width
    if how.convention == "paper":
        return [Saved(f"{name} input", elements * how.element, split)]
    if kind == "layer":
        statistics = 2 * n_rows * how.statistic
        return [Saved(f"{name} input", elements * how.element, split), Saved(f"{name} statistics", statistics, split)]
    one_kernel = how.convention == "cuda"
    return [
        Saved(f"{name} input", elements * (how.element if one_kernel else how.wide), split),
        Saved(f"{name} statistics", n_rows * how.wide, split),
        Saved(f"{name} normalised", 0 if one_kernel else elements * how.wide, split),
    ]


def _attention(a: Architecture, batch: int, seq: int, how: Saving, checkpoint: str) -> list[Saved]:
    """Attention saves queries, keys and values, and its weights or, fused, the log of their sums.

    ``math`` attention whose heads share keys and values copies those for each head, inside the part that selective
    recomputation makes again.
    """
    tokens, e = batch * seq, how.element
    copied = how.attention == "math" and checkpoint == "none"
    kv_width = a.q_width if copied else a.kv_width
    rows = [
        Saved("queries", tokens * a.q_width * e),
        Saved("keys", tokens * kv_width * e),
        Saved("values", tokens * kv_width * e),
    ]
    if a.qk_norm:
        rows += _norm("rms", "query norm", tokens * a.n_heads, a.head_width, how, "heads")
        rows += _norm("rms", "key norm", tokens * a.n_kv_heads, a.head_width, how, "heads")
    n_scores = batch * a.n_heads * seq * seq
    if how.attention == "fused":
        _check_fused(a, how)
        n_sums = batch * a.n_heads * (-(-seq // _PADDED) * _PADDED if how.is_efficient else seq)
        return [*rows, Saved("log of sums", n_sums * _LOGSUMEXP_BYTES, in_core=True)]
    masked = how.causal_mask and how.convention != "paper"
    rows += [
        Saved("causal mask", seq * seq if masked else 0, "never", in_core=True),
        Saved("softmax", n_scores * e, in_core=True),
    ]
    if a.attention_dropout:
        rows += [
            Saved("attention weights dropout mask", n_scores * how.mask, in_core=True),
            Saved("attention weights after dropout", n_scores * e, in_core=True),
        ]
    return rows


def _check_fused(a: Architecture, how: Saving) -> None:
    if a.attention_dropout and how.convention == "cpu":
        raise UsageError("on the CPU attention with dropout is never fused: take attention='math'.")
    if a.n_kv_heads != a.n_heads and how.is_efficient:
        raise UsageError("on CUDA attention in fp32 is never fused where heads share keys: take attention='math'.")


def _dropout(name: str, probability: float, n_elements: int, how: Saving) -> list[Saved]:
    return [Saved(f"{name} dropout mask", n_elements * how.mask, "rows")] if probability else []


def _feed_forward(a: Architecture, n_rows: int, element: int) -> list[Saved]:
    """What each op between the first and the last product saves: its input, but ReLU its output.

    A gate's product saves both its factors.
    """
    nbytes = n_rows * a.ff_width * element
    saves_input = a.activation != "relu"
    rows = [Saved("activation input", nbytes if saves_input else 0), Saved("down input", nbytes)]
    return [*rows, Saved("activated gate", nbytes), Saved("up output", nbytes)] if a.gated else rows


def _experts(a: Architecture, tokens: int, how: Saving) -> list[Saved]:
    """A loop over experts that gathers each one's tokens, weighs its outputs and adds them up with ``index_add``.

    The router takes the softmax of its logits, the k largest, and divides by their sum.
    """
    e, routed = how.element, tokens * a.n_active_experts
    index = 0 if how.convention == "paper" else _INDEX_BYTES
    return [
        Saved("router softmax", tokens * a.n_experts * e, "never"),
        Saved("chosen experts", routed * index, "never"),
        Saved("chosen weights", routed * e, "never"),
        Saved("sums of chosen weights", tokens * e, "never"),
        Saved("places of routed tokens", 2 * routed * index, "never"),
        Saved("expert inputs", routed * a.width * e, "never"),
        *_feed_forward(a, routed, e),
        Saved("expert outputs", routed * a.width * e, "never"),
        Saved("weights of expert outputs", routed * e, "never"),
        Saved("weighted outputs", routed * a.width * e, "never"),
    ]
