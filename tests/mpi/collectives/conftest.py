"""What the tests of collectives share."""

from __future__ import annotations

import pytest

from dearmpi.comm.api.collectives import Collectives
from dearmpi.comm.progress.channel import Channel
from dearmpi.comm.world import World


@pytest.fixture(scope="module")
def channels(world: World) -> list[Channel]:
    """Two channels, as the engine has them."""
    return [world.open_channel(name, window=4) for name in ("rs", "ag")]


@pytest.fixture
def collectives() -> Collectives:
    """A communicator of the test's own, which the test drives itself."""
    from dearmpi.comm.backends import mpi

    if not mpi.supports_threads():
        pytest.skip("a second driver needs MPI_THREAD_MULTIPLE")
    return mpi.connect()
