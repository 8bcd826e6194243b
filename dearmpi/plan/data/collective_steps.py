"""Steps of a collective as data: which rank sends which shards to which, in what order.

A flat ring, two levels, Themis and schedules made by hand are all lists of steps.
``plan/model/steps_check.py`` proves what they compute, and that no rank waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from dearmpi.config import check_choice
from dearmpi.errors import ConfigError
from dearmpi.grid import Grid, stages_of
from dearmpi.plan.data.fields import Fields, check_format, read_fields, read_text

Kind = Literal["reduce-scatter", "all-gather"]
FORMAT = 1
_MARK = "steps"
_RING_WINDOW, _GRID_WINDOW = 6, 2  # rounds, and stages of a dimension, that the engine opens ahead


@dataclass(frozen=True, slots=True)
class Message:
    """shards: which of a chunk ``sender`` sends ``receiver``; in a reduce-scatter they are added
    to the receiver's, and the sender's are of no use afterwards.
    """

    sender: int
    receiver: int
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """Messages of one chunk over one dimension of the network.

    after: earlier steps, by their place in the list. A rank opens a step, with all that it sends
    and receives there, once these are over on this rank.
    """

    chunk: int
    dimension: int
    messages: tuple[Message, ...]
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CollectiveSteps:
    """All steps; a step stands behind those that it comes after.

    window: steps of a dimension that a rank has open at once. Ranks open the steps of a dimension
    in the order of the list. orders: by rank, another order of all steps for that rank.

    Raises ConfigError for ranks, shards, chunks or steps that there are not.
    """

    kind: Kind
    num_ranks: int
    num_chunks: int
    window: int
    steps: tuple[Step, ...]
    orders: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def __post_init__(self) -> None:
        ranks, chunks = range(self.num_ranks), range(self.num_chunks)
        for place, step in enumerate(self.steps):
            if step.chunk not in chunks or any(one not in range(place) for one in step.after):
                raise _misfit(
                    f"step {place} is of chunk {step.chunk}, after {list(step.after)}; chunks are "
                    f"below {self.num_chunks}, and a step comes after earlier ones"
                )
            for one in step.messages:
                inside = one.sender in ranks and one.receiver in ranks
                if not inside or any(shard not in ranks for shard in one.shards):
                    raise _misfit(
                        f"step {place} has shards {list(one.shards)} from rank {one.sender} to "
                        f"{one.receiver}; all are below {self.num_ranks}"
                    )
                if one.sender == one.receiver:
                    raise _misfit(f"in step {place} rank {one.sender} sends to itself")
        for rank, order in self.orders:
            if rank not in ranks or sorted(order) != list(range(len(self.steps))):
                raise _misfit(f"the order of rank {rank} does not hold each step once")


def _misfit(problem: str) -> ConfigError:
    return ConfigError(f"{problem}; mend the steps", code="steps-inconsistent")


def ring_steps(num_ranks: int, kind: Kind) -> CollectiveSteps:
    """A flat ring: a step for each of P - 1 rounds."""
    first = 1 if kind == "reduce-scatter" else 0  # whose shard goes first: so many places before
    steps = []
    for number in range(num_ranks - 1):
        messages = tuple(
            Message(rank, (rank + 1) % num_ranks, ((rank - first - number) % num_ranks,))
            for rank in range(num_ranks)
        )
        steps.append(Step(0, 0, messages, (number - 1,) if number else ()))
    return CollectiveSteps(kind, num_ranks, 1, _RING_WINDOW, tuple(steps))


def grid_steps(grid: Grid, num_chunks: int, kind: Kind) -> CollectiveSteps:
    """What the engine does on ``grid``: two levels, or any dimensions and orders of chunks."""
    is_gather, depth = kind == "all-gather", len(grid.sizes)
    by_order: dict[tuple[int, ...], list[tuple[Message, ...]]] = {}
    orders = grid.orders_for(num_chunks)
    places: dict[tuple[int, int], int] = {}
    steps = []
    for place, (chunk, stage) in enumerate(grid.stages(num_chunks, is_gather=is_gather)):
        order = orders[chunk]
        if order not in by_order:
            by_order[order] = list(_stage_messages(grid, order, is_gather))
        crossed = depth - 1 - stage if is_gather else stage
        places[chunk, stage] = place
        after = (places[chunk, stage - 1],) if stage else ()
        steps.append(Step(chunk, order[crossed], by_order[order][crossed], after))
    return CollectiveSteps(kind, grid.num_ranks, num_chunks, _GRID_WINDOW, tuple(steps))


def _stage_messages(
    grid: Grid, order: tuple[int, ...], is_gather: bool
) -> Iterable[tuple[Message, ...]]:
    """Of each stage of a reduce-scatter, or those of an all-gather that mirror them."""
    found: list[list[Message]] = [[] for _ in order]
    for rank in range(grid.num_ranks):
        for messages, stage in zip(found, stages_of(grid, rank, order), strict=True):
            for peer in stage.after:
                shards = stage.kept if is_gather else peer.shards
                messages.append(Message(rank, peer.rank, shards))
    return map(tuple, found)


def read_steps(path: Path) -> CollectiveSteps:
    """Steps made by hand, from a JSON file. Raises ConfigError for what is missing or wrong.

    ``{"format": 1, "kind": "all-gather", "num_ranks": 2, "steps": [{"messages": [{"sender": 0,
    "receiver": 1, "shards": [0]}]}]}``; a step's ``chunk`` and ``dimension`` are 0 unless given,
    and it comes ``after`` the one before it in its chunk.
    """
    text = read_text(path, mark=_MARK)
    data = read_fields(text, str(path), mark=_MARK, cure="mend the steps")
    check_format(data, str(path), current=FORMAT, default=None)
    check_choice("kind", data.text("kind"), get_args(Kind))
    kind: Kind = "all-gather" if data.text("kind") == "all-gather" else "reduce-scatter"
    steps: list[Step] = []
    last: dict[int, int] = {}
    for place, given in enumerate(data.items("steps")):
        one = Fields(given, f"{path}: steps[{place}]")
        chunk = one.integer("chunk", 0)
        before = [last[chunk]] if chunk in last else []
        after = tuple(one.items("after", before))
        messages = [Fields(item, f"{one.place}: messages") for item in one.items("messages")]
        steps.append(
            Step(
                chunk,
                one.integer("dimension", 0),
                tuple(
                    Message(m.integer("sender"), m.integer("receiver"), tuple(m.items("shards")))
                    for m in messages
                ),
                after,
            )
        )
        last[chunk] = place
    return CollectiveSteps(
        kind,
        data.integer("num_ranks", least=1),
        data.integer("num_chunks", 1, least=1),
        data.integer("window", _GRID_WINDOW, least=1),
        tuple(steps),
    )
