"""AOTInductor: packages and generated C++ are named, since no dispatch shows what they run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchledger as tl

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> str:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).eval()
    with torch.no_grad():
        exported = torch.export.export(model, (torch.ones(32, 64),))
        path = tmp_path_factory.mktemp("packages") / "mlp.pt2"
        return torch._inductor.aoti_compile_and_package(exported, package_path=str(path))


def test_a_package_is_uncounted_by_name(package: str, tmp_path: Path) -> None:
    early = torch._inductor.aoti_load_package(package)
    x = torch.ones(32, 64)
    with tl.Ledger() as ledger, torch.no_grad():
        late = torch._inductor.aoti_load_package(package)
        kept = [early(x), late(x), late(x)]
    report = ledger.report
    assert (report.flops.total, report.flops.uncounted) == (0, {"aoti.package": 1, "aoti.mlp": 2})
    assert any(line.startswith("aoti.mlp ran 2 times") for line in report.blind_spots)
    memory = report.steps[-1].memory["cpu"]
    assert memory.end.total_bytes == sum(t.nbytes for t in kept)
    assert memory.notes  # what it allocates inside itself is unknown
    assert any("aoti.mlp" in line for line in str(report).splitlines())
    report.save(tmp_path / "report.json")
    assert tl.Report.load(tmp_path / "report.json").blind_spots == report.blind_spots
    assert report.faults == ()


def test_strict_refuses_a_package(package: str) -> None:
    model = torch._inductor.aoti_load_package(package)
    with pytest.raises(tl.UncountedOpError, match=r"aoti\.package"), tl.Ledger(strict=True), torch.no_grad():
        model(torch.ones(32, 64))


def test_a_package_inside_a_module(package: str) -> None:
    body, head = torch._inductor.aoti_load_package(package), nn.Linear(64, 4)

    class Whole(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return head(body(x))

    with tl.Ledger() as ledger:
        Whole()(torch.ones(32, 64)).sum().backward()
    assert ledger.report.flops.total == 2 * 2 * 32 * 64 * 4
    assert ledger.report.flops.uncounted == {"aoti.package": 1}


def test_products_of_generated_cpp_are_named() -> None:
    import torch._inductor.config

    torch._dynamo.reset()
    with torch._inductor.config.patch(cpp_wrapper=True):  # torch's own: it hides what a fixture would put back
        model: Any = torch.compile(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)))
        for _ in range(2):  # cold and warm
            with tl.Ledger() as ledger:
                model(torch.ones(32, 64)).sum().backward()
            flops = ledger.report.flops
            named = sum(n for name, n in flops.uncounted.items() if name.startswith("inductor."))
            assert not any("child process" in line for line in ledger.report.blind_spots)  # a compiler's are not told
            assert (flops.total, named) == (0, 5)  # two forward, two weight gradients and an input gradient
        with pytest.raises(tl.UncountedOpError), tl.Ledger(strict=True):
            model(torch.ones(32, 64))
    torch._dynamo.reset()


def test_nothing_of_ours_stays_in_packages() -> None:
    kinds = [kind for name, kind in vars(torch._C._aoti).items() if name.startswith("AOTIModel")]
    before = [dict(vars(kind)) for kind in kinds]
    with tl.Ledger():
        pass
    assert [dict(vars(kind)) for kind in kinds] == before
    assert kinds
