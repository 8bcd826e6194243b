"""EngineSpec: all that is decided before an engine is built, and agreed upon by all ranks."""

from __future__ import annotations

import json
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

from torch import nn
from torch.optim import Optimizer

from dearmpi.comm.messages.ranks import digest, first_difference
from dearmpi.comm.world import World
from dearmpi.config import EngineConfig
from dearmpi.engine.device.route_choice import check_devices
from dearmpi.engine.setup.checks import check_optimizer, check_parameters
from dearmpi.engine.state.options import describe_options, describe_state
from dearmpi.engine.sync.model_tensors import describe, model_tensors
from dearmpi.engine.sync.refused_models import (
    check_apart,
    check_private,
    refuse_alone_in_their_group,
    refuse_layouts,
    refuse_renormed,
    refuse_unaveraged,
    refuse_wrappers,
)
from dearmpi.errors import ConfigError, MismatchError
from dearmpi.plan.data.layout import BucketLayout, build_layout, fuse_by_cap, spec_of
from dearmpi.plan.data.plan import Plan
from dearmpi.plan.data.schedule import Schedule, build_schedule


def check_alike(
    world: World,
    optimizer: Optimizer,
    model: nn.Module,
    names: Mapping[nn.Parameter, str],
    *,
    config: EngineConfig,
    layout: BucketLayout,
    schedule: Schedule,
) -> None:
    """Raise MismatchError unless all ranks have the same model, optimizer and settings, with the
    first that differs (collective). ``names``: of the parameters under the optimizer; the model's
    other parameters and its buffers are compared as well.

    State counts too: where rank 0 alone has loaded it, the others would begin without.
    """
    facts = {
        "setting": [f"{field.name}={getattr(config, field.name)!r}" for field in fields(config)],
        "model": [_describe(param, name) for param, name in names.items()],
        "parameter or buffer outside the optimizer": _describe_others(model, names),
        "layout": [f"bucket {b.index} with {len(b.placements)} parameters" for b in layout],
        "optimizer": _describe_optimizer(optimizer, names),
        "optimizer option": describe_options(optimizer),
        "optimizer state": describe_state(optimizer, names),
        "schedule": _describe_schedule(schedule),
    }
    own = json.dumps([digest(lines) for lines in facts.values()])
    seen = [json.loads(text) for text in world.all_gather_text(own)]
    for (what, lines), told in zip(facts.items(), zip(*seen, strict=True), strict=True):
        if len(set(told)) > 1:
            _refuse(world, what, first_difference(lines, world.all_gather_text))


def _refuse(world: World, what: str, told: Sequence[str]) -> None:
    rank = next(rank for rank, line in enumerate(told) if line != told[0])
    owner = "model" if "outside" in what else "optimizer"
    raise MismatchError(
        f"rank {rank} on {world.hosts[rank]} has another {what} than rank 0 on {world.hosts[0]}: "
        f"its {owner} has {told[rank]} where rank 0's has {told[0]}; every rank must build, and "
        "load, the same",
        code="ranks-built-differently",
    )


def _describe(param: nn.Parameter, name: str) -> str:
    return f"{name} {describe(param, note='' if param.requires_grad else ', frozen')}"


def _describe_others(model: nn.Module, params: Container[nn.Parameter]) -> list[str]:
    return [
        f"{kind} {name} {describe(tensor)}"
        for kind, name, tensor in model_tensors(model)
        if tensor not in params
    ]


def _describe_schedule(schedule: Schedule) -> list[str]:
    order = [
        f"RS{bucket} at place {place}" for place, bucket in enumerate(schedule.reduce_scatters)
    ]
    gathers = [f"AG{gather.bucket} after RS{gather.after}" for gather in schedule.all_gathers]
    return [schedule.name, schedule.launch.value, schedule.wait.value, *order, *gathers]


