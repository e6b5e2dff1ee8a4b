"""What a journal shows: which products are attention's, what a parameter was to its readers, how many tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchledger as tl
from reconciling import record
from torchledger.journal.entries import (
    AGAIN,
    GRAPH,
    HIDDEN,
    INPUT_GRAD,
    LATE,
    WEIGHT_GRAD,
    Batch,
    Block,
    Journal,
    Link,
    ParameterRow,
    Product,
    Reader,
)
from torchledger.read.attention import find_attention
from torchledger.read.categories import INDEX
from torchledger.read.evidence import gather_evidence
from torchledger.read.readers import read_as

# Attention


class Function(nn.Module):
    """A function of three tensors, inside a module."""

    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.anchor = nn.Linear(1, 1)  # a model has a parameter
        self.call = call

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.call(q, k, v)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2)).softmax(-1) @ v


def masked_and_dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.transpose(-1, -2)).masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -1e9)
    return F.dropout(scores.softmax(-1), 0.5) @ v


def einsum_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v)


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.elu(q) @ (F.elu(k).transpose(-1, -2) @ v)


def gram(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2)).tanh() @ v


def contrastive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.cross_entropy((q @ k.transpose(-1, -2)).flatten(0, 2), torch.zeros(2 * 4 * 6, dtype=torch.long)) * v


PAIRS = 2 * 4 * 6 * 6
"""B·H·T²; each product has 2·PAIRS·dh FLOPs, and each gradient as many."""


@pytest.mark.parametrize(
    ("call", "attention", "other"),
    [
        (softmax_attention, 12, 0),
        (masked_and_dropped, 12, 0),
        (einsum_attention, 12, 0),
        (F.scaled_dot_product_attention, 12, 0),
        (gram, 0, 12),
        (contrastive, 0, 6),
    ],
    ids=["plain", "masked", "einsum", "sdpa", "no_softmax", "no_values"],
)
def test_attention(call: Callable[..., Tensor], attention: int, other: int) -> None:
    q, k, v = (torch.randn(2, 4, 6, 8, requires_grad=True) for _ in range(3))
    model = Function(call)
    evidence = record(model, lambda: model(q, k, v).sum().backward(), tokens=12).evidence
    assert (evidence.attention, evidence.other_products) == (attention * PAIRS * 8, other * PAIRS * 8)


def test_linear_attention_is_no_attention_of_pairs() -> None:
    q, k, v = (torch.randn(2, 4, 6, 8, requires_grad=True) for _ in range(3))
    model = Function(linear_attention)
    evidence = record(model, lambda: model(q, k, v).sum().backward(), tokens=12).evidence
    assert (evidence.attention, evidence.other_products) == (0, 2 * 3 * 2 * 2 * 4 * 6 * 8 * 8)


def journal_of(*products: Product, **more: Any) -> Journal:
    return Journal(
        products=[tuple(product) for product in products],
        modules=["(outside)", "block", "block.attend", "other"],
        parameters=["w", "v"],
        **more,
    )


def softmax_of(size: tuple[int, ...], module: int) -> Any:
    return tuple(Block(4, "cpu", "forward", module, "aten._softmax", size, "float32"))


def bare(module: int, *sizes: int, phase: str = "forward") -> Product:
    return Product("aten.bmm", "float32", phase, module, 100, link=tuple(Link(-1, GRAPH, sizes=sizes)))


@pytest.mark.parametrize(
    ("softmax_in", "found"), [(1, {0, 1}), (2, {0, 1}), (3, set())], ids=["above", "beside", "elsewhere"]
)
def test_a_softmax_counts_where_it_is_near(softmax_in: int, found: set[int]) -> None:
    modules = ["(outside)", "net.block", "net.block.attend", "far.other"]
    journal = journal_of(bare(2, 36, 48, 48), bare(2, 48, 36, 48), bare(2, 10, 20, 20))
    journal.modules = modules
    journal.blocks = [softmax_of((6, 6), softmax_in)]
    assert find_attention(journal) == found


# Products


def row_of(number: int = 0, n_elements: int = 12, n_dims: int = 2, *, trainable: bool = True) -> ParameterRow:
    return ParameterRow(number, n_elements, n_dims, 4 * n_elements, "float32", "cpu", trainable, "Linear", "weight")


def forward(flags: int, uses: int = 60, parameter: int = 0, op: str = "aten.mm") -> Product:
    link = Link(-1, flags, -1, 0, (uses,))
    return Product(op, "float32", "forward", 1, 2 * uses, parts=((parameter, "forward", 2 * uses),), link=tuple(link))


def backward(kind: str, run: int = 1, origin: int = 0, parameter: int = 0, flops: int = 120) -> Product:
    link = tuple(Link(origin, 0, -1, run))
    return Product("aten.mm", "float32", "backward", 1, flops, parts=((parameter, kind, flops),), link=link)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (GRAPH | INPUT_GRAD | WEIGHT_GRAD, {"input_grad_due": 60, "weight_grad_due": 60}),
        (GRAPH | WEIGHT_GRAD, {"weight_grad_due": 60}),
        (GRAPH | INPUT_GRAD, {"input_grad_due": 60}),
        (GRAPH, {}),
        (0, {"graphless": 60}),
        (INPUT_GRAD | WEIGHT_GRAD, {"graphless": 60}),
        (HIDDEN, {"hidden": 60}),
        (HIDDEN | GRAPH | WEIGHT_GRAD, {"hidden": 60}),
    ],
)
def test_flags(flags: int, expected: dict[str, int]) -> None:
    evidence = gather_evidence(journal_of(forward(flags), parameter_rows=[row_of()]), {})
    found = evidence.parameters["w"]
    names = ("graphless", "hidden", "input_grad_due", "weight_grad_due")
    assert found.uses == 60
    assert {name: getattr(found, name) for name in names if getattr(found, name)} == expected


ALL = GRAPH | INPUT_GRAD | WEIGHT_GRAD


def test_a_second_backward_is_double() -> None:
    runs = [backward(kind, run) for run in (1, 2) for kind in ("input_grad", "weight_grad")]
    evidence = gather_evidence(journal_of(forward(ALL), *runs, parameter_rows=[row_of()]), {})
    found = evidence.parameters["w"]
    assert (found.input_grad_run, found.weight_grad_run, evidence.double_backward) == (60, 60, 240)


def test_uses_come_from_shapes_and_not_from_flops() -> None:
    wrong = backward("weight_grad", flops=999_998)
    evidence = gather_evidence(journal_of(forward(ALL), wrong, parameter_rows=[row_of()]), {})
    assert evidence.parameters["w"].weight_grad_run == 60


def test_a_backward_of_the_step_before_has_no_origin() -> None:
    evidence = gather_evidence(journal_of(backward("weight_grad", origin=-1), parameter_rows=[row_of()]), {})
    found = evidence.parameters["w"]
    assert (found.uses, found.weight_grad_run) == (0, 60)


def test_integer_products_are_in_no_account() -> None:
    product = forward(ALL)._replace(quality="integer")
    evidence = gather_evidence(journal_of(product, parameter_rows=[row_of()]), {})
    assert evidence.parameters["w"].uses == 0


@pytest.mark.parametrize(("times", "due"), [(0, 0), (1, 120), (2, 240)])
def test_recompute_due(times: int, due: int) -> None:
    product = forward(ALL)._replace(link=tuple(Link(-1, ALL, 0, 0, (60,))))
    again = product._replace(phase="recompute", flops=7, link=tuple(Link(-1, ALL | AGAIN, 0, 0, (60,))))
    journal = journal_of(product, *[again] * times, parameter_rows=[row_of()], segments=[times])
    assert gather_evidence(journal, {}).recompute_due == due


def in_segment(segment: int, flops: int, *, phase: str = "forward", again: bool = False) -> Product:
    link = tuple(Link(-1, ALL | (AGAIN if again else 0), segment))
    return Product("aten.mm", "float32", phase, 1, flops, link=link)


def test_segments_within_segments() -> None:
    products = [
        in_segment(0, 1),
        in_segment(1, 10),  # within the first
        in_segment(2, 100, phase="recompute"),  # begins within the first's recompute
        in_segment(0, 1000, phase="recompute", again=True),
        in_segment(1, 10_000, phase="recompute", again=True),
        in_segment(-1, 100_000, phase="recompute"),  # of a kind that nothing is known of
    ]
    journal = journal_of(*products, segments=[1, 1, 0], enclosing=[-1, 0, -2])
    # Due: the first one with the second in it, the second once more, and what nothing is known of.
    assert gather_evidence(journal, {}).recompute_due == (1 + 10) + 10 + 100_000
    journal.segments[0] = 2
    assert gather_evidence(journal, {}).recompute_due == 2 * (1 + 10) + 10 + 100_000


# Readers


def read(reader: Reader, *, row: ParameterRow | None = None, blocks: list[Any] = (), products: Any = ()) -> str:
    journal = journal_of(*products, readers=[reader], parameter_rows=[row or row_of()], blocks=list(blocks))
    return read_as(journal, set())[reader.parameter][0]


def made(op: str, module: int = 1) -> Any:
    return tuple(Block(4, "cpu", "forward", module, op, (1,), "float32"))


@pytest.mark.parametrize(
    ("op", "how", "expected"),
    [
        ("aten.mm", "product", "product"),
        ("aten.addmm", "addend", "bias"),
        ("mylib.op", "uncounted", "uncounted"),
        ("aten.embedding", "plain", "embedding"),
        ("aten.index", "plain", "embedding"),
        ("aten.index_select", "plain", "embedding"),
        ("aten._embedding_bag", "plain", "embedding"),
        ("aten.native_layer_norm", "plain", "norm"),
        ("aten.native_batch_norm", "plain", "norm"),
        ("aten._fused_rms_norm", "plain", "norm"),
        ("aten.mul", "plain", "elementwise"),
        ("aten.cat", "plain", "elementwise"),
    ],
)
def test_read_as(op: str, how: str, expected: str) -> None:
    assert read(Reader(0, op, how, 1, 0)) == expected


def test_a_vector_among_a_fused_layers_weights_is_a_bias() -> None:
    assert read(Reader(0, "aten.lstm", "product", 1, 0), row=row_of(n_dims=1)) == "bias"


@pytest.mark.parametrize(
    ("blocks", "module", "expected"),
    [
        ([made("aten.rsqrt"), made("aten.mul")], 1, "norm"),
        ([made("aten.rsqrt", 2), made("aten.mul", 2)], 1, "elementwise"),
        ([made("aten.rsqrt"), *[made("aten.mul")] * 7], 1, "elementwise"),
    ],
    ids=["near", "another_module", "far"],
)
def test_a_scale_behind_statistics_is_a_norms(blocks: list[Any], module: int, expected: str) -> None:
    assert read(Reader(0, "aten.mul", "plain", module, len(blocks)), blocks=blocks) == expected


@pytest.mark.parametrize(
    ("last", "n_dims", "expected"),
    [("aten.mm", 1, "bias"), ("aten.mm", 2, "elementwise"), ("aten.relu", 1, "elementwise")],
    ids=["after_a_product", "a_table", "after_another"],
)
def test_a_vector_that_is_added_to_a_product_is_a_bias(last: str, n_dims: int, expected: str) -> None:
    product = forward(ALL, parameter=1)
    reader = Reader(0, "aten.add", "plain", 1, 1)
    assert read(reader, row=row_of(n_dims=n_dims), blocks=[made(last)], products=[product]) == expected


def test_the_first_that_holds() -> None:
    readers = [Reader(0, "aten.mul", "plain", 1, 0), Reader(0, "aten.embedding", "plain", 1, 0)]
    journal = journal_of(readers=readers, parameter_rows=[row_of()])
    assert read_as(journal, set()) == {0: ("embedding", "aten.embedding")}
    journal.readers.append(Reader(0, "aten.mm", "product", 1, 0))
    assert read_as(journal, set()) == {0: ("product", "aten.mm")}
    assert read_as(journal_of(), {1}) == {1: ("product", "")}


def test_compiled_code_is_read_by_what_holds_the_parameter() -> None:
    holders = [("Embedding", "weight"), ("LayerNorm", "weight"), ("Linear", "bias"), ("Scale", "gamma")]
    rows = [row_of(i)._replace(holder=holder, key=key) for i, (holder, key) in enumerate(holders)]
    found = read_as(journal_of(parameter_rows=rows, compiled=[1]), set())
    assert [found[i][0] for i in range(4)] == ["embedding", "norm", "bias", "elementwise"]
    assert read_as(journal_of(parameter_rows=rows), set()) == {}


# Tokens


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ([Batch(1, True, (2, 8), (2, 8))], (16, 8)),
        ([Batch(1, True, (2, 8), (2, 8)), Batch(1, True, (3, 8), (3, 8))], (40, 8)),
        ([Batch(1, True, (2, 8), (2, 8)), Batch(1, False, (9, 8), (9, 8))], (16, 8)),
        ([Batch(1, False, (9, 8), (9, 8))], (72, 8)),
        ([Batch(1, True, (2, 8), (2, 8)), Batch(3, True, (5, 5), (5, 5))], (16, 8)),
        ([Batch(1, True, (), (7, 3)), Batch(1, True, (), (2, 3))], (9, 0)),
        ([Batch(1, True, (), (7, 3)), Batch(3, True, (2, 8), (2, 8))], (16, 8)),
        ([], (None, 0)),
    ],
    ids=["one", "accumulated", "with_evaluation", "evaluation_alone", "two_models", "rows", "ids_of_one", "none"],
)
def test_tokens_of_calls(batches: list[Batch], expected: tuple[int | None, int]) -> None:
    evidence = gather_evidence(journal_of(batches=batches), {})
    assert (evidence.tokens, evidence.sequence_length) == expected


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [("int64", (3, 5), 15), ("float32", (3, 5), 3), ("float32", (), None), ("uint8", (4,), 4)],
)
def test_tokens_of_inputs(dtype: str, shape: tuple[int, ...], expected: int | None) -> None:
    block = tuple(Block(60, "cpu", "outside", 0, "", shape, dtype))
    journal = journal_of(blocks=[block], roles={0: LATE})
    assert gather_evidence(journal, {0: INDEX["inputs"]}).tokens == expected
    assert gather_evidence(journal, {0: INDEX["other"]}).tokens is None


def test_all_parameters_are_there_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2, bias=False))
    step = record(model, lambda: model(torch.randn(3, 4)).sum().backward())
    found = step.evidence.parameters
    assert {name: p.n_elements for name, p in found.items()} == {n: p.numel() for n, p in model.named_parameters()}
    assert step.evidence.n_parameters == 32 + 8 + 16
    assert isinstance(step, tl.StepReport)
