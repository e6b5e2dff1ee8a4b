"""Why a step's FLOPs are not 6ND: the same small GPT, plain and with its first layers frozen."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import torchledger as tl

VOCABULARY, WIDTH, HEADS, LAYERS, BATCH, SEQ = 512, 64, 4, 3, 2, 96


class GPT(nn.Module):
    """Embeddings, encoder layers under a causal mask, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of shape (batch, seq, vocabulary)."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(x)
        return logits


def measure(n_frozen: int) -> tl.Reconciliation:
    """One step with the embeddings and so many layers frozen."""
    torch.manual_seed(0)
    model = GPT()
    for part in (model.tokens, model.positions, *model.layers[:n_frozen]) if n_frozen else ():
        part.requires_grad_(False)
    ids = torch.randint(VOCABULARY, (BATCH, SEQ))
    with tl.Ledger(model) as ledger:
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    return tl.reconcile(ledger.report.steps[-1])


if __name__ == "__main__":
    for n_frozen in (0, 2):
        found = measure(n_frozen)
        assert found.flops.residual == 0
        print(f"{n_frozen} of {LAYERS} layers frozen\n{found}\n")
