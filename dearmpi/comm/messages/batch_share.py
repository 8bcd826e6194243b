"""Batch share: ranks compare how they mean to share a batch, and rank 0 decides by their speeds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import isfinite
from typing import Literal, Protocol

from dearmpi.batch_shares import BatchShare, check_sizes, check_weights, faster_sizes
from dearmpi.errors import ConfigError, MismatchError

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
    is_auto = isinstance(shares, str) and shares == "auto"
    weights = _weights(shares, world.size, before)
    own = json.dumps([batch_size, shares if isinstance(shares, str) else weights, weights])
    gathered = world.all_gather_text(json.dumps([own, float(seconds)]))
    asked, times = zip(*map(json.loads, gathered), strict=True)
    for rank, text in enumerate(asked):
        if text != asked[0]:
            size, given, _ = json.loads(asked[0])
            other_size, other_given, _ = json.loads(text)
            raise MismatchError(
                f"rank 0 on {world.hosts[0]} shares a batch of {size} by {given}, and rank {rank} "
                f"on {world.hosts[rank]} one of {other_size} by {other_given}; give the same on "
                "all ranks",
                code="ranks-built-differently",
            )
    if batch_size < world.size:
        raise ConfigError(
            f"batch_size is {batch_size} samples for {world.size} ranks, each of which needs one; "
            "raise it",
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


def _weights(shares: Shares, size: int, before: BatchShare | None) -> tuple[float, ...]:
    if not isinstance(shares, str):
        return tuple(float(weight) for weight in shares)
    if shares not in ("even", "auto"):
        raise ConfigError(
            f"shares is {shares!r}; give 'even', 'auto' or a number for each rank",
            code="unknown-choice",
        )
    return before.weights if shares == "auto" and before is not None else (1.0,) * size
