"""The bridge from 6·N·D of real model families: convolutions, patches, recurrence, experts, packed sequences.

B sequences, T positions, D = B·T tokens, E width, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reconciling import Hand, check, ids_of, record, total

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers and nested tensors

CASES: dict[str, Callable[[], Hand]] = {}


def case(function: Callable[[], Hand]) -> Callable[[], Hand]:
    CASES[function.__name__] = function
    return function


@pytest.mark.parametrize("name", CASES)
def test_terms(name: str) -> None:
    check(CASES[name]())


# Convolutions: a kernel meets each place of the output (transposed: of the input), and an image is a token.

IMAGES = 2


CONVOLUTIONS: dict[str, tuple[nn.Module, tuple[int, ...], int, int]] = {
    # layer, shape of an input, elements of the kernel, places that it meets in one image
    "same": (nn.Conv2d(3, 8, 3, padding=1, bias=False), (3, 6, 6), 8 * 27, 36),
    "strided": (nn.Conv2d(3, 8, 3, stride=2, bias=False), (3, 9, 9), 8 * 27, 16),
    "dilated": (nn.Conv2d(3, 8, 3, dilation=2, bias=False), (3, 9, 9), 8 * 27, 25),
    "grouped": (nn.Conv2d(4, 8, 3, padding=1, groups=2, bias=False), (4, 6, 6), 8 * 2 * 9, 36),
    "depthwise": (nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False), (4, 6, 6), 4 * 9, 36),
    "one_by_one": (nn.Conv2d(4, 8, 1, bias=False), (4, 6, 6), 32, 36),
    "conv1d": (nn.Conv1d(4, 8, 3, bias=False), (4, 10), 8 * 12, 8),
    "conv3d": (nn.Conv3d(2, 4, 2, bias=False), (2, 3, 4, 5), 4 * 16, 2 * 3 * 4),
    "transposed": (nn.ConvTranspose2d(4, 6, 2, stride=2, bias=False), (4, 5, 5), 4 * 6 * 4, 25),
    "transposed_grouped": (nn.ConvTranspose2d(4, 6, 3, groups=2, bias=False), (4, 5, 5), 4 * 3 * 9, 25),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("needs_grad", [True, False], ids=["inner", "first"])
def test_convolution(name: str, needs_grad: bool) -> None:
    layer, shape, n, places = CONVOLUTIONS[name]
    step = record(layer, total(layer, None, torch.randn(IMAGES, *shape, requires_grad=needs_grad)))
    terms = {"reuse": 6 * IMAGES * (places - 1) * n}
    if not needs_grad:
        terms["no_input_gradient"] = -2 * IMAGES * places * n
    check(Hand(step, IMAGES, terms))


@case
def convolutional_net() -> Hand:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.GroupNorm(2, 8), nn.Conv2d(8, 16, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip
    first, depthwise, pointwise = 8 * 27, 8 * 9, 16 * 8
    step = record(model, total(model, None, torch.randn(IMAGES, 3, 8, 8)))
    terms = {
        "reuse": 6 * IMAGES * (63 * first + 15 * (depthwise + pointwise)),
        "no_input_gradient": -2 * IMAGES * 64 * first,
        "norms": -6 * IMAGES * 2 * (8 + 8),
        "biases": -6 * IMAGES * (8 + 8 + 16 + 5),
    }
    return Hand(step, IMAGES, terms)


class ViT(nn.Module):
    """Patches by a convolution, a class token, a table of positions, one layer, and a head that reads the class."""

    def __init__(self, e: int = 16, patches: int = 4) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, e, 4, stride=4)
        self.cls, self.positions = nn.Parameter(torch.zeros(1, 1, e)), nn.Parameter(torch.zeros(1, patches + 1, e))
        self.norm, self.qkv, self.out = nn.LayerNorm(e), nn.Linear(e, 3 * e), nn.Linear(e, e)
        self.head = nn.Linear(e, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.positions
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        weights = (q @ k.transpose(-1, -2) * 8**-0.5).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return self.head(x[:, 0])


@case
def vit() -> Hand:
    e, rows = 16, 5
    model = ViT(e)
    step = record(model, total(model, None, torch.randn(IMAGES, 3, 8, 8)))
    patch = 3 * 16 * e
    terms = {
        "attention": 12 * IMAGES * rows * rows * e,
        "reuse": 6 * IMAGES * ((4 - 1) * patch + (rows - 1) * 4 * e * e),
        "no_input_gradient": -2 * IMAGES * 4 * patch,
        "elementwise": -6 * IMAGES * (e + rows * e),
        "norms": -6 * IMAGES * 2 * e,
        "biases": -6 * IMAGES * (e + 3 * e + e + 5),
    }
    return Hand(step, IMAGES, terms)


# Recurrence

B, T, E, V = 3, 5, 8, 11


class Recurrent(nn.Module):
    """A language model of one recurrent network; embedding, network of two layers, head."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, E)
        self.net = kind(E, 6, num_layers=2, batch_first=True, **options)
        wide = options.get("proj_size") or 6
        self.head = nn.Linear(wide * (2 if options.get("bidirectional") else 1), V)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.net(self.embed(ids))[0])


