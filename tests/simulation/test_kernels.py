"""What a CUDA device does otherwise than a CPU: autocast, attention, dropout, norms, products."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchledger as tl
from torchledger import internals
from torchledger.simulation import attention, autocast
from torchledger.simulation.device import SimulatedDevice
from torchledger.simulation.facts import Versions, torch_version


class Ops(TorchDispatchMode):
    """The names of the ops that a block dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


def requested() -> int:
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


# Autocast


def test_every_autocast_op_of_the_installed_torch_has_a_policy() -> None:
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    every = [name for name in names if internals.has_kernel_for_key(name, "AutocastCUDA")]
    every = [name for name in every if "imname" not in name and "names" not in name]  # of named dimensions
    assert sorted(op.name() for op in autocast.cuda_autocast_ops()) == sorted(every)
    assert len(every) > 100


def test_policies_exclude_one_another() -> None:
    lists = [
        autocast.LOWER_PRECISION,
        autocast.FLOAT32,
        autocast.FLOAT32_RESULT,
        autocast.APPENDED_DTYPE,
        autocast.WIDEST,
    ]
    assert len(frozenset().union(*lists)) == sum(map(len, lists))


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda x: x @ x, torch.bfloat16),
        (lambda x: F.linear(x, x, x[0]), torch.bfloat16),
        (lambda x: torch.einsum("ij,jk->ik", x, x), torch.bfloat16),
        (lambda x: F.conv1d(x[None], x[:, :, None]), torch.bfloat16),
        (F.gelu, torch.float32),
        (lambda x: F.gelu(x.bfloat16()), torch.bfloat16),
        (lambda x: F.softmax(x.bfloat16(), -1), torch.float32),
        (lambda x: x.bfloat16().sum(), torch.float32),
        (lambda x: x.bfloat16().exp(), torch.float32),
        (lambda x: F.layer_norm(x.bfloat16(), (8,)), torch.float32),
        (lambda x: F.mse_loss(x.bfloat16(), x.bfloat16()), torch.float32),
        (lambda x: F.cross_entropy(x.bfloat16(), torch.zeros(8, dtype=torch.long, device="cuda")), torch.float32),
        (lambda x: torch.norm(x.bfloat16()), torch.float32),
        (lambda x: torch.addcmul(x, x.bfloat16(), x.bfloat16()), torch.float32),
        (lambda x: torch.dot(x[0].bfloat16(), x[0].bfloat16()), torch.bfloat16),
        (lambda x: x.double() @ x.double(), torch.float64),
        (lambda x: x + x.bfloat16(), torch.float32),
    ],
)
def test_autocast_gives_the_dtypes_of_cuda(function: Any, dtype: torch.dtype, h100: SimulatedDevice) -> None:
    with torch.autocast("cuda", torch.bfloat16):
        assert function(torch.ones(8, 8, device="cuda")).dtype is dtype
    assert torch.ones(2, 2, device="cuda").matmul(torch.ones(2, 2, device="cuda")).dtype is torch.float32


def test_autocast_leaves_the_host_alone_and_knows_its_limits(h100: SimulatedDevice) -> None:
    with torch.autocast("cuda", torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
        with torch.autocast("cuda", enabled=False):
            x = torch.ones(2, 2, device="cuda")
            assert (x @ x).dtype is torch.float32
        assert (x @ x).dtype is torch.bfloat16
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(x.sigmoid(), x)
    with torch.autocast("cuda"):
        assert (x @ x).dtype is torch.float16


def test_weights_are_cast_once_and_forgotten(h100: SimulatedDevice) -> None:
    # pytorch#48049: 131,072 bytes of autocast copies, once.
    h100.workspace_bytes = 0
    model = nn.Linear(256, 256, bias=False).cuda()
    x = torch.ones(8, 256, device="cuda")
    before = requested()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        model(x)  # nothing is cached without a graph
    assert requested() == before
    with torch.autocast("cuda", torch.bfloat16):
        one = model(x)
        assert requested() - before == 131_072 + 4096 + 4096  # the weight, the input that is saved, the output
        two = model(x)
        assert requested() - before == 131_072 + 2 * (4096 + 4096)
    del one, two
    assert requested() == before


def test_gradient_scaling(h100: SimulatedDevice) -> None:
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=2)
    scales = []
    for _ in range(4):
        with torch.autocast("cuda", torch.float16):
            loss = model(torch.ones(2, 8, device="cuda")).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales == [1024, 2048, 2048, 4096]  # the scale is a true value: no gradient is infinite
    assert len(optimizer.state) == 2


# Attention


