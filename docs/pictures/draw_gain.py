"""Draws docs/pictures/gain.svg: how much faster an iteration is than DDP's, over the ratio of
communication to computation. Dots are the measured table of benchmarks/README.md, lines are
simulated for ResNet-50 over 4 ranks at 1 Gbit/s.

Usage: python -m docs.pictures.draw_gain > docs/pictures/gain.svg
"""

from __future__ import annotations

import re
from pathlib import Path

from dearmpi.plan.data.workload import read_workload
from dearmpi.plan.model.network import link_network
from dearmpi.plan.model.profile import profile_workload
from dearmpi.plan.rivals.methods import parse_method
from dearmpi.plan.rivals.side_by_side import Comparison, compare
from dearmpi.report.draw import svg
from dearmpi.report.draw.shape import Axis, Box, Key, Label, Line, Picture, Shape, draw_legend

TABLE = Path(__file__).parents[2] / "benchmarks" / "README.md"
RATIOS = (
    0.05,
    0.1,
    0.2,
    0.3,
    0.4,
    0.5,
    0.6,
    0.7,
    0.8,
    0.9,
    1.0,
    1.1,
    1.2,
    1.5,
    2.0,
    3.0,
    5.0,
    10.0,
)
TICKS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
NUM_RANKS, ROUND_S, BYTE_S = 4, 0.5e-3 / 3, 8e-9  # a collective starts in 0.5 ms
WIDTH, LEFT, HEIGHT, MOST = 700.0, 40.0, 260.0, 1.4


def measured() -> list[tuple[float, float]]:
    """(ratio, time of DDP over time of ``planned``) of each row of the table."""
    text = TABLE.read_text()
    table = text[text.index("### Five models at three ratios") :].partition("What the table")[0]
    rows = re.findall(r"^\|[^|]*\| ([\d.]+) \|(.+)\|$", table, re.MULTILINE)
    return [(float(ratio), float(cells.split("|")[-1])) for ratio, cells in rows]


def simulated(ratio: float) -> tuple[float, float]:
    """What the planner's plan, and DeAR's own order, gain over DDP."""
    workload = read_workload("resnet50")
    network = link_network("1GbE", ROUND_S, BYTE_S, "assumed")

    def comparison(compute_s: float, *names: str) -> Comparison:
        profile = profile_workload(
            workload, feed_forward_s=compute_s / 3, backprop_s=2 * compute_s / 3
        )
        return compare(profile, network, NUM_RANKS, list(map(parse_method, names)))

    compute_s = comparison(1.0, "ddp").wire_s / ratio
    found = comparison(compute_s, "ddp", "dear-plan", "dear")
    ddp, plan, dear = (row.iteration_s for row in found.rows)
    return ddp / plan, ddp / dear


def draw() -> Picture:
    """The chart."""
    keys = (
        Key("measured: five models, plan", "lost"),
        Key("simulated: plan", "first"),
        Key("simulated: DeAR's order", "fourth"),
    )
    legend, top = draw_legend(keys, width=WIDTH, top=22)
    bottom = top + HEIGHT
    x = Axis(RATIOS[0], RATIOS[-1], LEFT, WIDTH - 8, logarithmic=True)
    y = Axis(1.0, MOST, bottom, top)
    shapes: list[Shape] = [Label(0, 12, "times as fast as DDP", colour="faint"), *legend]
    for tick in (1.0, 1.1, 1.2, 1.3, 1.4):
        shapes.append(Line(((LEFT, y.place(tick)), (WIDTH, y.place(tick))), "grid", 1))
        shapes.append(Label(LEFT - 6, y.place(tick) + 4, f"{tick:.1f}", "end"))
    for tick in TICKS:
        shapes.append(Label(x.place(tick), bottom + 18, f"{tick:g}", "middle"))
    axis = "communication alone over computation alone"
    shapes.append(Label((LEFT + WIDTH) / 2, bottom + 36, axis, "middle", "faint"))
    gains = [(ratio, simulated(ratio)) for ratio in RATIOS]
    for place, colour in ((1, "fourth"), (0, "first")):
        points = tuple((x.place(ratio), y.place(gain[place])) for ratio, gain in gains)
        shapes.append(Line(points, colour, 2))
    for ratio, gain in measured():
        shapes.append(Box(x.place(ratio) - 3, y.place(gain) - 3, 6, 6, "lost", hint=f"{gain:.2f}"))
    title = "Gain over DDP by the ratio of communication to computation"
    return Picture("gain", title, WIDTH, bottom + 42, tuple(shapes))


def main() -> None:
    """Print the picture."""
    print(svg.document(draw()), end="")


if __name__ == "__main__":
    main()
