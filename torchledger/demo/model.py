"""A GPT of a few layers over bytes, with or without activation checkpointing of every block.

Shapes: B batch, T sequence length, d width, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes of a GPT; ``checkpoint`` is ``none``, ``non-reentrant`` or ``reentrant``."""

    n_layers: int = 4
    n_heads: int = 4
    width: int = 128
    max_seq: int = 256
    vocabulary: int = 256
    checkpoint: str = "none"


class Attention(nn.Module):
    """Causal self-attention, [B, T, d] to [B, T, d]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, d]."""
        heads = self.qkv(x).unflatten(-1, (3, self.n_heads, -1))  # [B, T, 3, H, d/H]
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, H, T, d/H]
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return y


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, d]."""
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return y


class GPT(nn.Module):
    """A decoder-only transformer with a tied head; its forward pass gives the mean cross-entropy."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.checkpoint = config.checkpoint
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.max_seq, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.token.weight
        self.apply(init_weights)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss; tokens and targets: int64 [B, T]."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            if self.checkpoint == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpoint == "reentrant")
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def init_weights(module: nn.Module) -> None:
    """Draw matrices from a normal distribution cut off at three deviations of 1/√fan-in; biases are zero."""
    if isinstance(module, nn.Linear | nn.Embedding):
        deviation = module.weight.shape[-1] ** -0.5
        nn.init.trunc_normal_(module.weight, std=deviation, a=-3 * deviation, b=3 * deviation)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
