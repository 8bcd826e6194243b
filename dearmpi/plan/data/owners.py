"""Owners: which rank updates which parameter, where an optimizer works on whole tensors.

Pure and deterministic: every rank finds the same owners. The longest updates are placed first, each
on the rank with the least work so far. No rank then has more than 4/3 of what is possible (R. L.
Graham, Bounds on multiprocessing timing anomalies, 1969).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dearmpi.cuts import Cuts
from dearmpi.plan.data.layout import ALIGNMENT, Bucket, BucketLayout, ParamSpec, Placement

_NEWTON_SCHULZ = 5  # iterations of Muon
_EIGEN = 25.0 / 10.0  # of a cube: an eigenbasis is renewed each tenth step


def assign_owners(
    layout: BucketLayout, costs: Mapping[str, float], order: Sequence[int]
) -> BucketLayout:
    """``layout`` with shards that end where parameters do.

    costs: by name, what the update of a tensor costs that is treated as a whole, in any unit; all
    other parameters fill up bytes. order: of the buckets, in which they are reduced.
    """
    size = layout.world_size
    loads, filled = [0.0] * size, [0] * size
    owners: dict[str, int] = {}

    def give(specs: Sequence[ParamSpec], rank_of: Callable[[], int]) -> None:
        for spec in specs:
            rank = owners[spec.name] = rank_of()
            loads[rank] += costs.get(spec.name, 0.0)
            filled[rank] += spec.nbytes if spec.trained else 0

    buckets = [layout.buckets[index] for index in order]
    specs = [[placed.spec for placed in bucket.placements] for bucket in buckets]
    for members in specs:
        items = [spec for spec in members if spec.name in costs]
        items.sort(key=lambda spec: -costs[spec.name])
        give(items, lambda: min(range(size), key=loads.__getitem__))
    for members in specs:
        filler = sorted((s for s in members if s.name not in costs), key=lambda spec: -spec.nbytes)
        give(filler, lambda: min(range(size), key=filled.__getitem__))
    return BucketLayout(tuple(_cut(bucket, owners) for bucket in layout), size)


def _cut(bucket: Bucket, owners: Mapping[str, int]) -> Bucket:
    """``bucket`` with its parameters by owner; those that leave others unaligned come last."""
    specs = [placed.spec for placed in bucket.placements]
    specs.sort(key=lambda spec: (owners[spec.name], spec.nbytes % ALIGNMENT != 0))
    placements, start = [], 0
    ends = [0] * bucket.world_size
    for spec in specs:
        placements.append(Placement(spec, start))
        start += spec.numel
        ends[owners[spec.name]] = start
    offsets = [0]
    for end in ends:
        offsets.append(max(end, offsets[-1]))
    return Bucket(bucket.index, tuple(placements), Cuts(tuple(offsets)))


def owner_bound(costs: Mapping[str, float], size: int) -> float:
    """How much longer than the mean the rank with the longest update works, at least; 1 is even."""
    total = sum(costs.values())
    return max(1.0, max(costs.values(), default=0.0) * size / total) if total else 1.0


def known_cost(optimizer: str, shape: Sequence[int]) -> float | None:
    """Operations of one update of a tensor, by the optimizer's class; None of unknown ones."""
    short, long = _sides(shape)
    match optimizer:
        case "Muon" | "MuonWithAdamW":
            return _NEWTON_SCHULZ * (4.0 * short * short * long + 2.0 * short**3)
        case "SOAP" | "Shampoo":
            turned = 4.0 * short * long * (short + long)
            return (short**3 + long**3) * _EIGEN + turned
        case "Adafactor" | "LAMB" | "Lamb" | "LARS":
            return float(short * long)
    return None


def _sides(shape: Sequence[int]) -> tuple[int, int]:
    """The shorter and the longer side of a tensor as a matrix, all dimensions but one being one."""
    numel = 1
    for length in shape:
        numel *= length
    rows = max(1, shape[0] if len(shape) > 1 else 1)
    return min(rows, numel // rows), max(rows, numel // rows)
