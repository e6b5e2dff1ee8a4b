"""Where storages come from: whatever torch itself allocated counts, whatever became of it since."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchledger as tl
from oracles import profiler_bytes
from torchledger.journal.entries import EXTERNAL, MAPPED, UNSURE
from torchledger.record import origins
from torchledger.record.origins import ALIGNMENT, Origins, cpu_layout

N = 256 * 256 * 4
BATCH = 8 * 256 * 4

safetensors = pytest.importorskip("safetensors")
from safetensors.torch import load, load_file, save_file  # noqa: E402


class Files:
    """One weight in every kind of file."""

    def __init__(self, folder: Path) -> None:
        self.weight = torch.randn(256, 256)
        self.zip, self.old = folder / "zip.pt", folder / "old.pt"
        self.tensors, self.raw = folder / "weights.safetensors", folder / "weights.bin"
        torch.save({"weight": self.weight}, self.zip)
        torch.save({"weight": self.weight}, self.old, _use_new_zipfile_serialization=False)
        save_file({"weight": self.weight}, self.tensors)
        self.weight.numpy().tofile(self.raw)

    def mapped_by_python(self) -> torch.Tensor:
        with self.raw.open("r+b") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.float32)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("files"))


def with_numpy(tensor: torch.Tensor) -> torch.Tensor:
    tensor.detach().numpy()
    return tensor


def part_of_a_storage(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0).set_(tensor.untyped_storage()[: 4 * 128 * 256])  # type: ignore[call-overload, no-any-return]


def through_a_file_storage(path: Path, shared: bool) -> torch.Tensor:
    storage = torch.UntypedStorage.from_file(str(path), shared, N)
    return torch.empty(0).set_(storage)  # type: ignore[call-overload, no-any-return]


OWN: dict[str, Callable[[Files], torch.Tensor]] = {
    "plain": lambda f: torch.randn(256, 256),
    "numpy": lambda f: with_numpy(torch.randn(256, 256)),
    "torch.load": lambda f: torch.load(f.zip)["weight"],
    "torch.load, any pickle": lambda f: torch.load(f.zip, weights_only=False)["weight"],
    "torch.load, old format": lambda f: torch.load(f.old)["weight"],
    "share_memory_": lambda f: torch.randn(256, 256).share_memory_(),
    "an array, shared": lambda f: torch.from_numpy(np.ones((256, 256), dtype=np.float32)).share_memory_(),
    "DLPack of torch's": lambda f: torch.from_dlpack(torch.randn(256, 256)),  # type: ignore[attr-defined]
    "DLPack of torch's, old": lambda f: torch.utils.dlpack.from_dlpack(
        torch.utils.dlpack.to_dlpack(torch.randn(256, 256))  # type: ignore[attr-defined]
    ),
    "copied from an array": lambda f: torch.tensor(np.ones((256, 256), dtype=np.float32)),
}
FOREIGN: dict[str, Callable[[Files], torch.Tensor]] = {
    "an array": lambda f: torch.from_numpy(np.ones((256, 256), dtype=np.float32)),
    "a byte array": lambda f: torch.frombuffer(bytearray(N), dtype=torch.float32),
    "DLPack of numpy's": lambda f: torch.from_dlpack(np.ones((256, 256), dtype=np.float32)),  # type: ignore[attr-defined]
    "safetensors of bytes": lambda f: load(f.tensors.read_bytes())["weight"],
}
IN_FILES: dict[str, Callable[[Files], torch.Tensor]] = {
    "torch.load, mapped": lambda f: torch.load(f.zip, mmap=True)["weight"],
    "safetensors": lambda f: load_file(f.tensors)["weight"],
    "from_file, shared": lambda f: torch.from_file(str(f.raw), shared=True, size=N // 4),
    "from_file": lambda f: torch.from_file(str(f.raw), size=N // 4),
    "a storage from a file, shared": lambda f: through_a_file_storage(f.raw, True),
    "a storage from a file": lambda f: through_a_file_storage(f.raw, False),
    "memmap": lambda f: torch.from_numpy(np.memmap(f.raw, dtype=np.float32, mode="r+")),
    "a mapping of Python's": Files.mapped_by_python,
}
ALL = {**OWN, **FOREIGN, **IN_FILES}


def train(weight: torch.Tensor, x: torch.Tensor) -> tl.MemoryStatement:
    model = nn.Linear(256, 256, bias=False)
    model.weight = nn.Parameter(weight.view(256, 256))
    with tl.Ledger(model) as ledger:
        model(x).sum().backward()
        model.zero_grad()
    assert ledger.report.faults == ()
    assert ledger.report.steps[0].notes == ()
    return ledger.report.steps[0].memory["cpu"]


@pytest.mark.parametrize("kind", ALL)
def test_a_parameter_is_one_wherever_its_bytes_lie(kind: str, files: Files) -> None:
    memory = train(ALL[kind](files), torch.randn(8, 256))
    # The weight, its gradient, a batch and what the product gives; sum()'s gradient is expanded, and takes 4 bytes.
    assert memory.peak.total_bytes == 2 * N + BATCH + 8
    assert (memory.peak.parameters, memory.peak.gradients, memory.peak.inputs) == (N, N, BATCH)
    assert memory.external_bytes == 0
    mapped = N if kind in IN_FILES else 0
    assert (memory.mapped_bytes, memory.start.mapped_bytes, memory.end.mapped_bytes) == (mapped, mapped, mapped)


@pytest.mark.parametrize("kind", ALL)
def test_an_input_is_external_only_if_no_allocator_gave_it(kind: str, files: Files) -> None:
    x = ALL[kind](files).view(256, 256)
    memory = train(torch.randn(256, 256), x)
    inputs, external = (N, 0) if kind in OWN else (0, N)
    assert (memory.start.inputs, memory.external_bytes, memory.mapped_bytes) == (inputs, external, 0)


# Sharing gives a storage other memory behind everybody's back; copying an array reads one.
@pytest.mark.parametrize("kind", [kind for kind in ALL if kind not in ("an array, shared", "copied from an array")])
def test_what_is_made_inside(kind: str, files: Files) -> None:
    kept: list[torch.Tensor] = []

    def run() -> None:
        kept.append(ALL[kind](files))
        kept[0].sum()

    if kind in OWN:  # the profiler counts mapped files as if they were allocated
        run()
        kept.clear()
        assert profiler_bytes(run)[1] == N
        kept.clear()
    with tl.Ledger() as ledger:
        run()
    assert ledger.report.faults == ()
    memory = ledger.report.steps[0].memory["cpu"]
    assert memory.end.total_bytes == memory.end.other == (N if kind in OWN else 0)
    assert (memory.external_bytes > 0) == (kind not in OWN)


@pytest.mark.parametrize("inside", [False, True])
def test_memory_that_is_handed_on_counts_once(inside: bool) -> None:
    def run() -> list[torch.Tensor]:
        whole = torch.ones(256, 256)
        again = torch.from_dlpack(whole)  # type: ignore[attr-defined]
        return [whole, again, part_of_a_storage(whole), part_of_a_storage(again)]

    kept = [] if inside else run()
    with tl.Ledger() as ledger:
        kept = kept or run()
        for tensor in kept:
            tensor.sum()
        if not inside:
            assert ledger.report.steps[0].memory["cpu"].end.total_bytes == N
        del tensor, kept[0]
        assert ledger.report.steps[0].memory["cpu"].end.total_bytes == N  # as long as something lies in it
        kept.clear()
        assert ledger.report.steps[0].memory["cpu"].end.total_bytes == 0
    assert ledger.report.faults == ()
    assert ledger.report.steps[0].memory["cpu"].external_bytes == 0


def test_a_parameter_in_the_memory_of_another_tensor_does_not_end_it() -> None:
    whole, x = torch.randn(256, 256), torch.randn(8, 256)
    model = nn.Linear(256, 256, bias=False)
    with tl.Ledger() as ledger:
        whole.sum()
        model.weight = nn.Parameter(torch.from_dlpack(whole))  # type: ignore[attr-defined]
        model(x)
        assert ledger.report.steps[0].memory["cpu"].end.total_bytes == N + BATCH
        del model
        assert ledger.report.steps[0].memory["cpu"].end.total_bytes == N + BATCH
        del whole
    memory = ledger.report.steps[0].memory["cpu"]
    assert (memory.start.parameters, memory.end.total_bytes, memory.external_bytes) == (N, BATCH, 0)
    assert ledger.report.flops.by_parameter["weight"].forward == 2 * 8 * 256 * 256


def test_loaded_optimizer_state_is_state(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(64, 64, bias=False)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = make()
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    for mapped in (False, True):
        model, optimizer = make()
        optimizer.load_state_dict(torch.load(tmp_path / "state.pt", mmap=mapped))
        with tl.Ledger(model, optimizer) as ledger:
            model(torch.randn(8, 64)).sum().backward()
            optimizer.step()
        memory = ledger.report.steps[0].memory["cpu"]
        assert memory.start.optimizer_state == memory.end.optimizer_state == 2 * 16_384 + 4
        assert memory.external_bytes == 0
    model, optimizer = make()
    with tl.Ledger(model, optimizer) as ledger:
        optimizer.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert ledger.report.steps[0].memory["cpu"].end.optimizer_state == 2 * 16_384 + 4


def test_gradients_and_activations_that_were_read_as_arrays() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(8, 64)

    def run(read: bool) -> tl.MemoryStatement:
        model.zero_grad()
        model(x).sum().backward()
        y = model(x)
        if read:
            y.detach().numpy()
            for p in model.parameters():
                assert p.grad is not None
                p.grad.numpy()
        with tl.Ledger(model) as ledger:
            (y * 2).sum().backward()
        return ledger.report.steps[0].memory["cpu"]

    assert run(True) == run(False)


def test_a_saved_transformer_from_its_files(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=128, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    made = transformers.GPT2LMHeadModel(config)
    made.save_pretrained(tmp_path)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    ids = torch.randint(0, 128, (2, 16))
    statements = []
    for model in (made, loaded):
        model.train()
        with tl.Ledger(model) as ledger:
            model(input_ids=ids, labels=ids).loss.backward()
        assert ledger.report.faults == ()
        statements.append(ledger.report.steps[0].memory["cpu"])
    parameters = sum({p.data_ptr(): p.numel() * 4 for p in loaded.parameters()}.values())
    for memory in statements:
        assert memory.peak.parameters == memory.start.parameters == parameters
        assert memory.external_bytes == 0
    assert statements[0].peak.total_bytes == statements[1].peak.total_bytes
    assert 0 <= statements[1].mapped_bytes <= parameters
    assert statements[0].mapped_bytes == 0


# Where the layout of storages is not known.


def test_addresses_decide_where_nothing_else_does(monkeypatch: pytest.MonkeyPatch, files: Files) -> None:
    monkeypatch.setattr(origins, "cpu_layout", lambda: None)
    here = Origins()
    own = with_numpy(torch.ones(1000)).untyped_storage()
    assert here.origin_of(own, 0).role == UNSURE
    bytes_ = bytearray(4096 + ALIGNMENT)
    start = -torch.frombuffer(bytes_, dtype=torch.uint8).data_ptr() % ALIGNMENT
    for offset, role in ((start, UNSURE), (start + 16, EXTERNAL)):
        part = torch.frombuffer(memoryview(bytes_)[offset : offset + 4096], dtype=torch.uint8)
        assert here.origin_of(part.untyped_storage(), 0).role == role
    mapped = torch.load(files.zip, mmap=True)["weight"]
    assert here.origin_of(mapped.untyped_storage(), 1).role == EXTERNAL | MAPPED
    with tl.Ledger() as ledger:
        torch.empty(0).set_(own).sum()  # type: ignore[call-overload]
    step = ledger.report.steps[0]
    assert step.memory["cpu"].end.total_bytes == 4000
    assert step.notes == (
        "3.91 KiB (4,000 bytes) may lie in memory of another library: nothing tells, so they are counted",
    )


def test_the_layout_is_found_and_says_what_it_must() -> None:
    layout = cpu_layout()
    assert layout is not None
    assert len({layout.by_allocator, layout.by_whole, layout.by_owner, *layout.by_exporter}) >= 4


def test_addresses_that_are_none_are_read_as_nothing() -> None:
    for address in (0, 1, -8, 1 << 62, 1 << 70):
        assert origins.read_words(address) == ()


def test_mappings_are_read_once_for_a_model(monkeypatch: pytest.MonkeyPatch, files: Files, tmp_path: Path) -> None:
    save_file({f"{i}.weight": torch.randn(16, 16) for i in range(20)}, tmp_path / "many.safetensors")
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(20)))
    model.load_state_dict(load_file(tmp_path / "many.safetensors"), assign=True)
    read = []
    made: Any = origins._Mappings

    def count() -> Any:
        read.append(1)
        return made()

    monkeypatch.setattr(origins, "_Mappings", count)
    with tl.Ledger(model) as ledger:
        for _ in range(3):
            model(torch.randn(4, 16)).sum().backward()
            ledger.step()
    assert ledger.report.steps[0].memory["cpu"].mapped_bytes == 20 * 1024
    assert len(read) == 1
