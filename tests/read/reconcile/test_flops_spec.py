"""With a spec, each term stands beside its closed form: equal, in each kind of attention and checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchledger as tl
from analytic.transformers_by_hand import Model
from reconciling import ids_of, record, terms_of
from torchledger.errors import UsageError

SIZES: dict[str, Any] = {"vocabulary": 48, "width": 32, "n_layers": 3, "n_heads": 4, "ff_width": 56, "max_seq": 24}
LLAMA: dict[str, Any] = {
    "n_kv_heads": 2, "gated": True, "activation": "silu", "norm": "rms", "positions": "rotary", "max_seq": 0,
    "biases": (),
}  # fmt: skip
SPECS: dict[str, tl.TransformerSpec] = {
    "gpt": tl.TransformerSpec(**SIZES, tied=True),
    "gpt_untied": tl.TransformerSpec(**SIZES, tied=False),
    "llama": tl.TransformerSpec(**{**SIZES, **LLAMA}, tied=False),
    "llama_tied": tl.TransformerSpec(**{**SIZES, **LLAMA}, tied=True),
    "mixtral": tl.TransformerSpec(**{**SIZES, **LLAMA}, tied=False, n_experts=4, n_active_experts=2),
}
KINDS: dict[str, dict[str, Any]] = {
    "none": {},
    "reentrant": {"kind": "reentrant"},
    "nonreentrant": {"kind": "nonreentrant"},
    "selective": {"selective": True},
}
B, T = 2, 20


# Selective recompute is of attention's two products, which the fused kernel hides.
HOW = [(kind, fused) for kind in KINDS for fused in (False, True) if not (fused and kind == "selective")]


@pytest.mark.parametrize(("kind", "fused"), HOW, ids=[f"{kind}-{'fused' if fused else 'math'}" for kind, fused in HOW])
@pytest.mark.parametrize("name", SPECS)
def test_beside_its_closed_form(name: str, kind: str, fused: bool) -> None:
    spec = SPECS[name]
    model, ids = Model(spec, fused=fused, **KINDS[kind]), ids_of(B, T, spec.vocabulary)
    step = record(model, lambda: model(ids, ids).backward(), steps=2)
    bridge = tl.reconcile(step, spec=spec).flops
    closed = {term.name: term.closed_form for term in bridge.terms if term.closed_form}
    assert terms_of(bridge) == closed
    assert bridge.residual == 0
    assert bridge.measured == bridge.closed_form
    d, square = B * T, B * T * T * spec.width
    assert bridge.value("attention") == 12 * spec.n_layers * square
    assert bridge.value("attention_rescore") == (2 * spec.n_layers * square if fused else 0)
    tables = (0 if spec.tied else spec.vocabulary) + (spec.max_seq if spec.positions == "learned" else 0)
    assert bridge.value("embeddings") == -6 * d * spec.width * tables
    if kind == "selective":
        assert bridge.value("recompute") == 4 * spec.n_layers * square


def other(**changes: Any) -> tl.TransformerSpec:
    return tl.TransformerSpec(**{**SIZES, "tied": True, **changes})


@pytest.mark.parametrize(
    ("spec", "wrong"),
    [
        (other(ff_width=40), {"biases"}),
        (other(n_layers=2), {"attention", "norms", "biases"}),
        (other(tied=False), {"embeddings"}),
    ],
    ids=["ff_width", "layers", "untied"],
)
def test_a_spec_of_another_model_shows(spec: tl.TransformerSpec, wrong: set[str]) -> None:
    model, ids = Model(SPECS["gpt"]), ids_of(B, T, 48)
    bridge = tl.reconcile(record(model, lambda: model(ids, ids).backward()), spec=spec).flops
    assert {term.name for term in bridge.terms if term.value != term.closed_form} == wrong
    # Tied or not, the products are the same: what an untied head costs more by 6·N·D, its embedding takes away.
    assert (bridge.closed_form == bridge.measured) is (wrong == {"embeddings"})
    assert f"the spec has {spec.n_params:,} parameters, not {SPECS['gpt'].n_params:,}" in " ".join(bridge.notes)


def test_a_spec_needs_the_length_of_the_sequences() -> None:
    model = torch.nn.Linear(4, 4)
    x = torch.randn(3, 4)
    step = record(model, lambda: model(x).sum().backward())
    with pytest.raises(UsageError, match="sequence length of step 0 is not known"):
        tl.reconcile(step, spec=SPECS["gpt"])
