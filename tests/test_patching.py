"""What is replaced is put back, in any order of events. Oracle: the owner's own dictionary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchledger as tl
from left_as_found import torch_state
from torchledger.patching import Patches


class Base:
    inherited = "inherited"


class Owner(Base):
    own = "own"


def test_own_and_inherited_names_are_put_back() -> None:
    before = dict(vars(Owner))
    patches = Patches()
    patches.replace(Owner, "own", "ours")
    patches.replace(Owner, "inherited", "ours")
    patches.replace(Owner, "own", "ours again")
    assert (Owner.own, Owner.inherited) == ("ours again", "ours")
    patches.restore()
    patches.restore()
    assert dict(vars(Owner)) == before
    assert Owner.inherited == "inherited"


def test_a_later_patch_of_somebody_else_is_left_alone() -> None:
    class Patched:
        own = "own"

    patches = Patches()
    patches.replace(Patched, "own", "ours")
    Patched.own = "theirs"
    patches.restore()
    assert Patched.own == "theirs"


class Interrupting:
    """An owner whose n-th write raises, before or after it is made."""

    def __init__(self, at: int, after: bool) -> None:
        self.__dict__.update(a=1, b=2, at=at, after=after, n=0)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__["n"] += 1
        hit = self.__dict__["n"] == self.__dict__["at"]
        if hit and not self.__dict__["after"]:
            raise KeyboardInterrupt
        self.__dict__[name] = value
        if hit:
            raise KeyboardInterrupt


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", range(1, 6))
def test_an_interrupt_at_any_write(at: int, after: bool) -> None:
    owner, patches, done = Interrupting(at, after), Patches(), []
    patches.on_restore(lambda: done.append("last"))
    interrupted = False
    for act in (
        lambda: patches.replace(owner, "a", 10),
        lambda: patches.replace(owner, "b", 20),
        patches.restore,
        patches.restore,
    ):
        try:
            act()
        except KeyboardInterrupt:
            interrupted = True
    assert interrupted is (at <= 4)
    assert (owner.a, owner.b) == (1, 2)  # type: ignore[attr-defined]
    assert done == ["last"]


def test_what_fails_is_raised_after_the_rest() -> None:
    patches = Patches()
    done: list[str] = []

    def fail() -> None:
        raise ValueError("no")

    patches.on_restore(lambda: done.append("first"))
    patches.on_restore(fail)
    patches.replace(Owner, "own", "ours")
    with pytest.raises(ValueError, match="no"):
        patches.restore()
    assert (done, Owner.own) == (["first"], "own")
    patches.restore()


PLACES = [
    (nn.Module, "__call__"),
    (torch.autograd, "_engine_run_backward"),
    (torch.UntypedStorage, "resize_"),
]


@pytest.mark.parametrize(("owner", "name"), PLACES, ids=[name for _, name in PLACES])
def test_a_tool_that_patches_what_a_ledger_patched(owner: Any, name: str) -> None:
    before = torch_state()
    inherited = name not in vars(owner)
    original = getattr(owner, name)
    model = nn.Linear(8, 8)
    ledger = tl.Ledger(model)
    ledger.__enter__()
    ours = getattr(owner, name)
    assert ours is not original

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    setattr(owner, name, theirs)
    ledger.__exit__(None, None, None)
    try:
        assert getattr(owner, name) is theirs
        # Ours, below it, does nothing any more, also while another ledger records.
        with tl.Ledger(model) as again:
            for _ in range(2):
                model(torch.ones(4, 8)).sum().backward()
            storage = torch.zeros(4).untyped_storage()
            storage.resize_(4000)
            assert again._recorder is not None
            assert again._recorder.n_runs == 2
        assert getattr(owner, name) is theirs
        assert again.report.flops.total == 2 * 2 * (2 * 4 * 8 * 8)
        assert again.report.faults == ()
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
    assert torch_state() == before


class Mode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += 1
        return func(*args, **(kwargs or {}))


def test_modes_that_were_entered_after_a_ledger_stay_when_it_leaves() -> None:
    before = torch_state()
    below, above, top = Mode(), Mode(), Mode()
    ledger = tl.Ledger()
    below.__enter__()
    ledger.__enter__()
    above.__enter__()
    top.__enter__()
    ledger.__exit__(None, None, None)
    assert torch_state()["modes"] == [below, above, top]
    torch.ones(2) + 1
    assert below.n == above.n == top.n > 0
    top.__exit__(None, None, None)
    above.__exit__(None, None, None)
    assert torch_state()["flags"] == [True, True, True]
    below.__exit__(None, None, None)
    assert torch_state() == before


def test_a_mode_below_and_above_a_ledger() -> None:
    before = torch_state()
    mode, ledger = Mode(), tl.Ledger()
    with mode:
        ledger.__enter__()
        mode.__enter__()
        ledger.__exit__(None, None, None)
        assert torch_state()["modes"] == [mode, mode]
        mode.__exit__(None, None, None)
    assert torch_state() == before
