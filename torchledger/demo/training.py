"""A few training steps under a ledger, the same ones at every call."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from torchledger.demo.model import GPT, GPTConfig
from torchledger.demo.text import draw_batch, map_tokens
from torchledger.errors import UsageError
from torchledger.ledger import Ledger
from torchledger.report import Report

BATCH = 8
SEED = 0


@dataclass(frozen=True, slots=True)
class Training:
    """What came out of a run: the ledger's report, the loss of each step, and what ran with how many tokens a step."""

    report: Report
    losses: tuple[float, ...]
    n_params: int
    tokens: int
    precision: str
    device: str


def choose_device(name: str | None) -> torch.device:
    """The device of that name; without one, a GPU where there is one.

    Raises:
        UsageError: this machine does not have it, or the demo does not know its kind.
    """
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(name or ("cuda" if n_gpus else "cpu"))
    except RuntimeError:
        raise UsageError(f"--device {name}: give cpu, cuda or cuda:N.") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: give cpu, cuda or cuda:N.")
    if device.type == "cuda" and (device.index or 0) >= n_gpus:
        raise UsageError(f"--device {name}: this machine has {n_gpus} GPUs that torch can use.")
    return device


def train(data: Path, config: GPTConfig, *, steps: int, device: torch.device, bf16: bool = False) -> Training:
    """Train a fresh GPT on the bytes of ``data``, every step under a ledger.

    Args:
        data: a token file, one byte a token.
        config: the model's sizes, and which kind of checkpointing it uses.
        steps: optimizer steps to take.
        device: where.
        bf16: run the forward pass under bfloat16 autocast on a CPU too; on a GPU that knows bfloat16 it always does.
    """
    bf16 = bf16 or (device.type == "cuda" and torch.cuda.is_bf16_supported())
    torch.manual_seed(SEED)
    batches = torch.Generator().manual_seed(SEED)
    tokens = map_tokens(data)
    model = GPT(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses = []
    with Ledger(model, optimizer, tokens_per_step=BATCH * config.max_seq) as ledger:
        for _ in range(steps):
            x, y = draw_batch(tokens, BATCH, config.max_seq, batches)
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                loss = model(x.to(device), y.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            ledger.step()
    return Training(
        report=ledger.report,
        losses=tuple(losses),
        n_params=sum(p.numel() for p in model.parameters()),
        tokens=BATCH * config.max_seq,
        precision="bfloat16 autocast" if bf16 else "float32",
        device=str(device),
    )
