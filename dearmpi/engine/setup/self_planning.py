"""Self-planning: a job measures its link, profiles its first iterations, and plans, once.

The plan is made on rank 0, in a process of its own, while training goes on; it is the same on all
ranks. So training stands still once, to lay out the buckets. The link is measured before the first
step, when nothing is under way.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from dearmpi.engine.codec.codec import Codecs
from dearmpi.engine.setup.spec import EngineSpec
from dearmpi.errors import ConfigError, UsageError
from dearmpi.plan.data.plan import Plan
from dearmpi.plan.model.cost import Costs
from dearmpi.plan.model.profile import ModelProfile
from dearmpi.span import Span, Track
from dearmpi.tune.calibrate import Crossed, calibrate, wire_pace
from dearmpi.tune.layer_timer import LayerTimer, slowest_profile
from dearmpi.tune.plan_process import PlanProcess, PlanRequest, plan_in_use

NUM_WARMUP, NUM_PROFILED = 2, 3
"""Steps before the profiled ones, and these."""

_MEASURING_S = 0.85  # so that it is a second at most with channels opened and closed


class Measured(NamedTuple):
    """profile: the layers' times. costs: of the link and of updates. most_steps: on the rank with
    the shortest steps, how many take what was asked for.
    """

    profile: ModelProfile
    costs: Costs
    most_steps: int


class JobMeasurement:
    """The times of a job's first iterations; made on all ranks together, with nothing under way.

    Listens to the spans for what updates cost and for how fast the wire is, unless somebody else
    does.
    """

    def __init__(
        self,
        in_use: EngineSpec,
        *,
        codecs: Codecs,
        waited: Callable[[], float],
    ) -> None:
        """Measure the link (collective). ``in_use``: what the first iterations follow. ``waited``:
        seconds that the main thread has waited for communication.
        """
        context = in_use.context
        self._world, self._spans, self._in_use = context.world, context.spans, in_use
        config, params = in_use.config, in_use.names
        self._timer = LayerTimer(context.model, params=params, num_warmup=NUM_WARMUP, waited=waited)
        self._updates: dict[int, list[float]] = defaultdict(list)
        self._crossed: dict[Track, list[Span]] = defaultdict(list)
        self._codecs = codecs
        self._coded_s: dict[str, list[float]] = defaultdict(list)  # by what was done, for what
        costs = calibrate(
            context.world,
            codecs.algorithms,
            budget_s=_MEASURING_S,
            most_bytes=sum(bucket.nbytes for bucket in in_use.layout),  # nothing larger travels
        ).costs
        specs = [placed.spec for bucket in in_use.layout for placed in bucket.placements]
        self._costs = costs if config.wire_dtype is None else costs.of_fp32_for(specs)
        if self._spans.recorder is None:
            self._spans.recorder = self

    @property
    def num_passes(self) -> int:
        """Passes through the model so far."""
        return self._timer.num_seen

    def add(self, span: Span) -> None:
        """A span is over; those of updates and collectives count."""
        if span.nbytes is None:
            return
        if span.track is Track.UPDATE:
            self._updates[span.nbytes].append(span.stop_s - span.start_s)
            return
        if span.track is Track.CODEC:
            self._coded_s[span.name].append(span.stop_s - span.start_s)
            return
        self._crossed[span.track].append(span)

    def stop(self) -> None:
        """Listen no longer."""
        if self._spans.recorder is self:
            self._spans.recorder = None

    def detach(self) -> None:
        """Leave the model as it was."""
        self._timer.detach()
        self.stop()

    def measure(
        self, *, micro_batches: int = 1, step_s: float = math.inf, work_s: float = 0.0
    ) -> Measured:
        """The times of the layers, and what the link and updates cost (collective).

        ``micro_batches``: passes per step, of which the last hands buckets over. The times are
        those without any bucket, since the costs have a time for each. ``step_s``: what a step has
        taken on this rank, by which the ranks agree on how many of them take ``work_s``.

        Raises UsageError on all ranks if no pass of a rank could be profiled.
        """
        world = self._world
        problem = ""
        try:
            own = self._timer.finish(world_size=world.size)
        except (UsageError, ConfigError) as error:
            problem = str(error)
        network = (Track.REDUCE_SCATTER, Track.ALL_GATHER)
        coded_s = [self._codec_s("RS"), self._codec_s("AG")]
        config = self._in_use.config
        codec = None if config.compress == "none" else self._codecs.cost(config.compress, *coded_s)
        shares = (1.0, 1.0) if codec is None else (codec.reduced, codec.gathered)
        paces = [self._pace(*pair) for pair in zip(network, shares, strict=True)]
        steps = math.ceil(work_s / max(step_s, 1e-6))
        # All at once: each message waits behind those of buckets.
        any_problem, *paces, reduce_s, gather_s, most = world.all_reduce(
            [bool(problem), *paces, *coded_s, steps], "max"
        )
        if codec is not None:
            codec = self._codecs.cost(config.compress, reduce_s, gather_s)
        if any_problem:
            texts = enumerate(world.all_gather_text(problem))
            rank, text = next((rank, text) for rank, text in texts if text)
            raise UsageError(f"rank {rank} cannot plan: {text}", code="rank-cannot-plan")
        profile = slowest_profile(world, own)
        costs = replace(self._as_seen(*paces), codec=codec)
        if micro_batches == 1:  # else the typical pass, which the profile is of, hands none over
            num_buckets = sum(bucket.trained for bucket in self._in_use.layout)
            profile = profile.with_shorter_backprop(num_buckets * costs.main_thread_s)
        return Measured(profile, costs, int(most))

    def _pace(self, track: Track, share: float) -> float:
        """Of operations in which so large a ``share`` of a bucket's bytes travels."""
        reduces = track is Track.REDUCE_SCATTER
        link = self._costs.reduce_scatter if reduces else self._costs.all_gather
        return wire_pace(
            Crossed(span.start_s, span.stop_s, link.wire_s(share * (span.nbytes or 0)))
            for span in self._crossed[track]
        )

    def _codec_s(self, operation: str) -> float:
        """Seconds of a step in which codecs compute for a kind of operation."""
        total = 0.0
        for name, seconds in self._coded_s.items():
            what, label = name.split()
            if label.startswith(operation):  # a message is decoded in several parts
                num_steps = len(self._coded_s.get(f"encode {label}", ()))
                total += sum(seconds) / max(num_steps, 1)
        return total

    def _as_seen(self, reduces: float, gathers: float) -> Costs:
        """Costs with those of updates, by the bytes that a rank updates of a bucket. The wire is as
        fast as the slowest rank has seen it: its pace in either half.
        """
        costs = self._costs.with_slopes(reduce_scatter=reduces, all_gather=gathers)
        size = self._world.size if self._in_use.config.gather == "parameters" else 1
        seconds = sum(median(times) for times in self._updates.values())
        nbytes = sum(self._updates.keys()) / size
        return replace(
            costs.with_typical_overheads(),
            update_s_per_byte=seconds / nbytes if nbytes else 0.0,
        )


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
            profile, costs, most = measurement.measure(
                micro_batches=micro_batches, step_s=step_s, work_s=_PLANNING_S
            )
        except (UsageError, ConfigError) as error:
            self.problem = str(error)
            return
        measurement.stop()
        self._steps_between_looks = math.ceil(most / _LOOKS_IN_THAT)
        self._due_step = min(MOST_STEPS, self._num_steps + most)
        if self._world.is_root:
            in_use, config = self._in_use, self._in_use.config
            standing = plan_in_use(profile, costs, in_use.layout, in_use.conduct)
            request = PlanRequest(
                profile, costs, config.eager, config.gather, micro_batches, standing
            )
            self._process = PlanProcess(request)

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
