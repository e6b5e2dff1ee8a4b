"""The FLOPs of training one model by the rules that papers and programs publish, to see which number a text means.

N parameters, B sequences of T tokens, D = B·T, L layers, d width, H heads, K key/value heads, dh head width, f
feed-forward width, g matrices of a feed-forward network, k active experts, V vocabulary. The rules were written for
GPT-like models; on others they are applied to the letter, and say what that leaves out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torchledger.analytic.architecture import Architecture, count_active_parameters, count_parameters
from torchledger.analytic.products import training_flops_by_cause

_KAPLAN = "Kaplan et al. 2020, Scaling laws for neural language models, section 2.1"


@dataclass(frozen=True, slots=True)
class PublishedCount:
    """The FLOPs of forward and backward by one rule.

    Args:
        name: what people call the rule.
        flops: of the whole batch (1 multiply-add = 2 FLOP).
        formula: the rule itself.
        source: where it is published.
        leaves_out: what it leaves out, or counts though no product does it.
    """

    name: str
    flops: int
    formula: str
    source: str
    leaves_out: str


def count_by_published_rules(a: Architecture, batch: int, seq: int) -> tuple[PublishedCount, ...]:
    """FLOPs of forward and backward of a batch by every rule on record, torchledger's own first.

    Args:
        a: the model.
        batch: B.
        seq: T.

    Raises:
        UsageError: the model cannot take such a batch.

    >>> gpt = Architecture(vocabulary=50257, width=768, n_layers=12, n_heads=12, max_seq=1024)
    >>> for count in count_by_published_rules(gpt, 1, 1024)[:2]:
    ...     print(count.name, count.flops)
    torchledger 874944921600
    6ND 764558180352
    """
    return (*_ours(a, batch, seq), *_by_parameters(a, batch * seq, seq), *_by_layers(a, batch * seq, seq))


def _ours(a: Architecture, batch: int, seq: int) -> Iterator[PublishedCount]:
    yield PublishedCount(
        name="torchledger",
        flops=sum(training_flops_by_cause(a, batch, seq).values()),
        formula="3 · forward, each multiply-add of each product 2 FLOP, attention over the full square",
        source="TransformerSpec.training_flops; what a Ledger measures",
        leaves_out="element-wise work",
    )


def _by_parameters(a: Architecture, tokens: int, seq: int) -> Iterator[PublishedCount]:
    counts = count_parameters(a)
    without_positions = counts.total - counts.position_embedding
    in_layers = counts.total - counts.looked_up - counts.head
    yield PublishedCount(
        name="6ND",
        flops=6 * counts.total * tokens,
        formula="6·N·D, N all parameters",
        source=_KAPLAN,
        leaves_out="attention's scores and values; counts tables, norms and biases as if products read them",
    )
    if a.n_experts:
        yield PublishedCount(
            name="6ND, active",
            flops=6 * count_active_parameters(a) * tokens,
            formula="6·N·D, N the parameters that one token meets",
            source=_KAPLAN,
            leaves_out="as 6ND, and the experts that a token does not go through",
        )
    if counts.position_embedding:
        yield PublishedCount(
            name="6ND without positions",
            flops=6 * without_positions * tokens,
            formula="6·N·D, N without the table of positions",
            source="nanoGPT, model.py, get_num_params",
            leaves_out="as 6ND, but for the table of positions",
        )
    yield PublishedCount(
        name="6ND, non-embedding",
        flops=6 * in_layers * tokens,
        formula="6·N·D, N without token embedding, positions and head",
        source=_KAPLAN,
        leaves_out="attention's scores and values, and the head's product",
    )
    yield PublishedCount(
        name="PaLM, nanoGPT",
        flops=(6 * without_positions + 12 * a.n_layers * a.q_width * seq) * tokens,
        formula="(6·N + 12·L·H·dh·T)·D, N without the table of positions",
        source="Chowdhery et al. 2022, PaLM, appendix B; nanoGPT, model.py, estimate_mfu",
        leaves_out=_counts_too_much(a, "norms and biases"),
    )
    yield PublishedCount(
        name="llm.c",
        flops=(6 * counts.total + 6 * a.n_layers * a.width * seq) * tokens,
        formula="(6·N + 6·L·d·T)·D, N all parameters",
        source="llm.c, train_gpt2.cu, gpt2_estimate_mfu (which pads the vocabulary to a multiple of 128)",
        leaves_out=f"half of attention's square; {_counts_too_much(a, 'positions, norms and biases')}",
    )


def _counts_too_much(a: Architecture, what: str) -> str:
    tables = what if a.tied else f"the token embedding, {what}"
    experts = " and all experts" if a.n_experts else ""
    return f"nothing; counts {tables}{experts} as if products read them".replace("nothing; ", "")


def _by_layers(a: Architecture, tokens: int, seq: int) -> Iterator[PublishedCount]:
    d, n_layers, q_width, vocabulary = a.width, a.n_layers, a.q_width, a.vocabulary
    networks = max(a.n_active_experts, 1) * a.n_ff_matrices * a.ff_width
    projections = 2 * q_width + 2 * a.kv_width
    yield PublishedCount(
        name="Megatron-LM",
        flops=6 * tokens * (n_layers * (d * (projections + networks) + seq * q_width) + vocabulary * d),
        formula="6·D·(L·(2·d·(H + K)·dh + k·g·d·f + T·H·dh) + V·d)",
        source="Megatron-LM, training.py, num_floating_point_operations (which pads the vocabulary)",
        leaves_out="half of attention's square, which a causal mask hides" + ("; routers" if a.n_experts else ""),
    )
    yield PublishedCount(
        name="Megatron-LM 2021",
        flops=tokens * (96 * n_layers * d * d + 16 * n_layers * seq * d + 6 * vocabulary * d),
        formula="96·D·L·d²·(1 + T/(6·d) + V/(16·L·d))",
        source="Narayanan et al. 2021, Efficient large-scale language model training on GPU clusters, appendix",
        leaves_out=_not_gpt(a, "nothing; counts the recompute of every layer (without it, 72 in place of 96)"),
    )
    attention = tokens * (6 * d * q_width + 4 * seq * q_width + 3 * a.n_heads * seq + 2 * q_width * d)
    per_layer = attention + 4 * tokens * d * a.ff_width
    yield PublishedCount(
        name="Chinchilla",
        flops=3 * (4 * tokens * vocabulary * d + n_layers * per_layer),
        formula="3·(4·D·V·d + L·D·(8·d·H·dh + 4·T·H·dh + 3·H·T + 4·d·f))",
        source="Hoffmann et al. 2022, Training compute-optimal large language models, appendix F",
        leaves_out=_not_gpt(a, "nothing; counts the embedding as a product, and the softmax"),
    )


def _not_gpt(a: Architecture, text: str) -> str:
    """Rules that know two matrices in a feed-forward network, and keys and values as wide as queries."""
    unknown = [
        what
        for what, is_there in (
            ("gates", a.gated),
            ("experts", bool(a.n_experts)),
            ("shared keys and values", a.n_kv_heads != a.n_heads),
        )
        if is_there
    ]
    return f"{text}; knows no {', '.join(unknown)}" if unknown else text
