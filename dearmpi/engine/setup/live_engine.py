"""LiveEngine: the engine in use, replaced by another where buckets change.

``Migration`` carries parameters' history and the optimizer's state over, between two steps, with
nothing under way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dearmpi.comm.api.requests import Chain
from dearmpi.comm.progress.channel import Channel
from dearmpi.comm.world import World
from dearmpi.config import EngineConfig
from dearmpi.engine.iteration.null_engine import NullEngine, refuse_closed
from dearmpi.engine.setup import optimizer_state
from dearmpi.engine.setup.build import BuiltEngine, build_engine
from dearmpi.engine.setup.checks import check_optimizer, check_parameters, check_unclaimed
from dearmpi.engine.setup.spec import EngineSpec, lay_out, make_spec, optimized_parameters
from dearmpi.engine.state.options import describe_options
from dearmpi.engine.state.resharding import Resharding
from dearmpi.engine.state.sharded_state import LocalState
from dearmpi.engine.sync.batch_norm import name_layers
from dearmpi.engine.sync.model_tensors import broadcast_buffers, broadcast_parameters
from dearmpi.engine.sync.refused_models import refuse_lazy
from dearmpi.engine.trace.spans import IterationTimes, Spans
from dearmpi.errors import ConfigError
from dearmpi.plan.data.layout import BucketLayout
from dearmpi.plan.data.plan import Plan

_WHAT = "the optimizer's state"


class Migration:
    """Of ``old``, whose last step is over, to an engine built by ``spec``."""

    def __init__(self, world: World, old: BuiltEngine, spec: EngineSpec) -> None:
        buckets = [update.bucket for update in old.updates]
        self._resharding = Resharding(old.updates, old.comm_stream, spec.layout, rank=world.rank)
        self._history = dict(had for b in buckets for had in b.tracker.history().items())
        self._times = old.engine.times
        self._num_compared = None if old.replicas is None else old.replicas.num_steps

    def take(self, channel: Channel) -> None:
        """Take the state out of the old engine, so that its buffers can go before there are
        others (collective).
        """
        channel.run(_WHAT, lambda c: Chain(self._resharding.take(c)))

    def deliver(self, new: BuiltEngine, channel: Channel) -> None:
        """Have ``new`` go on where the old engine has ended (collective)."""
        for update in new.updates:
            update.bucket.tracker.recall(self._history)
        new.engine.times = self._times
        if self._num_compared is not None and new.replicas is not None:
            new.replicas.num_steps = self._num_compared
        if not new.updates:
            return  # the wrapped optimizer has all there is
        new.comm_stream.wait_for_current()  # what is whole was made elsewhere
        relocation, updates, comm_stream = self._resharding, new.updates, new.comm_stream
        channel.run(_WHAT, lambda c: Chain(relocation.deliver(c, updates, comm_stream)))
        comm_stream.make_current_wait()


class LiveEngine:
    """The built engine in use; another replaces it where buckets change.

    The optimizer's state lies in its updates, if it has any, and moves with them.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        world: World,
        config: EngineConfig,
        plan: Plan | None,
        spans: Spans,
    ) -> None:
        """Assemble, and take over rank 0's parameters and buffers, and the state that ``optimizer``
        has (collective).

        Raises what ``assemble`` and ``broadcast_buffers`` raise, with nothing left on the model.
        """
        self._optimizer, self._model = optimizer, model
        self._world, self._spans = world, spans
        self._waited_before_s = 0.0
        self._channel: Channel | None = None
        spec = make_spec(optimizer, model, world=world, config=config, plan=plan)
        self.built = build_engine(spec, optimizer, model, world=world, spans=spans)
        try:
            broadcast_buffers(model, world)  # first, since ``optimizer`` then still has its state
            optimizer_state.adopt(self._optimizer, self.built)
            broadcast_parameters(model, world)
            name_layers(model)
        except BaseException:
            self.built.detach()  # nobody has this one, to close it
            raise

    @property
    def times(self) -> IterationTimes:
        """Of the iteration that the last step ended."""
        return self.built.engine.times

    @property
    def waited_s(self) -> float:
        """Seconds that forward and backward have waited for communication since the start."""
        return self._waited_before_s + self.built.engine.waited_s

    def follows(self, plan: Plan) -> bool:
        """Whether ``plan`` is what is in use already. Raises ConfigError if it does not fit."""
        in_use = self.built.spec
        return (
            self._lay_out(in_use.config, plan) == in_use.layout
            and plan.schedule == in_use.schedule
            and plan.window == in_use.config.window
        )

    def check_changeable(self, what: str) -> None:
        """Raise UsageError for ``what`` inside ``join``, at whose end this rank may still have to
        take part, and after ``close``.
        """
        if self.built.engine.is_closed:
            refuse_closed(what)
        self.built.engine.joining.refuse(what)

    @torch.inference_mode(False)
    def grow(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the optimizer, for ``renew`` to lay out.

        Raises ConfigError, with nothing added, if they are not in the model, belong to another
        DistributedOptimizer or cannot be served.
        """
        refuse_lazy(self._model)
        self._optimizer.add_param_group(param_group)
        in_use = self.built.spec
        try:
            names = optimized_parameters(self._optimizer, self._model, in_use.names)
            new = {param: name for param, name in names.items() if param not in in_use.names}
            check_unclaimed(new)
            lay_out(names, self._model, world_size=self._world.size, config=in_use.config)
            check_parameters(self._optimizer, names, config=in_use.config)
            check_optimizer(self._optimizer, world=self._world, config=in_use.config)
        except ConfigError:
            self._optimizer.param_groups.pop()
            raise

    @torch.inference_mode(False)
    def renew(self, *, config: EngineConfig, plan: Plan | None) -> None:
        """Lay out anew, with the same parameters and state, between two steps (collective).

        Training stands still until the last step is over and the state is in its place.

        Raises ConfigError for a plan that does not fit, and for parameters that share memory, with
        everything as it was.
        """
        optimizer, model, world = self._optimizer, self._model, self._world
        known = self.built.spec.names
        spec = make_spec(optimizer, model, world=world, config=config, plan=plan, known=known)
        migration = Migration(world, self.built, spec)
        self.built.engine.synchronize()
        self.built.compare_replicas()
        channel = self.resharding_channel()
        migration.take(channel)
        self._detach()
        self.built = replace(self.built, updates=())  # else the old buffers would stay
        self.built = build_engine(spec, optimizer, model, world=world, spans=self._spans)
        optimizer_state.adopt(self._optimizer, self.built)
        migration.deliver(self.built, channel)

    def resharding_channel(self) -> Channel:
        """On which state travels, opened at the first call (collective): where that is known to
        come, before the wire is busy.
        """
        if self._channel is None:
            self._channel = self._world.open_channel("relocation", window=1)
        return self._channel

    def _lay_out(self, config: EngineConfig, plan: Plan | None) -> BucketLayout:
        known = self.built.spec.names
        names = optimized_parameters(self._optimizer, self._model, known)
        return lay_out(names, self._model, world_size=self._world.size, config=config, plan=plan)

    def check(self) -> None:
        """After a step: see whether replicas were alike after the one before, as far as that was to
        be compared, and note what this one used.
        """
        hooks, replicas = self.built.hooks, self.built.replicas
        if hooks is not None:
            hooks.stepped()
        if replicas is not None:
            # Of ranks that have joined no scheduler runs, but they take over the others' options.
            joining = self.built.engine.joining.is_open
            told = replicas.is_due and not joining
            options = repr(describe_options(self._optimizer)) if told else ""
            replicas.stepped(options, self.built.engine.idle_buckets())
            replicas.compare()

    def synchronize(self) -> None:
        """Wait until parameters and state show the last step."""
        self.built.engine.synchronize()

    @property
    def holds_state(self) -> bool:
        """Whether the state lies in updates, and not in the wrapped optimizer."""
        return bool(self.built.updates)

    @torch.inference_mode(False)
    def state_dict(self) -> dict[str, Any]:
        """The state in plain torch form, whole on every rank (collective)."""
        self.synchronize()
        return optimizer_state.pack(self._optimizer, self.built, self._world)

    @torch.inference_mode(False)
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state in plain torch form, whole and the same on every rank, which the ranks
        compare in the next step; all stays as it is where the state does not fit.
        """
        self.synchronize()
        optimizer_state.take_over(self._optimizer, self.built, state_dict)

    def local_state(self) -> LocalState:
        """What this rank holds of the state; its tensors are those that the next step changes."""
        self.synchronize()
        return optimizer_state.read_held(self._optimizer, self.built)

    @torch.inference_mode(False)
    def switch(self, mode: str) -> None:
        """Call the wrapped optimizer's ``train()`` or ``eval()`` for the parameters (collective,
        unless its param groups say that it was called).
        """
        if optimizer_state.is_in_mode(self._optimizer, mode):
            return
        self.built.engine.joining.refuse(f"{mode}() of the optimizer")
        self.synchronize()
        optimizer_state.switch(self._optimizer, self.built, self._world, mode)

    def close(self) -> None:
        """Finish what is under way and detach from the model; the state can still be read.

        Where every rank has all of it, the wrapped optimizer gets it back.
        """
        try:
            self.built.compare_replicas()
        finally:
            self._detach()
        if optimizer_state.hand_back(self._optimizer, self.built):
            self.built = replace(self.built, updates=())
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _detach(self) -> None:
        self.built.close()
        self._waited_before_s += self.built.engine.waited_s
        closed = NullEngine(self._optimizer, self._spans, closed_after=self.times)
        self.built = replace(self.built, engine=closed, hooks=None, checks=None, replicas=None)

    def by_param(self, state_dict: dict[str, Any]) -> dict[Tensor, Any]:
        """The state of ``state_dict``, which is in plain torch form, by parameter."""
        params = optimizer_state.numbered_params(self._optimizer)
        return {params[index]: entries for index, entries in state_dict["state"].items()}
