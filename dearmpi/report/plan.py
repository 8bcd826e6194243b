"""A plan as a picture: the iteration that was simulated for it."""

from __future__ import annotations

from dearmpi.plan.plan import Plan
from dearmpi.plan.timeline import Timeline
from dearmpi.report.replica import replica_spans
from dearmpi.report.shape import Picture
from dearmpi.report.tracks import Track, draw_tracks
from dearmpi.report.unit import count_text, time_text

_WIDTH = 900.0


def draw_plan(plan: Plan, timeline: Timeline) -> Picture:
    """``timeline``, which ``plan`` gives, from the end of one backprop to that of the next."""
    length, exposed = time_text(timeline.iteration_s), time_text(timeline.exposed_s)
    ranks = count_text(plan.world_size, "rank")
    track = Track(
        f"simulated iteration over {ranks}: {length}",
        *replica_spans(timeline),
        f"waits {exposed}",
    )
    title = f"One iteration of {length} over {ranks}, simulated"
    return draw_tracks("plan", title, [track], width=_WIDTH)
