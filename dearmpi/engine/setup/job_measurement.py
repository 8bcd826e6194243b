"""JobMeasurement: what a job measures of itself while it trains: its link, layers and updates.

The link is measured before the first step, when nothing is under way.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from statistics import median

from dearmpi.comm.algorithms.registry import CollectiveAlgorithms
from dearmpi.engine.setup.spec import EngineSpec
from dearmpi.engine.trace.span import Span, Track
from dearmpi.errors import ConfigError, UsageError
from dearmpi.plan.model.cost import Costs
from dearmpi.plan.model.profile import ModelProfile
from dearmpi.tune.calibrate import calibrate
from dearmpi.tune.calibration import Crossed, wire_pace
from dearmpi.tune.layer_timer import LayerTimer, slowest_profile

NUM_WARMUP, NUM_PROFILED = 2, 3
"""Steps before the profiled ones, and these."""

_MEASURING_S = 0.85  # so that it is a second at most with channels opened and closed


class JobMeasurement:
    """The times of a job's first iterations; made on all ranks together, with nothing under way.

    Listens to the spans for what updates cost and for how fast the wire is, unless somebody else
    does. most_steps: on the rank with the shortest steps, how many take what was asked for in
    ``measure``.
    """

    def __init__(
        self,
        in_use: EngineSpec,
        *,
        algorithms: CollectiveAlgorithms,
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
        self._crossed: dict[Track, list[Crossed]] = defaultdict(list)
        self.most_steps = 0
        costs = calibrate(
            context.world,
            algorithms,
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
        reduces = span.track is Track.REDUCE_SCATTER
        link = self._costs.reduce_scatter if reduces else self._costs.all_gather
        crossed = Crossed(span.start_s, span.stop_s, link.wire_s(span.nbytes))
        self._crossed[span.track].append(crossed)

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
    ) -> tuple[ModelProfile, Costs]:
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
        paces = [wire_pace(self._crossed[track]) for track in network]
        steps = math.ceil(work_s / max(step_s, 1e-6))
        # All at once: each message waits behind those of buckets.
        any_problem, *paces, most = world.all_reduce([bool(problem), *paces, steps], "max")
        self.most_steps = int(most)
        if any_problem:
            texts = enumerate(world.all_gather_text(problem))
            rank, text = next((rank, text) for rank, text in texts if text)
            raise UsageError(f"rank {rank} cannot plan: {text}", code="rank-cannot-plan")
        profile, costs = slowest_profile(world, own), self._as_seen(*paces)
        if micro_batches == 1:  # else the typical pass, which the profile is of, hands none over
            num_buckets = sum(bucket.trained for bucket in self._in_use.layout)
            profile = profile.with_shorter_backprop(num_buckets * costs.main_thread_s)
        return profile, costs

    def _as_seen(self, reduces: float, gathers: float) -> Costs:
        """Costs with those of updates, by the bytes that a rank updates of a bucket, and with a
        wire as fast as the slowest rank has seen it: its pace in either half.
        """
        costs = self._costs.with_slopes(reduce_scatter=reduces, all_gather=gathers)
        size = self._world.size if self._in_use.config.gather == "parameters" else 1
        seconds = sum(median(times) for times in self._updates.values())
        nbytes = sum(self._updates.keys()) / size
        return replace(
            costs.with_typical_overheads(),
            update_s_per_byte=seconds / nbytes if nbytes else 0.0,
        )
