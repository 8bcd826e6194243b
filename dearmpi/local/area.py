"""The exact area under the ROC curve over all ranks, and batches that have both classes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dearmpi.comm.lifecycle import choose_world
from dearmpi.comm.world import World
from dearmpi.errors import ConfigError


def auc_of(scores: Tensor, labels: Tensor, world: World | None = None) -> float:
    """The chance that a positive sample of any rank scores above a negative one; a tie counts half.

    scores, labels: (n,), this rank's samples, with n of its own; labels above 0 are positive. The
    same on all ranks (collective), and not a mean of the ranks' own areas. NaN without samples of
    both classes, and for scores that are NaN.
    """
    if scores.shape != labels.shape or scores.dim() != 1:
        raise ConfigError(
            f"scores are of shape {tuple(scores.shape)} and labels of {tuple(labels.shape)}; give "
            "two of one dimension, and as long",
            code="wrong-type",
        )
    own = torch.stack([scores.detach().double().cpu(), (labels > 0).double().cpu()])
    values, positive = torch.cat(choose_world(world).all_gather_object(own), 1)
    return area_under(values, positive)


def area_under(scores: Tensor, labels: Tensor) -> float:
    """As ``auc_of``, of samples that this process has alone."""
    positive = labels > 0
    num_positive = int(positive.sum())
    num_negative = len(scores) - num_positive
    if not num_positive or not num_negative or bool(scores.isnan().any()):
        return math.nan
    _, group = scores.unique(return_inverse=True)  # sorted
    count = torch.bincount(group)
    of_positive = torch.bincount(group[positive], minlength=len(count))
    of_negative = count - of_positive
    below = of_negative.cumsum(0) - of_negative
    wins_twice = int((of_positive * (2 * below + of_negative)).sum())
    return wins_twice / (2 * num_positive * num_negative)


class BalancedBatches:
    """Lists of indices, as the ``batch_sampler`` of a ``DataLoader``: each has both classes.

    A rank draws from its own part of each class, without end: a class begins anew, in another
    order, once it is used up. An epoch goes once through the larger class.
    """

    def __init__(
        self,
        labels: Tensor | Sequence[int],
        batch: int,
        positive_share: float = 0.5,
        *,
        rank: int = 0,
        size: int = 1,
        seed: int = 0,
    ) -> None:
        """labels: (n,), of all ranks' samples; above 0 is positive. batch: samples of this rank.
        positive_share: of a batch; each class has at least one sample in it.

        Raises ConfigError for classes with fewer samples than ranks, and numbers out of range.
        """
        positive = torch.as_tensor(labels) > 0
        if batch < 2 or not 0 < positive_share < 1:
            raise ConfigError(
                f"batch is {batch} and positive_share {positive_share}; give at least 2 samples, "
                "and a share above 0 and below 1",
                code="out-of-range",
            )
        classes = [of.nonzero()[:, 0] for of in (positive, ~positive)]
        self._own = [places[rank::size] for places in classes]
        if min(map(len, classes)) < size:
            raise ConfigError(
                f"there are {int(positive.sum())} positive and {int((~positive).sum())} negative "
                f"samples for {size} ranks; give every rank samples of both classes",
                code="data-insufficient",
            )
        first = min(batch - 1, max(1, round(batch * positive_share)))
        self._sizes = (first, batch - first)
        self._seed, self._rank, self._epoch = seed, rank, 0

    def __len__(self) -> int:
        return max(
            math.ceil(len(own) / size) for own, size in zip(self._own, self._sizes, strict=True)
        )

    def set_epoch(self, epoch: int) -> None:
        """Draw as in ``epoch`` from the next iteration on; each iteration else is an epoch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(
            (self._seed * 1_000_003 + self._epoch) * 65_537 + self._rank
        )
        self._epoch += 1
        rows = []
        for own, size in zip(self._own, self._sizes, strict=True):
            rounds = math.ceil(len(self) * size / len(own))
            order = torch.cat(
                [own[torch.randperm(len(own), generator=generator)] for _ in range(rounds)]
            )
            rows.append(order[: len(self) * size].view(len(self), size))
        yield from torch.cat(rows, 1).tolist()
