"""Backprop: how gradients get into the buckets, and when a bucket starts on its way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from dearmpi.engine import usage_errors
from dearmpi.engine.bucket.bucket import BucketRuntime, BucketState
from dearmpi.engine.bucket.grad_tracker import PENDING_STATES, GradState
from dearmpi.engine.bucket.placeholder import without_gradients
from dearmpi.engine.iteration.engine_state import EngineState
from dearmpi.engine.iteration.pipeline import Pipeline, Waiting
from dearmpi.engine.state.options import OptionReader
from dearmpi.plan.data.schedule import Launch


class Backprop:
    """Takes gradients as autograd finishes them, from the first of an iteration to the step."""

    def __init__(
        self, state: EngineState, pipeline: Pipeline, waiting: Waiting, options: OptionReader
    ) -> None:
        """``options``: read here with eager updates, before the first one."""
        self._state, self._pipeline, self._waiting = state, pipeline, waiting
        self._buckets, self._comm_stream = state.buckets, state.comm_stream
        self._polls = waiting.polls
        self._starts_early = state.schedule.launch is Launch.GRADIENTS_READY
        self._eager, self._options = state.conduct.eager, options
        self._synchronizing = True

    def begin(self) -> None:
        """Autograd is about to accumulate the first gradient of a backprop.

        Where ``model.zero_grad()`` has cleared all gradients meanwhile, they are dropped.
        """
        if not self._state.iteration.stepped:
            self._continue_or_drop()
        if self._state.keeps_gradients and self._state.iteration.stepped:
            self._renew_kept()

    def _continue_or_drop(self) -> None:
        name = self.find_cleared()
        params = (param for bucket in self._buckets for param in bucket.params)
        if name and any(param.grad is not None for param in params):
            raise usage_errors.cleared(name)
        if name:
            self.discard_grads()
            for bucket in self._buckets:  # the script has set them to None
                bucket.tracker.zero(set_to_none=True)
        else:
            self.end()  # of one that was broken off

    def _renew_kept(self) -> None:
        """What a script has kept of the last step is its own from now on; what it has not cleared
        is added to.
        """
        self._waiting.until_finished()
        self._comm_stream.make_current_wait()
        used = self._state.iteration.used
        adds = any(bucket.kept_slots() for bucket in self._buckets)  # else all is cleared
        for bucket in self._buckets:
            bucket.forget_cleared()
            if adds:
                bucket.add_to_kept(None if used is None else used[bucket.index])
            bucket.renew_placeholders()
            bucket.memory.renew()

    @property
    def synchronizes(self) -> bool:
        """Whether gradients are reduced, outside ``no_sync``."""
        return self._synchronizing

    def register_grad_ready(self, bucket: BucketRuntime, slot: int) -> None:
        """Autograd has finished the gradient of one parameter."""
        if not self._synchronizing:
            self._keep_gradient(bucket, slot)
            return
        if bucket.tracker.noted:
            bucket.collect_gradients()
        if bucket.tracker.states[slot] not in PENDING_STATES:
            self._await_gradient(bucket, slot)
        if bucket.unread and slot not in bucket.unread_slots:
            raise usage_errors.computed_unread(bucket.spec.names[slot])
        stream = self._comm_stream.current()
        if stream != bucket.held_on:
            self._store_held(bucket)
            bucket.streams.add(stream)
            bucket.held_on = stream
        if bucket.take_gradient(slot):
            if bucket.state is BucketState.IDLE:
                self._close_bucket(bucket)
                if self._starts_early:
                    self._start_ready()
            else:  # a further backprop before anything is started
                self._note_written(bucket)
        if self._polls:
            self._waiting.poll()

    def end(self) -> None:
        """No more gradients come in a backprop, or in one inside another."""
        for bucket in self._buckets:
            if bucket.tracker.noted:
                bucket.collect_gradients()

    def finish_backward(self) -> None:
        """No more gradients come before the step: start all buckets that have not been."""
        if self._state.iteration.stepped:
            self.begin_iteration()
        iteration = self._state.iteration
        waiting = iteration.active - iteration.started
        incomplete = {i for i in waiting if self._buckets[i].state is BucketState.IDLE}
        iteration.incomplete |= incomplete
        for index in incomplete:
            self._store_held(self._buckets[index])
            self._buckets[index].close_gradients()
            self._close_bucket(self._buckets[index])
        self._start_ready()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backprops inside stay local and add up."""
        before, self._synchronizing = self._synchronizing, False
        for bucket in self._buckets:
            bucket.tracker.make_loud()
        try:
            yield
        finally:
            self._synchronizing = before

    def without_gradients(self) -> AbstractContextManager[None]:
        """Inside, what parameters have accumulated takes no part; it is there again at the end."""
        return without_gradients([param for bucket in self._buckets for param in bucket.params])

    def wait_reduced(self) -> None:
        """Finish backprop and wait until every own shard holds averaged gradients."""
        if self._eager:
            raise usage_errors.looked_at_gradients()
        self.finish_backward()
        self._waiting.until(self._pipeline.is_settled, "the reduce-scatters")
        self._comm_stream.make_current_wait()

    def wait_gathered(self) -> None:
        """Finish backprop and wait until every rank holds the whole averaged gradients, which the
        step then uses as they are (collective).
        """
        self.wait_reduced()
        self._state.iteration.gathers_early = True
        self._pipeline.see_step()
        self._waiting.until(self._pipeline.is_settled, "the all-gathers of gradients")
        self._comm_stream.make_current_wait()

    def wait_updated(self) -> None:
        """Wait until the last step has used the gradients."""
        self._waiting.until_finished()
        self._comm_stream.make_current_wait()

    def discard_grads(self) -> None:
        """Discard the gradients of a backprop that no step followed."""
        if self._state.iteration.stepped:
            return
        self._state.joining.refuse("dropping gradients after a backward")
        if self._eager:
            raise usage_errors.dropped()
        self.wait_reduced()
        self._pipeline.discard_reduced()
        for index in self._state.iteration.active:
            self._buckets[index].release_gradients()
            self._buckets[index].reset()
        self._state.discard_iteration()

    def begin_iteration(self, *, exhausted: bool = False) -> None:
        """An iteration begins, ``exhausted``: of a rank that has no batches left."""
        self._waiting.until_finished()
        known = self._state.deferred.are_known
        self._waiting.until(known, "the step agreement of the step before the last")
        self._comm_stream.make_current_wait()  # gradients go where updates have read
        joining = self._state.joining
        if joining.is_open and not (exhausted or joining.is_announced):
            joining.announce(True)
        joining.is_announced = False
        self._state.exchange_replicas()
        self._state.world.begin_backprop(self._state.training)
        self._pipeline.rescale_unsent()
        active = set()
        stream = self._comm_stream.current()
        quietly = stream is None and not self._polls  # else each has something to be done for it
        for bucket in self._buckets:
            bucket.check_storage()
            bucket.held_on = stream
            bucket.streams = {stream}
            if bucket.expect_gradients(quietly=quietly and not bucket.unread):
                active.add(bucket.index)
        options = self._options.read() if self._eager and not exhausted else None
        self._state.begin_iteration(frozenset(active), options)
        for bucket in self._buckets:
            for slot in bucket.frozen_kept:  # no backprop brings it
                if bucket.take_gradient(slot):
                    self._close_bucket(bucket)

    def find_cleared(self) -> str:
        """The name of a parameter whose gradient somebody else took away; empty if none is gone."""
        return next((name for bucket in self._buckets if (name := bucket.find_cleared())), "")

    def _keep_gradient(self, bucket: BucketRuntime, slot: int) -> None:
        if not self._state.iteration.stepped:
            raise usage_errors.unsynchronized_last()
        if bucket.unread and slot not in bucket.unread_slots:
            raise usage_errors.computed_unread(bucket.spec.names[slot])
        self._waiting.pre_forward((bucket,))
        bucket.keep_gradient(slot)

    def _await_gradient(self, bucket: BucketRuntime, slot: int) -> None:
        """One that comes first of an iteration, or again, or from nowhere."""
        if self._state.iteration.stepped:
            self.begin_iteration()
        if slot not in bucket.tracker.expected:
            raise usage_errors.unfrozen_late(bucket.spec.names[slot])
        started = bucket.index in self._state.iteration.started
        is_ready = bucket.tracker.states[slot] is GradState.READY
        if started or (self._starts_early and is_ready):
            self._reopen()

    def _reopen(self) -> None:
        """A further backprop before the step: its gradients add to what is reduced already."""
        self._state.joining.refuse("a second backprop before step()")
        if self._eager:
            raise usage_errors.second_backprop()
        self.wait_reduced()
        self._state.world.begin_backprop(self._state.training)
        for index in self._state.iteration.active:
            self._pipeline.commit(self._buckets[index])
            self._comm_stream.keep(self._buckets[index].reopen())
        self._state.num_reduced += 1
        self._state.iteration.rewind()

    def _close_bucket(self, bucket: BucketRuntime) -> None:
        """All gradients of ``bucket`` are in its buffer, or queued to be."""
        bucket.streams.add(self._comm_stream.current())
        self._note_written(bucket)
        bucket.move_to(BucketState.READY)

    def _store_held(self, bucket: BucketRuntime) -> None:
        """What has been taken goes into the buffer on the stream that made it."""
        if bucket.held_on == self._comm_stream.current():
            bucket.store_gradients()
            return
        with self._comm_stream.on(bucket.held_on):
            bucket.store_gradients()

    def _note_written(self, bucket: BucketRuntime) -> None:
        self._comm_stream.written(bucket.gradients.data, bucket.streams)

    def _start_ready(self) -> None:
        """Start buckets in the schedule's order, as far as their gradients are there."""
        iteration = self._state.iteration
        for index in iteration.reduce_scatters:
            if index in iteration.started or index not in iteration.active:
                continue
            bucket = self._buckets[index]
            if bucket.state is not BucketState.READY:
                return
            if self._eager:  # it may be updated while backprop goes on
                self._pipeline.invalidate_params(bucket)
            self._pipeline.start_reduce_scatter(bucket)
