"""PlanController: which plan is followed, or which bucket cap, and how one replaces another."""

from __future__ import annotations

import hashlib
import logging
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from dearmpi.comm.world import World
from dearmpi.config import EngineConfig
from dearmpi.device.comm_stream import compute_on_all_cores, compute_on_one_core
from dearmpi.engine.setup.codec_choice import (
    CodecChoice,
    Decision,
    check_choosable,
    stay_dense,
    undecided,
    until_decided,
    warn_of_bias,
)
from dearmpi.engine.setup.context import TrainingContext
from dearmpi.engine.setup.live_engine import LiveEngine
from dearmpi.engine.setup.self_planning import JobMeasurement, Pause, SelfPlanning
from dearmpi.errors import ConfigError, MismatchError
from dearmpi.plan.data.plan import Plan
from dearmpi.plan.data.plan_choice import (
    check_growth,
    check_plan,
    choose_plan,
    merge_settings,
)


class PlanController:
    """Changes the layout of the ``live`` engine between two steps; state and parameters stay.

    config: settings as they are by now. pause: what a plan that the job made has cost; None before
    that is followed. planning: how the job gets to one, as long as it is on its way.
    choosing: how it gets to what ``compress="auto"`` takes, which comes first. codec_choice: a line
    on that.
    """

    def __init__(
        self,
        context: TrainingContext,
        *,
        config: EngineConfig,
        plan: Plan | Literal["auto"] | None,
    ) -> None:
        """Begin with ``plan``, or with ``auto`` by ``config`` until the job has one of its own
        (collective). Raises as ``LiveEngine`` does, and MismatchError for ranks with other plans.
        """
        self._context, self._plan = context, plan
        _compare_plans(context.world, plan, chooses=undecided(config))
        on_host = config.update_on == "host"
        (compute_on_all_cores if on_host else compute_on_one_core)(context.world)
        self.live = LiveEngine(context, config=until_decided(config), plan=self.plan)
        self._given_cap_mb = config.bucket_cap_mb
        self.config = config
        self.pause: Pause | None = None
        self.planning: SelfPlanning | None = None
        self.choosing: CodecChoice | None = None
        self.codec_choice = ""
        self._begin()

    @property
    def plan(self) -> Plan | None:
        """The plan that is followed; None before there is one."""
        return self._plan if isinstance(self._plan, Plan) else None

    @property
    def is_planning(self) -> bool:
        """Whether the job is on its way to a plan, if only by choosing what travels."""
        chooses_first = self._plan == "auto" and self.choosing is not None
        return self.planning is not None or chooses_first

    def stepped(self) -> bool:
        """A step was taken; whether the layout is another now (collective)."""
        if self.choosing is not None:
            with self._context.world.named_call("optimizer.step() with compress='auto'"):
                decision = self.choosing.stepped()
                return decision is not None and self._take_codec(decision)
        if self.planning is None:
            return False
        with self._context.world.named_call("optimizer.step() with plan='auto'"):
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
            if self._context.world.is_root:
                warnings.warn(f"plan 'auto' is given up: {problem}", stacklevel=5)
        return is_new

    def _take_codec(self, decision: Decision) -> bool:
        """Go on with what was decided; whether the layout is another now (collective)."""
        self.choosing = None
        config = replace(self.config, **decision.settings)
        if not decision.is_dense:
            self._drop_gradients()
            try:
                self.live.renew(config=self._settled(config), plan=self.plan)
            except ConfigError as error:  # the model is another by now: layers frozen meanwhile
                decision = stay_dense(str(error))
                config = until_decided(self.config)
        self._note(config, decision)
        self._begin()
        return not decision.is_dense

    def _note(self, config: EngineConfig, decision: Decision) -> None:
        self.config, self.codec_choice = config, decision.reason
        if self._context.world.is_root:
            logging.getLogger("dearmpi").info(decision.reason)

    def follow(self, plan: Plan) -> None:
        """Go on by ``plan`` (collective).

        Raises ConfigError if it is for another model or world size, MismatchError if ranks have
        different ones.
        """
        _compare_plans(self._context.world, plan, chooses=undecided(self.config))
        self._take_up(plan)

    def fuse(self, bucket_cap_mb: float) -> None:
        """Go on with buckets of about ``bucket_cap_mb`` MiB and without a plan (collective)."""
        config = replace(self.config, bucket_cap_mb=bucket_cap_mb)
        self._drop_gradients()
        self._lay_out_anew(None, self._settled(config))
        self.config = config

    def grow(self, param_group: dict[str, Any]) -> None:
        """Add parameters, and lay out all of them (collective).

        Raises ConfigError, with nothing added, if what is followed has no place for them, or they
        cannot be served.
        """
        check_growth(self._plan)
        self._drop_gradients()
        self.live.grow(param_group)
        self._lay_out_anew(self._plan, self.config)

    def give_up_planning(self) -> None:
        """Make no plan of the job's own, now or when parameters are added, and choose no codec."""
        self.abandon_planning()
        self._plan = self.plan
        if undecided(self.config):
            ended = stay_dense("ranks may take unequal numbers of steps from here on")
            self._note(until_decided(self.config), ended)

    def abandon_planning(self) -> None:
        """Make no plan, and choose no codec, if one was on its way."""
        if self.choosing is not None:
            self.choosing.abandon()
            self.choosing = None
        if self.planning is not None:
            self.planning.abandon()
            self.planning = None

    def _take_up(self, plan: Plan) -> bool:
        """Go on by ``plan``, which all ranks have; whether the layout is another now."""
        config = replace(self.config, bucket_cap_mb=self._given_cap_mb)  # not what ``fuse`` has set
        check_plan(plan, config)
        in_use = self.live.follows(plan)
        self._drop_gradients()
        self.config = config
        if not in_use:
            self._lay_out_anew(plan, self._settled(config))
            return True
        self.abandon_planning()  # with no need to stand still
        self._plan = plan
        return False

    def _drop_gradients(self) -> None:
        self.live.built.engine.discard_grads()

    def _settled(self, config: EngineConfig) -> EngineConfig:
        """With the algorithm and the grid that ``auto`` has found: to measure anew would stop
        training.
        """
        found = self.live.built.engine.codecs.algorithms
        topology = "flat" if found.grid is None else found.grid.text
        algorithm = found.reduce_scatter
        if config.compress != "none":
            algorithm = found.added_here  # the library cannot add what is compressed
        return replace(config, reduce_scatter=algorithm, topology=topology)

    def _lay_out_anew(self, plan: Plan | Literal["auto"] | None, config: EngineConfig) -> None:
        self.live.renew(config=until_decided(config), plan=None if plan == "auto" else plan)
        self.abandon_planning()
        self._plan = plan
        self._begin()

    def _begin(self) -> None:
        """Measure for what is ``auto``: first what travels, then in which buckets (collective)."""
        chooses = undecided(self.config)
        if self._context.world.size == 1:
            if chooses:
                self._note(until_decided(self.config), stay_dense("one rank sends nothing"))
            return
        if self._plan != "auto" and not chooses:
            return
        built = self.live.built
        self.live.expect_renewal()
        begin_s = time.perf_counter()
        measurement = JobMeasurement(
            built.spec,
            codecs=built.engine.codecs,
            waited=lambda: self.live.waited_s,
        )
        if chooses:
            self.choosing = CodecChoice(built.spec, measurement)
            return
        self.planning = SelfPlanning(
            built.spec,
            measurement,
            measuring_s=time.perf_counter() - begin_s,
        )


