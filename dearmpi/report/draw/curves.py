"""Curves over logarithmic axes, several panels below each other, with one legend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dearmpi.plan.rivals.side_by_side import CLAIMS, Comparison, MethodRow, PaperGain
from dearmpi.report.draw.shape import DASHES, Axis, Label, Line, Picture, Shape
from dearmpi.report.draw.units import count_text

_WIDTH, _LEFT, _RIGHT = 760.0, 64.0, 150.0
_TOP, _PANEL, _BETWEEN = 34.0, 270.0, 74.0
_LEGEND_STEP, _SAMPLE = 20.0, 26.0
_MOST_TICKS = 8


@dataclass(frozen=True, slots=True)
class Curve:
    """Points (x, y), both above 0, with a label for the legend. colour: a name in the palette.

    dashes: as a line's.
    """

    label: str
    points: tuple[tuple[float, float], ...]
    colour: str
    dashes: tuple[float, ...] = ()
    width: float = 1.5


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves over one quantity. axis: what it is, with its unit. ticks: where it is marked."""

    axis: str
    ticks: tuple[float, ...]
    curves: tuple[Curve, ...]


def draw_panels(name: str, title: str, panels: Sequence[Panel], *, y_axis: str) -> Picture:
    """Panels with the same curves in the same colours; the legend stands beside the first."""
    shapes: list[Shape] = [Label(16, _TOP - 12, y_axis, colour="faint")]
    top = _TOP
    for panel in panels:
        shapes += _draw_panel(panel, top)
        top += _PANEL + _BETWEEN
    shapes += _draw_legend(panels[0].curves)
    return Picture(name, title, _WIDTH, top - 20, tuple(shapes))


def _draw_panel(panel: Panel, top: float) -> list[Shape]:
    bottom, right = top + _PANEL, _WIDTH - _RIGHT
    xs = [x for curve in panel.curves for x, _ in curve.points]
    ys = [y for curve in panel.curves for _, y in curve.points]
    across = Axis(min(xs), max(xs), _LEFT, right, logarithmic=True)
    marks = _marks(min(ys), max(ys))
    upwards = Axis(marks[0], marks[-1], bottom, top, logarithmic=True)
    shapes: list[Shape] = []
    for mark in marks:
        y = upwards.place(mark)
        shapes.append(Line(((_LEFT, y), (right, y)), "grid", 1))
        shapes.append(Label(_LEFT - 8, y + 4, f"{mark:g}", "end"))
    for tick in panel.ticks:
        x = across.place(tick)
        shapes.append(Line(((x, bottom), (x, bottom + 5)), "faint", 1))
        shapes.append(Label(x, bottom + 19, f"{tick:g}", "middle"))
    shapes.append(Label((_LEFT + right) / 2, bottom + 38, panel.axis, "middle", "faint"))
    for curve in panel.curves:
        points = tuple((across.place(x), upwards.place(y)) for x, y in curve.points)
        shapes.append(Line(points, curve.colour, curve.width, curve.dashes))
    return shapes


def _draw_legend(curves: Sequence[Curve]) -> list[Shape]:
    shapes: list[Shape] = []
    left = _WIDTH - _RIGHT + 16
    for place, curve in enumerate(curves):
        y = _TOP + 10 + place * _LEGEND_STEP
        shapes.append(
            Line(((left, y), (left + _SAMPLE, y)), curve.colour, curve.width, curve.dashes)
        )
        shapes.append(Label(left + _SAMPLE + 6, y + 4, curve.label))
    return shapes


