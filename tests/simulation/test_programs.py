"""Pieces of ordinary programs: each runs as on a device, or is refused in words that help."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchledger as tl
from torchledger.errors import SimulationError
from torchledger.simulation.device import SimulatedDevice

MIB = 2**20


def test_every_function_of_torch_cuda_answers_or_is_refused_by_name(h100: SimulatedDevice) -> None:
    """Called as it may be, no function reaches for a driver that is not there."""
    needs_more = {"device_of", "set_stream", "set_rng_state"}
    for module in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.backends.cuda):
        for name, function in vars(module).items():
            if name.startswith("_") or name in needs_more or inspect.isclass(function) or not callable(function):
                continue
            for arguments in ((), (0,)) if module is not torch.backends.cuda else ((),):
                try:
                    function(*arguments)
                except (TypeError, SimulationError):
                    continue
    assert torch.cuda.get_allocator_backend() == "native"
    assert torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["current"] == 0
    torch.cuda.reset_accumulated_memory_stats()
    with pytest.raises(SimulationError, match=r"torch\.cuda\.utilization"):
        torch.cuda.utilization()


def test_a_number_is_a_device(h100: SimulatedDevice) -> None:
    assert nn.Linear(2, 2).to(0).weight.device == torch.device("cuda", 0)
    assert nn.Linear(2, 2).to(device=0).weight.is_cuda
    assert nn.Linear(2, 2).cuda(0).weight.is_cuda
    assert torch.zeros(2).to(0).is_cuda
    assert torch.zeros(2, device=0).is_cuda
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        nn.Linear(2, 2).to(1)


def test_factories_that_pin(h100: SimulatedDevice) -> None:
    for made in (
        torch.empty(3, pin_memory=True),
        torch.tensor([1.0], pin_memory=True),
        torch.zeros(2, pin_memory=True),
    ):
        assert made.is_pinned()
        assert made.device.type == "cpu"
    assert torch.tensor([1.0, 2.0], pin_memory=True).tolist() == [1.0, 2.0]
    assert not torch.empty(3).is_pinned()
    with pytest.raises(RuntimeError, match="pinned"):
        torch.empty(3, device="cuda", pin_memory=True)


def test_lazy_modules(h100: SimulatedDevice) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2)).to("cuda")
    model(torch.ones(3, 8, device="cuda")).sum().backward()
    assert model[0].weight.shape == (4, 8)
    assert model[0].weight.is_cuda
    assert all(p.grad is not None and p.grad.is_cuda for p in model.parameters())


def test_scripted_functions(h100: SimulatedDevice) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(x.size(0), device=x.device) + x.sum(1)

    assert torch.jit.script(function)(torch.ones(4, 8, device="cuda")).is_cuda
    assert torch.func.hessian(lambda t: (t**3).sum())(torch.ones(3, device="cuda")).shape == (3, 3)


def _half(x: torch.Tensor) -> torch.Tensor:
    return x.half()


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda x: x @ torch.ones(9, 4, device="cuda"), r"mat1 and mat2 shapes cannot be multiplied \(4x8 and 9x4\)"),
        (
            lambda x: nn.functional.linear(x, x.new_ones(4, 9)),
            r"mat1 and mat2 shapes cannot be multiplied \(4x8 and 9x4\)",
        ),
        (lambda x: x @ _half(x).t(), "mat1 and mat2 must have the same dtype, but got Float and Half"),
        (lambda x: nn.Linear(8, 4, device="cuda")(_half(x)), "same dtype, but got Half and Float"),
        (lambda x: nn.LayerNorm(8, device="cuda")(_half(x)), "expected scalar type Half but found Float"),
        (lambda x: nn.functional.cross_entropy(x, x.new_zeros(4, dtype=torch.int32)), "not implemented for 'Int'"),
        (lambda x: nn.functional.scaled_dot_product_attention(x, _half(x), x), "to have the same dtype, but got query"),
        (lambda x: torch.arange(4)[x[0, :2].long()], "indices should be either on cpu or on the same device"),
        (lambda x: torch.arange(4).index_put_((x[0, :2].long(),), torch.tensor(1)), "indices should be either on cpu"),
        (lambda x: torch.bmm(x[None], _half(x)[None].mT), "expected scalar type Float but found Half"),
        (lambda x: x.long() @ x.long().t(), "\"addmm_cuda\" not implemented for 'Long'"),
    ],
)
def test_mistakes_are_told_as_a_device_tells_them(
    run: Callable[[torch.Tensor], Any], words: str, h100: SimulatedDevice
) -> None:
    with pytest.raises(RuntimeError, match=words):
        run(torch.ones(4, 8, device="cuda"))


@pytest.mark.parametrize("batch_first", [True, False])
def test_packed_sequences(batch_first: bool, h100: SimulatedDevice) -> None:
    """Against the host: the same steps; a copy of the pieces goes before them where the input is not laid out so."""
    lengths = torch.tensor([3, 7, 5])
    x = torch.ones(3, 7, 6) if batch_first else torch.ones(7, 3, 6)
    pack = nn.utils.rnn.pack_padded_sequence
    real = pack(x, lengths, batch_first=batch_first, enforce_sorted=False)
    x = x.cuda()
    packed = pack(x, lengths, batch_first=batch_first, enforce_sorted=False)
    assert packed.data.shape == real.data.shape == (15, 6)
    assert packed.batch_sizes.tolist() == real.batch_sizes.tolist()
    lstm = nn.LSTM(6, 5, batch_first=batch_first).cuda()
    out, _ = nn.utils.rnn.pad_packed_sequence(lstm(packed)[0], batch_first=batch_first)
    out.sum().backward()
    assert out.shape == ((3, 7, 5) if batch_first else (7, 3, 5))
    assert lstm.weight_ih_l0.grad.is_cuda


def test_what_packing_takes(h100: SimulatedDevice) -> None:
    """1 MiB a step and sequence; sorted so that three steps run all four sequences, and two run two."""
    x = torch.empty(5, 4, MIB // 4, device="cuda")
    lengths = torch.tensor([5, 5, 3, 3])
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths)
    assert torch.cuda.memory_allocated() - before == 16 * MIB
    # The first three steps are a piece of the input as it lies; the other two are copied: 4 MiB.
    assert torch.cuda.max_memory_allocated() - before == 20 * MIB
    del packed


def test_a_sparse_matrix_from_the_host(h100: SimulatedDevice) -> None:
    adjacency = torch.sparse_coo_tensor(torch.tensor([[0, 1, 2], [2, 0, 1]]), torch.ones(3), (3, 3)).to("cuda")
    assert adjacency.is_cuda
    assert torch.cuda.memory_allocated() == 1024  # indices and values
    assert "layout=torch.sparse_coo" in repr(adjacency)
    x = torch.ones(3, 4, device="cuda", requires_grad=True)
    for product in (torch.sparse.mm, torch.spmm, torch.matmul):
        out = product(adjacency, x)
        assert out.shape == (3, 4)
        out.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == (3, 4)
    before = torch.cuda.memory_allocated()
    transposed = adjacency.t()
    assert torch.cuda.memory_allocated() - before == 1024, "a transposed sparse matrix is no view"
    assert transposed.shape == (3, 3)
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied \(3x3 and 4x3\)"):
        adjacency @ torch.ones(4, 3, device="cuda")


def test_a_model_without_data_is_not_moved(h100: SimulatedDevice) -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(NotImplementedError, match="to_empty"):
        model.to("cuda")
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor; no data!"):
        model.weight.cuda()
    with pytest.raises(RuntimeError, match="found at least two devices, meta and cuda:0"):
        model(torch.ones(2, 4, device="cuda"))
    assert model.to_empty(device="cuda").weight.is_cuda


def test_distributions_that_validate(h100: SimulatedDevice) -> None:
    scores = torch.randn(100, 3, device="cuda")
    choice = torch.distributions.Categorical(logits=scores)
    sample = choice.sample()
    assert choice.log_prob(sample).shape == (100,)
    torch.distributions.Categorical(probs=scores.softmax(-1))
    assert torch.distributions.Normal(scores, scores.exp()).rsample().is_cuda


def test_a_sparse_matrix_made_by_hand_for_another_device(h100: SimulatedDevice) -> None:
    indices = torch.tensor([[0, 1], [1, 0]], device="cuda")
    made = torch.sparse_coo_tensor(indices, torch.ones(2, device="cuda"), (2, 2), device="cuda")
    assert (made @ torch.ones(2, 3, device="cuda")).shape == (2, 3)


def test_numbers_in_lists(h100: SimulatedDevice) -> None:
    losses = [torch.tensor(1.5, device="cuda"), torch.tensor(2.5, device="cuda")]
    assert torch.tensor(losses).tolist() == [1.5, 2.5]
    assert torch.tensor(losses).device.type == "cpu"
    assert torch.tensor([losses, [0.0, 1.0]], device="cuda").tolist() == [[1.5, 2.5], [0.0, 1.0]]
    assert torch.tensor([1, 2], device="cuda").dtype is torch.int64


def test_a_checkpoint_under_another_name(tmp_path: Path, h100: SimulatedDevice) -> None:
    """As programs save: under one name, which is then renamed, and the last one deleted."""
    weights = nn.Linear(8, 8).cuda().state_dict()
    temporary, path = str(tmp_path / "new.tmp"), tmp_path / "new.pt"
    torch.save(weights, temporary)
    assert os.path.exists(temporary)
    assert os.path.getsize(temporary) > (64 + 8) * 4
    os.replace(temporary, path)
    assert not os.path.exists(temporary)
    assert torch.load(path)["weight"].is_cuda
    os.remove(path)
    with pytest.raises(FileNotFoundError):
        torch.load(path)
    assert list(tmp_path.iterdir()) == []
    real = tmp_path / "real.txt"
    real.write_text("x")
    os.replace(real, tmp_path / "other.txt")
    assert (tmp_path / "other.txt").read_text() == "x"


def test_copies_of_what_nobody_computed_are_not_written(tmp_path: Path, h100: SimulatedDevice) -> None:
    path = tmp_path / "adapter.pt"
    path.write_bytes(b"precious")
    weights = {name: tensor.cpu() for name, tensor in nn.Linear(64, 64).cuda().state_dict().items()}
    torch.save(weights, path)
    assert path.read_bytes() == b"precious"
    assert torch.load(path)["weight"].device.type == "cpu"
    torch.save({"ids": torch.arange(3, device="cuda").cpu()}, tmp_path / "ids.pt")
    assert (tmp_path / "ids.pt").exists(), "what is known is written"


def test_safetensors(tmp_path: Path, h100: SimulatedDevice) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"precious")
    safetensors.save_file(nn.Linear(8, 8).cuda().state_dict(), path)
    assert path.read_bytes() == b"precious"
    assert safetensors.load_file(path, device="cuda")["weight"].is_cuda
    real = tmp_path / "real.safetensors"
    safetensors.save_file({"x": torch.arange(3)}, real)
    assert safetensors.load_file(real)["x"].tolist() == [0, 1, 2]
    assert safetensors.load_file(real, device="cuda")["x"].tolist() == [0, 1, 2]
    with pytest.raises(SimulationError, match="save_file"):
        safetensors.save({"x": torch.ones(3, device="cuda")})


def test_what_was_compiled_before_runs_eagerly() -> None:
    function = torch.compile(lambda x: x.sin() + 1)
    before = torch._dynamo.config.disable
    with tl.simulate("h100-sxm"):
        assert function(torch.ones(3, device="cuda")).is_cuda
    assert torch._dynamo.config.disable is before


def test_export_is_refused(h100: SimulatedDevice) -> None:
    with pytest.raises(SimulationError, match=r"torch\.export"):
        torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),))


def test_function_transforms_see_the_device(h100: SimulatedDevice) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        assert x.is_cuda
        assert x.new_zeros(()).device == torch.zeros_like(x).device == torch.device("cuda", 0)
        assert torch.zeros(3, device=x.device).is_cuda
        assert y.sum().to(x).is_cuda
        return nn.functional.cross_entropy(x[None], y[None])

    x, y = torch.randn(10, 4, device="cuda"), torch.zeros(10, dtype=torch.int64, device="cuda")
    gradients = torch.func.vmap(torch.func.grad(function))(x, y)
    assert gradients.shape == (10, 4)
    assert gradients.is_cuda
