"""What a step shows of why its FLOPs are not 6·N·D: who took part in which products, on how many rows, and how."""

from __future__ import annotations

from dataclasses import dataclass, field

READ_AS = ("product", "embedding", "norm", "bias", "elementwise", "uncounted", "unused")
"""What a parameter was to the ops that read it, the first that holds: a factor of a product, a table that was looked
up, a norm's, another argument of a product, in any other op, in an op of unknown cost, or read by none."""


@dataclass(frozen=True, slots=True)
class ParameterEvidence:
    """One parameter in one step.

    ``op`` is the op that shows what it was ``read_as``. The other numbers are multiply-adds of its elements, counted
    from the shapes of operands, never from FLOPs: ``uses`` in forward products; of these ``graphless`` with grad mode
    off, and ``hidden`` where the operands do not tell who needs a gradient (a reentrant checkpoint, a custom autograd
    function, a tensor subclass, compiled code). Of all others, ``input_grad_due`` and ``weight_grad_due`` had an
    operand, or the parameter itself, that needs a gradient; ``input_grad_run`` and ``weight_grad_run`` are what the
    backward then ran, and ``hidden_..._run`` the same for the hidden ones. Those in ``outer`` are due, but as outer
    products of two vectors, which cost no matrix product. ``matrices`` is how many separate matrices a batched product
    took it for, at most (0: none did).
    """

    n_elements: int
    n_dims: int
    nbytes: int
    dtype: str
    device: str
    trainable: bool
    read_as: str = "unused"
    op: str = ""
    uses: int = 0
    graphless: int = 0
    hidden: int = 0
    input_grad_due: int = 0
    weight_grad_due: int = 0
    input_grad_run: int = 0
    weight_grad_run: int = 0
    hidden_input_grad_run: int = 0
    hidden_weight_grad_run: int = 0
    outer: int = 0
    matrices: int = 0


@dataclass(frozen=True, slots=True)
class StepEvidence:
    """One step: its parameters by name, and the FLOPs that no parameter's products explain.

    ``attention`` and ``other_products`` are products between activations, forward and backward, without rescoring:
    attention where the op says so, or where a softmax stands between two of them. ``double_backward``: products of a
    second backward through the same graph, or through a backward's own. ``recompute_due`` is what recompute would have
    cost without early stop. ``tokens`` are the rows of one step, found as ``tokens_from`` says, in sequences of
    ``sequence_length`` (0: not known).
    """

    parameters: dict[str, ParameterEvidence] = field(default_factory=dict)
    attention: int = 0
    other_products: int = 0
    double_backward: int = 0
    recompute_due: int = 0
    tokens: int | None = None
    tokens_from: str = ""
    sequence_length: int = 0

    @property
    def n_parameters(self) -> int:
        """N: the elements of all parameters, each once."""
        return sum(parameter.n_elements for parameter in self.parameters.values())
