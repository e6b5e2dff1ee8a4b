"""``torchledger napkin``: what a training run costs, with the working. Starts without torch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from fractions import Fraction

from torchledger.accelerators import find_accelerator
from torchledger.analytic.estimates import Estimate, estimate_training_flops, estimate_training_time
from torchledger.analytic.models import FAMILIES, find_model
from torchledger.analytic.transformer import TransformerSpec
from torchledger.cli.options import read_count, read_option
from torchledger.errors import QuantityError, UsageError
from torchledger.render.estimates import estimate_sections, rule_sections
from torchledger.render.tables import Section
from torchledger.render.text import page_width, render_sections
from torchledger.units import format_number

_SHARE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)( ?%)?")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add = parser.add_argument
    add("--params", metavar="N", help="parameters, as in 70B or 70e9")
    add("--model", metavar="NAME", help=f"in place of --params, a published model: {', '.join(_model_names())}")
    add("--tokens", metavar="N", help="tokens of the whole run, as in 15T")
    add("--devices", metavar="N", help="accelerators that work; the default is 1")
    add("--accelerator", metavar="NAME", help="as in h100-sxm; 'torchledger accelerators' lists them")
    add("--mfu", metavar="X", help="the share of the dense peak that is reached, as in 0.5 or 50%%; the default is 0.5")
    add("--dtype", metavar="NAME", default="bf16", help="the type of the products; the default is bf16")
    add(
        "--seq", metavar="N", help="with --model: also its FLOPs for one sequence of so many tokens, by published rules"
    )


def execute(arguments: argparse.Namespace) -> int:
    """Prints the answers."""
    spec = _read_model(arguments)
    if spec is None and arguments.seq is not None:
        raise UsageError("--seq goes with --model: only the sizes of a model say what a sequence costs.")
    n_params = read_count("--params", arguments.params) if spec is None else spec.n_active_params
    what = "parameters that one token meets" if spec is not None and spec.n_experts else "parameters"
    estimates: list[Estimate] = []
    if arguments.tokens is not None:
        n_tokens = read_count("--tokens", arguments.tokens)
        estimates.append(estimate_training_flops(n_params, n_tokens, what=what))
        estimates += _times(arguments, n_params, n_tokens)
    elif spec is None or arguments.seq is None:
        raise UsageError("--tokens is missing: give the tokens of the whole run, as in 15T.")
    sections: list[Section] = list(estimate_sections(estimates))
    if spec is not None and arguments.seq is not None:
        seq = read_count("--seq", arguments.seq)
        title = (
            f"{arguments.model}: forward and backward of one sequence of {format_number(seq, 'token')}, by each rule"
        )
        sections += rule_sections(spec.published_flops(1, seq), title)
    print(render_sections(sections, page_width()))
    return 0


def _read_model(arguments: argparse.Namespace) -> TransformerSpec | None:
    if arguments.model is None:
        if arguments.params is None:
            raise UsageError("--params is missing: give the parameters, as in 70B, or a --model.")
        return None
    if arguments.params is not None:
        raise UsageError("--params and --model say the same thing twice: give one of them.")
    return TransformerSpec(**find_model(arguments.model))


def _model_names() -> Iterable[str]:
    return [f"{family}-{name}" for family, models in FAMILIES.items() for name in models]


def _times(arguments: argparse.Namespace, n_params: int, n_tokens: int) -> tuple[Estimate, ...]:
    if arguments.accelerator is None:
        for option in ("devices", "mfu"):
            if getattr(arguments, option) is not None:
                raise UsageError(f"--{option} goes with --accelerator: whose peak is it a share of?")
        return ()
    return estimate_training_time(
        n_params,
        n_tokens,
        devices=read_count("--devices", arguments.devices or "1"),
        accelerator=find_accelerator(arguments.accelerator),
        dtype=arguments.dtype,
        mfu=read_option("--mfu", arguments.mfu or "0.5", parse_share),
    )


def parse_share(text: str) -> float:
    """A share of a whole, written as a number up to 1 or in percent.

    Raises:
        QuantityError: it is neither, or not above 0 and at most 1.

    >>> parse_share("0.462"), parse_share("46.2 %")
    (0.462, 0.462)
    """
    match = _SHARE.fullmatch(text.strip())
    share = Fraction(match[1]) / (100 if match[2] else 1) if match else Fraction(0)
    if not 0 < share <= 1:
        raise QuantityError(f"cannot read {text!r} as a share: write '0.5' or '50%', above 0 and at most 1.")
    return float(share)
