"""tl.reconcile: D and where it comes from, bad arguments, saved reports, formulas that are missing or wrong."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchledger as tl
from models import GPT
from reconciling import Hand, check, ids_of, record, terms_of, total
from torchledger.errors import UsageError
from torchledger.flops import declared
from torchledger.flops.rules import ENTRIES
from torchledger.journal.evidence import StepEvidence
from torchledger.journal.statements import StepReport

D = 5


def linear_step(**options: Any) -> tl.StepReport:
    model = nn.Linear(8, 4, bias=False)
    return record(model, total(model, None, torch.randn(D, 8)), **options)


# D


def by_ids() -> Any:
    model = GPT(n_layers=1, width=16, n_heads=2, vocabulary=32, seq=8)
    ids = ids_of(3, 8)
    return model, lambda: model(ids, ids).sum().backward()


def by_ids_twice() -> Any:
    model, run = by_ids()
    return model, lambda: (run(), run())


def by_rows() -> Any:
    model = nn.Linear(8, 4)
    x = torch.randn(D, 8)
    return model, lambda: model(x).sum().backward()


def by_keyword() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(32, 8)

        def forward(self, *, mask: Tensor, batch: dict[str, Tensor]) -> Tensor:
            return self.embed(batch["ids"]) * mask[..., None]

    model = Model()
    ids = ids_of(3, 7)
    return model, lambda: model(mask=torch.ones(3, 7), batch={"ids": ids}).sum().backward()


def by_function() -> Any:
    table, weight = nn.Embedding(32, 8).weight, nn.Parameter(torch.randn(8, 4))
    model = nn.ParameterList([table, weight])
    ids = ids_of(2, 9)
    return model, lambda: (torch.embedding(model[0], ids) @ model[1]).sum().backward()


def by_function_of_rows() -> Any:
    model = nn.ParameterList([torch.randn(8, 4)])
    x = torch.randn(D, 8)
    return model, lambda: (x @ model[0]).sum().backward()


IDS, ROWS = "elements of the first integer input", "batch size"


@pytest.mark.parametrize(
    ("make", "tokens", "how"),
    [
        (by_ids, 24, IDS),
        (by_ids_twice, 48, IDS),
        (by_rows, D, ROWS),
        (by_keyword, 21, IDS),
        (by_function, 18, IDS),
        (by_function_of_rows, D, ROWS),
    ],
    ids=["ids", "accumulated", "rows", "keyword", "function", "function_of_rows"],
)
def test_tokens(make: Callable[[], Any], tokens: int, how: str) -> None:
    bridge = tl.reconcile(record(*make())).flops
    assert f"D {tokens:,} tokens ({how})" in bridge.rule
    assert bridge.residual == 0


def test_tokens_that_are_told() -> None:
    model, run = by_ids()
    told = record(model, run, tokens=17)
    assert "D 17 tokens (tokens_per_step)" in tl.reconcile(told).flops.rule
    bridge = tl.reconcile(told, tokens=10).flops
    assert "D 10 tokens (given)" in bridge.rule
    assert bridge.residual == 0


def test_rows_that_are_told_more_or_less_of_are_reuse() -> None:
    step = linear_step()
    assert terms_of(tl.reconcile(step, tokens=2).flops) == {"reuse": 6 * 3 * 32, "no_input_gradient": -2 * D * 32}


def test_tokens_that_nobody_knows() -> None:
    model = nn.ParameterList([torch.randn(8, 8), torch.randn(8, 8)])
    step = record(model, lambda: (model[0] @ model[1]).sum().backward())
    with pytest.raises(UsageError, match=r"tokens of step 0 are not known: give reconcile\(step, tokens=...\)"):
        tl.reconcile(step)
    bridge = tl.reconcile(step, tokens=8).flops
    # The first of two parameters is the weight, the second its rows.
    assert bridge.measured == 3 * 2 * 8 * 64
    assert bridge.residual == 0


# Bad arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, r"tokens=0"),
        ({"tokens": -3}, r"tokens=-3"),
        ({"tokens": True}, r"tokens=True"),
        ({"tokens": 2.5}, r"tokens=2.5"),
        ({"tokens": "10"}, r"tokens='10'"),
        ({"spec": "gpt2"}, r"spec=str"),
        ({"experts": "("}, r"experts='\('.*regular expression"),
        ({"experts": 3}, r"experts=3.*regular expression"),
    ],
    ids=["none", "negative", "bool", "float", "text", "spec", "pattern", "number"],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        tl.reconcile(linear_step(), **options)


@pytest.mark.parametrize("step", [None, 3, {}, tl.Report()], ids=["none", "int", "dict", "report"])
def test_what_is_no_step(step: Any) -> None:
    with pytest.raises(UsageError, match="give one step"):
        tl.reconcile(step)


def test_a_step_without_parameters() -> None:
    with tl.Ledger() as ledger:
        torch.ones(3, 4) @ torch.ones(4, 5)
    with pytest.raises(UsageError, match="has no parameters to reconcile with"):
        tl.reconcile(ledger.report.steps[0])
    with pytest.raises(UsageError):
        tl.reconcile(StepReport(0, 5, 0.0, tl.FlopStatement(), {}, StepEvidence()))


# Saved reports


@pytest.mark.parametrize("kind", [None, "nonreentrant"])
def test_a_saved_report_reconciles_alike(kind: str | None, tmp_path: Path) -> None:
    model = GPT(n_layers=2, width=16, n_heads=2, vocabulary=32, seq=8, kind=kind)
    ids = ids_of(2, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    with tl.Ledger(model, optimizer) as ledger:
        for _ in range(2):
            model(ids, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
            ledger.step()
    ledger.report.save(tmp_path / "report.json")
    loaded = tl.Report.load(tmp_path / "report.json")
    for step, again in zip(ledger.report.steps, loaded.steps, strict=True):
        before, after = tl.reconcile(step), tl.reconcile(again)
        assert before == after
        assert str(before) == str(after)
        assert before.flops.residual == before.memory.residual == 0


# Formulas that are missing or wrong


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    saved = dict(declared.DECLARED)
    yield
    declared.DECLARED.clear()
    declared.DECLARED.update(saved)


def test_a_wrong_formula_stays_in_the_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = ENTRIES["aten.mm"]
    monkeypatch.setitem(ENTRIES, "aten.mm", entry._replace(formula=lambda *args: 7 * entry.formula(*args) + 1))
    # Forward and weight gradient, each 2·D·32 by right: what is off has no name.
    check(Hand(linear_step(), D, {"no_input_gradient": -2 * D * 32}, left=2 * (6 * 2 * D * 32 + 1)))


def test_a_wrong_formula_of_a_layer_that_is_checkpointed(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = ENTRIES["aten.convolution"]
    monkeypatch.setitem(ENTRIES, "aten.convolution", entry._replace(formula=lambda *args: 3 * entry.formula(*args)))
    model = nn.Conv2d(2, 4, 3, bias=False)
    step = record(model, total(model, None, torch.randn(D, 2, 5, 5)))
    n, places = 4 * 18, 9
    terms = {"reuse": 6 * D * n * (places - 1), "no_input_gradient": -2 * D * n * places}
    check(Hand(step, D, terms, left=2 * 2 * D * n * places))


@torch.library.custom_op("reconcile_test::project", mutates_args=())
def project(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


@project.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


project.register_autograd(
    lambda ctx, grad: (project(grad, ctx.saved_tensors[1].t()), project(ctx.saved_tensors[0].t(), grad)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def project_step() -> tl.StepReport:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.w = nn.Linear(8, 8, bias=False), nn.Parameter(torch.randn(8, 4))

        def forward(self, x: Tensor) -> Tensor:
            return project(self.before(x), self.w)

    model = Model()
    return record(model, total(model, None, torch.randn(D, 8)))


def test_a_missing_formula_is_named_as_uncounted() -> None:
    found = check(Hand(project_step(), D, {"no_input_gradient": -2 * D * 64, "uncounted": -6 * D * 32}))
    (why,) = (term.why for term in found.flops.terms if term.name == "uncounted")
    assert "reconcile_test.project (3 calls)" in why


def test_the_same_op_with_a_formula() -> None:
    tl.formula(project)(lambda x, w, *, out_shape: 2 * x[0] * x[1] * w[1])
    check(Hand(project_step(), D, {"no_input_gradient": -2 * D * 64}))


# Compiled


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled(backend: str) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 4, bias=False))
    function = torch.compile(model, backend=backend)
    x = torch.randn(8, 16)
    step = record(model, lambda: function(x).sum().backward(), steps=2)
    found = check(Hand(step, 8, {"no_input_gradient": -2 * 8 * 512}))
    if backend == "inductor":
        assert "compiled regions" in " ".join(found.flops.notes)


# How much work it is


def count_calls(call: Callable[[], Any]) -> int:
    """Python calls of torchledger's own functions."""
    n = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal n
        n += event == "call" and "torchledger" in frame.f_code.co_filename

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return n


def deep_step(n_layers: int) -> tl.StepReport:
    with torch.device("meta"):
        model = GPT(n_layers, 16, 2, 32, 8)
        ids = torch.zeros(2, 8, dtype=torch.long)
        return record(model, lambda: model(ids, ids).backward())


def test_work_grows_with_parameters_alone() -> None:
    calls = {n: count_calls(functools.partial(tl.reconcile, deep_step(n))) for n in (10, 40)}
    parameters = 40 * 12 + 4
    assert calls[40] < 30 * parameters
    assert calls[40] < 4.2 * calls[10]


# Text


def test_text() -> None:
    found = tl.reconcile(linear_step())
    text = str(found)
    assert "residual 0: every difference has a name" in text
    assert "no_input_gradient" in text
    for term in (*found.flops.terms, *found.memory.terms):
        assert f"{term.value:+,}" in text
    assert {peak.phase for peak in found.phase_peaks} <= {"forward", "backward", "recompute", "optimizer", "outside"}
