"""Owners: which rank updates which parameter, where an optimizer works on whole tensors.

Pure and deterministic: every rank finds the same owners. The longest updates are placed first, each
on the rank with the least work so far. No rank then has more than 4/3 of what is possible (R. L.
Graham, Bounds on multiprocessing timing anomalies, 1969). All other parameters are filler, which
may be cut at any element: it goes to the ranks with the fewest bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from dearmpi.cuts import Cuts, weighted_cuts
from dearmpi.plan.data.layout import ALIGNMENT, Bucket, BucketLayout, ParamSpec, Placement

_NEWTON_SCHULZ = 5  # iterations of Muon
_EIGEN = 25.0 / 10.0  # of a cube: an eigenbasis is renewed each tenth step


def assign_owners(
    layout: BucketLayout, costs: Mapping[str, float], order: Sequence[int]
) -> BucketLayout:
    """``layout`` with shards that cut no parameter which ``costs`` names.

    costs: by name, what the update of a tensor costs that is treated as a whole, in any unit; all
    other parameters fill up bytes. order: of the buckets, in which they are reduced.
    """
    size = layout.world_size
    loads, filled = [0.0] * size, [0] * size
    shared = {index: _SharedBucket(layout.buckets[index], size) for index in order}
    for bucket in shared.values():
        wholes = [spec for spec in bucket.specs if spec.name in costs]
        for spec in sorted(wholes, key=lambda spec: -costs[spec.name]):
            rank = min(range(size), key=loads.__getitem__)
            loads[rank] += costs[spec.name]
            bucket.give(spec, rank, filled)
    cut: dict[int, Bucket] = {}
    for index, bucket in shared.items():
        if any(bucket.members):
            filler = [spec for spec in bucket.specs if spec.name not in costs]
            for spec in sorted(filler, key=lambda spec: -spec.nbytes):
                bucket.fill(spec, filled)
            cut[index] = bucket.placed()
    for index, bucket in shared.items():  # which are cut anywhere, and so make up for the others
        if index not in cut:
            cut[index] = _level(bucket.bucket, filled)
    return BucketLayout(tuple(cut[bucket.index] for bucket in layout), size)


def _level(bucket: Bucket, filled: list[int]) -> Bucket:
    """``bucket``, cut so that ranks with the fewest bytes get as many of them."""
    missing = _missing(filled, bucket.numel * bucket.itemsize)
    bucket = replace(bucket, cuts=weighted_cuts(bucket.numel, missing))
    if bucket.trained:
        for rank in range(bucket.world_size):
            filled[rank] += bucket.cuts.size_of(rank) * bucket.itemsize
    return bucket


def _missing(filled: Sequence[int], nbytes: int) -> list[float]:
    """Parts of ``nbytes`` that level ``filled`` as far as they can."""
    total = float(nbytes)
    level, in_order = 0.0, sorted(filled)
    for count, least in enumerate(in_order, 1):
        total += least
        level = total / count
        if level <= in_order[min(count, len(in_order) - 1)]:
            break
    return [max(0.0, level - one) for one in filled]


@dataclass(slots=True)
class _SharedBucket:
    """A bucket while its parameters are given to ranks.

    members: parameters by rank, none of which is cut. spans: by rank, a parameter that begins there
    behind its members and ends on a later rank. With it go the elements of each rank up to this
    one; ranks between have nothing else.
    """

    bucket: Bucket
    size: int
    members: list[list[ParamSpec]] = field(init=False)
    spans: dict[int, tuple[ParamSpec, Cuts]] = field(default_factory=dict)
    _is_between: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        self.members = [[] for _ in range(self.size)]
        self._is_between = [False] * self.size

    @property
    def specs(self) -> list[ParamSpec]:
        """The parameters, in the order in which they lie at first."""
        return [placed.spec for placed in self.bucket.placements]

    def give(self, spec: ParamSpec, rank: int, filled: list[int]) -> None:
        """All of ``spec`` belongs to ``rank``."""
        self.members[rank].append(spec)
        filled[rank] += spec.nbytes if spec.trained else 0

    def fill(self, spec: ParamSpec, filled: list[int]) -> None:
        """Give ``spec`` to the rank with the fewest bytes. Cut it where that rank would then have
        more than the mean and a cut leaves fewer.
        """
        free = (rank for rank, is_between in enumerate(self._is_between) if not is_between)
        rank = min(free, key=filled.__getitem__)
        most, spread = filled[rank] + spec.nbytes, None
        if most * self.size > sum(filled) + spec.nbytes:
            for first, last in self._gaps():
                held = filled[first : last + 1]
                cuts = weighted_cuts(spec.numel, _missing(held, spec.nbytes))
                sizes = [cuts.size_of(place) * spec.itemsize for place in range(len(held))]
                if (reached := max(map(sum, zip(held, sizes, strict=True)))) < most:
                    most, spread = reached, (first, sizes, cuts)
        if spread is None:
            self.give(spec, rank, filled)
            return
        first, sizes, cuts = spread
        self.spans[first] = spec, cuts
        self._is_between[first + 1 : first + len(sizes) - 1] = [True] * (len(sizes) - 2)
        for place, nbytes in enumerate(sizes):
            filled[first + place] += nbytes if spec.trained else 0

    def _gaps(self) -> Iterator[tuple[int, int]]:
        """First and last of ranks over which a parameter may be cut: those between have nothing."""
        ends = {first + cuts.num_ranks - 1 for first, (_, cuts) in self.spans.items()}
        ends |= {rank for rank in range(self.size) if self.members[rank]}
        stops = sorted(ends | self.spans.keys() | {0, self.size - 1})
        return (pair for pair in pairwise(stops) if pair[0] not in self.spans)

    def placed(self) -> Bucket:
        """The bucket with its parameters by rank; those that leave others unaligned come last."""
        placements: list[Placement] = []
        ends: dict[int, int] = {}
        start = 0
        for rank, members in enumerate(self.members):
            for spec in sorted(members, key=lambda spec: spec.nbytes % ALIGNMENT != 0):
                placements.append(Placement(spec, start))
                start += spec.numel
            if rank in self.spans:
                spec, cuts = self.spans[rank]
                placements.append(Placement(spec, start))
                ends |= {rank + place: start + end for place, end in enumerate(cuts.offsets[1:-1])}
                start += spec.numel
            ends.setdefault(rank, start)
        offsets = (0, *(ends[rank] for rank in range(self.size)))
        return Bucket(self.bucket.index, tuple(placements), Cuts(offsets))


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
