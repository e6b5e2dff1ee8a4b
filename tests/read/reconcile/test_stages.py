"""`reuse` by stage, and D in output positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchledger as tl
from reconciling import record, terms_of, total
from torchledger.cli.main import main
from torchledger.errors import UsageError
from torchledger.read.reconcile.bridge import Part
from torchledger.read.reconcile.flops import count_positions
from torchledger.read.reconcile.stages import MOST_STAGES, Reused, split_by_stage

IMAGES = 2


class Net(nn.Module):
    """A stem at 16 x 16, a stage at 8 x 8 of two blocks, one at 4 x 4, and a head that meets one row an image."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3, padding=1, bias=bias), nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(nn.Conv2d(4, 8, 2, 2, bias=bias), nn.Conv2d(8, 8, 1, bias=bias))
        self.layer2 = nn.Sequential(nn.Conv2d(8, 16, 2, 2, bias=bias))
        self.head = nn.Linear(16, 5, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.norm(self.stem(x)).relu()).relu())
        return self.head(x.mean((2, 3)))


N = {"stem": 4 * 27, "layer1": 8 * 16 + 64, "layer2": 16 * 32, "head": 80}
PLACES = {"stem": 256, "layer1": 64, "layer2": 16, "head": 1}


def net_step(**options: Any) -> tl.StepReport:
    model = Net(**options)
    return record(model, total(model, None, torch.randn(IMAGES, 3, 16, 16)))


def test_reuse_by_stage() -> None:
    (term,) = (t for t in tl.reconcile(net_step()).flops.terms if t.name == "reuse")
    values = {name: 6 * IMAGES * N[name] * (PLACES[name] - 1) for name in ("stem", "layer1", "layer2")}
    assert {part.name: part.value for part in term.parts} == values
    assert term.value == sum(values.values())
    assert term.parts[1] == Part("layer1", values["layer1"], "192 parameters met 64 rows for each of D")
    text = str(tl.reconcile(net_step()))
    assert "What reuse is made of" in text
    assert all(name in text for name in values)


@pytest.mark.parametrize("bias", [False, True])
def test_positions_leave_no_reuse(bias: bool) -> None:
    step = net_step(bias=bias)
    bridge = tl.reconcile(step, tokens="positions").flops
    products = sum(6 * IMAGES * N[name] * PLACES[name] for name in N)
    # A bias and a norm are at work where the layer before them is.
    norms = 6 * IMAGES * 256 * 8
    biases = 6 * IMAGES * (256 * 4 + 64 * 16 + 16 * 16 + 5) * bias
    assert bridge.predicted == products + norms + biases
    expected = {"norms": -norms, "biases": -biases, "no_input_gradient": -2 * IMAGES * 256 * N["stem"]}
    assert terms_of(bridge) == {name: value for name, value in expected.items() if value}
    assert bridge.residual == 0
    assert "D of each the output positions of its products: 2 to 512" in bridge.rule
    assert bridge.measured == tl.reconcile(step).flops.measured


@pytest.mark.parametrize("layer", [nn.Conv1d(4, 8, 3), nn.Conv2d(4, 8, 3), nn.ConvTranspose2d(4, 8, 2, 2)])
def test_one_layer(layer: nn.Module) -> None:
    shape = (IMAGES, 4, 9) if isinstance(layer, nn.Conv1d) else (IMAGES, 4, 9, 9)
    x = torch.randn(shape, requires_grad=True)
    bridge = tl.reconcile(record(layer, total(layer, None, x)), tokens="positions").flops
    places = {nn.Conv1d: 7, nn.Conv2d: 49, nn.ConvTranspose2d: 81}[type(layer)] * IMAGES
    n = sum(p.numel() for p in layer.parameters())
    assert bridge.predicted == 6 * n * places
    assert terms_of(bridge) == {"biases": -6 * 8 * places}


def test_positions_without_any_product() -> None:
    model = nn.Embedding(7, 4)
    bridge = tl.reconcile(record(model, total(model, None, torch.arange(5))), tokens="positions").flops
    assert (bridge.predicted, bridge.measured, bridge.residual) == (0, 0, 0)
    assert count_positions({}) == {}


def test_positions_and_closed_forms() -> None:
    with pytest.raises(UsageError, match="closed forms are per token"):
        tl.reconcile(net_step(), tokens="positions", spec=tl.TransformerSpec.gpt2("124M"))
    with pytest.raises(UsageError, match="positions"):
        tl.reconcile(net_step(), tokens="places")


def test_show_with_positions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Net()
    with tl.Ledger(model) as ledger:
        model(torch.randn(IMAGES, 3, 16, 16)).sum().backward()
    ledger.report.save(tmp_path / "net.json")
    assert main(["show", str(tmp_path / "net.json"), "--reconcile", "--tokens", "positions"]) == 0
    text = capsys.readouterr().out
    assert "output positions" in text
    assert "reuse" not in text
    assert main(["show", str(tmp_path / "net.json"), "--reconcile", "--tokens", "2"]) == 0
    assert "What reuse is made of" in capsys.readouterr().out


# Stages by name


def rows(*names: str, value: int = 60) -> list[Reused]:
    return [Reused(name, 10, 20, value) for name in names]


@pytest.mark.parametrize(
    ("names", "stages"),
    [
        (("conv1.weight", "layer1.0.w", "layer1.1.w", "layer2.0.w"), ["conv1", "layer1", "layer2"]),
        (("net.a.stages.0.c.w", "net.a.stages.1.c.w", "net.b.w"), ["net.a.stages.0", "net.a.stages.1", "net.b"]),
        (("0.weight", "2.weight"), ["0", "2"]),
        (("weight",), [""]),
        (("m.weight",), ["m"]),
        (("m.weight", "m.n.weight"), ["m", "m.n"]),
        (tuple(f"features.{i}.weight" for i in range(40)), ["features"]),
    ],
)  # fmt: skip
def test_stages(names: tuple[str, ...], stages: list[str]) -> None:
    parts = split_by_stage(rows(*names), 1)
    assert [part.name for part in parts] == stages
    assert sum(part.value for part in parts) == 60 * len(names)
    assert len(parts) <= MOST_STAGES


def test_a_step_without_a_backward_says_so_first() -> None:
    model = Net()
    with tl.Ledger(model) as ledger, torch.no_grad():
        model(torch.randn(IMAGES, 3, 16, 16))
    found = tl.reconcile(ledger.report.steps[0])
    assert found.flops.notes[0].startswith("this step has no backward")
    assert "this step has no backward" in str(found).split("FLOPs: from")[0]
    assert found.flops.residual == 0
    assert not tl.reconcile(net_step()).flops.caveat
