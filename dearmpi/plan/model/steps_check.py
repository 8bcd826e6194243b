"""Steps of a collective as data, and their proof: each rank ends with the right shards, of which
every contribution counts once, and no rank waits for ever.

A flat ring, two levels, Themis and schedules made by hand are all lists of steps: which rank sends
which shards to which, in what order.

Sums are sets of contributing ranks, as bits of an integer: two that meet must have none in common.
Waits depend on no timing. What a rank may open now it may open later as well, so that one run to
the end decides for all.
"""

from __future__ import annotations

from collections import defaultdict, deque
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


MOST_RANKS = 1024


def check_steps(collective: CollectiveSteps) -> None:
    """Raise ConfigError, with rank and step, unless the steps do what their kind says."""
    if collective.num_ranks > MOST_RANKS:
        raise ConfigError(
            f"steps of {collective.num_ranks} ranks; those of {MOST_RANKS} at most are checked",
            code="out-of-range",
        )
    _check_order_of_data(collective)
    if collective.kind == "reduce-scatter":
        _check_sums(collective)
    else:
        _check_copies(collective)
    _check_waits(collective)


def _wrong(problem: str) -> ConfigError:
    return ConfigError(f"{problem}; mend the steps", code="steps-wrong")


def _check_order_of_data(collective: CollectiveSteps) -> None:
    """What is sent must have come in a step that is over, and not change meanwhile."""
    behind: list[int] = []  # by step: itself and all that are over before it, as bits
    for place, step in enumerate(collective.steps):
        bits = 1 << place
        for earlier in step.after:
            bits |= behind[earlier]
        behind.append(bits)
    num_ranks, reduces = collective.num_ranks, collective.kind == "reduce-scatter"
    came: dict[int, list[int]] = {}  # by chunk, rank and shard: the step in which it came last
    went: dict[int, list[int]] = {}  # and in which it was sent, which takes it away
    for place, step, messages in _by_chunk(collective):
        if step.chunk not in came:
            came, went = ({step.chunk: [-1] * num_ranks**2} for _ in range(2))
        received, sent = came[step.chunk], went[step.chunk]
        for one in messages:
            for shard in one.shards:
                earlier = received[one.sender * num_ranks + shard]
                if earlier >= 0 and not behind[place] >> earlier & 1:
                    raise _wrong(
                        f"in step {place} rank {one.sender} sends shard {shard} of chunk "
                        f"{step.chunk}, but does not wait for step {earlier}, which brings it"
                    )
        for one in messages if reduces else ():
            for shard in one.shards:
                sent[one.sender * num_ranks + shard] = place
        for one in messages:
            for shard in one.shards:
                key = one.receiver * num_ranks + shard
                if sent[key] >= 0 and not behind[place] >> sent[key] & 1:
                    raise _wrong(
                        f"in step {place} rank {one.receiver} receives shard {shard} of chunk "
                        f"{step.chunk}, while step {sent[key]} may still send it"
                    )
                received[key] = place


def _check_sums(collective: CollectiveSteps) -> None:
    num_ranks = collective.num_ranks
    everyone = (1 << num_ranks) - 1
    by_chunk: dict[int, list[list[int]]] = defaultdict(
        lambda: [[1 << rank] * num_ranks for rank in range(num_ranks)]
    )
    for place, step, messages in _by_chunk(collective):
        sums = by_chunk[step.chunk]
        sent = [(one, [sums[one.sender][shard] for shard in one.shards]) for one in messages]
        for one in messages:
            for shard in one.shards:
                sums[one.sender][shard] = 0
        for one, parts in sent:
            held = sums[one.receiver]
            for shard, part in zip(one.shards, parts, strict=True):
                if not part:
                    raise _wrong(
                        f"in step {place} rank {one.sender} sends shard {shard}, which it has "
                        "sent already"
                    )
                if held[shard] & part:
                    raise _wrong(
                        f"in step {place} rank {one.receiver} adds contributions to shard {shard} "
                        "twice"
                    )
                held[shard] |= part
    for chunk in range(collective.num_chunks):
        for rank, held in enumerate(by_chunk[chunk]):
            if held[rank] != everyone:
                missing = num_ranks - held[rank].bit_count()
                raise _wrong(
                    f"rank {rank} ends without {missing} of {num_ranks} contributions to its "
                    f"shard of chunk {chunk}"
                )
        del by_chunk[chunk]


