"""Engine: the moments of an iteration, as the main thread sees them.

What happens to a bucket after its launch is the pipeline's part, on the driving thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from dearmpi.comm.world import World
from dearmpi.engine import refusal
from dearmpi.engine.bucket import BucketRuntime
from dearmpi.engine.bucket_state import BucketState
from dearmpi.engine.clock import IterationTimes
from dearmpi.engine.cycle import Cycle
from dearmpi.engine.gradient import without_gradients
from dearmpi.engine.pipeline import Pipeline
from dearmpi.engine.update import Options
from dearmpi.plan.schedule import Launch, Wait


class Engine:
    """Reduces gradients, updates and gathers, bucket by bucket, in the pipeline's schedule.

    eager: as in ``EngineConfig``. read_options: the optimizer's options of this moment, before an
        iteration's first update; later, given those, to see in the step that they still hold.
    joining: what ranks tell each other inside ``join``. loads: which states were loaded.
    polls: whether communication goes on only where the main thread has time for it.
    """

    def __init__(
        self,
        world: World,
        pipeline: Pipeline,
        *,
        eager: bool,
        read_options: Callable[[Options | None], Options],
    ) -> None:
        self._world = world
        self._progress = world.progress
        self.polls = world.progress.mode == "poll"
        self._pipeline = pipeline
        self._buckets = pipeline.buckets
        self._side = pipeline.side
        self._schedule = pipeline.schedule
        self._launches = pipeline.schedule.launch is Launch.GRADIENTS_READY
        self._eager = eager
        self._read_options = read_options
        self._synchronizing = True
        self.joining = pipeline.joining
        self.loads = pipeline.loads
        self.times = IterationTimes()

    @property
    def _cycle(self) -> Cycle:
        return self._pipeline.cycle

    @property
    def waited_s(self) -> float:
        """Seconds that the main thread has waited for communication."""
        return self._pipeline.clock.waited_s

    def pre_forward(self, buckets: Iterable[BucketRuntime]) -> None:
        """A module is about to read parameters of ``buckets``: wait until they are current."""
        if self.polls:
            self._progress.poll()
        for bucket in buckets:
            if bucket.pending:
                self._refuse_endless_wait()
                self._wait(bucket.is_current, f"the parameters of bucket {bucket.index}")
            if bucket.arrival is not None and self._side.await_mark(bucket.arrival):
                bucket.arrival = None

    def begin_backprop(self) -> None:
        """Autograd is about to accumulate the first gradient of a backprop.

        Where ``model.zero_grad()`` has cleared all gradients meanwhile, they are dropped.
        """
        if self._cycle.stepped:
            return
        name = self._find_cleared()
        params = (param for bucket in self._buckets for param in bucket.params)
        if name and any(param.grad is not None for param in params):
            raise refusal.cleared(name)
        if name:
            self.drop_gradients()

    def grad_ready(self, bucket: BucketRuntime, slot: int) -> None:
        """Autograd has finished the gradient of one parameter."""
        if not self._synchronizing:
            self._keep_gradient(bucket, slot)
            return
        if slot not in bucket.awaited:
            self._await_gradient(bucket, slot)
        bucket.streams.add(self._side.current())
        if bucket.take_gradient(slot):
            if bucket.state is BucketState.IDLE:
                self._close_bucket(bucket)
                if self._launches:
                    self._launch_ready()
            else:  # a further backprop before anything is launched
                self._note_written(bucket)
        if self.polls:
            self._progress.poll()

    def finish_backprop(self) -> None:
        """No more gradients come before the step: launch what has not been launched."""
        if self._cycle.stepped:
            self._begin_cycle()
        cycle = self._cycle
        waiting = cycle.active - cycle.launched
        unfilled = {i for i in waiting if self._buckets[i].state is BucketState.IDLE}
        cycle.unfilled |= unfilled
        for index in unfilled:
            self._buckets[index].close_gradients()
            self._close_bucket(self._buckets[index])
        self._launch_ready()

    def step(self, *, joined: bool = False) -> None:
        """Have every bucket updated with the options of this moment, and gathered; ``joined``:
        this rank has no batches left and only takes part.
        """
        if name := self._find_cleared():
            raise refusal.cleared(name)
        self.finish_backprop()
        cycle = self._cycle
        options = self._read_options(cycle.options)
        for bucket in self._buckets:
            bucket.release_gradients()
        cycle.stepped = True
        if joined:  # it hands over at once what it has no gradients for
            cycle.unfilled = frozenset()
        self._world.begin_step()
        for index in cycle.active:
            if self._eager:  # pending since its launch, and perhaps finished by now
                self._buckets[index].supersede()
            else:
                self._pipeline.supersede(self._buckets[index])
        self._pipeline.submit_step(self.joining.announce_step(options, joined=joined))
        self._pipeline.call_roll()
        if self._schedule.wait is Wait.STEP:
            self.synchronize()
        self.pre_forward(bucket for bucket in self._buckets if bucket.compiled)
        self.times = self._pipeline.clock.lap()

    def synchronize(self) -> None:
        """Wait until every parameter shows the last step."""
        if self._cycle.stepped:
            self._wait(self._pipeline.is_finished, "the last step's gathers")
            self._side.lead()
        elif self._eager:
            raise refusal.synchronized_before_step()

    def wait_updated(self) -> None:
        """After a step: wait until it has changed the optimizer's state, but not for gathers."""
        self._wait(self._pipeline.is_updated, "the last step's updates")
        self._side.lead()

    def wait_reduced(self) -> None:
        """Finish backprop and wait until every own shard holds averaged gradients."""
        if self._eager:
            raise refusal.looked_at_gradients()
        self.finish_backprop()
        self._wait(self._pipeline.is_settled, "the reduce-scatters")
        self._side.lead()

    def drop_gradients(self) -> None:
        """Forget the gradients of a backprop that no step followed."""
        if self._cycle.stepped:
            return
        self.joining.refuse("dropping gradients after a backward")
        if self._eager:
            raise refusal.dropped()
        self.wait_reduced()
        for index in self._cycle.active:
            self._buckets[index].release_gradients()
            self._buckets[index].forget()
        self._pipeline.begin(Cycle(stepped=True))

    def zero_gradients(self, *, set_to_none: bool) -> None:
        """Drop gradients; those of parameters that have had one become zero, or none."""
        self.drop_gradients()
        for bucket in self._buckets:
            bucket.zero_gradients(set_to_none=set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backprops inside stay local and add up."""
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    @contextmanager
    def join(self, shadow_step: Callable[[], None]) -> Iterator[None]:
        """Inside, ranks may take unequal numbers of steps: at the end, ``shadow_step`` for each
        that others still take.
        """
        with self.joining.opened():
            yield
            params = [param for bucket in self._buckets for param in bucket.params]
            with without_gradients(params):
                while self._do_others_train():
                    shadow_step()

    def next_clip(self) -> tuple[float, float] | None:
        """As a joined rank: to which norm, of which type, the others clip; None if they step."""
        self.finish_backprop()  # theirs goes on meanwhile
        return self.joining.next_clip()

    def scale_gradients(self, factor: float) -> None:
        """Multiply reduced gradients, between ``wait_reduced`` and ``step``."""
        for index in self._cycle.active:
            bucket = self._buckets[index]
            gathered = bucket.state is BucketState.GATHERED
            (bucket.gradients.data if gathered else bucket.gradients.shard).mul_(factor)

    def shards(self) -> list[Tensor]:
        """The own shards of reduced gradients, as far as there are any."""
        shards = [self._buckets[index].gradients.shard for index in sorted(self._cycle.active)]
        return [shard for shard in shards if shard.numel()]

    def tell_replicas(self) -> None:
        """Where no iteration may follow that would: tell other ranks what the last step has led to,
        if it is to be compared (collective).
        """
        if self._cycle.stepped:
            self.synchronize()
            self._pipeline.tell_replicas()

    def idle_buckets(self) -> list[BucketRuntime]:
        """Those that take no part in this iteration."""
        return [bucket for bucket in self._buckets if bucket.index not in self._cycle.active]

    def take_posted(self) -> str:
        """What was posted since the last call, for comparison with other ranks."""
        self.synchronize()
        return self._pipeline.take_posted()

    def close(self) -> None:
        """Finish what is under way and give the channels back."""
        if not self._cycle.stepped and not self._eager:
            self.finish_backprop()  # other ranks may have reduced what is not full here
        if self._cycle.stepped or (self._eager and not self._awaits_step()):
            self._wait(self._pipeline.is_finished, "the last step's gathers")
            self._side.lead()
        for bucket in self._buckets:
            bucket.release_gradients()  # of a backprop that no step followed
        self._pipeline.close()
        self._side.finish()

    def _do_others_train(self) -> bool:
        """Whether some ranks still train, asked by one that does not."""
        self._wait(self._pipeline.is_finished, "the last step's gathers")
        self.joining.attend(False)
        if not self.joining.who_trains():
            return False
        self._begin_cycle(joined=True)
        return True

    def _refuse_endless_wait(self) -> None:
        """Buckets that wait for ``step()`` hold up the gathers of those that do not."""
        if self._awaits_step():
            raise refusal.read_before_step()

    def _awaits_step(self) -> bool:
        """Whether some buckets cannot be updated before the step, with eager updates too."""
        cycle = self._cycle
        if cycle.stepped:
            return False
        # Who lacks a gradient here may have one elsewhere, which ranks tell each other in step().
        lacking = any(self._buckets[index].missing for index in cycle.active)
        return lacking or len(cycle.launched) < len(cycle.active)

    def _find_cleared(self) -> str:
        return next((name for bucket in self._buckets if (name := bucket.find_cleared())), "")

    def _keep_gradient(self, bucket: BucketRuntime, slot: int) -> None:
        if not self._cycle.stepped:
            raise refusal.unsynchronized_last()
        self.pre_forward((bucket,))
        bucket.keep_gradient(slot)

    def _begin_cycle(self, *, joined: bool = False) -> None:
        self._wait(self._pipeline.is_finished, "the last step's gathers")
        self._wait(self._pipeline.is_order_known, "the roll call of the step before the last")
        self._side.lead()  # gradients go where updates have read
        if self.joining.is_open and not joined:
            self.joining.attend(True)
        self._pipeline.tell_replicas()
        self._world.begin_iteration()
        active = set()
        for bucket in self._buckets:
            bucket.check_storage()
            bucket.streams = {self._side.current()}
            if bucket.expect_gradients():
                active.add(bucket.index)
        options = self._read_options(None) if self._eager and not joined else None
        self._pipeline.num_reduced += 1
        self._pipeline.begin(Cycle(active=frozenset(active), options=options))

    def _await_gradient(self, bucket: BucketRuntime, slot: int) -> None:
        """One that comes first of an iteration, or again, or from nowhere."""
        if self._cycle.stepped:
            self._begin_cycle()
        if slot not in bucket.expected:
            raise refusal.unfrozen_late(bucket.plan.names[slot])
        launched = bucket.index in self._cycle.launched
        if launched or (self._launches and bucket.has_gradient(slot)):
            self._reopen()

    def _reopen(self) -> None:
        """A further backprop before the step: its gradients add to those already reduced."""
        self.joining.refuse("a second backprop before step()")
        if self._eager:
            raise refusal.second_backprop()
        self.wait_reduced()
        self._world.begin_iteration()
        for index in self._cycle.active:
            self._side.keep(self._buckets[index].reopen())
        self._pipeline.num_reduced += 1
        self._cycle.rewind()

    def _close_bucket(self, bucket: BucketRuntime) -> None:
        """All gradients of ``bucket`` are in its buffer, or queued to be."""
        bucket.streams.add(self._side.current())
        self._note_written(bucket)
        bucket.move_to(BucketState.READY)

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

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        if not ready():
            with self._pipeline.clock.waiting(what):
                self._progress.wait_until(ready, what=what)
