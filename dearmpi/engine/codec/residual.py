"""Error feedback: what a rank has not sent of its gradients is added to the next ones.

A residual is never saved. Where state is read, all of it goes to the owners of its elements, dense
and at once, and counts in their next update. So a resumed run goes on as the other does. Nothing is
lost on any number of ranks above one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dearmpi.comm.algorithms.registry import CollectiveAlgorithms
from dearmpi.comm.api.collectives import Chain, Collectives, Request
from dearmpi.engine.bucket.bucket import BucketRuntime

Sent = tuple[Any, Any]
"""Index of a bucket's elements by shard and place, such as ``(slice(None), slice(0, 9))``."""


class ErrorFeedback:
    """The residual of one bucket on one rank (EF14: all that was not sent, undamped).

    Until a step is certain, what it would leave lies in the gradients' buffer. The residual is that
    of the step before, in case the gradient is discarded.

    keeps: False to drop what was not sent; then nothing is ever owed.
    owes: whether there is a residual; the same on all ranks.
    """

    _sent_square = 0.0

    def __init__(self, world_size: int, *, keeps: bool) -> None:
        self.keeps, self.owes = keeps, False
        self._size = world_size
        self._residual: Tensor | None = None
        self._reduced: tuple[Sent, int, Tensor] | None = None
        self._before: tuple[Tensor | None] | None = None  # the residual of the last step

    def add_to(self, data: Tensor) -> None:
        """Add the residual to gradients that are about to be sent."""
        if self._residual is not None:
            data.add_(self._residual)

    def hold(self, rows: Tensor, rank: int, sent: Sent) -> Tensor:
        """Note what is ``sent`` of gradients, by shard in ``rows``.

        Returns the shard of ``rank``, which is zero now, and has room for the sums.
        """
        own = rows[rank]
        self._reduced = sent, rank, own.clone() if self.keeps else own
        return own.zero_()

    def commit(self, data: Tensor, *, is_final: bool) -> bool:
        """Keep what was not sent; of numbers that are not finite nothing is kept.

        is_final: it cannot be discarded. Returns whether anything was sent since the last commit.
        """
        if is_final:
            self._before = None
        elif self._before is None:
            self._before = (None if self._residual is None else self._residual.clone(),)
        if self._reduced is None:
            return False
        (sent, rank, own), self._reduced = self._reduced, None
        if not self.keeps:
            return True
        if self._residual is None:
            self._residual, self.owes = torch.empty_like(data), True
        rows = self._residual.copy_(data).view(self._size, -1)
        rows[rank].copy_(own)
        self._sent_square = float(rows[sent].square().sum())
        rows[sent] = 0.0
        if not math.isfinite(float(self._residual.sum())):
            self._residual.nan_to_num_(0.0, 0.0, 0.0)
        return True

    def discard(self) -> None:
        """What was sent since the last step does not count."""
        self._reduced = None
        if self._before is not None:
            (self._residual,), self._before = self._before, None
            self.owes = self._residual is not None

    def squares(self) -> tuple[float, float]:
        """Squared norms of the residual, and of what the last step has sent."""
        residual = self._residual  # the progress thread may replace it
        if residual is None:
            return 0.0, 0.0
        return float(torch.linalg.vector_norm(residual)) ** 2, self._sent_square

    def start_settling(
        self, bucket: BucketRuntime, collectives: Collectives, algorithm: CollectiveAlgorithms
    ) -> Request:
        """Bring the residuals to the owners, for their next update (collective)."""
        return Chain(self._settle(bucket, collectives, algorithm))

    def _settle(
        self, bucket: BucketRuntime, collectives: Collectives, algorithm: CollectiveAlgorithms
    ) -> Iterator[Request]:
        residual = self._residual
        assert residual is not None
        self.forget()
        yield algorithm.start_reduce_scatter(residual, collectives)
        shard = residual[: bucket.spec.numel][bucket.spec.cuts.slice_of(collectives.rank)]
        bucket.add_owed(shard.div_(self._size))

    def forget(self) -> None:
        """Begin anew."""
        self._residual, self._reduced, self._before, self.owes = None, None, None, False
