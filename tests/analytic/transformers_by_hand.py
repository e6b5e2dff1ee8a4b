"""Transformers written out op by op, and what autograd saves of them: the oracle of ``TransformerSpec``.

They read a spec's sizes and nothing else of torchledger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchledger.analytic.architecture import Architecture

Dropout = Callable[[Tensor, float], Tensor]


def saved_bytes(run: Callable[[], object], without: Iterable[Tensor] = ()) -> int:
    """Bytes of the storages that a call saves for backward, each once; scalars and seeds (uint64) are left out."""
    left_out = {tensor.untyped_storage()._cdata for tensor in without}
    sizes: dict[int, int] = {}
    alive = []  # a storage that went could lend its address to another

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.dim() and tensor.dtype != torch.uint64 and storage._cdata not in left_out:
            sizes[storage._cdata] = storage.nbytes()
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        alive.append(run())
    return sum(sizes.values())


class ByteMask(torch.autograd.Function):
    """Dropout whose mask takes one byte an element, as CUDA's kernel does it."""

    @staticmethod
    def forward(ctx, x: Tensor, probability: float) -> Tensor:
        kept = torch.ones_like(x, dtype=torch.bool)
        ctx.save_for_backward(kept)
        return x * kept

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        return grad * kept, None


def drop_bytes(x: Tensor, probability: float) -> Tensor:
    return ByteMask.apply(x, probability) if probability else x


def drop(x: Tensor, probability: float) -> Tensor:
    return F.dropout(x, probability) if probability else x


def norm(a: Architecture, width: int) -> nn.Module:
    return nn.RMSNorm(width) if a.norm == "rms" else nn.LayerNorm(width, bias="norm" in a.biases)


class Attention(nn.Module):
    """[B, T, d] to [B, T, d]; ``t`` ranks share the heads, and this is one of them."""

    def __init__(
        self, a: Architecture, *, fused: bool, masked: bool, selective: bool, dropout: Dropout, t: int
    ) -> None:
        super().__init__()
        self.a, self.fused, self.masked, self.selective, self.dropout, self.t = a, fused, masked, selective, dropout, t
        qkv, out = "qkv" in a.biases, "out" in a.biases
        self.q = nn.Linear(a.width, a.q_width // t, bias=qkv)
        self.k = nn.Linear(a.width, a.kv_width // t, bias=qkv)
        self.v = nn.Linear(a.width, a.kv_width // t, bias=qkv)
        self.out = nn.Linear(a.q_width // t, a.width, bias=out)
        if a.qk_norm:
            self.q_norm, self.k_norm = nn.RMSNorm(a.head_width), nn.RMSNorm(a.head_width)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.a.head_width)) for part in (self.q, self.k, self.v))
        if self.a.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if angles is not None:
            q, k = rotate(q, *angles), rotate(k, *angles)
        core = self.fused_core if self.fused else self.core
        y = checkpoint(core, q, k, v, use_reentrant=False) if self.selective else core(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))

    def fused_core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shared, p = self.a.n_heads != self.a.n_kv_heads, self.a.attention_dropout
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared, dropout_p=p)

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = self.a.n_heads // self.a.n_kv_heads
        if n > 1:
            k, v = k.repeat_interleave(n, 1), v.repeat_interleave(n, 1)
        scores = (q @ k.transpose(-2, -1)) * self.a.head_width**-0.5
        if self.masked:
            seq = scores.shape[-1]
            scores = scores.masked_fill(torch.ones(seq, seq, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
        return self.dropout(scores.softmax(-1), self.a.attention_dropout) @ v


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def angles_of(a: Architecture, seq: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines, [T, dh] each."""
    if a.positions != "rotary":
        return None
    rates = 1e4 ** -(torch.arange(0, a.head_width, 2, device=device) / a.head_width)
    angles = (torch.arange(seq, device=device)[:, None] * rates).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


ACTIVATIONS = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu}


class FeedForward(nn.Module):
    def __init__(self, a: Architecture, t: int) -> None:
        super().__init__()
        self.act = ACTIVATIONS[a.activation]
        bias, width = "ff" in a.biases, a.ff_width // t
        self.gate = nn.Linear(a.width, width, bias=bias) if a.gated else None
        self.up = nn.Linear(a.width, width, bias=bias)
        self.down = nn.Linear(width, a.width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.act(self.up(x)))
        return self.down(self.act(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.k = a.n_active_experts
        self.router = nn.Linear(a.width, a.n_experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(a, 1) for _ in range(a.n_experts))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(self.k)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            token, place = (chosen == index).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(rows[token]) * weights[token, place, None])
        return out.view_as(x)


class Layer(nn.Module):
    def __init__(
        self, a: Architecture, *, fused: bool = False, masked: bool = True, selective: bool = False,
        dropout: Dropout = drop, t: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dropout, self.p = dropout, a.dropout
        self.norm_1, self.norm_2 = norm(a, a.width), norm(a, a.width)
        self.attention = Attention(a, fused=fused, masked=masked, selective=selective, dropout=dropout, t=t)
        self.feed_forward = Experts(a) if a.n_experts else FeedForward(a, t)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor] | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x), angles), self.p)
        return x + self.dropout(self.feed_forward(self.norm_2(x)), self.p)


class GatheredProduct(torch.autograd.Function):
    """A product with the rows of all ranks that saves only its own rank's, and would gather them again in backward."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, t: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(torch.cat([x] * t, 1), weight, bias)


class Gathered(nn.Module):
    def __init__(self, linear: nn.Linear, t: int) -> None:
        super().__init__()
        self.linear, self.t = linear, t

    def forward(self, x: Tensor) -> Tensor:
        return GatheredProduct.apply(x, self.linear.weight, self.linear.bias, self.t)


class Scattered(Gathered):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y[:, : y.shape[1] // self.t]


def split_sequence(layer: Layer, t: int) -> Layer:
    """The layer of one of ``t`` ranks whose residual stream has 1/t of the sequence."""
    attention, network = layer.attention, layer.feed_forward
    attention.q, attention.k, attention.v = (Gathered(part, t) for part in (attention.q, attention.k, attention.v))
    network.up = Gathered(network.up, t)
    network.gate = Gathered(network.gate, t) if network.gate is not None else None
    attention.out, network.down = Scattered(attention.out, t), Scattered(network.down, t)
    return layer


class Model(nn.Module):
    """Ids [B, T] and targets [B, T] to the mean cross-entropy; ``kind`` of full checkpoint, if any."""

    def __init__(self, a: Architecture, *, kind: str = "", dropout: Dropout = drop, **how: bool) -> None:
        super().__init__()
        self.a, self.kind, self.dropout = a, kind, dropout
        self.tokens = nn.Embedding(a.vocabulary, a.width)
        self.positions = nn.Embedding(a.max_seq, a.width) if a.positions == "learned" else None
        self.layers = nn.ModuleList(Layer(a, dropout=dropout, **how) for _ in range(a.n_layers))
        self.norm, self.head = norm(a, a.width), nn.Linear(a.width, a.vocabulary, bias=False)
        if a.tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        seq = ids.shape[1]
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(seq, device=ids.device))
        x = self.dropout(x, self.a.embedding_dropout)
        angles = angles_of(self.a, seq, x.dtype, str(x.device))
        for layer in self.layers:
            x = checkpoint(layer, x, angles, use_reentrant=self.kind == "reentrant") if self.kind else layer(x, angles)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
