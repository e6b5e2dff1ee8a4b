"""What a bridge is: a prediction, named causes, and a measured number, with what is left between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Part(NamedTuple):
    """A share of a term: a stage of the model, what it adds, and in words why."""

    name: str
    value: int
    why: str


class Term(NamedTuple):
    """One cause: what it adds to the prediction, and in words why.

    ``closed_form`` is the same from a model's sizes alone, where a spec was given. ``parts``, where a term has some,
    add up to its ``value``: those of ``reuse`` are the stages of the model.
    """

    name: str
    value: int
    why: str
    closed_form: int | None = None
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class Bridge:
    """From ``predicted`` to ``measured``: what the ``terms`` do not explain is the ``residual``.

    Terms of 0 are left out, unless they have something to name. ``unit`` is ``flops`` or ``bytes``, ``rule`` the
    prediction in words, with its numbers.
    """

    predicted: int
    terms: tuple[Term, ...]
    measured: int
    unit: str = "flops"
    rule: str = ""
    notes: tuple[str, ...] = ()
    closed_form: int | None = None
    """The prediction plus all terms in closed form, where a spec was given."""
    caveat: str = ""
    """What must be known before all else, such as a step without a backward; also the first of the ``notes``."""
    by_name: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {term.name: term.value for term in self.terms})

    @property
    def residual(self) -> int:
        """``measured - predicted - sum of the terms``: 0 where every cause has a name.

        >>> Bridge(6, (Term("frozen", -2, "one of three products"),), 4).residual
        0
        """
        return self.measured - self.predicted - sum(term.value for term in self.terms)

    def value(self, name: str) -> int:
        """What the term of that name adds; 0 where the bridge does without it.

        >>> Bridge(6, (Term("frozen", -2, ""),), 4).value("reuse")
        0
        """
        return self.by_name.get(name, 0)


class Drafts:
    """Terms in the making: values and the reasons for them, by name."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._values = dict.fromkeys(names, 0)
        self._reasons: dict[str, list[str]] = {name: [] for name in names}
        self._parts: dict[str, tuple[Part, ...]] = {}

    def add(self, name: str, value: int) -> None:
        """Add to a term."""
        self._values[name] += value

    def explain(self, name: str, why: str) -> None:
        """Say why a term is there."""
        self._reasons[name].append(why)

    def divide(self, name: str, parts: tuple[Part, ...]) -> None:
        """Say what a term is made of."""
        self._parts[name] = parts

    def value(self, name: str) -> int:
        """The term so far."""
        return self._values[name]

    def terms(self, closed: dict[str, int] | None = None) -> tuple[Term, ...]:
        """The terms that are not 0, or that have a reason all the same, in the order of their names."""
        return tuple(
            Term(
                name,
                value,
                "; ".join(self._reasons[name]),
                None if closed is None else closed.get(name, 0),
                self._parts.get(name, ()),
            )
            for name, value in self._values.items()
            if value or self._reasons[name] or (closed or {}).get(name)
        )
