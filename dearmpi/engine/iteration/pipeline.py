"""Pipeline: what happens to buckets on the thread that drives progress.

A bucket comes in READY. From the moment its reduce-scatter is submitted, only this side changes
its state: reduced, updated and gathered (or gathered and updated), and then current again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from dearmpi.comm.algorithms.registry import CollectiveAlgorithms
from dearmpi.comm.api.collectives import Collectives, Completed, Request
from dearmpi.comm.progress.lane import Work
from dearmpi.comm.world import World
from dearmpi.config import EngineConfig
from dearmpi.engine.agreement.checks import Replicas
from dearmpi.engine.agreement.join import Joining
from dearmpi.engine.agreement.step_agreement import Edits, Loads, RollCall
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.bucket.bucket_state import BucketState
from dearmpi.engine.codec.wire_range import check_gradients, check_parameters
from dearmpi.engine.device.comm_stream import SideStream
from dearmpi.engine.iteration.channels import Channels
from dearmpi.engine.iteration.cycle import Cycle
from dearmpi.engine.iteration.late_buckets import LateBuckets
from dearmpi.engine.trace.clock import CommunicationClock
from dearmpi.engine.trace.span import Track
from dearmpi.engine.trace.spans import Spans
from dearmpi.engine.update.host_shard import NUM_FETCHED
from dearmpi.engine.update.update import Options, Update
from dearmpi.plan.data.schedule import Schedule, Wait


class Pipeline:
    """Carries launched buckets through the rest of ``cycle``, in the schedule's order. Those that
    some backprop did not fill in the last steps but one go last, to hold up no others.

    buckets: in feed-forward order. schedule: over them. channels: on which they travel.
    clock: counts for how long.
    cycle: the iteration under way; replaced by ``begin`` once the last one is finished.
    late: which buckets go last. joining: what ranks inside ``join`` tell each other. loads: which
        states were loaded. edits: what a script has changed of averaged gradients.
    """

    def __init__(
        self,
        world: World,
        buckets: Sequence[BucketRuntime],
        updates: Sequence[Update],
        *,
        schedule: Schedule,
        config: EngineConfig,
        channels: Channels,
        clock: CommunicationClock,
        algorithms: CollectiveAlgorithms,
        side: SideStream,
        spans: Spans,
        replicas: Replicas | None,
    ) -> None:
        """``algorithms`` are those chosen; ``config`` may still say ``auto``.

        side: where on a device the driving thread works. replicas: only where checks are made.
        """
        self.channels = channels
        self._world = world
        self._progress = world.progress
        self.buckets = tuple(buckets)
        self._updates = tuple(updates)
        self.schedule = schedule
        self._algorithms = algorithms
        self._gathers_gradients = config.gather == "gradients"
        self.side = side
        self.joining = Joining(channels.control, rank=world.rank, size=world.size)
        self.loads = Loads()
        self.edits = Edits()
        self.num_reduced = 0  # times that gradients were, or are being, reduced
        num_updated = NUM_FETCHED if config.update_on == "host" else 1
        self.update_lane = self._progress.open_lane("update", window=num_updated)
        self.spans = spans
        self.clock = clock
        self._replicas = replicas
        self.late = LateBuckets()
        self.cycle = Cycle(stepped=True)

    # Called on the main thread.

    def begin(self, cycle: Cycle) -> None:
        """Start an iteration; the last one must be finished, and its order known."""
        self.side.follow()  # options may be tensors
        if self._replicas is not None:
            self._replicas.begin()
        cycle.reduce_scatters, cycle.all_gathers = self.schedule.with_last(self.late.find())
        self.cycle = cycle

    def launch(self, bucket: BucketRuntime) -> None:
        """Submit the reduce-scatter of a READY bucket."""
        bucket.move_to(BucketState.REDUCING)
        self.spans.launched(bucket.spec)
        self.channels.reduces.submit(
            f"RS{bucket.index}", partial(self._start_reduce, bucket), partial(self._reduced, bucket)
        )
        self.cycle.launched.add(bucket.index)  # last: see Waiting.awaits_step

    def supersede(self, bucket: BucketRuntime) -> None:
        """The next update of ``bucket``, which cannot have begun, will change its parameters."""
        bucket.pending = bucket.unread = True
        bucket.supersede()
        if self.poisons:
            bucket.poison()  # now, since afterwards a gather may already bring new ones
            self.side.follow()

    def submit_step(self, options: Options) -> None:
        """The options are known: update and gather whatever waits for them. Call ``call_roll``
        before.
        """
        # What the main thread has done to gradients and parameters, and options that are tensors:
        # from the moment that the cycle has them, buckets that are reduced by now are updated.
        self.side.follow()
        self.cycle.options = options
        self.see_step()

    def see_step(self) -> None:
        """Have the driving thread look at the step, whose options are known; twice does no harm."""
        self._progress.submit(self.update_lane, Work("step", Completed, self._step_seen))

    def call_roll(self, options: Options) -> None:
        """Let all ranks know which parameters had a gradient on any of them, and whether the ranks,
        of which this one steps with ``options``, are still alike.
        """
        cycle = self.cycle
        roll = RollCall(
            self.buckets,
            cycle.active,
            cycle.unfilled,
            self.num_reduced,
            self.edits,
            self.loads,
            options,
        )
        self.late.called(cycle)
        # The answer may come when the next cycle has begun, since not every bucket waits for it.
        called = partial(self._roll_called, cycle, roll)
        self.channels.control.submit(
            "roll call", lambda c: c.start_all_reduce(roll.told, "max"), called
        )

    @property
    def poisons(self) -> bool:
        """Whether parameters are NaN from ``supersede`` until new ones come."""
        return self._replicas is not None and not self._gathers_gradients

    def is_finished(self) -> bool:
        """Whether every bucket of the cycle has gone all the way."""
        return self.cycle.num_finished == len(self.cycle.active)

    def is_settled(self) -> bool:
        """Whether all that may happen before the options are known has happened."""
        last = BucketState.REDUCED
        if self._gathers_gradients and self.schedule.wait is Wait.STEP:
            last = BucketState.GATHERED
        return all(self.buckets[index].state is last for index in self.cycle.active)

    def tell_replicas(self) -> None:
        """Tell other ranks what the last step has led to, which is over (collective)."""
        if self._replicas is not None:
            self._replicas.tell(self.channels.control)

    def close(self) -> None:
        """Give the channels back once they are empty."""
        self.channels.close()
        self._progress.close_lane(self.update_lane)

    # Called on the driving thread.

    def _start_reduce(self, bucket: BucketRuntime, collectives: Collectives) -> Request:
        if self._replicas is not None:
            self._replicas.reduces.append(bucket.index)
        start = partial(self._algorithms.start_reduce_scatter, bucket.gradients.data, collectives)
        return self._start(Track.REDUCE_SCATTER, bucket, start)

    def _start(self, track: Track, bucket: BucketRuntime, start: Callable[[], Request]) -> Request:
        return self.spans.operation(track, bucket.spec, partial(self.clock.post, start))

    def _reduced(self, bucket: BucketRuntime) -> None:
        self.clock.completed()
        with self.side.running():
            bucket.average(self._world.size)
        bucket.move_to(BucketState.REDUCED)
        self.cycle.reduced.add(bucket.index)
        self._try_update(bucket)
        self._submit_gathers()

    def _step_seen(self) -> None:
        for gather in self.schedule.all_gathers:
            self._try_update(self.buckets[gather.bucket])
        self._submit_gathers()

    def _roll_called(self, cycle: Cycle, roll: RollCall) -> None:
        answer = roll.answer()
        cycle.unfilled = answer.unfilled
        cycle.used = answer.used
        self._update_all()

    def _update_all(self) -> None:
        for bucket in self.buckets:
            self._try_update(bucket)

    def _try_update(self, bucket: BucketRuntime) -> None:
        """Update as soon as the gradients, the options and the roll call allow it."""
        before = BucketState.GATHERED if self._gathers_gradients else BucketState.REDUCED
        if bucket.state is not before or self.cycle.options is None:
            return
        if bucket.arrivals.missing and self.cycle.used is None:
            return
        bucket.move_to(BucketState.UPDATING)
        update = partial(self._update, bucket)
        fetch = self._updates[bucket.index].start_fetch
        work = Work(f"update of bucket {bucket.index}", fetch, update)
        self._progress.submit(self.update_lane, work)

    def _update(self, bucket: BucketRuntime) -> None:
        assert self.cycle.options is not None
        with self.side.running():
            check_gradients(bucket, self._algorithms.wire_dtype)
            with self.spans.update(bucket.spec):
                self._updates[bucket.index].step(self.cycle.options, self._unused(bucket))
            bucket.memory.give_up()
            bucket.move_to(BucketState.UPDATED)
            if self._gathers_gradients:
                self._finished(bucket)
            else:
                check_parameters(bucket, self._algorithms.wire_dtype)
                self._submit_gathers()

    def _unused(self, bucket: BucketRuntime) -> frozenset[int]:
        """Slots that had no gradient on any rank."""
        if not (missing := bucket.arrivals.missing):
            return frozenset()
        assert self.cycle.used is not None
        used = self.cycle.used[bucket.index]
        return frozenset(slot for slot in missing if not used[slot])

    def _submit_gathers(self) -> None:
        """Submit all-gathers in the schedule's order, as far as their buckets allow."""
        cycle = self.cycle
        before = BucketState.REDUCED if self._gathers_gradients else BucketState.UPDATED
        if cycle.options is None and self.schedule.wait is not Wait.STEP:
            return  # a further backprop may still add to what has been reduced
        gathers = cycle.all_gathers
        while cycle.num_submitted < len(gathers):
            gather = gathers[cycle.num_submitted]
            if gather.bucket in cycle.active:
                bucket = self.buckets[gather.bucket]
                waits = gather.after in cycle.active and gather.after not in cycle.reduced
                if bucket.state is not before or waits:
                    return
                self._submit_gather(bucket)
            cycle.num_submitted += 1

    def _submit_gather(self, bucket: BucketRuntime) -> None:
        bucket.move_to(BucketState.GATHERING)
        self.channels.gathers.submit(
            f"AG{bucket.index}",
            partial(self._start_gather, bucket),
            partial(self._gathered, bucket),
        )

    def _start_gather(self, bucket: BucketRuntime, collectives: Collectives) -> Request:
        if self._replicas is not None:
            self._replicas.gathers.append(bucket.index)
        gathered = bucket.gradients if self._gathers_gradients else bucket.parameters
        assert gathered is not None
        start = partial(self._algorithms.start_all_gather, gathered.data, collectives)
        return self._start(Track.ALL_GATHER, bucket, start)

    def _gathered(self, bucket: BucketRuntime) -> None:
        self.clock.completed()
        bucket.move_to(BucketState.GATHERED)
        if self._gathers_gradients:
            self._try_update(bucket)
        else:
            self._finished(bucket)

    def _finished(self, bucket: BucketRuntime) -> None:
        """The parameters of ``bucket`` are current."""
        if self._replicas is not None:
            with self.side.running():
                self._replicas.arrived(bucket)
        bucket.forget()
        bucket.mark = self.side.mark()
        bucket.pending = False
        self.cycle.num_finished += 1
        self._progress.notify()
