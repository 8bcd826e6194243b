"""Backprop: gradients' way into the buckets, and when those are launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dearmpi.comm.world import World
from dearmpi.engine import refusal
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.bucket.bucket_state import BucketState
from dearmpi.engine.iteration.cycle import Cycle
from dearmpi.engine.iteration.pipeline import Pipeline
from dearmpi.engine.iteration.waiting import Waiting
from dearmpi.engine.state.options import OptionReader
from dearmpi.plan.data.schedule import Launch


class Backprop:
    """Takes gradients as autograd finishes them, from the first of an iteration to the step.

    eager: as in ``EngineConfig``. options: as in ``Engine``.
    """

    def __init__(
        self,
        world: World,
        pipeline: Pipeline,
        waiting: Waiting,
        *,
        eager: bool,
        options: OptionReader,
    ) -> None:
        self._world, self._pipeline, self._waiting = world, pipeline, waiting
        self._polls = waiting.polls
        self._buckets, self._side = pipeline.buckets, pipeline.side
        self._joining = pipeline.joining
        self._launches = pipeline.schedule.launch is Launch.GRADIENTS_READY
        self._eager, self._options = eager, options
        self._synchronizing = True

    @property
    def _cycle(self) -> Cycle:
        return self._pipeline.cycle

    def begin(self) -> None:
        """Autograd is about to accumulate the first gradient of a backprop.

        Where ``model.zero_grad()`` has cleared all gradients meanwhile, they are dropped.
        """
        if self._cycle.stepped:
            return
        name = self.find_cleared()
        params = (param for bucket in self._buckets for param in bucket.params)
        if name and any(param.grad is not None for param in params):
            raise refusal.cleared(name)
        if name:
            self.drop()
        else:
            self.end()  # of one that was broken off

    def grad_ready(self, bucket: BucketRuntime, slot: int) -> None:
        """Autograd has finished the gradient of one parameter."""
        if not self._synchronizing:
            self._keep_gradient(bucket, slot)
            return
        if bucket.arrivals.came:
            bucket.collect_gradients()
        if slot not in bucket.arrivals.awaited:
            self._await_gradient(bucket, slot)
        stream = self._side.current()
        if stream != bucket.held_on:
            self._store_held(bucket)
            bucket.streams.add(stream)
            bucket.held_on = stream
        if bucket.take_gradient(slot):
            if bucket.state is BucketState.IDLE:
                self._close_bucket(bucket)
                if self._launches:
                    self._launch_ready()
            else:  # a further backprop before anything is launched
                self._note_written(bucket)
        if self._polls:
            self._waiting.poll()

    def end(self) -> None:
        """No more gradients come in a backprop, or in one inside another."""
        for bucket in self._buckets:
            if bucket.arrivals.came:
                bucket.collect_gradients()

    def finish(self) -> None:
        """No more gradients come before the step: launch what has not been launched."""
        if self._cycle.stepped:
            self.begin_cycle()
        cycle = self._cycle
        waiting = cycle.active - cycle.launched
        unfilled = {i for i in waiting if self._buckets[i].state is BucketState.IDLE}
        cycle.unfilled |= unfilled
        for index in unfilled:
            self._store_held(self._buckets[index])
            self._buckets[index].close_gradients()
            self._close_bucket(self._buckets[index])
        self._launch_ready()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backprops inside stay local and add up."""
        before, self._synchronizing = self._synchronizing, False
        for bucket in self._buckets:
            bucket.arrivals.quiet.clear()
        try:
            yield
        finally:
            self._synchronizing = before

    def wait_reduced(self) -> None:
        """Finish backprop and wait until every own shard holds averaged gradients."""
        if self._eager:
            raise refusal.looked_at_gradients()
        self.finish()
        self._waiting.until(self._pipeline.is_settled, "the reduce-scatters")
        self._side.lead()

    def drop(self) -> None:
        """Forget the gradients of a backprop that no step followed."""
        if self._cycle.stepped:
            return
        self._joining.refuse("dropping gradients after a backward")
        if self._eager:
            raise refusal.dropped()
        self.wait_reduced()
        for index in self._cycle.active:
            self._buckets[index].release_gradients()
            self._buckets[index].forget()
        self._pipeline.begin(Cycle(stepped=True))

    def begin_cycle(self, *, joined: bool = False) -> None:
        """An iteration begins, ``joined``: of a rank that has no batches left."""
        self._waiting.until_finished()
        known = self._pipeline.late.are_known
        self._waiting.until(known, "the roll call of the step before the last")
        self._side.lead()  # gradients go where updates have read
        if self._joining.is_open and not joined:
            self._joining.attend(True)
        self._pipeline.tell_replicas()
        self._world.begin_backprop()
        active = set()
        stream = self._side.current()
        quietly = stream is None and not self._polls  # else each has something to be done for it
        for bucket in self._buckets:
            bucket.check_storage()
            bucket.held_on = stream
            bucket.streams = {stream}
            if bucket.expect_gradients(quietly=quietly):
                active.add(bucket.index)
        options = self._options.read() if self._eager and not joined else None
        self._pipeline.num_reduced += 1
        self._pipeline.begin(Cycle(active=frozenset(active), options=options))

    def find_cleared(self) -> str:
        """The name of a parameter whose gradient somebody else took away; empty if none is gone."""
        return next((name for bucket in self._buckets if (name := bucket.find_cleared())), "")

    def _keep_gradient(self, bucket: BucketRuntime, slot: int) -> None:
        if not self._cycle.stepped:
            raise refusal.unsynchronized_last()
        self._waiting.pre_forward((bucket,))
        bucket.keep_gradient(slot)

    def _await_gradient(self, bucket: BucketRuntime, slot: int) -> None:
        """One that comes first of an iteration, or again, or from nowhere."""
        if self._cycle.stepped:
            self.begin_cycle()
        if slot not in bucket.arrivals.expected:
            raise refusal.unfrozen_late(bucket.spec.names[slot])
        launched = bucket.index in self._cycle.launched
        if launched or (self._launches and slot in bucket.arrivals.arrived):
            self._reopen()

    def _reopen(self) -> None:
        """A further backprop before the step: its gradients add to those already reduced."""
        self._joining.refuse("a second backprop before step()")
        if self._eager:
            raise refusal.second_backprop()
        self.wait_reduced()
        self._world.begin_backprop()
        for index in self._cycle.active:
            self._side.keep(self._buckets[index].reopen())
        self._pipeline.num_reduced += 1
        self._cycle.rewind()

    def _close_bucket(self, bucket: BucketRuntime) -> None:
        """All gradients of ``bucket`` are in its buffer, or queued to be."""
        bucket.streams.add(self._side.current())
        self._note_written(bucket)
        bucket.move_to(BucketState.READY)

    def _store_held(self, bucket: BucketRuntime) -> None:
        """What has been taken goes into the buffer on the stream that made it."""
        if bucket.held_on == self._side.current():
            bucket.store_gradients()
            return
        with self._side.on(bucket.held_on):
            bucket.store_gradients()

    def _note_written(self, bucket: BucketRuntime) -> None:
        self._side.written(bucket.gradients.data, bucket.streams)

    def _launch_ready(self) -> None:
        """Launch buckets in the schedule's order, as far as their gradients are there."""
        cycle = self._cycle
        for index in cycle.reduce_scatters:
            if index in cycle.launched or index not in cycle.active:
                continue
            bucket = self._buckets[index]
            if bucket.state is not BucketState.READY:
                return
            if self._eager:  # it may be updated while backprop goes on
                self._pipeline.supersede(bucket)
            self._pipeline.launch(bucket)
