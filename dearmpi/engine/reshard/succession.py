"""Succession: parameters go from the buckets of one pipeline to those of the next, while both work.

What the last step has begun ends where it began, in the old buckets. Once all of them are updated,
each parameter moves as soon as the bucket that it is in is current, on the thread that drives
progress; so whoever reads parameters waits for no more than the updates and those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dearmpi.comm.api.collectives import Movement, Request
from dearmpi.comm.progress.lane import Work
from dearmpi.comm.progress.progress import Progress
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.bucket.bucket_state import BucketState
from dearmpi.engine.bucket.buffers import Stretches
from dearmpi.engine.iteration.cycle import Cycle
from dearmpi.engine.iteration.pipeline import Pipeline


class Arrival:
    """The parameters of ``bucket``, on their way into it in its order."""

    def __init__(self, bucket: BucketRuntime, origins: Sequence[BucketRuntime]) -> None:
        """``origins``: by slot, where they come from."""
        self.bucket = bucket
        self._coming = list(enumerate(origins))[::-1]

    @property
    def is_over(self) -> bool:
        """Whether all are here."""
        return not self._coming

    def advance(self) -> bool:
        """Take the next one over; False if it may not come yet."""
        slot, origin = self._coming[-1]
        if not origin.is_current():
            return False
        self.bucket.take_over(slot)
        self._coming.pop()
        return True


class Succession(Request):
    """Of ``old``, whose step was taken and may still be under way, by ``new``, to whose buckets the
    parameters are arriving, the first after all updates: they may lie where gradients have lain.
    Complete once all are there.
    """

    def __init__(self, old: Pipeline, new: Pipeline, changed: Callable[[], None]) -> None:
        """``changed`` is called whenever a bucket is complete."""
        origins = {name: bucket for bucket in old.buckets for name in bucket.spec.names}
        self._arrivals = [
            Arrival(bucket, [origins[name] for name in bucket.spec.names]) for bucket in new.buckets
        ]
        self._old, self._new, self._changed = old, new, changed
        self._moved = self._may_begin = False

    @property
    def movement(self) -> Movement:
        """Whether the last test has moved one."""
        return Movement.OPERATION if self._moved else Movement.NONE

    def may_begin(self) -> bool:
        """Whether all updates of the old buckets are over."""
        return self._may_begin

    def is_over(self) -> bool:
        """Whether all are there."""
        return not self._arrivals

    def test(self) -> bool:
        """Move one parameter, if any may: more at once would hold up what else is driven."""
        if not self._may_begin:
            if not _is_updated(self._old):
                return False
            self._may_begin = True
            self._old.retire()
        arrival = next((one for one in self._arrivals if one.advance()), None)
        self._moved = arrival is not None
        if arrival is not None and arrival.is_over:
            self._arrivals.remove(arrival)
            if not self._arrivals:
                self._old.let_go()
            arrival.bucket.pending = False
            self._new.cycle.num_finished += 1
            self._changed()
        return self.is_over()


def spare_memory(old: Pipeline) -> Stretches:
    """That of the gradients of ``old``, which nobody needs any more when the first parameter moves;
    none where a script may still have some of them.
    """
    memories = [bucket.memory for bucket in old.buckets]
    return {} if any(memory.is_lent for memory in memories) else memories[0].stretches


def succeed(old: Pipeline, new: Pipeline, progress: Progress) -> Succession:
    """Have the parameters move. Before that ``new`` is like one whose step is not over."""
    new.cycle = Cycle(active=frozenset(range(len(new.buckets))), stepped=True)
    succession = Succession(old, new, progress.notify)
    work = Work("parameters on their way from other buckets", lambda: succession, lambda: None)
    progress.submit(new.update_lane, work)
    return succession


def _is_updated(pipeline: Pipeline) -> bool:
    """Whether every bucket of its cycle has the update behind it."""
    behind = (
        BucketState.UPDATED,
        BucketState.GATHERING,
        BucketState.GATHERED,
        BucketState.IDLE,
    )
    return all(pipeline.buckets[index].state in behind for index in pipeline.cycle.active)
