"""``TransformerSpec``: what a decoder-only transformer costs, from its sizes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from torchledger.analytic.architecture import Architecture, count_active_parameters, count_parameters
from torchledger.analytic.huggingface import read_sizes
from torchledger.analytic.models import find_sizes
from torchledger.analytic.products import (
    ExecutionOptions,
    bridge_from_6nd,
    forward_flops_by_part,
    training_flops_by_cause,
)
from torchledger.analytic.rules import PublishedCount, count_by_published_rules
from torchledger.analytic.sharding import SavingOptions, count_parameters_on_rank, count_saved_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerSpec(Architecture):
    """Parameters, FLOPs and saved bytes of a decoder-only transformer, exact, from its sizes.

    The letters below: B batch, T sequence length, D = B·T tokens, L layers, d width, H heads, K key/value heads, dh
    head width, f feed-forward width, V vocabulary, E experts, k active experts.

    Args:
        vocabulary: V, rows of the token embedding and of the head.
        width: d.
        n_layers: L.
        n_heads: H.
        n_kv_heads: K; as many as heads if left out.
        head_width: dh; d / H if left out.
        ff_width: f, of one expert where there are several; 4·d if left out.
        gated: whether the feed-forward network has a gate (SwiGLU): three matrices in place of two.
        activation: ``gelu``, ``silu`` or ``relu``, which saves its output rather than its input.
        norm: ``layer`` or ``rms``, before each part and before the head.
        qk_norm: an RMS norm over each query and key head.
        positions: ``learned`` (a table), ``rotary`` or ``none``.
        max_seq: rows of the table of positions.
        tied: whether the head is the token embedding.
        biases: where there are biases: ``qkv``, ``out``, ``ff``, ``norm``; all if left out. A head has none.
        n_experts: E, 0 without experts.
        n_active_experts: k, experts that a token goes through.
        window: the keys that a query meets at most in sliding-window attention; 0 is all.
        dropout: the probability of dropout behind attention and feed-forward; only 0 or not makes a difference here.
        attention_dropout: likewise, of the attention weights.
        embedding_dropout: likewise, of the sum of embeddings.

    Sizes left out are settled at once, so that ``dataclasses.replace`` keeps them.

    Raises:
        UsageError: a size is no integer or too small, or sizes do not fit together.

    >>> spec = TransformerSpec(vocabulary=50_257, width=768, n_layers=12, n_heads=12, max_seq=1024)
    >>> spec.n_params, spec.training_flops(1, 1024)
    (124439808, 874944921600)
    """

    @classmethod
    def gpt2(cls, name: str) -> TransformerSpec:
        """A GPT-2: ``124M``, ``355M``, ``774M`` or ``1.5B``; without dropout.

        Raises:
            UsageError: there is none of that name.

        >>> TransformerSpec.gpt2("124M").n_params
        124439808
        """
        return cls(**find_sizes("gpt2", name))

    @classmethod
    def llama(cls, name: str) -> TransformerSpec:
        """A Llama: ``2-7B``, ``2-13B``, ``2-70B``, ``3-8B``, ``3-70B``, ``3.1-405B``, ``3.2-1B`` or ``3.2-3B``.

        Raises:
            UsageError: there is none of that name.

        >>> TransformerSpec.llama("3-8B").n_params
        8030261248
        """
        return cls(**find_sizes("llama", name))

    @classmethod
    def mixtral(cls, name: str) -> TransformerSpec:
        """A Mixtral: ``8x7B`` or ``8x22B``.

        Raises:
            UsageError: there is none of that name.

        >>> TransformerSpec.mixtral("8x7B").n_params, TransformerSpec.mixtral("8x7B").n_active_params
        (46702792704, 12879925248)
        """
        return cls(**find_sizes("mixtral", name))

    @classmethod
    def from_hf(cls, config: object) -> TransformerSpec:
        """The model that a HuggingFace configuration describes, with its dropouts; transformers is not imported.

        Args:
            config: a configuration of ``transformers``, or the mapping of its ``config.json``: of GPT-2, Llama,
                Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE, Phi-3 or Gemma.

        Raises:
            UsageError: it is of another kind, lacks a field, or asks for what is not modelled.

        >>> config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 256}
        >>> TransformerSpec.from_hf(config).n_params
        182016
        """
        return cls(**read_sizes(config))

    @property
    def n_params(self) -> int:
        """Parameters, a tied head once.

        Source: GPT-2, V·d + T·d + L·(12·d² + 13·d) + 2·d; Llama, 2·V·d + L·(2·d·H·dh + 2·d·K·dh + 3·d·f + 2·d) + d.

        >>> TransformerSpec.llama("3.1-405B").n_params
        405853388800
        """
        return count_parameters(self).total

    @property
    def n_active_params(self) -> int:
        """Parameters that one token meets: without those of the E - k experts that it does not go through.

        >>> TransformerSpec.llama("3-8B").n_active_params
        8030261248
        """
        return count_active_parameters(self)

    def params_on_rank(self, tensor_parallel: int) -> int:
        """Parameters on each of so many tensor-parallel ranks.

        Raises:
            UsageError: the model does not split evenly over them.

        >>> TransformerSpec.llama("3-8B").params_on_rank(8)
        1004015616
        """
        return count_parameters_on_rank(self, tensor_parallel)

    def forward_flops(self, batch: int, seq: int, *, causal: bool = False) -> int:
        """FLOPs of a forward pass with logits for every token (1 multiply-add = 2 FLOP).

        Args:
            batch: B.
            seq: T.
            causal: count only the pairs of a query and a key that a causal mask (and a window) leaves, in place of the
                full square.

        Raises:
            UsageError: the model cannot take such a batch.

        Source: 2·D for each weight that a product reads, and 4·B·L·H·dh·T² for attention's two products.

        >>> TransformerSpec.gpt2("124M").forward_flops(1, 1024)
        291648307200
        """
        return sum(forward_flops_by_part(self, batch, seq, causal=causal).values())

    def training_flops(self, batch: int, seq: int, checkpoint: str = "none", **how: Unpack[ExecutionOptions]) -> int:
        """FLOPs that forward, backward and recompute execute (1 multiply-add = 2 FLOP).

        Backward is twice the forward pass: the input of every product needs a gradient, since the embeddings do.

        Args:
            batch: B.
            seq: T.
            checkpoint: ``none``; ``selective``: attention's two products once more; ``full``: every layer once more.
            **how: ``attention="fused"``, whose backward computes the scores once more; ``early_stop=True``, for
                recompute that ends with the last tensor that backward needs, as in a non-reentrant checkpoint;
                ``causal=True``, to count only the pairs of a query and a key that a causal mask (and a window) leaves.

        Raises:
            UsageError: there is no such checkpointing or attention, or the model cannot take such a batch.

        Source: Korthikanti et al. 2022, "Reducing activation recomputation", section 5 and appendix A.

        >>> spec = TransformerSpec.gpt2("124M")
        >>> spec.training_flops(1, 1024), spec.training_flops(1, 1024, "full")
        (874944921600, 1087545802752)
        >>> spec.training_flops(1, 1024, "full", early_stop=True)
        1029563744256
        """
        return sum(training_flops_by_cause(self, batch, seq, checkpoint, **how).values())

    def flop_bridge(
        self, batch: int, seq: int, checkpoint: str = "none", **how: Unpack[ExecutionOptions]
    ) -> dict[str, int]:
        """What leads from 6·N·D to `training_flops`, by cause: 6·N·D and all terms add up to it exactly.

        Args and Raises: those of `training_flops`.

        >>> spec = TransformerSpec.gpt2("124M")
        >>> terms = spec.flop_bridge(1, 1024)
        >>> terms["attention"], terms["embeddings"], terms["norms"], terms["biases"]
        (115964116992, -4831838208, -235929600, -509607936)
        >>> 6 * spec.n_params * 1024 + sum(terms.values()) == spec.training_flops(1, 1024)
        True
        """
        return bridge_from_6nd(self, batch, seq, checkpoint, **how)

    def published_flops(self, batch: int, seq: int) -> tuple[PublishedCount, ...]:
        """FLOPs of forward and backward by the rules that papers and programs publish, `training_flops` first.

        Args:
            batch: B.
            seq: T.

        Raises:
            UsageError: the model cannot take such a batch.

        >>> {rule.name: rule.flops for rule in TransformerSpec.gpt2("124M").published_flops(1, 1024)}["llm.c"]
        822540238848
        """
        return count_by_published_rules(self, batch, seq)

    def activation_bytes(
        self, batch: int, seq: int, dtype: object, checkpoint: str = "none", **how: Unpack[SavingOptions]
    ) -> int:
        """Bytes that a forward pass with the loss saves for backward, on one device.

        The layers are made of PyTorch's own ops (``torchledger.analytic.activations`` lists them). Parameters, token
        ids, targets and the two scalars of the loss do not count. While a checkpointed layer is computed again, what it
        saves (`layer_activation_bytes`) comes on top.

        Args:
            batch: B.
            seq: T.
            dtype: of the activations: ``fp32``, ``bf16``, ``fp16``, or torch's names.
            checkpoint: ``none``; ``selective``: without attention's scores, softmax and dropout; ``full``: of each
                layer its input only.
            **how: ``attention="fused"``, one kernel in place of scores in memory. ``convention``: whose kernels:
                ``cuda`` (dropout masks of one byte, statistics of norms in fp32), ``cpu`` (both in ``dtype``), ``meta``
                (masks in ``dtype``, statistics in fp32) or ``paper`` (Korthikanti et al.: masks of one byte, no
                statistics, no causal mask). ``causal_mask=False``, where no layer makes a mask of bools.
                ``loss_dtype``, of the log-softmax that the loss saves: ``fp32`` under autocast. ``tensor_parallel=t``
                and ``sequence_parallel=True``, for one of t ranks.

        Raises:
            UsageError: a word or dtype is not known, such attention is never fused, the model cannot take such a batch,
                or it does not split evenly.

        Source: Korthikanti et al. 2022, "Reducing activation recomputation", section 4: T·B·d·(34 + 5·H·T/d) a layer.

        >>> TransformerSpec.gpt2("124M").activation_bytes(1, 1024, "fp32")
        1432899584
        """
        return sum(self.activation_rows(batch, seq, dtype, checkpoint, **how).values())

    def activation_rows(
        self, batch: int, seq: int, dtype: object, checkpoint: str = "none", **how: Unpack[SavingOptions]
    ) -> dict[str, int]:
        """The bytes of `activation_bytes` by tensor, those of all layers together; they add up to it.

        Args and Raises: those of `activation_bytes`.

        >>> TransformerSpec.gpt2("124M").activation_rows(1, 1024, "bf16", "full")["layer input"]
        18874368
        """
        saved = count_saved_bytes(self, batch, seq, dtype, checkpoint, **how)
        return {name: self.n_layers * nbytes for name, nbytes in saved.layer.items()} | saved.around

    def layer_activation_bytes(
        self, batch: int, seq: int, dtype: object, checkpoint: str = "none", **how: Unpack[SavingOptions]
    ) -> int:
        """Bytes that one layer saves for backward, its input among them, on one device.

        Args and Raises: those of `activation_bytes`.

        >>> gpt = TransformerSpec.gpt2("124M")
        >>> gpt.layer_activation_bytes(1, 1024, "fp32"), gpt.layer_activation_bytes(1, 1024, "bf16", "full")
        (101728256, 1572864)
        """
        return sum(self.layer_activation_rows(batch, seq, dtype, checkpoint, **how).values())

    def layer_activation_rows(
        self, batch: int, seq: int, dtype: object, checkpoint: str = "none", **how: Unpack[SavingOptions]
    ) -> dict[str, int]:
        """The bytes of `layer_activation_bytes` by tensor; they add up to it.

        Args and Raises: those of `activation_bytes`.

        >>> TransformerSpec.gpt2("124M").layer_activation_rows(1, 1024, "bf16")["softmax"]
        25165824
        """
        return count_saved_bytes(self, batch, seq, dtype, checkpoint, **how).layer
