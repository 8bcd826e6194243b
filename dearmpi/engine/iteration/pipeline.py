"""Pipeline: carries buckets through their stages, each as soon as the schedule allows it.

A bucket comes in READY. From the moment its reduce-scatter is submitted, only the progress thread
changes its state, until it is IDLE again. ``Waiting`` is the main thread's side: what it waits for,
and where no wait could end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from dearmpi.comm.api.collectives import Completed
from dearmpi.comm.progress.lane import Work
from dearmpi.engine import usage_errors
from dearmpi.engine.agreement.step_agreement import StepAgreement
from dearmpi.engine.bucket.bucket import BucketRuntime, BucketState
from dearmpi.engine.codec.codec import Codecs
from dearmpi.engine.iteration.engine_state import EngineState, Iteration
from dearmpi.engine.iteration.stages import (
    ENDED,
    TRANSFORMS,
    CollectiveStage,
    StageOperation,
    Transform,
    UpdateStage,
)
from dearmpi.engine.update.update import Options, Update
from dearmpi.plan.data.schedule import Stage


class Pipeline:
    """Executes the stages that ``state.conduct`` lists, for the buckets of ``state``.

    fills_nan: whether parameters are NaN from the step until new ones arrive.
    """

    def __init__(
        self, state: EngineState, updates: Sequence[Update], codecs: Codecs, *, num_updating: int
    ) -> None:
        """``num_updating``: updates at once, of which all but one are fetching."""
        self._state, self._codecs, conduct = state, codecs, state.conduct
        self._progress = state.world.progress
        self._update_lane = self._progress.open_lane("update", window=num_updating)
        over = self._stage_over
        self._reduces = [
            CollectiveStage(Stage.REDUCE, state, bucket, over, codecs.reduce[bucket.index])
            for bucket in state.buckets
        ]
        self._gathers = [
            CollectiveStage(Stage.GATHER, state, bucket, over, codecs.gather[bucket.index])
            for bucket in state.buckets
        ]
        self._updates = [
            UpdateStage(
                state,
                bucket,
                over,
                updates[bucket.index],
                reduced_by=codecs.reduce[bucket.index],
                gathered_by=codecs.gather[bucket.index],
            )
            for bucket in state.buckets
        ]
        self._awaiting_update: set[int] = set()  # buckets that may be updated
        self._last = conduct.stages[-1]
        self._before_update = ENDED[conduct.stage_before(Stage.UPDATE)]
        self._before_gather = ENDED[conduct.stage_before(Stage.GATHER)]
        self._before_step = ENDED[conduct.last_before_step]
        self._gathers_wait = not conduct.waits_in_step
        self.fills_nan = state.replicas is not None and self._before_gather is BucketState.UPDATED
        self._add_transforms()

    # Called on the main thread.

    def start_reduce_scatter(self, bucket: BucketRuntime) -> None:
        """Submit the first stage of a READY bucket."""
        bucket.move_to(BucketState.REDUCING)
        self._state.spans.launched(bucket.spec)
        self._state.reduces.submit_operation(self._reduces[bucket.index])
        self._state.iteration.started.add(bucket.index)  # last: see Waiting.awaits_step

    def invalidate_params(self, bucket: BucketRuntime) -> None:
        """The next update of ``bucket``, which cannot have begun, will change its parameters."""
        bucket.invalidate_params()
        bucket.pending = bucket.unread = True
        if self.fills_nan:
            bucket.fill_nan()  # now, since afterwards a gather may already bring new ones
            self._state.comm_stream.wait_for_current()

    def agree_on_step(self, options: Options) -> None:
        """Let all ranks know which parameters had a gradient on any of them, and whether the ranks
        are still alike. This one steps with ``options``.
        """
        state, iteration = self._state, self._state.iteration
        agreement = StepAgreement(
            state.buckets,
            iteration.active,
            iteration.incomplete,
            state.num_reduced,
            state.edits,
            state.loads,
            options,
        )
        state.deferred.note(iteration)
        # The answer may come when the next iteration has begun: not every bucket waits for it.
        state.control.submit(
            "step agreement",
            lambda collectives: collectives.start_all_reduce(agreement.packed, "max"),
            lambda: self._agreed(iteration, agreement),
        )

    def submit_step(self, options: Options) -> None:
        """The options are known: update and gather all buckets that wait for them. To be called
        after ``agree_on_step``.
        """
        # What the main thread has done to gradients and parameters, and options that are tensors:
        # from the moment that the iteration has them, reduced buckets are updated.
        self._state.comm_stream.wait_for_current()
        self._state.iteration.options = options
        self.see_step()

    def see_step(self) -> None:
        """Have the progress thread look at the step; to call it twice does no harm."""
        self._progress.submit(self._update_lane, Work("step", Completed, self._step_seen))

    def is_settled(self) -> bool:
        """Whether all that may happen before the options are known has happened."""
        buckets, last = self._state.buckets, self._before_step
        if self._state.iteration.gathers_early:
            last = BucketState.GATHERED
        return all(buckets[index].state is last for index in self._state.iteration.active)

    def commit(self, bucket: BucketRuntime) -> None:
        """What was reduced of ``bucket`` counts, unless all of the iteration is discarded."""
        self._codecs.reduce[bucket.index].commit(bucket, is_final=False)

    def discard_reduced(self) -> None:
        """The gradients that were reduced last are discarded."""
        for codec in self._codecs.reduce:
            codec.discard()

    def settle_codecs(self) -> None:
        """Bring to the owners what ranks have not sent (collective if there is any).

        Raises UsageError between a backward and its step, where ranks are at different buckets.
        """
        codecs, state = self._codecs.reduce, self._state
        if not any(codec.keeps for codec in codecs):
            return
        if not state.iteration.stepped:
            raise usage_errors.state_before_step()
        owing = [bucket for bucket in state.buckets if codecs[bucket.index].owes]
        if owing:
            state.joining.refuse("reading the optimizer's state")
            state.world.barrier()  # a rank that reads it alone must not meet other operations
        for bucket in owing:
            start = partial(codecs[bucket.index].start_settling, bucket)
            state.reduces.run("what ranks have not sent", start)

    def forget_unsent(self) -> None:
        """What ranks have not sent belongs to another state."""
        for codec in self._codecs.reduce:
            codec.forget()

    def rescale_unsent(self) -> None:
        """Nothing is under way, and losses may have another scale from now on: what ranks have not
        sent is to fit the gradients that come.
        """
        if self._state.read_loss_scale is None:
            return
        scale = self._state.read_loss_scale()
        for bucket, codec in zip(self._state.buckets, self._codecs.reduce, strict=True):
            if 0 < scale != bucket.loss_scale:
                if codec.keeps:
                    codec.rescale(scale / bucket.loss_scale)
                bucket.loss_scale = scale

    def close(self) -> None:
        """Give the channels back once they are empty (collective)."""
        self._state.close_channels()
        self._progress.close_lane(self._update_lane)
        # They refer back to this object, and would keep the buffers until Python looks for cycles.
        for operations in (self._reduces, self._gathers, self._updates):
            operations.clear()

    # Called on the progress thread.

    def _stage_over(self, operation: StageOperation) -> None:
        """Begin what may follow, for this bucket or, in the order of gathers, for others."""
        bucket, stage = operation.bucket, operation.stage
        if stage is Stage.REDUCE:
            self._state.iteration.reduced.add(bucket.index)
        if stage is self._last:
            self._finish(bucket)
            self._start_updates()
            return
        self._try_update(bucket)
        self._start_updates()
        self._start_gathers()

    def _step_seen(self) -> None:
        self._try_updates()
        self._start_gathers()

    def _agreed(self, iteration: Iteration, agreement: StepAgreement) -> None:
        answer = agreement.answer()
        iteration.incomplete, iteration.used = answer.unfilled, answer.used
        self._try_updates()

    def _try_updates(self) -> None:
        for bucket in self._state.buckets:
            self._try_update(bucket)
        self._start_updates()

    def _try_update(self, bucket: BucketRuntime) -> None:
        """Update as soon as the stage before, the options and the step agreement allow it."""
        iteration = self._state.iteration
        if bucket.state is not self._before_update or iteration.options is None:
            return
        if bucket.tracker.missing and iteration.used is None:
            return
        bucket.move_to(BucketState.UPDATING)
        self._awaiting_update.add(bucket.index)

    def _start_updates(self) -> None:
        """Submit updates in the order of gathers, as far as the lane has room: the first gathers,
        whose buckets are reduced last, wait for no others' updates.
        """
        while self._awaiting_update and self._update_lane.has_room:
            gathers = self._state.iteration.all_gathers
            first = next(one.bucket for one in gathers if one.bucket in self._awaiting_update)
            self._awaiting_update.remove(first)
            self._progress.submit(self._update_lane, self._updates[first])

    def _start_gathers(self) -> None:
        """Submit all-gathers in the schedule's order, as far as their buckets allow."""
        iteration = self._state.iteration
        if iteration.options is None and self._gathers_wait and not iteration.gathers_early:
            return  # a further backprop may still add to what has been reduced
        gathers = iteration.all_gathers
        while iteration.num_gathers < len(gathers):
            gather = gathers[iteration.num_gathers]
            if gather.bucket in iteration.active:
                bucket = self._state.buckets[gather.bucket]
                waits = gather.after in iteration.active and gather.after not in iteration.reduced
                if bucket.state is not self._before_gather or waits:
                    return
                bucket.move_to(BucketState.GATHERING)
                self._state.gathers.submit_operation(self._gathers[bucket.index])
            iteration.num_gathers += 1

    def _finish(self, bucket: BucketRuntime) -> None:
        """The parameters of ``bucket`` are current."""
        state = self._state
        if state.replicas is not None:
            with state.comm_stream.running():
                state.replicas.arrived(bucket)
        bucket.reset()
        bucket.mark = state.comm_stream.mark()
        bucket.pending = False
        state.iteration.num_finished += 1
        self._progress.notify()

    def _add_transforms(self) -> None:
        """Put each of ``TRANSFORMS`` behind the stage that it follows in the list."""
        left, before = iter(TRANSFORMS), Stage.REDUCE
        by_stage: dict[Stage, tuple[Transform, ...]] = {}
        for stage in self._state.conduct.stages:
            if stage is Stage.TRANSFORM:
                by_stage[before] = (*by_stage.get(before, ()), next(left))
            else:
                before = stage
        assert next(left, None) is None, "stages_of() lists fewer transforms than TRANSFORMS has"
        for operation in (*self._reduces, *self._gathers, *self._updates):
            operation.transforms = by_stage.get(operation.stage, ())


