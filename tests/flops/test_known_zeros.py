"""Each aten op that looks like a product has a formula, is a composition of ops that have, or is known to be none."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

from torchledger.flops.registry import is_true_composite, lookup
from torchledger.flops.rules import ENTRIES
from torchledger.flops.zeros import KNOWN_ZERO, UNCOUNTED

PRODUCT_NAME = re.compile(
    r"mm(_|$|\d)|mv(_|$)|matmul|gemm|(^|_)v?dot(_|$)|(^|_)ger(_|$)|addr|outer|inner|kron|einsum|tensordot|linear"
    r"|conv|atten|sdp|transformer|head|(^|_)(lstm|gru|rnn)|bilinear|trilinear|dist(_|$)|euclid|grid_gen"
    r"|linalg|cholesky|(^|_)lu(_|$)|qr(_|$|f)|svd|eig|solve|inv(erse|_|$)|det(_|$)|lstsq|householder|matrix|polar"
    r"|sqrth|ldl|fft|stft|(^|_)cov(_|$)|corr"
)
MULTIPLIED_ARGUMENT = re.compile(
    r"Tensor\??(\(\w!?\))?(\[\])? (mat\w*|vec\d?|batch[12]|query|key|hx|w_ih|w_hh|weights?|packed_weights?|theta)\b"
)


def suspicious_ops() -> Iterator[torch._ops.OpOverload]:
    """All overloads of the installed aten whose name or arguments say that something is multiplied."""
    for qualified in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, rest = qualified.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace != "aten":
            continue
        try:
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        except AttributeError:  # not callable from Python
            continue
        if PRODUCT_NAME.search(packet) or MULTIPLIED_ARGUMENT.search(str(op._schema)):
            yield op


def test_every_op_that_looks_like_a_product_is_settled() -> None:
    ops = list(suspicious_ops())
    assert len(ops) > 400
    unsettled = {
        lookup(op).name
        for op in ops
        if lookup(op).formula is None and not lookup(op).uncounted and not is_true_composite(op)
    } - set(KNOWN_ZERO)
    assert not unsettled, f"give these a formula, or a reason in zeros.py: {sorted(unsettled)}"


def test_the_walk_notices_a_missing_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("aten.mv", "aten._cudnn_rnn", "aten._slow_conv2d_backward", "aten._fft_c2c", "aten._linalg_eigh"):
        monkeypatch.delitem(ENTRIES, name)
        with pytest.raises(AssertionError, match=name):
            test_every_op_that_looks_like_a_product_is_settled()
        monkeypatch.undo()


def test_known_zeros_have_no_formula_and_a_reason() -> None:
    assert not set(KNOWN_ZERO) & set(ENTRIES)
    assert not set(KNOWN_ZERO) & set(UNCOUNTED)
    assert not set(UNCOUNTED) & set(ENTRIES)
    assert all(KNOWN_ZERO.values())
    assert all(UNCOUNTED.values())


def test_known_zeros_are_neither_counted_nor_uncounted() -> None:
    for op in (torch.ops.aten.embedding.default, torch.ops.aten._fused_sdp_choice.default, torch.ops.aten.relu.default):
        assert lookup(op) == (f"aten.{op._schema.name[6:]}", None, False, ())


def test_products_without_a_formula_are_uncounted() -> None:
    assert lookup(torch.ops.aten._spsolve.default).uncounted
    assert lookup(torch.ops.aten._cslt_sparse_mm_search.default).uncounted


@pytest.mark.parametrize("namespace", ["prims", "profiler", "rngprims", "quantized", "mkldnn", "inductor"])
def test_bookkeeping_namespaces_are_known(namespace: str) -> None:
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{namespace}::")]
    assert names
    for name in names:
        packet, _, overload = name.partition("::")[2].partition(".")
        try:
            op = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
        except AttributeError:
            continue
        assert lookup(op).uncounted == (lookup(op).name in UNCOUNTED)


def test_products_in_other_namespaces_have_formulas() -> None:
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet = rest.partition(".")[0]
        if namespace not in ("quantized", "_quantized", "onednn", "mkldnn", "mkl", "inductor", "sparse"):
            continue
        bookkeeping = re.search(
            r"pack|stride|padding|dilation|groups|transpose$|reorder|convert|is_mkldnn|_run", packet
        )
        if re.search(r"linear|conv|_mm|matmul|cell_dyn", packet) and not (bookkeeping and "prepacked" not in packet):
            assert f"{namespace}.{packet}" in ENTRIES, name
