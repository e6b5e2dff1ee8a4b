"""The sizes that a HuggingFace configuration names, for the causal language models whose layers are known here.

A configuration is read by the names of its fields, so neither transformers nor torch is imported. A kind of model that
is not on record is refused: its fields may mean something else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchledger.errors import UsageError

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "quick_gelu": "gelu",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}


class Fields:
    """The fields of a configuration, from an object or from the mapping that its JSON holds."""

    def __init__(self, config: object) -> None:
        self._config = config

    def get(self, name: str, default: Any = None) -> Any:
        """A field's value; the default where it is missing or None."""
        config = self._config
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        return default if value is None else value

    def need(self, name: str) -> Any:
        """A field's value.

        Raises:
            UsageError: it is missing or None.
        """
        value = self.get(name)
        if value is None:
            raise UsageError(f"this configuration of a {self.get('model_type', 'model')!r} has no {name}.")
        return value

    def activation(self, name: str, default: str) -> str:
        """An activation function, by the name that it has here.

        Raises:
            UsageError: what it saves is not known.
        """
        asked = self.get(name, default)
        found = _ACTIVATIONS.get(asked) if isinstance(asked, str) else None
        if found is None:
            raise UsageError(f"what the activation {asked!r} saves is not known; known are: {', '.join(_ACTIVATIONS)}.")
        return found


def read_sizes(config: object) -> dict[str, Any]:
    """The sizes of a model, as arguments of ``TransformerSpec``.

    Args:
        config: a configuration of ``transformers``, or the mapping of its ``config.json``.

    Raises:
        UsageError: it is of a kind that is not on record, lacks a field, or asks for what is not modelled.

    >>> read_sizes({"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 9})["n_layers"]
    2
    """
    fields = Fields(config)
    kind = fields.get("model_type")
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise UsageError(
            f"a model of the type {kind!r} is not on record; there are: {', '.join(_READERS)}. "
            f"Give TransformerSpec its sizes."
        )
    return reader(fields)


def _read_gpt2(fields: Fields) -> dict[str, Any]:
    if fields.get("add_cross_attention", False):
        raise UsageError("cross-attention is not modelled.")
    width = fields.get("n_embd", 768)
    return {
        "vocabulary": fields.get("vocab_size", 50_257),
        "width": width,
        "n_layers": fields.get("n_layer", 12),
        "n_heads": fields.get("n_head", 12),
        "ff_width": fields.get("n_inner", 4 * width),
        "activation": fields.activation("activation_function", "gelu_new"),
        "max_seq": fields.get("n_positions", 1024),
        "tied": fields.get("tie_word_embeddings", True),
        "dropout": fields.get("resid_pdrop", 0.1),
        "attention_dropout": fields.get("attn_pdrop", 0.1),
        "embedding_dropout": fields.get("embd_pdrop", 0.1),
    }


def _read_llama(fields: Fields) -> dict[str, Any]:
    """What Llama and its relatives have in common: RMS norms, rotary positions, a gate."""
    n_heads = fields.need("num_attention_heads")
    width = fields.need("hidden_size")
    biases = ("qkv", "out") if fields.get("attention_bias", False) else ()
    return {
        "vocabulary": fields.need("vocab_size"),
        "width": width,
        "n_layers": fields.need("num_hidden_layers"),
        "n_heads": n_heads,
        "n_kv_heads": fields.get("num_key_value_heads", n_heads),
        "head_width": fields.get("head_dim", width // n_heads),
        "ff_width": fields.need("intermediate_size"),
        "gated": True,
        "activation": fields.activation("hidden_act", "silu"),
        "norm": "rms",
        "positions": "rotary",
        "tied": fields.get("tie_word_embeddings", False),
        "biases": (*biases, "ff") if fields.get("mlp_bias", False) else biases,
        "attention_dropout": fields.get("attention_dropout", 0.0),
    }


def _read_mistral(fields: Fields) -> dict[str, Any]:
    return {**_read_llama(fields), "biases": (), "window": fields.get("sliding_window", 0)}


def _read_mixtral(fields: Fields) -> dict[str, Any]:
    experts = {"n_experts": fields.need("num_local_experts"), "n_active_experts": fields.need("num_experts_per_tok")}
    return {**_read_mistral(fields), **experts}


def _read_qwen2(fields: Fields) -> dict[str, Any]:
    return {**_read_llama(fields), "biases": ("qkv",), "window": _qwen_window(fields)}


def _read_qwen3(fields: Fields) -> dict[str, Any]:
    return {**_read_llama(fields), "qk_norm": True, "window": _qwen_window(fields)}


def _read_qwen3_moe(fields: Fields) -> dict[str, Any]:
    if fields.get("decoder_sparse_step", 1) != 1 or fields.get("mlp_only_layers", []):
        raise UsageError("layers with experts beside layers without them are not modelled.")
    experts = {
        "n_experts": fields.get("num_experts", fields.get("num_local_experts")),
        "n_active_experts": fields.need("num_experts_per_tok"),
        "ff_width": fields.need("moe_intermediate_size"),
    }
    return {**_read_qwen3(fields), **experts}


def _qwen_window(fields: Fields) -> int:
    """The window, where all layers have one. Where some look at everything, none counts: an upper bound."""
    kinds = fields.get("layer_types", [])
    everywhere = bool(kinds) and all(kind == "sliding_attention" for kind in kinds)
    window: int = fields.get("sliding_window", 0) if everywhere else 0
    return window


def _read_phi3(fields: Fields) -> dict[str, Any]:
    dropouts = {"dropout": fields.get("resid_pdrop", 0.0), "embedding_dropout": fields.get("embd_pdrop", 0.0)}
    return {**_read_llama(fields), **dropouts, "biases": (), "window": fields.get("sliding_window", 0)}


def _read_gemma(fields: Fields) -> dict[str, Any]:
    return {**_read_llama(fields), "tied": fields.get("tie_word_embeddings", True)}


_READERS: Mapping[str, Callable[[Fields], dict[str, Any]]] = {
    "gpt2": _read_gpt2,
    "llama": _read_llama,
    "mistral": _read_mistral,
    "mixtral": _read_mixtral,
    "qwen2": _read_qwen2,
    "qwen3": _read_qwen3,
    "qwen3_moe": _read_qwen3_moe,
    "phi3": _read_phi3,
    "gemma": _read_gemma,
}
