"""PlanController: which plan is followed, or which bucket cap, and how one replaces another."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from typing import Literal

from torch import nn

from dearmpi.comm.world import World
from dearmpi.config import EngineConfig
from dearmpi.engine.setup.live_engine import LiveEngine
from dearmpi.engine.setup.self_planning import Pause, SelfPlanning
from dearmpi.engine.setup.settings import check_growth, check_plan, compare_plans
from dearmpi.engine.trace.spans import Spans
from dearmpi.errors import ConfigError
from dearmpi.plan.data.plan import Plan


class PlanController:
    """Changes the layout of a live engine between two steps; state and parameters stay.

    config: settings as they are by now. pause: what a plan that the job made has cost; None before
    that is followed. planning: how the job gets to one, as long as it is on its way.
    """

    def __init__(
        self,
        live: LiveEngine,
        model: nn.Module,
        *,
        world: World,
        spans: Spans,
        config: EngineConfig,
        plan: Plan | Literal["auto"] | None,
    ) -> None:
        """``plan``: what ``live`` was made with, or ``auto`` for a plan of the job's own."""
        self._live, self._model = live, model
        self._world, self._spans = world, spans
        self._plan = plan
        self._given_cap_mb = config.bucket_cap_mb
        self.config = config
        self.pause: Pause | None = None
        self.planning: SelfPlanning | None = None
        self._begin_planning()

    @property
    def plan(self) -> Plan | None:
        """The plan that is followed; None before there is one."""
        return self._plan if isinstance(self._plan, Plan) else None

    def stepped(self) -> bool:
        """A step was taken; whether the layout is another now (collective)."""
        if self.planning is None:
            return False
        with self._world.named_call("optimizer.step() with plan='auto'"):
            return self._plan_on(self.planning)

    def _plan_on(self, planning: SelfPlanning) -> bool:
        plan, problem, begin_s = planning.stepped(), planning.problem, time.perf_counter()
        pause, is_new = planning.pause, False
        if plan is not None:
            try:
                is_new = self._take_up(plan)
            except ConfigError as error:  # the model is another by now: layers frozen meanwhile
                problem = str(error)
            else:
                self.pause = replace(pause, laying_out_s=time.perf_counter() - begin_s)
        if problem:
            self.give_up_planning()
            if self._world.is_root:
                warnings.warn(f"plan 'auto' is given up: {problem}", stacklevel=5)
        return is_new

    def follow(self, plan: Plan) -> None:
        """Go on by ``plan`` (collective).

        Raises ConfigError if it is for another model or world size, MismatchError if ranks have
        different ones.
        """
        compare_plans(self._world, plan)
        self._take_up(plan)

    def fuse(self, bucket_cap_mb: float) -> None:
        """Go on with buckets of about ``bucket_cap_mb`` MiB and without a plan (collective)."""
        config = replace(self.config, bucket_cap_mb=bucket_cap_mb)
        self._drop_gradients()
        self._lay_out_anew(None, self._settled(config))
        self.config = config

    def check_growth(self) -> None:
        """Raise ConfigError if what is followed has no place for further parameters."""
        check_growth(self._plan)
        self._drop_gradients()

    def lay_out_grown(self) -> None:
        """Lay out the parameters that have been added too (collective)."""
        self._lay_out_anew(self._plan, self.config)

    def give_up_planning(self) -> None:
        """Make no plan of the job's own, now or when parameters are added."""
        self.abandon_planning()
        self._plan = self.plan

    def abandon_planning(self) -> None:
        """Make no plan, if one was on its way."""
        if self.planning is not None:
            self.planning.abandon()
            self.planning = None

    def _take_up(self, plan: Plan) -> bool:
        """Go on by ``plan``, which all ranks have; whether the layout is another now."""
        config = replace(self.config, bucket_cap_mb=self._given_cap_mb)  # not what ``fuse`` has set
        check_plan(plan, config)
        in_use = self._live.follows(plan)
        self._drop_gradients()
        self.config = config
        if not in_use:
            self._lay_out_anew(plan, self._settled(config))
            return True
        self.abandon_planning()  # with no need to stand still
        self._plan = plan
        return False

    def _drop_gradients(self) -> None:
        self._live.built.engine.discard_grads()

    def _settled(self, config: EngineConfig) -> EngineConfig:
        """With the algorithm that ``auto`` has found: to measure anew would stop training."""
        return replace(config, reduce_scatter=self._live.built.algorithms.reduce_scatter)

    def _lay_out_anew(self, plan: Plan | Literal["auto"] | None, config: EngineConfig) -> None:
        self._live.renew(config=config, plan=None if plan == "auto" else plan)
        self.abandon_planning()
        self._plan = plan
        self._begin_planning()

    def _begin_planning(self) -> None:
        if self._plan == "auto" and self._world.size > 1:
            built = self._live.built
            self._live.resharding_channel()
            self.planning = SelfPlanning(
                self._model,
                built.spec,
                world=self._world,
                algorithms=built.algorithms,
                waited=lambda: self._live.waited_s,
                spans=self._spans,
            )
