"""The model against torch's own allocator: on what it gave once, and, where a CUDA build of torch is at hand, again."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from allocator.random_calls import CASES, N_CALLS, Case, digest, in_one_order, make_calls, run_on_model
from allocator.recorded import DIGESTS

MIB = 1 << 20


def name_case(case: Case) -> str:
    conf, capacity, fraction, streams, seed = case
    return f"{conf or 'default'}-{capacity}MiB-{fraction}-{len(streams)}streams-{seed}"


def run_case(case: Case) -> list[str]:
    conf, capacity, fraction, streams, seed = case
    return run_on_model(make_calls(seed, N_CALLS, streams), conf, capacity * MIB, fraction)


@pytest.mark.parametrize("case", CASES, ids=name_case)
def test_does_what_torch_was_seen_to_do(case: Case) -> None:
    """Each event, address and statistic of 800 calls, as torch 2.14.1 gave them."""
    assert digest(run_case(case)) == DIGESTS[name_case(case)]


def find_site_packages() -> Path:
    """Where a CUDA build of torch and the headers of CUDA lie; TORCHLEDGER_CUDA_SITE names another place."""
    named = os.environ.get("TORCHLEDGER_CUDA_SITE")
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(named) if named else Path(spec.origin).parents[1]


@pytest.fixture(scope="module")
def real_allocator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of real_allocator.cpp."""
    site = find_site_packages()
    library = site / "torch" / "lib"
    headers = [found.parent for found in sorted(site.glob("nvidia/*/include/cuda_runtime_api.h"))]
    compiler = shutil.which("g++")
    if not (library / "libc10_cuda.so").exists() or not headers or compiler is None:
        pytest.skip("there is no CUDA build of torch here, or no compiler")
    # Only the API is needed: the full header of the CUDA runtime wants a CUDA compiler's own headers.
    folder = tmp_path_factory.mktemp("real")
    (folder / "cuda_runtime.h").write_text("#include <cuda_runtime_api.h>\n", "utf-8")
    include = [folder, site / "torch" / "include", *headers, site / "triton" / "backends" / "nvidia" / "include"]
    program = folder / "real_allocator"
    command = [compiler, "-O1", "-std=c++20", "-w", "-rdynamic", str(Path(__file__).with_name("real_allocator.cpp"))]
    command += [f"-I{path}" for path in include]
    command += [f"-L{library}", "-lc10_cuda", "-lc10", "-Wl,--unresolved-symbols=ignore-in-shared-libs"]
    command += [f"-Wl,-rpath,{path}" for path in (library, *(header.parent / "lib" for header in headers))]
    built = subprocess.run([*command, "-o", str(program)], capture_output=True, text=True, check=False)
    if built.returncode:  # its headers are those of another version
        pytest.skip(f"it does not build against this torch: {built.stderr.strip()[:200]}")
    return program


def ask_torch(program: Path, case: Case) -> list[str]:
    conf, capacity, fraction, streams, seed = case
    calls = make_calls(seed, N_CALLS, streams)
    done = subprocess.run(
        [str(program), str(capacity * MIB), *([] if fraction is None else [str(fraction)])],
        input="".join(f"{action} {first} {second}\n" for action, first, second in calls),
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": conf, "PYTORCH_ALLOC_CONF": conf},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[:500]
    return done.stdout.splitlines()


@pytest.mark.parametrize("case", CASES, ids=name_case)
def test_does_what_torch_does(case: Case, real_allocator: Path) -> None:
    assert in_one_order(run_case(case)) == in_one_order(ask_torch(real_allocator, case))
