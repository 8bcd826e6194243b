"""Where the lines of ranks part is found by all of them, in few exchanges of few characters."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dearmpi.comm.messages.collective_calls import first_difference
from dearmpi.comm.world import World
from tests.fakes.ranks import run_ranks

COMMON = [f"layers.{number}.weight (512, 512) float32" for number in range(1000)]


def differ(*lines: Sequence[str]) -> list[str]:
    """What all ranks find, of which each has the next of ``lines``."""

    def find(world: World) -> list[str]:
        return first_difference(lines[world.rank], world.all_gather_text)

    (found, *others) = run_ranks(len(lines), find)
    assert others == [found] * len(others)
    return list(found)


@pytest.mark.parametrize("place", [0, 1, 499, 998, 999])
def test_the_first_place_at_which_any_rank_differs_is_found(place: int) -> None:
    early, late = list(COMMON), list(COMMON)
    early[place:] = ["another"] * (1000 - place)
    late[-1] = "also another"
    expected = [COMMON[place], COMMON[place], "another"]
    if place == 999:
        expected[1] = "also another"
    assert differ(COMMON, late, early) == expected


@pytest.mark.parametrize("num", [0, 1, 999])
def test_lines_that_end_sooner_have_nothing_further(num: int) -> None:
    assert differ(COMMON, COMMON[:num]) == [COMMON[num], "nothing further"]
    assert differ(COMMON[:num], COMMON) == ["nothing further", COMMON[num]]


@pytest.mark.parametrize("lines", [[], ["a"], ["a", "b"], COMMON])
def test_where_all_are_alike_there_is_none(lines: list[str]) -> None:
    assert differ(lines, lines) == []


def test_lines_are_told_apart_wherever_they_are_broken() -> None:
    assert differ(["a\nb"], ["a", "b"]) == ["a\nb", "a"]


def test_little_travels() -> None:
    told: list[str] = []

    def find(world: World) -> None:
        def gather(text: str) -> list[str]:
            if world.is_root:
                told.append(text)
            return world.all_gather_text(text)

        first_difference([*COMMON[:-1], str(world.rank)], gather)

    run_ranks(2, find)
    assert len(told) < 15 and max(map(len, told)) < 60
