"""Error feedback. What a rank has not sent of its gradients is added to the next ones (EF14). Or
ranks send how their gradients differ from an estimate (EF21).

A residual is never saved. Where state is read, all of it goes to the owners of its elements, dense
and at once, and counts in their next update. So a resumed run goes on as the other does. Nothing is
lost on any number of ranks above one. An estimate is not saved either: where state is read, the
next step is dense, on the run that goes on as on the resumed one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

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
    needs_dense: whether the next reduction is to be dense; the same on all ranks.
    num_flags: numbers beside each message, by which ranks learn of each other's state.
    flag: that number; only the sum over the ranks is known to all.
    """

    needs_dense = False
    num_flags = 0
    flag = 0.0
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

    def complete(self, shard: Tensor, flag: float) -> None:
        """The sums are in ``shard``, the own one. ``flag``: the sum of all ranks' flags, or NaN if
        some numbers of any rank are not finite; the same on all ranks.
        """

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
        bucket.add_owed(shard.div_(self._size * bucket.loss_scale))

    def forget(self) -> None:
        """Begin anew."""
        self._residual, self._reduced, self._before, self.owes = None, None, None, False

    def rescale(self, factor: float) -> None:
        """Multiply the residual."""
        if self._residual is not None:
            self._residual.mul_(factor)


class _Estimates(NamedTuple):
    """The own estimate, the sum of all ranks' of the own shard, and whether one has failed."""

    own: Tensor | None
    total: Tensor | None
    has_failed: bool


class GradientEstimate(ErrorFeedback):
    """What owners take a rank's gradient for (EF21, arXiv 2106.05203).

    A rank sends a part of the difference between its gradient and its estimate, which both sides
    add. So the sum of all estimates, which each owner keeps of its shard, is what the optimizer
    gets: a whole gradient in every step, also for optimizers that are not linear in it. The first
    step is dense. Rounding aside, the owners' sums are those of the ranks' estimates at all times.

    A sum may be too large for its dtype on one owner alone. The flag of the next step lets all
    ranks know, and the one after is dense.
    """

    num_flags = 1

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size, keeps=True)
        self._total: Tensor | None = None  # of the own shard over all ranks
        self._next: Tensor | None = None  # the same, once what is reduced counts
        self._first: Tensor | None = None  # a gradient that travels whole
        self._saved: _Estimates | None = None  # of the last step
        self._has_failed = False  # on some rank the sum of estimates is not finite
        self._flag_sum = self._unsent_square = 0.0

    @property
    def needs_dense(self) -> bool:  # type: ignore[override]
        """While there is no estimate that serves."""
        return self._residual is None or self._has_failed

    @property
    def flag(self) -> float:  # type: ignore[override]
        """Whether the own sum of estimates is not finite."""
        return float(self._total is not None and not bool(self._total.isfinite().all()))

    def add_to(self, data: Tensor) -> None:
        """Subtract the estimate from gradients that are about to be sent; keep whole ones."""
        if self.needs_dense:
            self._first = data.clone()
        else:
            assert self._residual is not None
            data.sub_(self._residual)

    def complete(self, shard: Tensor, flag: float) -> None:
        """Add the sums of the estimates to the differences'."""
        if self._first is None:
            assert self._total is not None
            shard.add_(self._total)
        self._next, self._flag_sum = shard.clone(), flag
        self._has_failed |= flag > 0  # also where this step is discarded

    def commit(self, data: Tensor, *, is_final: bool) -> bool:
        """Add what was sent to the estimate; after numbers that are not finite, begin anew."""
        if is_final:
            self._saved = None
        elif self._saved is None:
            kept = None if self._residual is None else self._residual.clone()
            self._saved = _Estimates(kept, self._total, self._has_failed)
        if self._next is None:
            return False
        self._total, self._next = self._next, None
        if self._first is not None:
            self._residual, self._first, self._has_failed = self._first, None, False
            self._sent_square = float(torch.linalg.vector_norm(self._residual)) ** 2
            self._unsent_square = 0.0
        else:
            self._add_sent(data)
        self.owes = True
        if math.isnan(self._flag_sum):
            saved = self._saved
            self.forget()
            self._saved = saved
        return True

    def _add_sent(self, data: Tensor) -> None:
        assert self._reduced is not None and self._residual is not None
        (sent, rank, own), self._reduced = self._reduced, None
        rows = data.view(self._size, -1)
        in_own = rows[rank].clone()
        rows[rank].copy_(own)
        estimate, changes = self._residual.view(self._size, -1), rows[sent]
        whole = float(torch.linalg.vector_norm(data)) ** 2
        self._sent_square = float(changes.square().sum())
        self._unsent_square = max(0.0, whole - self._sent_square)
        estimate[sent] = estimate[sent] + changes  # of an element that is named twice: once
        rows[rank].copy_(in_own)

    def discard(self) -> None:
        """What was sent since the last step does not count."""
        self._reduced = self._next = self._first = None
        if self._saved is not None:
            (self._residual, self._total, self._has_failed), self._saved = self._saved, None
            self.owes = self._residual is not None

    def squares(self) -> tuple[float, float]:
        """Squared norms of the differences that the last step has not sent, and has."""
        return self._unsent_square, self._sent_square

    def _settle(
        self, bucket: BucketRuntime, collectives: Collectives, algorithm: CollectiveAlgorithms
    ) -> Iterator[Request]:
        """Nothing is owed: the next step is dense."""
        self.forget()
        yield from ()

    def forget(self) -> None:
        """Begin anew."""
        super().forget()
        self._total = self._next = self._first = self._saved = None
        self._has_failed = False

    def rescale(self, factor: float) -> None:
        """Multiply the estimates."""
        super().rescale(factor)
        if self._total is not None:
            self._total.mul_(factor)
