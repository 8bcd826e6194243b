"""EngineSpec: all that is decided before an engine is built, and agreed upon by all ranks."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from dearmpi.config import EngineConfig
from dearmpi.engine.setup.checks import (
    NOT_KNOWN,
    check_job,
    check_parameters,
    optimized_parameters,
)
from dearmpi.engine.setup.context import TrainingContext
from dearmpi.engine.setup.ownership import (
    check_optimizer,
    check_same_cutting,
    cut_buckets,
    find_costs,
    find_resident_scalars,
)
from dearmpi.engine.state.options import check_alike
from dearmpi.engine.sync.refused_models import (
    check_apart,
    check_private,
    refuse_alone_in_their_group,
    refuse_layouts,
    refuse_lazy,
    refuse_renormed,
    refuse_unaveraged,
    refuse_wrappers,
)
from dearmpi.errors import ConfigError
from dearmpi.plan.data.layout import BucketLayout, build_layout, fuse_by_cap, spec_of
from dearmpi.plan.data.plan import Plan
from dearmpi.plan.data.schedule import Conduct, Schedule, build_schedule

_CLAIMS: MutableMapping[Tensor, ReferenceType[object]] = WeakTensorKeyDictionary()
"""By parameter, what lives for as long as an engine has it; until then, or until a release."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything that is decided before anything is built.

    context: what it is for. names: the parameters under the optimizer, in the model's order.
    config: with the window of the plan, if there is one, and ``shards`` as they are cut.
    scalars: by group, names of the state's scalars that lie where the parameters are.
    costs: by name, those of the updates of parameters that owners update as wholes.
    grid_choice: what the file of a topology predicts, in words.
    """

    context: TrainingContext
    names: Mapping[nn.Parameter, str]
    layout: BucketLayout
    schedule: Schedule
    config: EngineConfig
    scalars: Sequence[frozenset[str]] = ()
    costs: Mapping[str, float] = field(default_factory=dict)
    grid_choice: str = ""

    @property
    def conduct(self) -> Conduct:
        """The stages of a bucket, and the order in which buckets travel."""
        return Conduct(self.schedule, self.config.window, self.config.eager, self.config.gather)

    def claim(self, claimant: object) -> None:
        """Take the parameters for an engine, for as long as ``claimant`` lives."""
        for param in self.names:
            _CLAIMS[param] = ref(claimant)

    def release(self, claimant: object) -> None:
        """Leave those parameters that ``claimant`` holds to other engines."""
        for param in self.names:
            holder = _CLAIMS.get(param)
            if holder is not None and holder() is claimant:
                del _CLAIMS[param]


def check_unclaimed(names: Mapping[nn.Parameter, str]) -> None:
    """Raise ConfigError if an engine in use has one of the parameters."""
    for param, name in names.items():
        claimant = _CLAIMS.get(param)
        if claimant is not None and claimant() is not None:
            raise ConfigError(
                f"parameter {name} belongs to another DistributedOptimizer, which is not closed; "
                "call close() on that one before making this one, or give each its own parameters",
                code="parameter-taken",
            )


def make_spec(
    context: TrainingContext,
    *,
    config: EngineConfig,
    plan: Plan | None = None,
    in_use: EngineSpec | None = None,
) -> EngineSpec:
    """Decide what to build, and check it here and against the other ranks (collective).

    ``plan`` goes before what ``config`` says of buckets, schedule and window. ``in_use``: what is
    to be replaced, whose names and costs stay. Raises ConfigError for parameters or an optimizer
    that cannot be served, MismatchError if the ranks' models, optimizers or settings differ.
    """
    known = NOT_KNOWN if in_use is None else in_use.names
    optimizer, model, world = context.optimizer, context.model, context.world
    names = optimized_parameters(optimizer, model, known)
    config, grid_choice = check_job(world, names, config=config)
    layout = lay_out(names, model, world_size=world.size, config=config, plan=plan)
    if plan is not None:
        schedule, config = plan.schedule, replace(config, window=plan.window)
    else:
        schedule = build_schedule(config.schedule, len(layout))
    check_alike(world, optimizer, model, names, config=config, layout=layout, schedule=schedule)
    check_parameters(optimizer, names, config=config)
    refuse_unaveraged(model.named_buffers(), config.buffers)
    shards = check_optimizer(optimizer, world_size=world.size, config=config)
    config = replace(config, shards=shards)
    if in_use is not None:
        check_same_cutting(in_use.config.shards, shards)
    costs: Mapping[str, float] = {}
    if shards == "whole":
        costs = find_costs(context, names, known={} if in_use is None else in_use.costs)
    layout = cut_buckets(layout, config, costs=costs, schedule=schedule)
    scalars = find_resident_scalars(optimizer, world_size=world.size, config=config)
    return EngineSpec(context, names, layout, schedule, config, scalars, costs, grid_choice)


def lay_out(
    names: Mapping[nn.Parameter, str],
    model: nn.Module,
    *,
    world_size: int,
    config: EngineConfig,
    plan: Plan | None = None,
) -> BucketLayout:
    """The buckets of a model. Raises ConfigError for a plan that does not fit, and for modules that
    would go wrong on several ranks. Also for parameters that share memory, with each other or where
    they would move away from it.
    """
    if world_size > 1:
        refuse_renormed(names, model)
        refuse_alone_in_their_group(model)
    if config.has_buckets(world_size):
        refuse_wrappers(model)
        refuse_layouts(names)
        check_apart(names, model)
        if config.gather == "parameters":
            check_private(names)
    specs = [spec_of(param, name) for param, name in names.items()]
    if plan is not None:
        return plan.layout(specs, world_size)
    model_bytes = sum(spec.nbytes for spec in specs)
    cap_bytes = config.cap_bytes(model_bytes, world_size=world_size)
    return build_layout(fuse_by_cap(specs, cap_bytes), world_size)


def is_followed(plan: Plan, in_use: EngineSpec) -> bool:
    """Whether ``plan`` is what is ``in_use`` already. Raises ConfigError if it does not fit."""
    context = in_use.context
    names = optimized_parameters(context.optimizer, context.model, in_use.names)
    size = context.world.size
    layout = lay_out(names, context.model, world_size=size, config=in_use.config, plan=plan)
    layout = cut_buckets(layout, in_use.config, costs=in_use.costs, schedule=plan.schedule)
    return (
        layout == in_use.layout
        and plan.schedule == in_use.schedule
        and plan.window == in_use.config.window
    )


def add_parameters(param_group: dict[str, Any], in_use: EngineSpec) -> None:
    """Add a param group to the optimizer, for another spec to lay out.

    Raises ConfigError, with nothing added, for parameters that are not in the model, belong to
    another DistributedOptimizer or cannot be served.
    """
    context = in_use.context
    optimizer, model, size = context.optimizer, context.model, context.world.size
    refuse_lazy(model)
    optimizer.add_param_group(param_group)
    try:
        names = optimized_parameters(optimizer, model, in_use.names)
        check_unclaimed({p: name for p, name in names.items() if p not in in_use.names})
        lay_out(names, model, world_size=size, config=in_use.config)
        check_parameters(optimizer, names, config=in_use.config)
        check_optimizer(optimizer, world_size=size, config=in_use.config)
    except BaseException:
        optimizer.param_groups.pop()
        raise
