"""Timeline: one steady iteration of a plan, simulated.

Begins with backprop and ends with the feed-forward that follows. The compute lane is the main
thread: backprop from the last layer to the first, then the feed-forward. Each layer begins as soon
as the buckets of the parameters that it computes with are current. A parameter's gradient is ready
when the backprop of the first layer that uses it ends, so a tied embedding's is ready last of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from typing import Literal

from dearmpi.config import Gather
from dearmpi.cuts import even_cuts
from dearmpi.errors import ConfigError
from dearmpi.plan.data.layout import BucketLayout
from dearmpi.plan.data.schedule import Conduct, Schedule
from dearmpi.plan.model.cost import Costs, LinkModel
from dearmpi.plan.model.profile import ModelProfile
from dearmpi.plan.simulate.flow import MOST_ROUNDS, BucketTimes, Flow, Load, WireDemand

Lane = Literal["compute", "reduce-scatter", "update", "all-gather"]
LANES: tuple[Lane, ...] = ("compute", "reduce-scatter", "update", "all-gather")


@dataclass(frozen=True, slots=True)
class SimulatedSpan:
    """What a lane does from ``start_s`` to ``stop_s``.

    name: ``B fc`` or ``F fc`` for a layer, ``RS3``, ``U3`` or ``AG3`` for a bucket, ``H3`` for
        what the main thread does to hand bucket 3 over.
    """

    lane: Lane
    name: str
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What an iteration takes, in seconds, and when what happens.

    iteration_s: from the beginning of one backprop to that of the next.
    backprop_s, feed_forward_s: of computation alone. step_s: when backprop is over.
    reduce_s, gather_s, communication_s: of all reduce-scatters, all all-gathers and both, with
        nothing to wait for; the first two one after the other, the last side by side.
    num_events: steps of the simulation.
    """

    spans: tuple[SimulatedSpan, ...]
    iteration_s: float
    backprop_s: float
    feed_forward_s: float
    step_s: float
    reduce_s: float
    gather_s: float
    communication_s: float
    num_events: int

    @property
    def compute_s(self) -> float:
        return self.backprop_s + self.feed_forward_s

    @property
    def exposed_s(self) -> float:
        """What communication adds to computation."""
        return self.iteration_s - self.compute_s

    @property
    def dear_bound_s(self) -> float:
        """What no schedule can beat whose gathers all follow its reduce-scatters (paper, III),
        where the first layers are trained: frozen ones may compute before any gather, and come
        below it.
        """
        return max(self.backprop_s, self.reduce_s) + max(self.feed_forward_s, self.gather_s)

    @property
    def bound_s(self) -> float:
        """What no schedule of these buckets can beat."""
        return max(self.compute_s, self.communication_s)

    def lane(self, lane: Lane) -> list[SimulatedSpan]:
        """The spans of one lane, by their start."""
        return sorted(
            (span for span in self.spans if span.lane == lane), key=lambda span: span.start_s
        )

    def draw(self, *, columns: int = 100) -> str:
        """All lanes as text. ``|`` is the end of backprop; one column is one share of the time.

        Compute shows B, F and H; the others the last digit of the bucket.
        """
        scale = columns / self.iteration_s if self.iteration_s else 0.0
        rows = []
        for lane in LANES:
            cells = [" "] * columns
            for span in self.lane(lane):
                mark = span.name[0] if lane == "compute" else span.name[-1]
                first, last = int(span.start_s * scale), int(span.stop_s * scale)
                for column in range(first, min(max(last, first + 1), columns)):
                    cells[column] = mark
            step = min(int(self.step_s * scale), columns)
            row = "".join(cells[:step]) + "|" + "".join(cells[step:])
            rows.append(f"{lane:<14}  {row}".rstrip())
        return "\n".join(rows)


def simulate(
    profile: ModelProfile,
    layout: BucketLayout,
    conduct: Conduct,
    costs: Costs,
    *,
    not_before_s: Sequence[float] | None = None,
) -> Timeline:
    """Walk one steady iteration in which the buckets of ``layout`` travel by ``conduct``.

    not_before_s: by bucket, when its reduce-scatter may be posted at the earliest, for systems that
    look for ready buckets now and then.

    The work is in proportion to layers and buckets, and the same for any world size. Raises
    ConfigError if layout, schedule, costs and profile do not belong together.
    """
    _check(profile, layout, conduct.schedule, costs)
    backprop = _run_backprop(profile, layout, costs)
    earliest_s = not_before_s or backprop.ready_s
    ready_s = [max(pair) for pair in zip(backprop.ready_s, earliest_s, strict=True)]
    loads = _make_loads(layout, costs, ready_s, gather=conduct.gather)
    flow = Flow(loads, conduct, step_s=backprop.stop_s)
    bucket_times = flow.run()
    forward, stop_s = _run_feed_forward(profile, layout, bucket_times, start_s=flow.forward_start_s)
    reduces = [load.reduce for load in loads if load is not None]
    gathers = [load.gather for load in loads if load is not None]
    return Timeline(
        spans=(*backprop.spans, *forward, *_bucket_spans(loads, bucket_times)),
        iteration_s=stop_s,
        backprop_s=profile.backprop_s,
        feed_forward_s=profile.feed_forward_s,
        step_s=backprop.stop_s,
        reduce_s=least_s(reduces, conduct.window),
        gather_s=least_s(gathers, conduct.window),
        communication_s=least_s([*reduces, *gathers], 2 * conduct.window),
        num_events=flow.num_events,
    )


