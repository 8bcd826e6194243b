"""LiveEngine: the engine in use, replaced by another where buckets change; a Migration carries over
what goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from dearmpi.config import EngineConfig
from dearmpi.engine.setup.build import BuiltEngine, build_engine
from dearmpi.engine.setup.context import TrainingContext
from dearmpi.engine.setup.spec import EngineSpec, add_parameters, is_followed, make_spec
from dearmpi.engine.state.resharding import Resharding, ReshardingChannel
from dearmpi.engine.state.sharded_state import LocalState
from dearmpi.engine.sync.model_buffers import BufferExchange
from dearmpi.engine.sync.model_tensors import broadcast_buffers, broadcast_parameters
from dearmpi.engine.sync.refused_models import refuse_outer_optimizers
from dearmpi.plan.data.plan import Plan


class LiveEngine:
    """The built engine in use; another replaces it where buckets change.

    The optimizer's state lies in its updates, if it has any, and moves with them.

    context: what it is for, in all its layouts.
    """

    def __init__(
        self, context: TrainingContext, *, config: EngineConfig, plan: Plan | None
    ) -> None:
        """Build, and take over rank 0's parameters and buffers, and the state that the optimizer
        has (collective).

        Raises what ``make_spec``, ``build_engine`` and ``broadcast_buffers`` raise, with nothing
        left on the model.
        """
        self.context = context
        self._waited_before_s, self._fallbacks_before = 0.0, 0
        self._keeps_gradients = False
        self._after_backprop: Callable[[], None] | None = None
        self._read_loss_scale: Callable[[], float] | None = None
        self._channel = ReshardingChannel(context.world)
        spec = make_spec(context, config=config, plan=plan)
        self.built = build_engine(spec)
        model, world = context.model, context.world
        try:
            broadcast_buffers(model, world)  # first, since the optimizer then still has its state
            self.built.take_over_steps()
            self.built.state.adopt()
            weakly = ref(self)  # the optimizer may outlive this
            self.built.state.refuse_own_state_dict(
                lambda: (own := weakly()) is not None and own.trains_by_buckets
            )
            broadcast_parameters(model, world)
            self._buffers = BufferExchange(model, world, config.buffers)
        except BaseException:
            self.built.detach()  # nobody has this one, to close it
            raise

    @property
    def waited_s(self) -> float:
        """Seconds that forward and backward have waited for communication since the start."""
        return self._waited_before_s + self.built.engine.waited_s

    @property
    def fallbacks(self) -> int:
        """Times so far, with engines before, that a compressed bucket has travelled whole."""
        return self._fallbacks_before + self.built.engine.codecs.fallbacks

    def follows(self, plan: Plan) -> bool:
        """Whether ``plan`` is what is in use already. Raises ConfigError if it does not fit."""
        return is_followed(plan, self.built.spec)

    def check_changeable(self, what: str) -> None:
        """Raise UsageError for ``what`` inside ``join``, at whose end this rank may still have to
        take part, and after ``close``.
        """
        self.built.engine.check_changeable(what)

    def check_stepper(self) -> None:
        """Raise UsageError if the step is that of an optimizer around, which would go wrong."""
        refuse_outer_optimizers()

    def check_joinable(self) -> None:
        """Raise UsageError for a model of which ranks cannot take unequal numbers of batches."""
        if self.context.world.size > 1:
            self._buffers.check_joinable()

    @torch.inference_mode(False)
    def grow(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the optimizer, for ``renew`` to lay out.

        Raises ConfigError, with nothing added, if they are not in the model, belong to another
        DistributedOptimizer or cannot be served.
        """
        add_parameters(param_group, self.built.spec)

    @torch.inference_mode(False)
    def renew(self, *, config: EngineConfig, plan: Plan | None) -> None:
        """Lay out anew, with the same parameters and state, between two steps (collective).

        Training stands still until the last step is over and the state is in its place.

        Raises ConfigError for a plan that does not fit, and for parameters that share memory, with
        everything as it was.
        """
        spec = make_spec(self.context, config=config, plan=plan, in_use=self.built.spec)
        migration = Migration(self._channel, self.built, spec)
        self.built.engine.synchronize()
        self.built.engine.settle()
        self.built.engine.compare_replicas()
        migration.take()
        self._detach()
        self.built = self.built.without_updates()  # else the old buffers would stay
        self.built = build_engine(spec)
        self.built.state.adopt()
        migration.deliver(self.built)
        if self._keeps_gradients:
            self.keep_gradients(self._after_backprop)
        if self._read_loss_scale is not None:
            self.built.engine.follow_loss_scale(self._read_loss_scale)

    def keep_gradients(self, after_backprop: Callable[[], None] | None) -> None:
        """Serve whatever a script does to ``param.grad``, in later engines too."""
        self.built.engine.keep_gradients()
        self.built.engine.after_backprop = self._after_backprop = after_backprop
        self._keeps_gradients = True

    def follow_loss_scale(self, read: Callable[[], float]) -> None:
        """Losses are multiplied by what ``read`` returns, in later engines too."""
        if read != self._read_loss_scale:
            self._read_loss_scale = read
            self.built.engine.follow_loss_scale(read)

    def expect_renewal(self) -> None:
        """Open the channel on which state travels then (collective)."""
        self._channel.open()

    def broadcast_parameters(self) -> None:
        """Take over rank 0's parameters (collective)."""
        broadcast_parameters(self.context.model, self.context.world)

    def check_step(self) -> None:
        """After a step: exchange the model's buffers, and see whether replicas were alike after the
        step before, as far as that was to be compared (collective).
        """
        if not self._buffers.before_forward:
            self._buffers.exchange(self.built.engine.joining)
        self.built.check_step()

    def begin_forward(self, *, exhausted: bool = False) -> None:
        """Exchange the model's buffers before the first forward of a step, if they travel then
        (collective).
        """
        engine = self.built.engine
        if self._buffers.before_forward and (exhausted or engine.announce_forward()):
            self._buffers.exchange(engine.joining)

    def join(
        self, shadow_step: Callable[[], None], *, buffers_before_forward: bool
    ) -> AbstractContextManager[None]:
        """Inside, ranks may take unequal numbers of steps."""
        engine, world = self.built.engine, self.context.world
        if not buffers_before_forward or world.size == 1:
            return engine.join(shadow_step)
        return self._join(shadow_step)

    @contextmanager
    def _join(self, shadow_step: Callable[[], None]) -> Iterator[None]:
        world, last = self.context.world, self.context.world.rank

        def follow() -> None:
            nonlocal last
            last = -1  # others have more batches
            self.begin_forward(exhausted=True)
            shadow_step()

        self._buffers.before_forward = True
        try:
            with self.built.engine.join(follow):
                yield
        finally:
            self._buffers.before_forward = False
        with world.named_call("the end of join()"):
            (highest,) = world.all_reduce([float(last)], "max")
        self._buffers.end_join(int(highest), self.built.engine.joining)

    def synchronize(self) -> None:
        """Wait until parameters and state show the last step."""
        self.built.engine.synchronize()

    @property
    def holds_state(self) -> bool:
        """Whether the state lies in updates, and not in the wrapped optimizer."""
        return self.built.state.is_held

    @property
    def trains_by_buckets(self) -> bool:
        """Whether that is so, and may go on: until ``close()``."""
        return self.holds_state and not self.built.engine.is_closed

    def by_param(self, state_dict: dict[str, Any]) -> dict[Tensor, Any]:
        """The state of ``state_dict``, which is in plain torch form, by parameter."""
        return self.built.state.by_param(state_dict)

    @torch.inference_mode(False)
    def state_dict(self) -> dict[str, Any]:
        """The state in plain torch form, whole on every rank (collective).

        Raises UsageError for shards inside ``join``, where ranks without batches gather nothing.
        """
        self.synchronize()
        if self.built.updates.is_divided:
            self.built.engine.joining.refuse("gathering the optimizer's state")
        self.built.engine.settle()
        packed = self.built.state.pack(self.context.world)
        self.built.note_steps(packed["param_groups"])
        return packed

    @torch.inference_mode(False)
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state in plain torch form, whole and the same on every rank, which the ranks
        compare in the next step; all stays as it is where the state does not fit.
        """
        self.synchronize()
        lines = self.built.state.take_over(state_dict)
        self.built.take_over_steps()
        self.built.engine.forget_unsent()
        self.built.engine.loads.note(lines)

    @torch.inference_mode(False)
    def clear_state(self) -> None:
        """Begin anew, with the same options, which the ranks compare in the next step."""
        self.synchronize()
        lines = self.built.state.clear()
        self.built.engine.forget_unsent()
        self.built.engine.loads.note(lines)

    def local_state(self) -> LocalState:
        """What this rank holds of the state; its tensors are those that the next step changes."""
        self.synchronize()
        self.built.engine.settle()
        state = self.built.state.local()
        self.built.note_steps(state.groups)
        return state

    @torch.inference_mode(False)
    def switch(self, mode: str) -> None:
        """Call the wrapped optimizer's ``train()`` or ``eval()`` for the parameters (collective,
        unless its param groups show that it was called).
        """
        if self.built.state.is_in_mode(mode):
            return
        self.built.engine.joining.refuse(f"{mode}() of the optimizer")
        self.synchronize()
        self.built.state.switch(self.context.world, mode)

    def close(self) -> None:
        """Finish what is under way and detach from the model; the state can still be read.

        Where every rank has all of it, the wrapped optimizer gets it back.
        """
        self._buffers.close()
        try:
            self.built.engine.compare_replicas()
        finally:
            self._detach()
        if self.built.state.hand_back():
            self.built = self.built.without_updates()
        self._channel.close()
        self.context.world.end_training(self.context.training)

    def _detach(self) -> None:
        before = self.built.engine
        self.built = self.built.closed()
        self._waited_before_s += before.waited_s
        self._fallbacks_before += before.codecs.fallbacks


class Migration:
    """Carries parameters' history and the optimizer's state over, from ``old``, whose last step is
    over, to an engine built by ``spec``.
    """

    def __init__(self, channel: ReshardingChannel, old: BuiltEngine, spec: EngineSpec) -> None:
        self._channel = channel
        updates = old.updates
        buckets = [update.bucket for update in updates.of_buckets]
        self._resharding = Resharding(
            updates.of_buckets, updates.comm_stream, spec.layout, rank=spec.context.world.rank
        )
        self._history = dict(had for b in buckets for had in b.tracker.history().items())
        self._times, self._num_checked = old.engine.times, old.engine.num_checked
        self._num_steps = old.engine.num_steps

    def take(self) -> None:
        """Take the state out of the old engine, so that its buffers can go before there are
        others (collective).
        """
        self._channel.run(self._resharding.take)

    def deliver(self, new: BuiltEngine) -> None:
        """Have ``new`` go on where the old engine has ended (collective)."""
        updates, stream = new.updates.of_buckets, new.updates.comm_stream
        for update in updates:
            update.bucket.tracker.recall(self._history)
        new.engine.times, new.engine.num_checked = self._times, self._num_checked
        new.engine.num_steps = self._num_steps
        if not updates:
            return  # the wrapped optimizer has all there is
        stream.wait_for_current()  # what is whole was made elsewhere
        self._channel.run(partial(self._resharding.deliver, updates=updates, comm_stream=stream))
        stream.make_current_wait()
