"""Sections of the page: an iteration, its ranks and buckets, and how a run went step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dearmpi.config import EngineConfig
from dearmpi.plan.data.schedule import Conduct
from dearmpi.report.analyse.figures import BucketTime, Figures, exposure_of, least_waiting_of
from dearmpi.report.analyse.replica import Replica, conduct_of, replica_spans, replicate
from dearmpi.report.draw.charts import (
    Bar,
    Series,
    StackPart,
    draw_bars,
    draw_chart,
    draw_stack,
    draw_strip,
)
from dearmpi.report.draw.shape import Key, Picture, Section
from dearmpi.report.draw.tracks import TrackGroup, draw_tracks
from dearmpi.report.draw.units import digits, share_text, size_text, time_text, time_unit
from dearmpi.report.page.limit import SEEN, Change, StepGain, part_step, typical_rank
from dearmpi.report.read.recording import Window, total, union
from dearmpi.report.read.run_files import HistoryRow, RunRecord
from dearmpi.span import Track

MOST_TRACKS = 4
MOST_BARS = 24


def step_sections(figures: Figures, gains: Sequence[StepGain]) -> list[Section]:
    """What a step consists of, and what changes would give, if any."""
    found = (_parts(figures), _gains(figures, gains))
    return [section for section in found if section is not None]


def _parts(figures: Figures) -> Section:
    """The sentence on top is read from this bar."""
    parts, rank = part_step(figures), typical_rank(figures)
    waits = "waits for communication" if figures.one_host else "waits for network"
    named = (
        (Key("computes", "plain"), parts.compute_s),
        (Key(waits, "lost", hatched=True), parts.network_s),
        (Key("waits for late ranks", "late", hatched=True), parts.late_s),
        (Key("loads data", "data"), parts.data_s),
        (Key("other", "faint"), parts.other_s),
    )
    unit = time_unit(parts.whole_s)

    def text(seconds: float) -> str:
        return f"{time_text(seconds)} ({share_text(seconds / parts.whole_s)})"

    def draw(width: float) -> Picture:
        shown = [
            StackPart(key, unit.of(value_s), text(value_s)) for key, value_s in named if value_s > 0
        ]
        title = "Where a step goes"
        return draw_stack("step", title, shown, unit=f"{unit.name} per step", width=width)

    whole = time_text(parts.whole_s)
    caption = f"A step takes {whole}"
    if len(figures.ranks) > 1:
        caption += f"; the parts are those of {rank.label}, the rank of median work"
    if figures.between_s > SEEN * parts.whole_s:
        caption += f". Other includes {time_text(figures.between_s)} between steps"
    rows = tuple(
        (key.name, time_text(value_s), share_text(value_s / parts.whole_s))
        for key, value_s in named
    )
    table = (("part", "time", "share"), *rows, ("step", whole, share_text(1.0)))
    return Section("Where a step goes", draw, f"{caption}.", table)


def _gains(figures: Figures, gains: Sequence[StepGain]) -> Section | None:
    if not gains:
        return None
    whole_s = part_step(figures).whole_s
    unit = time_unit(whole_s)
    rows = [
        ("now", whole_s, ""),
        *((g.change.value, g.step_s, _times_faster(whole_s, g)) for g in gains),
    ]

    def draw(width: float) -> Picture:
        bars = [
            Bar(label, (unit.of(step_s),), f"{time_text(step_s)}{faster}")
            for label, step_s, faster in rows
        ]
        keys = [Key("a step", "first")]
        title = "What a change would give"
        return draw_bars("gains", title, bars, keys=keys, unit=f"{unit.name} per step", width=width)

    caption = "Each change by itself. Waits that vanish are subtracted from the step."
    if any(gain.change is Change.FASTER_LINK for gain in gains):
        caption += " The faster link is simulated with the buckets and passes of the trace."
    if any(gain.at_best for gain in gains):
        caption = (
            "Each change by itself. Without a trace a faster link is not simulated: it saves half "
            "of the communication at best."
        )
    return Section("What a change would give", draw, caption)


def _times_faster(whole_s: float, gain: StepGain) -> str:
    at_best = " at best" if gain.at_best else ""
    times = whole_s / gain.step_s if gain.step_s > 0 else math.inf
    return f"{at_best}, {times:.2f} x as fast" if math.isfinite(times) else at_best


def overlap_sections(run: RunRecord, figures: Figures, replica: Replica | None) -> list[Section]:
    """The sections for which there are figures, most telling first.

    replica: the simulated iteration, drawn below the measured one; None where there is none.
    """
    found = (
        _iteration(run, figures, replica),
        _ranks(figures),
        _exposure(run, figures),
        _layout(run),
    )
    return [section for section in found if section is not None]


def _iteration(run: RunRecord, figures: Figures, replica: Replica | None) -> Section | None:
    recording = run.recording
    window = recording.typical()
    if window is None:
        return None
    times = {one.rank: one for one in figures.ranks}
    ranks = _choose_ranks(sorted(recording.spans), figures)

    groups = [
        TrackGroup(
            times[rank].label if rank in times else f"rank {rank}",
            recording.spans[rank],
            window,
            f"waited {time_text(_waited(run, rank, window))}",
        )
        for rank in ranks
    ]
    caption = (
        f"Iteration {window.iteration}, of median length among those recorded: "
        f"{time_text(window.length_s)}. It begins with the forward of the last rank. "
        "Blank is what the main thread does besides, such as to hand over a step or to evaluate."
    )
    if len(ranks) < len(recording.spans):
        caption += f" Shown are {len(ranks)} of {len(recording.spans)} ranks, with the slowest."
    if replica is not None:
        groups.append(_simulated(run, replica))
        carries = "communication as fast" if figures.one_host else "a link as fast"
        caption += (
            f" Simulated, with these buckets, {carries} as it was here while busy, and no rank "
            f"late: {time_text(replica.timeline.iteration_s)}."
        )
    title = f"Iteration {window.iteration} of {run.name}, by rank"
    return Section(
        "One iteration",
        lambda width: draw_tracks("iteration", title, groups, width=width),
        caption,
    )


def _simulated(run: RunRecord, replica: Replica) -> TrackGroup:
    """The tracks of the iteration that ``replica`` predicts."""
    timeline, conduct = replica.timeline, _conduct(run)
    drawn = replica_spans(
        timeline,
        waits_in_step=bool(conduct and conduct.waits_in_step),
        clips=bool(conduct and not conduct.eager),
    )
    return TrackGroup("simulated", *drawn, f"waits {time_text(timeline.exposed_s)}")


def replica_of(run: RunRecord, figures: Figures) -> Replica | None:
    """What the rank that waits least would have taken, as the run was set up; None where the trace
    does not tell.
    """
    conduct, window = _conduct(run), run.recording.typical()
    rank = least_waiting_of(run.recording, figures.ranks)
    if conduct is None or window is None:
        return None
    return replicate(run.recording, rank, conduct, most_s=window.length_s)


def _conduct(run: RunRecord) -> Conduct | None:
    return conduct_of(
        run.recording,
        window=_window(run),
        plan=run.plan,
        eager=not run.settings.get("max_grad_norm"),
        gather="gradients" if run.settings.get("gather") == "gradients" else "parameters",
    )


def _window(run: RunRecord) -> int:
    window = run.settings.get("window")
    return window if isinstance(window, int) and window > 0 else EngineConfig().window


def _choose_ranks(ranks: list[int], figures: Figures) -> list[int]:
    """At most ``MOST_TRACKS`` ranks: the slowest, the first, and others evenly spread."""
    if len(ranks) <= MOST_TRACKS:
        return ranks
    stride = (len(ranks) - 1) / (MOST_TRACKS - 2)
    spread = [ranks[round(place * stride)] for place in range(MOST_TRACKS - 1)]
    return sorted({*spread, figures.slowest.rank} & set(ranks))


def _waited(run: RunRecord, rank: int, window: Window) -> float:
    waits = [span for span in run.recording.spans[rank] if span.track is Track.WAIT]
    clipped = (window.clip(span) for span in waits)
    return total(union(part for part in clipped if part is not None))


def _ranks(figures: Figures) -> Section | None:
    if len(figures.ranks) < 2:
        return None
    unit = time_unit(figures.step_s)
    keys = [Key("computes", "plain"), Key("waits for communication", "lost", hatched=True)]
    if figures.data_s > SEEN * figures.step_s:
        keys.append(Key("loads data", "data"))
    ranks = figures.ranks
    if len(ranks) > MOST_BARS:
        by_compute = sorted(ranks, key=lambda times: -times.compute_s)
        ranks = tuple(by_compute[: MOST_BARS // 2] + by_compute[-MOST_BARS // 2 :])

    def draw(width: float) -> Picture:
        bars = [
            Bar(
                times.label,
                tuple(map(unit.of, (times.compute_s, times.wait_s, times.data_s)))[: len(keys)],
                f"waits {time_text(times.wait_s)}",
            )
            for times in ranks
        ]
        title = "What each rank does in a step"
        return draw_bars("ranks", title, bars, keys=keys, unit=f"{unit.name} per step", width=width)

    some = (
        ""
        if ranks == figures.ranks
        else (
            f" Shown are the {MOST_BARS // 2} slowest and the {MOST_BARS // 2} fastest of "
            f"{len(figures.ranks)}."
        )
    )
    return Section("Ranks", draw, _compare_ranks(figures) + some)


def _compare_ranks(figures: Figures) -> str:
    slowest, stragglers = figures.slowest, figures.stragglers
    if stragglers is None:
        label = slowest.label[0].upper() + slowest.label[1:]
        return (
            f"{label} computes longest, {time_text(slowest.compute_s)}; no rank is so much slower "
            "all the time that it holds the others up."
        )
    is_one = len(stragglers.places) == 1
    return (
        f"{figures.name(stragglers)} {'computes' if is_one else 'compute'} for "
        f"{time_text(stragglers.busy_s)}; that is {time_text(stragglers.excess_s)} more than the "
        f"median of the others, who wait {time_text(stragglers.waited_s)} longer."
    )


def _exposure(run: RunRecord, figures: Figures) -> Section | None:
    rank = least_waiting_of(run.recording, figures.ranks)
    exposure = exposure_of(run.recording, rank)
    if exposure is None or not exposure.buckets:
        return None
    groups = _group(exposure.buckets)
    unit = time_unit(max(group[1].network_s for group in groups))
    keys = (Key("hidden behind computation", "first"), Key("exposed", "lost", hatched=True))

    def draw(width: float) -> Picture:
        bars = [
            Bar(
                label,
                (unit.of(times.hidden_s), unit.of(times.exposed_s)),
                f"{share_text(times.hidden_s / (times.network_s or 1.0))} hidden",
            )
            for label, times in groups
        ]
        title = "Hidden and exposed communication by bucket"
        name = f"{unit.name} in flight per iteration"
        return draw_bars("buckets", title, bars, keys=keys, unit=name, width=width)

    waited_s, idle_s = exposure.waited_s, exposure.idle_s
    caption = (
        f"Rank {rank}, which waits least, waits {time_text(waited_s)} per iteration: "
        f"{time_text(exposure.first_s)} for the first bucket at the boundary, "
        f"{time_text(idle_s)} while nothing was in flight. Buckets that were in flight together "
        "share that time equally."
    )
    table = _tabulate(exposure.buckets, run.recording.bucket_bytes)
    return Section("Hidden and exposed communication", draw, caption, table)


def _tabulate(buckets: Sequence[BucketTime], sizes: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """A head, and a row for each bucket that was in flight. sizes: in bytes, by bucket."""
    rows = tuple(
        (
            str(one.bucket),
            size_text(sizes[one.bucket]) if one.bucket < len(sizes) else "",
            time_text(one.network_s),
            time_text(one.exposed_s),
            share_text(one.hidden_s / one.network_s),
        )
        for one in buckets
        if one.network_s > 0
    )
    return (("bucket", "size", "in flight", "exposed", "hidden"), *rows)


def _group(buckets: tuple[BucketTime, ...]) -> list[tuple[str, BucketTime]]:
    """At most ``MOST_BARS`` labelled sums of neighbouring buckets."""
    size = -(-len(buckets) // MOST_BARS)
    groups = []
    for start in range(0, len(buckets), size):
        part = buckets[start : start + size]
        first, last = part[0].bucket, part[-1].bucket
        label = f"bucket {first}" if first == last else f"buckets {first} to {last}"
        network_s = sum(one.network_s for one in part)
        exposed_s = sum(one.exposed_s for one in part)
        groups.append((label, BucketTime(first, network_s, exposed_s)))
    return groups


def _layout(run: RunRecord) -> Section | None:
    sizes = [size for size in run.recording.bucket_bytes if size > 0]
    if not sizes:
        return None
    caption = (
        f"Schedule {run.recording.schedule}. {len(sizes)} buckets of {size_text(min(sizes))} to "
        f"{size_text(max(sizes))}, in feed-forward order."
    )
    return Section(
        "Buckets",
        lambda width: draw_strip("layout", "The model's buckets", sizes, width=width),
        caption,
    )


def course_sections(run: RunRecord) -> list[Section]:
    """The sections for which there are figures."""
    found = (
        _step_time(run),
        _throughput(run),
        _loss(run),
        _curve(run, "learning-rate", "Learning rate", lambda row: row.learning_rate),
    )
    return [section for section in found if section is not None]


def _step_time(run: RunRecord) -> Section | None:
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


def _throughput(run: RunRecord) -> Section | None:
    units = run.units

    def rate(row: HistoryRow) -> float | None:
        return None if row.samples_per_s is None else row.samples_per_s * units.per_sample

    return _curve(run, "throughput", "Throughput", rate, unit=f"{units.rate}/s")


def _loss(run: RunRecord) -> Section | None:
    units = run.units

    def scaled(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
        return tuple((step, value * units.loss_scale) for step, value in points)

    training = scaled(run.history.column(lambda row: row.loss))
    held_out = scaled(run.history.column(lambda row: row.eval_loss))
    if not training and not held_out:
        return None
    heading = units.loss[:1].upper() + units.loss[1:]
    series = [
        Series("training", training, "first"),
        Series("held out", held_out, "second", dots=True),
    ]

    def draw(width: float) -> Picture:
        title = f"{heading} over the run"
        return draw_chart("loss", title, series, unit=units.loss, width=width, from_zero=False)

    parts = [
        f"{name} {_from_to(points)}"
        for name, points in (("In training", training), ("held out", held_out))
        if points
    ]
    return Section(heading, draw, ", ".join(parts) + ".")


def _from_to(points: Sequence[tuple[float, float]]) -> str:
    first, last = points[0][1], points[-1][1]
    return f"{first:.4f} to {last:.4f}" if len(points) > 1 else f"{last:.4f}"


def _curve(
    run: RunRecord,
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
