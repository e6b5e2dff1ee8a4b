"""GPT-2 124M without memory: the published arithmetic's figures, term by term, and its peak in its second step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torchledger as tl
from analytic.transformers_by_hand import Model
from models import GPT
from reconciling import record, terms_of

L, E, H, V, T = 12, 768, 12, 50_257, 1024
N = 124_439_808
BASE = {
    "attention": 115_964_116_992,
    "embeddings": -4_831_838_208,
    "norms": -235_929_600,
    "biases": -509_607_936,
}
RECOMPUTE = {"recompute": 212_600_881_152}
EARLY = {"early_stop": -57_982_058_496}
RESCORE = {"attention_rescore": 19_327_352_832}
FIGURES: dict[str, tuple[str | None, bool, dict[str, int], int]] = {
    "plain": (None, False, BASE, 874_944_921_600),
    "reentrant": ("reentrant", False, BASE | RECOMPUTE, 1_087_545_802_752),
    "nonreentrant": ("nonreentrant", False, BASE | RECOMPUTE | EARLY, 1_029_563_744_256),
    "fused": (None, True, BASE | RESCORE, 894_272_274_432),
}


def fuse(patch: pytest.MonkeyPatch) -> None:
    """On meta attention runs as two products: call the fused kernel by its name."""

    def attend(q: Any, k: Any, v: Any, is_causal: bool = False) -> Any:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)[0]

    patch.setattr(F, "scaled_dot_product_attention", attend)


def step_of(batch: int, kind: str | None, *, steps: int = 1, sizes: Any = (L, E, H, V, T)) -> tl.StepReport:
    with torch.device("meta"):
        n_layers, width, n_heads, vocabulary, seq = sizes
        model = GPT(n_layers, width, n_heads, vocabulary, seq, kind)
        ids = torch.zeros(batch, seq, dtype=torch.long)
        return record(model, lambda: model(ids, ids).backward(), steps=steps)


@pytest.mark.parametrize(("name", "batch"), [*((name, 1) for name in FIGURES), ("plain", 4)])
def test_figures(name: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, fused, terms, measured = FIGURES[name]
    if fused:
        fuse(monkeypatch)
    bridge = tl.reconcile(step_of(batch, kind), spec=tl.TransformerSpec.gpt2("124M")).flops
    assert bridge.predicted == 6 * N * batch * T == batch * 764_558_180_352
    assert terms_of(bridge) == {term: batch * value for term, value in terms.items()}
    assert bridge.measured == bridge.closed_form == batch * measured
    assert bridge.residual == 0
    assert {term.name: term.closed_form for term in bridge.terms} == terms_of(bridge)
    assert bridge.rule == f"6·N·D, N {N:,} parameters, D {batch * T:,} tokens (elements of the first integer input)"


@pytest.mark.parametrize("fused", [False, True], ids=["math", "fused"])
@pytest.mark.parametrize("kind", [None, "reentrant", "nonreentrant"])
def test_where_attention_is_not_a_linear_layer(kind: str | None, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # On GPT-2, 6·T = 8·d: half the attention and one early-stopped linear layer are the same number. Not here.
    if fused:
        fuse(monkeypatch)
    n_layers, width, vocabulary, seq, batch = 3, 96, 500, 160, 2
    bridge = tl.reconcile(step_of(batch, kind, sizes=(n_layers, width, 4, vocabulary, seq))).flops
    d, square = batch * seq, batch * seq * seq * width
    layer = 2 * d * 12 * width * width + 4 * square
    terms = {
        "attention": 12 * n_layers * square,
        "embeddings": -6 * d * seq * width,
        "norms": -6 * d * (2 * n_layers + 1) * 2 * width,
        "biases": -6 * d * n_layers * 9 * width,
        "recompute": n_layers * layer if kind else 0,
        "early_stop": -n_layers * 8 * d * width * width if kind == "nonreentrant" else 0,
        "attention_rescore": 2 * n_layers * square if fused else 0,
    }
    assert terms_of(bridge) == {name: value for name, value in terms.items() if value}
    assert bridge.residual == 0


def test_memory_of_the_second_step() -> None:
    spec = tl.TransformerSpec.gpt2("124M")
    with torch.device("meta"):
        model = Model(spec)
        ids = torch.zeros(1, T, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())

    def run() -> None:
        model(ids, ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    found = tl.reconcile(record(model, run, optimizer, steps=2))
    bridge = found.memory
    logits = 4 * T * V
    assert bridge.predicted == 16 * N == 1_991_036_928
    # The loss is a scalar among the activations; the step counts of AdamW are on the CPU, even here.
    assert terms_of(bridge) == {
        "gradients_absent": -4 * N,
        "activations": 1_432_899_584 + 4,
        "inputs": 8 * T,
        "temporaries": 2 * logits + 4,
    }
    assert -4 * N == -497_759_232
    assert 2 * logits + 8 == 411_705_352
    assert (bridge.measured, bridge.residual) == (3_337_890_824, 0)
    assert bridge.notes[0].startswith("the peak lies in backward")
    peaks = {peak.phase: peak for peak in found.phase_peaks}
    assert list(peaks) == ["forward", "backward", "optimizer", "outside"]
    # Parameter by parameter on meta, AdamW holds twice the largest one, the token embedding, which is its first.
    assert peaks["optimizer"].total_bytes == 16 * N + 8 * T + 2 * 4 * V * E
    assert "checkpoint" in peaks["backward"].advice
