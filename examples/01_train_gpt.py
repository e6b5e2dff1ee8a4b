"""Train a byte-level GPT without and with activation checkpointing, and print both ledgers side by side."""

import copy
import tempfile
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchledger as tl
from torchledger.render.beside import side_by_side

LAYERS, HEADS, WIDTH, SEQ, BATCH, STEPS = 4, 4, 128, 256, 8, 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class GPT(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.token, self.position = nn.Embedding(256, WIDTH), nn.Embedding(SEQ, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(copy.deepcopy(layer) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)
        for weight in (p for p in self.parameters() if p.ndim == 2):
            nn.init.trunc_normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight
        mask = nn.Transformer.generate_square_subsequent_mask(SEQ, device=x.device)
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=False) if self.recompute else block(x, mask)
        logits: Tensor = self.head(self.norm(x)).flatten(0, 1)
        return logits


def train(text: Tensor, recompute: bool) -> tl.Report:
    torch.manual_seed(0)
    model = GPT(recompute).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with tl.Ledger(model, optimizer, tokens_per_step=BATCH * SEQ) as ledger:
        for start in torch.randint(len(text) - BATCH * SEQ, (STEPS,)).tolist():
            batch = text[start : start + BATCH * SEQ + 1].to(DEVICE, torch.long)
            with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
                loss = F.cross_entropy(model(batch[:-1].view(BATCH, SEQ)), batch[1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            ledger.step()
    return ledger.report


with tempfile.NamedTemporaryFile() as file:
    size = file.write("\n".join(topics.values()).encode())
    file.flush()
    text = torch.from_file(file.name, size=size, dtype=torch.uint8)  # read from disk as it is looked at
    print(side_by_side({"none": train(text, False), "checkpointed": train(text, True)}))
