"""``torchledger fit``: the largest model whose states fit into memory, with the working. Starts without torch."""

from __future__ import annotations

import argparse

from torchledger.accelerators import find_accelerator
from torchledger.analytic.estimates import estimate_largest_model
from torchledger.analytic.recipes import recipe
from torchledger.cli.options import read_count, read_option
from torchledger.errors import QuantityError
from torchledger.render.estimates import estimate_sections
from torchledger.render.text import page_width, render_sections

DEFAULT_RECIPE = "adamw-bf16-master"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add = parser.add_argument
    add("--devices", metavar="N", required=True, help="how many accelerators")
    add("--accelerator", metavar="NAME", required=True, help="as in h100-sxm; 'torchledger accelerators' lists them")
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--recipe", metavar="NAME", help=f"optimizer and precision, as in adamw-fp32; the default is {DEFAULT_RECIPE}"
    )
    either.add_argument("--bytes-per-param", metavar="X", help="bytes for each parameter, all parts together, as in 16")
    add("--zero", type=int, choices=(1, 2, 3), help="the ZeRO stage; without it, all parts are spread evenly, as by 3")


def execute(arguments: argparse.Namespace) -> int:
    """Prints the answer."""
    plain = arguments.bytes_per_param
    estimates = estimate_largest_model(
        devices=read_count("--devices", arguments.devices),
        accelerator=find_accelerator(arguments.accelerator),
        bytes_per_param=0 if plain is None else read_option("--bytes-per-param", plain, parse_bytes_per_param),
        recipe=recipe(arguments.recipe or DEFAULT_RECIPE) if plain is None else None,
        zero=arguments.zero or 0,
    )
    print(render_sections(estimate_sections(estimates), page_width()))
    return 0


def parse_bytes_per_param(text: str) -> float:
    """Bytes for each parameter, above 0.

    Raises:
        QuantityError: it is no such number.

    >>> parse_bytes_per_param("16"), parse_bytes_per_param("0.5")
    (16.0, 0.5)
    """
    digits = text.strip()
    value = float(digits) if digits.replace(".", "", 1).isdecimal() and digits.isascii() and len(digits) < 20 else 0.0
    if value <= 0:
        raise QuantityError(f"cannot read {text!r} as bytes for each parameter: write '16' or '0.5', above 0.")
    return value
