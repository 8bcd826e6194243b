"""UpdateSet: the updates of all buckets, and how they are built."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.optim import Optimizer

from dearmpi.config import EngineConfig
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.device.comm_stream import CommStream, DeviceCommStream, HostCommStream
from dearmpi.engine.update.master import MasterRule
from dearmpi.engine.update.shard import NUM_FETCHED, HostMemory, HostShard, ResidentShard, Shard
from dearmpi.engine.update.shard_update import ShardUpdate
from dearmpi.engine.update.update import WholeUpdate

Updates = Sequence[ShardUpdate] | Sequence[WholeUpdate]


def shards_of(updates: Updates) -> list[ShardUpdate]:
    """All of them where they are of shards, else none."""
    return [update for update in updates if isinstance(update, ShardUpdate)]


def wholes_of(updates: Updates) -> list[WholeUpdate]:
    """All of them where they are of whole parameters, else none."""
    return [update for update in updates if isinstance(update, WholeUpdate)]


@dataclass(frozen=True, slots=True)
class UpdateSet:
    """The updates of all buckets, and what they share.

    of_buckets: none where the wrapped optimizer does its work itself, as in a world of one.
    masters: which tensors have master copies. comm_stream: where updates run, and where their state
    may be changed. on_host: whether the optimizer works in host memory, for a device.
    """

    of_buckets: Updates = ()
    masters: MasterRule = MasterRule()
    comm_stream: CommStream = HostCommStream()
    on_host: bool = False

    @property
    def shards(self) -> list[ShardUpdate]:
        """The updates where they are of shards, else none."""
        return shards_of(self.of_buckets)

    @property
    def num_at_once(self) -> int:
        """How many may be under way, of which all but one are fetching."""
        return NUM_FETCHED if self.on_host else 1


def build_updates(
    optimizer: Optimizer,
    buckets: Sequence[BucketRuntime],
    *,
    rank: int,
    config: EngineConfig,
    comm_stream: CommStream,
    scalars: Sequence[frozenset[str]],
) -> UpdateSet:
    """One update for each bucket: all of shards, or all of whole parameters.

    ``scalars``: as in ``ShardUpdate``. Raises DeviceError if host memory cannot be pinned.
    """
    groups = {
        param: index
        for index, group in enumerate(optimizer.param_groups)
        for param in group["params"]
    }
    on_host = config.update_on == "host"
    compressed = [name for b in buckets if b.shown is not None for name in b.spec.names]
    masters = MasterRule.chosen_by(
        config, world_size=buckets[0].spec.world_size, compressed=compressed
    )
    updates: Updates
    if config.gather == "gradients":
        updates = [
            WholeUpdate(optimizer, b, groups, masters=masters, scalars=scalars) for b in buckets
        ]
    else:
        shards = _place_shards(buckets, rank=rank, comm_stream=comm_stream, on_host=on_host)
        updates = [
            ShardUpdate(optimizer, bucket, groups, shard=shard, masters=masters, scalars=scalars)
            for bucket, shard in zip(buckets, shards, strict=True)
        ]
    return UpdateSet(updates, masters, comm_stream, on_host)


def _place_shards(
    buckets: Sequence[BucketRuntime], *, rank: int, comm_stream: CommStream, on_host: bool
) -> Iterable[Shard]:
    if not on_host:
        return [ResidentShard(bucket, rank=rank) for bucket in buckets]
    assert isinstance(comm_stream, DeviceCommStream), "without a device this is refused"
    most_bytes = max(b.spec.largest_shard * b.spec.itemsize for b in buckets)
    memory = HostMemory(comm_stream, most_bytes=most_bytes)
    return [HostShard(bucket, rank=rank, memory=memory) for bucket in buckets]