def recurrent(kind: Any, gates: int, dtype: torch.dtype, n_directions: int = 1, **options: Any) -> Hand:
    model = Recurrent(kind, **options).to(dtype)
    step = record(model, total(model, None, ids_of(B, T, V)))
    wide = options.get("proj_size") or 6
    whole = kind is nn.LSTM and dtype is torch.float32 and not options.get("proj_size")
    d = B * T
    terms = {
        "embeddings": -6 * d * V * E,
        "biases": -6 * d * (V + n_directions * 2 * 2 * gates * 6),  # two of each layer and direction
        # The state that a layer begins with needs no gradient. One op for a whole layer, which is oneDNN's for an LSTM
        # in fp32, gives one all the same; op by op it is missing.
        "no_input_gradient": 0 if whole else -2 * B * 2 * n_directions * gates * 6 * wide,
    }
    return Hand(step, d, terms)


RECURRENT: dict[str, tuple[Any, ...]] = {
    "lstm_whole": (nn.LSTM, 4, torch.float32, 1, {}),
    "lstm_op_by_op": (nn.LSTM, 4, torch.float64, 1, {}),
    "lstm_two_directions": (nn.LSTM, 4, torch.float64, 2, {"bidirectional": True}),
    "gru": (nn.GRU, 3, torch.float32, 1, {}),
    "rnn": (nn.RNN, 1, torch.float32, 1, {}),
    "lstm_projected": (nn.LSTM, 4, torch.float32, 1, {"proj_size": 3}),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent(name: str) -> None:
    kind, gates, dtype, n_directions, options = RECURRENT[name]
    check(recurrent(kind, gates, dtype, n_directions, **options))


@case
def packed_lstm() -> Hand:
    lengths = [5, 3, 2]
    model = Recurrent(nn.LSTM)
    ids = ids_of(B, T, V)

    def run() -> None:
        packed = nn.utils.rnn.pack_padded_sequence(model.embed(ids), torch.tensor(lengths), batch_first=True)
        model.head(model.net(packed)[0].data).sum().backward()

    d = sum(lengths)
    terms = {
        "embeddings": -6 * d * V * E,
        "biases": -6 * d * (V + 2 * 2 * 4 * 6),
        "no_input_gradient": -2 * B * 2 * 4 * 6 * 6,  # the state that each layer begins with
    }
    return Hand(record(model, run, tokens=d), d, terms)


# Packed sequences


@case
def nested_attention() -> Hand:
    lengths = [5, 9]
    e, d = 16, sum(lengths)

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(e, e, bias=False) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (layer(x).unflatten(-1, (4, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
            y = F.scaled_dot_product_attention(q, k, v)
            return self.out(y.transpose(1, 2).flatten(2))

    model = Packed()
    x = torch.nested.nested_tensor([torch.randn(n, e) for n in lengths], layout=torch.jagged, requires_grad=True)

    def run() -> None:
        model(x).values().sum().backward()

    pairs = sum(n * n for n in lengths)
    step = record(model, run, tokens=d)
    rescore = 2 * pairs * e if step.flops.attention_rescore else 0
    return Hand(step, d, {"attention": 12 * pairs * e, "attention_rescore": rescore})


# HuggingFace

TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**TINY, "vocab_size": 96, "max_position_embeddings": 64, "num_key_value_heads": 2}
HF_B, HF_T = 2, 16
HF_D = HF_B * HF_T
ATTENTION = 2 * 12 * HF_B * HF_T * HF_T * 32
LLAMA_NORMS = -6 * HF_D * (2 * 2 + 1) * 32


def hf(name: str, **config: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**{**TEXT, **config}))


def lm_step(model: Any) -> Any:
    ids = ids_of(HF_B, HF_T, 96)

    def run() -> None:
        model(ids, labels=ids).loss.backward()

    return record(model, run)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_llama(attention: str, tied: bool) -> None:
    step = lm_step(hf("Llama", tie_word_embeddings=tied, attn_implementation=attention))
    terms = {
        "attention": ATTENTION,
        "attention_rescore": ATTENTION // 6 if attention == "sdpa" else 0,
        "norms": LLAMA_NORMS,
        "embeddings": 0 if tied else -6 * HF_D * 96 * 32,
    }
    check(Hand(step, HF_D, terms))


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_mixtral(experts: str) -> None:
    model = hf("Mixtral", num_local_experts=4, num_experts_per_tok=2, experts_implementation=experts)
    terms = {
        "attention": ATTENTION,
        "attention_rescore": ATTENTION // 6,
        "norms": LLAMA_NORMS,
        "embeddings": -6 * HF_D * 96 * 32,
        # Two of four experts: half of their parameters for each token.
        "inactive_experts": -6 * HF_D * (2 * 4 * 3 * 32 * 48) // 2,
    }
    check(Hand(lm_step(model), HF_D, terms))


class Mixture(nn.Module):
    """Experts in a list, each token to one of them; the last is never chosen."""

    def __init__(self, n: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(8, n, bias=False)
        self.specialists = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        chosen = torch.arange(len(x)) % 3
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.specialists):
            rows = (chosen == i).nonzero()[:, 0]
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]) * weights[rows, i : i + 1])
        return y


def mixture_step() -> Any:
    model = Mixture()
    return record(model, total(model, None, torch.randn(10, 8, requires_grad=True)))


@case
def experts_by_pattern() -> Hand:
    # Each row meets one expert of four: three quarters of their parameters are idle.
    return Hand(mixture_step(), 10, {"inactive_experts": -6 * 10 * 3 * 64}, experts=r"specialists\.")


@case
def experts_without_a_pattern() -> Hand:
    # Nothing says what they are: fewer rows, and one that nothing read.
    return Hand(mixture_step(), 10, {"reuse": -6 * 10 * 2 * 64, "unused": -6 * 10 * 64})
