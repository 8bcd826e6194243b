"""Readings: what a DistributedOptimizer shows of itself."""

from __future__ import annotations

from dataclasses import replace

from dearmpi.config import EngineConfig
from dearmpi.engine.facade import Facade
from dearmpi.engine.setup.build import BuiltEngine
from dearmpi.engine.setup.live_engine import LiveEngine
from dearmpi.engine.setup.plan_controller import PlanController
from dearmpi.engine.setup.self_planning import Pause
from dearmpi.engine.trace.spans import IterationTimes, Spans, Traffic
from dearmpi.plan.data.layout import BucketLayout
from dearmpi.plan.data.plan import Plan
from dearmpi.plan.data.schedule import Schedule


class Readings(Facade):
    """A facade that shows how its engine is laid out, and what it has measured.

    spans: where the engine reports what takes how long: set its ``recorder`` to listen.
    """

    spans: Spans
    _controller: PlanController

    @property
    def layout(self) -> BucketLayout:
        """Which parameter lies in which bucket."""
        return self._built.spec.layout

    @property
    def schedule(self) -> Schedule:
        """The order of the collectives."""
        return self._built.spec.schedule

    @property
    def way_to_mpi(self) -> str:
        """How tensors get to MPI, and why: on a device ``staged`` or ``direct``."""
        return self._built.updates.comm_stream.name

    @property
    def topology(self) -> str:
        """The grid that is in use, as the setting has it; ``flat`` for none."""
        grid = self._built.engine.codecs.algorithms.grid
        return "flat" if grid is None else grid.text

    @property
    def topology_choice(self) -> str:
        """What ``topology="auto"`` has measured, or a calibration predicts; empty for neither."""
        return self._built.engine.codecs.algorithms.grid_choice

    @property
    def traffic(self) -> Traffic:
        """The bytes of a step, and what they would be without compression."""
        return replace(self._built.engine.codecs.traffic, fallbacks=self._live.fallbacks)

    @property
    def config(self) -> EngineConfig:
        """The settings as they are by now."""
        return self._controller.config

    @property
    def plan(self) -> Plan | None:
        """The plan that is followed; None before there is one."""
        return self._controller.plan

    @property
    def plan_pause(self) -> Pause | None:
        """What ``plan="auto"`` has cost; None before its plan is followed."""
        return self._controller.pause

    @property
    def is_planning(self) -> bool:
        """Whether the job is still on its way to a plan of its own."""
        return self._controller.is_planning

    @property
    def codec_choice(self) -> str:
        """What ``compress="auto"`` has taken, and why; empty before."""
        return self._controller.codec_choice

    @property
    def is_choosing(self) -> bool:
        """Whether ``compress="auto"`` is not decided yet."""
        return self._controller.choosing is not None

    @property
    def times(self) -> IterationTimes:
        """``exposed_s``, ``communication_s``, ``hidden_share`` of the last step's iteration."""
        return self._built.engine.times

    @property
    def waited_s(self) -> float:
        """Seconds that forward and backward have waited for communication since the start."""
        return self._live.waited_s

    @property
    def _live(self) -> LiveEngine:
        return self._controller.live

    @property
    def _built(self) -> BuiltEngine:
        return self._controller.live.built