def _check_copies(collective: CollectiveSteps) -> None:
    num_ranks = collective.num_ranks
    everyone = (1 << num_ranks) - 1
    by_chunk: dict[int, list[int]] = defaultdict(lambda: [1 << rank for rank in range(num_ranks)])
    for place, step, messages in _by_chunk(collective):
        held = by_chunk[step.chunk]
        sent = [(one, sum(1 << shard for shard in set(one.shards))) for one in messages]
        for one, shards in sent:
            if shards & ~held[one.sender]:
                raise _wrong(f"in step {place} rank {one.sender} sends shards that it lacks")
        for one, shards in sent:
            if shards & held[one.receiver]:
                raise _wrong(f"in step {place} rank {one.receiver} receives shards that it has")
            held[one.receiver] |= shards
    for chunk in range(collective.num_chunks):
        for rank, shards in enumerate(by_chunk[chunk]):
            if shards != everyone:
                missing = num_ranks - shards.bit_count()
                raise _wrong(f"rank {rank} ends without {missing} shards of chunk {chunk}")


def _by_chunk(collective: CollectiveSteps) -> list[tuple[int, Step, tuple[Message, ...]]]:
    """All steps of the first chunk, then of the next one: of each the memory is needed once."""
    numbered = [(place, step, step.messages) for place, step in enumerate(collective.steps)]
    return sorted(numbered, key=lambda one: (one[1].chunk, one[0]))


class _Waits:
    """What each rank has opened, and what it still waits for in it."""

    def __init__(self, collective: CollectiveSteps) -> None:
        self._steps, self._window = collective.steps, collective.window
        self._partners: list[dict[int, list[int]]] = []
        for step in collective.steps:
            meets: dict[int, list[int]] = defaultdict(list)
            for one in step.messages:
                meets[one.sender].append(one.receiver)
                meets[one.receiver].append(one.sender)
            self._partners.append(dict(meets))
        self._dimensions = sorted({step.dimension for step in collective.steps})
        # By rank and dimension: the steps in their order.
        self.lines: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        shared = range(len(collective.steps))
        orders = dict(collective.orders)
        for rank in range(collective.num_ranks):
            for place in orders.get(rank, shared):
                if rank in self._partners[place]:
                    self.lines[rank, self._steps[place].dimension].append(place)
        self._missing: dict[tuple[int, int], int] = {}  # messages, of open steps
        self._num_open: dict[tuple[int, int], int] = defaultdict(int)
        self._over: set[tuple[int, int]] = set()

    def run(self) -> None:
        """Open and end steps until nothing changes."""
        turn = deque(self.lines)
        while turn:
            turn.extend(self._advance(*turn.popleft()))

    def _advance(self, rank: int, dimension: int) -> list[tuple[int, int]]:
        """Open what may be opened; the ranks and dimensions that may go on by now."""
        line, touched = self.lines[rank, dimension], []
        while line and self._may_open(rank, line[0]):
            place = line.popleft()
            partners = self._partners[place][rank]
            missing = len(partners)
            self._num_open[rank, dimension] += 1
            for partner in partners:
                if (partner, place) in self._missing:
                    missing -= 1
                    self._missing[partner, place] -= 1
                    if not self._missing[partner, place]:
                        touched += self._end(partner, place)
            self._missing[rank, place] = missing
            if not missing:
                touched += self._end(rank, place)
        return touched

    def _may_open(self, rank: int, place: int) -> bool:
        step = self._steps[place]
        if self._num_open[rank, step.dimension] == self._window:
            return False
        return all(
            (rank, earlier) in self._over or rank not in self._partners[earlier]
            for earlier in step.after
        )

    def _end(self, rank: int, place: int) -> list[tuple[int, int]]:
        self._over.add((rank, place))
        self._num_open[rank, self._steps[place].dimension] -= 1
        return [(rank, one) for one in self._dimensions if self.lines.get((rank, one))]


def _check_waits(collective: CollectiveSteps) -> None:
    waits = _Waits(collective)
    waits.run()
    stuck = sorted((rank, line[0]) for (rank, _), line in waits.lines.items() if line)
    if stuck:
        shown = ", ".join(f"rank {rank} before step {place}" for rank, place in stuck[:4])
        raise _wrong(f"{len(stuck)} waits never end: {shown}")
