"""HuggingFace models of full size, from their configurations alone."""

from __future__ import annotations

import resource

import pytest
import torch

import torchledger as tl

transformers = pytest.importorskip("transformers")

TOKENS = 8192


def test_llama_8b_trains_in_a_laptops_memory() -> None:
    config = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128_256,
        max_position_embeddings=TOKENS,
        use_cache=False,
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tl.simulate("h100-sxm", capacity_bytes="1 TB") as device:
        model = transformers.AutoModelForCausalLM.from_config(config)
        assert torch.cuda.memory_allocated() == 0
        model.to("cuda")
        n = sum(p.numel() for p in model.parameters())
        assert n == 8_030_261_248
        optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.randint(0, config.vocab_size, (1, TOKENS)).to("cuda")
        with tl.Ledger(model, optimizer) as ledger:
            for _ in range(2):
                with torch.autocast("cuda", torch.bfloat16):
                    loss = model(ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                ledger.step()
        assert not device.assumptions
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 1_000_000  # KiB
    report = ledger.report
    assert report.faults == ()
    step = report.steps[-1]
    memory = step.memory["cuda:0"]
    assert memory.peak.unexplained == 0
    assert memory.peak.parameters == 4 * n
    assert memory.peak.optimizer_state == 8 * n
    # Autocast keeps a bfloat16 copy of each matrix that a product reads: all but the embedding and the norms.
    norms = 4096 * (2 * 32 + 1)
    assert memory.category_peaks["autocast_copies"] == 2 * (n - 128_256 * 4096 - norms)
    assert memory.category_peaks["gradients"] == 4 * n
    assert memory.requested_peak_bytes <= memory.allocated_peak_bytes <= memory.reserved_peak_bytes
    # The napkin, and the attention over the full square.
    assert step.flops.forward == tl.TransformerSpec.llama("3-8B").forward_flops(1, TOKENS)


@pytest.mark.parametrize(("mode", "rows"), [("balanced", 128), ("worst", 1024)])
def test_mixtures_of_experts(mode: str, rows: int) -> None:
    config = transformers.MixtralConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    with tl.simulate("h100-sxm", data_dependent=mode) as device:
        model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").cuda()
        ids = torch.randint(0, 100, (1, 512)).cuda()
        with tl.Ledger(model) as ledger:
            model(ids, labels=ids).loss.backward()
        assert sum(count for name, count in device.assumptions.items() if "mask" in name) > 0
    report = ledger.report
    assert report.faults == ()
    assert report.peak.unexplained == 0
    experts = sum(split.forward for path, split in report.flops.by_module.items() if path.endswith("experts"))
    # Gate, up and down projection of each of 8 experts, over the rows that it is assumed to see; or of 9, where the
    # mask of transformers has a class for experts that live elsewhere.
    a_row = 3 * 2 * 64 * 128
    nine = 9 * (rows if mode == "worst" else -(-1024 // 9))
    assert experts in (8 * rows * a_row, nine * a_row)
