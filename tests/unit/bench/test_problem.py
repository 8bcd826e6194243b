"""A method that is missing on one rank is out on all, before any of them waits for another."""

from __future__ import annotations

from dearmpi.bench.method import Method, alone
from dearmpi.bench.problem import find_missing
from dearmpi.comm.world import World
from tests.fakes.ranks import run_ranks


def test_what_one_rank_lacks_is_missing_on_all() -> None:
    def rank(world: World) -> tuple[dict[str, str], list[str]]:
        def find(asked: World) -> None:
            if asked.rank == 1:
                raise ImportError("libmine.so: no such file\nand more")

        methods = [Method("mine:make", alone, find=find), Method("other", alone)]
        told: list[str] = []
        return find_missing(world, methods, told.append), told

    problem = "rank 1: ImportError: libmine.so: no such file"
    expected = ({"mine:make": problem}, [f"mine:make is out: {problem}"])
    assert run_ranks(2, rank) == [expected] * 2
