"""Bucket layout: which parameters share a flat buffer, where each lies, and which rank owns what.

Buckets are numbered in feed-forward order: bucket 0 holds the parameters of the first layers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from math import prod
from typing import Any, Protocol

from dearmpi.cuts import Cuts, even_cuts, weighted_cuts
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
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
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
        return self.start + self.spec.numel


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters fused into one collective, whose flat buffer is cut into shards, one per rank."""

    index: int
    placements: tuple[Placement, ...]
    cuts: Cuts

    @property
    def world_size(self) -> int:
        return self.cuts.num_ranks

    @property
    def numel(self) -> int:
        return self.placements[-1].stop

    @property
    def largest_shard(self) -> int:
        return self.cuts.largest

    @property
    def padded_numel(self) -> int:
        """Elements of the flat buffer; more than ``numel`` if the world size does not divide."""
        return self.cuts.total

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
        return self.placements[0].spec.itemsize

    @property
    def nbytes(self) -> int:
        return self.padded_numel * self.itemsize

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters, in the order in which they lie."""
        return tuple(placed.spec.name for placed in self.placements)

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Elements of the flat buffer that ``rank`` owns, padding included: (start, stop)."""
        return self.cuts.range_of(rank)

    def owned_slots(self, rank: int) -> tuple[int, ...]:
        """Places among ``placements`` of the parameters that begin in the shard of ``rank``."""
        start, stop = self.shard_range(rank)
        placed = enumerate(self.placements)
        return tuple(slot for slot, one in placed if start <= one.start < stop)


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
                    raise ConfigError(
                        f"parameter {name} is in two buckets; put it into one",
                        code="plan-inconsistent",
                    )
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
            line = (
                f"bucket {bucket.index}: {len(bucket.placements)} tensors, "
                f"{bucket.nbytes / 2**20:.2f} MiB, shard {bucket.largest_shard}, "
                f"padding {bucket.padded_numel - bucket.numel}: {span}"
            )
            lines.append(line if bucket.cuts.is_even else f"{line}; {_owners(bucket)}")
        return "\n".join(lines)


def weigh(layout: BucketLayout, weights: Sequence[float]) -> BucketLayout:
    """``layout`` with shards in proportion to ``weights``, by rank."""
    cut = (replace(b, cuts=weighted_cuts(b.numel, weights)) for b in layout)
    return BucketLayout(tuple(cut), layout.world_size)


def _owners(bucket: Bucket) -> str:
    """How many elements each rank owns."""
    sizes = (bucket.cuts.size_of(rank) for rank in range(bucket.world_size))
    return "elements by rank: " + ", ".join(map(str, sizes))


# Bytes. Code for devices may take the addresses of parameters for multiples of it: torch.compile's
# does, if it was made for parameters that were there, and does not look again.
ALIGNMENT = 16


def build_layout(groups: Sequence[Sequence[ParamSpec]], world_size: int) -> BucketLayout:
    """Lay out ``groups`` of parameters, one bucket each, in feed-forward order. Parameters that
    would leave later ones unaligned come last in their bucket.

    Raises ConfigError for an empty group, an empty parameter, or a group that mixes dtypes or
    devices.
    """
    buckets = []
    for index, group in enumerate(groups):
        if not group:
            raise ConfigError(
                f"bucket {index} has no parameters; leave it out", code="plan-inconsistent"
            )
        placements, start = [], 0
        for spec in sorted(group, key=lambda spec: spec.nbytes % ALIGNMENT != 0):
            if spec.numel == 0:
                raise ConfigError(
                    f"parameter {spec.name} has shape {spec.shape}: no elements; leave it out",
                    code="plan-inconsistent",
                )
            if spec.storage_kind != group[0].storage_kind:
                raise ConfigError(
                    f"bucket {index} mixes {group[0].name} {group[0].storage_kind} with "
                    f"{spec.name} {spec.storage_kind} (dtype, device, trained); put them into "
                    "different buckets",
                    code="plan-inconsistent",
                )
            placements.append(Placement(spec, start))
            start += spec.numel
        buckets.append(Bucket(index, tuple(placements), even_cuts(start, world_size)))
    return BucketLayout(tuple(buckets), world_size)


class Parameter(Protocol):
    """The part of ``torch.nn.Parameter`` that ``spec_of`` reads."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> Any: ...

    @property
    def device(self) -> Any: ...

    @property
    def requires_grad(self) -> bool: ...

    def element_size(self) -> int: ...


def spec_of(param: Parameter, name: str) -> ParamSpec:
    """``param`` under its name in the model; of its device the kind, since ranks number theirs."""
    return ParamSpec(
        name,
        tuple(param.shape),
        itemsize=param.element_size(),
        dtype=str(param.dtype).removeprefix("torch."),
        device=str(param.device).partition(":")[0],
        trained=param.requires_grad,
    )


_LEAST_SHARE = 0.25  # of the cap: with less in it a bucket is not closed
_FIRST_SHARE = 1 / 16  # of the cap: about what the first layers have to themselves


def fuse_by_cap(specs: Sequence[ParamSpec], cap_bytes: int) -> tuple[tuple[ParamSpec, ...], ...]:
    """Group ``specs`` (in feed-forward order) into buckets of about ``cap_bytes`` bytes.

    Buckets fill from the last layer on. A parameter that does not fit begins a bucket, alone in it
    if it is larger than the cap; but it joins one that is less than a quarter full, since a bucket
    costs time whatever it holds. So a bucket exceeds the cap by less than a quarter, or holds a
    parameter that is larger than the cap itself.
    Parameters of different dtype or device never share a bucket, nor do frozen and trained ones.

    The first layers' reduce-scatter and all-gather are the ones that no computation hides. So their
    bucket ends with the parameter that makes it a sixteenth full. The rest is a bucket of its own,
    if that is a quarter full.
    """
    closed: list[list[ParamSpec]] = []
    filling: dict[tuple[str, str, bool], tuple[list[ParamSpec], int]] = {}  # with its bytes
    for spec in reversed(specs):
        bucket, filled = filling.get(spec.storage_kind, (None, 0))
        nbytes = spec.nbytes
        if filled + nbytes > cap_bytes and filled >= cap_bytes * _LEAST_SHARE:
            bucket, filled = None, 0
        if bucket is None:
            bucket = []
            closed.append(bucket)
        bucket.append(spec)
        filling[spec.storage_kind] = bucket, filled + nbytes
    position = {spec.name: place for place, spec in enumerate(specs)}
    in_order = [tuple(reversed(bucket)) for bucket in closed]
    trained = (bucket for bucket in in_order if bucket[0].trained)
    first = min(trained, key=lambda bucket: position[bucket[0].name], default=())
    parts = (_part(bucket, cap_bytes) if bucket is first else [bucket] for bucket in in_order)
    return tuple(sorted(chain(*parts), key=lambda bucket: position[bucket[0].name]))


def _part(bucket: tuple[ParamSpec, ...], cap_bytes: int) -> list[tuple[ParamSpec, ...]]:
    """The first layers' ``bucket``, in two where that is worth a bucket."""
    ends = [*accumulate(spec.nbytes for spec in bucket)]
    count = bisect_left(ends, cap_bytes * _FIRST_SHARE) + 1  # less would not be worth a bucket
    if count >= len(bucket) or ends[-1] - ends[count - 1] < cap_bytes * _LEAST_SHARE:
        return [bucket]
    return [bucket[:count], bucket[count:]]
