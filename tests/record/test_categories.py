"""Categories that stay true: from one step to the next, over kept copies, double backwards and batches made ahead."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchledger as tl
from oracles import live_bytes, profiler_bytes
from torchledger.journal.entries import EXTERNAL, LATE
from torchledger.journal.statements import CATEGORIES
from torchledger.read.categories import settle
from torchledger.read.events import births, deaths


def check_books(ledger: tl.Ledger, *, other: int = 0) -> None:
    """The end of each step is the start of the next, by category, but for what a note tells; `other` is in none."""
    assert ledger.report.faults == ()
    for step, after in itertools.pairwise(ledger.report.steps):
        end, start = step.memory["cpu"].end.by_category, after.memory["cpu"].start.by_category
        told = " ".join(after.notes)
        for category in CATEGORIES:
            if end[category] != start[category]:
                assert f"{abs(start[category] - end[category]):,} bytes)" in told
                assert category in told
        if end == start:
            assert told == ""
    for step in ledger.report.steps:
        memory = step.memory["cpu"]
        assert max(memory.peak.other, memory.start.other, memory.end.other) <= other


# Kept copies


def clone_state(model: nn.Module) -> Any:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def flat_copy(model: nn.Module) -> Any:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize(
    "keep",
    [
        lambda model: copy.deepcopy(model.state_dict()),
        copy.deepcopy,
        clone_state,
        flat_copy,
        lambda model: [p.detach().clone() for p in model.parameters()],
        lambda model: {name: t.to(torch.float64, copy=True)[:, :128].clone() for name, t in model.state_dict().items()},
    ],
    ids=["state dict", "model", "clones", "flat", "parameters", "half as many doubles"],
)
@pytest.mark.parametrize("by_steps", [False, True])
def test_kept_copies_are_other(keep: Callable[[nn.Module], Any], by_steps: bool) -> None:
    model, x = nn.Linear(256, 256, bias=False), torch.randn(8, 256)
    best = []
    with tl.Ledger(model) as ledger:
        for _ in range(3):
            model(x).sum().backward()
            model.zero_grad()
            best.append(keep(model))
            if by_steps:
                ledger.step()
    check_books(ledger, other=786_432)
    end = ledger.report.steps[-1].memory["cpu"].end
    assert (end.other, end.inputs, end.parameters) == (786_432, 8_192, 262_144)


def test_averaged_weights_are_other_until_a_forward_runs_them() -> None:
    model = nn.Linear(64, 64, bias=False)
    average = torch.optim.swa_utils.AveragedModel(model)
    with tl.Ledger(model) as ledger:
        for _ in range(2):
            model(torch.randn(8, 64)).sum().backward()
            model.zero_grad()
            average.update_parameters(model)
            ledger.step()
    check_books(ledger, other=16_384)
    assert ledger.report.steps[-1].memory["cpu"].end.other == 16_384


# Double backwards


def penalty() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))
    return model, torch.randn(128, 64, requires_grad=True)


def test_the_graph_of_a_backward_is_activations() -> None:
    model, x = penalty()

    def forward() -> list[torch.Tensor]:
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return [gradient.square().sum()]

    kept = forward()
    kept.clear()
    _, made = profiler_bytes(lambda: kept.extend(forward()))
    kept.clear()
    with tl.Ledger(model) as ledger:
        kept = forward()
        now = ledger.report.steps[0].memory["cpu"]
        assert now.end.activations == pytest.approx(made, abs=16)  # numbers that ops box
        assert now.end.other == 0
        kept[0].backward()
        kept.clear()
    memory = ledger.report.steps[0].memory["cpu"]
    assert memory.category_peaks["activations"] >= now.end.activations
    assert memory.end.by_category == {**memory.end.by_category, "activations": 0, "other": 0, "temporaries": 0}


@pytest.mark.parametrize("again", ["grad", "backward", "hessian"])
def test_a_step_between_changes_no_category(again: str) -> None:
    model, x = penalty()
    with tl.Ledger(model) as ledger:
        loss = model(x).sum()
        if again == "backward":
            with pytest.warns(UserWarning, match="reference cycle"):
                loss.backward(create_graph=True)
            first = [p.grad for p in model.parameters() if p.grad is not None][:1]
        else:
            first = list(torch.autograd.grad(loss, [x, model[0].weight], create_graph=True))  # type: ignore[index]
        second = sum((g.square().sum() for g in first), torch.zeros(()))
        del first, loss
        ledger.step()
        if again == "hessian":
            torch.autograd.grad(second, [x])
        else:
            second.backward()
        del second
        ledger.step()
    check_books(ledger)
    for p in (x, *model.parameters()):
        p.grad = None
    first_step, second_step = (step.memory["cpu"] for step in ledger.report.steps)
    assert first_step.end.activations == second_step.start.activations > 262_144


def test_a_plain_backward_leaves_no_activations() -> None:
    model, x = penalty()
    with tl.Ledger(model) as ledger:
        (gradient,) = torch.autograd.grad(model(x).sum(), x)
        ledger.step()
    end = ledger.report.steps[0].memory["cpu"].end
    assert (end.activations, end.other) == (0, 32_768)
    del gradient


# Batches


def stacked(n: int) -> Iterator[list[torch.Tensor]]:
    data = [torch.randn(32) for _ in range(8 * n)]
    for i in range(n):
        yield [torch.stack(data[8 * i : 8 * i + 8]), torch.tensor([0, 1] * 4)]


def from_lists(n: int) -> Iterator[list[torch.Tensor]]:
    for i in range(n):
        yield [torch.tensor([[float(i)] * 32] * 8), torch.tensor([i % 4] * 8)]


def from_arrays(n: int) -> Iterator[list[torch.Tensor]]:
    data = np.ones((8 * n, 32), dtype=np.float32)
    for i in range(n):
        yield [torch.from_numpy(data[8 * i : 8 * i + 8]), torch.as_tensor(np.zeros(8, dtype=np.int64))]


def padded(n: int) -> Iterator[list[torch.Tensor]]:
    rows = [torch.randn(24 + i) for i in range(8)]
    for _ in range(n):
        batch = torch.zeros(8, 32)
        for row, values in zip(batch, rows, strict=True):
            row[: len(values)] = values
        yield [batch, torch.nn.utils.rnn.pad_sequence([torch.arange(1)] * 8, batch_first=True).view(8)]


def shifted(n: int) -> Iterator[list[torch.Tensor]]:
    for _ in range(n):
        window = torch.randn(9, 32)
        yield [window[:-1].contiguous(), window[1:].sign().long()[:, 0].clamp(min=0)]


def drawn(n: int) -> Iterator[list[torch.Tensor]]:
    data, order = torch.randn(64, 32), torch.randperm(64)
    for i in range(n):
        chosen = order[8 * i : 8 * i + 8]
        yield [data[chosen], chosen % 4]


def one_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    """As accelerate's and Lightning's loaders do."""
    ready = next(batches)
    for following in batches:
        yield ready
        ready = following
    yield ready


@pytest.mark.parametrize("make", [stacked, from_lists, from_arrays, padded, shifted, drawn])
@pytest.mark.parametrize("ahead", [False, True])
def test_batches_are_inputs_from_the_first_to_the_last(
    make: Callable[[int], Iterator[list[torch.Tensor]]], ahead: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    with tl.Ledger(model, optimizer) as ledger:
        for x, y in one_ahead(make(5)) if ahead else make(5):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            ledger.step()
    check_books(ledger)
    assert len(ledger.report.steps) == 5


def test_metrics_beside_batches_are_other() -> None:
    model = nn.Linear(32, 4)
    history, total = [], torch.zeros(8, 4)
    with tl.Ledger(model) as ledger:
        counts = torch.zeros(8, 4)
        for x, y in one_ahead(from_lists(4)):
            output = model(x)
            F.cross_entropy(output, y).backward()
            history.append(output.detach().softmax(1))
            counts += output.detach() > 0
            total += output.detach()
            ledger.step()
    check_books(ledger, other=128 * 6)
    end = ledger.report.steps[-1].memory["cpu"].end
    assert end.other == 128 * (4 + 2)  # the history, the counts and the total
    assert end.inputs == 2 * (8 * 32 * 4 + 8 * 8) - (8 * 32 * 4 + 8 * 8)


def test_a_loader_with_workers() -> None:
    model = nn.Linear(32, 4)
    loader = torch.utils.data.DataLoader([(torch.randn(32), i % 4) for i in range(32)], batch_size=8, num_workers=2)
    with tl.Ledger(model) as ledger:
        for x, y in one_ahead(iter(loader)):
            F.cross_entropy(model(x), y).backward()
            ledger.step()
    check_books(ledger)
    assert len(ledger.report.steps) == 4


def test_what_a_step_is_the_first_to_touch_is_said() -> None:
    model, batches = nn.Linear(64, 64), [torch.randn(8, 64) for _ in range(3)]
    with tl.Ledger(model) as ledger:
        for x in batches:
            model(x[:4]).sum().backward()
            ledger.step()
    check_books(ledger)
    first, second, third = ledger.report.steps
    assert first.notes == ()
    assert second.notes == third.notes
    assert second.notes == (
        "2.00 KiB (2,048 bytes) of inputs were there before, in what this step was the first to touch: "
        "the end of the step before lacks them",
    )
    row = next(row for row in second.memory["cpu"].start.largest if row.category == "inputs")
    assert (row.op, row.shape, row.nbytes) == ("(before)", (8, 64), 2 * 2048)


def test_a_second_step_that_repeats_the_first_still_says_what_it_met() -> None:
    batches = [torch.randn(8, 64) for _ in range(3)]
    with tl.Ledger() as ledger:
        while batches:
            batches.pop().square().sum()
            ledger.step()
    notes = [step.notes for step in ledger.report.steps]
    assert notes[0] == ()
    assert notes[1] == notes[2] != ()


def test_what_turns_out_to_be_something_else_is_said() -> None:
    model = nn.Linear(64, 64, bias=False)
    with tl.Ledger(model) as ledger:
        (gradient,) = torch.autograd.grad(model(torch.randn(8, 64)).sum(), model.weight)
        ledger.step()
        model.weight.grad = gradient
        ledger.step()
    first, second = ledger.report.steps
    assert (first.memory["cpu"].end.other, second.memory["cpu"].start.gradients) == (16_384, 16_384)
    assert second.notes == (
        "16.00 KiB (16,384 bytes) at the end of the step before as other turned out to be gradients",
    )


# What people train with


def by_hugging_face(ledger: tl.Ledger, folder: Any, lists: bool) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0
        )
    )
    ids = torch.randint(0, 64, (32, 16))
    data = [{"input_ids": row.tolist() if lists else row, "labels": row.tolist() if lists else row} for row in ids]

    class Steps(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ledger.step()

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        max_steps=5,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[Steps()])
    with ledger:
        trainer.train()


def by_lightning(ledger: tl.Ledger, folder: Any, lists: bool) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    class Steps(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, *args: Any) -> None:
            ledger.step()

    trainer = lightning.Trainer(
        max_steps=5,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Steps()],
    )
    with ledger:
        trainer.fit(Module(), loader(lists))


def by_accelerate(ledger: tl.Ledger, folder: Any, lists: bool) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    model, optimizer, batches = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader(lists))
    with ledger:
        for x, y in batches:
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            ledger.step()


def loader(lists: bool) -> Any:
    x, y = torch.randn(40, 32), torch.randint(0, 4, (40,))
    data: Any = [(row.clone(), int(n)) for row, n in zip(x, y, strict=True)] if lists else [*zip(x, y, strict=True)]
    return torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize(("train", "metrics"), [(by_hugging_face, 8), (by_lightning, 4), (by_accelerate, 0)])
def test_trainers(train: Callable[..., None], metrics: int, lists: bool, tmp_path: Any) -> None:
    ledger = tl.Ledger()
    train(ledger, tmp_path, lists)
    assert len(ledger.report.steps) == 5
    check_books(ledger, other=metrics)  # the losses that they keep


# Sizes that change


def grow(t: torch.Tensor) -> None:
    t.resize_(1 << 13)


def shrink(t: torch.Tensor) -> None:
    t.resize_(1 << 8)


def grow_storage(t: torch.Tensor) -> None:
    t.untyped_storage().resize_(1 << 15)


def shrink_storage(t: torch.Tensor) -> None:
    t.untyped_storage().resize_(1 << 10)


def free_storage(t: torch.Tensor) -> None:
    t.untyped_storage().resize_(0)
    t.untyped_storage().resize_(1 << 13)


def grow_as_result(t: torch.Tensor) -> None:
    t.resize_(0)
    torch.add(torch.ones(1 << 13), 1, out=t)


def grow_like(t: torch.Tensor) -> None:
    t.resize_as_(torch.ones(1 << 13))


def take_another(t: torch.Tensor) -> None:
    t.set_(torch.ones(1 << 13))  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "change", [grow, shrink, grow_storage, shrink_storage, free_storage, grow_as_result, grow_like, take_another]
)
def test_old_and_new_lie_side_by_side(change: Callable[[torch.Tensor], None]) -> None:
    kept: list[torch.Tensor] = []

    def run() -> None:
        kept.append(torch.zeros(1 << 12))
        change(kept[0])

    run()
    kept.clear()
    peak, end = profiler_bytes(run)
    kept.clear()
    with tl.Ledger() as ledger:
        run()
    memory = ledger.report.steps[0].memory["cpu"]
    assert memory.peak.total_bytes == pytest.approx(peak, abs=12)  # numbers that ops box
    assert memory.end.total_bytes == end
    assert ledger.report.faults == ()


def test_resizing_by_hand() -> None:
    with tl.Ledger() as ledger:
        t = torch.zeros(1 << 18)
        t.resize_(1 << 19)
    memory = ledger.report.steps[0].memory["cpu"]
    assert (memory.peak.total_bytes, memory.end.total_bytes) == (3_145_728, 2_097_152)


def test_what_is_resized_keeps_what_it_is() -> None:
    model = nn.Linear(64, 64, bias=False)
    x = torch.randn(8, 64)
    with tl.Ledger(model) as ledger:
        model.weight.data.untyped_storage().resize_(0)
        model.weight.data.untyped_storage().resize_(16_384)
        model.weight.data.zero_()
        x.resize_(16, 64)
        model(x).sum().backward()
    journal = ledger.report.journals[0]
    memory = ledger.report.steps[0].memory["cpu"]
    assert (memory.start.parameters, memory.end.parameters) == (16_384, 16_384)
    resized = [n for n in journal.numbers() if journal.block(n).op == "aten.resize_"]
    assert len(resized) == 3
    assert all(not journal.roles.get(n, 0) & (LATE | EXTERNAL) for n in resized)
    assert [n for n in births(journal.events) if n in resized] == resized
    assert memory.external_bytes == 0


# Boundaries


def test_the_end_of_a_recompute_is_a_boundary() -> None:
    # What a recompute made and a backward still needs is an activation, however soon that backward frees it.
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    x = torch.randn(128, 64, requires_grad=True)
    with tl.Ledger(block) as ledger:
        torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, preserve_rng_state=False).sum().backward()  # type: ignore[union-attr]
    journal = ledger.report.journals[0]
    settled, gone = settle(journal, journal.events), deaths(journal.events)
    again = {n: CATEGORIES[settled[n]] for n in journal.numbers() if journal.block(n).phase == "recompute"}
    large = [category for n, category in again.items() if journal.block(n).nbytes == 131_072]
    assert large == ["activations", "activations"]  # before and after GELU
    assert all(n in gone for n in again)
    assert ledger.report.steps[0].memory["cpu"].category_peaks["activations"] >= 2 * 131_072


def test_everything_alive_is_in_the_end() -> None:
    torch.manual_seed(0)
    before = live_bytes()
    model, x = penalty()
    with tl.Ledger(model) as ledger:
        model(x).sum().backward()
        copies = copy.deepcopy(model.state_dict())
        ledger.step()
    found = live_bytes() - before
    assert ledger.report.steps[0].memory["cpu"].end.total_bytes == found
    del copies
