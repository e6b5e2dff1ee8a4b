"""Saved bytes against a walk over what autograd saves, tensor by tensor, and against published figures."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import torchledger as tl
from analytic.transformers_by_hand import Layer, Model, angles_of, drop_bytes, saved_bytes, split_sequence
from torchledger.analytic.transformer import TransformerSpec
from torchledger.errors import UsageError

B, T = 3, 24
GPT = TransformerSpec(vocabulary=96, width=32, n_layers=2, n_heads=4, max_seq=32)
LLAMA = TransformerSpec(
    vocabulary=96, width=32, n_layers=2, n_heads=4, n_kv_heads=2, ff_width=80, gated=True, activation="silu",
    norm="rms", positions="rotary", tied=False, biases=(),
)  # fmt: skip
SPECS = {
    "gpt": GPT,
    "gpt-no-bias": dataclasses.replace(GPT, biases=()),
    "gpt-relu": dataclasses.replace(GPT, activation="relu"),
    "gpt-multi-query": dataclasses.replace(GPT, n_kv_heads=1),
    "gpt-wide-heads": dataclasses.replace(GPT, head_width=16),
    "llama": LLAMA,
    "llama-relu": dataclasses.replace(LLAMA, activation="relu"),
    "llama-qk-norm": dataclasses.replace(LLAMA, qk_norm=True, n_kv_heads=4),
    "mixture": dataclasses.replace(LLAMA, n_experts=6, n_active_experts=2),
    "mixture-gelu": dataclasses.replace(GPT, n_experts=3, n_active_experts=1, biases=("norm",)),
}
DROPOUTS = {"dropout": 0.1, "attention_dropout": 0.1, "embedding_dropout": 0.1}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make(module, dtype: torch.dtype, device: str):
    with torch.device(device):
        return module().to(dtype)


def layer_bytes(spec: TransformerSpec, dtype: torch.dtype, device: str, batch: int = B, seq: int = T, **how) -> int:
    """What one layer saves, its input among it; neither its parameters nor the tables of angles."""
    layer = make(lambda: Layer(spec, **how), dtype, device)
    x = torch.empty(batch, seq, spec.width, dtype=dtype, device=device).fill_(0.5).requires_grad_()
    angles = angles_of(spec, seq, dtype, device)
    return saved_bytes(lambda: layer(x, angles), [*layer.parameters(), *(angles or ())])


def model_bytes(spec: TransformerSpec, dtype: torch.dtype, device: str, batch: int = B, seq: int = T, **how) -> int:
    model = make(lambda: Model(spec, **how), dtype, device)
    ids = torch.zeros(batch, seq, dtype=torch.long, device=device)
    targets = torch.zeros_like(ids)
    return saved_bytes(lambda: model(ids, targets), [*model.parameters(), ids, targets])


@pytest.mark.parametrize("dropout", [False, True], ids=["plain", "dropout"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPECS)
def test_a_layer_on_the_cpu(name: str, dtype: str, dropout: bool) -> None:
    spec = dataclasses.replace(SPECS[name], **(DROPOUTS if dropout else {}))
    for batch in (1, B):
        expected = layer_bytes(spec, DTYPES[dtype], "cpu", batch)
        assert spec.layer_activation_bytes(batch, T, dtype, convention="cpu") == expected


@pytest.mark.parametrize("dropout", [False, True], ids=["plain", "dropout"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in SPECS if "mixture" not in name])  # routing needs values
def test_a_layer_on_meta(name: str, dtype: str, dropout: bool) -> None:
    spec = dataclasses.replace(SPECS[name], **(DROPOUTS if dropout else {}))
    expected = layer_bytes(spec, DTYPES[dtype], "meta")
    assert spec.layer_activation_bytes(B, T, dtype, convention="meta") == expected


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", SPECS)
def test_a_layer_without_a_mask_and_a_fused_one(name: str, dtype: str) -> None:
    spec = SPECS[name]
    bare = layer_bytes(spec, DTYPES[dtype], "cpu", masked=False)
    assert spec.layer_activation_bytes(B, T, dtype, convention="cpu", causal_mask=False) == bare
    fused = layer_bytes(spec, DTYPES[dtype], "cpu", fused=True)
    assert spec.layer_activation_bytes(B, T, dtype, convention="cpu", attention="fused") == fused


@pytest.mark.parametrize("dropout", [False, True], ids=["plain", "dropout"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", SPECS)
def test_a_model(name: str, dtype: str, dropout: bool) -> None:
    spec = dataclasses.replace(SPECS[name], **(DROPOUTS if dropout else {}))
    expected = model_bytes(spec, DTYPES[dtype], "cpu")
    assert spec.activation_bytes(B, T, dtype, convention="cpu") == expected


def ledger_bytes(run, model) -> int:
    """Bytes of activations that a ledger finds alive after a forward pass, what it gave back among them."""
    kept = []
    with tl.Ledger(model) as ledger:
        kept.append(run())
    (memory,) = ledger.report.steps[0].memory.values()
    return memory.end.activations


@pytest.mark.parametrize("attention", ["math", "fused"])
@pytest.mark.parametrize("selective", [False, True], ids=["none", "selective"])
@pytest.mark.parametrize("name", ["gpt", "gpt-multi-query", "llama", "llama-qk-norm", "mixture"])
def test_a_layer_as_the_ledger_sees_it(name: str, selective: bool, attention: str) -> None:
    spec = dataclasses.replace(SPECS[name], dropout=0.1)
    layer = Layer(spec, selective=selective, fused=attention == "fused")
    x = torch.randn(B, T, spec.width, requires_grad=True)
    angles = angles_of(spec, T, x.dtype, "cpu")
    measured = ledger_bytes(lambda: layer(x, angles), layer)
    input_bytes = output_bytes = B * T * spec.width * 4  # the layer's input was there before; its output is new
    kind = "selective" if selective else "none"
    expected = spec.layer_activation_bytes(B, T, "fp32", kind, convention="cpu", attention=attention)
    assert measured == expected - input_bytes + output_bytes


@pytest.mark.parametrize("kind", ["reentrant", "nonreentrant"])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_full_checkpointing_keeps_the_inputs_of_layers(name: str, kind: str) -> None:
    spec = dataclasses.replace(SPECS[name], embedding_dropout=0.1)
    model, ids = Model(spec, kind=kind), torch.zeros(B, T, dtype=torch.long)
    measured = ledger_bytes(lambda: model(ids, ids), model)
    loss, sum_of_weights = 4, 4
    assert measured == spec.activation_bytes(B, T, "fp32", "full", convention="cpu") + loss + sum_of_weights


@pytest.mark.parametrize("name", [name for name in SPECS if name.startswith("gpt")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_of_one_byte_are_those_of_cuda(name: str, dtype: str) -> None:
    spec = dataclasses.replace(SPECS[name], **DROPOUTS)
    expected = model_bytes(spec, DTYPES[dtype], "meta", dropout=drop_bytes)
    assert spec.activation_bytes(B, T, dtype) == expected


@pytest.mark.parametrize("t", [1, 2, 4])
@pytest.mark.parametrize("dropout", [False, True], ids=["plain", "dropout"])
@pytest.mark.parametrize("name", ["gpt", "gpt-no-bias", "llama-qk-norm"])
def test_one_rank_of_several(name: str, dropout: bool, t: int) -> None:
    spec = dataclasses.replace(SPECS[name], **(DROPOUTS if dropout else {}))
    expected = layer_bytes(spec, torch.float32, "cpu", t=t)
    assert spec.layer_activation_bytes(B, T, "fp32", convention="cpu", tensor_parallel=t) == expected


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("dropout", [False, True], ids=["plain", "dropout"])
@pytest.mark.parametrize("name", ["gpt", "gpt-no-bias", "llama-qk-norm"])
def test_one_rank_of_several_with_its_part_of_the_sequence(name: str, dropout: bool, t: int) -> None:
    spec = dataclasses.replace(SPECS[name], **(DROPOUTS if dropout else {}))
    layer, x = split_sequence(Layer(spec, t=t), t), torch.randn(B, T // t, spec.width, requires_grad=True)
    angles = angles_of(spec, T, x.dtype, "cpu")
    measured = saved_bytes(lambda: layer(x, angles), [*layer.parameters(), *(angles or ())])
    expected = spec.layer_activation_bytes(B, T, "fp32", convention="cpu", tensor_parallel=t, sequence_parallel=True)
    assert measured == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels of CUDA")
@pytest.mark.parametrize("dropout", [False, True], ids=["plain", "dropout"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPECS)
def test_a_model_on_cuda(name: str, dtype: str, dropout: bool) -> None:
    spec = dataclasses.replace(SPECS[name], **(DROPOUTS if dropout else {}))
    assert spec.activation_bytes(B, T, dtype) == model_bytes(spec, DTYPES[dtype], "cuda")
    if dtype == "fp32" and spec.n_heads != spec.n_kv_heads:
        return  # no kernel
    fused = model_bytes(spec, DTYPES[dtype], "cuda", fused=True)
    assert spec.activation_bytes(B, T, dtype, attention="fused") == fused


def test_fused_attention_in_fp32_on_cuda() -> None:
    # Read off an H200 with torch 2.11: log of sums [B, H, 32] for 24 tokens; no kernel with shared keys.
    padded, plain = (GPT.activation_rows(B, T, dtype, attention="fused")["log of sums"] for dtype in ("fp32", "bf16"))
    assert padded == 2 * 4 * B * 4 * 32
    assert plain == 2 * 4 * B * 4 * 24
    assert GPT2.activation_rows(1, 33, "fp32", attention="fused")["log of sums"] == 12 * 4 * 12 * 64
    with pytest.raises(UsageError, match="heads share keys"):
        LLAMA.activation_bytes(B, T, "fp32", attention="fused")


# Korthikanti et al. 2022, section 4, in bytes; s, b, h, a as there.
S, BATCH, H, A = 1024, 1, 768, 12
GPT2 = TransformerSpec.gpt2("124M")
WITH_DROPOUT = dataclasses.replace(GPT2, dropout=0.1, attention_dropout=0.1)
SBH, SCORES = S * BATCH * H, A * S * S * BATCH


def test_published_figures_of_a_layer() -> None:
    layer = WITH_DROPOUT.layer_activation_bytes
    paper = layer(BATCH, S, "bf16", convention="paper")
    assert paper == 34 * SBH + 5 * SCORES
    assert layer(BATCH, S, "bf16", causal_mask=False) == paper + 16 * S * BATCH == 89_669_632
    assert layer(BATCH, S, "fp16", convention="meta", causal_mask=False) == 36 * SBH + 6 * SCORES + 16 * S
    assert layer(BATCH, S, "bf16", "selective", convention="paper") == 34 * SBH
    assert layer(BATCH, S, "bf16", "full", convention="paper") == 2 * SBH


def test_figures_without_dropout() -> None:
    layer = GPT2.layer_activation_bytes
    assert layer(BATCH, S, "bf16") == 32 * SBH + 2 * SCORES + 16 * S + S * S
    assert layer(BATCH, S, "fp32") == 64 * SBH + 4 * SCORES + 16 * S + S * S
    small = TransformerSpec(vocabulary=8, width=64, n_layers=1, n_heads=4, max_seq=128)
    assert small.layer_activation_bytes(2, 128, "bf16", convention="cpu") == 804_864


@pytest.mark.parametrize("t", [2, 4, 12])
def test_published_figures_of_tensor_and_sequence_parallelism(t: int) -> None:
    spec = dataclasses.replace(WITH_DROPOUT, vocabulary=50_304, max_seq=1536)
    sbh, scores = 1536 * H, A * 1536 * 1536
    alone = spec.layer_activation_bytes(1, 1536, "bf16", convention="paper", tensor_parallel=t)
    assert alone * t == (10 * t + 24) * sbh + 5 * scores
    both = spec.layer_activation_bytes(1, 1536, "bf16", convention="paper", tensor_parallel=t, sequence_parallel=True)
    assert both * t == 34 * sbh + 5 * scores
    whole = spec.layer_activation_bytes(1, 1536, "bf16", "full", convention="paper", tensor_parallel=t)
    assert whole == 2 * sbh


def test_gpt2_saves_what_it_does() -> None:
    assert GPT2.activation_bytes(1, 1024, "fp32") == 1_432_899_584
    assert model_bytes(GPT2, torch.float32, "meta", 1, 1024) == 1_432_899_584


def test_rows_add_up() -> None:
    for spec in SPECS.values():
        layer = spec.layer_activation_rows(B, T, "bf16")
        assert sum(layer.values()) == spec.layer_activation_bytes(B, T, "bf16")
        rows = spec.activation_rows(B, T, "bf16")
        assert sum(rows.values()) == spec.activation_bytes(B, T, "bf16")
        assert all(rows[name] == spec.n_layers * nbytes > 0 for name, nbytes in layer.items())


def test_the_loss_may_be_computed_in_another_dtype() -> None:
    difference = GPT.activation_bytes(B, T, "bf16", loss_dtype="fp32") - GPT.activation_bytes(B, T, "bf16")
    assert difference == 2 * B * T * GPT.vocabulary


def test_dtypes_by_all_their_names() -> None:
    assert len({GPT.activation_bytes(B, T, name) for name in ("bf16", "bfloat16", torch.bfloat16)}) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"dtype": "int4"}, "less than a byte"),
        ({"dtype": "bf17"}, "Did you mean bf16"),
        ({"checkpoint": "half"}, "checkpoint must be none, selective or full"),
        ({"attention": "flash"}, "attention must be math or fused"),
        ({"convention": "tpu"}, "convention must be cuda, cpu, meta or paper"),
        ({"attention": "fused", "convention": "meta"}, "never fused"),
        ({"tensor_parallel": 3}, "n_kv_heads = 4 does not split over 3 ranks"),
        ({"tensor_parallel": 0}, "at least 1"),
        ({"seq": 31, "tensor_parallel": 2, "sequence_parallel": True}, "seq = 31 does not split"),
        ({"seq": 33}, "longer than the table of 32"),
        ({"batch": 0}, "batch must be"),
        ({"seq": 2.0}, "seq must be"),
    ],
)
def test_what_is_refused(words: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        GPT.activation_bytes(**{"batch": 1, "seq": 8, "dtype": "bf16", **words})


def test_experts_are_not_split_and_dropout_is_not_fused_on_the_cpu() -> None:
    with pytest.raises(UsageError, match="experts"):
        SPECS["mixture"].activation_bytes(1, 8, "bf16", tensor_parallel=2)
    spec = dataclasses.replace(GPT, attention_dropout=0.1)
    with pytest.raises(UsageError, match="never fused"):
        spec.activation_bytes(1, 8, "bf16", attention="fused", convention="cpu")
    assert spec.activation_bytes(1, 8, "bf16", attention="fused") == GPT.activation_bytes(
        1, 8, "bf16", attention="fused"
    )
