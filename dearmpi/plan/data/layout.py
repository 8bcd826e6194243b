"""Bucket layout: which parameter lies where in which flat buffer, and which rank owns what.

Buckets are numbered in feed-forward order: bucket 0 holds the parameters of the first layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from dearmpi.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A parameter as the plan sees it.

    dtype and device are names (``float32``, ``cpu``); itemsize is in bytes. Parameters that are
    frozen at the start (``trained`` is False) get buckets of their own, which lie idle.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int = 4
    dtype: str = "float32"
    device: str = "cpu"
    trained: bool = True

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.itemsize

    @property
    def storage_kind(self) -> tuple[str, str, bool]:
        """Parameters share a flat buffer only if this is equal."""
        return self.dtype, self.device, self.trained


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a parameter lies in its bucket: elements ``start`` to ``stop`` of the flat buffer."""

    spec: ParamSpec
    start: int

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.spec.numel


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters fused into one collective, cut into equal shards, one per rank."""

    index: int
    placements: tuple[Placement, ...]
    world_size: int

    @property
    def numel(self) -> int:
        """Elements that belong to parameters."""
        return self.placements[-1].stop

    @property
    def shard_numel(self) -> int:
        """Elements of one shard."""
        return -(-self.numel // self.world_size)

    @property
    def padded_numel(self) -> int:
        """Elements of the flat buffer; more than ``numel`` if the world size does not divide."""
        return self.shard_numel * self.world_size

    @property
    def trained(self) -> bool:
        """Whether its parameters were to be trained at the start; if not, it lies idle."""
        return self.placements[0].spec.trained

    @property
    def dtype(self) -> str:
        """Of its parameters, by torch's name; they have one."""
        return self.placements[0].spec.dtype

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.placements[0].spec.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the flat buffer, padding included."""
        return self.padded_numel * self.itemsize

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters, in feed-forward order."""
        return tuple(placed.spec.name for placed in self.placements)

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Elements of the flat buffer that ``rank`` owns, padding included: (start, stop)."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """All buckets of a model for one world size. Every parameter stands in exactly one bucket."""

    buckets: tuple[Bucket, ...]
    world_size: int

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for position, bucket in enumerate(self.buckets):
            assert bucket.index == position and bucket.world_size == self.world_size
            for name in bucket.names:
                if name in seen:
                    raise ConfigError(f"parameter {name} stands in two buckets")
                seen.add(name)

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self.buckets)

    def __len__(self) -> int:
        return len(self.buckets)

    def bucket_of(self) -> dict[str, Bucket]:
        """Parameter name to bucket."""
        return {name: bucket for bucket in self.buckets for name in bucket.names}

    def describe(self) -> str:
        """One line per bucket: its parameters' count and ends, size, shard and padding."""
        lines = []
        for bucket in self.buckets:
            first, last = bucket.names[0], bucket.names[-1]
            span = first if first == last else f"{first} .. {last}"
            lines.append(
                f"bucket {bucket.index}: {len(bucket.placements)} tensors, "
                f"{bucket.nbytes / 2**20:.2f} MiB, shard {bucket.shard_numel}, "
                f"padding {bucket.padded_numel - bucket.numel}: {span}"
            )
        return "\n".join(lines)


# Bytes. Code for devices may take the addresses of parameters for multiples of it: torch.compile's
# does, if it was made for parameters that were there, and does not look again.
_ALIGNMENT = 16


def build_layout(groups: Sequence[Sequence[ParamSpec]], world_size: int) -> BucketLayout:
    """Lay out ``groups`` of parameters, one bucket each, in feed-forward order; but those behind
    which others would not be aligned come last in their bucket.

    Raises ConfigError for an empty group, an empty parameter, or a group that mixes dtypes or
    devices.
    """
    buckets = []
    for index, group in enumerate(groups):
        if not group:
            raise ConfigError(f"bucket {index} holds no parameter")
        placements, start = [], 0
        for spec in sorted(group, key=lambda spec: spec.nbytes % _ALIGNMENT != 0):
            if spec.numel == 0:
                raise ConfigError(
                    f"parameter {spec.name} has shape {spec.shape}: no elements; leave it out"
                )
            if spec.storage_kind != group[0].storage_kind:
                raise ConfigError(
                    f"bucket {index} mixes {group[0].name} {group[0].storage_kind} "
                    f"with {spec.name} {spec.storage_kind} (dtype, device, trained)"
                )
            placements.append(Placement(spec, start))
            start += spec.numel
        buckets.append(Bucket(index, tuple(placements), world_size))
    return BucketLayout(tuple(buckets), world_size)
