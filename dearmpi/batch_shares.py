"""Batch shares: how many samples of a step each rank computes.

Ranks of unequal speed finish together if the faster ones compute more samples. A rank's mean loss
then counts by its samples, so that the average over ranks is the mean over the step's samples for
any shares. Every rank finds the same numbers; with ``share_batch`` ranks compare how they mean to
share a batch, and rank 0 decides by their speeds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import accumulate
from math import fsum, isfinite
from numbers import Integral, Real
from typing import Literal, Protocol

from dearmpi.errors import ConfigError, MismatchError

DEAD_BAND = 0.05  # shares stay unless a step gets shorter by more than this part


def share_sizes(count: int, weights: Sequence[float], *, least: int = 0) -> tuple[int, ...]:
    """Whole samples by rank, ``count`` in all, in proportion to ``weights``: the largest remainders
    are rounded up, and of equal ones those of lower ranks.

    weights: above 0. least: samples that each rank has in any case; ``count`` must suffice.
    """
    total = fsum(weights)
    ideal = [count * (weight / total) for weight in weights]
    sizes = [int(part) for part in ideal]
    ranks = sorted(range(len(sizes)), key=lambda rank: sizes[rank] - ideal[rank])
    for rank in ranks[: count - sum(sizes)]:
        sizes[rank] += 1
    while min(sizes) < least:
        sizes[sizes.index(max(sizes))] -= 1
        sizes[sizes.index(min(sizes))] += 1
    return tuple(sizes)


def share_range(
    count: int, weights: Sequence[float], rank: int, *, least: int = 1
) -> tuple[int, int]:
    """First and one-past-last of the samples of ``rank``. Each rank has ``least`` samples, or as
    many as there are for each.
    """
    sizes = share_sizes(count, weights, least=min(least, count // len(weights)))
    begin = sum(sizes[:rank])
    return begin, begin + sizes[rank]


def fastest_sizes(
    count: int, per_sample_s: Sequence[float], fixed_s: Sequence[float] = (), *, least: int = 1
) -> tuple[int, ...]:
    """Whole samples by rank, ``count`` in all, with which the rank that computes longest computes
    as short as is possible; of equal ranks lower ones have more.

    per_sample_s, fixed_s: seconds of each sample and besides, by rank; the first above 0.
    least: samples that each rank has in any case; ``count`` must suffice.
    """
    besides = tuple(fixed_s) or (0.0,) * len(per_sample_s)
    ranks = list(enumerate(zip(per_sample_s, besides, strict=True)))
    sizes = [least] * len(ranks)
    while ranks:  # those with more than ``least``, which all end at the same time
        rest = count - least * (len(sizes) - len(ranks))
        spent = fsum(fixed / each for _, (each, fixed) in ranks)
        end_s = (rest + spent) / fsum(1.0 / each for _, (each, _) in ranks)
        more = [one for one in ranks if end_s - one[1][1] >= least * one[1][0]]
        if len(more) == len(ranks):
            break
        ranks = more
    for rank, (each, fixed) in ranks:
        sizes[rank] = max(least, int((end_s - fixed) / each))
    ends = [(fixed + (sizes[rank] + 1) * each, rank) for rank, (each, fixed) in ranks]
    heapify(ends)
    for _ in range(count - sum(sizes)):  # what is left of whole samples
        next_s, rank = ends[0]
        sizes[rank] += 1
        heapreplace(ends, (next_s + per_sample_s[rank], rank))
    return tuple(sizes)


def faster_sizes(
    sizes: Sequence[int], seconds: Sequence[float], *, least: int = 1
) -> tuple[int, ...]:
    """Sizes with which all ranks compute equally long; ``sizes`` themselves where a step would not
    get shorter by more than ``DEAD_BAND`` of it.

    seconds: of computing, by rank, with ``sizes``; taken to grow with the samples. What a rank
    computes besides makes the first change fall short, and the next one smaller.
    """
    each_s = [max(time, 1e-9) / size for size, time in zip(sizes, seconds, strict=True)]
    found = fastest_sizes(sum(sizes), each_s, least=least)
    shorter = max(size * each for size, each in zip(found, each_s, strict=True))
    return found if shorter < (1.0 - DEAD_BAND) * max(seconds) else tuple(sizes)


def check_weights(weights: Sequence[float], size: int, *, name: str) -> None:
    """Raise ConfigError unless each of ``size`` ranks has a weight above 0.

    name: what to call them.
    """
    shown = ",".join(f"{weight:g}" for weight in weights)
    if len(weights) != size:
        raise ConfigError(
            f"{name} {shown} has {len(weights)} numbers for {size} ranks; give one for each",
            code="settings-contradict",
        )
    for rank, weight in enumerate(weights):
        if not (isfinite(weight) and weight > 0):
            raise ConfigError(
                f"{name} {shown} gives rank {rank} the share {weight:g}, but every rank needs "
                "samples in each step; give numbers above 0, or use fewer ranks",
                code="out-of-range",
            )
    if not isfinite(sum(weights)):
        raise ConfigError(
            f"{name} {shown} has a sum that is not finite; give smaller numbers",
            code="out-of-range",
        )


def check_sizes(count: int, weights: Sequence[float], *, least: int, name: str) -> None:
    """Raise ConfigError where a batch of ``count`` samples leaves a rank fewer than ``least``."""
    sizes = share_sizes(count, weights)
    rank = sizes.index(min(sizes))
    if sizes[rank] < least:
        shown = ",".join(f"{weight:g}" for weight in weights)
        raise ConfigError(
            f"{name} {shown} gives rank {rank} {sizes[rank]} of {count} samples, but it needs "
            f"{least}; raise the batch size or the rank's share",
            code="batch-too-small",
        )


@dataclass(frozen=True, slots=True)
class BatchShare:
    """What one rank computes of a batch: samples ``start`` to ``stop`` of it.

    sizes: samples by rank. weights: what they follow, by rank.
    """

    rank: int
    sizes: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def size(self) -> int:
        """Samples of this rank."""
        return self.sizes[self.rank]

    @property
    def start(self) -> int:
        """The first sample of this rank."""
        return list(accumulate(self.sizes, initial=0))[self.rank]

    @property
    def stop(self) -> int:
        """One past the last sample of this rank."""
        return self.start + self.size

    @property
    def weight(self) -> float:
        """The factor on this rank's mean loss. The average over ranks of the weighted losses, and
        of their gradients, is then the mean over the batch.
        """
        return self.size * len(self.sizes) / sum(self.sizes)

    def of(self, count: int) -> BatchShare:
        """The share of another batch, such as the last of an epoch, of ``count`` samples; 1 or
        more. No rank is without samples unless there are too few.
        """
        if count < 1:
            raise ConfigError(f"count is {count}; it must be 1 or more", code="out-of-range")
        least = min(1, count // len(self.weights))
        return BatchShare(self.rank, share_sizes(count, self.weights, least=least), self.weights)


Shares = Sequence[float] | Literal["even", "auto"]


class SharingWorld(Protocol):
    """What sharing needs of the world."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def hosts(self) -> Sequence[str]: ...

    def all_gather_text(self, text: str, /) -> list[str]: ...

    def broadcast_text(self, text: str | None, /) -> str: ...


