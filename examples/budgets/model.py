"""A small network, and one step of its training."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Network(nn.Module):
    def __init__(self, width: int, n_blocks: int = 4, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(n_blocks)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))
        logits: Tensor = self.head(x)
        return logits


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> None:
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
