"""``TransformerSpec.from_hf`` against the models that transformers itself builds from the same configurations."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import torchledger as tl
from torchledger.analytic.transformer import TransformerSpec
from torchledger.errors import UsageError

transformers = pytest.importorskip("transformers")

B, T = 2, 16
SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
GPT2_SIZES = {"vocab_size": 300, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 96, "num_experts": 4}
CONFIGS = {
    "gpt2": ("GPT2Config", GPT2_SIZES),
    "gpt2-inner": ("GPT2Config", {**GPT2_SIZES, "n_inner": 100, "tie_word_embeddings": False}),
    "llama": ("LlamaConfig", SIZES),
    "llama-tied": ("LlamaConfig", {**SIZES, "tie_word_embeddings": True}),
    "llama-biases": ("LlamaConfig", {**SIZES, "attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("LlamaConfig", {**SIZES, "head_dim": 24, "num_key_value_heads": 4}),
    "mistral": ("MistralConfig", SIZES),
    "qwen2": ("Qwen2Config", SIZES),
    "qwen3": ("Qwen3Config", {**SIZES, "head_dim": 32}),
    "qwen3-biases": ("Qwen3Config", {**SIZES, "head_dim": 16, "attention_bias": True}),
    "phi3": ("Phi3Config", SIZES),
    "gemma": ("GemmaConfig", {**SIZES, "head_dim": 32}),
    "mixtral": ("MixtralConfig", {**SIZES, "num_local_experts": 4}),
    "qwen3-moe": ("Qwen3MoeConfig", {**SIZES, **MIXTURE, "head_dim": 16}),
}


def config_of(name: str):
    kind, sizes = CONFIGS[name]
    return getattr(transformers, kind)(**sizes)


def build(config, attention: str, device: str):
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()


def measure(model, batch: int = B, seq: int = T) -> tl.FlopStatement:
    ids = torch.zeros(batch, seq, dtype=torch.long, device=next(model.parameters()).device)
    with tl.Ledger(model) as ledger:
        model(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids), use_cache=False).loss.backward()
    assert ledger.report.faults == ()
    assert ledger.report.flops.uncounted == {}
    return ledger.report.flops


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_of_transformers(name: str, attention: str) -> None:
    config = config_of(name)
    spec = TransformerSpec.from_hf(config)
    on_meta = (
        attention == "eager" and not spec.n_experts
    )  # routing needs values, and so does the mask of fused attention
    model = build(config, attention, "meta" if on_meta else "cpu")
    assert spec.n_params == sum(p.numel() for p in model.parameters())
    flops = measure(model)
    assert flops.forward == spec.forward_flops(B, T)
    assert flops.model == spec.training_flops(B, T)
    assert flops.total == spec.training_flops(B, T) + flops.attention_rescore


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_its_own_checkpointing(name: str) -> None:
    config = config_of(name)
    spec = TransformerSpec.from_hf(config)
    for reentrant in (True, False):
        model = build(config, "eager", "meta")
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()  # a reentrant checkpoint needs an input with a gradient
        assert measure(model).total == spec.training_flops(B, T, "full", early_stop=not reentrant)


def test_gpt2_and_a_llama_of_full_size() -> None:
    gpt2 = build(transformers.GPT2Config(), "eager", "meta")
    spec = TransformerSpec.from_hf(gpt2.config)
    assert spec.n_params == sum(p.numel() for p in gpt2.parameters()) == 124_439_808
    assert measure(gpt2, 1, 1024).total == spec.training_flops(1, 1024) == 874_944_921_600
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    llama = transformers.LlamaConfig(
        vocab_size=128_256, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True, **sizes
    )
    assert TransformerSpec.from_hf(llama) == TransformerSpec.llama("3.2-1B")
    assert sum(p.numel() for p in build(llama, "eager", "meta").parameters()) == 1_235_814_400


def test_what_a_configuration_says_of_dropout_windows_and_activations() -> None:
    gpt2 = TransformerSpec.from_hf(transformers.GPT2Config())
    assert (gpt2.dropout, gpt2.attention_dropout, gpt2.embedding_dropout, gpt2.activation) == (0.1, 0.1, 0.1, "gelu")
    assert TransformerSpec.from_hf(transformers.MistralConfig()).window == 4096
    assert TransformerSpec.from_hf(transformers.Qwen3Config()).window == 0
    assert TransformerSpec.from_hf(transformers.GemmaConfig()).tied


@pytest.mark.parametrize("name", CONFIGS)
def test_the_file_of_a_configuration_reads_the_same(name: str) -> None:
    config = config_of(name)
    assert TransformerSpec.from_hf(json.loads(config.to_json_string(use_diff=False))) == TransformerSpec.from_hf(config)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "bert"}, "of the type 'bert' is not on record; there are: gpt2, llama"),
        ({}, "of the type None"),
        (object(), "of the type None"),
        ({"model_type": "llama", "num_attention_heads": 4}, "'llama' has no hidden_size"),
        ({"model_type": "gpt2", "activation_function": "mish"}, "activation 'mish'"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "cross-attention"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "beside layers without"),
    ],
)
def test_what_is_refused(config: object, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        TransformerSpec.from_hf(config)


def test_a_configuration_is_read_without_transformers() -> None:
    code = (
        "import sys; import torchledger as tl; spec = tl.TransformerSpec.from_hf({'model_type': 'gpt2'});"
        "print(spec.n_params, {'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "124439808 set()\n"
