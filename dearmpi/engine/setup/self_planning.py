"""Self-planning: a job measures its link, profiles its first iterations, and plans, once.

The plan is made on rank 0, in a process of its own, while training goes on; it is the same on all
ranks. So training stands still once, to lay out the buckets.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from dearmpi.engine.setup.job_measurement import NUM_PROFILED, NUM_WARMUP, JobMeasurement
from dearmpi.engine.setup.spec import EngineSpec
from dearmpi.errors import ConfigError, UsageError
from dearmpi.plan.data.plan import Plan
from dearmpi.plan.model.cost import Costs
from dearmpi.plan.model.profile import ModelProfile
from dearmpi.plan.search.planner import plan_of
from dearmpi.tune.plan_process import PlanProcess, PlanRequest

LEAST_STEPS = NUM_WARMUP + NUM_PROFILED + 1
"""Steps after which a plan is taken up at the earliest."""

MOST_STEPS = 50
"""Steps after which the plan is taken up at the latest."""

_PLANNING_S = 4.0  # what making a plan takes beside training, with some to spare
_LOOKS_IN_THAT = 4  # how often, from then on, it is asked whether a late plan is there
_FAILED = "failed: "


@dataclass(frozen=True, slots=True)
class Pause:
    """What a plan has cost, in seconds.

    measuring_s: of the link, before the first step. waiting_s: to compare profiles, and for a plan
    that was not made in time. laying_out_s: until the last step was over, for new buckets,
    and for the optimizer's state to reach its owners.
    """

    measuring_s: float = 0.0
    waiting_s: float = 0.0
    laying_out_s: float = 0.0

    @property
    def total_s(self) -> float:
        """For which training stood still."""
        return self.waiting_s + self.laying_out_s


class SelfPlanning:
    """From the first step to the plan; made on all ranks together, with nothing under way.

    measurement: of the first iterations. pause: what it has cost so far. problem: why there will be
    no plan, if so.
    """

    def __init__(
        self, in_use: EngineSpec, measurement: JobMeasurement, *, measuring_s: float
    ) -> None:
        """``in_use``: what the first iterations follow. ``measuring_s``: what the link has cost."""
        self._world = in_use.context.world
        self._in_use, self.measurement = in_use, measurement
        self._num_steps = self._due_step = self._steps_between_looks = 0
        self._warm_s = 0.0
        self._process: PlanProcess | None = None
        self.pause = Pause(measuring_s=measuring_s)
        self.problem = ""

    def stepped(self) -> Plan | None:
        """A step was taken; the plan, if it is time to take it up (collective at times)."""
        self._num_steps += 1
        begin_s, plan = time.perf_counter(), None
        if self._num_steps == NUM_WARMUP:
            self._warm_s = begin_s
        elif self._num_steps == NUM_WARMUP + NUM_PROFILED:
            self._begin(step_s=(begin_s - self._warm_s) / NUM_PROFILED)
        elif self._num_steps == self._due_step:
            plan = self._fetch()
        waiting_s = self.pause.waiting_s + time.perf_counter() - begin_s
        self.pause = replace(self.pause, waiting_s=waiting_s)
        return plan

    def abandon(self) -> None:
        """Leave the model as it was."""
        self.measurement.detach()
        if self._process is not None:
            self._process.close()

    def _begin(self, *, step_s: float) -> None:
        """Compare profiles, and have rank 0 plan (collective). step_s: what a step has taken."""
        measurement = self.measurement
        micro_batches = max(1, measurement.num_passes // self._num_steps)
        try:
            profile, costs = measurement.measure(
                micro_batches=micro_batches, step_s=step_s, work_s=_PLANNING_S
            )
        except (UsageError, ConfigError) as error:
            self.problem = str(error)
            return
        measurement.stop()
        most = measurement.most_steps
        self._steps_between_looks = math.ceil(most / _LOOKS_IN_THAT)
        self._due_step = min(MOST_STEPS, self._num_steps + most)
        if self._world.is_root:
            config, standing = self._in_use.config, self._standing(profile, costs)
            request = PlanRequest(
                profile, costs, config.eager, config.gather, micro_batches, standing
            )
            self._process = PlanProcess(request)

    def _standing(self, profile: ModelProfile, costs: Costs) -> Plan | None:
        """What is in use, as a plan; None if it cannot be one."""
        layout, conduct = self._in_use.layout, self._in_use.conduct
        try:
            return plan_of(profile, costs, layout, conduct, origin="the buckets in use")
        except ConfigError:
            return None  # layers were frozen or thawed since the buckets were made

    def _fetch(self) -> Plan | None:
        """Rank 0's plan; None where it is not made yet and there are steps left (collective)."""
        text, may_wait = "", self._num_steps == MOST_STEPS
        if self._process is not None and (may_wait or self._process.is_done()):
            try:
                text = self._process.result().to_json()
            except ConfigError as error:
                text = f"{_FAILED}{error}"
        text = self._world.broadcast_text(text)
        if not text:
            self._due_step = min(MOST_STEPS, self._due_step + self._steps_between_looks)
            return None
        if text.startswith(_FAILED):
            self.problem = f"rank 0 cannot plan: {text.removeprefix(_FAILED)}"
            return None
        return Plan.from_json(text, "the plan of rank 0")
