"""Sparse codecs: in each step a few elements of a gradient, and the rest in later steps.

All ranks send the same elements, which follow from the step alone, so that no index travels and
sums are those of a short bucket. What a rank has not sent waits for the next step, or is dropped
(``residual``). Random blocks are from "Sparse Communication for Training Deep Networks" (arXiv
2009.09271).
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from dearmpi.comm.algorithms.registry import CollectiveAlgorithms
from dearmpi.comm.algorithms.scratch import Scratch
from dearmpi.comm.api.collectives import Chain, Collectives, Request
from dearmpi.config import Scope
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.codec.codec import StatelessCodec, elements_sent
from dearmpi.engine.codec.residual import ErrorFeedback

FAR_APART = 1 << 40  # seeds of two buckets


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements ``start`` to ``stop`` of a shard, of which ``num`` are sent in a step."""

    start: int
    stop: int
    num: int


def segments_of(bucket: BucketRuntime, *, density: float, scope: Scope) -> list[list[Segment]]:
    """By shard, in order: the shard, or what it has of each parameter."""
    spec = bucket.spec
    if scope != "parameter":
        length = spec.largest_shard
        return [[Segment(0, length, math.ceil(density * length))] for _ in range(spec.world_size)]
    shards = []
    for rank in range(spec.world_size):
        first, last = spec.shard_range(rank)
        bounds = [(max(p.start, first), min(p.stop, last)) for p in spec.placements]
        shards.append(
            [
                Segment(start - first, stop - first, math.ceil(density * (stop - start)))
                for start, stop in bounds
                if start < stop
            ]
        )
    return shards


class Selector(ABC):
    """Chooses coordinates of a shard, in whole blocks.

    block: elements of one. is_told: whether what is chosen has to travel, since it does not follow
    from the step. num: blocks of each shard; what a shard has fewer repeats its last one.
    """

    block = 1
    is_told = True

    def __init__(self, index: int, shards: Sequence[Sequence[Segment]]) -> None:
        """``index``: of the bucket."""
        self.index, self.shards = index, shards
        self.num = max(1, *(sum(one.num for one in shard) for shard in shards))

    def choose(self, row: Tensor, shard: int, *, rank: int, turn: int) -> Tensor:
        """First elements of the blocks that ``rank`` sends of its ``row`` for ``shard`` in step
        ``turn``; ascending, [num].
        """
        parts = [
            one.start + self.choose_in(row[one.start : one.stop], one, (shard, number, rank), turn)
            for number, one in enumerate(self.shards[shard])
        ]
        parts = parts or [torch.zeros(1, dtype=torch.int64, device="cpu")]
        num_missing = self.num - sum(map(len, parts))
        if num_missing:
            parts.append(parts[-1][-1:].expand(num_missing))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    @abstractmethod
    def choose_in(
        self, values: Tensor, segment: Segment, key: tuple[int, int, int], turn: int
    ) -> Tensor:
        """The same within one segment, of which no other has the ``key``."""

    def weights(self, shard: int) -> Tensor | None:
        """By what to multiply sums, so that their mean over many steps is right; [num]. None: they
        stay as they are.
        """
        return None


