"""Balance: how ranks of unequal speed share the batches of a run, so that none waits for another.

A rank's speed is the median over some steps of what it computes in one, without its waits for other
ranks. Rank 0 decides for all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from torch import nn

from dearmpi.batch_shares import Shares, faster_sizes
from dearmpi.comm.world import World
from dearmpi.engine.sync.batch_norm import SyncBatchNorm
from dearmpi.train.data.data import Batches
from dearmpi.train.data.streaming import StreamBatches

NUM_MEASURED = 20  # steps, of which the median counts
MOST_IN_A_ROW = 3  # changes, each so many steps after the one before
STEPS_BETWEEN = 200  # after these


def first_weights(shares: Shares, world_size: int, stored: Mapping[str, Any]) -> tuple[float, ...]:
    """Weights of the ranks with which a run begins; none: evenly. With ``auto`` those of the run
    whose checkpoint holds ``stored``, if it had as many ranks.
    """
    if not isinstance(shares, str):
        return tuple(map(float, shares))
    if shares == "even" or stored.get("world_size") != world_size:
        return ()
    return tuple(float(weight) for weight in stored.get("batch_shares", ()))


def stored_weights(weights: Sequence[float]) -> dict[str, Any]:
    """What a checkpoint keeps of ``weights``."""
    return {"batch_shares": list(weights)} if weights else {}


def numbers_of_ranks(values: Mapping[str, Any]) -> list[str]:
    """Names of the settings in ``values`` that hold a number for each rank."""
    return [n for n in ("batch_shares", "shards") if isinstance(values.get(n), (list, tuple))]


def describe_shares(batches: Batches | StreamBatches) -> str:
    """How many samples each rank has of a batch."""
    sizes = batches.shares.sizes(batches.batch_size, batches.world_size, batches.micro_batches)
    shown = ", ".join(map(str, sizes[:16])) + (", ..." if len(sizes) > 16 else "")
    return f"samples by rank: {shown} of {batches.batch_size}"


def warn_of_batch_norm(
    shares: Shares, world: World, model: nn.Module, *, even: str = "--batch-shares even"
) -> list[str]:
    """A warning where a layer normalises over the samples of one rank, of which shares decide.

    even: what to set for even ones.
    """
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    for name, module in model.named_modules():
        is_local = isinstance(module, kinds) and not isinstance(module, SyncBatchNorm)
        if is_local and shares != "even" and world.size > 1:
            return [
                f"{name or 'the model'} is a {type(module).__name__}, which normalises "
                "over each rank's own samples, so that batch_shares change what is learned; use "
                f"dearmpi.SyncBatchNorm, or {even}"
            ]
    return []


@dataclass(slots=True)
class Balance:
    """Shares batches by measured speed."""

    world: World
    batches: Batches | StreamBatches
    _seconds: list[float] = field(default_factory=list, init=False)
    _num_noted: int = field(default=-1, init=False)  # the first step pays for allocations
    _wait: int = field(default=NUM_MEASURED, init=False)
    _in_a_row: int = field(default=0, init=False)

    def note(self, num_samples: int, own_s: float) -> bool:
        """Count a step of ``num_samples`` over all ranks, in which this rank computed for
        ``own_s``. Returns whether the shares have changed (collective).
        """
        self._num_noted += 1
        if num_samples == self.batches.batch_size and self._num_noted:
            self._seconds = [*self._seconds[1 - NUM_MEASURED :], own_s]
        if self._num_noted < self._wait:
            return False
        changed = self._decide()
        self._in_a_row = self._in_a_row + 1 if changed else 0
        soon = 0 < self._in_a_row < MOST_IN_A_ROW
        self._num_noted, self._wait = -1, NUM_MEASURED if soon else STEPS_BETWEEN
        self._seconds = []
        return changed

    def _decide(self) -> bool:
        """Let rank 0 choose by what all ranks have measured."""
        own = median(self._seconds) if self._seconds else 0.0
        seconds = [float(text) for text in self.world.all_gather_text(repr(own))]
        batches, shares = self.batches, self.batches.shares
        before = shares.sizes(batches.batch_size, batches.world_size, batches.micro_batches)
        chosen = before
        if self.world.is_root and min(seconds) > 0:
            chosen = faster_sizes(before, seconds, least=batches.micro_batches)
        after = tuple(json.loads(self.world.broadcast_text(json.dumps(chosen))))
        if after == before:
            return False
        shares.weights = tuple(map(float, after))
        return True
