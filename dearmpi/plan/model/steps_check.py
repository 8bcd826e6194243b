"""Proof of the steps of a collective: each rank ends with the right shards, of which every
contribution counts once, and no rank waits for ever.

Sums are sets of contributing ranks, as bits of an integer: two that meet must have none in common.
Waits depend on no timing. What a rank may open now it may open later as well, so that one run to
the end decides for all.
"""

from __future__ import annotations

from collections import defaultdict, deque

from dearmpi.errors import ConfigError
from dearmpi.plan.data.collective_steps import CollectiveSteps, Message, Step

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
