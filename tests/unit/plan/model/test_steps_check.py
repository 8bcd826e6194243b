"""Steps of a collective: rings and grids are proved right, and faults in others are named."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from dearmpi import chunk_orders
from dearmpi.errors import ConfigError
from dearmpi.grid import Grid
from dearmpi.plan.model.steps_check import (
    CollectiveSteps,
    Kind,
    Message,
    Step,
    check_steps,
    grid_steps,
    read_steps,
    ring_steps,
)
from dearmpi.plan.simulate.themis import TOPOLOGIES
from tests.codes import raises

KINDS = get_args(Kind)


def grid_of(*sizes: int, orders: Any = ()) -> Grid:
    return Grid(sizes, tuple(range(math.prod(sizes))), orders)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 64])
def test_a_ring_is_right(num_ranks: int, kind: Kind) -> None:
    check_steps(ring_steps(num_ranks, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(2, 2), (3, 2), (2, 3, 2), (4,), (4, 8)])
def test_a_grid_is_right_in_every_order(sizes: tuple[int, ...], kind: Kind) -> None:
    """By turns too, as Themis has it."""
    every = tuple(itertools.permutations(range(len(sizes))))
    check_steps(grid_steps(grid_of(*sizes), 5, kind))
    check_steps(grid_steps(grid_of(*sizes, orders=every), 2 * len(every) + 1, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_1024_ranks_are_right(kind: Kind) -> None:
    """As many as can be checked: two levels, and by Themis the orders of its own network."""
    check_steps(grid_steps(grid_of(32, 32), 1, kind))
    dimensions = TOPOLOGIES["3D-SW_SW_SW_hetero"]
    chunks = chunk_orders.schedule(dimensions, 1e9, is_even=True)
    orders = list(dict.fromkeys(tuple(one.dimension for one in chunk[:3]) for chunk in chunks))
    assert len(orders) > 1
    sizes = tuple(one.num_ranks for one in dimensions)
    check_steps(grid_steps(grid_of(*sizes, orders=tuple(orders[:2])), 2, kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_ring_of_1024_ranks_is_right(kind: Kind) -> None:
    check_steps(ring_steps(1024, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_one_wrong_shard_among_1024_ranks_is_found(kind: Kind) -> None:
    steps = grid_steps(grid_of(32, 32), 1, kind)
    first, *others = steps.steps[1].messages
    wrong = replace(first, shards=(first.receiver if kind == "all-gather" else first.sender,))
    with raises(ConfigError, "steps-wrong", f"rank {first.sender}"):
        check_steps(changed(steps, 1, messages=(wrong, *others)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("sizes", "rates"),
    [
        ((2, 2), (1, 1)),
        ((2, 3), (1, 1)),
        ((2, 2, 2), (1, 1, 1)),
        ((4, 2), (10, 7)),
        ((8, 4), (1, 3)),
    ],
)
@pytest.mark.parametrize("num_chunks", [1, 5, 64])
def test_what_the_engine_does_by_themis_is_right(
    sizes: tuple[int, ...], rates: tuple[float, ...], num_chunks: int, kind: Kind
) -> None:
    """No rank waits for ever in the lines of stages that its simulation gives."""
    grid = Grid(sizes, tuple(range(math.prod(sizes))), rates=rates)
    check_steps(grid_steps(grid, num_chunks, kind))


def test_more_ranks_are_refused() -> None:
    with raises(ConfigError, "out-of-range", "1025"):
        check_steps(CollectiveSteps("all-gather", 1025, 1, 2, ()))


def changed(steps: CollectiveSteps, place: int, **changes: Any) -> CollectiveSteps:
    new = list(steps.steps)
    new[place] = replace(new[place], **changes)
    return replace(steps, steps=tuple(new))


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_message_is_found(kind: Kind) -> None:
    steps = grid_steps(grid_of(2, 2), 1, kind)
    with raises(ConfigError, "steps-wrong"):
        check_steps(changed(steps, 1, messages=steps.steps[1].messages[1:]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_twice_is_found(kind: Kind) -> None:
    steps = ring_steps(3, kind)
    twice = (*steps.steps, replace(steps.steps[-1], after=(1,)))
    with raises(ConfigError, "steps-wrong", "step 2"):
        check_steps(replace(steps, steps=twice))


@pytest.mark.parametrize("kind", KINDS)
def test_data_that_is_not_waited_for_is_found(kind: Kind) -> None:
    """In whatever order the steps happen to come, it is the rank that has to wait."""
    with raises(ConfigError, "steps-wrong", "does not wait for step 0"):
        check_steps(changed(ring_steps(3, kind), 1, after=()))


def test_orders_in_which_ranks_wait_for_each_other_are_found() -> None:
    """One rank has its slots full of chunks 0 and 1, the other of 2 and 3."""
    steps = grid_steps(grid_of(2), 4, "reduce-scatter")
    check_steps(replace(steps, orders=((1, (1, 0, 3, 2)),)))
    with raises(ConfigError, "steps-wrong", "never end", "rank 0 before step 2"):
        check_steps(replace(steps, orders=((1, (2, 3, 0, 1)),)))


@pytest.mark.parametrize(
    "step",
    [
        Step(0, 0, (Message(0, 2, (0,)),)),
        Step(0, 0, (Message(0, 1, (2,)),)),
        Step(0, 0, (Message(1, 1, (0,)),)),
        Step(1, 0, ()),
        Step(0, 0, (), after=(0,)),
    ],
)
def test_steps_of_what_there_is_not_are_refused(step: Step) -> None:
    with raises(ConfigError, "steps-inconsistent"):
        CollectiveSteps("all-gather", 2, 1, 2, (step,))


def test_steps_made_by_hand_are_read(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    both = [{"sender": r, "receiver": 1 - r, "shards": [r]} for r in range(2)]
    given: dict[str, Any] = {"format": 1, "kind": "all-gather", "num_ranks": 2}
    path.write_text(json.dumps({**given, "steps": [{"messages": both}]}))
    check_steps(read_steps(path))
    path.write_text(json.dumps({**given, "steps": [{"messages": both[:1]}]}))
    with raises(ConfigError, "steps-wrong", "rank 0 ends without 1 shards"):
        check_steps(read_steps(path))
