"""Replica: a recorded run as the planner's model sees it, to set beside what was measured.

Each bucket becomes a layer. Its backprop takes from the readiness of the bucket before it to its
own, its feed-forward the same share of the whole. The link is as fast as it was while the
recording's collectives were in flight, or faster if the measured iteration shows so.
Nothing disturbs anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from dearmpi.config import Gather, ScheduleName
from dearmpi.errors import ConfigError
from dearmpi.plan.data.layout import BucketLayout, ParamSpec, build_layout
from dearmpi.plan.data.plan import Plan
from dearmpi.plan.data.schedule import Conduct, build_schedule
from dearmpi.plan.data.workload import LayerSpec, Workload
from dearmpi.plan.model.cost import Costs, LinkModel
from dearmpi.plan.model.profile import LayerTimes, ModelProfile
from dearmpi.plan.simulate.timeline import Timeline, simulate
from dearmpi.report.read.recording import (
    Interval,
    Recording,
    Window,
    spans_by_window,
    subtract,
    total,
    union,
)
from dearmpi.span import Span, Track

_TRACKS = {
    "compute": Track.COMPUTE,
    "reduce-scatter": Track.REDUCE_SCATTER,
    "update": Track.UPDATE,
    "all-gather": Track.ALL_GATHER,
}
_NETWORK = (Track.REDUCE_SCATTER, Track.ALL_GATHER)
_LEAST_FACTOR, _NUM_HALVINGS = 1e-3, 12  # of the link's time per byte, and of its search


def conduct_of(
    recording: Recording, *, window: int, eager: bool, gather: Gather, plan: Plan | None = None
) -> Conduct | None:
    """How the recorded buckets travelled; None for the schedule of another plan.

    window, eager, gather: as in ``EngineConfig``. plan: what the run followed at last; it goes
    before ``window`` and ``eager`` where it is what was recorded.
    """
    num_buckets = len(recording.bucket_bytes)
    if plan is not None:
        recorded = (recording.schedule, num_buckets)
        if (plan.schedule.name, len(plan.buckets)) == recorded:
            return replace(plan.conduct, gather=gather)
    names: dict[str, ScheduleName] = {"dear": "dear", "wfbp": "wfbp", "serial": "serial"}
    if recording.schedule not in names:
        return None
    schedule = build_schedule(names[recording.schedule], num_buckets)
    return Conduct(schedule, window, eager, gather)


@dataclass(frozen=True, slots=True)
class Replica:
    """A simulated iteration, and the same over a link that carries twice as much."""

    timeline: Timeline
    doubled: Timeline


def replicate(
    recording: Recording, rank: int, conduct: Conduct, *, most_s: float = math.inf
) -> Replica | None:
    """The iteration of ``rank`` (the least waiting one tells most) simulated by ``conduct``.

    most_s: what the measured iteration took, which the simulated one does not exceed: it shows that
    the link can carry as much. None for an iteration of several micro-batches, where the recording
    lacks bytes or readiness, and where computation alone takes longer than ``most_s``.
    """
    if rank not in recording.spans:
        return None
    spans, sizes = recording.spans[rank], recording.bucket_bytes
    iterations = _iterations(spans, recording.windows(rank))
    if iterations is None:
        return None
    ready_s, link = _ready_s(spans, iterations, len(sizes)), _link(iterations, sizes)
    if link is None or ready_s is None:
        return None
    times = _times(
        ready_s,
        forward_s=median(one.computed_s("F") for one in iterations),
        backward_s=median(one.computed_s("B") for one in iterations),
    )
    world_size = recording.world_size
    update_s = median([s.stop_s - s.start_s for s in spans if s.track is Track.UPDATE] or [0.0])
    laid_out = _lay_out(sizes, times, world_size)

    def run(factor: float) -> Timeline:
        """With a link that takes ``factor`` times as long per byte."""
        own = link.scaled(alpha=1.0, beta=factor)
        return simulate(*laid_out, conduct, Costs(world_size, own, own, update_s=update_s))

    try:
        factor = _longest_factor(run, most_s)
        return None if factor is None else Replica(run(factor), run(factor / 2))
    except ConfigError:
        return None


def _longest_factor(run: Callable[[float], Timeline], most_s: float) -> float | None:
    """The greatest factor up to 1 with which an iteration takes at most ``most_s``, nearly."""
    low, high = _LEAST_FACTOR, 1.0
    if run(high).iteration_s <= most_s:
        return high
    if run(low).iteration_s > most_s:
        return None
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if run(middle).iteration_s <= most_s else (low, middle)
    return low


def _lay_out(
    sizes: Sequence[int], times: tuple[LayerTimes, ...], world_size: int
) -> tuple[ModelProfile, BucketLayout]:
    """A layer, and a bucket, of each size in bytes."""
    specs = [ParamSpec(f"bucket{i}", (size,), itemsize=1) for i, size in enumerate(sizes)]
    layers = tuple(LayerSpec(spec.name, (spec,)) for spec in specs)
    profile = ModelProfile(Workload("replica", "a recording", layers, 1, "samples"), times)
    return profile, build_layout([[spec] for spec in specs], world_size)


def replica_spans(
    timeline: Timeline, *, waits_in_step: bool = False, clips: bool = False
) -> tuple[tuple[Span, ...], Window]:
    """The spans of ``timeline`` from the end of backprop on, with waits where computation waits,
    and the window that they fill. Handing a bucket over is backprop, as in what is measured.

    waits_in_step: the waits after backprop belong to the step that ends, and the window begins
    where the forward does. clips: so do the waits for reduce-scatters, whose norm the step needs.
    """
    spans = [
        Span(_TRACKS[s.lane], _pass(s.name), s.start_s, s.stop_s, 0, _bucket(s.name))
        for s in timeline.spans
    ]
    length_s = timeline.iteration_s
    computed = union((s.start_s, s.stop_s) for s in spans if s.track is Track.COMPUTE)
    gaps = subtract([(0.0, length_s)], computed)
    spans += [Span(Track.WAIT, "", start, stop, 0) for start, stop in gaps]
    # Steady iterations follow each other: what happens before backprop ends comes round again.
    again = [s._replace(start_s=s.start_s + length_s, stop_s=s.stop_s + length_s) for s in spans]
    begin_s = timeline.step_s
    if waits_in_step:
        begin_s = min(s.start_s for s in timeline.spans if s.name.startswith("F"))
    elif clips:
        reduced = [s.stop_s for s in spans if s.track is Track.REDUCE_SCATTER]
        begin_s = max([begin_s, *reduced])
    window = Window(0, begin_s, begin_s + length_s)
    return (*spans, *again), window


def _pass(name: str) -> str:
    return f"B{name[1:]}" if name.startswith("H") else name


def _bucket(name: str) -> int | None:
    digits = name.lstrip("RSAGUH")
    return int(digits) if digits.isdigit() else None


@dataclass(frozen=True, slots=True)
class _Iteration:
    """A recorded iteration. spans: what reaches into it. passes: feed-forward and backprop."""

    window: Window
    spans: list[Span]
    passes: dict[str, Interval]

    def parts(self, *tracks: Track) -> list[tuple[Span, Interval]]:
        """The spans of ``tracks``, with what of them lies within."""
        own = (span for span in self.spans if span.track in tracks)
        return [(span, part) for span in own if (part := self.window.clip(span))]

    def computed_s(self, kind: str) -> float:
        """The length of a pass, without waits and data."""
        holes = union(part for _, part in self.parts(Track.WAIT, Track.DATA))
        return total(subtract([self.passes[kind]], holes))


def _iterations(spans: Sequence[Span], windows: Sequence[Window]) -> list[_Iteration] | None:
    """None where one of them is not of a single micro-batch."""
    found = []
    for window, within in zip(windows, spans_by_window(spans, windows), strict=True):
        passes = window.passes(within)
        if [kind for kind, _ in passes] != ["F", "B"]:
            return None
        found.append(_Iteration(window, within, dict(passes)))
    return found


def _ready_s(
    spans: Sequence[Span], iterations: Sequence[_Iteration], num_buckets: int
) -> list[float] | None:
    """When each bucket was handed over, from the start of backprop on; None unless all were."""
    begin_s = {one.window.iteration: one.passes["B"][0] for one in iterations}
    found: dict[int | None, list[float]] = {bucket: [] for bucket in range(num_buckets)}
    for span in spans:
        is_known = span.bucket in found and span.iteration in begin_s
        if span.track is Track.REDUCE_SCATTER and is_known and span.queued_s is not None:
            found[span.bucket].append(span.queued_s - begin_s[span.iteration])
    return [median(times_s) for times_s in found.values()] if all(found.values()) else None


def _times(
    ready_s: Sequence[float], *, forward_s: float, backward_s: float
) -> tuple[LayerTimes, ...]:
    """Of each bucket's layers, in feed-forward order."""
    times, before = [], 0.0
    for bucket in reversed(range(len(ready_s))):
        now = min(max(before, ready_s[bucket]), backward_s) if bucket else backward_s
        share = (now - before) / backward_s if backward_s else 0.0
        times.append(LayerTimes(share * forward_s, now - before))
        before = now
    return tuple(reversed(times))


def _link(iterations: Sequence[_Iteration], sizes: Sequence[int]) -> LinkModel | None:
    """One figure for both collectives: mean time in flight per byte."""
    busy_s = num_bytes = 0.0
    for one in iterations:
        found = one.parts(*_NETWORK)
        busy_s += total(union(part for _, part in found))
        num_bytes += sum(
            sizes[span.bucket or 0] * (stop - start) / (span.stop_s - span.start_s)
            for span, (start, stop) in found
            if span.bucket in range(len(sizes))
        )
    return LinkModel(0.0, busy_s / num_bytes) if num_bytes else None
