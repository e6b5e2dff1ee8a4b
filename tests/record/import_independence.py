"""A program that prints its reports as JSON, without what differs from run to run."""

from __future__ import annotations

import copy
import json
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchledger as tl


def forward_before() -> tl.Report:
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(256), nn.Linear(256, 64))
    loss = net(torch.randn(128, 64)).square().sum()
    with tl.Ledger(net) as ledger:
        loss.backward()
    return ledger.report


def hidden_state_from_before() -> tl.Report:
    cell, x = nn.GRUCell(16, 32), torch.randn(8, 16)
    hidden = cell(x, torch.zeros(8, 32))
    with tl.Ledger(cell) as ledger:
        for _ in range(2):
            hidden = cell(x, hidden)
            ledger.step()
        hidden.sum().backward()
        ledger.step()
    return ledger.report


def training() -> tl.Report:
    net = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(3))
    optimizer = torch.optim.AdamW(net.parameters())
    data = torch.randn(64, 32)
    kept: list[Any] = []
    with tl.Ledger(net, optimizer) as ledger:
        for i in range(3):
            x = torch.stack([*data[8 * i : 8 * i + 8]])
            for block in net:
                x = checkpoint(block, x, use_reentrant=False)
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.append(copy.deepcopy(net.state_dict()))
            ledger.step()
    return ledger.report


def views_of_leaves() -> tl.Report:
    bilinear = nn.Bilinear(6, 7, 5)
    one, two = torch.randn(16, 6, requires_grad=True), torch.randn(8, 7, requires_grad=True)
    part = one[:8]
    with tl.Ledger(bilinear) as ledger:
        bilinear(part, two).sum().backward()
    return ledger.report


def traced() -> tl.Report:
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    x = torch.randn(8, 16, requires_grad=True)
    with tl.Ledger(graph) as ledger:
        F.mse_loss(graph(x), torch.zeros(8, 4)).backward()
    return ledger.report


def double_backward() -> tl.Report:
    net, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), torch.randn(4, 8, requires_grad=True)
    with tl.Ledger(net) as ledger:
        (gradient,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        ledger.step()
        gradient.square().sum().backward()
        ledger.step()
    return ledger.report


PROGRAMS = (forward_before, hidden_state_from_before, training, views_of_leaves, traced, double_backward)


def books() -> dict[str, Any]:
    """The reports of all programs by name."""
    found = {}
    for program in PROGRAMS:
        torch.manual_seed(0)
        document = program().to_dict()
        document.pop("environment")
        for step in document["steps"]:
            step.pop("duration_s")
        found[program.__name__] = document
    return found


if __name__ == "__main__":
    print(json.dumps(books(), sort_keys=True))
