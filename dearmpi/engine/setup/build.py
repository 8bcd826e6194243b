"""build_engine(): from a spec to an engine with its hooks and updates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dearmpi.device.route_choice import choose_algorithms, open_comm_stream
from dearmpi.engine.bucket.bucket import build_buckets
from dearmpi.engine.codec.choice import choose_codecs
from dearmpi.engine.iteration.engine import Engine
from dearmpi.engine.iteration.engine_state import EngineState
from dearmpi.engine.iteration.hooks import ModelHooks
from dearmpi.engine.iteration.null_engine import NullEngine
from dearmpi.engine.setup.spec import EngineSpec, check_unclaimed
from dearmpi.engine.state.optimizer_state import OptimizerState
from dearmpi.engine.update.shard_update import UpdateSet, build_updates

NUM_STEPS = "dear_steps"
"""Among the entries of a saved param group."""


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """What belongs together for as long as the buckets stay the same.

    spec: what all of it was built by. state: the optimizer's, with the updates that hold it.
    hooks: none where the wrapped optimizer simply does its work, and once they are removed.
    """

    spec: EngineSpec
    engine: Engine | NullEngine
    state: OptimizerState
    hooks: ModelHooks | None = None

    @property
    def updates(self) -> UpdateSet:
        """The updates of all buckets."""
        return self.state.updates

    @property
    def claimant(self) -> object:
        """What lives for as long as the parameters are taken: with hooks, until these are off the
        model, also where the script has forgotten the optimizer.
        """
        return self.engine.waiting if isinstance(self.engine, Engine) else self.engine

    def check_step(self) -> None:
        """After a step: have it compared, as far as it is due (collective)."""
        if self.hooks is not None:
            self.hooks.stepped()
        self.engine.check_replicas(self.state.describe_options)

    def closed(self) -> BuiltEngine:
        """Finish what is under way, and detach from the model; the state stays."""
        self.engine.close()
        self.detach()
        context, times = self.spec.context, self.engine.times
        closed = NullEngine(context.optimizer, context.spans, closed_after=times)
        closed.num_steps = self.engine.num_steps
        return replace(self, engine=closed, hooks=None)

    def take_over_steps(self) -> None:
        """Go on counting steps where the state has ended that the optimizer has loaded."""
        groups = self.spec.context.optimizer.param_groups
        self.engine.num_steps = max(group.pop(NUM_STEPS, 0) for group in groups)

    def note_steps(self, groups: list[dict[str, Any]]) -> None:
        """Put the number of steps into saved param groups, where it counts for what travels."""
        if self.spec.config.counts_steps:
            for group in groups:
                group[NUM_STEPS] = self.engine.num_steps

    def detach(self) -> None:
        """Leave the model alone, with no word to other ranks, which may be elsewhere."""
        if self.hooks is not None:
            self.hooks.remove()
        self.spec.release(self.claimant)

    def without_updates(self) -> BuiltEngine:
        """The same, with nothing that holds the buckets' memory or the state."""
        return replace(self, state=OptimizerState(self.state.optimizer, self.spec.names))


def build_engine(spec: EngineSpec) -> BuiltEngine:
    """Build (collective).

    Raises ConfigError for parameters of another engine.
    """
    check_unclaimed(spec.names)
    context = spec.context
    if spec.config.has_buckets(context.world.size):
        built = _build(spec)
    else:
        engine = NullEngine(context.optimizer, context.spans)
        built = BuiltEngine(spec, engine, OptimizerState(context.optimizer, spec.names))
    spec.claim(built.claimant)
    return built


def _build(spec: EngineSpec) -> BuiltEngine:
    context = spec.context
    optimizer, world, config = context.optimizer, context.world, spec.config
    every = config.steps_between_checks  # refused before anything is attached
    params = {name: param for param, name in spec.names.items()}
    moves = config.gather == "parameters"
    buckets = build_buckets(spec.layout, params, rank=world.rank, moves=moves)
    for bucket in buckets:
        if moves and bucket.is_compressed(config):
            bucket.keep_shown()
    stream = open_comm_stream(spec.names, world=world, layout=spec.layout, config=config)
    with stream.section():
        updates = build_updates(
            optimizer,
            buckets,
            rank=world.rank,
            config=config,
            comm_stream=stream,
            scalars=spec.scalars,
            whole=spec.costs,
        )
    algorithms = choose_algorithms(
        world, spec.layout, params, config=config, comm_stream=stream, grid_choice=spec.grid_choice
    )
    state = EngineState(
        world,
        buckets,
        spec.conduct,
        comm_stream=stream,
        spans=context.spans,
        check_every=every,
        training=context.training,
    )
    order = spec.conduct.schedule.reduce_scatters
    codecs = choose_codecs(buckets, algorithms, config, order=order)
    engine = Engine(state, updates, codecs, optimizer)
    hooks = ModelHooks(context.model, engine)
    return BuiltEngine(spec, engine, OptimizerState(optimizer, spec.names, updates), hooks)