def share_batch(
    world: SharingWorld,
    batch_size: int,
    shares: Shares,
    *,
    before: BatchShare | None = None,
    seconds: float = 0.0,
) -> BatchShare:
    """This rank's share of ``batch_size`` samples; see ``World.batch_share`` (collective)."""
    _check_types(batch_size, shares)
    batch_size = int(batch_size)
    is_auto = isinstance(shares, str) and shares == "auto"
    weights = _weights(shares, world.size, before)
    own = json.dumps([batch_size, shares if isinstance(shares, str) else weights, weights])
    gathered = world.all_gather_text(json.dumps([own, float(seconds)]))
    asked, times = zip(*map(json.loads, gathered), strict=True)
    _check_alike(world.hosts, asked)
    if batch_size < world.size:
        raise ConfigError(
            f"batch_size is {batch_size}, over all ranks, but each of {world.size} ranks needs a "
            "sample; raise it",
            code="batch-too-small",
        )
    check_weights(weights, world.size, name="shares")
    check_sizes(batch_size, weights, least=1, name="shares")
    share = BatchShare(world.rank, (1,) * world.size, weights).of(batch_size)
    if not is_auto or before is None:
        return share
    chosen: Sequence[int] = share.sizes
    if world.rank == 0 and all(isfinite(time) and time > 0 for time in times):
        chosen = faster_sizes(share.sizes, times)
    chosen = json.loads(world.broadcast_text(json.dumps(chosen)))
    if tuple(chosen) == share.sizes:
        return share
    return BatchShare(world.rank, tuple(chosen), tuple(map(float, chosen)))


def _check_alike(hosts: Sequence[str], asked: Sequence[str]) -> None:
    """Raise MismatchError where a rank asks for another batch or other shares than rank 0."""
    for rank, text in enumerate(asked):
        if text != asked[0]:
            size, given, _ = json.loads(asked[0])
            other_size, other_given, _ = json.loads(text)
            raise MismatchError(
                f"rank 0 on {hosts[0]} shares a batch of {size} by {given}, and rank {rank} "
                f"on {hosts[rank]} one of {other_size} by {other_given}; give the same on "
                "all ranks",
                code="ranks-built-differently",
            )


def _check_types(batch_size: object, shares: object) -> None:
    is_number = isinstance(batch_size, Integral) and not isinstance(batch_size, bool)
    if not is_number:
        raise ConfigError(
            f"batch_size is {batch_size!r}, of type {type(batch_size).__name__}; give the number "
            "of samples over all ranks",
            code="wrong-type",
        )
    is_list = isinstance(shares, Sequence) and all(isinstance(one, Real) for one in shares)
    if not isinstance(shares, str) and not is_list:
        raise ConfigError(
            f"shares is {shares!r}, of type {type(shares).__name__}; give 'even', 'auto' or a list "
            "with a number for each rank",
            code="wrong-type",
        )


def _weights(shares: Shares, size: int, before: BatchShare | None) -> tuple[float, ...]:
    if not isinstance(shares, str):
        return tuple(float(weight) for weight in shares)
    if shares not in ("even", "auto"):
        raise ConfigError(
            f"shares is {shares!r}; give 'even', 'auto' or a number for each rank",
            code="unknown-choice",
        )
    return before.weights if shares == "auto" and before is not None else (1.0,) * size
