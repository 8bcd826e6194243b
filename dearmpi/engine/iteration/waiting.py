"""Waiting: what the main thread waits for, and where no wait could end."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dearmpi.engine import refusal
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.iteration.iteration import EngineState
from dearmpi.engine.iteration.pipeline import Pipeline


class Waiting:
    """Waits for what ``pipeline`` carries, and counts for how long.

    polls: whether communication goes on only where the main thread has time for it.
    """

    def __init__(self, state: EngineState, pipeline: Pipeline) -> None:
        self._state, self._pipeline = state, pipeline
        self._eager, self._side = state.conduct.eager, state.side
        self._progress = state.world.progress
        self.polls = self._progress.mode == "poll"
        self.is_driver = self._progress.is_driver

    def until(self, ready: Callable[[], bool], what: str) -> None:
        """Until ``ready()``; ``what`` names it for people."""
        if not ready():
            with self._state.clock.waiting(what):
                self._progress.wait_until(ready, what=what)

    def until_finished(self) -> None:
        """Until the last step's gathers are over."""
        if self._state.iteration.stepping and (self._eager or self._precedes_step()):
            raise refusal.step_broken_off()
        self.until(self._state.iteration.is_finished, "the last step's gathers")

    def pre_forward(self, buckets: Iterable[BucketRuntime]) -> None:
        """A module is about to read parameters of ``buckets``: until they are current."""
        self.poll()
        for bucket in buckets:
            if bucket.pending:
                if self._state.iteration.stepping and self._precedes_step():
                    continue  # it stays unread
                self._refuse_endless()
                self.until(bucket.is_current, f"the parameters of bucket {bucket.index}")
            bucket.unread = False
            if bucket.mark is not None and self._side.await_mark(bucket.mark):
                bucket.mark = None

    def poll(self) -> None:
        """A moment in which communication may go on."""
        if self.polls:
            self._progress.poll()

    def awaits_step(self) -> bool:
        """Whether some buckets cannot be updated before the step, with eager updates too."""
        iteration = self._state.iteration
        if iteration.stepped:
            return self._eager and iteration.stepping
        # What has no gradient here may have one elsewhere: ranks agree on that in step().
        lacking = any(self._state.buckets[i].tracker.missing for i in iteration.active)
        return lacking or len(iteration.started) < len(iteration.active)

    def _refuse_endless(self) -> None:
        """Buckets that wait for ``step()`` hold up the gathers of the others."""
        if self.awaits_step():
            raise refusal.read_before_step()

    def _precedes_step(self) -> bool:
        """In the middle of ``step()``: whether the parameters still are as before it. None of them
        changes until the options are known; from then on a wait can end.

        Raises UsageError where some are updated by now.
        """
        self._refuse_endless()
        if self._state.iteration.options is None:
            if self._pipeline.fills_nan:
                raise refusal.read_in_step()
            return True
        self._pipeline.see_step()  # perhaps the progress thread does not know of it yet
        return False
