"""TrainingContext: what an engine is for, which stays the same where buckets change."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from dearmpi.comm.lifecycle import choose_world
from dearmpi.comm.world import World
from dearmpi.engine.setup.checks import check_arguments
from dearmpi.engine.state.optimizer_state import warn_of_state_in_shards
from dearmpi.engine.trace.layer_spans import LayerRanges
from dearmpi.engine.trace.spans import Spans
from dearmpi.plan.data.plan import Plan


@dataclass(frozen=True, slots=True)
class TrainingContext:
    """What an engine is for.

    optimizer: the wrapped one. spans: where the engine reports what takes how long. training: the
        name by which ranks compare how far they are.
    """

    optimizer: Optimizer
    model: nn.Module
    world: World
    spans: Spans
    ranges: LayerRanges
    training: str

    @classmethod
    def of(
        cls,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        world: World | None = None,
        plan: Plan | str | Path | None = None,
    ) -> TrainingContext:
        """What a script gives. ``world``: by default the one that this process was launched into.

        Raises ConfigError for arguments of other types, and models that cannot be trained.
        """
        check_arguments(optimizer, model, plan)
        warn_of_state_in_shards(optimizer)
        chosen = choose_world(world)
        ranges, training = LayerRanges(model), chosen.name_training()
        return cls(optimizer, model, chosen, Spans(), ranges, training)
