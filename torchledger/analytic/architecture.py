"""The sizes that decide what a decoder-only transformer costs, and its parameters by what they do.

B batch, T sequence length, D = B·T tokens, L layers, d width, H heads, K key/value heads, dh head width, f feed-forward
width, V vocabulary, E experts, k active experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchledger.errors import UsageError

BIASES = ("qkv", "out", "ff", "norm")
"""Where a bias can be: query, key and value projections; attention's output; both feed-forward products; LayerNorms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The sizes of a transformer whose layers add attention and a feed-forward network to a residual stream.

    ``torchledger.TransformerSpec`` is this with methods, and says what each field means. Left out, n_kv_heads,
    head_width and ff_width become H, d / H and 4·d.

    Raises:
        UsageError: a size is no integer or too small, or sizes do not fit together.
    """

    vocabulary: int
    width: int
    n_layers: int
    n_heads: int
    n_kv_heads: int = 0
    head_width: int = 0
    ff_width: int = 0
    gated: bool = False
    activation: Literal["gelu", "silu", "relu"] = "gelu"
    norm: Literal["layer", "rms"] = "layer"
    qk_norm: bool = False
    positions: Literal["learned", "rotary", "none"] = "learned"
    max_seq: int = 0
    tied: bool = True
    biases: tuple[str, ...] = BIASES
    n_experts: int = 0
    n_active_experts: int = 0
    window: int = 0
    dropout: float = 0.0
    attention_dropout: float = 0.0
    embedding_dropout: float = 0.0

    def __post_init__(self) -> None:
        positive = ("vocabulary", "width", "n_layers", "n_heads")
        sizes = (*positive, "n_kv_heads", "head_width", "ff_width", "max_seq")
        for name in (*sizes, "n_experts", "n_active_experts", "window"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < (name in positive):
                raise UsageError(f"{name} must be an integer of at least {int(name in positive)}, not {value!r}.")
        self._check_words()
        if not self.head_width and self.width % self.n_heads:
            raise UsageError(f"a width of {self.width} does not split into {self.n_heads} heads: give head_width.")
        defaults = {
            "n_kv_heads": self.n_heads,
            "head_width": self.width // self.n_heads,
            "ff_width": 4 * self.width,
        }
        for name, value in defaults.items():
            if getattr(self, name) == 0:
                object.__setattr__(self, name, value)
        self._check_sizes()

    def _check_words(self) -> None:
        words = {
            "activation": ("gelu", "silu", "relu"),
            "norm": ("layer", "rms"),
            "positions": ("learned", "rotary", "none"),
        }
        for name, known in words.items():
            if getattr(self, name) not in known:
                raise UsageError(f"{name} must be {', '.join(known[:-1])} or {known[-1]}, not {getattr(self, name)!r}.")
        object.__setattr__(self, "biases", tuple(self.biases))
        unknown = [name for name in self.biases if name not in BIASES]
        if unknown:
            raise UsageError(f"biases can be at {', '.join(BIASES)}, not at {unknown[0]!r}.")
        for name in ("dropout", "attention_dropout", "embedding_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{name} must be a probability below 1, not {getattr(self, name)!r}.")

    def _check_sizes(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise UsageError(f"{self.n_heads} heads cannot share {self.n_kv_heads} key/value heads evenly.")
        if bool(self.n_experts) != bool(self.n_active_experts) or self.n_active_experts > self.n_experts:
            raise UsageError(f"of {self.n_experts} experts {self.n_active_experts} cannot be active.")
        if self.n_experts and "ff" in self.biases:
            raise UsageError("experts have no biases here: leave 'ff' out of biases.")
        if (self.positions == "learned") != bool(self.max_seq):
            raise UsageError("a table of learned positions has max_seq rows: give both or neither.")

    @property
    def q_width(self) -> int:
        """H·dh."""
        return self.n_heads * self.head_width

    @property
    def kv_width(self) -> int:
        """K·dh."""
        return self.n_kv_heads * self.head_width

    @property
    def n_ff_matrices(self) -> int:
        """Matrices of a feed-forward network: 3 with a gate, else 2."""
        return 3 if self.gated else 2

    def check_seq(self, batch: int, seq: int) -> None:
        """Refuses a batch that the model cannot take.

        Raises:
            UsageError: a size is no integer of at least 1, or the table of positions is shorter than the sequence.
        """
        for name, value in (("batch", batch), ("seq", seq)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"{name} must be an integer of at least 1, not {value!r}.")
        if self.max_seq and seq > self.max_seq:
            raise UsageError(f"a sequence of {seq} tokens is longer than the table of {self.max_seq} positions.")


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """Parameters by what they do; all fields add up to ``total``.

    Args:
        token_embedding: V·d where the head has its own; 0 where they are one.
        position_embedding: max_seq·d.
        attention: matrices of the attention of all layers.
        feed_forward: matrices of all feed-forward networks without experts.
        routers: matrices that choose experts.
        experts: matrices of all experts.
        norms: scales and shifts of all norms.
        biases: biases of all matrices.
        head: V·d.
    """

    token_embedding: int
    position_embedding: int
    attention: int
    feed_forward: int
    routers: int
    experts: int
    norms: int
    biases: int
    head: int

    @property
    def looked_up(self) -> int:
        """Parameters that no product reads: rows of tables."""
        return self.token_embedding + self.position_embedding

    @property
    def total(self) -> int:
        """All of them, a tied head once."""
        in_layers = self.attention + self.feed_forward + self.routers + self.experts
        return self.looked_up + in_layers + self.norms + self.biases + self.head


def count_parameters(a: Architecture) -> ParameterCounts:
    """The parameters of a model by what they do.

    >>> counts = count_parameters(Architecture(vocabulary=50257, width=768, n_layers=12, n_heads=12, max_seq=1024))
    >>> counts.total, counts.norms, counts.biases
    (124439808, 38400, 82944)
    """
    d, n_layers = a.width, a.n_layers
    per_network = a.n_ff_matrices * d * a.ff_width
    out_widths = {"qkv": a.q_width + 2 * a.kv_width, "out": d, "ff": (a.n_ff_matrices - 1) * a.ff_width + d}
    per_norm = d * (2 if "norm" in a.biases and a.norm == "layer" else 1)
    return ParameterCounts(
        token_embedding=0 if a.tied else a.vocabulary * d,
        position_embedding=a.max_seq * d,
        attention=n_layers * d * (2 * a.q_width + 2 * a.kv_width),
        feed_forward=0 if a.n_experts else n_layers * per_network,
        routers=n_layers * d * a.n_experts,
        experts=n_layers * a.n_experts * per_network,
        norms=(2 * n_layers + 1) * per_norm + (2 * n_layers * a.head_width if a.qk_norm else 0),
        biases=n_layers * sum(out_widths[place] for place in a.biases if place in out_widths),
        head=a.vocabulary * d,
    )


def count_active_parameters(a: Architecture) -> int:
    """Parameters that one token meets: all but those of the experts that it does not go through.

    >>> count_active_parameters(Architecture(vocabulary=8, width=4, n_layers=1, n_heads=1, max_seq=2, biases=()))
    244
    """
    counts = count_parameters(a)
    idle = a.n_experts - a.n_active_experts
    return counts.total - (counts.experts // a.n_experts * idle if idle else 0)
