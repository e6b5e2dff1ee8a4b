"""From 6·N·D to the FLOPs that a step executed.

For each parameter of n elements that products used ``uses`` times (multiply-adds, from operand shapes), forward is
R = 2·uses, and each of the two gradients as much again, where it ran.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction

from torchledger.analytic.transformer import TransformerSpec
from torchledger.errors import UsageError
from torchledger.journal.evidence import ParameterEvidence
from torchledger.journal.statements import StepReport
from torchledger.read.reconcile.bridge import Bridge, Drafts
from torchledger.read.reconcile.stages import Reused, split_by_stage
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
    "sharding",
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
_NO_BACKWARD = "this step has no backward: 6·N·D counts two products of it for each one of a forward, and"
POSITIONS = "positions"
"""``tokens=`` so: D is what each parameter's products met."""


def flop_bridge(
    step: StepReport,
    *,
    tokens: int | str | None = None,
    spec: TransformerSpec | None = None,
    experts: str | None = None,
) -> Bridge:
    """The bridge from 6·N·D to ``step.flops.total``.

    Args:
        step: What was measured.
        tokens: D; the step's own, if left out; ``"positions"``: each parameter's own, the output positions that its
            products met.
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
    if tokens == POSITIONS:
        if spec is not None:
            raise UsageError('reconcile(tokens="positions", spec=...): a spec\'s closed forms are per token: give one.')
        met = count_positions(evidence.parameters)
        n_tokens, rule = 0, _rule_of_positions(evidence.parameters, met)
    else:
        n_tokens, tokens_from = choose_tokens(step, tokens)
        met = dict.fromkeys(evidence.parameters, Fraction(n_tokens))
        rule = f"6·N·D, N {evidence.n_parameters:,} parameters, D {n_tokens:,} tokens ({tokens_from})"
    is_expert = _expert_pattern(experts)
    drafts = Drafts(FLOP_TERMS)
    counts: dict[str, int] = dict.fromkeys((*FLOP_TERMS, "outer"), 0)
    reused: list[Reused] = []
    predicted = 0
    for name, parameter in evidence.parameters.items():
        standard = int(6 * parameter.n_elements * met[name])
        predicted += standard
        if parameter.read_as == "product":
            beyond = 6 * parameter.uses - standard
            term = "inactive_experts" if is_expert(name) or _has_idle_experts(parameter, beyond) else "reuse"
            _add_products(drafts, counts, parameter, beyond, term)
            if term == "reuse":
                reused.append(Reused(name, parameter.n_elements, parameter.uses, beyond))
        else:
            term = _READ_AS[parameter.read_as][0]
            if parameter.read_as == "unused" and is_expert(name):
                term = "inactive_experts"
            drafts.add(term, -standard)
            counts[term] += parameter.n_elements
    drafts.divide("reuse", split_by_stage([row for row in reused if row.value], n_tokens))
    _explain_parameters(drafts, counts, n_tokens)
    _add_the_rest(drafts, step)
    caveat = "" if step.flops.backward else f"{_NO_BACKWARD} {_what_ran(step)}"
    closed = None if spec is None else _closed_forms(spec, step, n_tokens)
    return Bridge(
        predicted=predicted,
        terms=drafts.terms(closed),
        measured=step.flops.total - step.flops.inference,
        rule=rule,
        notes=((caveat,) if caveat else ()) + tuple(_notes(step, spec)),
        caveat=caveat,
        closed_form=None if spec is None or closed is None else 6 * spec.n_params * n_tokens + sum(closed.values()),
    )


def _what_ran(step: StepReport) -> str:
    flops = step.flops
    ran = [f"{flops.forward:,} FLOP of forward"] if flops.forward else []
    ran += [f"{flops.inference:,} of inference"] if flops.inference else []
    return f"here {' and '.join(ran)} ran" if ran else "here no forward ran either"


def count_positions(parameters: Mapping[str, ParameterEvidence]) -> dict[str, Fraction]:
    """For each parameter, the output positions that its products met, summed over their calls.

    One that is in no product (a bias, a norm) has those of the parameter before it, the first ones those of the first
    after them: a layer's bias and the norm that follows it are at work at the positions of that layer's output.
    """
    known = {n: Fraction(p.uses, p.n_elements) for n, p in parameters.items() if p.uses and p.n_elements}
    last = next(iter(known.values()), Fraction(0))
    found = {}
    for name in parameters:
        last = found[name] = known.get(name, last)
    return found


def _rule_of_positions(parameters: Mapping[str, ParameterEvidence], met: Mapping[str, Fraction]) -> str:
    numbers = sorted({met[name] for name, p in parameters.items() if p.uses})
    span = " to ".join(f"{float(x):,.10g}" for x in dict.fromkeys(numbers[:1] + numbers[-1:])) or "0"
    n = sum(p.n_elements for p in parameters.values())
    return f"6·ΣnD, N {n:,} parameters, D of each the output positions of its products: {span}"


def _has_idle_experts(parameter: ParameterEvidence, beyond: int) -> bool:
    """Whether a parameter is several matrices side by side, which met fewer rows than all of D between them."""
    return parameter.n_dims >= 3 and parameter.matrices > 1 and beyond < 0


def choose_tokens(step: StepReport, tokens: int | str | None) -> tuple[int, str]:
    """D and where it comes from.

    Raises:
        UsageError: it is no number of tokens, or none is known.
    """
    if tokens is not None:
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise UsageError(
                f'reconcile(tokens={tokens!r}): give the tokens of the step, 1 or more, or "positions" (each layer\'s '
                f"own output positions, for convolutions)."
            )
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


def _add_products(drafts: Drafts, counts: dict[str, int], p: ParameterEvidence, beyond: int, term: str) -> None:
    """The terms of a parameter that products used: ``beyond`` what D stands for they are the given ``term``."""
    drafts.add(term, beyond)
    counts[term] += p.n_elements if beyond else 0
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
