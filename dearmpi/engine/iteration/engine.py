"""Engine: the moments of an iteration, as the main thread sees them.

What happens to a bucket after its launch is the pipeline's part, on the driving thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor, nn

from dearmpi.comm.world import World
from dearmpi.engine import refusal
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.bucket.bucket_state import BucketState
from dearmpi.engine.bucket.gradient import without_gradients
from dearmpi.engine.iteration.backprop import Backprop
from dearmpi.engine.iteration.cycle import Cycle
from dearmpi.engine.iteration.pipeline import Pipeline
from dearmpi.engine.iteration.reduced_gradients import ReducedGradients
from dearmpi.engine.iteration.waiting import Waiting
from dearmpi.engine.state.options import OptionReader
from dearmpi.engine.trace.clock import IterationTimes
from dearmpi.engine.update.update import Options
from dearmpi.plan.data.schedule import Wait


class Engine:
    """Reduces gradients, updates and gathers, bucket by bucket, in the pipeline's schedule.

    eager: as in ``EngineConfig``. options: reads those of an iteration; with eager updates before
        the first of them, so that the step has to see that they still hold.
    joining: what ranks tell each other inside ``join``. loads: which states were loaded.
    backprop, waiting: its part until gradients are launched, and where the main thread waits.
    pipeline: its part from there on. reduced: gradients between backward and step.
    """

    def __init__(
        self,
        world: World,
        pipeline: Pipeline,
        *,
        eager: bool,
        options: OptionReader,
    ) -> None:
        self._world = world
        self.pipeline = pipeline
        self._buckets = pipeline.buckets
        self._side = pipeline.side
        self._eager = eager
        self._options = options
        self.waiting = Waiting(world.progress, pipeline, eager=eager)
        self.backprop = Backprop(world, pipeline, self.waiting, eager=eager, options=options)
        self.reduced = ReducedGradients(world, pipeline, self.backprop)
        self.joining = pipeline.joining
        self.loads = pipeline.loads
        self.times = IterationTimes()

    @property
    def _cycle(self) -> Cycle:
        return self.pipeline.cycle

    @property
    def waited_s(self) -> float:
        """Seconds that the main thread has waited for communication."""
        return self.pipeline.clock.waited_s

    def step(self, *, joined: bool = False) -> None:
        """Have every bucket updated with the options of this moment, and gathered; ``joined``:
        this rank has no batches left and only takes part.
        """
        if name := self.backprop.find_cleared():
            raise refusal.cleared(name)
        self.backprop.finish()
        options = self._cycle.options
        if options is None:
            options = self._options.read()
        else:
            self._options.confirm(options)
        self._take_step(options, joined=joined)

    def _take_step(self, options: Options, *, joined: bool = False) -> None:
        """After ``backprop.finish``."""
        if not joined:
            self._options.count(options)  # before anything is begun, since it may raise
        cycle = self._cycle
        for bucket in self._buckets:
            bucket.release_gradients()
        cycle.stepping = cycle.stepped = True
        if joined:  # it hands over at once what it has no gradients for
            cycle.unfilled = frozenset()
        self._world.begin_step()
        for index in cycle.active:
            if self._eager:  # pending since its launch, and perhaps finished by now
                self._buckets[index].supersede()
            else:
                self.pipeline.supersede(self._buckets[index])
        told = self.joining.announce_step(options, joined=joined)
        if joined:
            self._options.count(told)
        self.pipeline.call_roll(told)
        self.pipeline.submit_step(told)
        cycle.stepping = False
        if self.pipeline.schedule.wait is Wait.STEP:
            self.synchronize()
        self.waiting.pre_forward(bucket for bucket in self._buckets if bucket.unguarded)
        self.times = self.pipeline.clock.lap()

    def synchronize(self) -> None:
        """Wait until every parameter shows the last step."""
        if self._cycle.stepped:
            self.waiting.until_finished()
            self._side.lead()
            for bucket in self._buckets:
                bucket.unread = False
        elif self._eager:
            raise refusal.synchronized_before_step()

    def wait_reduced(self) -> None:
        """Finish backprop and wait until every own shard holds averaged gradients."""
        self.backprop.wait_reduced()

    def drop_gradients(self) -> None:
        """Forget the gradients of a backprop that no step followed."""
        self.backprop.drop()

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradients of backprops inside stay local and add up."""
        return self.backprop.no_sync()

    def zero_gradients(self, *, set_to_none: bool) -> None:
        """Drop gradients; those of parameters that have had one become zero, or none."""
        self.backprop.drop()
        for bucket in self._buckets:
            bucket.arrivals.zero(set_to_none=set_to_none)

    @contextmanager
    def join(self, shadow_step: Callable[[], None]) -> Iterator[None]:
        """Inside, ranks may take unequal numbers of steps: at the end, ``shadow_step`` for each
        that others still take.
        """
        with self.joining.opened():
            yield
            if not self._cycle.stepped:
                raise refusal.left_before_step()
            params = [param for bucket in self._buckets for param in bucket.params]
            with without_gradients(params):
                while self._do_others_train():
                    shadow_step()

    def next_clip(self) -> tuple[float, float] | None:
        """As a joined rank: to which norm, of which type, the others clip; None if they step."""
        self.backprop.finish()  # theirs goes on meanwhile
        return self.joining.next_clip()

    def scale_gradients(self, factor: float) -> None:
        """Multiply reduced gradients, between ``wait_reduced`` and ``step``."""
        self.reduced.forget_norms()
        for index in self._cycle.active:
            bucket = self._buckets[index]
            gathered = bucket.state is BucketState.GATHERED
            (bucket.gradients.data if gathered else bucket.gradients.shard).mul_(factor)

    def gradients(self) -> dict[nn.Parameter, Tensor]:
        """Copies of the whole averaged gradients, as far as there are any (collective)."""
        return self.reduced.gather()

    def shards(self) -> list[Tensor]:
        """The own shards of reduced gradients, as far as there are any."""
        shards = [self._buckets[index].gradients.shard for index in sorted(self._cycle.active)]
        return [shard for shard in shards if shard.numel()]

    def has_gradients(self) -> bool:
        """Whether this rank has any of this iteration, after ``wait_reduced``, or all is frozen."""
        buckets = [self._buckets[index] for index in self._cycle.active]
        missing = sum(len(bucket.arrivals.missing) for bucket in buckets)
        return not buckets or missing < sum(len(bucket.params) for bucket in buckets)

    def tell_replicas(self) -> None:
        """Where no iteration may follow that would: tell other ranks what the last step has led to,
        if it is to be compared (collective).
        """
        if self._cycle.stepped:
            self.synchronize()
            self.pipeline.tell_replicas()

    def idle_buckets(self) -> list[BucketRuntime]:
        """Those that take no part in this iteration."""
        return [bucket for bucket in self._buckets if bucket.index not in self._cycle.active]

    def close(self) -> None:
        """Finish what is under way and give the channels back."""
        if not self._cycle.stepped:
            self.backprop.finish()  # other ranks may have reduced what is not full here
            if self._eager:  # the step is promised, and some buckets are updated by now
                assert self._cycle.options is not None
                self._take_step(self._cycle.options)
        if self._cycle.stepped:
            self.waiting.until_finished()
            self._side.lead()
        for bucket in self._buckets:
            bucket.release_gradients()  # of a backprop that no step followed
        self.pipeline.close()
        self._side.finish()

    def _do_others_train(self) -> bool:
        """Whether some ranks still train, asked by one that does not."""
        self.waiting.until_finished()
        self.joining.attend(False)
        if not self.joining.who_trains():
            return False
        self.backprop.begin_cycle(joined=True)
        return True
