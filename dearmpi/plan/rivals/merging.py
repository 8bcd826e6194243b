"""Merging: how other systems fuse or cut gradients as backprop produces them.

All of them all-reduce: one operation at a time, in the order in which it was started. ``link`` is
the cost of an all-reduce. A bucket also ends where the dtype or device changes.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from dearmpi.plan.data.layout import ParamSpec
from dearmpi.plan.model.cost import LinkModel
from dearmpi.plan.model.profile import ModelProfile


@dataclass(frozen=True, slots=True)
class ReadyGradient:
    """A gradient, and when backprop has produced it: seconds from its start."""

    spec: ParamSpec
    ready_s: float


@dataclass(frozen=True, slots=True)
class FusedGradients:
    """Gradients that share an all-reduce, in order of arrival, which starts at ``start_s``, or
    later if the network is still busy.
    """

    specs: tuple[ParamSpec, ...]
    start_s: float


def ready_gradients(profile: ModelProfile) -> list[ReadyGradient]:
    """All gradients in order of arrival.

    A parameter's gradient is complete when the backprop of the first layer that uses it ends.
    """
    now_s, ready_s = 0.0, dict[str, float]()
    for layer, times in reversed(list(profile.layers())):
        now_s += times.backprop_s
        ready_s.update(dict.fromkeys(layer.used, now_s))
    specs = [spec for spec in profile.workload.params() if spec.trained]
    arrivals = [ReadyGradient(spec, ready_s[spec.name]) for spec in reversed(specs)]
    return sorted(arrivals, key=lambda arrival: arrival.ready_s)


def fuse_until(
    arrivals: Iterable[ReadyGradient], *, first_bytes: float, cap_bytes: float
) -> list[FusedGradients]:
    """Close a bucket as soon as it holds ``cap_bytes`` or more, the first at ``first_bytes``.

    As torch's DistributedDataParallel does, whose buckets may therefore exceed their cap; for each
    dtype and device there is one that is filled, and a first one.
    """
    merged: list[FusedGradients] = []
    filling: dict[Hashable, list[ReadyGradient]] = {}
    filled: dict[Hashable, int] = {}  # bytes in each of them
    limits: dict[Hashable, float] = {}
    for arrival in arrivals:
        kind = arrival.spec.storage_kind
        filling.setdefault(kind, []).append(arrival)
        filled[kind] = filled.get(kind, 0) + arrival.spec.nbytes
        if filled[kind] >= limits.get(kind, first_bytes):
            merged.append(_merge(filling.pop(kind)))
            filled[kind] = 0
            limits[kind] = cap_bytes
    left = sorted(filling.values(), key=lambda arrivals: arrivals[-1].ready_s)
    return [*merged, *map(_merge, left)]


def merge_where_start_up_is_saved(
    arrivals: Iterable[ReadyGradient], link: LinkModel
) -> list[FusedGradients]:
    """Let a bucket wait for the next gradient if that takes less than the start-up it saves.

    MG-WFBP's rule (Shi, Chu and Li, INFOCOM 2019): merge if the next gradient arrives before this
    bucket could start plus ``alpha``. Never later than one bucket, nor than a bucket for each.
    """
    merged: list[FusedGradients] = []
    filling: list[ReadyGradient] = []
    free_s = 0.0  # when the network has done all closed buckets
    for arrival in arrivals:
        if filling:
            start_s = max(free_s, filling[-1].ready_s)
            waits = arrival.ready_s < start_s + link.alpha_s
            if not waits or arrival.spec.storage_kind != filling[-1].spec.storage_kind:
                merged.append(_merge(filling))
                free_s = start_s + link.alone_s(_nbytes(filling))
                filling = []
        filling.append(arrival)
    return [*merged, _merge(filling)] if filling else merged


def fuse_by_cycle(
    arrivals: Sequence[ReadyGradient], link: LinkModel, *, cap_bytes: float, cycle_s: float
) -> list[FusedGradients]:
    """Every ``cycle_s``, all-reduce what has arrived, in buckets of at most ``cap_bytes``.

    As Horovod does: a thread wakes up, fuses what is ready, and sleeps for the rest of the cycle.
    While it all-reduces, gradients gather for its next cycle. So it is with MPI; with NCCL the
    thread does not wait for the network, hence fuses less and starts up more often. The first
    cycle begins with backprop.
    """
    merged: list[FusedGradients] = []
    times = [arrival.ready_s for arrival in arrivals]
    now_s, place = 0.0, 0
    while place < len(arrivals):
        if arrivals[place].ready_s > now_s:
            idle = math.ceil((arrivals[place].ready_s - now_s) / cycle_s)
            now_s = max(now_s + idle * cycle_s, arrivals[place].ready_s)
        ready = arrivals[place : bisect_right(times, now_s)]
        end_s = now_s
        for bucket in _split_by_cap(ready, cap_bytes):
            merged.append(FusedGradients(tuple(arrival.spec for arrival in bucket), now_s))
            end_s += link.alone_s(_nbytes(bucket))
        place += len(ready)
        now_s = max(now_s + cycle_s, end_s)
    return merged


def _split_by_cap(arrivals: Iterable[ReadyGradient], cap_bytes: float) -> list[list[ReadyGradient]]:
    buckets: list[list[ReadyGradient]] = []
    open_: dict[
        Hashable, list[ReadyGradient]
    ] = {}  # by kind: Horovod looks ahead for more of the same
    filled: dict[Hashable, int] = {}
    for arrival in arrivals:
        kind, nbytes = arrival.spec.storage_kind, arrival.spec.nbytes
        if kind not in open_ or filled[kind] + nbytes > cap_bytes:
            open_[kind], filled[kind] = [], 0
            buckets.append(open_[kind])
        open_[kind].append(arrival)
        filled[kind] += nbytes
    return buckets


def _merge(arrivals: Sequence[ReadyGradient]) -> FusedGradients:
    return FusedGradients(tuple(arrival.spec for arrival in arrivals), arrivals[-1].ready_s)


def _nbytes(arrivals: Iterable[ReadyGradient]) -> int:
    return sum(arrival.spec.nbytes for arrival in arrivals)


def partition(profile: ModelProfile, *, most_numel: int) -> ModelProfile:
    """``profile`` with every parameter cut into pieces of at most ``most_numel`` elements."""
    pieces = {spec.name: _cut(spec, most_numel) for spec in profile.workload.params()}
    return replace(profile, workload=profile.workload.cut(pieces))


def _cut(spec: ParamSpec, most_numel: int) -> tuple[ParamSpec, ...]:
    if spec.numel <= most_numel:
        return (spec,)
    return tuple(
        replace(
            spec,
            name=f"{spec.name}[{start}:{min(start + most_numel, spec.numel)}]",
            shape=(min(most_numel, spec.numel - start),),
        )
        for start in range(0, spec.numel, most_numel)
    )


def prioritise(
    arrivals: Sequence[ReadyGradient], names: Sequence[str], link: LinkModel, *, credit_numel: int
) -> list[ParamSpec]:
    """In which order the all-reduces of ``arrivals`` reach the network.

    names: of all parameters, the most urgent first. credit_numel: elements on their way, beyond
    which none is handed to the network, where urgency no longer counts.
    """
    urgency = {name: place for place, name in enumerate(names)}
    waiting: list[tuple[int, ParamSpec]] = []
    underway: deque[ParamSpec] = deque()
    order: list[ParamSpec] = []
    coming = deque(arrivals)
    credit, now_s, free_s = credit_numel, 0.0, 0.0
    while coming or waiting or underway:
        while coming and coming[0].ready_s <= now_s:
            spec = coming.popleft().spec
            heapq.heappush(waiting, (urgency[spec.name], spec))
        while waiting and credit > 0:
            _, spec = heapq.heappop(waiting)
            if not underway:
                free_s = now_s + link.alone_s(spec.nbytes)
            underway.append(spec)
            order.append(spec)
            credit -= spec.numel
        now_s = min(
            free_s if underway else float("inf"), coming[0].ready_s if coming else float("inf")
        )
        if underway and free_s <= now_s:
            credit += underway.popleft().numel
            if underway:
                free_s += link.alone_s(underway[0].nbytes)
    return order
