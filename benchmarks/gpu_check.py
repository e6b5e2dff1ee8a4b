"""The ledger against the real allocator of a GPU: requested, allocated and reserved bytes, step by step.

Runs small training steps on the first CUDA device (with and without autocast and checkpointing, foreach, fused and
for-loop optimizers), and sets what the ledger says beside `torch.cuda.memory_stats`: for each, the dispatched bytes,
the known workspaces, what stays unexplained, and the attribution of forward, backward and recompute to modules on
the engine's own thread. A second table sets the same steps in a simulation beside them, both from empty allocators.
Writes the tables as JSON where asked; exits with 1 when a dispatched byte is missing.

    python benchmarks/gpu_check.py [--json PATH]
    python benchmarks/gpu_check.py --simulate h100-sxm   # the second table's simulated half; needs no GPU
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchledger as tl
from torchledger.accelerators import match_device_name

BATCH, SEQ, WIDTH, HEADS, LAYERS, VOCABULARY = 8, 256, 256, 4, 4, 1024


class Block(nn.Module):
    """A pre-norm transformer block with fused causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From and to a batch of shape (batch, seq, width)."""
        heads = (t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm_1(x)).split(WIDTH, 2))
        x = x + self.project(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """A small GPT; ``kind`` of checkpointing is none, reentrant or nonreentrant."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of shape (batch, seq, vocabulary)."""
        x = self.tokens(ids) + self.positions.weight
        for block in self.blocks:
            x = block(x) if self.kind == "none" else checkpoint(block, x, use_reentrant=self.kind == "reentrant")
        return self.head(self.norm(x))


def measure(kind: str, amp: bool, optimizer_kind: str) -> dict[str, Any]:
    """Two steps under a ledger; what it says of the second beside what the allocator counted."""
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    model = GPT(kind).cuda()
    options = {"foreach": {"foreach": True}, "for-loop": {"foreach": False}, "fused": {"fused": True}}[optimizer_kind]
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    ids = torch.randint(VOCABULARY, (BATCH, SEQ), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=amp):
            loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()  # workspaces come with the first step
    with tl.Ledger(model, optimizer) as ledger:
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_stats()["requested_bytes.all.current"]
            step()
            stats = torch.cuda.memory_stats()
            ledger.step()
    report = ledger.report
    last = report.steps[-1]
    memory = last.memory["cuda:0"]
    blocks = [split for path, split in last.flops.by_module.items() if path.startswith("blocks.")]
    return {
        "checkpointing": kind,
        "autocast": amp,
        "optimizer": optimizer_kind,
        "start_ledger": memory.start.total_bytes - memory.start.workspace - memory.start.unexplained,
        "start_requested": before,
        "dispatched_peak": memory.peak.total_bytes - memory.peak.workspace - memory.peak.unexplained,
        "workspace": memory.peak.workspace,
        "unexplained": memory.peak.unexplained,
        "requested_peak": stats["requested_bytes.all.peak"],
        "ledger_requested_peak": memory.requested_peak_bytes,
        "allocated_peak": stats["allocated_bytes.all.peak"],
        "ledger_allocated_peak": memory.allocated_peak_bytes,
        "reserved_peak": stats["reserved_bytes.all.peak"],
        "ledger_reserved_peak": memory.reserved_peak_bytes,
        "other": memory.peak.other,
        "end_is_start": memory.end.total_bytes == memory.start.total_bytes,
        "modules_with_forward": sum(split.forward > 0 for split in blocks),
        "modules_with_backward": sum(split.backward > 0 for split in blocks),
        "modules_with_recompute": sum(split.recompute > 0 for split in blocks),
        "outside_flops": last.flops.outside,
        "faults": list(report.faults),
    }


KINDS = [
    *itertools.product(("none", "nonreentrant", "reentrant"), (False, True), ("foreach",)),
    ("none", True, "for-loop"),
    ("none", True, "fused"),
    ("none", False, "fused"),
    ("nonreentrant", True, "fused"),
]
PEAKS = ("requested", "allocated", "reserved")


