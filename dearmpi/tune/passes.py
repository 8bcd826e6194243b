"""Passes: feed-forwards with their backprops, as marks, and what several of them say together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from dearmpi.tune.stopwatch import Mark, Stopwatch


@dataclass(frozen=True, slots=True)
class Leg:
    """From one layer's start to the next one's arrival. layer: None before the first layer."""

    layer: str | None
    start: Mark
    stop: Mark


@dataclass(slots=True)
class Pass:
    """One feed-forward and its backprop.

    ended: when the feed-forward was over. ready: parameter to the last time that its gradient
        was complete.
    """

    legs: list[Leg] = field(default_factory=list)
    ended: Mark = None
    ready: dict[str, Mark] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Medians over passes, in seconds.

    feed_forward_s: layer to time, in the order in which they were first used.
    unclaimed_s: feed-forward in which no layer was seen.
    ready_s: parameter to when its gradient was ready, from the end of the feed-forward on.
    """

    feed_forward_s: dict[str, float]
    unclaimed_s: float
    ready_s: dict[str, float]


def summarize(passes: Sequence[Pass], stopwatch: Stopwatch) -> PassTimes:
    """What ``passes``, whose marks are settled, took; at least one."""
    splits = [_feed_forward(one, stopwatch) for one in passes]
    layers = dict.fromkeys(layer for split, _ in splits for layer in split)
    ready: dict[str, list[float]] = {}
    for one in passes:
        for name, mark in one.ready.items():
            ready.setdefault(name, []).append(max(0.0, stopwatch.seconds(one.ended, mark)))
    return PassTimes(
        {layer: median(split.get(layer, 0.0) for split, _ in splits) for layer in layers},
        median(unclaimed for _, unclaimed in splits),
        {name: median(times) for name, times in ready.items()},
    )


def _feed_forward(one: Pass, stopwatch: Stopwatch) -> tuple[dict[str, float], float]:
    """Each layer's time, and what belongs to none; what precedes a layer's use is its own."""
    times: dict[str, float] = {}
    before_s = 0.0
    for leg in one.legs:
        seconds = stopwatch.seconds(leg.start, leg.stop)
        if leg.layer is None:
            before_s += seconds
            continue
        times[leg.layer] = times.get(leg.layer, 0.0) + before_s + seconds
        before_s = 0.0
    return times, before_s
