"""Assembly: an engine built for one optimizer and one model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.optim import Optimizer

from dearmpi.comm.choose import fastest_reduce_scatter
from dearmpi.comm.world import World
from dearmpi.config import EngineConfig, ReduceScatter
from dearmpi.engine.alone import AloneEngine
from dearmpi.engine.bucket import BucketRuntime
from dearmpi.engine.buffers import Arena
from dearmpi.engine.check import Checks, steps_between_checks
from dearmpi.engine.device_way import check_devices, open_side_stream
from dearmpi.engine.engine import Engine
from dearmpi.engine.hooks import ModelHooks
from dearmpi.engine.master import HALVES, MasterRule, is_half
from dearmpi.engine.memory import give_back_freed
from dearmpi.engine.pipeline import Pipeline
from dearmpi.engine.probe import require_elementwise, require_half, require_separable
from dearmpi.engine.shard_update import ShardUpdate
from dearmpi.engine.side_stream import HostSideStream, SideStream
from dearmpi.engine.spans import Spans
from dearmpi.engine.update import read_options
from dearmpi.engine.whole_update import WholeUpdate
from dearmpi.errors import ConfigError, MismatchError
from dearmpi.plan.fusion import fuse_by_cap
from dearmpi.plan.layout import BucketLayout, build_layout
from dearmpi.plan.parameter import spec_of
from dearmpi.plan.plan import Plan
from dearmpi.plan.schedule import Schedule, build_schedule

Updates = Sequence[ShardUpdate | WholeUpdate]


@dataclass(frozen=True, slots=True)
class Assembly:
    """What belongs together for as long as the set of parameters stays the same.

    names: the parameters under the optimizer, in the model's order.
    reduce_scatter: the algorithm in use. masters: which tensors have master copies.
    updates, hooks: none in a world of one, where the optimizer works undisturbed.
    side: where updates run, and whoever changes their state.
    """

    names: Mapping[nn.Parameter, str]
    layout: BucketLayout
    schedule: Schedule
    engine: Engine | AloneEngine
    reduce_scatter: ReduceScatter = "ring"
    masters: MasterRule = MasterRule()
    updates: Updates = ()
    hooks: ModelHooks | None = None
    checks: Checks | None = None
    side: SideStream = HostSideStream()

    def close(self) -> None:
        """Finish what is under way and detach from the model."""
        self.engine.close()
        if self.hooks is not None:
            self.hooks.remove()
        if self.checks is not None:
            self.checks.remove()


def assemble(
    optimizer: Optimizer,
    model: nn.Module,
    *,
    world: World,
    config: EngineConfig,
    spans: Spans,
    plan: Plan | None = None,
) -> Assembly:
    """Lay out, check against the other ranks, and build (collective).

    ``plan`` goes before what ``config`` says of buckets, schedule and window.

    Raises ConfigError for parameters or an optimizer that cannot be served, MismatchError if the
    ranks' models, optimizers or settings differ.
    """
    names = _optimized_parameters(optimizer, model)
    check_devices(world, names, asked=config.cuda_buffers)
    layout = lay_out(optimizer, model, world_size=world.size, config=config, plan=plan)
    if plan is not None:
        schedule, config = plan.schedule, replace(config, window=plan.window)
    else:
        schedule = build_schedule(config.schedule, len(layout))
    _check_agreement(world, optimizer, names, layout, schedule, config)
    if config.master_weights and not any(is_half(param) for param in names):
        raise ConfigError(
            "master_weights has no effect: no parameter of the optimizer is bf16 or fp16; convert "
            "the model first, or leave master_weights out"
        )
    _check_comm_dtype(names, config)
    if not config.master_weights:
        halves = {param.dtype for param in names if is_half(param)}
        require_half(optimizer, halves, whole=config.gather == "gradients")
    if world.size == 1 and not config.master_weights:
        require_separable(optimizer)  # what cannot run on several ranks is refused on one already
        return Assembly(names, layout, schedule, AloneEngine(optimizer, spans))
    shards = config.gather == "parameters"
    require = require_elementwise if shards else require_separable
    require(optimizer)
    params = {name: param for param, name in names.items()}
    gradients, parameters = Arena(layout), Arena(layout) if shards else None
    buckets = [
        BucketRuntime(
            plan,
            [params[name] for name in plan.names],
            rank=world.rank,
            gradients=gradients,
            parameters=parameters,
        )
        for plan in layout
    ]
    give_back_freed()
    side = open_side_stream(names, world=world, layout=layout, config=config)
    masters = _choose_masters(world, config)
    with side.section():
        updates = _build_updates(
            optimizer, buckets, rank=world.rank, shards=shards, masters=masters
        )
    reduce_scatter = _choose_reduce_scatter(world, buckets, config)
    pipeline = Pipeline(
        world,
        buckets,
        updates,
        schedule=schedule,
        config=config,
        reduce_scatter=reduce_scatter,
        side=side,
        spans=spans,
    )
    engine = Engine(
        world, pipeline, eager=config.eager, read_options=lambda: read_options(optimizer)
    )
    places = {
        param: (bucket, slot) for bucket in buckets for slot, param in enumerate(bucket.params)
    }
    hooks = ModelHooks(model, places, pre_forward=engine.pre_forward, grad_ready=engine.grad_ready)
    every = steps_between_checks(config.check_every)
    checks = Checks(world, model, buckets, every=every) if every else None
    return Assembly(
        names, layout, schedule, engine, reduce_scatter, masters, updates, hooks, checks, side
    )


def lay_out(
    optimizer: Optimizer,
    model: nn.Module,
    *,
    world_size: int,
    config: EngineConfig,
    plan: Plan | None = None,
) -> BucketLayout:
    """The buckets that ``assemble`` makes. Raises ConfigError for a plan that does not fit."""
    names = _optimized_parameters(optimizer, model)
    specs = [spec_of(param, name) for param, name in names.items()]
    if plan is not None:
        return plan.layout(specs, world_size)
    cap_bytes = config.cap_bytes(sum(spec.nbytes for spec in specs))
    return build_layout(fuse_by_cap(specs, cap_bytes), world_size)


def _optimized_parameters(optimizer: Optimizer, model: nn.Module) -> dict[nn.Parameter, str]:
    """The optimizer's parameters with their names, in the model's order."""
    wanted = {param for group in optimizer.param_groups for param in group["params"]}
    names = {param: name for name, param in model.named_parameters() if param in wanted}
    strangers = [tuple(param.shape) for param in wanted if param not in names]
    if strangers:
        raise ConfigError(
            f"the optimizer has {len(strangers)} parameters that are not in the model, of shapes "
            f"{strangers[:3]}; pass the model that the optimizer was made for"
        )
    if not any(param.requires_grad for param in names):
        raise ConfigError("the optimizer has no parameter that requires grad: nothing to train")
    return names


def _check_agreement(
    world: World,
    optimizer: Optimizer,
    names: Mapping[nn.Parameter, str],
    layout: BucketLayout,
    schedule: Schedule,
    config: EngineConfig,
) -> None:
    """Raise MismatchError unless all ranks have the same model, optimizer and settings."""
    groups = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    facts = {
        "settings": repr(config),
        "optimizer": f"{type(optimizer).__name__} {groups}",
        "model": repr([bucket.slots for bucket in layout]),
        "schedule": repr(schedule),
    }
    for what, fact in facts.items():
        digest = hashlib.sha256(fact.encode()).hexdigest()[:12]
        seen = world.all_gather_text(f"{fact[:160]} ... (hash {digest})")
        for rank, other in enumerate(seen):
            if other != seen[0]:
                raise MismatchError(
                    f"rank {rank} has another {what} than rank 0: {other} against {seen[0]}; "
                    "every rank must build the same one"
                )


def _check_comm_dtype(params: Iterable[nn.Parameter], config: EngineConfig) -> None:
    """Raise ConfigError if nothing is wider than what it is to be sent as, on one rank as well."""
    if config.wire_dtype is not None and all(is_half(param) for param in params):
        raise ConfigError(
            f"comm_dtype {config.comm_dtype!r} has no effect: all parameters of the optimizer are "
            "of half precision and travel as they are; leave it out, or keep the parameters in "
            "fp32 and compute under torch.autocast"
        )


def _choose_masters(world: World, config: EngineConfig) -> MasterRule:
    """One rank gathers nothing, so that nothing is rounded."""
    gathered_as = None
    if config.wire_dtype is not None and config.gather == "parameters" and world.size > 1:
        gathered_as = HALVES[config.wire_dtype]
    return MasterRule(config.master_weights, gathered_as)


def _build_updates(
    optimizer: Optimizer,
    buckets: Sequence[BucketRuntime],
    *,
    rank: int,
    shards: bool,
    masters: MasterRule,
) -> Updates:
    groups = {
        param: index
        for index, group in enumerate(optimizer.param_groups)
        for param in group["params"]
    }
    if shards:
        return [ShardUpdate(optimizer, b, groups, rank=rank, masters=masters) for b in buckets]
    return [WholeUpdate(optimizer, b, groups, masters=masters) for b in buckets]


def _choose_reduce_scatter(
    world: World, buckets: Sequence[BucketRuntime], config: EngineConfig
) -> ReduceScatter:
    if config.reduce_scatter != "auto":
        return config.reduce_scatter
    largest = max(buckets, key=lambda bucket: bucket.plan.nbytes)
    buffer = largest.gradients.data.cpu()  # what MPI gets of a device's tensor
    return fastest_reduce_scatter(world, buffer, wire_dtype=config.wire_dtype)
