"""Self-planning: a job profiles its first iterations, measures its link, and plans, once.

The plan is made on rank 0 and the same on all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import median

from torch import nn

from dearmpi.comm.world import World
from dearmpi.config import EngineConfig, ReduceScatter
from dearmpi.engine.span import Lane, Span
from dearmpi.engine.spans import Spans
from dearmpi.errors import ConfigError, UsageError
from dearmpi.plan.cost import Costs
from dearmpi.plan.plan import Plan
from dearmpi.plan.planner import make_plan
from dearmpi.tune.calibrate import calibrate
from dearmpi.tune.profile import LayerTimer, slowest_profile

NUM_WARMUP, NUM_PROFILED = 2, 3

_FAILED = "failed: "


class SelfPlanning:
    """From the first step to the plan.

    Listens to ``spans`` for what updates cost, unless somebody else does.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[nn.Parameter],
        *,
        world: World,
        config: EngineConfig,
        waited: Callable[[], float],
        spans: Spans,
    ) -> None:
        self._world, self._config, self._spans = world, config, spans
        if spans.recorder is None:
            spans.recorder = self
        self._timer = LayerTimer(model, params=params, num_warmup=NUM_WARMUP, waited=waited)
        self._updates: dict[int, list[float]] = defaultdict(list)
        self._num_steps = 0

    def add(self, span: Span) -> None:
        """A span is over; those of updates count."""
        if span.lane is Lane.UPDATE and span.nbytes is not None:
            self._updates[span.nbytes].append(span.stop_s - span.start_s)

    def is_due(self) -> bool:
        """Count a step; True after the last one that is profiled."""
        self._num_steps += 1
        return self._num_steps >= NUM_WARMUP + NUM_PROFILED

    def abandon(self) -> None:
        """Leave the model as it was."""
        self._timer.detach()
        if self._spans.recorder is self:
            self._spans.recorder = None

    def plan(self, reduce_scatter: ReduceScatter) -> Plan:
        """Measure the link, which must be idle, and plan (collective).

        Raises UsageError on all ranks if no iteration of a rank could be profiled.
        """
        world = self._world
        problem = ""
        try:
            own = self._timer.finish(world_size=world.size)
        except UsageError as error:
            problem = str(error)
        for rank, text in enumerate(world.all_gather_text(problem)):
            if text:
                raise UsageError(f"rank {rank} cannot plan: {text}")
        profile = slowest_profile(world, own)
        calibration = calibrate(world, reduce_scatter=reduce_scatter)
        text = ""
        if world.rank == 0:
            try:
                text = make_plan(
                    profile,
                    self._with_updates(calibration.costs),
                    world_size=world.size,
                    eager=self._config.eager,
                    gather=self._config.gather,
                ).to_json()
            except ConfigError as error:
                text = f"{_FAILED}{error}"
        text = world.broadcast_text(text)
        if text.startswith(_FAILED):
            raise UsageError(f"rank 0 cannot plan: {text.removeprefix(_FAILED)}")
        return Plan.from_json(text, "the plan of rank 0")

    def _with_updates(self, costs: Costs) -> Costs:
        """``costs`` with those of updates, by the bytes that a rank updates of a bucket."""
        size = self._world.size if self._config.gather == "parameters" else 1
        seconds = sum(median(times) for times in self._updates.values())
        nbytes = sum(self._updates.keys()) / size
        return replace(
            costs.with_typical_overheads(),
            update_s_per_byte=seconds / nbytes if nbytes else 0.0,
        )
