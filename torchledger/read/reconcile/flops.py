"""From 6·N·D to the FLOPs that a step executed.

For each parameter of n elements that products used ``uses`` times (multiply-adds, from operand shapes), forward is
R = 2·uses, and each of the two gradients as much again, where it ran.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from torchledger.analytic.transformer import TransformerSpec
from torchledger.errors import UsageError
from torchledger.journal.evidence import ParameterEvidence
from torchledger.journal.statements import StepReport
from torchledger.read.reconcile.bridge import Bridge, Drafts
from torchledger.units import format_count

FLOP_TERMS = (
    "attention",
    "embeddings",
    "norms",
    "biases",
    "inactive_experts",
    "frozen",
    "no_input_gradient",
    "recompute",
    "early_stop",
    "attention_rescore",
    "reuse",
    "elementwise",
    "unused",
    "uncounted",
    "no_backward",
    "double_backward",
    "other_products",
    "optimizer",
)
EXPERTS = r"(^|\.)experts?(\.|$)"
"""The parameters that are taken for experts, where the caller gives no other pattern."""
_READ_AS = {
    "embedding": ("embeddings", "only looked up"),
    "norm": ("norms", "of norms"),
    "bias": ("biases", "added to a product"),
    "elementwise": ("elementwise", "only scale or are added"),
    "uncounted": ("uncounted", "read by an op of unknown cost"),
    "unused": ("unused", "that nothing read"),
}
_EXPERT_PRODUCTS = ("aten.bmm", "aten.baddbmm", "aten._grouped_mm", "aten._scaled_grouped_mm")


def flop_bridge(
    step: StepReport, *, tokens: int | None = None, spec: TransformerSpec | None = None, experts: str | None = None
) -> Bridge:
    """The bridge from 6·N·D to ``step.flops.total``.

    Args:
        step: What was measured.
        tokens: D; the step's own, if left out.
        spec: A model's sizes, for each term's closed form.
        experts: A regular expression that finds the names of experts.

    Raises:
        UsageError: the step has no parameters or no known tokens, or ``experts`` is no regular expression.

    Source: 2 FLOP a multiply-add, and backward twice the forward (Kaplan et al. 2020, section 2.1).
    """
    evidence = step.evidence
    if not evidence.parameters:
        raise UsageError(
            f"step {step.index} has no parameters to reconcile with: give the model to Ledger(model), or record a "
            f"step in which a model runs."
        )
    n_tokens, tokens_from = choose_tokens(step, tokens)
    is_expert = _expert_pattern(experts)
    drafts = Drafts(FLOP_TERMS)
    counts: dict[str, int] = dict.fromkeys((*FLOP_TERMS, "outer"), 0)
    for name, parameter in evidence.parameters.items():
        if parameter.read_as == "product":
            expert = bool(is_expert(name)) or (parameter.n_dims >= 3 and parameter.op in _EXPERT_PRODUCTS)
            _add_products(drafts, counts, parameter, n_tokens, expert=expert)
        else:
            term = _READ_AS[parameter.read_as][0]
            if parameter.read_as == "unused" and is_expert(name):
                term = "inactive_experts"
            drafts.add(term, -6 * parameter.n_elements * n_tokens)
            counts[term] += parameter.n_elements
    _explain_parameters(drafts, counts, n_tokens)
    _add_the_rest(drafts, step)
    n = evidence.n_parameters
    closed = None if spec is None else _closed_forms(spec, step, n_tokens)
    return Bridge(
        predicted=6 * n * n_tokens,
        terms=drafts.terms(closed),
        measured=step.flops.total - step.flops.inference,
        rule=f"6·N·D, N {n:,} parameters, D {n_tokens:,} tokens ({tokens_from})",
        notes=tuple(_notes(step, spec)),
        closed_form=None if spec is None or closed is None else 6 * spec.n_params * n_tokens + sum(closed.values()),
    )


def choose_tokens(step: StepReport, tokens: int | None) -> tuple[int, str]:
    """D and where it comes from.

    Raises:
        UsageError: it is no number of tokens, or none is known.
    """
    if tokens is not None:
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise UsageError(f"reconcile(tokens={tokens!r}): give the tokens of the step, 1 or more.")
        return tokens, "given"
    if step.tokens is not None:
        return step.tokens, "tokens_per_step"
    if step.evidence.tokens:
        return step.evidence.tokens, step.evidence.tokens_from
    raise UsageError(
        f"the tokens of step {step.index} are not known: give reconcile(step, tokens=...), or tokens_per_step to "
        f"Ledger."
    )


def _expert_pattern(experts: str | None) -> Callable[[str], re.Match[str] | None]:
    try:
        return re.compile(EXPERTS if experts is None else experts).search
    except (re.error, TypeError) as error:
        raise UsageError(f"reconcile(experts={experts!r}): give a regular expression ({error}).") from None


def _add_products(drafts: Drafts, counts: dict[str, int], p: ParameterEvidence, n_tokens: int, *, expert: bool) -> None:
    """The terms of a parameter that products used."""
    reuse = 6 * (p.uses - p.n_elements * n_tokens)
    drafts.add("inactive_experts" if expert else "reuse", reuse)
    counts["inactive_experts" if expert else "reuse"] += p.n_elements if reuse else 0
    plain = p.uses - p.graphless - p.hidden
    no_gradient = plain - p.weight_grad_due
    drafts.add("frozen", -2 * no_gradient)
    drafts.add("no_input_gradient", -2 * (plain - p.input_grad_due))
    drafts.add("elementwise", -2 * p.outer)
    counts["outer"] += p.n_elements if p.outer else 0
    missing = _at_least_0(p.weight_grad_due - p.weight_grad_run) + _at_least_0(p.input_grad_due - p.input_grad_run)
    missing = _at_least_0(missing - p.outer)
    drafts.add("no_backward", -2 * missing - 4 * p.graphless)
    hidden_weight = _at_least_0(p.hidden - p.hidden_weight_grad_run)
    hidden_input = _at_least_0(p.hidden - p.hidden_input_grad_run)
    if p.trainable:
        both = min(hidden_weight, hidden_input)
        drafts.add("no_backward", -2 * (hidden_weight + both))
        hidden_input -= both
        missing += hidden_weight
    else:
        drafts.add("frozen", -2 * hidden_weight)
        no_gradient += hidden_weight
    drafts.add("no_input_gradient", -2 * hidden_input)
    counts["frozen"] += p.n_elements if no_gradient else 0
    counts["no_input_gradient"] += p.n_elements if hidden_input or plain > p.input_grad_due else 0
    counts["no_backward"] += p.n_elements if missing or p.graphless else 0


def _at_least_0(n: int) -> int:
    return max(n, 0)  # more products than were due have no name: they stay in the residual


def _explain_parameters(drafts: Drafts, counts: dict[str, int], n_tokens: int) -> None:
    def say(name: str, why: str) -> None:
        if drafts.value(name):
            drafts.explain(name, why)

    for term, what in _READ_AS.values():
        if counts[term]:
            say(term, f"6·D·n of {format_count(counts[term])} parameters {what}")
    if counts["outer"]:
        say("elementwise", f"gradients of {format_count(counts['outer'])} parameters' products are outer products")
    n = {name: format_count(count) for name, count in counts.items()}
    say("inactive_experts", f"{n['inactive_experts']} parameters of experts that not every token went through")
    say("frozen", f"no weight gradient of {n['frozen']} parameters that need none")
    say("no_input_gradient", f"{n['no_input_gradient']} parameters whose input needs no gradient")
    say("no_backward", f"{n['no_backward']} parameters in a forward whose backward did not run")
    say("reuse", f"{n['reuse']} parameters met more or fewer rows than the {format_count(n_tokens)} of D")


def _add_the_rest(drafts: Drafts, step: StepReport) -> None:
    """The terms that no parameter explains."""
    flops, evidence = step.flops, step.evidence

    def add(name: str, value: int, why: str) -> None:
        if value:
            drafts.add(name, value)
            drafts.explain(name, why)

    add("attention", evidence.attention, "scores and weighted values, forward and backward")
    add("other_products", evidence.other_products, "other products without parameters")
    add("recompute", evidence.recompute_due, "the forward of checkpointed segments once more")
    add("early_stop", flops.recompute - evidence.recompute_due, "products after a segment's last saved tensor")
    add("attention_rescore", flops.attention_rescore, "fused attention's backward computes the scores again")
    add("double_backward", evidence.double_backward, "products of a second backward")
    add("optimizer", flops.optimizer, "products inside the optimizer")
    if flops.uncounted:
        calls = ", ".join(f"{op} ({n} calls)" for op, n in flops.uncounted.items())
        drafts.explain("uncounted", f"ops without a formula, of unknown cost: {calls}")


def _notes(step: StepReport, spec: TransformerSpec | None) -> Iterable[str]:
    flops, n = step.flops, step.evidence.n_parameters
    if spec is not None and spec.n_params != n:
        yield f"the spec has {spec.n_params:,} parameters, not {n:,}: its closed forms are those of another model"
    if flops.inference:
        yield f"{flops.inference:,} FLOP of inference, which 6·N·D does not speak of, are left out of what was measured"
    if flops.compiled_regions:
        yield (
            f"{flops.compiled_regions} compiled regions: products that the compiler put into kernels of its own are in "
            f"no number here"
        )
    if flops.approximate or flops.upper_bound:
        yield "some formulas are approximate or upper bounds: what they are off by is in their term"


def _closed_forms(spec: TransformerSpec, step: StepReport, n_tokens: int) -> dict[str, int]:
    """Each term from the model's sizes, for the kind of attention and checkpointing that the step shows."""
    flops, evidence = step.flops, step.evidence
    length = evidence.sequence_length
    if not length or n_tokens % length:
        raise UsageError(
            f"reconcile(spec=...): the sequence length of step {step.index} is not known (a model must be called with "
            f"token ids of shape (batch, sequence)), so that no closed form can be given: leave spec out."
        )
    fused = bool(flops.attention_rescore) or any("scaled_dot_product" in op for op in flops.by_op)
    in_parameters = sum(p.recompute for p in flops.by_parameter.values())
    checkpoint = "full" if in_parameters else "selective" if flops.recompute else "none"
    return spec.flop_bridge(
        n_tokens // length,
        length,
        checkpoint,
        attention="fused" if fused else "math",
        early_stop=flops.recompute < evidence.recompute_due,
    )
