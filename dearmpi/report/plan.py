"""A plan as a picture: the iteration that was simulated for it."""

from __future__ import annotations

from dearmpi.plan.plan import Plan
from dearmpi.plan.timeline import Timeline
from dearmpi.report.replica import replica_spans
from dearmpi.report.shape import Picture
from dearmpi.report.tracks import Track, draw_tracks
from dearmpi.report.unit import count_text, time_text

_WIDTH = 900.0


def draw_plan(plan: Plan, timeline: Timeline, *, micro_batches: int = 1) -> Picture:
    """``timeline``, which ``plan`` gives, from the end of one backprop to that of the next.

    micro_batches: of an iteration, of which the timeline is one; nothing travels between others.
    """
    length, exposed = time_text(timeline.iteration_s), time_text(timeline.exposed_s)
    ranks = count_text(plan.world_size, "rank")
    track = Track(
        f"simulated {'iteration' if micro_batches == 1 else 'micro-batch'} over {ranks}: {length}",
        *replica_spans(timeline),
        f"waits {exposed}",
    )
    what = f"One iteration of {length}"
    if micro_batches > 1:
        whole = time_text(plan.prediction.iteration_s)
        what = f"An iteration of {whole}, of which the last micro-batch: {length}"
    title = f"{what} over {ranks}, simulated"
    return draw_tracks("plan", title, [track], width=_WIDTH)
