"""Published device figures beside what a simulated device gives for the same program.

    python benchmarks/published.py

`docs/explain/accuracy.md` shows what it prints, and says where the published figures are from.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import nn

import torchledger as tl


class Bottleneck(nn.Module):
    """ResNet's block of three convolutions beside a shortcut."""

    def __init__(self, width_in: int, width: int, stride: int = 1, project: bool = False) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width_in, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.project = (
            nn.Sequential(nn.Conv2d(width_in, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))
            if project
            else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [N, C, H, W]."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.project is None else self.project(x)
        return self.relu(y)


class ResNet50(nn.Module):
    """ResNet-50 of He et al. (arXiv:1512.03385), with the stride in the middle convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        blocks, width_in = [], 64
        for width, n, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for i in range(n):
                blocks.append(Bottleneck(width_in, width, stride if i == 0 else 1, project=i == 0))
                width_in = 4 * width
        self.blocks, self.pool, self.head = nn.Sequential(*blocks), nn.AdaptiveAvgPool2d(1), nn.Linear(2048, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [N, 3, 224, 224]; logits [N, 1000]."""
        return self.head(self.pool(self.blocks(self.stem(x))).flatten(1))


def train_resnet() -> tl.Report:
    """Two steps of SGD, batch 32."""
    model = ResNet50().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(32, 3, 224, 224).cuda(), torch.randint(0, 1000, (32,)).cuda()
    with tl.Ledger(model, optimizer) as ledger:
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            ledger.step()
    return ledger.report


def attend_by_hand() -> tl.Report:
    """Attention by hand, batch 8, 4,096 positions, width 16, float32, forward and backward."""
    q, k, v = (torch.rand(8, 4096, 16, device="cuda", requires_grad=True) for _ in range(3))

    def softmax(x: torch.Tensor) -> torch.Tensor:
        highest = x.max(-1, keepdim=True).values
        exponentials = torch.exp(x - highest)
        return exponentials / exponentials.sum(-1, keepdim=True)

    def attend() -> torch.Tensor:
        scores = torch.einsum("bqd,bkd->bqk", q, k) / math.sqrt(16)
        return torch.einsum("bqk,bkd->bqd", softmax(scores), v)

    with tl.Ledger() as ledger:
        out = attend()
        out.sum().backward()
    return ledger.report


ROWS: list[tuple[str, str, Callable[[], tl.Report], str, int]] = [
    ("attention by hand, A100", "a100-sxm", attend_by_hand, "requested", 3_249_143_816),
    ("attention by hand, A100", "a100-sxm", attend_by_hand, "allocated", 3_249_144_832),
    ("attention by hand, A100", "a100-sxm", attend_by_hand, "reserved", 3_781_165_056),
    ("ResNet-50, batch 32, SGD", "a100-sxm", train_resnet, "activations", 2_746_497_024),
    ("ResNet-50, batch 32, SGD", "a100-sxm", train_resnet, "allocated", 3_082_832_104),
]


def measure(report: tl.Report, what: str) -> int:
    """One figure of the last step."""
    memory = report.steps[-1].memory["cuda:0"]
    return memory.category_peaks[what] if what == "activations" else getattr(memory, f"{what}_peak_bytes")


def main() -> None:
    """Print the table."""
    table = []
    for name, accelerator, run, what, published in ROWS:
        with tl.simulate(accelerator):
            ours = measure(run(), what)
        table.append([name, what, published, ours, f"{100 * (ours / published - 1):+.2f} %"])
    print(tabulate(table, headers=["program", "peak", "published", "simulated", "difference"], intfmt=","))


if __name__ == "__main__":
    main()
