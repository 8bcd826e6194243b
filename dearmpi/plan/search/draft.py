"""Draft: a plan in the making, and its simulated time.

``interleave`` decides which all-gathers run during backprop, and between which reduce-scatters.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dearmpi.plan.data.schedule import AllGather, Conduct, Launch, Schedule, Wait, serial, wfbp
from dearmpi.plan.search.problem import Buckets, BucketStarts, Problem

PATIENCES = (0.0, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Draft:
    """Where buckets begin, and how what they make travels.

    patience: how its gathers were interleaved; None: in another way.
    """

    seconds: float
    cuts: BucketStarts
    conduct: Conduct
    patience: float | None = None

    @property
    def schedule(self) -> Schedule:
        return self.conduct.schedule

    @property
    def window(self) -> int:
        return self.conduct.window

    @property
    def merit(self) -> tuple[float, bool]:
        """The least is best: by time to the nanosecond, then schedules whose late gathers hold up
        only the feed-forward, and not what a script does between steps.
        """
        return round(self.seconds, 9), self.schedule.wait is Wait.STEP


class Drafts:
    """Makes drafts for one problem and judges them."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def interleaved(self, cuts: BucketStarts, *, window: int, patience: float) -> Draft:
        """Gathers in the wire's idle time (``interleave``)."""
        buckets = self._problem.buckets(cuts)
        waits = not self._problem.eager
        gathers = interleave(
            buckets,
            released_s=buckets.step_s if waits else 0.0,
            window=window,
            patience=patience,
        )
        return self._judge(cuts, buckets, _overlapped(buckets, gathers), window, patience)

    def tied(self, cuts: BucketStarts, gathers: Sequence[AllGather], *, window: int) -> Draft:
        buckets = self._problem.buckets(cuts)
        return self._judge(cuts, buckets, _overlapped(buckets, gathers), window)

    def dear(self, cuts: BucketStarts, *, window: int) -> Draft:
        """All gathers after the last reduce-scatter, in feed-forward order."""
        buckets = self._problem.buckets(cuts)
        gathers = [AllGather(bucket, buckets.order[-1]) for bucket in reversed(buckets.order)]
        return self._judge(cuts, buckets, _overlapped(buckets, gathers), window)

    def plain(self, cuts: BucketStarts, *, window: int) -> Iterator[Draft]:
        """The schedules without overlap of the feed-forward: serial and WFBP."""
        buckets = self._problem.buckets(cuts)
        for make in (serial, wfbp):
            schedule = make(len(buckets.order))
            if schedule.reduce_scatters == buckets.order:
                yield self._judge(cuts, buckets, schedule, window)

    def _judge(
        self,
        cuts: BucketStarts,
        buckets: Buckets,
        schedule: Schedule,
        window: int,
        patience: float | None = None,
    ) -> Draft:
        conduct = self._problem.conduct(schedule, window)
        return Draft(self._problem.judge(buckets, conduct), cuts, conduct, patience)


def _overlapped(buckets: Buckets, gathers: Sequence[AllGather]) -> Schedule:
    """Reduce-scatters as they become ready; the feed-forward waits bucket by bucket."""
    return Schedule(
        "dear", buckets.order, tuple(gathers), Launch.GRADIENTS_READY, Wait.FEED_FORWARD
    )


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
