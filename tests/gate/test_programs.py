"""Which two models are one program that was changed, and which are different programs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import torchledger as tl
from torchledger.cli.main import main
from torchledger.gate.comparison import compare_reports, compare_runs
from torchledger.gate.programs import explain_unrelated
from torchledger.journal.evidence import ParameterEvidence, StepEvidence
from torchledger.journal.statements import FlopStatement, RunStatement, StepReport
from torchledger.render.comparison import comparison_sections
from torchledger.render.github import annotation_lines
from torchledger.render.text import render_sections
from torchledger.report import Report


class Block(nn.Module):
    def __init__(self, width: int, n_layers: int) -> None:
        super().__init__()
        self.table = nn.Embedding(50, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=True) for _ in range(n_layers)
        )
        self.head = nn.Linear(width, 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.table(x)
        for layer in self.layers:
            y = layer(y)
        return self.head(y)


def ids() -> torch.Tensor:
    return torch.randint(0, 50, (2, 8))


def vectors() -> torch.Tensor:
    return torch.randn(4, 16)


def images() -> torch.Tensor:
    return torch.randn(2, 1, 8, 8)


def mlp(width: int = 32) -> nn.Module:
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 16))


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 16)),
    )


Model = tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]
MODELS: dict[str, Model] = {
    "mlp": (mlp, vectors),
    "wide mlp": (lambda: mlp(48), vectors),
    "named mlp": (lambda: nn.ModuleDict({"net": mlp()})["net"], vectors),
    "wrapped mlp": (lambda: nn.Sequential(mlp()), vectors),
    "deep mlp": (lambda: nn.Sequential(*mlp(), *(nn.Linear(16, 16) for _ in range(8))), vectors),
    "cnn": (cnn, images),
    "transformer": (lambda: Block(16, 2), ids),
    "deep transformer": (lambda: Block(16, 5), ids),
    "wide transformer": (lambda: Block(32, 2), ids),
    "lstm": (lambda: nn.LSTM(16, 8), vectors),
    "linear": (lambda: nn.Linear(16, 16), vectors),
    "bilinear and more": (lambda: nn.Sequential(nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 4, 3), nn.PReLU()), vectors),
}


@functools.cache
def record(name: str) -> Report:
    make, batch = MODELS[name]
    model = make()
    with tl.Ledger(model) as ledger:
        found = model(batch())
        (found[0] if isinstance(found, tuple) else found).sum().backward()
    return ledger.report


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("mlp", "cnn"),
        ("mlp", "transformer"),
        ("cnn", "transformer"),
        ("lstm", "mlp"),
        ("lstm", "linear"),
        ("deep mlp", "transformer"),
        ("wide mlp", "wide transformer"),
        ("bilinear and more", "linear"),
    ],
)
def test_unrelated_models_are_different_programs(one: str, other: str) -> None:
    for base, head in ((one, other), (other, one)):
        found = compare_runs(record(base), record(head))
        assert found.unrelated.startswith("different programs (")
        assert {str(item.outcome) for item in found.verdicts} == {"NO-MATCH"}
        comparisons = compare_reports({"": record(base)}, {"": record(head)})
        assert comparisons.exit_code == 3
        page = render_sections(comparison_sections(comparisons), 80)
        assert page.startswith("NO-MATCH: different programs (")
        assert "REGRESSION" not in page
        assert "WIN" not in page
        (line,) = [line for line in annotation_lines(comparisons) if line.startswith("::error")]
        assert "different programs" in line


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("mlp", "mlp"),
        ("mlp", "wide mlp"),
        ("mlp", "wrapped mlp"),
        ("mlp", "named mlp"),
        ("mlp", "deep mlp"),
        ("transformer", "deep transformer"),
        ("transformer", "wide transformer"),
        ("deep transformer", "wide transformer"),
    ],
)
def test_a_changed_model_is_the_same_program(one: str, other: str) -> None:
    for base, head in ((one, other), (other, one)):
        assert explain_unrelated(record(base), record(head)) == ""
        assert compare_reports({"": record(base)}, {"": record(head)}).exit_code in (0, 1)


def run_of(**parameters: tuple[int, ...]) -> RunStatement:
    rows = {}
    for name, shape in parameters.items():
        n = int(torch.Size(shape).numel())
        rows[name.replace("__", ".")] = ParameterEvidence(n, len(shape), 4 * n, "float32", "cpu", True, "product")
    step = StepReport(0, None, 0.0, FlopStatement(), {})
    return RunStatement((replace(step, evidence=StepEvidence(rows)),), 1)


def test_wrappers_are_no_part_of_a_name() -> None:
    plain = run_of(a__weight=(4, 4), b__weight=(4, 8))
    for wrapped in (
        run_of(module__a__weight=(8, 8), module__b__weight=(8, 16)),
        run_of(_orig_mod__a__weight=(8, 8), _orig_mod__b__weight=(8, 16)),
        run_of(base_model__a__base_layer__weight=(8, 8), base_model__b__base_layer__weight=(8, 16)),
    ):
        assert explain_unrelated(plain, wrapped) == explain_unrelated(wrapped, plain) == ""
    assert explain_unrelated(plain, run_of(c__weight=(8, 8), d__weight=(8, 16)))


def test_how_much_is_enough() -> None:
    base = run_of(a=(2, 2), b=(3, 3), c=(4, 4), d=(5, 5))
    assert explain_unrelated(base, run_of(a=(7, 7), b=(8, 8), x=(9, 9), y=(6, 6))) == ""
    assert explain_unrelated(base, run_of(a=(7, 7), w=(8, 8), x=(9, 9), y=(6, 6))) == (
        "different programs (4 against 4 weights, of which 1 have the same name and use)"
    )
    assert explain_unrelated(base, run_of(v=(4, 4), w=(5, 5), x=(2, 2))) == ""  # 45 of 54 elements
    assert explain_unrelated(base, run_of(v=(3, 3), w=(5, 5), x=(2, 2), y=(1, 1)))  # 38 of 54


def test_without_parameters_nothing_is_claimed() -> None:
    assert explain_unrelated(run_of(), run_of(a=(2, 2))) == ""
    assert explain_unrelated(RunStatement(), run_of(a=(2, 2))) == ""


def test_the_command_line_says_so(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("mlp", "cnn"):
        record(name).save(f"{tmp_path}/{name}.json")
    assert main(["compare", f"{tmp_path}/mlp.json", f"{tmp_path}/cnn.json"]) == 3
    assert capsys.readouterr().out.startswith("NO-MATCH: different programs (3 against 3 weights")