class SparseReduce(StatelessCodec):
    """The sum of the elements that are chosen in a step; of others, zero."""

    def __init__(
        self,
        bucket: BucketRuntime,
        algorithms: CollectiveAlgorithms,
        scratch: Scratch,
        *,
        density: float,
        feedback: ErrorFeedback,
    ) -> None:
        """``scratch``: shared by all buckets. ``density``: the part that is sent in a step."""
        spec = bucket.spec
        self.index, self._size, self.numel = spec.index, spec.world_size, spec.largest_shard
        self.num_sent = max(1, math.ceil(density * self.numel))  # of each shard
        self.algorithm = CollectiveAlgorithms(algorithms.added_here)
        self.scratch, self.feedback = scratch, feedback
        self.turn = 0
        self._turn_before: int | None = None  # that of the iteration's start, if it has gone on
        self._dense_bytes = elements_sent(bucket) * spec.itemsize
        self.num_flags = feedback.num_flags
        self.sparse_bytes = (self._size - 1) * (self.num_sent + self.num_flags) * spec.itemsize
        self._is_dense = False  # the last reduction

    @property
    def sent_bytes(self) -> int:  # type: ignore[override]
        """Of the last step, which may have been dense."""
        return self._dense_bytes if self._is_dense else self.sparse_bytes

    @property
    def steady_bytes(self) -> int:
        """Of steps that are not dense."""
        return self.sparse_bytes

    @property
    def keeps(self) -> bool:  # type: ignore[override]
        """As the error feedback does."""
        return self.feedback.keeps

    @property
    def owes(self) -> bool:  # type: ignore[override]
        """As the error feedback does."""
        return self.feedback.owes

    def squares(self) -> tuple[float, float]:
        """As the error feedback does."""
        return self.feedback.squares()

    @abstractmethod
    def reduce(
        self, rows: Tensor, collectives: Collectives, *, finite: bool
    ) -> Generator[Request, None, float]:
        """Send parts of ``rows``, the shards, and put the sums into the own one. Returns the sum of
        the ranks' flags; 0 where there are none.

        ``finite``: whether all numbers are; otherwise NaN travels, so that the owners learn of it
        in this step.
        """

    def add_up(
        self,
        rows: Tensor,
        places: Tensor,
        collectives: Collectives,
        *,
        finite: bool,
        weights: Tensor | None = None,
        reserved: AbstractContextManager[None] | None = None,
    ) -> Generator[Request, None, float]:
        """Reduce the elements at ``places``, the same on all ranks, as a short bucket; returns as
        ``reduce`` does.

        places: by shard, [size, number]. weights: as of a ``Selector``. reserved: a place
        in the order of operations; None: the next one.
        """
        (size, num), own = places.shape, collectives.rank
        numel = size * (num + self.num_flags)
        held = self.scratch.take(rows, numel)
        room = held[:numel].view(size, -1)
        torch.gather(rows, 1, places, out=room[:, :num])
        room[:, num:] = self.feedback.flag
        if not finite:
            room.fill_(math.nan)
        with reserved or nullcontext():
            request = self.algorithm.start_reduce_scatter(room.view(-1), collectives)
        yield request
        total = self.feedback.hold(rows, own, (torch.arange(size)[:, None], places))
        sums = room[own, :num]
        total[places[own]] = sums if weights is None else sums.mul_(weights)
        flag = float(room[own, -1]) if self.num_flags else 0.0
        self.scratch.give_back(held)
        return flag

    def start(self, bucket: BucketRuntime, collectives: Collectives, step: int) -> Request:
        """Add the residual, and send what is chosen."""
        if not self.keeps:
            self.turn = step  # with nothing kept, a resumed run has no other count
        return Chain(self._steps(bucket, collectives))

    def _steps(self, bucket: BucketRuntime, collectives: Collectives) -> Iterator[Request]:
        data = bucket.gradients.data
        data[bucket.spec.numel :].zero_()  # the padding may be anything
        self._is_dense = self.feedback.needs_dense
        self.feedback.add_to(data)
        # A sum takes less time; that of finite numbers may be too large.
        finite = math.isfinite(float(data.sum())) or bool(data.isfinite().all())
        if self._is_dense:
            self.fallbacks += 1
            if not finite:
                data.fill_(math.nan)
            yield self.algorithm.start_reduce_scatter(data, collectives)
            # Finite numbers have no sum that is NaN; the own shard may be short, or empty.
            last = float(data.view(self._size, -1)[collectives.rank, -1])
            flag = last if math.isnan(last) else 0.0
        else:
            rows = data.view(self._size, -1)
            flag = yield from self.reduce(rows, collectives, finite=finite)
        self.feedback.complete(bucket.gradients.shard, flag)

    def commit(self, bucket: BucketRuntime, *, is_final: bool) -> None:
        """Keep what was not sent."""
        if is_final:
            self._turn_before = None
        elif self._turn_before is None:
            self._turn_before = self.turn
        if self.feedback.commit(bucket.gradients.data, is_final=is_final):
            self.turn += 1

    def discard(self) -> None:
        """The same elements have their turn once more."""
        self.feedback.discard()
        if self._turn_before is not None:
            self.turn, self._turn_before = self._turn_before, None

    def start_settling(self, bucket: BucketRuntime, collectives: Collectives) -> Request:
        """Bring the residuals to the owners, for their next update (collective)."""
        request = self.feedback.start_settling(bucket, collectives, self.algorithm)
        self.turn, self._turn_before = 0, None
        return request

    def forget(self) -> None:
        """Begin anew."""
        self.feedback.forget()
        self.turn, self._turn_before = 0, None

    def rescale(self, factor: float) -> None:
        """As the error feedback does."""
        self.feedback.rescale(factor)


