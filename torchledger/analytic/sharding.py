"""What tensor and sequence parallelism leave on one of t ranks (Korthikanti et al. 2022, sections 4.2 and 4.3).

Tensor parallelism splits heads, the width of feed-forward networks and the vocabulary; it leaves norms, residual
stream and dropouts whole on each rank. Sequence parallelism splits those along the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypedDict

from torchledger.analytic.activations import Saved, Saving, saved_around_layers, saved_by_layer
from torchledger.analytic.architecture import Architecture, count_parameters
from torchledger.analytic.dtypes import element_bytes
from torchledger.errors import UsageError


class SavingOptions(TypedDict, total=False):
    """How activations are saved, where it is not as on one CUDA device with attention's scores in memory.

    Args:
        attention: ``math`` (scores in memory) or ``fused`` (one kernel).
        convention: whose kernels: ``cuda``, ``cpu``, ``meta``, or ``paper`` for the counting of Korthikanti et al.:
            dropout masks take one byte (``cuda``, ``paper``) or an element; the statistics of LayerNorms are fp32
            (``cuda``, ``meta``), an element (``cpu``) or left out (``paper``).
        causal_mask: whether each layer makes a mask of bools, as ``math`` attention may; it does if left out.
        loss_dtype: of the log-softmax that the loss saves; that of the activations if left out, fp32 under autocast.
        tensor_parallel: t, over how many ranks heads, feed-forward and vocabulary are split.
        sequence_parallel: whether the rest is split along the sequence.
    """

    attention: str
    convention: str
    causal_mask: bool
    loss_dtype: object
    tensor_parallel: int
    sequence_parallel: bool


class SavedBytes(NamedTuple):
    """Bytes that one layer saves, and those saved around the layers, by tensor."""

    layer: dict[str, int]
    around: dict[str, int]


def check_tensor_parallel(a: Architecture, t: int, *, seq: int | None = None) -> None:
    """Refuses a number of ranks over which a model does not split evenly.

    Args:
        a: the model.
        t: how many ranks; 1 splits nothing.
        seq: T, where sequence parallelism splits it too.

    Raises:
        UsageError: ``t`` is no integer of at least 1, a size is not a multiple of it, or there are experts.

    >>> check_tensor_parallel(Architecture(vocabulary=8, width=4, n_layers=1, n_heads=2, max_seq=2), 2, seq=2)
    """
    if isinstance(t, bool) or not isinstance(t, int) or t < 1:
        raise UsageError(f"tensor_parallel must be an integer of at least 1, not {t!r}.")
    if t == 1:
        return
    if a.n_experts:
        raise UsageError("how experts are split differs from one program to another: leave tensor_parallel at 1.")
    sizes = {"n_kv_heads": a.n_kv_heads, "ff_width": a.ff_width, "vocabulary": a.vocabulary}
    if seq is not None:
        sizes["seq"] = seq
    for name, size in sizes.items():
        if size % t:
            raise UsageError(f"{name} = {size} does not split over {t} ranks: pad it to a multiple of {t}.")


def saved_on_rank(rows: Iterable[Saved], t: int, *, sequence_parallel: bool) -> dict[str, int]:
    """Bytes of saved tensors on one rank, by name.

    >>> saved_on_rank([Saved("queries", 8), Saved("layer input", 8, "rows")], 2, sequence_parallel=False)
    {'queries': 4, 'layer input': 8}
    """
    ways = {"heads": t, "rows": t if sequence_parallel else 1, "never": 1}
    return {row.name: row.nbytes // ways[row.split] for row in rows}


def count_saved_bytes(
    a: Architecture,
    batch: int,
    seq: int,
    dtype: object,
    checkpoint: str = "none",
    *,
    attention: str = "math",
    convention: str = "cuda",
    causal_mask: bool = True,
    loss_dtype: object = None,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
) -> SavedBytes:
    """Bytes that a forward pass with the loss saves for backward on one rank; `SavingOptions` says what the words mean.

    Raises:
        UsageError: a word or dtype is not known, such attention is never fused, the model cannot take such a batch, or
            it does not split evenly.

    >>> gpt = Architecture(vocabulary=8, width=4, n_layers=1, n_heads=1, max_seq=2)
    >>> count_saved_bytes(gpt, 1, 2, "bf16", "full").layer
    {'layer input': 16}
    """
    check_tensor_parallel(a, tensor_parallel, seq=seq if sequence_parallel else None)
    element = element_bytes(dtype)
    how = Saving(element=element, convention=convention, attention=attention, causal_mask=causal_mask)
    loss_element = element if loss_dtype is None else element_bytes(loss_dtype)
    layer = saved_by_layer(a, batch, seq, how, checkpoint)
    around = saved_around_layers(a, batch, seq, how, loss_element)
    return SavedBytes(
        saved_on_rank(layer, tensor_parallel, sequence_parallel=sequence_parallel),
        saved_on_rank(around, tensor_parallel, sequence_parallel=sequence_parallel),
    )


def count_parameters_on_rank(a: Architecture, t: int) -> int:
    """Parameters on one rank of ``t``: matrices are split; norms, positions, and biases behind a sum are not.

    Raises:
        UsageError: the model does not split evenly over so many ranks.

    >>> gpt = Architecture(vocabulary=8, width=4, n_layers=1, n_heads=2, max_seq=2)
    >>> count_parameters_on_rank(gpt, 1), count_parameters_on_rank(gpt, 2)
    (292, 166)
    """
    check_tensor_parallel(a, t)
    counts = count_parameters(a)
    whole_biases = a.n_layers * a.width * sum(place in a.biases for place in ("out", "ff"))
    whole = counts.position_embedding + counts.norms + whole_biases
    return whole + (counts.total - whole) // t
