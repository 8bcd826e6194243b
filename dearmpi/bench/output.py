"""A benchmark's result as a table, as JSON and as a picture."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

import dearmpi
from dearmpi.bench.collective_times import CollectivesResult
from dearmpi.bench.own_methods import OURS
from dearmpi.bench.result import Bounds, Result, Row, quartiles
from dearmpi.report.draw import svg
from dearmpi.report.draw.shape import DASHES, Axis, Box, Label, Line, Picture, Shape, text_width
from dearmpi.report.draw.units import TimeUnit, align, count_text, time_unit


def describe_result(result: Result) -> list[str]:
    """Lines: the rates in the usual form, the bounds, and a table; times in one unit."""
    unit = time_unit(max((row.median_s for row in _rows(result) if row.blocks), default=1.0))
    lines = [line for row in result.rows if row.blocks for line in _describe_rates(result, row)]
    bounds = result.bounds
    lines += ["", _describe_subject(result)]
    if bounds is not None:
        lines += [*_describe_bounds(bounds, unit), *_describe_halves(result)]
    cells = [_cells(result, row, bounds, unit) for row in _rows(result)]
    lines += ["", *align([_header(unit), *cells])]
    remarks = [remark for row in _rows(result) for remark in _describe_choices(row, unit)]
    remarks += result.problems()
    return [*lines, *([""] if remarks else []), *remarks]


def _rows(result: Result) -> list[Row]:
    return [result.alone, *result.rows]


def _header(unit: TimeUnit) -> tuple[str, ...]:
    return (
        "method",
        f"median {unit.name}",
        "quartiles",
        "per CPU",
        "x DeAR",
        "x bound",
        f"exposed {unit.name}",
        f"CPU {unit.name}",
        "peak MB",
    )


def _describe_rates(result: Result, row: Row) -> list[str]:
    """As the synthetic benchmarks of the field do: the mean of the rounds +- 1.96 sigma, which one
    round does not tell.
    """
    rates = [result.rate(block.mean_s) for block in row.blocks]
    unit, size = result.unit, result.world_size

    def said(ranks: int) -> str:
        mean = f"{ranks * statistics.fmean(rates):.1f}"
        if len(rates) == 1:
            return mean
        return f"{mean} +-{ranks * 1.96 * statistics.pstdev(rates):.1f}"

    return [
        f"{row.label:<12} {unit.capitalize()}/sec per CPU: {said(1)}",
        f"{row.label:<12} Total {unit}/sec on {size} CPU(s): {said(size)}",
    ]


def _describe_choices(row: Row, unit: TimeUnit) -> list[str]:
    """What a method chose for itself, round by round."""
    return [
        f"{row.label}, round {number}: {block.note}, {unit.of(block.mean_s):.4f} "
        f"{unit.name} in the mean"
        for number, block in enumerate(row.blocks)
        if block.note
    ]


def _describe_subject(result: Result) -> str:
    sent = "" if result.comm_dtype == "fp32" else f", sent as {result.comm_dtype}"
    return (
        f"{result.subject}, batch size {result.batch_size} per rank, "
        f"{count_text(result.world_size, 'rank')} on {count_text(result.hosts, 'host')}, "
        f"{result.payload_bytes / 1e6:.1f} MB in {count_text(result.num_buckets, 'bucket')}{sent}"
    )


def _describe_bounds(bounds: Bounds, unit: TimeUnit) -> list[str]:
    ratio = bounds.communication_s / bounds.compute_s

    def said(seconds: float) -> str:
        return f"{unit.of(seconds):.3f}"

    return [
        f"compute alone {said(bounds.compute_s)} {unit.name}: feed-forward "
        f"{said(bounds.feed_forward_s)}, backprop {said(bounds.backprop_s)} (and the optimizer "
        f"{said(bounds.update_s)})",
        f"communication alone {said(bounds.communication_s)} {unit.name}: reduce-scatters "
        f"{said(bounds.reduce_scatter_s)}, all-gathers {said(bounds.all_gather_s)}; {ratio:.2f} "
        "of compute",
        f"bound of DeAR {said(bounds.dear_s)} {unit.name} = max(backprop, reduce-scatters) + "
        "max(feed-forward, all-gathers)",
        f"bound of any method {said(bounds.absolute_s)} {unit.name} = max(compute, communication)",
    ]


def _describe_halves(result: Result) -> list[str]:
    labels = ", ".join(row.label for row in result.rows_that_send_less())
    return [f"bounds are of what is sent as fp32; below them may be {labels}"] if labels else []


def _cells(result: Result, row: Row, bounds: Bounds | None, unit: TimeUnit) -> tuple[str, ...]:
    if not row.blocks:
        return (row.label, "failed", *["-"] * (len(_header(unit)) - 2))
    median_s = row.median_s
    low, high = map(unit.of, quartiles(row.totals()))
    spread = f"{low:.4f}-{high:.4f}" if len(row.totals()) > 1 else "-"
    relative = ["-", "-", "-"]
    if bounds is not None and row is not result.alone:
        relative = [
            f"{median_s / bounds.dear_s:.3f}",
            f"{median_s / bounds.absolute_s:.3f}",
            f"{unit.of(median_s - bounds.compute_s):.3f}",
        ]
    peak = row.peak_bytes
    return (
        row.name,
        f"{unit.of(median_s):.4f}",
        spread,
        f"{result.rate(median_s):.1f}",
        *relative,
        f"{unit.of(row.cpu_s):.3f}",
        "-" if peak is None else f"{peak / 1e6:.0f}",
    )


_WIDTH, _RIGHT, _GAP = 728, 74, 8
_TOP, _STEP, _BAR, _BOTTOM = 60, 30, 18, 24
_LEAST = 300  # pixels of the longest bar, however long the labels
_OWN, _OTHER, _PLAIN, _BOUND = "first", "backprop", "plain", "lost-text"
_NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds"}


def draw(result: Result) -> str:
    """An SVG document. Bars are medians, whiskers quartiles; methods that failed have no bar.
    The numbers stand at the right, where no bound crosses them.
    """
    rows = [result.alone, *result.rows]
    bounds = result.bounds
    most_s = _longest_s(rows, bounds)
    unit = time_unit(most_s)
    left = max(text_width(row.name) for row in rows) + _GAP
    axis = Axis(0.0, most_s, left, max(_WIDTH - _RIGHT, left + _LEAST))
    bottom = _TOP + _STEP * len(rows)
    title = (
        f"{result.subject}: {_NAMES[unit.name]} per iteration, "
        f"{count_text(result.world_size, 'rank')} on {count_text(result.hosts, 'host')}"
    )
    shapes: list[Shape] = [Label(0, 10, title, size=15)]
    for number, row in enumerate(rows):
        is_alone = row is result.alone
        shapes += _draw_row(row, _TOP + _STEP * number, axis, unit, is_alone=is_alone)
    width = axis.stop + _RIGHT
    if bounds is not None:
        sent = " in fp32" if result.rows_that_send_less() else ""
        lines = (("bound of any method", bounds.absolute_s), ("bound of DeAR", bounds.dear_s))
        for place, (name, seconds) in enumerate(lines):
            label = f"{name}{sent} {unit.of(seconds):.3f}"
            x = axis.place(seconds)
            shapes += _draw_bound(label, x, place, bottom=bottom, width=width)
    return svg.document(Picture("bench", title, width, bottom + _BOTTOM, tuple(shapes)))


def _longest_s(rows: Sequence[Row], bounds: Bounds | None) -> float:
    """Of all that is drawn: a slow iteration or two would flatten the bars, and are not."""
    drawn = [] if bounds is None else [bounds.dear_s]
    for row in rows:
        if row.blocks:
            drawn += [row.median_s, *quartiles(row.totals())]
    return max(drawn, default=1.0)


def _draw_row(row: Row, top: float, axis: Axis, unit: TimeUnit, *, is_alone: bool) -> list[Shape]:
    middle = top + _BAR / 2
    shapes: list[Shape] = [Label(axis.start - _GAP, middle + 4, row.name, "end")]
    if not row.blocks:
        return [*shapes, Label(axis.start + 6, middle + 4, "failed", colour=_BOUND)]
    colour = _OWN if row.label.partition(":")[0] in OURS else _OTHER
    end = axis.place(row.median_s)
    low, high = (axis.place(value) for value in quartiles(row.totals()))
    return [
        *shapes,
        Box(axis.start, top, end - axis.start, _BAR, _PLAIN if is_alone else colour),
        Line(((low, middle), (high, middle)), "ink"),
        Label(axis.stop + _GAP, middle + 4, f"{unit.of(row.median_s):.3f}"),
    ]


def _draw_bound(label: str, x: float, place: int, *, bottom: float, width: float) -> list[Shape]:
    """A line from top to bottom; the two labels stand above and below the bars."""
    half = text_width(label) / 2
    middle = min(max(x, half), width - half)
    y = _TOP - 12 if place == 0 else bottom + 16
    return [
        Line(((x, _TOP - 8), (x, bottom)), _BOUND, dashes=DASHES if place == 0 else ()),
        Label(middle, y, label, "middle", _BOUND),
    ]


def result_json(result: Result) -> str:
    """``result`` with every iteration, as JSON."""
    return _dump(as_plain(result))


def collectives_json(result: CollectivesResult) -> str:
    plain = asdict(result)
    for row, times in zip(plain["rows"], result.rows, strict=True):
        row["overlap"] |= {"imb": times.overlap.imb, "osu": times.overlap.osu}
    return _dump(plain)


def as_plain(result: Result) -> dict[str, Any]:
    """``result`` as mappings, lists, texts and numbers; times in seconds, sizes in bytes."""
    bounds = result.bounds
    plain = asdict(result)
    plain["alone"] = _row_as_plain(result, result.alone)
    plain["rows"] = [_row_as_plain(result, row) for row in result.rows]
    if bounds is not None:
        plain["bounds"] = asdict(bounds) | {
            "dear_s": bounds.dear_s,
            "absolute_s": bounds.absolute_s,
            "compute_s": bounds.compute_s,
            "communication_s": bounds.communication_s,
        }
    return plain


def _row_as_plain(result: Result, row: Row) -> dict[str, Any]:
    plain = asdict(row)
    bounds = result.bounds
    if row.blocks:
        plain |= {"median_s": row.median_s, "cpu_s": row.cpu_s, "peak_bytes": row.peak_bytes}
        plain["per_cpu"] = result.rate(row.median_s)
        if bounds is not None:
            plain["ratio_to_dear_bound"] = row.median_s / bounds.dear_s
            plain["ratio_to_absolute_bound"] = row.median_s / bounds.absolute_s
            plain["exposed_s"] = row.median_s - bounds.compute_s
    return plain


def _dump(plain: dict[str, Any]) -> str:
    versions = {
        "dearmpi": dearmpi.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    return json.dumps(plain | {"versions": versions}, indent=1) + "\n"