class RandomReduce(SparseReduce):
    """The same elements of each shard, on all ranks, by chance.

    scale: of the sums.
    """

    scale = 1.0

    @abstractmethod
    def choose(self, turn: int) -> Tensor | slice:
        """The elements of each shard that are sent in step ``turn``, ``num_sent`` or fewer."""

    def reduce(
        self, rows: Tensor, collectives: Collectives, *, finite: bool
    ) -> Generator[Request, None, float]:
        """One short reduce-scatter."""
        chosen, rank = self.choose(self.turn), collectives.rank
        numel = len(rows) * (self.num_sent + self.num_flags)
        held = self.scratch.take(rows, numel)
        room = held[:numel].view(len(rows), -1)
        if isinstance(chosen, slice):
            num = chosen.stop - chosen.start
            room[:, :num].copy_(rows[:, chosen])
        else:
            num = len(chosen)
            torch.index_select(rows, 1, chosen, out=room[:, :num])
        room[:, num:].fill_(self.feedback.flag)
        if not finite:
            room.fill_(math.nan)
        yield self.algorithm.start_reduce_scatter(room.view(-1), collectives)
        own = self.feedback.hold(rows, rank, (slice(None), chosen))
        sums = room[rank, :num]
        own[chosen] = sums if self.scale == 1.0 else sums.mul_(self.scale)
        flag = float(room[rank, -1]) if self.num_flags else 0.0
        self.scratch.give_back(held)
        return flag


class RandomBlocks(RandomReduce):
    """A block of each shard in turn, in an order that is drawn anew once all had theirs."""

    _sweep = -1
    _order: Sequence[int] = ()

    def choose(self, turn: int) -> slice:
        """A block; the last of a shard may be shorter."""
        num = math.ceil(self.numel / self.num_sent)
        sweep, place = divmod(turn, num)
        if sweep != self._sweep:
            order = list(range(num))
            random.Random(f"{self.index} {sweep}").shuffle(order)
            self._sweep, self._order = sweep, order
        start = self._order[place] * self.num_sent
        return slice(start, min(start + self.num_sent, self.numel))


class RandomElements(RandomReduce):
    """One element of each of ``num_sent`` equal stretches of a shard, so that none comes twice.

    Without error feedback they are scaled, so that their mean over many steps is right.
    """

    @property
    def scale(self) -> float:  # type: ignore[override]
        """Of the sums."""
        return 1.0 if self.keeps else self.numel / self.num_sent

    def choose(self, turn: int) -> Tensor:
        """Elements in ascending order."""
        generator = torch.Generator().manual_seed(self.index * FAR_APART + turn)
        bounds = torch.arange(self.num_sent + 1, device="cpu") * self.numel // self.num_sent
        first, width = bounds[:-1], bounds.diff()
        drawn = torch.rand(self.num_sent, generator=generator, dtype=torch.float64, device="cpu")
        return first + (drawn * width).long()
