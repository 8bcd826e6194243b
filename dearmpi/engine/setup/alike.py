"""Whether all ranks have built the same model, optimizer and settings, and if not, what differs."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dearmpi.comm.messages.collective_calls import digest, first_difference
from dearmpi.comm.world import World
from dearmpi.config import EngineConfig
from dearmpi.engine.state.options import describe_options, describe_state
from dearmpi.engine.sync.model_tensors import describe, model_tensors
from dearmpi.errors import MismatchError
from dearmpi.plan.data.layout import BucketLayout
from dearmpi.plan.data.schedule import Schedule


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
        "setting": [f"{name}={value!r}" for name, value in _settings_of(config).items()],
        "model": [_describe(param, name) for param, name in names.items()],
        "parameter or buffer outside the optimizer": _describe_others(model, names),
        "layout": [f"bucket {b.index} with {len(b.placements)} parameters" for b in layout],
        "optimizer": _describe_optimizer(optimizer, names),
        "optimizer option": describe_options(optimizer),
        "optimizer state": describe_state(optimizer, names),
        "schedule": _describe_schedule(schedule),
    }
    own = json.dumps([digest(lines) for lines in facts.values()])
    texts = [json.loads(text) for text in world.all_gather_text(own)]
    for (what, lines), seen in zip(facts.items(), zip(*texts, strict=True), strict=True):
        if len(set(seen)) > 1:
            _refuse(world, what, first_difference(lines, world.all_gather_text))


def _settings_of(config: EngineConfig) -> dict[str, Any]:
    """By name; ``check_every`` as the environment of this rank completes it."""
    settings = {field.name: getattr(config, field.name) for field in fields(config)}
    return {**settings, "check_every": config.steps_between_checks}


def _refuse(world: World, what: str, seen: Sequence[str]) -> None:
    rank = next(rank for rank, line in enumerate(seen) if line != seen[0])
    owner = "model" if "outside" in what else "optimizer"
    raise MismatchError(
        f"rank {rank} on {world.hosts[rank]} has another {what} than rank 0 on {world.hosts[0]}: "
        f"its {owner} has {seen[rank]} where rank 0's has {seen[0]}; every rank must build, and "
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
