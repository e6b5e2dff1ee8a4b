"""What an H100 would allocate for a Llama-like block stack, told by a machine without a GPU."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchledger as tl

WIDTH, LAYERS, BATCH, SEQ = 4096, 8, 4, 2048


class Blocks(nn.Module):
    """Feed-forward blocks of a 7B model's width."""

    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        )
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From and to (batch, seq, width)."""
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x))
        return x


def train(*, checkpointed: bool) -> tl.MemoryStatement:
    """Two steps of mixed-precision training on whatever "cuda" is; the bytes of the second."""
    model = Blocks(checkpointed=checkpointed).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with tl.Ledger(model, optimizer) as ledger:
        for _ in range(2):
            x = torch.randn(BATCH, SEQ, WIDTH, device="cuda")
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            ledger.step()
    return ledger.report.steps[-1].memory["cuda:0"]


if __name__ == "__main__":
    for checkpointed in (False, True):
        with tl.simulate("h100-sxm") as device:
            memory = train(checkpointed=checkpointed)
        spare = device.capacity_bytes - memory.reserved_peak_bytes
        print(f"checkpointing {checkpointed}: {memory.peak.activations:,} bytes of activations at the peak,")
        print(f"  reserved {memory.reserved_peak_bytes:,}, {spare:,} to spare")