def _describe_optimizer(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> list[str]:
    """Its type, then a line for each parameter in a group."""
    groups = enumerate(optimizer.param_groups)
    return [
        f"the type {type(optimizer).__name__}",
        *(
            f"{names[param]} in param group {number}"
            for number, group in groups
            for param in group["params"]
            if param in names
        ),
    ]


NOT_KNOWN: Mapping[nn.Parameter, str] = MappingProxyType({})
"""Of no parameter anything is known."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything that is decided before anything is built.

    names: the parameters under the optimizer, in the model's order.
    config: with the window of the plan, if there is one.
    """

    names: Mapping[nn.Parameter, str]
    layout: BucketLayout
    schedule: Schedule
    config: EngineConfig


def make_spec(
    optimizer: Optimizer,
    model: nn.Module,
    *,
    world: World,
    config: EngineConfig,
    plan: Plan | None = None,
    known: Mapping[nn.Parameter, str] = NOT_KNOWN,
) -> EngineSpec:
    """Decide what to build, and check it here and against the other ranks (collective).

    ``plan`` goes before what ``config`` says of buckets, schedule and window. ``known``: as in
    ``optimized_parameters``. Raises ConfigError for parameters or an optimizer that cannot be
    served, MismatchError if the ranks' models, optimizers or settings differ.
    """
    names = optimized_parameters(optimizer, model, known)
    check_devices(world, names, config=config)
    layout = lay_out(names, model, world_size=world.size, config=config, plan=plan)
    if plan is not None:
        schedule, config = plan.schedule, replace(config, window=plan.window)
    else:
        schedule = build_schedule(config.schedule, len(layout))
    check_alike(world, optimizer, model, names, config=config, layout=layout, schedule=schedule)
    check_parameters(optimizer, names, config=config)
    refuse_unaveraged(model.named_buffers(), config.buffers)
    check_optimizer(optimizer, world=world, config=config)
    return EngineSpec(names, layout, schedule, config)


def lay_out(
    names: Mapping[nn.Parameter, str],
    model: nn.Module,
    *,
    world_size: int,
    config: EngineConfig,
    plan: Plan | None = None,
) -> BucketLayout:
    """The buckets of a model. Raises ConfigError for a plan that does not fit, for
    modules that would go wrong on several ranks, and for parameters that share memory, with each
    other or where they would move away from it.
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


def optimized_parameters(
    optimizer: Optimizer, model: nn.Module, known: Mapping[nn.Parameter, str] = NOT_KNOWN
) -> dict[nn.Parameter, str]:
    """The optimizer's parameters with their names, in the model's order; those without elements,
    of which nothing travels and no step changes anything, are left out.

    Who is ``known`` keeps the name, by which the state goes from one layout to another, whatever
    the model calls it by now; who is new, and called as one of these, gets another one.

    Raises ConfigError for parameters that are not in the model, or if none requires grad.
    """
    wanted = {param for group in optimizer.param_groups for param in group["params"]}
    if known.keys() == {param for param in wanted if param.numel()}:
        names = dict(known)  # not looked up, since that waits for the gathers
    else:
        names = _name(wanted, model, known)
    if not any(param.requires_grad for param in names):
        raise ConfigError(
            "the optimizer has no parameter that requires grad: nothing to train",
            code="nothing-to-train",
        )
    return names


def _name(
    wanted: Collection[nn.Parameter], model: nn.Module, known: Mapping[nn.Parameter, str]
) -> dict[nn.Parameter, str]:
    names = {param: name for name, param in model.named_parameters() if param in wanted}
    strangers = [tuple(param.shape) for param in wanted if param not in names]
    if strangers:
        refuse_wrappers(model)  # which may have put others in their place
        raise ConfigError(
            f"the optimizer has {len(strangers)} parameters that are not in the model, of shapes "
            f"{strangers[:3]}; pass the model that the optimizer was made for (several modules: "
            "nn.ModuleList([a, b]))",
            code="parameters-not-in-model",
        )
    taken = set(known.values())
    for param, name in names.items():
        if param not in known:
            while name in taken:
                name += "'"
            taken.add(name)
        names[param] = known.get(param, name)
    return {param: name for param, name in names.items() if param.numel()}
