"""What happened in one step, in order: blocks, events, marks and products. Plain data, no torch.

A block is a storage that an allocation made. Blocks are numbered from 0 in the order in which the ledger met them,
over all steps; an event ``n >= 0`` says "block n came" and ``~n`` says "block n went". Entries are plain tuples, since
one is made for each op.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

# Roles of a block: facts noted while recording. `read.categories` turns them into categories.
PARAMETER = 1
BUFFER = 2
OPTIMIZER_STATE = 4
GRADIENT = 8
AUTOCAST_COPY = 16
NO_GRAPH = 32
"""Made in a forward pass while no graph was recorded: grad mode off, and not inside a custom autograd function."""
READ_BY_FORWARD = 64
"""Made outside, or there before the ledger met it, and then read by a forward pass (or by what led to a backward)."""
LATE = 128
"""There before the ledger met it: as an argument of an op, or when a model or an optimizer was found."""
WRITTEN = 256
"""Met late by an op that wrote into it outside of any forward pass (a metric, an EMA copy)."""
EXTERNAL = 512
"""Not given by an allocator: a numpy array, a mapped file, DLPack."""
FROM_INPUTS = 1024
"""Made outside from nothing but inputs (a batch that a loader collates): an input, even before a forward reads it."""
WORKSPACE = 2048
"""Made and freed inside an op, for a reason that is known: no dispatch shows it."""
NOT_INPUTS = PARAMETER | BUFFER | OPTIMIZER_STATE | GRADIENT | AUTOCAST_COPY | WRITTEN
SETTLED_SHIFT = 16
"""Bits from here up hold 1 + the index of the category that an earlier step settled on."""


class Block(NamedTuple):
    """A storage of ``nbytes`` on ``device``.

    ``op`` made it, while ``phase`` and ``module`` (an index into ``Journal.modules``) ran; ``shape`` and ``dtype`` are
    those of the tensor that came with it. ``site`` is an index into ``Journal.sites``, -1 where none was taken.
    """

    nbytes: int
    device: str
    phase: str
    module: int
    op: str
    shape: tuple[int, ...]
    dtype: str
    site: int = -1


Row: TypeAlias = tuple[int, str, str, int, str, tuple[int, ...], str, int]
"""A `Block` as it is written: a plain tuple takes a sixth of the time."""


class Product(NamedTuple):
    """One op that has a FLOP formula.

    ``rescore`` is the part of ``flops`` that computes attention scores again, ``causal_excess`` what the rest counts
    beyond the causal pairs. ``parts`` are ``(parameter, kind, flops)`` with an index into ``Journal.parameters``
    and ``kind`` one of ``forward``, ``input_grad``, ``weight_grad``. ``quality`` is ``exact``, ``approximate``,
    ``upper_bound`` or ``integer`` (whose ``flops`` are integer operations, in no FLOP total). ``link`` is empty or a
    `Link`, written as a plain tuple.
    """

    op: str
    dtype: str
    phase: str
    module: int
    flops: int
    rescore: int = 0
    causal_excess: int = 0
    parts: tuple[tuple[int, str, int], ...] = ()
    quality: str = "exact"
    link: tuple[Any, ...] = ()


ProductRow: TypeAlias = tuple[str, str, str, int, int, int, int, tuple[tuple[int, str, int], ...], str, tuple[Any, ...]]
"""A `Product` as it is written."""


# Flags of a link.
INPUT_GRAD = 1
"""An operand that is no parameter needs a gradient."""
WEIGHT_GRAD = 2
"""The parameter needs a gradient."""
GRAPH = 4
"""Made with grad mode on."""
HIDDEN = 8
"""Made where the operands do not tell who needs a gradient: in a custom function's forward, inside a tensor subclass
or in compiled code."""
AGAIN = 16
"""Made in the recompute of its segment."""
NO_SEGMENT = -1


class Link(NamedTuple):
    """What ties a product to others of its step.

    ``origin`` is the index of the product whose backward this one is part of, -1 where there is none or it is not of
    this step, and ``run`` the number of that backward. ``flags`` (`INPUT_GRAD`, ...) and ``segment`` (an index into
    ``Journal.segments``, -1 outside of non-reentrant checkpoints) are those of a forward or recompute. ``uses`` has,
    for each of the product's parts, the multiply-adds of its parameter counted from the shapes of the operands; of a
    product without parameters, ``sizes`` has the elements of the result and of its two operands.
    """

    origin: int = -1
    flags: int = 0
    segment: int = -1
    run: int = 0
    uses: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


class ParameterRow(NamedTuple):
    """A parameter as a step left it: an index into ``Journal.parameters``, and what there is of it.

    ``holder`` is the class of the module that holds it, ``key`` its name there.
    """

    parameter: int
    n_elements: int
    n_dims: int
    nbytes: int
    dtype: str
    device: str
    trainable: bool
    holder: str
    key: str


class Reader(NamedTuple):
    """An op that read a parameter in a forward pass.

    ``how``: as a factor of a ``product``, as another argument of a product (``addend``), in an op of ``uncounted``
    cost, or in any other (``plain``). ``position`` is the number of blocks that the step had by then.
    """

    parameter: int
    op: str
    how: str
    module: int
    position: int


class Batch(NamedTuple):
    """The shapes of what a model was called with: of the first tensor of integers (empty: none), and of the first."""

    module: int
    graph: bool
    integers: tuple[int, ...]
    first: tuple[int, ...]


class Mark(NamedTuple):
    """Something that happened before event number ``position`` of the step.

    ``kind`` is ``phase`` (``value`` begins), ``backward`` (an engine run begins) or `FORMULA` (``value``, the class of
    an autograd node, begins; "": it has ended).
    """

    position: int
    kind: str
    value: str = ""


FORMULA = "formula"
"""The kind of the marks around formulas of autograd that a dispatch mode sends another way: see `read.formulas`."""


@dataclass(slots=True)
class DeviceReading:
    """What an allocator itself counted over one step of one device, in bytes."""

    requested_start: int
    requested_peak: int
    requested_end: int
    allocated_peak: int
    reserved_peak: int
    workspace: int = 0
    """Of the peak; of the step's start and end too, where those are not given."""
    workspace_start: int | None = None
    workspace_end: int | None = None
    in_place: bool = False
    """Whether the allocator saw sums of gradients made in place, as in a program without a ledger."""
    cublas: int | None = None
    """Of ``workspace``, what cuBLAS keeps; the rest are copies inside ops. None where they are not told apart."""


