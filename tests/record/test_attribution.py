"""Modules and parameters: who did which product, by hand."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchledger as tl
from models import GPT, Residual

ROWS = 8


def assert_tree(flops: tl.FlopStatement) -> None:
    """Children plus self is the parent, and the rows add up."""
    tree = flops.by_module
    for path, split in tree.items():
        children = [c for p, c in tree.items() if _parent(p, tree) == path]
        assert split.self_total + sum(c.total for c in children) == split.total, path
    roots = [split for path, split in tree.items() if _parent(path, tree) is None]
    assert sum(split.total for split in roots) == flops.total
    for phase in ("forward", "backward", "recompute", "optimizer", "outside"):
        assert sum(getattr(split, phase) for split in roots) == getattr(flops, phase)
    assert sum(flops.by_op.values()) == sum(flops.by_dtype.values()) == flops.total


def _parent(path: str, tree: dict[str, Any]) -> str | None:
    if path in ("", "(outside)"):
        return None
    while "." in path:
        path = path.rpartition(".")[0]
        if path in tree:
            return path
    return "" if "" in tree else None


@pytest.mark.parametrize("kind", [None, "reentrant", "nonreentrant"])
def test_every_module_has_its_own_in_forward_backward_and_recompute(kind: str | None) -> None:
    torch.manual_seed(0)
    model = GPT(n_layers=3, kind=kind)
    ids = torch.randint(0, 256, (2, 64))
    with tl.Ledger(model) as ledger:
        model(ids, ids).backward()
    flops = ledger.report.flops
    assert_tree(flops)
    tokens, width = 2 * 64, 64
    up = 2 * tokens * width * 4 * width
    for i in range(3):
        for name, cost in (("up", up), ("down", up), ("qkv", 3 * up // 4), ("project", up // 4)):
            split = flops.by_module[f"blocks.{i}.{name}"]
            assert (split.forward, split.backward, split.self_total) == (
                cost,
                2 * cost,
                3 * cost + split.recompute,
            )
            # Early stop: the last product's output is saved by nobody.
            expected = 0 if kind is None or (kind == "nonreentrant" and name == "down") else cost
            assert split.recompute == expected
    head = flops.by_module["head"]
    assert (head.forward, head.backward) == (2 * tokens * width * 256, 4 * tokens * width * 256)
    attention = flops.by_module["blocks.0"].self_total
    assert attention > 0


def test_parameters_by_product() -> None:
    model = Residual()
    x = torch.randn(ROWS, 16)
    with tl.Ledger(model) as ledger:
        model(x).sum().backward()
    product = 2 * ROWS * 16 * 64
    rows = ledger.report.flops.by_parameter
    assert rows["a.weight"] == tl.ParameterFlops(forward=product, input_grad=0, weight_grad=product, recompute=0)
    assert rows["b.weight"] == tl.ParameterFlops(forward=product, input_grad=product, weight_grad=product, recompute=0)
    assert set(rows) == {"a.weight", "b.weight"}


@pytest.mark.parametrize("reentrant", [False, True])
def test_parameters_by_product_in_recompute(reentrant: bool) -> None:
    model = Residual()
    x = torch.randn(ROWS, 16, requires_grad=True)
    with tl.Ledger(model) as ledger:
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    product = 2 * ROWS * 16 * 64
    rows = ledger.report.flops.by_parameter
    assert rows["a.weight"] == tl.ParameterFlops(product, product, product, product)
    assert rows["b.weight"] == tl.ParameterFlops(product, product, product, product if reentrant else 0)


def test_parameters_under_autocast_and_in_convolutions() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 64, 5))
    x = torch.randn(2, 3, 8, 8)
    with tl.Ledger(model) as ledger:
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        y.sum().backward()
    conv, linear = 2 * 2 * 64 * 4 * 27, 2 * 2 * 256 * 5
    rows = ledger.report.flops.by_parameter
    assert rows["0.weight"] == tl.ParameterFlops(conv, 0, conv, 0)
    assert rows["2.weight"] == tl.ParameterFlops(linear, linear, linear, 0)
    assert set(ledger.report.flops.by_dtype) == {"bfloat16"}


def test_tied_weights_have_one_name_and_all_their_products() -> None:
    model = GPT(n_layers=1)
    ids = torch.randint(0, 256, (1, 64))
    with tl.Ledger(model) as ledger:
        model(ids, ids).backward()
    rows = ledger.report.flops.by_parameter
    product = 2 * 64 * 64 * 256
    assert rows["tokens.weight"] == tl.ParameterFlops(product, product, product, 0)
    assert "head.weight" not in rows


def test_frozen_weight_has_no_weight_gradient() -> None:
    model = Residual()
    model.b.weight.requires_grad_(False)
    with tl.Ledger(model) as ledger:
        model(torch.randn(ROWS, 16)).sum().backward()
    product = 2 * ROWS * 16 * 64
    assert ledger.report.flops.by_parameter["b.weight"] == tl.ParameterFlops(product, product, 0, 0)


@dataclass
class Output:
    y: torch.Tensor
    extra: dict[str, torch.Tensor]


class Odd(nn.Module):
    """Keyword inputs, a dataclass out, one layer under two names, recursion, a module that raises."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16, bias=False)
        self.again = self.first
        self.raising = Raising()

    def forward(self, *, x: torch.Tensor, depth: int = 2) -> Output:
        if depth:
            inner = self(x=x, depth=depth - 1)
            y = self.first(inner.y) + self.again(inner.extra["x"])
        else:
            y = x @ x.T @ x
        with contextlib.suppress(ValueError):
            self.raising(y)
        return Output(y, {"x": y})


