"""Design: what to build for an optimizer and a model, decided and checked before anything is."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.optim import Optimizer

from dearmpi.comm.world import World
from dearmpi.config import EngineConfig
from dearmpi.engine.probe.piecewise import require_elementwise
from dearmpi.engine.probe.probe import (
    adapts_its_groups,
    host_twin,
    require_copied_gradients,
    require_separable,
    require_steady,
)
from dearmpi.engine.setup.blueprint import NOT_KNOWN, Blueprint, draw_blueprint
from dearmpi.plan.data.plan import Plan


def design(
    optimizer: Optimizer,
    model: nn.Module,
    *,
    world: World,
    config: EngineConfig,
    plan: Plan | None = None,
    known: Mapping[nn.Parameter, str] = NOT_KNOWN,
) -> Blueprint:
    """Decide what to build, and check it against the other ranks (collective).

    ``plan`` goes before what ``config`` says of buckets, schedule and window. ``known``: as in
    ``optimized_parameters``.

    Raises ConfigError for parameters or an optimizer that cannot be served, MismatchError if the
    ranks' models, optimizers or settings differ.
    """
    blueprint = draw_blueprint(optimizer, model, world=world, config=config, plan=plan, known=known)
    check_optimizer(optimizer, world=world, config=blueprint.config)
    return blueprint


def check_optimizer(optimizer: Optimizer, *, world: World, config: EngineConfig) -> None:
    """Raise ConfigError for an optimizer that cannot be served."""
    if not config.has_buckets(world.size):
        if adapts_its_groups(optimizer):
            return  # it sees all parameters at once here
        require_steady(optimizer)  # what cannot run on several ranks is refused on one already
        require_separable(optimizer)
        require_copied_gradients(optimizer)
        return
    tried = host_twin(optimizer) if config.update_on == "host" else optimizer
    require_steady(tried)
    require = require_elementwise if config.gather == "parameters" else require_separable
    require(tried)
    require_copied_gradients(tried)