@dataclass(slots=True)
class Journal:
    """One step.

    ``carried`` are the blocks that were alive when the step began; blocks that the ledger met during the step though
    they existed before have the role ``LATE`` and no coming event. ``first`` is the number of ``blocks[0]``.
    """

    index: int = 0
    first: int = 0
    carried: dict[int, Row] = field(default_factory=dict)
    blocks: list[Row] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    marks: list[tuple[int, str, str]] = field(default_factory=list)
    roles: dict[int, int] = field(default_factory=dict)
    products: list[ProductRow] = field(default_factory=list)
    copies: list[tuple[str, str, int, int]] = field(default_factory=list)
    """(kind, device, nbytes, module)"""
    uncounted: dict[str, int] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    sites: list[str] = field(default_factory=list)
    inplace_adds: list[tuple[int, int]] = field(default_factory=list)
    """(position of the sum's coming, the block that autograd would have added into): see `read.timeline`."""
    readings: dict[str, DeviceReading] = field(default_factory=dict)
    compiled: list[int] = field(default_factory=list)
    """The module of each compiled region that ran."""
    global_excess: int = 0
    """FLOPs that the products of distributed tensors cost on all ranks together, beyond this rank's part."""
    segments: list[int] = field(default_factory=list)
    """How often each segment of a non-reentrant checkpoint was recomputed."""
    enclosing: list[int] = field(default_factory=list)
    """The segment around each: its index, or -2 - index where that one was being recomputed; -1: none."""
    parameter_rows: list[ParameterRow] = field(default_factory=list)
    readers: list[Reader] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)

    def block(self, number: int) -> Block:
        """The block of that number."""
        return Block(*(self.blocks[number - self.first] if number >= self.first else self.carried[number]))

    def numbers(self) -> Iterator[int]:
        """The numbers of all blocks, oldest first."""
        yield from self.carried
        yield from range(self.first, self.first + len(self.blocks))
