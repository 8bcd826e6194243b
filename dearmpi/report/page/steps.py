"""Steps: sections on how a run went from step to step, from its metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dearmpi.report.draw.chart import Series, draw_chart
from dearmpi.report.draw.shape import Picture
from dearmpi.report.draw.text import digits, time_text, time_unit
from dearmpi.report.page.html import Section
from dearmpi.report.read.history import HistoryRow
from dearmpi.report.read.run_files import Run


def course_sections(run: Run) -> list[Section]:
    """The sections for which there are figures."""
    found = (
        _step_time(run),
        _curve(run, "throughput", "Throughput", _samples, unit="samples/s"),
        _loss(run),
        _curve(run, "learning-rate", "Learning rate", _learning_rate),
    )
    return [section for section in found if section is not None]


def _step_time(run: Run) -> Section | None:
    steps = run.history.column(lambda row: row.step_s)
    if not steps:
        return None
    unit = time_unit(run.history.typical(lambda row: row.step_s) or 1.0)
    series = [
        Series(
            name, tuple((step, unit.of(value)) for step, value in run.history.column(get)), colour
        )
        for name, get, colour in (
            ("step", lambda row: row.step_s, "first"),
            ("of it waiting for communication", lambda row: row.exposed_s, "lost"),
        )
    ]

    def draw(width: float) -> Picture:
        title = "Step time over the run"
        unit_text = f"{unit.name} per step"
        return draw_chart("step-time", title, series, unit=unit_text, width=width)

    typical_s = run.history.typical(lambda row: row.step_s) or 0.0
    slowest_s = max(value for _, value in steps[1:] or steps)
    caption = f"On rank 0: median {time_text(typical_s)}, longest {time_text(slowest_s)}"
    caption += "; the first row, which pays for starting, is left out." if steps[1:] else "."
    return Section("Step time", draw, caption)


def _loss(run: Run) -> Section | None:
    training = run.history.column(lambda row: row.loss)
    held_out = run.history.column(lambda row: row.eval_loss)
    if not training and not held_out:
        return None
    series = [
        Series("training", training, "first"),
        Series("held out", held_out, "second", dots=True),
    ]

    def draw(width: float) -> Picture:
        title = "Loss over the run"
        return draw_chart("loss", title, series, unit="loss", width=width, from_zero=False)

    parts = [
        f"{name} {_from_to(points)}"
        for name, points in (("In training", training), ("held out", held_out))
        if points
    ]
    return Section("Loss", draw, ", ".join(parts) + ".")


def _from_to(points: Sequence[tuple[float, float]]) -> str:
    first, last = points[0][1], points[-1][1]
    return f"{first:.4f} to {last:.4f}" if len(points) > 1 else f"{last:.4f}"


def _curve(
    run: Run,
    name: str,
    heading: str,
    value: Callable[[HistoryRow], float | None],
    *,
    unit: str = "",
) -> Section | None:
    points = run.history.column(value)
    if not points:
        return None

    def draw(width: float) -> Picture:
        series = [Series(heading, points, "first")]
        axis = unit or heading.lower()
        return draw_chart(name, f"{heading} over the run", series, unit=axis, width=width)

    numbers = [number for _, number in points]
    low, high, last = map(digits, (min(numbers), max(numbers), numbers[-1]))
    caption = f"Between {low} and {high}{unit and f' {unit}'}, last {last}."
    return Section(heading, draw, caption)


def _samples(row: HistoryRow) -> float | None:
    return row.samples_per_s


def _learning_rate(row: HistoryRow) -> float | None:
    return row.learning_rate
