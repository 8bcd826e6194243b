"""Stages: what one bucket does in each stage of its life, as operations of lanes.

The pipeline decides when a stage may begin. All of this runs on the progress thread, but for a long
step of the optimizer, during which that thread goes on polling. An operation is made once for each
bucket and stage, and submitted again in every iteration.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial

from dearmpi.comm.api.collectives import Chain, Request
from dearmpi.device.comm_stream import HostCommStream
from dearmpi.engine.bucket.bucket import BucketRuntime, BucketState
from dearmpi.engine.codec.codec import Codec, compresses
from dearmpi.engine.iteration.engine_state import EngineState
from dearmpi.engine.update.update import Update, failures_of_step
from dearmpi.plan.data.layout import Bucket
from dearmpi.plan.data.schedule import Stage

StageOver = Callable[["StageOperation"], None]
Transform = Callable[[BucketRuntime], None]

ENDED = {
    Stage.REDUCE: BucketState.REDUCED,
    Stage.UPDATE: BucketState.UPDATED,
    Stage.GATHER: BucketState.GATHERED,
}
"""The state of a bucket at the end of a stage."""

TRANSFORMS: tuple[Transform, ...] = (BucketRuntime.average,)
"""One for each ``Stage.TRANSFORM`` of ``stages_of``, in this order, on the progress thread."""

LONG_S = 5e-3
"""An update that takes so long would let the wire run dry on the thread that polls."""

_KEPT = 0.9  # of the longest update, by step: some optimizers work hard only now and then


class StageOperation(ABC):
    """One stage of ``bucket``; implements ``Operation`` of the lanes.

    transforms: what the schedule puts between this stage and the next one.
    """

    def __init__(
        self, stage: Stage, state: EngineState, bucket: BucketRuntime, over: StageOver
    ) -> None:
        """``over`` is called once the stage and its transforms are complete."""
        self.stage, self.bucket, self._state, self._over = stage, bucket, state, over
        self.subject: Bucket = bucket.spec
        self.request: Request | None = None
        self.transforms: tuple[Transform, ...] = ()

    @property
    @abstractmethod
    def label(self) -> str:
        """The operation in words, such as ``RS3``."""

    @abstractmethod
    def start(self) -> Request:
        """Post the operation."""

    def finish(self) -> None:
        """The operation is complete."""
        if self.transforms:
            with self._state.comm_stream.running():
                for transform in self.transforms:
                    transform(self.bucket)
        self.bucket.move_to(ENDED[self.stage])
        self._over(self)


class CollectiveStage(StageOperation):
    """The reduce-scatter of a bucket's gradients, or its all-gather, as its codec carries them."""

    def __init__(
        self,
        stage: Stage,
        state: EngineState,
        bucket: BucketRuntime,
        over: StageOver,
        codec: Codec,
    ) -> None:
        super().__init__(stage, state, bucket, over)
        self._reduces = stage is Stage.REDUCE
        channel = state.reduces if self._reduces else state.gathers
        self._codec, self._collectives = codec, channel.collectives
        self._computes = compresses(codec)

    @property
    def label(self) -> str:
        """As in schedules."""
        return f"{'RS' if self._reduces else 'AG'}{self.bucket.index}"

    def start(self) -> Request:
        """Post it."""
        if (replicas := self._state.replicas) is not None:
            (replicas.reduces if self._reduces else replicas.gathers).append(self.bucket.index)
        spans = self._state.spans
        if not (self._computes and spans.is_heard):
            return self._codec.start(self.bucket, self._collectives, self._state.num_steps)
        with spans.codec("encode", self.label, self.subject):
            request = self._codec.start(self.bucket, self._collectives, self._state.num_steps)
        if isinstance(request, Chain):
            request.watch(partial(spans.codec, "decode", self.label, self.subject))
        return request


class UpdateStage(StageOperation):
    """The optimizer's step on the bucket, with the options of the iteration."""

    def __init__(
        self,
        state: EngineState,
        bucket: BucketRuntime,
        over: StageOver,
        update: Update,
        *,
        reduced_by: Codec,
        gathered_by: Codec,
    ) -> None:
        super().__init__(Stage.UPDATE, state, bucket, over)
        self._update, self._reduced_by, self._gathered_by = update, reduced_by, gathered_by
        self._is_on_host = isinstance(state.comm_stream, HostCommStream)  # a device only queues
        self._longest_s = 0.0  # of the last steps
        self._is_taken = False

    @property
    def label(self) -> str:
        """For errors."""
        return f"update of bucket {self.bucket.index}"

    def start(self) -> Request:
        """Bring what the step needs to where it works; take a long one beside the thread that
        polls.
        """
        self._is_taken = False
        fetch = self._update.start_fetch()
        return Chain(self._take_beside(fetch)) if self._longest_s >= LONG_S else fetch

    def finish(self) -> None:
        """Take the step, unless it is taken. Raises WireRangeError for numbers that cannot
        travel.
        """
        with self._state.comm_stream.running():
            if not self._is_taken:
                self._prepare()()
            self._gathered_by.check(self.bucket)
        self.bucket.memory.give_up()
        super().finish()

    def _take_beside(self, fetch: Request) -> Iterator[Request]:
        yield fetch
        yield self._state.world.progress.compute(self._prepare())

    def _prepare(self) -> Callable[[], None]:
        """The step, for any thread. What it needs of the iteration is looked up here."""
        bucket, options = self.bucket, self._state.iteration.options
        assert options is not None, "an update waits for its options"
        self._reduced_by.check(bucket)
        self._reduced_by.commit(bucket, is_final=True)
        unused = self._unused()
        self._is_taken = True

        def step() -> None:
            begin_s = time.perf_counter()
            with self._state.spans.update(bucket.spec), failures_of_step():
                self._update.step(options, unused)
            if self._is_on_host:
                took_s = time.perf_counter() - begin_s
                self._longest_s = max(took_s, _KEPT * self._longest_s)

        return step

    def _unused(self) -> frozenset[int]:
        """Slots that had no gradient on any rank."""
        if not (missing := self.bucket.tracker.missing):
            return frozenset()
        assert self._state.iteration.used is not None, "an update waits for the step agreement"
        used = self._state.iteration.used[self.bucket.index]
        return frozenset(slot for slot in missing if not used[slot])