def choose_controller(
    context: TrainingContext,
    *,
    config: EngineConfig | None,
    settings: Mapping[str, Any],
    plan: Plan | Literal["auto"] | str | Path | None,
) -> PlanController:
    """By what a script gives: ``settings`` go before those of ``config`` (collective)."""
    merged = merge_settings(config, settings)
    start = choose_plan(plan, merged)
    check_choosable(merged, context.model)
    with context.world.named_call("DistributedOptimizer()"):
        controller = PlanController(context, config=merged, plan=start)
    if context.world.is_root and controller.live.built.engine.codecs.compressed:
        warn_of_bias(merged)
    return controller


def _compare_plans(world: World, plan: Plan | Literal["auto"] | None, *, chooses: bool) -> None:
    """Raise MismatchError unless all ranks follow the same plan, or none, and choose what travels,
    or not (collective).
    """
    own: str = "none" if plan is None else "auto"
    if isinstance(plan, Plan):
        digest = hashlib.sha256(plan.to_json().encode()).hexdigest()[:16]
        own = f"one of {len(plan.buckets)} buckets (hash {digest})"
    own += ", with compress 'auto'" if chooses else ""
    seen = world.all_gather_text(own)
    for rank, other in enumerate(seen):
        if other != seen[0]:
            raise MismatchError(
                f"rank {rank} has another plan than rank 0: {other} against {seen[0]}; give every "
                "rank the same",
                code="ranks-differ-in-plan",
            )
