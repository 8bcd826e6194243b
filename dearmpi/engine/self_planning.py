"""Self-planning: a job profiles its first iterations, measures its link, and plans, once.

Training stands still twice, for a fraction of a second each: to measure the link, and to lay out
the buckets. The plan is made in between, on rank 0, in a process of its own, and is the same on all
ranks.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import median

from torch import nn

from dearmpi.comm.world import World
from dearmpi.config import EngineConfig, ReduceScatter
from dearmpi.engine.span import Lane, Span
from dearmpi.engine.spans import Spans
from dearmpi.errors import ConfigError, UsageError
from dearmpi.plan.cost import Costs
from dearmpi.plan.plan import Plan
from dearmpi.plan.profile import ModelProfile
from dearmpi.tune.calibrate import calibrate
from dearmpi.tune.plan_process import PlanProcess, PlanRequest
from dearmpi.tune.profile import LayerTimer, slowest_profile

NUM_WARMUP, NUM_PROFILED = 2, 3
MOST_STEPS = 50
"""Steps after which the plan is taken up at the latest."""

_CALIBRATION_S = 0.4
_PLANNING_S = 2.0  # what making a plan takes, with some to spare
_FAILED = "failed: "


@dataclass(frozen=True, slots=True)
class Pause:
    """Seconds for which training stood still for its plan.

    measuring_s: of the link. waiting_s: for a plan that was not made in time. laying_out_s: of the
    buckets, and moving the optimizer's state.
    """

    measuring_s: float = 0.0
    waiting_s: float = 0.0
    laying_out_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All together."""
        return self.measuring_s + self.waiting_s + self.laying_out_s


class SelfPlanning:
    """From the first step to the plan.

    Listens to ``spans`` for what updates cost, unless somebody else does. pause: so far.
    problem: why there will be no plan, if so.
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
        self._num_steps = self._due_step = 0
        self._warm_s = 0.0
        self._process: PlanProcess | None = None
        self.pause = Pause()
        self.problem = ""

    def add(self, span: Span) -> None:
        """A span is over; those of updates count."""
        if span.lane is Lane.UPDATE and span.nbytes is not None:
            self._updates[span.nbytes].append(span.stop_s - span.start_s)

    def stepped(
        self, synchronize: Callable[[], None], reduce_scatter: ReduceScatter
    ) -> Plan | None:
        """A step was taken; the plan, if it is time to take it up (then collective).

        synchronize: leaves the link idle. Raises UsageError on all ranks if rank 0 cannot plan.
        """
        self._num_steps += 1
        if self._num_steps == NUM_WARMUP:
            self._warm_s = time.perf_counter()
        elif self._num_steps == NUM_WARMUP + NUM_PROFILED:
            begin_s = time.perf_counter()
            step_s = (begin_s - self._warm_s) / NUM_PROFILED
            synchronize()
            self._begin(reduce_scatter, step_s=step_s)
            self.pause = Pause(measuring_s=time.perf_counter() - begin_s)
        elif self._num_steps == self._due_step:
            begin_s = time.perf_counter()
            plan = self._fetch()
            self.pause = replace(self.pause, waiting_s=time.perf_counter() - begin_s)
            return plan
        return None

    def abandon(self) -> None:
        """Leave the model as it was."""
        self._timer.detach()
        self._stop_listening()
        if self._process is not None:
            self._process.close()

    def measure(self, reduce_scatter: ReduceScatter) -> tuple[ModelProfile, Costs]:
        """The times of the layers, and what the link and updates cost; the link must be idle
        (collective).

        Raises UsageError on all ranks if no pass of a rank could be profiled.
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
        calibration = calibrate(world, reduce_scatter=reduce_scatter, budget_s=_CALIBRATION_S)
        return profile, self._with_updates(calibration.costs)

    def _begin(self, reduce_scatter: ReduceScatter, *, step_s: float) -> None:
        """Measure, and have rank 0 begin to plan (collective). step_s: of the steps so far."""
        world, micro_batches = self._world, max(1, self._timer.num_seen // self._num_steps)
        try:
            profile, costs = self.measure(reduce_scatter)
        except UsageError as error:
            self.problem = str(error)
            return
        self._stop_listening()
        num_steps = world.all_reduce([math.ceil(_PLANNING_S / max(step_s, 1e-6))], "max")[0]
        self._due_step = min(MOST_STEPS, self._num_steps + int(num_steps))
        if world.is_root:
            self._process = PlanProcess(
                PlanRequest(
                    profile,
                    costs,
                    eager=self._config.eager,
                    gather=self._config.gather,
                    micro_batches=micro_batches,
                )
            )

    def _stop_listening(self) -> None:
        if self._spans.recorder is self:
            self._spans.recorder = None

    def _fetch(self) -> Plan:
        """Rank 0's plan (collective)."""
        text = ""
        if self._process is not None:
            try:
                text = self._process.result().to_json()
            except ConfigError as error:
                text = f"{_FAILED}{error}"
        text = self._world.broadcast_text(text)
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