def _make_loads(
    layout: BucketLayout, costs: Costs, ready_s: Sequence[float], *, gather: Gather
) -> list[Load | None]:
    """What each bucket brings; None for a bucket that takes no part. ready_s: by bucket."""
    return [
        make_load(bucket.numel, bucket.itemsize, costs, ready_s=seconds, gather=gather)
        if bucket.trained
        else None
        for bucket, seconds in zip(layout, ready_s, strict=True)
    ]


def make_load(numel: int, itemsize: int, costs: Costs, *, ready_s: float, gather: Gather) -> Load:
    """What a bucket of ``numel`` elements brings by ``costs``, padding included."""
    cuts = even_cuts(numel, costs.world_size)
    nbytes = cuts.total * itemsize
    updated_bytes = cuts.largest * itemsize if gather == "parameters" else numel * itemsize
    update_s = costs.update_s + costs.update_s_per_byte * updated_bytes
    reduced, gathered, num_rounds = float(nbytes), float(nbytes), costs.num_rounds
    reduce_codec_s = gather_codec_s = 0.0
    if (codec := costs.codec_of(numel)) is not None:
        reduced, gathered = codec.reduced * nbytes, codec.gathered * nbytes
        reduce_codec_s = codec.reduce_s_per_byte * nbytes
        gather_codec_s = codec.gather_s_per_byte * nbytes
    return Load(
        ready_s=ready_s,
        reduce=transfer(costs.reduce_scatter, reduced, num_rounds),
        update_s=update_s,
        gather=transfer(costs.all_gather, gathered, num_rounds),
        reduce_codec_s=reduce_codec_s,
        gather_codec_s=gather_codec_s,
    )


def transfer(link: LinkModel, nbytes: float, num_rounds: int) -> WireDemand:
    """A collective of ``nbytes`` in ``num_rounds``; one that takes no time needs no rounds."""
    alone_s = link.alone_s(nbytes)
    simulated = min(max(num_rounds, 1), MOST_ROUNDS) if alone_s else 1
    return WireDemand(alone_s, link.wire_s(nbytes), simulated)


def least_s(transfers: Sequence[WireDemand], window: int) -> float:
    """Seconds that ``transfers`` take at least with ``window`` of them in flight.

    The wire has to carry all of them, and each occupies a place in the window while it is out.
    """
    if not transfers:
        return 0.0
    return max(
        fsum(one.wire_s for one in transfers),
        fsum(one.alone_s for one in transfers) / window,
        max(one.alone_s for one in transfers),
    )


@dataclass(frozen=True, slots=True)
class _Backprop:
    """Backprop, during which the main thread hands over each bucket as it becomes ready.

    ready_s: by bucket. stop_s: when all is over.
    """

    spans: tuple[SimulatedSpan, ...]
    ready_s: tuple[float, ...]
    stop_s: float


def _run_backprop(profile: ModelProfile, layout: BucketLayout, costs: Costs) -> _Backprop:
    layers, first_users = profile.workload.layers, profile.workload.first_users()
    completed: list[list[int]] = [[] for _ in layers]
    for bucket in layout:
        if bucket.trained:
            completed[min(first_users[name] for name in bucket.names)].append(bucket.index)
    spans, ready_s, now = [], [0.0] * len(layout), 0.0
    for place in reversed(range(len(layers))):
        start, now = now, now + profile.times[place].backprop_s
        spans.append(SimulatedSpan("compute", f"B {layers[place].name}", start, now))
        for index in reversed(completed[place]):
            start, now = now, now + costs.main_thread_s
            ready_s[index] = now
            if now > start:
                spans.append(SimulatedSpan("compute", f"H{index}", start, now))
    return _Backprop(tuple(spans), tuple(ready_s), now)


def _run_feed_forward(
    profile: ModelProfile,
    layout: BucketLayout,
    bucket_times: Sequence[BucketTimes],
    *,
    start_s: float,
) -> tuple[list[SimulatedSpan], float]:
    """Each layer as soon as its buckets are current, and when the last is over."""
    buckets = layout.bucket_of()
    spans, now = [], start_s
    for layer, times in profile.layers():
        start = max([now, *(bucket_times[buckets[name].index].current_s for name in layer.used)])
        now = start + times.feed_forward_s
        spans.append(SimulatedSpan("compute", f"F {layer.name}", start, now))
    return spans, now


def _bucket_spans(
    loads: Sequence[Load | None], bucket_times: Sequence[BucketTimes]
) -> list[SimulatedSpan]:
    return [
        span
        for index, (load, times) in enumerate(zip(loads, bucket_times, strict=True))
        if load is not None
        for span in (
            SimulatedSpan("reduce-scatter", f"RS{index}", *times.reduce),
            SimulatedSpan("update", f"U{index}", *times.update),
            SimulatedSpan("all-gather", f"AG{index}", *times.gather),
        )
    ]


def _check(profile: ModelProfile, layout: BucketLayout, schedule: Schedule, costs: Costs) -> None:
    if layout.world_size != costs.world_size:
        raise ConfigError(
            f"the buckets are laid out for world size {layout.world_size}, but the costs are those "
            f"of {costs.world_size}; give costs.at({layout.world_size})",
            code="costs-of-other-world",
        )
    if len(schedule.reduce_scatters) != len(layout):
        raise ConfigError(
            f"schedule {schedule.name} is over {len(schedule.reduce_scatters)} buckets, but there "
            f"are {len(layout)}",
            code="plan-inconsistent",
        )
    laid_out = set(layout.bucket_of())
    owned = {spec.name for spec in profile.workload.params()}
    if laid_out != owned:
        example = min(laid_out ^ owned)
        raise ConfigError(
            f"{profile.workload.name} has {len(owned)} parameters, the buckets hold "
            f"{len(laid_out)}, and {example} is in one of them only; profile this very model",
            code="plan-of-other-model",
        )
