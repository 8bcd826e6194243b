"""A plan as a picture: the iteration that was simulated for it."""

from __future__ import annotations

from dearmpi.engine.trace.span import Track
from dearmpi.plan.data.plan import Plan
from dearmpi.plan.simulate.timeline import Timeline
from dearmpi.report.analyse.replica import replica_spans
from dearmpi.report.draw.shape import Picture
from dearmpi.report.draw.tracks import TrackGroup, draw_tracks
from dearmpi.report.draw.unit import count_text, time_text
from dearmpi.report.read.interval import total

_WIDTH = 900.0


def draw_plan(plan: Plan, timeline: Timeline, *, micro_batches: int = 1) -> Picture:
    """``timeline``, which ``plan`` gives, from the end of one backprop to that of the next.

    micro_batches: of an iteration, of which the timeline is one; nothing travels between others.
    """
    length, ranks = time_text(timeline.iteration_s), count_text(plan.world_size, "rank")
    spans, window = replica_spans(timeline)
    waits_s = total(part for s in spans if s.track is Track.WAIT and (part := window.clip(s)))
    hands_over = any(s.name.startswith("H") for s in timeline.spans)
    group = TrackGroup(
        f"simulated {'iteration' if micro_batches == 1 else 'micro-batch'} over {ranks}: {length}"
        + (", backprop with handing buckets over" if hands_over else ""),
        spans,
        window,
        f"waits {time_text(waits_s)}",
    )
    what = f"One iteration of {length}"
    if micro_batches > 1:
        whole = time_text(plan.prediction.iteration_s)
        what = f"An iteration of {whole}, of which the last micro-batch: {length}"
    title = f"{what} over {ranks}, simulated"
    return draw_tracks("plan", title, [group], width=_WIDTH)
