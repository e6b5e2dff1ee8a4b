"""Leaks that people write, and plain loops that have none; held against a walk over live storages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchledger as tl
from models import GPT
from oracles import live_bytes
from torchledger.journal.rows import Growth
from torchledger.render.markdown import render_markdown
from torchledger.render.text import render_text

Step = Callable[[int], None]
N_STEPS = 6
X = torch.randn(128, 64)
Y = torch.randint(0, 10, (128,))


def sum_without_backward() -> Step:
    model, total = nn.Linear(64, 64), torch.zeros(())

    def step(index: int) -> None:
        nonlocal total
        total += torch.relu(model(X)).sum()

    return step


def losses_with_their_graph() -> Step:
    model, losses = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)), []

    def step(index: int) -> None:
        losses.append(F.cross_entropy(model(X), Y))

    return step


def losses_after_backward() -> Step:
    model, losses = nn.Linear(64, 10), []

    def step(index: int) -> None:
        losses.append(F.cross_entropy(model(X), Y))
        losses[-1].backward()
        model.zero_grad()

    return step


def hook_that_keeps_outputs() -> Step:
    model, kept = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), []
    model[1].register_forward_hook(lambda module, args, out: kept.append(out))

    def step(index: int) -> None:
        F.cross_entropy(model(X), Y).backward()
        model.zero_grad()

    return step


def hidden_states_in_a_list() -> Step:
    cell, hidden = nn.GRUCell(64, 16), []

    def step(index: int) -> None:
        state = torch.zeros(128, 16)
        for _ in range(2):
            state = cell(X, state)
            hidden.append(state.detach())
        state.sum().backward()
        cell.zero_grad()

    return step


def recurrence_without_detach() -> Step:
    cell, state = nn.RNNCell(64, 16), torch.zeros(128, 16)

    def step(index: int) -> None:
        nonlocal state
        state = cell(X, state)
        state.sum().backward(retain_graph=True)
        cell.zero_grad()

    return step


def metrics_on_the_device() -> Step:
    model, accuracies = nn.Linear(64, 10), []

    def step(index: int) -> None:
        out = model(X)
        F.cross_entropy(out, Y).backward()
        model.zero_grad()
        accuracies.append((out.argmax(1) == Y).float().mean())

    return step


def history_of_an_optimizer() -> Step:
    model = nn.Linear(64, 10)

    class Remembering(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in model.parameters():
                self.state[parameter].setdefault("past", []).append(parameter.grad.clone())  # type: ignore[union-attr]
            super().step()

    optimizer = Remembering(model.parameters(), lr=0.01)

    def step(index: int) -> None:
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def cache_that_is_joined() -> Step:
    model, cache = nn.Linear(64, 16), torch.zeros(1, 16)

    @torch.no_grad()
    def step(index: int) -> None:
        nonlocal cache
        cache = torch.cat([cache, model(X[:4])])

    return step


def memo_by_index() -> Step:
    model, memo = nn.Linear(64, 16), {}

    @torch.no_grad()
    def step(index: int) -> None:
        memo[index] = model(X)

    return step


LEAKS: dict[Callable[[], Step], dict[tuple[str, str], int]] = {
    sum_without_backward: {("activations", "aten.relu"): 128 * 64 * 4},
    losses_with_their_graph: {
        ("activations", "aten.tanh"): 128 * 32 * 4,
        ("activations", "aten._log_softmax"): 128 * 10 * 4,
        ("activations", "aten.nll_loss_forward"): 8,  # the loss, and the sum of the weights
    },
    losses_after_backward: {("activations", "aten.nll_loss_forward"): 4},
    hook_that_keeps_outputs: {("activations", "aten.relu"): 128 * 32 * 4},
    hidden_states_in_a_list: {("activations", "aten.sub"): 2 * 128 * 16 * 4},
    recurrence_without_detach: {("activations", "aten.tanh"): 128 * 16 * 4},
    metrics_on_the_device: {("other", "aten.mean"): 4},
    history_of_an_optimizer: {("optimizer_state", "aten.clone"): (64 * 10 + 10) * 4},
    cache_that_is_joined: {("other", "aten.cat"): 4 * 16 * 4},
    memo_by_index: {("other", "aten.addmm"): 128 * 16 * 4},
}


def by_op(rows: tuple[Growth, ...]) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for row in rows:
        found[row.category, row.op] = found.get((row.category, row.op), 0) + row.bytes_per_step
    return found


@pytest.mark.parametrize("make", LEAKS, ids=lambda make: make.__name__)
def test_a_leak_is_named_with_its_bytes(make: Callable[[], Step]) -> None:
    torch.manual_seed(0)
    step = make()
    alive = []
    with tl.Ledger() as ledger:
        for index in range(N_STEPS):
            step(index)
            ledger.step()
            if index >= N_STEPS - 2 and make is not cache_that_is_joined:
                alive.append(live_bytes())  # a walk keeps what it sees a little longer, which a cache's past should not
    report = ledger.report
    assert report.faults == ()
    expected = LEAKS[make]
    ours = by_op(report.growing)
    assert {key: ours.get(key) for key in expected} == expected
    grown = alive[-1] - alive[-2] if alive else sum(expected.values())
    if make in (sum_without_backward, losses_with_their_graph, recurrence_without_detach):
        assert grown <= sum(ours.values())  # what a graph alone holds no walk over Python's objects finds
    else:
        assert grown == sum(ours.values()) == sum(expected.values())
    assert {row.since_step for row in report.growing} == {0}
    assert tl.Report.from_dict(report.to_dict()).growing == report.growing


@pytest.mark.parametrize("n_steps", [6, 9])
def test_the_line_says_for_how_long_and_where(n_steps: int) -> None:
    step = sum_without_backward()
    with tl.Ledger(stacks=True) as ledger:
        for index in range(n_steps):
            step(index)
            ledger.step()
    (row,) = ledger.report.growing
    assert (row.module, row.shape, row.dtype) == ("(outside)", (128, 64), "float32")
    assert row.where is not None
    assert "test_growth.py:" in row.where
    page = render_text(ledger.report, width=300)
    (line,) = [line for line in page.splitlines() if line.strip().startswith("+32,768")]
    assert "activations" in line
    assert "aten.relu" in line
    assert "float32 128x64" in line
    assert f"{n_steps} steps" in line
    assert "Growing" in render_markdown(ledger.report)


def test_module_of_a_leak() -> None:
    model = nn.ModuleDict({f"layer{i}": nn.Linear(32, 32) for i in range(4)})
    kept = []
    with tl.Ledger(model) as ledger:
        for _ in range(N_STEPS):
            x = torch.randn(32, 32)
            for name, layer in model.items():
                x = layer(x)
                if name == "layer3":
                    kept.append(x)
            x.sum().backward()
            model.zero_grad()
            ledger.step()
    (row,) = ledger.report.growing
    assert row == Growth("activations", "layer3", "aten.addmm", 4096, 0, (32, 32), "float32", None)


def test_the_same_with_detach_has_none() -> None:
    model, total = nn.Linear(64, 64), torch.zeros(())
    with tl.Ledger() as ledger:
        for _ in range(N_STEPS):
            total += torch.relu(model(X)).sum().detach()
            ledger.step()
    assert ledger.report.growing == ()


def run(step: Step, n_steps: int = 8) -> tl.Report:
    with tl.Ledger() as ledger:
        for index in range(n_steps):
            step(index)
            ledger.step()
    assert ledger.report.faults == ()
    return ledger.report


def make_plain(
    *, lengths: tuple[int, ...] = (32,), accumulate: int = 1, evaluate: bool = False, amp: bool = False,
    kind: str | None = None, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> Step:  # fmt: skip
    model = GPT(n_layers=2, width=32, kind=kind)
    trained = optimizer(model.parameters(), lr=1e-3)
    kept: dict[str, Any] = {}

    def step(index: int) -> None:
        ids = torch.randint(0, 256, (2, lengths[index % len(lengths)]))
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            kept["loss"] = model(ids, ids)
        kept["loss"].backward()
        kept["joined"] = torch.cat([ids, ids])
        if index % accumulate == accumulate - 1:
            trained.step()
            trained.zero_grad()
        if evaluate and index % 2:
            with torch.no_grad():
                kept["evaluated"] = model(ids, ids)

    return step


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lengths": (8, 16, 24, 32, 40, 48, 56, 64)},
        {"lengths": (64, 56, 48, 40, 32, 24, 16, 8)},
        {"lengths": (8, 33, 24, 60, 40)},
        {"accumulate": 2},
        {"accumulate": 4},
        {"evaluate": True},
        {"evaluate": True, "lengths": (8, 9, 10, 11, 12, 13, 14, 15)},
        {"amp": True},
        {"kind": "nonreentrant"},
        {"optimizer": torch.optim.SGD},
        {"optimizer": torch.optim.Adagrad},
    ],
)
def test_plain_loops_have_none(options: dict[str, Any]) -> None:
    assert run(make_plain(**options)).growing == ()


def test_batches_that_were_made_before_are_no_growth() -> None:
    model = nn.Linear(64, 10)
    optimizer = torch.optim.Adam(model.parameters())
    batches = [torch.randn(4 + i, 64) for i in range(8)]

    def step(index: int) -> None:
        model(batches[index]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert run(step).growing == ()


def test_a_result_that_is_joined_and_longer_with_its_batch_is_no_growth() -> None:
    model, kept = nn.Linear(64, 10), {}

    def step(index: int) -> None:
        x = torch.ones(8 + 8 * index, 64)
        kept["out"] = torch.cat([model(x), model(x)])
        kept["out"].sum().backward()
        model.zero_grad()

    assert run(step).growing == ()


def test_a_deque_that_is_full_and_a_list_that_is_cleared_are_no_growth() -> None:
    model, window, epoch = nn.Linear(64, 10), [], []

    def step(index: int) -> None:
        window.append(model(X))
        epoch.append(model(X).detach())
        if len(window) > 3:
            del window[0]
        if index % 3 == 2:
            epoch.clear()

    assert run(step, 10).growing == ()


def test_a_leak_that_begins_late_and_one_that_ends() -> None:
    model, late, ended = nn.Linear(64, 10), [], []

    def step(index: int) -> None:
        if index >= 4:
            late.append(model(X).relu())
        if index < 4:
            ended.append(model(X).tanh())
        out = model(X)
        out.sum().backward()
        model.zero_grad()

    (row,) = run(step, 9).growing
    assert (row.op, row.bytes_per_step, row.since_step) == ("aten.relu", 128 * 10 * 4, 4)


def test_a_leak_in_every_other_step() -> None:
    model, kept = nn.Linear(64, 16), []

    def step(index: int) -> None:
        if index % 2:
            with torch.no_grad():
                kept.append(model(X).exp())
        model(X).sum().backward()
        model.zero_grad()

    (row,) = run(step, 12).growing
    assert (row.op, row.bytes_per_step) == ("aten.exp", 128 * 16 * 4 // 2)


def test_batches_of_all_lengths_that_are_kept() -> None:
    model, kept = nn.Linear(64, 16), []

    def step(index: int) -> None:
        with torch.no_grad():
            kept.append(model(X[: 10 + 7 * index % 11]))

    (row,) = run(step, 8).growing
    grown = sum(t.untyped_storage().nbytes() for t in kept[1:-1])  # between the first and the last that outlived a step
    assert row.bytes_per_step == grown // 6


def test_what_follows_the_last_step_does_not_hide_a_leak() -> None:
    step, kept = sum_without_backward(), []
    with tl.Ledger() as ledger:
        for index in range(N_STEPS):
            step(index)
            kept.append(torch.ones(64) * 2)
            ledger.step()
        _ = torch.stack(kept).mean() * 3
        kept.clear()
        del step
    assert by_op(ledger.report.growing) == {("activations", "aten.relu"): 32768, ("other", "aten.mul"): 256}


def test_it_keeps_one_number_for_each_kind() -> None:
    step = memo_by_index()
    with tl.Ledger(keep=2) as ledger:
        sizes = []
        for index in range(20):
            step(index)
            ledger.step()
            sizes.append(len(ledger._reader._growth._tracks))
    assert sizes[3:] == [sizes[3]] * 17


def test_models_that_are_copied_each_step() -> None:
    model, best = nn.Linear(64, 64, bias=False), []

    def step(index: int) -> None:
        model(X).sum().backward()
        model.zero_grad()
        best.append(copy.deepcopy(model.state_dict()))

    assert [row.bytes_per_step for row in run(step).growing] == [64 * 64 * 4]
