"""build_engine(): from a spec, an optimizer and a model to an engine with its hooks and updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from dearmpi.comm.algorithms.registry import CollectiveAlgorithms
from dearmpi.comm.world import World
from dearmpi.config import EngineConfig
from dearmpi.engine.agreement.replicas import Checks, Replicas, steps_between_checks
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.bucket.buffers import Arena, give_back_freed
from dearmpi.engine.codec.choose import choose_algorithms, choose_codecs
from dearmpi.engine.codec.half import dtype_of_gathered
from dearmpi.engine.device.comm_stream import CommStream, DeviceCommStream, HostCommStream
from dearmpi.engine.device.route_choice import open_comm_stream
from dearmpi.engine.iteration.engine import Engine
from dearmpi.engine.iteration.engine_state import EngineState
from dearmpi.engine.iteration.hooks import ModelHooks
from dearmpi.engine.iteration.null_engine import NullEngine
from dearmpi.engine.iteration.pipeline import Pipeline
from dearmpi.engine.probe.probe import resident_scalars
from dearmpi.engine.setup.checks import check_unclaimed, claim, release
from dearmpi.engine.setup.spec import EngineSpec
from dearmpi.engine.state.options import OptionReader
from dearmpi.engine.trace.spans import Spans
from dearmpi.engine.update.master import MasterRule
from dearmpi.engine.update.shard import NUM_FETCHED, HostMemory, HostShard
from dearmpi.engine.update.shard_update import ResidentShard, Shard, ShardUpdate, Updates, shards_of
from dearmpi.engine.update.update import WholeUpdate
from dearmpi.plan.data.schedule import Conduct


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """What belongs together for as long as the buckets stay the same.

    spec: what all of it was built by.
    algorithms: those in use. masters: which tensors have master copies.
    updates, hooks: none where the wrapped optimizer simply does its work, as in a world of one.
    checks, replicas: only with ``check_every``.
    comm_stream: where updates run, and where their state may be changed.
    """

    spec: EngineSpec
    engine: Engine | NullEngine
    algorithms: CollectiveAlgorithms = CollectiveAlgorithms("ring")
    masters: MasterRule = MasterRule()
    updates: Updates = ()
    hooks: ModelHooks | None = None
    checks: Checks | None = None
    replicas: Replicas | None = None
    comm_stream: CommStream = HostCommStream()

    @property
    def shards(self) -> list[ShardUpdate]:
        """The updates where they are of shards, else none."""
        return shards_of(self.updates)

    def compare_replicas(self) -> None:
        """After the last step, if that is to be compared: now, and not in the next (collective)."""
        if self.replicas is not None:
            self.engine.exchange_replicas()
            self.replicas.compare()

    def close(self) -> None:
        """Finish what is under way and detach from the model."""
        self.engine.close()
        self.detach()

    def detach(self) -> None:
        """Leave the model alone, with no word to other ranks, which may be elsewhere."""
        if self.hooks is not None:
            self.hooks.remove()
        if self.checks is not None:
            self.checks.remove()
        release(self.spec.names, self.engine)


def build_engine(
    spec: EngineSpec,
    optimizer: Optimizer,
    model: nn.Module,
    *,
    world: World,
    spans: Spans,
) -> BuiltEngine:
    """Build (collective).

    Raises ConfigError for parameters of another engine.
    """
    check_unclaimed(spec.names)
    if spec.config.has_buckets(world.size):
        built = _build(spec, optimizer, model, world=world, spans=spans)
    else:
        built = BuiltEngine(spec, NullEngine(optimizer, spans))
    claim(spec.names, built.engine)
    return built


def _build(
    spec: EngineSpec,
    optimizer: Optimizer,
    model: nn.Module,
    *,
    world: World,
    spans: Spans,
) -> BuiltEngine:
    config = spec.config
    every = steps_between_checks(config.check_every)  # refused before anything is attached
    buckets = _build_buckets(spec, rank=world.rank)
    comm_stream = open_comm_stream(spec.names, world=world, layout=spec.layout, config=config)
    masters = _choose_masters(world, config)
    with comm_stream.section():
        updates = _build_updates(
            optimizer,
            buckets,
            rank=world.rank,
            comm_stream=comm_stream,
            config=config,
            masters=masters,
        )
    algorithms = choose_algorithms(world, buckets, config, comm_stream)
    replicas = Replicas(buckets, rank=world.rank, size=world.size, every=every) if every else None
    conduct = Conduct(spec.schedule, config.window, config.eager, config.gather)
    state = EngineState(
        world, buckets, conduct, comm_stream=comm_stream, spans=spans, replicas=replicas
    )
    codecs = choose_codecs(buckets, algorithms, config)
    num_updating = NUM_FETCHED if config.update_on == "host" else 1
    pipeline = Pipeline(state, updates, codecs, num_updating=num_updating)
    engine = Engine(state, pipeline, OptionReader(optimizer))
    return BuiltEngine(
        spec,
        engine,
        algorithms,
        masters,
        updates,
        hooks=_attach_hooks(model, buckets, engine),
        checks=Checks(model, buckets) if every else None,
        replicas=replicas,
        comm_stream=comm_stream,
    )


def _build_buckets(spec: EngineSpec, *, rank: int) -> list[BucketRuntime]:
    params = {name: param for param, name in spec.names.items()}
    layout, shards = spec.layout, spec.config.gather == "parameters"
    gradients = Arena(layout)
    parameters = Arena(layout, zeroed=False) if shards else None
    buckets = [
        BucketRuntime(
            bucket,
            [params[name] for name in bucket.names],
            rank=rank,
            gradients=gradients,
            parameters=parameters,
        )
        for bucket in layout
    ]
    give_back_freed()  # what the parameters have moved out of
    return buckets


def _attach_hooks(model: nn.Module, buckets: Sequence[BucketRuntime], engine: Engine) -> ModelHooks:
    places = {
        param: (bucket, slot) for bucket in buckets for slot, param in enumerate(bucket.params)
    }
    return ModelHooks(
        model,
        places,
        pre_forward=engine.waiting.pre_forward,
        begin_backprop=engine.backprop.begin,
        register_grad_ready=engine.backprop.register_grad_ready,
        end_backprop=engine.backprop.end,
        polls=engine.waiting.polls,
        is_driver=engine.waiting.is_driver,
    )


def _choose_masters(world: World, config: EngineConfig) -> MasterRule:
    """The host works in fp32."""
    gathered_as = dtype_of_gathered(config, world_size=world.size)
    return MasterRule(config.master_weights or config.update_on == "host", gathered_as)


def _build_updates(
    optimizer: Optimizer,
    buckets: Sequence[BucketRuntime],
    *,
    rank: int,
    comm_stream: CommStream,
    config: EngineConfig,
    masters: MasterRule,
) -> Updates:
    """One for each bucket: all of shards, or all of whole parameters."""
    groups = {
        param: index
        for index, group in enumerate(optimizer.param_groups)
        for param in group["params"]
    }
    scalars = resident_scalars(optimizer)
    if config.gather == "gradients":
        return [
            WholeUpdate(optimizer, b, groups, masters=masters, scalars=scalars) for b in buckets
        ]
    placed = _place_shards(
        buckets, rank=rank, comm_stream=comm_stream, on_host=config.update_on == "host"
    )
    return [
        ShardUpdate(optimizer, bucket, groups, shard=shard, masters=masters, scalars=scalars)
        for bucket, shard in zip(buckets, placed, strict=True)
    ]


def _place_shards(
    buckets: Sequence[BucketRuntime], *, rank: int, comm_stream: CommStream, on_host: bool
) -> Sequence[Shard]:
    if not on_host:
        return [ResidentShard(bucket, rank=rank) for bucket in buckets]
    assert isinstance(comm_stream, DeviceCommStream), "without a device this is refused"
    most_bytes = max(b.spec.largest_shard * b.spec.itemsize for b in buckets)
    memory = HostMemory(comm_stream, most_bytes=most_bytes)
    return [HostShard(bucket, rank=rank, memory=memory) for bucket in buckets]
