"""Small models for the tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """A pre-norm transformer block with fused causal attention."""

    def __init__(self, width: int, n_heads: int, *, bias: bool = True) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)
        self.up, self.down = nn.Linear(width, 4 * width, bias=bias), nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, width = x.shape
        heads = (t.view(batch, seq, self.n_heads, -1).transpose(1, 2) for t in self.qkv(self.norm_1(x)).split(width, 2))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, seq, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Learned positions, tied head; ``kind`` of checkpointing is None, ``reentrant`` or ``nonreentrant``."""

    def __init__(
        self, n_layers: int = 4, width: int = 64, n_heads: int = 4, vocabulary: int = 256, seq: int = 64,
        kind: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.kind = kind
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(Block(width, n_heads) for _ in range(n_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            if self.kind:  # the states of random generators are bytes that no op makes
                x = checkpoint(block, x, use_reentrant=self.kind == "reentrant", preserve_rng_state=False)
            else:
                x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Residual(nn.Module):
    """Two linears, 16 -> 64 -> 16: F = 2 * rows * 2 * 16 * 64 for one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))
