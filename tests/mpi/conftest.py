"""What the tests that run on all ranks share."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

import dearmpi
from dearmpi.comm.watchdog.watchdog import StallLimits
from dearmpi.comm.world import World
from tests.roster import launched_size


@pytest.fixture(scope="session")
def world() -> World:
    """The world of this job: all ranks that the launcher started, or this process alone."""
    # Before the limit of a test, so that a wait in vain says who waits for what.
    world = dearmpi.connect(stall_limits=StallLimits(30.0, 90.0))
    assert world.size == launched_size(), (
        f"{launched_size()} ranks were launched, but the world has {world.size}: "
        "mpiexec and mpi4py's library do not belong together"
    )
    return world


@pytest.fixture(scope="module", autouse=True)
def _left_over() -> None:
    """Collections of garbage in a file look at what its own tests make alone."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def shared_tmp_path(world: World, tmp_path: Path) -> Path:
    """A folder of this test's own, the same on all ranks, made before any of them sees it."""
    return Path(world.broadcast_text(str(tmp_path)))