class Raising(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _ = x @ x.T
        raise ValueError("caught by the caller")


def test_odd_modules() -> None:
    model = Odd()
    x = torch.randn(ROWS, 16)
    with tl.Ledger(model) as ledger:
        out = model(x=x)
        out.y @ out.y.T
        assert ledger._recorder is not None
        assert all(not place.stack for place in ledger._recorder.places.values())
    flops = ledger.report.flops
    assert_tree(flops)
    linear, square = 2 * ROWS * 16 * 16, 2 * ROWS * ROWS * 16
    assert flops.by_module["first"].self_total == 4 * linear
    assert flops.by_module["raising"].self_total == 3 * square
    assert flops.by_module[""].self_total == 2 * square
    assert flops.by_module["(outside)"].total == square


def test_models_and_optimizers_are_found_as_they_run() -> None:
    model = Residual()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(ROWS, 16)
    with tl.Ledger() as ledger:
        for _ in range(2):
            nn.MSELoss()(model(x), x).backward()
            optimizer.step()
            optimizer.zero_grad()
            ledger.step()
    flops = ledger.report.flops
    assert set(flops.by_module) == {"", "a", "b"}
    assert set(flops.by_parameter) == {"a.weight", "b.weight"}
    end = ledger.report.steps[-1].memory["cpu"].end
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert (end.parameters, end.optimizer_state, end.other) == (weights, 2 * weights + 4 * 4, 0)


def test_several_root_models_begin_with_their_class_names() -> None:
    class Generator(Residual):
        pass

    class Critic(Residual):
        pass

    generator, critics = Generator(), [Critic(), Critic()]
    x = torch.randn(ROWS, 16)
    for ledger in (tl.Ledger(), tl.Ledger([generator, *critics])):
        with ledger:
            y = generator(x)
            (critics[0](y) + critics[1](y)).sum().backward()
        assert set(ledger.report.flops.by_module) == {
            *("Generator", "Generator.a", "Generator.b"),
            *("Critic", "Critic.a", "Critic.b"),
            *("Critic2", "Critic2.a", "Critic2.b"),
        }
        assert "Critic2.a.weight" in ledger.report.flops.by_parameter
        assert_tree(ledger.report.flops)


def test_a_part_that_runs_before_its_model_is_renamed() -> None:
    model = nn.ModuleDict({"encoder": Residual(), "decoder": Residual()})

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts["decoder"](self.parts["encoder"](x))

    whole, x = Whole(), torch.randn(ROWS, 16)
    with tl.Ledger() as ledger:
        model["encoder"](x)
        whole(x)
    assert set(ledger.report.flops.by_module) == {
        *("", "parts", "parts.encoder", "parts.encoder.a", "parts.encoder.b"),
        *("parts.decoder", "parts.decoder.a", "parts.decoder.b"),
    }


def test_double_backward_stays_with_the_modules() -> None:
    model = nn.Sequential(Residual(), Residual())
    x = torch.randn(ROWS, 16, requires_grad=True)
    with tl.Ledger(model) as ledger:
        y = model(x).pow(2).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        g.pow(2).sum().backward()
    tree = ledger.report.flops.by_module
    assert_tree(ledger.report.flops)
    assert "(outside)" not in tree
    assert all(tree[f"{i}.{name}"].backward > 0 for i in (0, 1) for name in "ab")


def test_weights_made_on_the_fly_are_followed_through_copies() -> None:
    model = nn.Linear(16, 4, bias=False)
    x = torch.randn(ROWS, 16)
    with tl.Ledger(model) as ledger:
        (x.double() @ model.weight.t().contiguous().double()).sum().backward()
    product = 2 * ROWS * 16 * 4
    assert ledger.report.flops.by_parameter["weight"] == tl.ParameterFlops(product, 0, product, 0)


def test_raw_leaf_parameters_of_an_optimizer() -> None:
    w = torch.randn(16, 4, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)
    x = torch.randn(ROWS, 16)
    with tl.Ledger(None, optimizer) as ledger:
        (x @ w).sum().backward()
        optimizer.step()
    peak = ledger.report.peak
    assert peak.parameters == 16 * 4 * 4
    assert ledger.report.flops.by_parameter["SGD.param_groups.0.0"].forward == 2 * ROWS * 16 * 4
