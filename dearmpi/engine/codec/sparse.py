"""Sparse codecs: in each step a few elements of a gradient, and the rest in later steps.

All ranks send the same elements, which follow from the step alone, so that no index travels and
sums are those of a short bucket. What a rank has not sent waits in its residual and is added to
what comes next (error feedback). Random blocks are from "Sparse Communication for Training Deep
Networks" (arXiv 2009.09271); random elements are the paper's other choice.

A residual is never saved. Where state is read, all of it goes to the owners of its elements, dense
and at once, and counts in their next update: so a resumed run goes on as the other does, and
nothing is lost on any number of ranks.
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
    """The sum of the elements that are chosen in a step; of others, zero."""

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
        self._turn = 0
        self.sent_bytes = (self._size - 1) * self._num_sent * spec.itemsize

    @abstractmethod
    def choose(self, turn: int) -> Tensor | slice:
        """The elements of each shard that are sent in step ``turn``, ``num_sent`` or fewer."""

    def start(self, bucket: BucketRuntime, collectives: Collectives, step: int) -> Request:
        """Add to the residual, and send what is chosen of it."""
        return Chain(self._steps(bucket, collectives))

    def _steps(self, bucket: BucketRuntime, collectives: Collectives) -> Iterator[Request]:
        data, numel = bucket.gradients.data, bucket.spec.numel
        if self._residual is None:
            self._residual, self.owes = torch.zeros_like(data), True
        residual = self._residual
        residual[:numel].add_(data[:numel])  # the padding may be anything
        rows = residual.view(self._size, -1)
        chosen = self.choose(self._turn)
        self._turn += 1
        held = self._scratch.take(data, self._size * self._num_sent)
        room = held[: self._size * self._num_sent].view(self._size, -1)
        if isinstance(chosen, slice):
            num = chosen.stop - chosen.start
            room[:, :num].copy_(rows[:, chosen])
            room[:, num:].zero_()
            rows[:, chosen].zero_()
        else:
            num = len(chosen)
            torch.index_select(rows, 1, chosen, out=room[:, :num])
            rows.index_fill_(1, chosen, 0.0)
        if not math.isfinite(float(residual.sum()) + float(room.sum())):
            room.fill_(math.nan)  # each owner learns of it in this step, and nothing of it stays
            residual.nan_to_num_(0.0, 0.0, 0.0)
        yield self._algorithm.start_reduce_scatter(room.view(-1), collectives)
        own = data.view(self._size, -1)[collectives.rank].zero_()
        own[chosen] = room[collectives.rank, :num]
        self._scratch.give_back(held)

    def start_settling(self, bucket: BucketRuntime, collectives: Collectives) -> Request:
        """Bring the residuals to the owners, for their next update (collective)."""
        return Chain(self._settle(bucket, collectives))

    def _settle(self, bucket: BucketRuntime, collectives: Collectives) -> Iterator[Request]:
        assert self._residual is not None
        residual, self._residual, self._turn = self._residual, None, 0
        self.owes = False
        yield self._algorithm.start_reduce_scatter(residual, collectives)
        shard = residual[: bucket.spec.numel][bucket.spec.cuts.slice_of(collectives.rank)]
        bucket.add_owed(shard.div_(self._size))


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
        bounds = torch.arange(self._num_sent + 1) * self._numel // self._num_sent
        first, width = bounds[:-1], bounds.diff()
        drawn = torch.rand(self._num_sent, generator=generator, dtype=torch.float64)
        return first + (drawn * width).long()