def params(
    shape: tuple[int, ...] = (2, 4, 128, 64), dtype: torch.dtype = torch.bfloat16, kv_heads: int | None = None,
    **options: Any,
) -> attention.Params:  # fmt: skip
    q = torch.empty(shape, dtype=dtype, device="meta")
    kv = q if kv_heads is None else torch.empty(shape[0], kv_heads, *shape[2:], dtype=dtype, device="meta")
    defaults = {"mask": None, "dropout": 0.0, "is_causal": True, "gqa": False}
    return attention.Params(q, kv, kv, **(defaults | options))


MASK = torch.empty(128, 128, dtype=torch.bfloat16, device="meta")
OLD_CUDNN, NEW_CUDNN = Versions("12.8", "9.10.2", "12.8.4"), Versions("13.0", "9.24.0", "13.1.0")


@pytest.mark.parametrize(
    ("accelerator", "versions", "call", "backend"),
    [
        ("h100-sxm", OLD_CUDNN, params(), attention.FLASH),
        ("h100-sxm", NEW_CUDNN, params(), attention.CUDNN),
        ("b200", NEW_CUDNN, params(), attention.CUDNN),
        ("a100-sxm", NEW_CUDNN, params(), attention.FLASH),
        ("rtx-4090", NEW_CUDNN, params(), attention.FLASH),
        ("rtx-5090", NEW_CUDNN, params(), attention.FLASH),
        ("h100-sxm", NEW_CUDNN, params(dtype=torch.float32), attention.EFFICIENT),
        ("h100-sxm", OLD_CUDNN, params(dtype=torch.float32), attention.EFFICIENT),
        ("t4", OLD_CUDNN, params(dtype=torch.float16), attention.EFFICIENT),
        ("t4", OLD_CUDNN, params(), attention.MATH),
        ("a100-sxm", OLD_CUDNN, params(dtype=torch.float64), attention.MATH),
        ("a100-sxm", OLD_CUDNN, params((2, 4, 128, 20)), attention.FLASH),
        ("a100-sxm", OLD_CUDNN, params((2, 4, 128, 512)), attention.EFFICIENT),
        ("a100-sxm", OLD_CUDNN, params((2, 4, 128, 30), torch.float32), attention.MATH),
        ("h100-sxm", NEW_CUDNN, params((2, 4, 128, 100)), attention.FLASH),
        ("h100-sxm", NEW_CUDNN, params(dropout=0.1), attention.FLASH),
        ("h100-sxm", NEW_CUDNN, params(dropout=0.125), attention.CUDNN),
        ("a100-sxm", OLD_CUDNN, params(kv_heads=2, gqa=True), attention.FLASH),
        ("a100-sxm", OLD_CUDNN, params(kv_heads=2), attention.MATH),
        ("a100-sxm", OLD_CUDNN, params(mask=MASK, is_causal=False),
         attention.EFFICIENT),
        ("h100-sxm", NEW_CUDNN, params(mask=MASK, is_causal=False),
         attention.CUDNN),
    ],
)  # fmt: skip
def test_the_backend_that_cuda_takes(
    accelerator: str, versions: Versions, call: attention.Params, backend: int
) -> None:
    with tl.simulate(accelerator) as device:
        device.versions = versions
        assert attention.choose_backend(device, call) == backend


def test_backends_that_are_turned_off(h100: SimulatedDevice) -> None:
    h100.versions = OLD_CUDNN
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert attention.choose_backend(h100, params()) == attention.MATH
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        assert attention.choose_backend(h100, params()) == attention.CUDNN
        with pytest.raises(RuntimeError, match="No available kernel"):
            attention.choose_backend(h100, params(dtype=torch.float32))


