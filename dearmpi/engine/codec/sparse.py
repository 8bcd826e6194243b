"""Sparse codecs: in each step a few elements of a gradient, and the rest in later steps.

All ranks send the same elements, which follow from the step alone, so that no index travels and
sums are those of a short bucket. What a rank has not sent waits in its residual and is added to
what comes next (error feedback). Random blocks are from "Sparse Communication for Training Deep
Networks" (arXiv 2009.09271).

A residual is never saved. Where state is read, all of it goes to the owners of its elements, dense
and at once, and counts in their next update. So a resumed run goes on as the other does. Nothing is
lost on any number of ranks above one.
"""

from __future__ import annotations

import math
import random
from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from dearmpi.comm.algorithms.registry import CollectiveAlgorithms
from dearmpi.comm.algorithms.scratch import Scratch
from dearmpi.comm.api.collectives import Chain, Collectives, Request
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.codec.codec import StatelessCodec

_FAR_APART = 1 << 40  # seeds of two buckets


class SparseReduce(StatelessCodec):
    """The sum of the elements that are chosen in a step; of others, zero.

    Until a step is certain, what it would leave lies in the gradients' buffer. The residual is that
    of the step before, in case the gradient is discarded.
    """

    keeps = True

    def __init__(
        self,
        bucket: BucketRuntime,
        algorithms: CollectiveAlgorithms,
        scratch: Scratch,
        *,
        density: float,
    ) -> None:
        """``scratch``: shared by all buckets. ``density``: the part that is sent in a step."""
        spec = bucket.spec
        self._index, self._size, self._numel = spec.index, spec.world_size, spec.largest_shard
        self._num_sent = max(1, math.ceil(density * self._numel))  # of each shard
        name = algorithms.reduce_scatter
        self._algorithm = CollectiveAlgorithms("ring" if name == "native" else name)
        self._scratch = scratch
        self._residual: Tensor | None = None
        self._reduced: tuple[Tensor | slice, int, Tensor] | None = None
        self._turn = 0
        self.owes = False
        self.sent_bytes = (self._size - 1) * self._num_sent * spec.itemsize

    @abstractmethod
    def choose(self, turn: int) -> Tensor | slice:
        """The elements of each shard that are sent in step ``turn``, ``num_sent`` or fewer."""

    def start(self, bucket: BucketRuntime, collectives: Collectives, step: int) -> Request:
        """Add the residual, and send what is chosen."""
        return Chain(self._steps(bucket, collectives))

    def _steps(self, bucket: BucketRuntime, collectives: Collectives) -> Iterator[Request]:
        data = bucket.gradients.data
        data[bucket.spec.numel :].zero_()  # the padding may be anything
        if self._residual is not None:
            data.add_(self._residual)
        rows, chosen = data.view(self._size, -1), self.choose(self._turn)
        held = self._scratch.take(data, self._size * self._num_sent)
        room = held[: self._size * self._num_sent].view(self._size, -1)
        if isinstance(chosen, slice):
            num = chosen.stop - chosen.start
            room[:, :num].copy_(rows[:, chosen])
            room[:, num:].zero_()
        else:
            num = len(chosen)
            torch.index_select(rows, 1, chosen, out=room[:, :num])
        if not math.isfinite(float(data.sum())):
            room.fill_(math.nan)  # the owners learn of it in this step
        yield self._algorithm.start_reduce_scatter(room.view(-1), collectives)
        own = rows[collectives.rank]
        self._reduced = chosen, collectives.rank, own.clone()
        own.zero_()
        own[chosen] = room[collectives.rank, :num]
        self._scratch.give_back(held)

    def commit(self, bucket: BucketRuntime) -> None:
        """Of numbers that are not finite nothing is kept."""
        if self._reduced is None:
            return
        (chosen, rank, own), self._reduced = self._reduced, None
        data = bucket.gradients.data
        if self._residual is None:
            self._residual, self.owes = torch.empty_like(data), True
        rows = self._residual.copy_(data).view(self._size, -1)
        rows[rank].copy_(own)
        rows[:, chosen] = 0.0
        if not math.isfinite(float(self._residual.sum())):
            self._residual.nan_to_num_(0.0, 0.0, 0.0)
        self._turn += 1

    def discard(self) -> None:
        """The same elements have their turn once more."""
        self._reduced = None

    def start_settling(self, bucket: BucketRuntime, collectives: Collectives) -> Request:
        """Bring the residuals to the owners, for their next update (collective)."""
        return Chain(self._settle(bucket, collectives))

    def _settle(self, bucket: BucketRuntime, collectives: Collectives) -> Iterator[Request]:
        residual = self._residual
        assert residual is not None
        self.forget()
        yield self._algorithm.start_reduce_scatter(residual, collectives)
        shard = residual[: bucket.spec.numel][bucket.spec.cuts.slice_of(collectives.rank)]
        bucket.add_owed(shard.div_(self._size))

    def forget(self) -> None:
        """Begin anew."""
        self._residual, self._reduced, self._turn, self.owes = None, None, 0, False


class RandomBlocks(SparseReduce):
    """A block of each shard in turn, in an order that is drawn anew once all had theirs."""

    def choose(self, turn: int) -> slice:
        """A block; the last of a shard may be shorter."""
        sweep, place = divmod(turn, math.ceil(self._numel / self._num_sent))
        order = list(range(math.ceil(self._numel / self._num_sent)))
        random.Random(f"{self._index} {sweep}").shuffle(order)
        start = order[place] * self._num_sent
        return slice(start, min(start + self._num_sent, self._numel))


class RandomElements(SparseReduce):
    """One element of each of ``num_sent`` equal stretches of a shard, so that none comes twice."""

    def choose(self, turn: int) -> Tensor:
        """Elements in ascending order."""
        generator = torch.Generator().manual_seed(self._index * _FAR_APART + turn)
        bounds = torch.arange(self._num_sent + 1, device="cpu") * self._numel // self._num_sent
        first, width = bounds[:-1], bounds.diff()
        drawn = torch.rand(self._num_sent, generator=generator, dtype=torch.float64, device="cpu")
        return first + (drawn * width).long()
