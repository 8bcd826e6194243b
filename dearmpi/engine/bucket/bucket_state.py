"""Bucket state: where a bucket is in its iteration."""

from __future__ import annotations

from enum import Enum, auto


class BucketState(Enum):
    """Where a bucket is in its iteration.

    With ``gather="parameters"`` a bucket goes IDLE, READY, REDUCING, REDUCED, UPDATING, UPDATED,
    GATHERING, GATHERED, IDLE; with ``gather="gradients"`` the update follows the gather.
    """

    IDLE = auto()  # parameters are current; gradients may be arriving
    READY = auto()  # every gradient is in the buffer
    REDUCING = auto()
    REDUCED = auto()  # the own shard holds averaged gradients
    UPDATING = auto()
    UPDATED = auto()
    GATHERING = auto()
    GATHERED = auto()


# From each to which others a bucket may go.
LEGAL = {
    BucketState.IDLE: {BucketState.READY},
    BucketState.READY: {BucketState.REDUCING},
    BucketState.REDUCING: {BucketState.REDUCED},
    BucketState.REDUCED: {BucketState.UPDATING, BucketState.GATHERING, BucketState.IDLE},
    BucketState.UPDATING: {BucketState.UPDATED},
    BucketState.UPDATED: {BucketState.GATHERING, BucketState.IDLE},
    BucketState.GATHERING: {BucketState.GATHERED},
    BucketState.GATHERED: {BucketState.UPDATING, BucketState.IDLE},
}