def count_peaks(kind: str, amp: bool, optimizer_kind: str, accelerator: str | None) -> dict[str, int]:
    """Peaks of two steps from an empty allocator: on the GPU, or on a simulated accelerator."""
    with tl.simulate(accelerator) if accelerator else contextlib.nullcontext():
        model = GPT(kind).cuda()
        options = {"foreach": {"foreach": True}, "for-loop": {"foreach": False}, "fused": {"fused": True}}
        optimizer = torch.optim.AdamW(model.parameters(), **options[optimizer_kind])
        ids = torch.randint(VOCABULARY, (BATCH, SEQ), device="cuda")
        for _ in range(2):
            with torch.autocast("cuda", torch.bfloat16, enabled=amp):
                loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        stats = torch.cuda.memory_stats()
        return {name: stats[f"{name}_bytes.all.peak"] for name in PEAKS}


def in_own_process(index: int) -> dict[str, int]:
    """`count_peaks` of one kind on the GPU, whose allocator is then empty at first."""
    command = [sys.executable, __file__, "--one", str(index)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr[-500:]}
    return json.loads(done.stdout.splitlines()[-1])


def compare_simulation(accelerator: str, *, real: bool) -> list[dict[str, Any]]:
    """Each kind of step in a simulation, beside the GPU where there is one."""
    rows = []
    for index, kind in enumerate(KINDS):
        row: dict[str, Any] = dict(zip(("checkpointing", "autocast", "optimizer"), kind, strict=True))
        simulated = count_peaks(*kind, accelerator)
        measured = in_own_process(index) if real else {}
        for name in PEAKS:
            row[name] = measured.get(name)
            row[f"simulated {name}"] = simulated.get(name)
            if real and name in measured and name in simulated:
                row[f"{name} difference"] = simulated[name] - measured[name]
        row["errors"] = [measured["error"]] if "error" in measured else []
        rows.append(row)
    columns = [name for name in rows[0] if name != "errors" and any(row[name] is not None for row in rows)]
    print(f"\nsimulated {accelerator}, torch {torch.__version__}")
    print(tabulate([[row.get(c) for c in columns] for row in rows], headers=columns, intfmt=","))
    for row in rows:
        for error in row["errors"]:
            print(error, file=sys.stderr)
    return rows


def main() -> int:
    """Print the tables; 1 where the ledger and the allocator disagree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--simulate", metavar="NAME", help="only the simulated half, for that accelerator")
    parser.add_argument("--one", metavar="INDEX", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(json.dumps(count_peaks(*KINDS[arguments.one], None)))
        return 0
    if arguments.simulate:
        found = compare_simulation(arguments.simulate, real=False)
        return int(any(row["errors"] for row in found))
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was checked (--simulate NAME needs none)", file=sys.stderr)
        return 3
    known = match_device_name(torch.cuda.get_device_name())
    simulation = compare_simulation(known, real=True) if known else []
    rows = [measure(*kind) for kind in KINDS]
    columns = (
        "checkpointing",
        "autocast",
        "optimizer",
        "dispatched_peak",
        "workspace",
        "unexplained",
        "requested_peak",
    )
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(tabulate([[row[c] for c in columns] for row in rows], headers=columns, intfmt=","))
    broken = [
        row
        for row in rows
        if row["faults"]
        or row["unexplained"] < 0
        or row["other"]
        or row["outside_flops"]
        or row["modules_with_forward"] != row["modules_with_backward"]
        or row["ledger_requested_peak"] != row["requested_peak"]
    ]
    for row in broken:
        print("disagrees:", row)
    if arguments.json:
        result = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "rows": rows,
            "simulation": simulation,
        }
        with open(arguments.json, "w") as file:
            json.dump(result, file, indent=1)
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