@pytest.mark.parametrize(
    ("dtype", "versions", "op", "extra"),
    [
        # flash: the output, fp32 log-sum-exp, and the random state on the device: uint64 [2] and one more
        (torch.bfloat16, OLD_CUDNN, "aten._scaled_dot_product_flash_attention", 2 * 4 * 100 * 4 + 16 + 8),
        # efficient: log-sum-exp padded to 32 rows; its random state lies on the host
        (torch.float32, OLD_CUDNN, "aten._scaled_dot_product_efficient_attention", 2 * 4 * 128 * 4),
        (torch.bfloat16, NEW_CUDNN, "aten._scaled_dot_product_cudnn_attention", 2 * 4 * 100 * 4 + 8 + 8),
    ],
)
def test_what_attention_saves(
    dtype: torch.dtype, versions: Versions, op: str, extra: int, h100: SimulatedDevice
) -> None:
    h100.versions = versions
    qkv = [torch.ones(2, 4, 100, 64, dtype=dtype, device="cuda", requires_grad=True) for _ in range(3)]
    before = requested()
    with Ops() as ops:
        out = F.scaled_dot_product_attention(*qkv, is_causal=True)
    assert op in ops.names
    assert requested() - before == out.numel() * out.element_size() + extra
    out.sum().backward()
    assert all(t.grad is not None and t.grad.shape == t.shape for t in qkv)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_what_flash_attention_takes_inside_its_backward(kv_heads: int, h100: SimulatedDevice) -> None:
    h100.versions = OLD_CUDNN
    q = torch.ones(2, 4, 100, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    kv = torch.ones(2, kv_heads, 100, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    out = F.scaled_dot_product_attention(q, kv, kv.detach(), enable_gqa=True)
    gradient = torch.ones_like(out)
    torch.cuda.reset_peak_memory_stats()
    before = requested()
    out.backward(gradient)
    delta, sums = 2 * 4 * 128 * 4, 2 * 4 * 128 * 64 * 4
    expanded = 0 if kv_heads == 4 else 2 * (2 * 100 * 4 * 64 * 2)
    gradients = q.nbytes + 2 * kv.nbytes
    assert torch.cuda.memory_stats()["requested_bytes.all.peak"] - before == gradients + delta + sums + expanded


def test_math_attention_adds_its_mask_in_place(h100: SimulatedDevice) -> None:
    q = torch.ones(1, 1, 64, 30, device="cuda")
    mask = torch.zeros(64, 64, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = requested()
    h100.workspace_bytes = 0
    F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    scaled, scores = 64 * 30 * 4, 64 * 64 * 4
    # The scaled query, the scores and their softmax: never a second copy of the scores for the mask.
    assert torch.cuda.memory_stats()["requested_bytes.all.peak"] - before == scaled + 2 * scores


# Dropout, softmax, norms


def test_dropout_keeps_a_mask_of_bools(h100: SimulatedDevice) -> None:
    x = torch.ones(1000, device="cuda", requires_grad=True)
    before = requested()
    out = F.dropout(x, 0.5)
    assert requested() - before == 4000 + 1000
    out.sum().backward()
    assert F.dropout(x, 0.5, training=False) is x
    cpu = torch.ones(1000, requires_grad=True)
    with Ops() as ops:
        F.dropout(cpu, 0.5)
    assert "aten.native_dropout" not in ops.names


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_softmax_reads_half_precision_and_writes_float32(dtype: torch.dtype, h100: SimulatedDevice) -> None:
    if dtype is torch.bfloat16 and torch_version() < (2, 13):
        pytest.skip("this torch converts bfloat16 first")
    x = torch.ones(10, 100, dtype=dtype, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = requested()
    with Ops() as ops:
        out = F.softmax(x, -1, dtype=torch.float32)
    assert ops.names == ["aten._softmax"]
    assert out.dtype is torch.float32
    assert torch.cuda.memory_stats()["requested_bytes.all.peak"] - before == 4000  # no float32 copy of x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_keep_float32_statistics(dtype: torch.dtype, h100: SimulatedDevice) -> None:
    x = torch.ones(10, 64, dtype=dtype, device="cuda", requires_grad=True)
    weight, bias = (torch.ones(64, dtype=dtype, device="cuda", requires_grad=True) for _ in range(2))
    out_bytes = x.numel() * x.element_size()
    before = requested()
    out = F.layer_norm(x, (64,), weight, bias)
    assert requested() - before == out_bytes + 10 * 8  # mean and reciprocal deviation
    out.sum().backward()
    del out
    x.grad = weight.grad = bias.grad = None
    assert requested() == before
    out = F.rms_norm(x, (64,), weight)
    assert requested() - before == out_bytes + 10 * 4  # only the reciprocal deviation
    out.sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert weight.grad.shape == (64,)


def test_silu_backward_is_one_kernel(h100: SimulatedDevice) -> None:
    x = torch.ones(10, device="cuda", requires_grad=True)
    with Ops() as ops:
        F.silu(x).sum().backward()
    assert "aten.silu_backward" in ops.names
    assert "aten.sigmoid" not in ops.names


@pytest.mark.parametrize(
    ("shape", "dtype", "op"),
    [
        ((2, 3, 4, 4), torch.float32, "aten.cudnn_batch_norm"),
        ((2, 3, 4, 4), torch.bfloat16, "aten.native_batch_norm"),
        ((2, 3), torch.float32, "aten.native_batch_norm"),
    ],
)
def test_batch_norm(shape: Any, dtype: torch.dtype, op: str, h100: SimulatedDevice) -> None:
    model = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(3).cuda().to(dtype)
    x = torch.ones(shape, dtype=dtype, device="cuda", requires_grad=True)
    before = requested()
    with Ops() as ops:
        out = model(x)
    assert op in ops.names
    saved = 2 * 3 * (4 if op == "aten.cudnn_batch_norm" or dtype is torch.float32 else out.element_size())
    assert requested() - before in (out.numel() * out.element_size() + saved, out.numel() * out.element_size() + 24)
    out.sum().backward()
    model.eval()
    model(x).sum().backward()


# Products


@pytest.mark.parametrize(("accelerator", "nbytes"), [("h100-sxm", 33_554_432), ("a100-sxm", 8_519_680)])
def test_workspaces_by_thread_and_stream(accelerator: str, nbytes: int) -> None:
    with tl.simulate(accelerator) as device:
        x = torch.ones(64, 64, device="cuda", requires_grad=True)
        before = requested()
        out = x @ x
        assert requested() - before == out.nbytes + nbytes == out.nbytes + device.hidden_bytes
        out.backward(torch.ones_like(out))
        assert device.hidden_bytes == 2 * nbytes
        with torch.cuda.stream(torch.cuda.Stream()):
            x.detach() @ x.detach()
        assert device.hidden_bytes == 3 * nbytes
        torch._C._cuda_clearCublasWorkspaces()
        assert device.hidden_bytes == 0


def test_the_workspace_comes_after_the_output(h100: SimulatedDevice) -> None:
    x = torch.ones(64, 64, device="cuda")
    out = x @ x
    workspace = next(iter(h100._workspaces.values()))
    assert x.data_ptr() < out.data_ptr() < workspace


@pytest.mark.parametrize(
    ("left", "right", "copied"),
    [
        (lambda: torch.ones(64, 64, device="cuda"), lambda: torch.ones(64, 64, device="cuda").t(), 0),
        (lambda: torch.ones(1, 1, device="cuda").expand(64, 64), lambda: torch.ones(64, 64, device="cuda"),
         64 * 64 * 4),
        (lambda: torch.ones(64, 128, device="cuda")[:, :64], lambda: torch.ones(64, 64, device="cuda"), 0),
        (lambda: torch.ones(64, 128, device="cuda")[:, ::2], lambda: torch.ones(64, 64, device="cuda"), 64 * 64 * 4),
        (lambda: torch.ones(8, 64, 64, device="cuda"), lambda: torch.ones(8, 64, 64, device="cuda").mT, 0),
        (lambda: torch.ones(8, 1, 1, device="cuda").expand(8, 64, 64), lambda: torch.ones(8, 64, 64, device="cuda"),
         8 * 64 * 64 * 4),
    ],
)  # fmt: skip
def test_copies_inside_products(left: Any, right: Any, copied: int, h100: SimulatedDevice) -> None:
    a, b = left(), right()
    h100.workspace_bytes = 0
    torch.cuda.reset_peak_memory_stats()
    before = requested()
    out = a @ b
    assert requested() - before == out.nbytes
    assert torch.cuda.memory_stats()["requested_bytes.all.peak"] - before == out.nbytes + copied


def test_an_expanded_gradient_is_copied_in_each_product_and_the_ledger_says_so(h100: SimulatedDevice) -> None:
    model = nn.Linear(256, 256, bias=False).cuda()
    x = torch.ones(1024, 256, device="cuda", requires_grad=True)
    with tl.Ledger(model) as ledger:
        model(x).sum().backward()
    memory = ledger.report.steps[0].memory["cuda:0"]
    assert memory.peak.unexplained == 0
    copy = 1024 * 256 * 4
    stats = torch.cuda.memory_stats()
    assert memory.requested_peak_bytes == stats["requested_bytes.all.peak"]
    assert memory.peak.workspace in (2 * 33_554_432, 2 * 33_554_432 + copy)
    weight, inputs, gradient = 256 * 256 * 4, x.nbytes, 256 * 256 * 4
    # At the second product: both workspaces, the copy, the input gradient or the weight's, whatever came first.
    assert memory.requested_peak_bytes == weight + inputs + 8 + 2 * 33_554_432 + copy + gradient + x.nbytes


def test_matmul_of_broadcast_batches(h100: SimulatedDevice) -> None:
    # pytorch#154128: output 5,120 and a temporary of 51,200
    h100.workspace_bytes = 0
    a, b = torch.ones(8, 16, 1, 10, device="cuda"), torch.ones(16, 10, 10, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = requested()
    out = a @ b
    assert requested() - before == out.nbytes == 5_120
    assert torch.cuda.memory_stats()["requested_bytes.all.peak"] - before == 5_120 + 51_200


def test_inference_mode_chooses_the_same_kernels(h100: SimulatedDevice) -> None:
    x = torch.ones(2, 4, 64, 64, device="cuda", dtype=torch.float16)
    with torch.inference_mode():
        y = x * 1
        with Ops() as ops:
            F.scaled_dot_product_attention(y, y, y)
            F.linear(y, y[0, 0], y[0, 0, 0])
    assert any("attention" in name and "math" not in name for name in ops.names)
    assert math.prod(y.shape) * 2 == y.nbytes
