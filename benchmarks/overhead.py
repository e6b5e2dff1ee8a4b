"""What watching costs, per dispatched op: the ledger beside an empty mode, FlopCounterMode and MemTracker.

One run, one thread: the step of a 12-layer GPT, small enough that the watching dominates. The contenders take turns in
every round, so that a slow moment of the machine hits them alike; the medians over the rounds are printed.

    python benchmarks/overhead.py [--rounds N] [--json PATH]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import torchledger as tl


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, width = x.shape
        heads = self.query_key_value(self.norm_1(x)).view(batch, seq, 3, self.n_heads, width // self.n_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        scores = (query @ key.transpose(-2, -1)) * (width // self.n_heads) ** -0.5
        mask = torch.ones(seq, seq, dtype=torch.bool).tril()
        attended = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value
        x = x + self.project(attended.transpose(1, 2).reshape(batch, seq, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """12 blocks over learned positions; the head is tied to the embedding."""

    def __init__(
        self, n_layers: int = 12, width: int = 32, n_heads: int = 4, vocabulary: int = 64, seq: int = 16
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(Block(width, n_heads) for _ in range(n_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class EmptyMode(TorchDispatchMode):
    """Calls each op, as Dynamo's wrapper lets it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class BareMode(EmptyMode):
    """The same without Dynamo's wrapper around each call."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class CountingMode(EmptyMode):
    """Counts dispatched ops."""

    n_ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        CountingMode.n_ops += 1
        return func(*args, **(kwargs or {}))


def make_step() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A model, its optimizer and one training step."""
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    ids = torch.randint(0, 64, (1, 16))

    def step() -> None:
        logits = model(ids)
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), ids.view(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return model, optimizer, step


@contextlib.contextmanager
def mem_tracker(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """PyTorch's own tracker of memory by category."""
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        yield tracker


def contenders(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], None], ledger: tl.Ledger
) -> dict[str, Callable[[], float]]:
    """Name -> a function that runs one step watched and returns its seconds."""

    def timed(run: Callable[[], None]) -> float:
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    def within(make: Callable[[], Any]) -> float:
        with make():
            step()
            return timed(step)

    def with_mem_tracker() -> float:
        with mem_tracker(model, optimizer) as tracker:
            step()
            tracker.reset_mod_stats()  # it refuses a second iteration without
            return timed(step)

    def with_ledger() -> float:
        def run() -> None:
            step()
            ledger.step()

        with ledger:
            for _ in range(3):  # the first steps differ from those that follow: no state, no batch from before
                run()
            return timed(run)

    def with_ledger_anew() -> float:
        def run() -> None:
            step()
            ledger.step()

        with ledger:
            run()
            return timed(run)

    return {
        "no mode": lambda: timed(step),
        "empty mode": lambda: within(EmptyMode),
        "empty mode, unwrapped": lambda: within(BareMode),
        "torchledger, with step()": with_ledger,
        "  after a different step": with_ledger_anew,
        "FlopCounterMode": lambda: within(lambda: FlopCounterMode(display=False)),
        "MemTracker": with_mem_tracker,
    }


def measure(rounds: int) -> tuple[int, dict[str, float]]:
    """(dispatched ops of a step, median seconds of a step by contender)."""
    torch.set_num_threads(1)
    model, optimizer, step = make_step()
    for _ in range(3):
        step()
    with CountingMode():
        step()
    n_ops = CountingMode.n_ops
    runs = contenders(model, optimizer, step, tl.Ledger(model, optimizer))
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(rounds):
        for name, run in runs.items():
            if name == "MemTracker" and round_ % 5:
                continue  # some twenty times slower than the rest
            seconds[name].append(run())
    return n_ops, {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    """Print the table, and write it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", metavar="PATH")
    arguments = parser.parse_args()
    n_ops, seconds = measure(arguments.rounds)
    added = {name: (value - seconds["no mode"]) / n_ops * 1e6 for name, value in seconds.items()}
    ours = added["torchledger, with step()"]
    rows = [
        (name, seconds[name] * 1e3, added[name], ours / added[name] if added[name] > 0 else None) for name in seconds
    ]
    print(f"{n_ops} dispatched ops a step, torch {torch.__version__}, one thread, median of {arguments.rounds} rounds")
    print(tabulate(rows, headers=["watching", "ms a step", "us added an op", "ledger / this"], floatfmt=".2f"))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"n_ops": n_ops, "torch": torch.__version__, "us_added_per_op": added}, file, indent=1)


if __name__ == "__main__":
    main()