class Waiting:
    """Waits for what ``pipeline`` carries, and counts for how long.

    polls: whether communication goes on only where the main thread has time for it.
    """

    def __init__(self, state: EngineState, pipeline: Pipeline) -> None:
        self._state, self._pipeline = state, pipeline
        self._eager, self._comm_stream = state.conduct.eager, state.comm_stream
        self._progress = state.world.progress
        self.polls = self._progress.mode == "poll"
        self.is_driver = self._progress.is_driver

    def until(self, ready: Callable[[], bool], what: str) -> None:
        """Until ``ready()``; ``what`` names it for people."""
        if not ready():
            with self._state.clock.waiting(what):
                self._progress.wait_until(ready, what=what, training=self._state.training)

    def until_finished(self) -> None:
        """Until the last step's gathers are over."""
        if self._state.iteration.stepping and (self._eager or self._precedes_step()):
            raise usage_errors.step_broken_off()
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
            if bucket.unread:
                self.note_read(bucket)
            if bucket.mark is not None and self._comm_stream.await_mark(bucket.mark):
                bucket.mark = None

    def note_read(self, bucket: BucketRuntime) -> None:
        """The parameters are current, and read. Raises UsageError where the script had written into
        what the step was about to change.
        """
        bucket.unread = False
        if name := bucket.find_written():
            raise usage_errors.written_early(name)

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
            raise usage_errors.read_before_step()

    def _precedes_step(self) -> bool:
        """In the middle of ``step()``: whether the parameters still are as before it. None of them
        changes until the options are known; from then on a wait can end.

        Raises UsageError where some are updated by now.
        """
        self._refuse_endless()
        if self._state.iteration.options is None:
            if self._pipeline.fills_nan:
                raise usage_errors.read_in_step()
            return True
        self._pipeline.see_step()  # perhaps the progress thread does not know of it yet
        return False