def _marks(low: float, high: float) -> list[float]:
    """Round numbers from below ``low`` to above ``high``: 1, 2, 5, or powers of ten alone."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for steps in ((1, 2, 5), (1, 3), (1,)):
        marks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        start = max(mark for mark in marks if mark <= low * 1.0001)
        stop = min(mark for mark in [*marks, 10.0 ** (last + 1)] if mark >= high * 0.9999)
        chosen = [mark for mark in marks if start <= mark <= stop]
        if len(chosen) <= _MOST_TICKS:
            break
    return chosen


_COLOURS = (
    "faint", "sixth", "third", "fourth", "bucket2", "bucket3", "fifth", "first", "second",
)  # fmt: skip
# Of the first, second ... as many methods as there are colours; those of DeAR are whole, or nearly.
_DASHES = (DASHES, (1.5, 3.0), (10.0, 3.0, 1.5, 3.0))
_DEAR_DASHES = ((), (18.0, 2.0), (18.0, 2.0, 2.0, 2.0))
_BOUND = "bound of any method"


def comparison_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """A header and a line for each method."""
    header = ("method", "buckets", "iteration s", "exposed s", "x bound", "speed-up")
    return [header, *(_cells(comparison, row) for row in comparison.rows)]


def describe_comparison(comparison: Comparison) -> list[str]:
    """Lines to stand above the table: what is compared, and by which numbers."""
    workload, profile, network = (
        comparison.profile.workload,
        comparison.profile,
        comparison.network,
    )
    lines = [
        f"{workload.name}, batch size {workload.batch_size} per rank, "
        f"{count_text(comparison.world_size, 'rank')} over {network.name}",
        f"network: {network.source}",
        f"computation {comparison.compute_s:.4f} s: feed-forward {profile.feed_forward_s:.4f}, "
        f"backprop {profile.backprop_s:.4f} ({profile.device})",
        f"{_BOUND} {comparison.bound_s:.4f} s = max(computation, bytes on the wire "
        f"{comparison.wire_s:.4f})",
    ]
    if last_node := network.describe_last_node(comparison.world_size):
        lines.append(f"nodes: {last_node}")
    if comparison.best_other is not None:
        name = comparison.best_other.method.name
        lines.append(f"speed-up over {name}, the best of those that are not DeAR")
    return lines


def _cells(comparison: Comparison, row: MethodRow) -> tuple[str, ...]:
    speed_up = comparison.speed_up(row)
    return (
        row.method.name,
        str(row.num_buckets),
        f"{row.iteration_s:.4f}",
        f"{max(0.0, row.timeline.exposed_s):.4f}",  # a difference of sums may be -1e-17
        f"{row.iteration_s / comparison.bound_s:.3f}",
        "-" if speed_up is None else f"{speed_up:.3f}",
    )


def gain_rows(gains: Sequence[PaperGain]) -> list[tuple[str, ...]]:
    """A header and a line for each of one network's gains."""
    header = (
        "model",
        "fusion",
        "best other",
        "its s",
        "DeAR s",
        "gain",
        "overlap",
        "start-up",
        "rest",
        "limit",
    )
    return [header, *(_gain_cells(gain) for gain in gains)]


def _gain_cells(gain: PaperGain) -> tuple[str, ...]:
    return (
        gain.comparison.profile.workload.name,
        "yes" if gain.fused else "no",
        gain.best_other.method.name,
        f"{gain.best_other.iteration_s:.4f}",
        f"{gain.dear.iteration_s:.4f}",
        *(_percent(factor) for factor in (gain.factor, gain.overlap, gain.start_up, gain.rest)),
        _percent(gain.most_overlap),
    )


def describe_gains(gains: Sequence[PaperGain]) -> list[str]:
    """Lines to stand below the table: the largest gain beside the paper's."""
    largest = max(gains, key=lambda gain: gain.factor)
    comparison = largest.comparison
    return [
        f"largest gain {_percent(largest.factor)} ({comparison.profile.workload.name}, "
        f"{'with' if largest.fused else 'without'} fusion); the paper says up to "
        f"{CLAIMS[comparison.network.name]:.0%}",
    ]


def _percent(factor: float) -> str:
    return f"{factor - 1:+.1%}"


def draw_comparisons(
    by_world_size: Sequence[Comparison],
    by_bandwidth: Sequence[Comparison],
    gigabits: Sequence[float],
) -> Picture:
    """Iteration time over the number of ranks, and below it over bandwidth.

    gigabits: per second of each network of ``by_bandwidth``, whatever is sent over it.
    """
    first = by_world_size[0]
    sizes = [float(comparison.world_size) for comparison in by_world_size]
    across = (
        f"ranks, over {first.network.name}",
        f"Gbit/s, {by_bandwidth[0].world_size} ranks",
    )
    panels = [
        Panel(axis, tuple(xs), _curves(comparisons, xs))
        for axis, xs, comparisons in zip(
            across, (sizes, gigabits), (by_world_size, by_bandwidth), strict=True
        )
    ]
    title = f"{first.profile.workload.name}: simulated seconds per iteration"
    return draw_panels("simulation", title, panels, y_axis="seconds per iteration")


def _curves(comparisons: Sequence[Comparison], xs: Sequence[float]) -> tuple[Curve, ...]:
    curves = []
    for place, row in enumerate(comparisons[0].rows):
        seconds = [comparison.rows[place].iteration_s for comparison in comparisons]
        again, colour = divmod(place, len(_COLOURS))
        is_dear = row.method.is_dear
        dashes = (_DEAR_DASHES if is_dear else _DASHES)[again % len(_DASHES)]
        points = tuple(zip(xs, seconds, strict=True))
        width = 2.5 if is_dear else 1.5
        curves.append(Curve(row.method.name, points, _COLOURS[colour], dashes, width))
    bounds = tuple((x, comparison.bound_s) for x, comparison in zip(xs, comparisons, strict=True))
    return (*curves, Curve("bound", bounds, "ink", width=1))
