"""The cross-check: every number against the counter that it is taken from, every reason, and nothing left behind."""

from __future__ import annotations

import copy
import itertools
import logging
import random
import subprocess
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import torchledger as tl
from torchledger.errors import UsageError
from torchledger.flops.crosscheck import CrossCheck, CrossCheckRow
from torchledger.flops.declared import DECLARED
from torchledger.flops.fvcore_posts import post_fvcore
from torchledger.flops.opinions import FvcoreCount, Product

pytest.importorskip("fvcore")
pytestmark = pytest.mark.filterwarnings("ignore")  # sparse tensors are said to be in beta

Numbers = dict[str, tuple[int, int | None, int | None]]


def numbers_of(check: CrossCheck) -> Numbers:
    return {row.op: (row.ours, row.torch, row.fvcore) for row in check.rows}


def reasons_of(check: CrossCheck) -> dict[str, str]:
    return {row.op: row.why for row in check.differences}


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return a @ b


@torch.library.custom_op("crosscheck_test::product", mutates_args=())
def product(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def traced_otherwise(x: Tensor) -> Tensor:
    return x @ x @ x if torch.jit.is_tracing() else x @ x


def with_a_dead_product(x: Tensor) -> Tensor:
    _ = x @ x @ x
    return x @ x


def attend(q: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, q)


SDPA = "aten._scaled_dot_product_flash_attention_for_cpu"
LACKS_SDPA = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu not in flop_registry  # up to torch 2.14
SQUARE = torch.ones(4, 4)
IMAGE = torch.ones(1, 3, 8, 8)
CONV = 2 * 64 * 4 * 27

CASES: list[tuple[str, Callable[..., Any], tuple[Any, ...], Numbers, dict[str, list[str]]]] = [
    ("mlp", nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4, bias=False)), (torch.ones(8, 16),),
     {"aten.addmm": (8192, 8192, 8192), "aten.mm": (2048, 2048, 2048)}, {}),
    ("batch_norm", nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)), (IMAGE,),
     {"aten.convolution": (CONV, CONV, CONV), "aten.batch_norm": (0, 0, 2 * 5 * 256)},
     {"aten.batch_norm": ["fvcore counts batch_norm, which is element-wise work"]}),
    ("transposed", nn.ConvTranspose2d(3, 4, 3, groups=1), (IMAGE,), {"aten.convolution": (CONV, CONV, CONV)}, {}),
    ("attention", attend, (torch.ones(2, 4, 32, 16),), {SDPA: (524_288, 0 if LACKS_SDPA else 524_288, 0)},
     {SDPA: ["torch has no formula for it (1 call)"] * LACKS_SDPA
            + ["fvcore does not know scaled_dot_product_attention (1 call)"]}),
    ("lstm", nn.LSTM(16, 32, 2, bias=False), (torch.ones(10, 4, 16),),
     {"aten.mkldnn_rnn_layer": (1_146_880, 0, 0)},
     {"aten.mkldnn_rnn_layer": ["torch has no formula", "fvcore does not know lstm (2 calls)"]}),
    ("vectors", lambda a, x: (torch.mv(a, x), a @ x), (SQUARE, torch.ones(4)), {"aten.mv": (64, 0, 0)},
     {"aten.mv": ["torch has no formula for it (2 calls)", "does not know mv (1 call)",
                  "formula for matmul fails: IndexError: list index out of range (1 call)"]}),
    ("broadcast", lambda a, b: a @ b, (SQUARE, torch.ones(3, 4, 5)), {"aten.bmm": (480, 480, 160)},
     {"aten.bmm": ["the batch that only matmul's second operand has (1 call)"]}),
    ("complex", lambda a: a @ a, (SQUARE.to(torch.complex64),), {"aten.mm": (512, 128, 128)},
     {"aten.mm": ["torch counts a complex product as a real one", "fvcore counts matmul of complex numbers"]}),
    ("sparse", lambda a, b: torch.mm(a.to_sparse_csr(), b), (SQUARE.triu(), SQUARE), {"aten.mm": (80, 128, 0)},
     {"aten.mm": ["torch counts a sparse operand as if it were dense", "fvcore's formula for mm fails"]}),
    ("einsum", lambda a, b: torch.einsum("ijk,ikl->ijl", a, b), (torch.ones(7, 123, 457), torch.ones(7, 457, 9)),
     {"aten.bmm": (7_082_586, 7_082_586, 7_083_000)}, {"aten.bmm": ["fvcore has einsum's FLOPs from numpy"]}),
    ("einsum_exact", lambda a, b: torch.einsum("bij,bik->bjk", a, b), (torch.ones(7, 12, 5), torch.ones(7, 12, 3)),
     {"aten.bmm": (2520, 2520, 2520)}, {}),
    ("autograd_function", Function.apply, (SQUARE, SQUARE), {"aten.mm": (128, 128, 0)},
     {"aten.mm": ["fvcore does not look into autograd functions (1 call)"]}),
    ("dead", with_a_dead_product, (SQUARE,), {"aten.mm": (384, 384, 128)},
     {"aten.mm": ["fvcore drops matmul where no output depends on it (2 calls)"]}),
    ("traced_otherwise", traced_otherwise, (SQUARE,), {"aten.mm": (128, 128, 256)},
     {"aten.mm": ["while it is traced, the model runs 256 FLOP of this op"]}),
    ("linear_algebra", torch.linalg.inv, (torch.eye(4),), {"aten.linalg_inv_ex": (128, 0, 0)},
     {"aten.linalg_inv_ex": ["torch has no formula", "fvcore does not know linalg_inv"]}),
    ("heads", nn.MultiheadAttention(16, 2), (torch.ones(5, 2, 16),) * 3,
     {"aten.addmm": (20_480, 20_480, 20_480), "aten.bmm": (3200, 3200, 3200)}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("model", "inputs", "numbers", "reasons"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_numbers_and_reasons(
    model: Callable[..., Any], inputs: tuple[Any, ...], numbers: Numbers, reasons: dict[str, list[str]]
) -> None:
    check = tl.crosscheck(model, *inputs)
    assert check.fvcore_failure == check.torch_failure == ""
    assert numbers_of(check) == numbers
    found = reasons_of(check)
    assert found.keys() == reasons.keys()
    for op, texts in reasons.items():
        for text in texts:
            assert text in found[op]
        assert len(found[op].split("; ")) == len(texts), found[op]
    assert [check.ours, check.torch, check.fvcore] == [sum(column) for column in zip(*numbers.values(), strict=True)]


class Mixer(nn.Module):
    """A depthwise convolution, a norm, dropout, attention, and a loss if there are targets."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv1d(32, 32, 3, padding=1, groups=32), nn.LayerNorm(32)
        self.qkv, self.out, self.dropout = nn.Linear(32, 96), nn.Linear(32, 32), nn.Dropout(0.5)

    def forward(self, x: Tensor, *, targets: Tensor | None = None) -> Tensor | dict[str, Any]:
        x = x + self.depthwise(x.mT).mT
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        x = x + self.dropout(self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        return x if targets is None else {"hidden": x, "loss": F.mse_loss(x, targets)}


def test_backward_has_rows_of_its_own() -> None:
    check = tl.crosscheck(Mixer(), torch.ones(2, 16, 32), backward=True)
    rows = {(row.phase, row.op): (row.ours, row.torch, row.fvcore) for row in check.rows}
    conv = 2 * 2 * 16 * 32 * 3  # of which the input needs no gradient
    assert rows == {
        ("forward", "aten.addmm"): (262_144, 262_144, 262_144),
        ("forward", SDPA): (65_536, 0 if LACKS_SDPA else 65_536, 0),
        ("forward", "aten.layer_norm"): (0, 0, 10_240),
        ("forward", "aten.convolution"): (conv, conv, conv),
        ("backward", "aten.mm"): (524_288, 524_288, None),
        ("backward", f"{SDPA}_backward"): (163_840, 0 if LACKS_SDPA else 163_840, None),
        ("backward", "aten.convolution_backward"): (conv, 32 * conv, None),
    }
    assert "gradient of a grouped convolution once for each group" in reasons_of(check)["aten.convolution_backward"]
    assert check.fvcore == 262_144 + 10_240 + conv


def test_backward_begins_at_the_loss() -> None:
    two = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})

    def run(x: Tensor, with_loss: bool) -> dict[str, Tensor]:
        used, unused = two["a"](x), two["b"](x)
        return {"loss": used.sum(), "other": unused} if with_loss else {"first": used, "second": unused}

    of_loss, of_all = (tl.crosscheck(run, torch.ones(8, 4), flag, backward=True) for flag in (True, False))
    assert numbers_of(of_loss) == {"aten.addmm": (512, 512, 512), "aten.mm": (256, 256, None)}
    assert numbers_of(of_all) == {"aten.addmm": (512, 512, 512), "aten.mm": (512, 512, None)}


def test_each_column_is_what_its_counter_says() -> None:
    from fvcore.nn import FlopCountAnalysis

    model, x = Mixer(), torch.ones(2, 16, 32)
    check = tl.crosscheck(model, x, backward=True)
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    with tl.Ledger(model) as ledger:
        model(x).sum().backward()
    analysis = FlopCountAnalysis(model, x).unsupported_ops_warnings(False)
    assert check.ours == ledger.report.flops.total
    assert check.torch == counter.get_total_flops()
    assert check.fvcore == 2 * analysis.total()


def test_a_condition() -> None:
    def run(predicate: Tensor, x: Tensor) -> Tensor:
        return torch.cond(predicate, lambda x: x @ x, lambda x: x @ x @ x, (x,))

    check = tl.crosscheck(run, torch.tensor(True), SQUARE)
    assert numbers_of(check) == {"aten.mm": (128, 256, None)}
    assert reasons_of(check) == {"aten.mm": "torch runs both branches of torch.cond, whichever is taken"}


def test_int_ops_and_uncounted_ops_are_in_no_row() -> None:
    a = torch.ones(32, 16, dtype=torch.int8)
    integers = tl.crosscheck(torch._int_mm, a, a.T.contiguous())
    assert (integers.rows, integers.int_ops) == ((), 2 * 32 * 32 * 16)
    custom = tl.crosscheck(lambda x: product(x, x) @ x, SQUARE)
    assert numbers_of(custom) == {"aten.mm": (128, 128, 128)}
    assert custom.uncounted == {"crosscheck_test.product": 1}
    assert "uncounted  crosscheck_test.product, 1 call: no formula" in str(custom)
    assert "int-ops  32,768 of integer products" in str(integers)


def test_a_declared_formula() -> None:
    tl.formula(torch.ops.crosscheck_test.product)(lambda a, b, *, out_shape: 2 * a[0] * a[1] * b[1])
    tl.formula(torch.ops.aten.addmm)(lambda bias, a, b, *, out_shape: 1)
    try:
        check = tl.crosscheck(lambda x: torch.addmm(x, product(x, x), x), SQUARE)
    finally:
        del DECLARED["crosscheck_test.product"], DECLARED["aten.addmm"]
    assert numbers_of(check) == {"crosscheck_test.product": (128, 0, 0), "aten.addmm": (1, 128, 128)}
    why = reasons_of(check)
    assert "fvcore does not know crosscheck_test.product" in why["crosscheck_test.product"]
    assert "declared with torchledger.formula" in why["aten.addmm"]


def test_on_meta_under_autocast_and_in_inference_mode() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), torch.empty(5, 3)
    assert numbers_of(tl.crosscheck(model, x)) == {"aten.batch_norm": (0, 0, 200), "aten.addmm": (120, 120, 120)}
    linear = nn.Linear(4, 4)
    with torch.inference_mode():
        assert numbers_of(tl.crosscheck(linear, SQUARE)) == {"aten.addmm": (128, 128, 128)}
    with torch.autocast("cpu", torch.bfloat16):
        assert numbers_of(tl.crosscheck(linear, SQUARE)) == {"aten.addmm": (128, 128, 128)}


def run(n: int, op: str, kind: str, flops: int) -> Product:
    return Product(op, "forward", flops, (), f"aten::{kind}", n)


def test_numbers_are_posted_in_order() -> None:
    """A number that is wrong, and right for the next op."""
    ours = [run(1, "aten.bmm", "matmul", 40), run(2, "aten.mm", "matmul", 10)]
    posted = post_fvcore(FvcoreCount([("aten::matmul", 10), ("aten::matmul", 10)], {}, ours))
    assert posted.flops == {"aten.bmm": 10, "aten.mm": 10}
    assert posted.reasons == {"aten.bmm": {"fvcore leaves out the batch that only matmul's second operand has": 1}}


def test_what_fvcore_drops_is_found_among_others() -> None:
    """The numbers of fvcore, in the order of the trace, with some of them missing."""
    ours = [
        run(1, "aten.addmm", "linear", 10),
        run(2, "aten.mm", "linear", 20),
        run(3, "aten.bmm", "matmul", 30),
        run(4, "aten.bmm", "einsum", 40),
        run(4, "aten.bmm", "einsum", 50),
        run(5, "aten.mv", "mv", 60),
    ]
    theirs: list[tuple[str, int | None]] = [("aten::linear", 20), ("aten::group_norm", 7), ("aten::einsum", 91)]
    posted = post_fvcore(FvcoreCount(theirs, {}, ours))
    assert posted.flops == {"aten.addmm": 0, "aten.mm": 20, "aten.bmm": 91, "aten.group_norm": 7}
    assert posted.reasons == {
        "aten.addmm": {"fvcore drops linear where no output depends on it": 1},
        "aten.bmm": {
            "fvcore drops matmul where no output depends on it": 1,
            "fvcore has einsum's FLOPs from numpy, in four digits and for the order in which numpy multiplies": 2,
        },
        "aten.mv": {"fvcore does not know mv": 1},
        "aten.group_norm": {"fvcore counts group_norm, which is element-wise work, not counted here": 1},
    }


# Nothing is left behind


class Stateful(nn.Module):
    """Changes in its forward whatever a module can change."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.teacher = nn.Linear(8, 8), nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.first.weight
        self.norm, self.lstm = nn.BatchNorm1d(8), nn.LSTM(8, 8)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.weighted = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.register_buffer("count", torch.zeros(()))
        self.cache, self.seen, self.calls = torch.zeros(4, 8), [torch.zeros(8)], 0
        self.held = (self.first.weight, self.first.bias)
        self.raises = False

    def forward(self, x: Tensor, box: dict[str, Tensor]) -> Tensor:
        self.eval()
        self.calls += 1
        self.new = x
        self.count += 1
        self.seen.append(x)
        self.seen[0].add_(1)
        self.cache[:] = x.detach()
        self.register_buffer("late", torch.ones(3))
        self.teacher.weight.data.mul_(0.5)
        self.norm.train()
        box["x"].mul_(2)
        x = checkpoint(self.first, x * random.random() + float(np.random.rand()), use_reentrant=False)
        x = self.weighted(self.spectral(self.norm(F.dropout(x)))) + F.linear(x, *self.held)
        if self.raises:
            raise KeyError("in the forward")
        return self.tied(self.lstm(x)[0]) + self.teacher(x)


def everything_of(model: nn.Module) -> Iterator[Any]:
    """All that could differ afterwards, as values that compare, and identities of what must stay the same object."""
    for name, module in model.named_modules():
        for key, value in sorted(module.__dict__.items()):
            yield name, key, id(value)
            items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            for inner, item in (*items, (None, value)):
                if isinstance(item, Tensor):
                    gradient = item.grad.tolist() if item.is_leaf and item.grad is not None else None
                    yield name, key, inner, id(item), item.tolist(), item._version, gradient
                elif not isinstance(item, nn.Module | dict | list | set):
                    yield name, key, inner, repr(item)
    yield random.getstate()
    yield np.random.get_state()[1].tolist()
    yield torch.get_rng_state().tolist()


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("with_gradients", [False, True])
def test_the_model_is_as_before(raises: bool, backward: bool, with_gradients: bool) -> None:
    model, x, box = Stateful(), torch.ones(4, 8, requires_grad=True), {"x": torch.ones(3)}
    assert model.lstm(x)[0].shape == x.shape
    if with_gradients:
        copy.deepcopy(model)  # and a graph that is still to be run backward
        loss = (model.first(x) @ model.held[0]).sum()
        loss.backward(retain_graph=True)
    model.raises = raises
    before = list(everything_of(model))
    if raises:
        with pytest.raises(KeyError):
            tl.crosscheck(model, x, box, backward=backward)
    else:
        check = tl.crosscheck(model, x, box, backward=backward)
        assert check.ours == check.torch != 0 or "aten.mkldnn_rnn_layer" in reasons_of(check)
        assert check.fvcore_failure == ""
    assert list(everything_of(model)) == before
    assert box["x"].tolist() == [1, 1, 1]
    if with_gradients:
        loss.backward()
    else:
        assert x.grad is None


def test_the_model_still_trains_its_own_weights() -> None:
    model = nn.LSTM(4, 4)
    alone, x = copy.deepcopy(model), torch.ones(3, 2, 4)
    tl.crosscheck(model, x, backward=True)
    for each in (model, alone):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(2):
            each(x)[0].sum().backward()
            optimizer.step()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(one, other)


def test_no_hook_runs_for_the_originals() -> None:
    model, ran = nn.Linear(4, 4), []
    model.weight.register_post_accumulate_grad_hook(ran.append)
    tl.crosscheck(model, SQUARE, backward=True)
    assert ran == []
    assert not any(dict(getattr(model, name)) for name in vars(model) if name.endswith("_hooks"))


@pytest.mark.parametrize("how", ["closure", "argument", "method"])
def test_the_modules_of_a_function_are_as_before(how: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = copy.deepcopy(model.state_dict())
    calls: dict[str, Callable[[], CrossCheck]] = {
        "closure": lambda: tl.crosscheck(lambda x: model(x) + 1, SQUARE, backward=True),
        "argument": lambda: tl.crosscheck(lambda module, x: module(x), model, SQUARE, backward=True),
        "method": lambda: tl.crosscheck(model.forward, SQUARE, backward=True),
    }
    check = calls[how]()
    assert numbers_of(check)["aten.addmm"] == (128, 128, 128)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_cache_is_as_before() -> None:
    class Cache:
        def __init__(self) -> None:
            self.keys = torch.ones(4, 4)

    def run(x: Tensor, cache: Cache) -> Tensor:
        cache.keys = torch.cat([cache.keys, x])
        return x @ cache.keys.T

    cache = Cache()
    assert numbers_of(tl.crosscheck(run, SQUARE, cache=cache)) == {"aten.mm": (256, 256, 256)}
    assert cache.keys.shape == (4, 4)


def test_dropped_layers_are_the_same_for_all() -> None:
    def run(x: Tensor) -> Tensor:
        for _ in range(20):
            for skipped in (random.random() < 0.5, np.random.rand() < 0.5, torch.rand(()) < 0.5):
                x = x if skipped else x @ x
        return x

    check = tl.crosscheck(run, SQUARE)
    assert check.ours == check.torch == check.fvcore > 0


def test_compiled_models_run_eagerly_and_are_compiled_later() -> None:
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    root, child, method = nn.Sequential(Block()), nn.Sequential(Block()), Block()
    child[0] = torch.compile(child[0], backend=backend)
    method.compile(backend=backend)
    for model in (torch.compile(root, backend=backend), child, method):
        assert numbers_of(tl.crosscheck(model, SQUARE)) == {"aten.addmm": (128, 128, 128)}
        assert compiled == []
        model(SQUARE)
        assert len(compiled) == 1
        assert numbers_of(tl.crosscheck(model, SQUARE)) == {"aten.addmm": (128, 128, 128)}
        model(SQUARE)
        assert len(compiled) == 1
        compiled.clear()
        torch.compiler.reset()  # else the next one, which has the same code, is compiled already

    function = torch.compile(lambda x: x @ x, backend=backend)
    check = tl.crosscheck(lambda x: function(x) + 1, SQUARE)
    assert numbers_of(check) == {"aten.mm": (128, 128, None)}
    assert "dynamo-optimized function" in check.fvcore_failure
    assert compiled == []
    function(SQUARE)
    assert len(compiled) == 1


# Who cannot say anything says why


def test_without_fvcore(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "fvcore"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fvcore", None)
    check = tl.crosscheck(nn.Linear(16, 4), torch.ones(8, 16))
    assert check.rows == (CrossCheckRow("forward", "aten.addmm", 1024, 1024, None, ""),)
    assert (check.ours, check.torch, check.fvcore) == (1024, 1024, None)
    assert check.fvcore_failure == "fvcore is not installed: pip install 'torchledger[crosscheck]'"
    assert check.fvcore_failure in str(check)


def test_what_fvcore_cannot_trace() -> None:
    model = nn.Linear(4, 4)
    check = tl.crosscheck(lambda x: checkpoint(model, x, use_reentrant=True), SQUARE.clone().requires_grad_())
    assert numbers_of(check) == {"aten.addmm": (128, 128, None)}
    assert check.fvcore is None
    assert check.fvcore_failure.startswith("fvcore cannot trace this model: ")
    assert "no tensor" in tl.crosscheck(len, [SQUARE]).fvcore_failure


def test_what_torch_cannot_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> int:
        raise TypeError("on purpose,\nin two lines")

    monkeypatch.setitem(flop_registry, torch.ops.aten.mm, fails)
    check = tl.crosscheck(torch.mm, SQUARE, SQUARE)
    assert check.rows == (CrossCheckRow("forward", "aten.mm", 128, None, 128, ""),)
    assert (check.ours, check.torch, check.fvcore) == (128, None, 128)
    assert check.torch_failure == "FlopCounterMode fails on this model: TypeError: on purpose, in two lines"
    assert check.torch_failure in str(check)


def test_a_difference_without_a_known_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(flop_registry, torch.ops.aten.mm, lambda *_, **__: 1)
    check = tl.crosscheck(torch.mm, SQUARE, SQUARE)
    assert reasons_of(check) == {"aten.mm": "torch's formula gives another number, for a reason that is not known"}


def test_wrong_calls() -> None:
    with pytest.raises(UsageError, match="give a module, or a function"):
        tl.crosscheck(3, SQUARE)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="nothing that the model returns requires a gradient"):
        tl.crosscheck(torch.mm, SQUARE, SQUARE, backward=True)
    with pytest.raises(UsageError, match="lazy module"):
        tl.crosscheck(nn.LazyLinear(4), SQUARE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(UsageError, match="TorchScript"):
        tl.crosscheck(scripted, SQUARE)


@dataclass
class Answer:
    logits: Tensor
    layers: list[Any]


def test_outputs_of_every_shape() -> None:
    linear = nn.Linear(4, 4)

    def run(x: Tensor) -> Any:
        return OrderedDict(first=Answer(linear(x), [(linear(x), None)]), again="text", more={"of": linear(x)})

    assert numbers_of(tl.crosscheck(run, SQUARE, backward=True)) == {
        "aten.addmm": (384, 384, 384),
        "aten.mm": (384, 384, None),
    }


# What is printed


def test_the_table_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    lines = str(tl.crosscheck(Mixer(), torch.ones(2, 16, 32), backward=True)).splitlines()
    table = list(itertools.takewhile(bool, lines[3:]))
    rows = [line.split() for line in table if not line.startswith("---")]
    for phase in ("forward", "backward"):
        own = [row[2:] for row in rows if row[0] == phase]
        *parts, total = [[0 if cell == "N/A" else int(cell.replace(",", "")) for cell in row] for row in own]
        assert total == [sum(column) for column in zip(*parts, strict=True)]
        assert all((row[2] == "N/A") == (phase == "backward") for row in own)
    assert lines[-1] == "  note  fvcore traces the forward only"


def test_the_table() -> None:
    linear = str(tl.crosscheck(nn.Linear(16, 4), torch.ones(8, 16)))
    assert linear.splitlines() == [
        "FLOPs of one call by three counters (1 multiply-add = 2 FLOP)",
        "op            ours    torch    fvcore",
        "----------  ------  -------  --------",
        "aten.addmm   1,024    1,024     1,024",
        "----------  ------  -------  --------",
        "total        1,024    1,024     1,024",
    ]


def test_names_are_printed_on_one_line() -> None:
    check = CrossCheck((CrossCheckRow("forward", "x\n.y", 1, 0, 0, "a\x1b[31m"),), torch_failure="line\nline")
    assert "\x1b" not in str(check)
    assert "x\\n.y: a\\x1b[31m" in str(check)


def test_nothing_is_logged_printed_or_warned(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), warnings.catch_warnings():
        warnings.simplefilter("error")
        tl.crosscheck(Mixer(), torch.ones(2, 16, 32), targets=torch.ones(2, 16, 32))
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")


def test_fvcore_is_imported_only_where_it_is_asked_for() -> None:
    code = (
        "import sys, torch, torchledger, torchledger.flops.crosscheck\n"
        "before = 'fvcore' in sys.modules\n"
        "torchledger.crosscheck(torch.nn.Linear(4, 4), torch.ones(4, 4))\n"
        "print(before, 'fvcore' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-W", "default", "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("False True\n", "")
