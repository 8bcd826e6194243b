"""Interleaving: which all-gathers run during backprop, and between which reduce-scatters."""

from __future__ import annotations

import math
from bisect import insort

from dearmpi.plan.data.schedule import AllGather
from dearmpi.plan.search.problem import Buckets


def interleave(
    buckets: Buckets, *, released_s: float, window: int, patience: float
) -> tuple[AllGather, ...]:
    """Gathers in the order of Jackson's rule on one wire: what is needed first goes first.

    A reduce-scatter that is ready always precedes: it belongs to earlier layers than all that was
    reduced before, and has its gather still to come. The wire's idle time goes to the reduced
    bucket whose layers run first, which leaves to the feed-forward what it needs last. Operations
    are not cut here, so one that starts shortly before a reduce-scatter is ready would hold it up:
    it starts only if ``patience`` times its length is left until then.

    released_s: no gather starts before, 0 with eager updates.
    """
    lengths = [max(b.gather.wire_s, b.gather.alone_s / window) for b in buckets.loads]
    gathers: list[AllGather] = []
    waiting: list[tuple[int, int]] = []  # place and bucket: reduced, not gathered, least first
    updated = [math.inf] * len(lengths)
    queue = list(reversed(buckets.order))
    now, updating_s, last = 0.0, 0.0, -1
    while queue or waiting:
        next_s = buckets.loads[queue[-1]].ready_s if queue else math.inf
        if next_s <= now:
            last = queue.pop()
            load = buckets.loads[last]
            now += max(load.reduce.wire_s, load.reduce.alone_s / window)
            updating_s = max(updating_s, now) + load.update_s
            updated[last] = max(updating_s, released_s)
            insort(waiting, (buckets.places[last], last))
            continue
        for entry in waiting:
            bucket = entry[1]
            if updated[bucket] <= now and patience * lengths[bucket] <= next_s - now:
                waiting.remove(entry)
                gathers.append(AllGather(bucket, after=last))
                now += lengths[bucket]
                break
        else:
            later = (updated[bucket] for _, bucket in waiting if updated[bucket] > now)
            now = min([next_s, *later])
    return tuple(gathers)
