"""A benchmark's result as text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from dearmpi.bench.result import Bounds, Result, Row, quartiles
from dearmpi.report.draw.unit import TimeUnit, count_text, time_unit


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


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width, the first aligned left and the others right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
