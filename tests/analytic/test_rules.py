"""The same model by every published rule: GPT-2 124M as worked out by hand, and other models term by term."""

from __future__ import annotations

import pytest

from torchledger.analytic.transformer import TransformerSpec

GPT2 = TransformerSpec.gpt2("124M")
FIGURES = {
    "torchledger": 874_944_921_600,
    "6ND": 764_558_180_352,
    "6ND without positions": 759_726_342_144,
    "6ND, non-embedding": 522_584_064_000,
    "PaLM, nanoGPT": 875_690_459_136,
    "llm.c": 822_540_238_848,
    "Megatron-LM": 816_962_863_104,
    "Megatron-LM 2021": 1_087_545_802_752,
    "Chinchilla": 1_113_446_154_240,
}


def by_name(spec: TransformerSpec, batch: int, seq: int) -> dict[str, int]:
    rules = spec.published_flops(batch, seq)
    assert len({rule.name for rule in rules}) == len(rules)
    assert all(rule.formula and rule.source and rule.leaves_out for rule in rules)
    return {rule.name: rule.flops for rule in rules}


def test_gpt2() -> None:
    assert by_name(GPT2, 1, 1024) == FIGURES
    assert by_name(GPT2, 4, 1024) == {name: 4 * flops for name, flops in FIGURES.items()}


def test_a_llama_term_by_term() -> None:
    spec, batch, seq = TransformerSpec.llama("3-8B"), 2, 2048
    tokens, d, f, vocabulary, n_layers = batch * seq, 4096, 14_336, 128_256, 32
    per_layer = 2 * d * d + 2 * d * 1024 + 3 * d * f
    n = 8_030_261_248
    attention = 12 * n_layers * d * seq * tokens
    expected = {
        "torchledger": 6 * tokens * (n_layers * per_layer + vocabulary * d) + attention,
        "6ND": 6 * n * tokens,
        "6ND, non-embedding": 6 * (n - 2 * vocabulary * d) * tokens,
        "PaLM, nanoGPT": 6 * n * tokens + attention,
        "llm.c": 6 * n * tokens + attention // 2,
        "Megatron-LM": 6 * tokens * (n_layers * per_layer + vocabulary * d) + attention // 2,
        "Megatron-LM 2021": tokens * (96 * n_layers * d * d + 16 * n_layers * seq * d + 6 * vocabulary * d),
        "Chinchilla": 3
        * tokens
        * (4 * vocabulary * d + n_layers * (8 * d * d + 4 * seq * d + 3 * 32 * seq + 4 * d * f)),
    }
    assert by_name(spec, batch, seq) == expected


def test_megatron_as_its_program_writes_it() -> None:
    for spec in (GPT2, TransformerSpec.llama("3-70B"), TransformerSpec.mixtral("8x7B")):
        seq, d = 1024, spec.width
        routed, gate = max(spec.n_active_experts, 1), 1.5 if spec.gated else 1
        attention = (1 + spec.n_kv_heads / spec.n_heads + seq / d / 2) * spec.q_width / d
        network = spec.ff_width / d * routed * gate
        logits = spec.vocabulary / (2 * spec.n_layers * d)
        expected = 12 * seq * spec.n_layers * d**2 * (attention + network + logits)
        assert by_name(spec, 1, seq)["Megatron-LM"] == pytest.approx(expected, rel=1e-12)


def test_a_mixture_has_a_rule_of_its_own() -> None:
    spec = TransformerSpec.mixtral("8x7B")
    rules = by_name(spec, 1, 512)
    assert rules["6ND, active"] == 6 * 12_879_925_248 * 512
    assert rules["6ND"] == 6 * 46_702_792_704 * 512
    assert "knows no gates, experts, shared keys" in spec.published_flops(1, 512)[-1].leaves_out


def test_what_is_said_of_what_rules_leave_out() -> None:
    said = {rule.name: rule.leaves_out for rule in GPT2.published_flops(1, 1024)}
    assert "half of attention's square" in said["Megatron-LM"]
    assert "half of attention's square" in said["llm.c"]
    assert "positions" in said["llm.c"]
    assert "the softmax" in said["Chinchilla"]
    assert "knows no" not in said["Chinchilla"]
    untied = {rule.name: rule.leaves_out for rule in TransformerSpec.llama("3-8B").published_flops(1, 8)}
    assert "the token embedding" in untied["PaLM, nanoGPT"]
    assert "routers" not in untied["Megatron-LM"]
