"""What the tests of the simulation share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import torchledger as tl
from torchledger.simulation.device import SimulatedDevice


@pytest.fixture
def h100() -> Iterator[SimulatedDevice]:
    """A simulated H100."""
    with tl.simulate("h100-sxm") as device:
        yield device
