"""Engine: the moments of an iteration, as the optimizer sees them on the main thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dearmpi.engine import usage_errors
from dearmpi.engine.bucket.bucket import BucketState
from dearmpi.engine.codec.codec import Codecs
from dearmpi.engine.iteration.backprop import Backprop
from dearmpi.engine.iteration.engine_state import EngineState
from dearmpi.engine.iteration.pipeline import Pipeline, Waiting
from dearmpi.engine.iteration.reduced_gradients import ReducedGradients
from dearmpi.engine.state.options import OptionReader
from dearmpi.engine.update.shard_update import UpdateSet
from dearmpi.engine.update.update import Options

Unused = Mapping[int, frozenset[int]]
"""Slots by bucket."""

NONE_UNUSED: Unused = {}


class Engine:
    """Reduces gradients, updates and gathers, bucket by bucket, in the order of the schedule.

    state: what all parts share. backprop: until gradients are on their way. pipeline: from there
        on. waiting: where the main thread waits. reduced: gradients between backward and step.
    after_backprop: called at the end of each backprop that reduces gradients.
    """

    is_closed = False

    def __init__(
        self, state: EngineState, updates: UpdateSet, codecs: Codecs, optimizer: Optimizer
    ) -> None:
        """``optimizer``: the wrapped one. An iteration reads its options; with eager updates before
        the first update, so that the step has to see that they still hold.
        """
        self.state, self.codecs = state, codecs
        self.pipeline = pipeline = Pipeline(
            state, updates.of_buckets, codecs, num_updating=updates.num_at_once
        )
        self._buckets, self._comm_stream = state.buckets, state.comm_stream
        self._eager, self._options = state.conduct.eager, OptionReader(optimizer)
        self.waiting = Waiting(state, pipeline)
        self.backprop = Backprop(state, pipeline, self.waiting, self._options)
        self.reduced = ReducedGradients(state, self.backprop)
        self.joining, self.loads = state.joining, state.loads
        self.times = self.state.clock.lap()
        self.after_backprop: Callable[[], None] | None = None

    @property
    def waited_s(self) -> float:
        """Seconds that the main thread has waited for communication."""
        return self.state.clock.waited_s

    @property
    def num_checked(self) -> int:
        """Steps so far, where replicas are compared, which every few of them are due for it."""
        return 0 if self.state.replicas is None else self.state.replicas.num_steps

    @num_checked.setter
    def num_checked(self, num: int) -> None:
        if self.state.replicas is not None:
            self.state.replicas.num_steps = num

    @property
    def num_steps(self) -> int:
        """Steps so far, also those before the state was saved that this engine has loaded."""
        return self.state.num_steps + self.state.iteration.is_step

    @num_steps.setter
    def num_steps(self, num: int) -> None:
        self.state.num_steps = num - self.state.iteration.is_step

    def begin_backprop(self) -> None:
        """Autograd is about to accumulate the first gradient of a backprop."""
        if self.state.keeps_gradients and not self.state.iteration.stepped:
            self.reduced.take_changed()
        self.backprop.begin()

    def end_backprop(self) -> None:
        """No more gradients come in a backprop, or in one inside another."""
        self.backprop.end()
        if self.after_backprop is not None and self.backprop.synchronizes:
            self.after_backprop()

    def step(self, *, exhausted: bool = False) -> None:
        """Have every bucket updated with the options of this moment, and gathered; ``exhausted``:
        this rank has no batches left and only takes part.
        """
        if self.state.keeps_gradients:
            if self.state.iteration.stepped:  # a step without backward: the last gradients again
                self.backprop.begin()
            self.reduced.take_replaced()
        elif name := self.backprop.find_cleared():
            raise usage_errors.cleared(name)
        self.backprop.finish_backward()
        if not exhausted:
            self.reduced.announce_step()
        options = self.state.iteration.options
        if options is None:
            options = self._options.read()
        else:
            self._options.confirm(options)
        self._take_step(options, exhausted=exhausted)

    def _take_step(self, options: Options, *, exhausted: bool = False) -> None:
        """After ``backprop.finish_backward``."""
        if not exhausted:
            self._options.count(options)  # before anything is begun, since it may raise
        iteration = self.state.iteration
        for bucket in self._buckets:
            if self.state.keeps_gradients:
                bucket.keep_gradients()
            else:
                bucket.release_gradients()
        iteration.stepping = iteration.stepped = True
        if exhausted:  # it starts at once what it has no gradients for
            iteration.incomplete = frozenset()
        self.state.world.begin_step(self.state.training)
        for index in iteration.active:
            if self._eager:  # pending since its reduce-scatter, and perhaps finished by now
                self._buckets[index].invalidate_params()
            else:
                self.pipeline.invalidate_params(self._buckets[index])
        agreed = self.joining.announce_step(options, exhausted=exhausted)
        if exhausted:
            self._options.count(agreed)
        self.pipeline.agree_on_step(agreed)
        self.pipeline.submit_step(agreed)
        iteration.stepping = False
        if self.state.conduct.waits_in_step:
            self.synchronize()
        self.waiting.pre_forward(bucket for bucket in self._buckets if bucket.unguarded)
        self.times = self.state.clock.lap()

    def synchronize(self) -> None:
        """Wait until every parameter shows the last step."""
        if self.state.iteration.stepped:
            self.waiting.until_finished()
            self._comm_stream.make_current_wait()
            for bucket in self._buckets:
                if bucket.unread:
                    self.waiting.note_read(bucket)
        elif self._eager:
            raise usage_errors.synchronized_before_step()

    def settle(self) -> None:
        """Bring what ranks have not sent to its owners, as state (collective if there is any)."""
        self.pipeline.settle_codecs()

    def forget_unsent(self) -> None:
        """Another state was loaded: what ranks have not sent does not belong to it."""
        self.pipeline.forget_unsent()

    def follow_loss_scale(self, read: Callable[[], float]) -> None:
        """Losses are multiplied by what ``read`` returns, that of the iteration under way too. What
        it has reduced is not changed any more.
        """
        self.state.read_loss_scale = read
        scale = read()
        for bucket in self._buckets:
            bucket.loss_scale = scale

    def wait_reduced(self, norm_type: float = 2.0) -> None:
        """Finish backprop and wait until every own shard holds averaged gradients, or something
        that has their norm; what the script has put in the place of one counts instead.
        """
        if self.state.keeps_gradients:
            self.reduced.take_replaced()
            self.reduced.send_changed()
        if norm_type == 2.0:
            self.backprop.wait_reduced()
        else:
            self.reduced.wait()

    def discard_grads(self) -> None:
        """Discard the gradients of a backprop that no step followed."""
        self.backprop.discard_grads()

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradients of backprops inside stay local and add up."""
        return self.backprop.no_sync()

    def zero_gradients(self, *, set_to_none: bool) -> None:
        """Discard gradients; parameters that have had one get zero, or None."""
        shows = self.state.keeps_gradients and not self.state.iteration.stepped and not set_to_none
        kept = [bucket.kept_slots() if shows else [] for bucket in self._buckets]
        self.backprop.discard_grads()
        for bucket, slots in zip(self._buckets, kept, strict=True):
            bucket.tracker.zero(set_to_none=set_to_none)
            for slot in slots:
                bucket.params[slot].grad = torch.zeros_like(bucket.params[slot])

    @contextmanager
    def join(self, shadow_step: Callable[[], None]) -> Iterator[None]:
        """Inside, ranks may take unequal numbers of steps: at the end, ``shadow_step`` for each
        that others still take.
        """
        with self.joining.opened():
            yield
            if not self.state.iteration.stepped or self.joining.is_announced:
                raise usage_errors.left_before_step()
            with self.backprop.without_gradients():
                while self._do_others_train():
                    shadow_step()

    def announce_forward(self) -> bool:
        """Inside ``join``, before a forward: say that this rank trains; False if that is said."""
        return self.state.iteration.stepped and self.joining.announce_forward()

    def leave_gradients(self) -> None:
        """Make plain tensors of averaged gradients that no step has used (collective)."""
        for param, gradient in self.reduced.withdraw(self.zero_gradients).items():
            param.grad = gradient

    def next_clip(self) -> tuple[float, float] | None:
        """Exhausted: to which norm, of which type, the others clip; None if they step."""
        self.backprop.finish_backward()  # that of the others goes on meanwhile
        return self.reduced.follow()

    def scale_gradients(self, factor: float, unused: Unused = NONE_UNUSED) -> None:
        """Multiply reduced gradients but ``unused`` ones, between ``wait_reduced`` and ``step``."""
        self.reduced.forget_norms()
        for index in self.state.iteration.active:
            bucket, left = self._buckets[index], unused.get(index, ())
            gathered = bucket.state is BucketState.GATHERED
            if not left:
                (bucket.gradients.data if gathered else bucket.gradients.shard).mul_(factor)
                continue
            own = self.codecs.reduce[index].own_pieces(bucket)
            for slot, piece in enumerate(bucket.gradients.views) if gathered else own:
                if slot not in left:
                    piece.mul_(factor)

    def find_unused(self) -> Unused:
        """By bucket, slots of which no rank has a gradient in this iteration, but which get some of
        what ranks have not sent; after ``wait_reduced`` (collective where ranks keep such).
        """
        if not any(codec.keeps for codec in self.codecs.reduce):
            return NONE_UNUSED
        flags = [
            float(slot not in bucket.tracker.missing)
            for bucket in self._buckets
            for slot in range(len(bucket.params))
        ]
        used = iter(self.state.world.all_reduce(flags, "max"))
        return {
            bucket.index: frozenset(slot for slot in range(len(bucket.params)) if not next(used))
            for bucket in self._buckets
        }

    def gradients(self) -> dict[nn.Parameter, Tensor]:
        """Copies of the whole averaged gradients, as far as there are any (collective)."""
        if self.state.keeps_gradients:
            self.reduced.take_replaced()
        return self.reduced.gather()

    def keep_gradients(self) -> None:
        """Serve whatever a script does to ``param.grad``, also after the step.

        Raises UsageError for settings with which no rank has whole gradients.
        """
        conduct = self.state.conduct
        if conduct.gather != "gradients" or conduct.eager:
            raise usage_errors.kept_in_shards(gather=conduct.gather, eager=conduct.eager)
        self.reduced.keep()

    def complete_gradients(self) -> None:
        """Show gradients that other ranks have on this one as well (collective)."""
        self.reduced.complete()

    def shards(self, unused: Unused = NONE_UNUSED) -> list[Tensor]:
        """The own shards of reduced gradients, as far as there are any, in pieces where some are
        ``unused``, which are left out.
        """
        shards: list[Tensor] = []
        for index in sorted(self.state.iteration.active):
            bucket = self._buckets[index]
            if left := unused.get(index):
                pieces = self.codecs.reduce[index].own_pieces(bucket)
                shards += [piece for slot, piece in pieces if slot not in left]
            else:
                shards.append(bucket.gradients.shard)
        return [shard for shard in shards if shard.numel()]

    def has_gradients(self) -> bool:
        """Whether this rank has any of this iteration, after ``wait_reduced``, or all is frozen."""
        buckets = [self._buckets[index] for index in self.state.iteration.active]
        missing = sum(len(bucket.tracker.missing) for bucket in buckets)
        return not buckets or missing < sum(len(bucket.params) for bucket in buckets)

    def check_replicas(self, describe_options: Callable[[], str]) -> None:
        """After a step: see whether replicas were alike after the one before, as far as that was to
        be compared, and note what this one used (collective).
        """
        if (replicas := self.state.replicas) is None:
            return
        # Of exhausted ranks no scheduler runs, but they take over the others' options.
        is_compared = replicas.is_due and not self.joining.is_open
        active = self.state.iteration.active
        idle = [bucket for bucket in self._buckets if bucket.index not in active]
        replicas.stepped(describe_options() if is_compared else "", idle)
        replicas.compare()

    def compare_replicas(self) -> None:
        """After the last step, if that is to be compared: now, and not in the next (collective)."""
        if self.state.replicas is None:
            return
        if self.state.iteration.stepped:
            self.synchronize()
            self.state.exchange_replicas()
        self.state.replicas.compare()

    def check_changeable(self, what: str) -> None:
        """Raise UsageError for ``what`` inside ``join``, at whose end this rank may still have to
        take part.
        """
        self.joining.refuse(what)

    def close(self) -> None:
        """Finish what is under way and give the channels back."""
        if self.state.keeps_gradients:
            self.reduced.hand_over()
        if not self.state.iteration.stepped:
            self.backprop.finish_backward()  # other ranks may have reduced what is not full here
            if self._eager:  # the step is promised, and some buckets are updated by now
                assert self.state.iteration.options is not None
                self._take_step(self.state.iteration.options)
        if self.state.iteration.stepped:
            self.waiting.until_finished()
            self._comm_stream.make_current_wait()
            self.settle()
        for bucket in self._buckets:
            bucket.release_gradients()  # of a backprop that no step followed
        self.pipeline.close()
        self._comm_stream.finish()

    def _do_others_train(self) -> bool:
        """Whether some ranks still train, asked by one that does not."""
        self.waiting.until_finished()
        self.joining.announce(False)
        if not self.joining.training_ranks():
            return False
        self.backprop.begin_iteration(exhausted=True)
        return True
