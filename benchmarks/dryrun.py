"""Two training steps of Llama models on a simulated H100, under the full ledger: how long, and in how much host memory.

HuggingFace models from their configuration, 8,192 tokens, bfloat16 autocast, AdamW. Each in a process of its own.

    python benchmarks/dryrun.py [--models 8B 70B] [--no-ledger]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import subprocess
import sys
import time
from typing import Any

from tabulate import tabulate

SIZES = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
LIMITS = {"8B": (4.0, 1.5), "70B": (10.0, 1.5)}
"""Seconds for two steps on two cores, and GB of host memory."""
TOKENS = 8192


def measure(name: str, with_ledger: bool) -> dict[str, Any]:
    """Build and train one model here; seconds, host memory and what the device would hold."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    import torchledger as tl

    config = LlamaConfig(
        **SIZES[name], num_key_value_heads=8, vocab_size=128_256, max_position_embeddings=TOKENS, use_cache=False
    )
    with tl.simulate("h100-sxm", capacity_bytes="4 TB"):
        began = time.perf_counter()
        model = AutoModelForCausalLM.from_config(config).to("cuda")
        built = time.perf_counter()
        optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.randint(0, config.vocab_size, (1, TOKENS)).to("cuda")
        ledger = tl.Ledger(model, optimizer) if with_ledger else None
        with ledger or contextlib.nullcontext():
            for _ in range(2):
                with torch.autocast("cuda", torch.bfloat16):
                    loss = model(ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if ledger:
                    ledger.step()
        done = time.perf_counter()
        return {
            "model": name,
            "build_s": built - began,
            "two_steps_s": done - built,
            "host_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
            "requested_gib": torch.cuda.memory_stats()["requested_bytes.all.peak"] / 2**30,
            "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
            "tflop_a_step": ledger.report.steps[-1].flops.total / 1e12 if ledger else None,
            "faults": list(ledger.report.faults) if ledger else [],
        }


def main() -> int:
    """Print the table; 1 where a limit is passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--no-ledger", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, not arguments.no_ledger)))
        return 0
    rows = []
    for name in arguments.models:
        command = [sys.executable, __file__, "--one", name, *(["--no-ledger"] if arguments.no_ledger else [])]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    print(tabulate(rows, headers="keys", floatfmt=".2f"))
    slow = [row["model"] for row in rows if row["two_steps_s"] > LIMITS[row["model"]][0]]
    large = [row["model"] for row in rows if row["host_gb"] > LIMITS[row["model"]][1]]
    for name in slow:
        print(f"{name}: more than {LIMITS[name][0]} s")
    for name in large:
        print(f"{name}: more than {LIMITS[name][1]} GB of host memory")
    return bool(slow or large or any(row["faults"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
