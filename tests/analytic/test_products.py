"""FLOPs and parameters against a measured ledger, HuggingFace's own models, and published figures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch

import torchledger as tl
from analytic.test_activations import SPECS, B, T
from analytic.transformers_by_hand import Model
from torchledger.analytic.products import count_pairs
from torchledger.analytic.transformer import TransformerSpec
from torchledger.errors import UsageError

GPT2 = TransformerSpec.gpt2("124M")


def measure(model: torch.nn.Module, batch: int = B, seq: int = T) -> tl.FlopStatement:
    device = next(model.parameters()).device
    ids = torch.zeros(batch, seq, dtype=torch.long, device=device)
    with tl.Ledger(model) as ledger:
        model(ids, ids).backward()
    flops = ledger.report.flops
    assert ledger.report.faults == ()
    assert flops.uncounted == {}
    return flops


@pytest.mark.parametrize("name", SPECS)
def test_parameters_of_a_real_model(name: str) -> None:
    spec, model = SPECS[name], Model(SPECS[name])
    assert spec.n_params == sum(p.numel() for p in model.parameters())
    experts = sum(
        p.numel() for layer in model.layers for p in getattr(layer.feed_forward, "experts", layer).parameters()
    )
    if spec.n_experts:
        share = experts // spec.n_experts
        assert spec.n_active_params == spec.n_params - share * (spec.n_experts - spec.n_active_experts)
    else:
        assert spec.n_active_params == spec.n_params


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", SPECS)
def test_a_training_step_of_a_real_model(name: str, tied: bool) -> None:
    spec = dataclasses.replace(SPECS[name], tied=tied)
    flops = measure(Model(spec))
    assert flops.forward == spec.forward_flops(B, T)
    assert flops.total == flops.model == spec.training_flops(B, T)


@pytest.mark.parametrize("name", SPECS)
def test_fused_attention(name: str) -> None:
    spec = SPECS[name]
    flops = measure(Model(spec, fused=True))
    assert flops.total == spec.training_flops(B, T, attention="fused")
    assert flops.model == spec.training_flops(B, T)
    assert flops.causal_model == spec.training_flops(B, T, causal=True)


@pytest.mark.parametrize("fused", [False, True], ids=["math", "fused"])
@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["plain", "dropout"])
@pytest.mark.parametrize("kind", ["reentrant", "nonreentrant"])
@pytest.mark.parametrize("name", ["gpt", "gpt-multi-query", "llama", "llama-relu", "mixture", "mixture-gelu"])
def test_full_checkpointing(name: str, kind: str, dropout: float, fused: bool) -> None:
    spec = dataclasses.replace(SPECS[name], dropout=dropout)
    flops = measure(Model(spec, kind=kind, fused=fused))
    how = {"attention": "fused" if fused else "math", "early_stop": kind == "nonreentrant"}
    assert flops.total == spec.training_flops(B, T, "full", **how)
    bridge = spec.flop_bridge(B, T, "full", **how)
    assert flops.recompute == bridge["recompute"] + bridge["early_stop"]
    assert flops.attention_rescore == bridge["attention_rescore"]


@pytest.mark.parametrize("name", SPECS)
def test_selective_checkpointing(name: str) -> None:
    spec = SPECS[name]
    flops = measure(Model(spec, selective=True))
    assert flops.total == spec.training_flops(B, T, "selective", early_stop=True)
    fused = measure(Model(spec, selective=True, fused=True))
    assert fused.total == spec.training_flops(B, T, "selective", early_stop=True, attention="fused")
    whole = spec.training_flops(B, T, "selective") - spec.training_flops(B, T)
    assert whole == 4 * B * spec.n_layers * spec.q_width * T * T  # both products, by the paper


HOW = [
    {},
    {"checkpoint": "full"},
    {"checkpoint": "full", "early_stop": True},
    {"checkpoint": "selective", "early_stop": True, "causal": True},
    {"checkpoint": "full", "attention": "fused", "causal": True},
]


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_the_bridge_has_no_residual(name: str, how: dict[str, object]) -> None:
    for tied in (True, False):
        spec = dataclasses.replace(SPECS[name], tied=tied)
        bridge = spec.flop_bridge(B, T, **how)
        assert 6 * spec.n_params * B * T + sum(bridge.values()) == spec.training_flops(B, T, **how)


def test_terms_of_the_bridge_by_hand() -> None:
    spec = dataclasses.replace(SPECS["mixture"], tied=False, window=7)
    bridge = spec.flop_bridge(B, T, "full", attention="fused", causal=True)
    pairs = sum(min(i + 1, 7) for i in range(T))
    d, six_d = spec.width, 6 * B * T
    assert bridge["attention"] == 12 * spec.n_layers * B * spec.n_heads * spec.head_width * pairs
    assert bridge["embeddings"] == -six_d * spec.vocabulary * d
    assert bridge["norms"] == -six_d * (2 * spec.n_layers + 1) * d
    assert bridge["biases"] == 0
    assert bridge["inactive_experts"] == -six_d * spec.n_layers * (6 - 2) * 3 * d * spec.ff_width
    assert bridge["attention_rescore"] == 2 * spec.n_layers * B * spec.n_heads * spec.head_width * pairs


def test_gpt2_as_published() -> None:
    flops = GPT2.training_flops
    six_nd = 6 * GPT2.n_params * 1024
    assert six_nd == 764_558_180_352
    assert flops(1, 1024) == 874_944_921_600
    assert flops(4, 1024) == 4 * 874_944_921_600
    assert flops(1, 1024, "full") == 1_087_545_802_752
    assert flops(1, 1024, "full", early_stop=True) == 1_029_563_744_256
    assert flops(1, 1024, attention="fused") == 894_272_274_432
    bridge = GPT2.flop_bridge(1, 1024, "full", early_stop=True)
    assert bridge == {
        "attention": 115_964_116_992,
        "embeddings": -4_831_838_208,
        "norms": -235_929_600,
        "biases": -509_607_936,
        "inactive_experts": 0,
        "recompute": 212_600_881_152,
        "early_stop": -57_982_058_496,
        "attention_rescore": 0,
    }


@pytest.mark.parametrize(
    ("kind", "measured"), [("", 874_944_921_600), ("reentrant", 1_087_545_802_752), ("nonreentrant", 1_029_563_744_256)]
)
def test_gpt2_measured(kind: str, measured: int) -> None:
    with torch.device("meta"):
        model = Model(GPT2, kind=kind)
    assert measure(model, 1, 1024).total == measured


def test_selective_recomputation_costs_what_its_paper_says() -> None:
    # Korthikanti et al. 2022, appendix A, by its own text: (1 + 2s/9h) in place of (1 + s/6h), the head apart.
    spec = dataclasses.replace(GPT2, max_seq=2304)
    layers = 72 * 12 * 2304 * 768**2
    head = 6 * 2304 * 768 * 50_257
    assert spec.training_flops(1, 2304, "selective") - head == layers * (9 * 768 + 2 * 2304) // (9 * 768)
    assert spec.training_flops(1, 2304) - head == layers * (6 * 768 + 2304) // (6 * 768)


PARAMETERS = {
    ("gpt2", "124M"): 124_439_808,
    ("gpt2", "355M"): 354_823_168,
    ("gpt2", "774M"): 774_030_080,
    ("gpt2", "1.5B"): 1_557_611_200,
    ("llama", "2-7B"): 6_738_415_616,
    ("llama", "2-13B"): 13_015_864_320,
    ("llama", "2-70B"): 68_976_648_192,
    ("llama", "3-8B"): 8_030_261_248,
    ("llama", "3-70B"): 70_553_706_496,
    ("llama", "3.1-405B"): 405_853_388_800,
    ("llama", "3.2-1B"): 1_235_814_400,
    ("llama", "3.2-3B"): 3_212_749_824,
    ("mixtral", "8x7B"): 46_702_792_704,
    ("mixtral", "8x22B"): 140_630_071_296,
}


@pytest.mark.parametrize(("family", "name"), PARAMETERS)
def test_parameters_as_published(family: str, name: str) -> None:
    assert getattr(TransformerSpec, family)(name).n_params == PARAMETERS[family, name]


def test_other_published_counts() -> None:
    assert TransformerSpec.mixtral("8x7B").n_active_params == 12_879_925_248
    assert dataclasses.replace(GPT2, biases=()).n_params == 124_337_664  # nanoGPT's bias=False


def test_llama_by_hand() -> None:
    spec, batch, seq = TransformerSpec.llama("3-70B"), 2, 4096
    d, n_layers, f, heads, kv, dh = 8192, 80, 28_672, 64, 8, 128
    layer = 2 * (2 * d * heads * dh + 2 * d * kv * dh + 3 * d * f) * batch * seq + 4 * batch * heads * dh * seq**2
    assert spec.forward_flops(batch, seq) == n_layers * layer + 2 * batch * seq * d * 128_256


def test_a_tensor_parallel_rank_has_its_share() -> None:
    spec = dataclasses.replace(SPECS["gpt"], tied=False)
    for t in (1, 2, 4):
        layers = sum(p.numel() for p in Model(spec, t=t).layers.parameters())
        around = 32 * spec.width + 2 * spec.width + 2 * 96 * spec.width // t  # positions; norm; embedding and head
        assert spec.params_on_rank(t) == layers + around


@pytest.mark.parametrize("window", [0, 1, 5, 24, 30])
def test_pairs(window: int) -> None:
    assert count_pairs(24, causal=False, window=window) == 24 * 24
    assert count_pairs(24, causal=True, window=window) == sum(min(i + 1, window or math.inf) for i in range(24))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: TransformerSpec.gpt2("125M"), "no gpt2 '125M' on record; there are: 124M"),
        (lambda: TransformerSpec.llama("4-1B"), "there are: 2-7B"),
        (lambda: GPT2.training_flops(1, 1024, "some"), "checkpoint must be"),
        (lambda: GPT2.training_flops(1, 1024, attention="flash"), "attention must be"),
        (lambda: GPT2.training_flops(1, 2048), "longer than the table"),
        (lambda: GPT2.forward_flops(True, 8), "batch must be"),
        (lambda: GPT2.params_on_rank(2), "vocabulary = 50257 does not split over 2"),
        (lambda: TransformerSpec(vocabulary=9, width=10, n_layers=1, n_heads=3, max_seq=8), "head_width"),
        (lambda: dataclasses.replace(GPT2, n_kv_heads=5), "cannot share 5"),
        (lambda: dataclasses.replace(GPT2, n_layers=0), "n_layers must be an integer of at least 1"),
        (lambda: dataclasses.replace(GPT2, width=768.0), "width must be an integer"),
        (lambda: dataclasses.replace(GPT2, n_experts=4), "of 4 experts 0 cannot be active"),
        (lambda: dataclasses.replace(GPT2, n_experts=4, n_active_experts=5, biases=()), "5 cannot be active"),
        (lambda: dataclasses.replace(GPT2, n_experts=4, n_active_experts=2), "experts have no biases"),
        (lambda: dataclasses.replace(GPT2, max_seq=0), "max_seq"),
        (lambda: dataclasses.replace(GPT2, positions="rotary"), "max_seq"),
        (lambda: dataclasses.replace(GPT2, norm="batch"), "norm must be layer or rms"),
        (lambda: dataclasses.replace(GPT2, biases=("head",)), "not at 'head'"),
        (lambda: dataclasses.replace(GPT2, dropout=1.5), "a probability"),
    ],
)
def test_what_is_refused(call, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        call()


@pytest.mark.parametrize("name", ["3-8b", "3-8B", "3.1-405b", "2-7b"])
def test_capitals_in_names_do_not_matter(name: str) -> None:
    assert TransformerSpec.llama(name) == TransformerSpec.llama(name.upper())


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: TransformerSpec.gpt2("124"), "Did you mean 124M"),
        (lambda: TransformerSpec.llama("3-8"), "Did you mean 3-8B"),
        (lambda: TransformerSpec.llama("3.2-1"), "3.2-1B"),
        (lambda: TransformerSpec.mixtral("8x7"), "Did you mean 8x7B"),
    ],
)
def test_names_that_come_near_are_suggested(call: Callable[[], object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        call()
