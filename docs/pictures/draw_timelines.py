"""Draws docs/pictures/timeline-dear.svg and timeline-plan.svg as `dear-train plan --picture` does:
ResNet-50 over 4 hosts at 1 Gbit/s, communication as long as computation, with the assumed costs of
benchmarks/planned.py.

Usage: python -m docs.pictures.draw_timelines
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.planned import assumed_costs, planned, timed
from dearmpi.config import EngineConfig
from dearmpi.plan.data.layout import build_layout, fuse_by_cap
from dearmpi.plan.data.schedule import Conduct, build_schedule
from dearmpi.plan.data.workload import read_workload
from dearmpi.plan.search.planner import plan_of
from dearmpi.plan.simulate.timeline import simulate
from dearmpi.report.draw import svg
from dearmpi.report.draw.tracks import draw_plan

FOLDER = Path(__file__).parent


def main() -> None:
    """Write both."""
    workload, costs = read_workload("resnet50"), assumed_costs(4, gigabits=1)
    profile, specs = timed(workload, costs, ratio=1.0), list(workload.params())
    model_bytes = sum(spec.nbytes for spec in specs)
    cap_bytes = EngineConfig().cap_bytes(model_bytes, world_size=costs.world_size)
    buckets = build_layout(fuse_by_cap(specs, cap_bytes), costs.world_size)
    by_default = plan_of(
        profile,
        costs,
        buckets,
        Conduct(build_schedule("dear", len(buckets)), EngineConfig().window, eager=True),
        origin="the default buckets",
    )
    for name, plan in (("dear", by_default), ("plan", planned(profile, costs))):
        layout = plan.layout(specs, costs.world_size)
        timeline = simulate(profile, layout, plan.conduct, costs)
        path = FOLDER / f"timeline-{name}.svg"
        path.write_text(svg.document(draw_plan(plan, timeline)))
        print(f"{path.name}: {timeline.iteration_s:.3f} s, {len(layout)} buckets")


if __name__ == "__main__":
    main()
