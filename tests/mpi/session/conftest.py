"""What the tests of a run on all ranks share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dearmpi.comm.world import World
from tests.mpi.session.points import TASK
from tests.mpi.task_file import task_file


@pytest.fixture
def folder(world: World, shared_tmp_path: Path) -> Iterator[Path]:
    """A folder with the task in it, the same on all ranks."""
    with task_file(world, shared_tmp_path / "points.py", TASK) as folder:
        yield folder
