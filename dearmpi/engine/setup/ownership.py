"""Ownership: what the updates of whole tensors cost, and which rank makes which, for all ranks."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping

from torch import nn

from dearmpi.config import EngineConfig
from dearmpi.engine.probe.tensor_wise import cost_of_update, tensorwise_groups
from dearmpi.engine.setup.context import TrainingContext
from dearmpi.engine.sync.model_tensors import compare_tensors
from dearmpi.plan.data.layout import BucketLayout, weigh
from dearmpi.plan.data.owners import assign_owners, owner_bound
from dearmpi.plan.data.schedule import Schedule

_MOST_SHARE = 0.6  # of all costs: with more in one tensor, owners gain little


def find_costs(
    context: TrainingContext, names: Mapping[nn.Parameter, str], known: Mapping[str, float]
) -> Mapping[str, float]:
    """By name, what the updates of parameters cost that the optimizer treats as wholes, the same on
    every rank (collective); frozen ones cost nothing. Warns on rank 0 where one of them is most of
    all.

    known: those that stay as they are. Raises MismatchError if ranks find different parameters.
    """
    optimizer, world = context.optimizer, context.world
    costs: dict[str, float] = {}
    measured: dict[tuple[int, tuple[int, ...]], float] = {}
    for number in sorted(tensorwise_groups(optimizer)):
        group = optimizer.param_groups[number]
        for param in group["params"]:
            if param not in names:
                continue
            name, key = names[param], (number, tuple(param.shape))
            if not param.requires_grad:
                costs[name] = 0.0
                continue
            if not known.get(name) and key not in measured:
                measured[key] = cost_of_update(optimizer, group, param.shape)
            costs[name] = known.get(name) or measured[key]
    compare_tensors(
        sorted(costs),
        world.all_gather_text,
        hosts=world.hosts,
        what="parameters that an owner updates",
        cure="every rank must build the same optimizer",
    )
    shared: dict[str, float] = json.loads(world.broadcast_text(json.dumps(costs)))
    if world.is_root and world.size > 1:
        _warn_of_largest(shared, world.size)
    return shared


def cut_buckets(
    layout: BucketLayout, config: EngineConfig, *, costs: Mapping[str, float], schedule: Schedule
) -> BucketLayout:
    """``layout``, whose buckets are cut evenly, as ``config`` says: with one owner for each
    parameter in ``costs``, which are those of ``find_costs``, or by weights.
    """
    if config.shards == "whole":
        return assign_owners(layout, costs, schedule.reduce_scatters)
    if config.has_weights and config.has_buckets(layout.world_size):
        assert not isinstance(config.shards, str)
        return weigh(layout, config.shards)
    return layout


def _warn_of_largest(costs: Mapping[str, float], size: int) -> None:
    largest = max(costs, key=costs.__getitem__, default="")
    share = costs[largest] / (sum(costs.values()) or 1.0) if costs else 0.0
    if share > _MOST_SHARE:
        warnings.warn(
            f"the update of {largest} is {100 * share:.0f} % of all, and its owner makes it alone: "
            f"it takes at least {owner_bound(costs, size):.2f} times the mean of {size} ranks",
            stacklevel=9,
        )
