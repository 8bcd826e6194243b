"""What tests without MPI share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from dearmpi.comm.world import World


@pytest.fixture
def alone() -> Iterator[World]:
    """A world of one; torch has as many threads afterwards as before."""
    import torch

    from dearmpi.comm.backends.alone import AloneCollectives
    from dearmpi.comm.world import World

    num_threads = torch.get_num_threads()
    world = World(AloneCollectives(), progress="poll")
    yield world
    world.close()
    torch.set_num_threads(num_threads)
