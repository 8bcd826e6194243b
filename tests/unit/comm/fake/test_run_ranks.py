"""A function on in-process ranks: results by rank, all errors told, and nobody left behind."""

from __future__ import annotations

import threading

import pytest

from dearmpi.comm.world import World
from dearmpi.errors import CommError
from tests.fakes.ranks import run_ranks


def test_results_come_by_rank() -> None:
    assert run_ranks(5, lambda world: world.rank * 10) == [0, 10, 20, 30, 40]


def test_the_first_error_is_raised_with_the_tracebacks_of_all() -> None:
    def fail(world: World) -> None:
        if world.rank == 1:
            raise KeyError("no such layer")
        world.barrier()

    with pytest.raises(KeyError, match="no such layer") as failed:
        run_ranks(3, fail)
    notes = "\n".join(failed.value.__notes__)
    assert all(f"[rank {rank}] Traceback" in notes for rank in range(3))
    assert "rank 1 failed with KeyError('no such layer')" in notes


def test_ranks_that_hang_are_given_up_with_their_stacks() -> None:
    release = threading.Event()

    def hang(world: World) -> None:
        if world.is_root:
            release.wait(60)
            return
        try:
            world.barrier()
        finally:  # once the ranks are given up
            release.set()

    with pytest.raises(CommError, match=r"still ran after 3\.0 s") as failed:
        run_ranks(2, hang, timeout_s=3.0)
    assert "rank-0" in str(failed.value) and "release.wait(60)" in str(failed.value)
    assert "rank-1" in str(failed.value) and "world.barrier()" in str(failed.value)


def test_no_thread_is_left() -> None:
    run_ranks(3, lambda world: world.barrier())
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("rank-")]
