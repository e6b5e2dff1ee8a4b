"""Bytes a parameter against what real optimizers allocate: a walk over storages, torch.profiler, and a ledger."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn, optim

import torchledger as tl
from oracles import profiler_bytes, storage_bytes
from torchledger.analytic.recipes import RECIPES, recipe, recipes
from torchledger.errors import UsageError

Make = Callable[..., optim.Optimizer]


class Lion(optim.Optimizer):
    """Chen et al. 2023: one momentum, the sign of its interpolation with the gradient."""

    def __init__(self, params) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.add_(torch.lerp(momentum, p.grad, 0.1).sign_(), alpha=-1e-4)
                momentum.lerp_(p.grad, 0.01)


MAKERS: dict[str, Make] = {
    "sgd": lambda params, **how: optim.SGD(params, lr=0.1, **how),
    "sgd-momentum": lambda params, **how: optim.SGD(params, lr=0.1, momentum=0.9, **how),
    "rmsprop": optim.RMSprop,
    "adagrad": optim.Adagrad,
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "amsgrad": lambda params, **how: optim.Adam(params, amsgrad=True, **how),
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "adafactor": optim.Adafactor,
    "lion": lambda params, **how: Lion(params),
    "muon": lambda params, **how: optim.Muon(params),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
IMPLEMENTATIONS = {"foreach": {"foreach": True}, "for-loop": {"foreach": False}, "fused": {"fused": True}}
RECTIFIED = 7  # RAdam begins to need its most at its sixth step


def draw_shapes(name: str, seed: int = 0) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    matrices = [(rng.choice([48, 64, 160]), rng.choice([32, 96, 200])) for _ in range(4)]
    vectors = [(rng.choice([1000, 2048, 5000, 9000, 16000]),) for _ in range(5)]
    return matrices if name == "muon" else [*matrices, *vectors] if name == "adafactor" else vectors


def draw_parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]


def step(optimizer: optim.Optimizer, params: list[nn.Parameter], times: int = 1) -> None:
    for _ in range(times):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()


def tensors_in(thing: Any) -> Iterator[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from tensors_in(value)


def has(name: str, implementation: str) -> bool:
    missing = {"fused": {"rmsprop", "nadam", "radam", "adafactor", "muon", "lion"}, "foreach": {"muon", "lion"}}
    return name not in missing.get(implementation, set()) and name != "lion"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MAKERS)
def test_state(name: str, dtype: str) -> None:
    shapes = draw_shapes(name)
    params = draw_parameters(shapes, DTYPES[dtype])
    optimizer = MAKERS[name](params)
    step(optimizer, params, 2)
    state = storage_bytes(tensors_in(dict(optimizer.state)))
    entry = recipe(f"{name}-{dtype}")
    assert entry.state_bytes(shapes) == state
    n = sum(p.numel() for p in params)
    assert entry.weights * n == storage_bytes(params)
    assert entry.gradients * n == storage_bytes(p.grad for p in params)
    scalars = storage_bytes(tensor for tensor in tensors_in(dict(optimizer.state)) if tensor.dim() == 0)
    if not entry.is_approximate:
        assert entry.moments * n == state - scalars


def test_adafactor_of_gpt2_takes_about_two_hundredths() -> None:
    d = 768
    layer = [(d, 3 * d), (3 * d,), (d, d), (d,), (d, 4 * d), (4 * d,), (4 * d, d), (d,), *[(d,)] * 4]
    shapes = [(50_257, d), (1024, d), *layer * 12, (d,), (d,)]
    per_param = recipe("adafactor-fp32").state_bytes(shapes) / 124_439_808
    assert 0.005 < per_param < 0.02


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", [name for name in MAKERS if name not in ("lion", "muon")])
def test_temporaries_of_a_step(name: str, implementation: str, weight_decay: float) -> None:
    entry = recipe(f"{name}-fp32")
    shapes = draw_shapes(name, seed=len(name))
    if not has(name, implementation):
        with pytest.raises(UsageError, match=f"no '{implementation}' implementation"):
            entry.transient_bytes(shapes, implementation)
        return
    decays = weight_decay > 0 and name != "adamw"  # whose decay is not added to the gradient
    if (name, implementation) == ("adafactor", "for-loop"):
        with pytest.raises(UsageError, match="no closed form"):
            entry.transient_bytes(shapes, implementation)
        return
    params = draw_parameters(shapes)
    optimizer = MAKERS[name](params, weight_decay=weight_decay, **IMPLEMENTATIONS[implementation])
    step(optimizer, params, RECTIFIED)
    measured, kept = profiler_bytes(optimizer.step, between_ops=True)
    expected = entry.transient_bytes(shapes, implementation, weight_decay=decays)
    scalars = 32 if name != "adafactor" else 32 * len(shapes)
    assert 0 <= measured - expected <= scalars
    assert kept == 0
    if implementation != "for-loop":
        n = sum(p.numel() for p in params)
        in_step = entry.bytes_in_step(implementation, weight_decay=decays)
        assert in_step * n == pytest.approx(entry.bytes_per_param * n + expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_temporaries_of_muon(dtype: str) -> None:
    for seed in range(3):
        shapes = draw_shapes("muon", seed)
        params = draw_parameters(shapes, DTYPES[dtype])
        optimizer = optim.Muon(params)
        step(optimizer, params)
        measured, _ = profiler_bytes(optimizer.step, between_ops=True)
        assert 0 <= measured - recipe(f"muon-{dtype}").transient_bytes(shapes, "for-loop") <= 32
    with pytest.raises(UsageError, match="Muon updates matrices"):
        recipe("muon-fp32").transient_bytes([(4,)], "for-loop")


def test_published_temporaries() -> None:
    shapes = [(4096,), (8192,)]
    names = ("foreach", "for-loop", "fused")
    assert [recipe("adamw-fp32").transient_bytes(shapes, name) for name in names] == [49_152, 81_920, 0]
    assert recipe("adamw-fp32").bytes_in_step() == 20
    assert recipe("adamw-fp32").bytes_in_step("fused") == 16
    assert recipe("adagrad-fp32").bytes_in_step() == 20
    assert recipe("sgd-momentum-fp32").bytes_in_step() == 12
    assert recipe("sgd-momentum-fp32").bytes_in_step(weight_decay=True) == 16
    assert recipe("adamw-bf16-master").bytes_in_step() == 20  # its master is fp32
    assert recipe("adamw-bf16").bytes_in_step() == 10


@pytest.mark.parametrize(
    "name", ["sgd", "sgd-momentum", "rmsprop", "adagrad", "adam", "adamw", "amsgrad", "nadam", "radam"]
)
def test_a_whole_step_as_the_ledger_sees_it(name: str) -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 32))
    optimizer = MAKERS[name](model.parameters(), foreach=True)
    with tl.Ledger(model, optimizer) as ledger:
        for _ in range(RECTIFIED):
            optimizer.zero_grad(set_to_none=True)
            model(torch.randn(2, 64)).sum().backward()
            optimizer.step()
            ledger.step()
    memory = ledger.report.steps[-1].memory["cpu"]
    entry, shapes = recipe(f"{name}-fp32"), [tuple(p.shape) for p in model.parameters()]
    n = sum(p.numel() for p in model.parameters())
    assert memory.end.parameters == entry.weights * n
    assert memory.end.gradients == entry.gradients * n
    assert memory.end.optimizer_state == entry.state_bytes(shapes)
    transient = memory.peak_by_phase["optimizer"].temporaries
    assert 0 <= transient - entry.transient_bytes(shapes) <= 32 * len(shapes)


def test_16_bit_weights_with_a_master() -> None:
    weights = draw_parameters([(64, 32), (64,)], torch.bfloat16)
    master = [nn.Parameter(w.detach().float()) for w in weights]
    optimizer = optim.AdamW(master)
    for w, m in zip(weights, master, strict=True):
        w.grad = torch.randn_like(w)
        m.grad = w.grad.float()
    optimizer.step()
    n = sum(w.numel() for w in weights)
    moments = [t for t in tensors_in(dict(optimizer.state)) if t.dim()]

    def alive() -> int:
        gradients = [p.grad for p in (*weights, *master) if p.grad is not None]
        return storage_bytes([*weights, *master, *moments, *gradients])

    assert alive() == recipe("adamw-bf16-master-gradient-copy").bytes_per_param * n == 20 * n
    for w in weights:
        w.grad = None
    assert alive() == recipe("adamw-bf16-master-fp32-gradients").bytes_per_param * n == 18 * n
    for w, m in zip(weights, master, strict=True):
        w.grad, m.grad = torch.randn_like(w), None
    assert alive() == recipe("adamw-bf16-master").bytes_per_param * n == 16 * n


def test_autocast() -> None:
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.LayerNorm(128), nn.Linear(128, 32, bias=False))
    optimizer = optim.AdamW(model.parameters())
    entry = recipe("adamw-autocast")
    with tl.Ledger(model, optimizer) as ledger:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(2, 64)).sum()
            loss.backward()
            optimizer.step()
            ledger.step()
    memory = ledger.report.steps[-1].memory["cpu"]
    n, matmul = sum(p.numel() for p in model.parameters()), 64 * 128 + 128 * 32
    assert memory.category_peaks["autocast_copies"] == entry.copies * matmul
    assert memory.end.autocast_copies == 0
    scalars = 4 * 4
    at_rest = memory.end.parameters + memory.end.gradients + memory.end.optimizer_state - scalars
    assert at_rest == entry.bytes_per_param * n == 16 * n


def test_low_rank_adapters() -> None:
    base, adapters = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16), draw_parameters([(4, 64), (64, 4)])
    base.weight.requires_grad = False
    optimizer = optim.AdamW(adapters)
    step(optimizer, adapters)
    moments = [t for t in tensors_in(dict(optimizer.state)) if t.dim()]
    alive = storage_bytes([base.weight, *adapters, *moments, *(p.grad for p in adapters)])
    n_frozen, n_adapters = 64 * 64, 2 * 4 * 64
    assert alive == recipe("frozen-bf16").bytes_per_param * n_frozen + recipe("adamw-fp32").bytes_per_param * n_adapters


AT_REST = {
    "sgd-fp32": 8,
    "sgd-momentum-fp32": 12,
    "rmsprop-fp32": 12,
    "adagrad-fp32": 12,
    "lion-fp32": 12,
    "muon-fp32": 12,
    "adam-fp32": 16,
    "adamw-fp32": 16,
    "nadam-fp32": 16,
    "radam-fp32": 16,
    "amsgrad-fp32": 20,
    "adafactor-fp32": 8.02,
    "adamw-autocast": 16,
    "adamw-bf16-master": 16,
    "adamw-bf16-master-fp32-gradients": 18,
    "adamw-bf16-master-gradient-copy": 20,
    "adamw-bf16": 8,
    "adamw-8bit-fp32": 10,
    "adamw-8bit-bf16": 6,
    "frozen-bf16": 2,
    "frozen-fp32": 4,
    "frozen-int4": 0.5,
}


@pytest.mark.parametrize("name", AT_REST)
def test_bytes_at_rest(name: str) -> None:
    assert recipe(name).bytes_per_param == AT_REST[name]
    assert name in recipes


def test_parts_add_up() -> None:
    assert recipes == tuple(RECIPES)
    for entry in RECIPES.values():
        assert recipe(entry.name) is entry
        for part in (entry, entry.sharded(zero=2, n=8)):
            total = part.weights + part.gradients + part.master + part.moments
            assert part.bytes_per_param == pytest.approx(total, rel=1e-15)


def test_zero_as_published() -> None:
    # Rajbhandari et al. 2020, figure 1: 7.5e9 parameters on 64 ranks, in GB.
    entry, n = recipe("adamw-bf16-master"), 7_500_000_000
    sharded = [entry.sharded(zero=stage, n=64) for stage in (1, 2, 3)]
    assert [round(r.total_bytes(n) / 1e9, 2) for r in (entry, *sharded)] == [120, 31.41, 16.64, 1.88]
    assert sharded[0].total_bytes(n) == 4 * n + 12 * n // 64
    assert sharded[1].total_bytes(n) == 2 * n + 14 * n // 64
    assert sharded[2].total_bytes(n) == 16 * n // 64
    assert (sharded[1].weights, sharded[1].gradients) == (2, 2 / 64)
    assert (sharded[1].zero, sharded[1].ranks) == (2, 64)


def test_shares_that_are_no_binary_fraction_are_exact() -> None:
    thirds = recipe("adamw-fp32").sharded(zero=3, n=3)
    assert thirds.total_bytes(3_000_000_001) == -(-16 * 3_000_000_001 // 3)
    assert recipe("adamw-bf16-master").sharded(zero=1, n=7).total_bytes(7 * 10**12) == 40 * 10**12
    assert recipe("adamw-fp32").sharded(zero=1, n=1).bytes_per_param == 16


def test_temporaries_are_sharded_with_the_state() -> None:
    assert recipe("adamw-bf16-master").sharded(zero=3, n=4).bytes_in_step() == 4 + 1


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: recipe("adamw"), "no recipe named 'adamw'. Did you mean adamw-"),
        (lambda: recipe("ADAMW-FP32"), "Did you mean adamw-fp32"),
        (lambda: recipe("zzz"), "Known are: sgd-fp32"),
        (lambda: recipe("adamw-fp32").sharded(zero=4, n=2), "stages 1, 2 and 3"),
        (lambda: recipe("adamw-fp32").sharded(zero=1, n=0), "1 rank or more"),
        (lambda: recipe("adamw-fp32").sharded(zero=1, n=2).sharded(zero=1, n=2), "ask the recipe it was made from"),
        (lambda: recipe("adamw-fp32").sharded(zero=1, n=2).state_bytes([(2,)]), "ask the recipe it was made from"),
        (lambda: recipe("adamw-fp32").bytes_in_step("for-loop"), "takes their shapes"),
        (lambda: recipe("adamw-fp32").bytes_in_step("loop"), "no 'loop' implementation of AdamW; there are: foreach"),
        (lambda: recipe("lion-fp32").bytes_in_step(), "implementation of Lion; there is none"),
        (lambda: recipe("frozen-bf16").bytes_in_step(), "no optimizer of torch steps 'frozen-bf16'"),
        (lambda: recipe("adamw-8bit-bf16").state_bytes([(2,)]), "no optimizer of torch"),
    ],
)
def test_what_is_refused(call: Callable[[], object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        call()
