"""Priority: tensors cut into partitions, and the first layers' sent first, as ByteScheduler does.

Peng et al., "A generic communication scheduler for distributed DNN training acceleration", SOSP
2019. It fuses nothing, and a layer's next feed-forward waits for its own parameters only.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from dearmpi.plan.data.layout import ParamSpec
from dearmpi.plan.model.cost import LinkModel
from dearmpi.plan.model.profile import ModelProfile
from dearmpi.plan.rivals.merging import Arrival


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
    arrivals: Sequence[Arrival], names: Sequence[str], link: LinkModel, *, credit_numel: int
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
