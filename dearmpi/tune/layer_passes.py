"""Layer passes: marks while a model computes, on the host or on a device, and the layers and times
that follow from them. ``OwnHook`` is a hook of one model, which its copies do not have.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, Protocol

import torch
from torch import nn

from dearmpi.plan.data.layout import ParamSpec
from dearmpi.plan.data.workload import LayerSpec
from dearmpi.plan.model.profile import LayerTimes


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
    splits = [_split_pass(one, stopwatch) for one in passes]
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


def _split_pass(one: Pass, stopwatch: Stopwatch) -> tuple[dict[str, float], float]:
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


def find_homes(model: nn.Module, names: Mapping[nn.Parameter, str]) -> dict[str, list[str]]:
    """Parameter to the modules that hold it, several for a tied one; both by name."""
    homes: dict[str, list[str]] = {name: [] for name in names.values()}
    for place, module in model.named_modules():
        for param in module.parameters(recurse=False):
            if param in names:
                homes[names[param]].append(place)
    return homes


def build_layers(
    specs: Sequence[ParamSpec], homes: Mapping[str, Sequence[str]], times: PassTimes
) -> tuple[tuple[LayerSpec, ...], tuple[LayerTimes, ...]]:
    """All layers in feed-forward order, with their times; each of ``specs`` stands in one of them.

    A tied parameter belongs to the first layer that used it. A parameter may also be used without
    its own module being called, by a parent (``nn.MultiheadAttention`` reads ``out_proj.weight``)
    or in a function. Its module then is a layer too, with its place in feed-forward taken from
    when its gradient was ready. What is trained but never had a gradient comes first of all: its
    bucket waits for the end of backprop, and all behind it in the order of reduce-scatters too.
    """
    order = list(times.feed_forward_s)
    owners = {spec.name: _owner(homes[spec.name], order) for spec in specs}
    ready = _ready_layers(owners, times)
    for layer in sorted(ready.keys() - set(order), key=lambda layer: (-ready[layer], layer)):
        order.insert(_place(layer, order, ready), layer)
    idle = [spec for spec in specs if spec.trained and spec.name not in times.ready_s]
    owned: dict[str, list[ParamSpec]] = {layer: [] for layer in order}
    owned[order[0]] += idle
    for spec in specs:
        if spec not in idle:
            owned.get(owners[spec.name], owned[order[-1]]).append(spec)
    layers = [
        LayerSpec(
            layer,
            tuple(owned[layer]),
            uses=tuple(n for n, places in homes.items() if layer in places and owners[n] != layer),
        )
        for layer in order
    ]
    backprop = _backprop(order, ready)
    feed_forward = _feed_forward(order, times, backprop)
    return tuple(layers), tuple(map(LayerTimes, feed_forward, backprop))


def _owner(places: Sequence[str], order: Sequence[str]) -> str:
    """Of the modules that hold a parameter the one called first, or if none was, the first."""
    return next((layer for layer in order if layer in places), places[0])


def _ready_layers(owners: Mapping[str, str], times: PassTimes) -> dict[str, float]:
    """Layer to when the last of its gradients was ready."""
    ready: dict[str, float] = {}
    for name, seconds in times.ready_s.items():
        ready[owners[name]] = max(seconds, ready.get(owners[name], 0.0))
    return ready


def _place(layer: str, order: Sequence[str], ready: Mapping[str, float]) -> int:
    """Where a layer that was never called stands: behind the one whose gradients came next."""
    later = [other for other in order if other in ready and ready[other] > ready[layer]]
    if not later:
        return 0
    return order.index(min(later, key=lambda other: ready[other])) + 1


def _backprop(order: Sequence[str], ready: Mapping[str, float]) -> list[float]:
    """Seconds of each layer, so that from the last to the first they add up to ``ready``.

    A layer that is ready before one that follows it in feed-forward takes none: in a plan, it is
    ready with that one.
    """
    seconds, now_s = [], 0.0
    for layer in reversed(order):
        seconds.append(max(0.0, ready.get(layer, 0.0) - now_s))
        now_s += seconds[-1]
    return seconds[::-1]


def _feed_forward(order: Sequence[str], times: PassTimes, backprop: Sequence[float]) -> list[float]:
    """Seconds of each layer; where none was called, in proportion to backprop."""
    if times.feed_forward_s:
        return [times.feed_forward_s.get(layer, 0.0) for layer in order]
    whole = sum(backprop) or 1.0
    return [times.unclaimed_s * part / whole for part in backprop]


Mark = Any


class Stopwatch(Protocol):
    """Takes marks while a model computes, and says later how far they lie apart."""

    def mark(self) -> Mark:
        """This point of the computation."""
        ...

    def settle(self) -> None:
        """Wait until every mark has been reached."""
        ...

    def seconds(self, start: Mark, stop: Mark) -> float:
        """From one mark to another, both settled."""
        ...


def no_wait() -> float:
    return 0.0


class HostStopwatch:
    """For models on the CPU, where a mark is reached when it is taken.

    waited: seconds so far that do not count, such as ``DistributedOptimizer.waited_s``.
    """

    def __init__(self, waited: Callable[[], float] = no_wait) -> None:
        self._waited = waited

    def mark(self) -> Mark:
        """Seconds on a clock that stands still while this process waits."""
        return time.perf_counter() - self._waited()

    def settle(self) -> None:
        """Nothing is outstanding."""

    def seconds(self, start: Mark, stop: Mark) -> float:
        return float(stop - start)


class TimingEvent(Protocol):
    """What is needed of ``torch.cuda.Event``."""

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any, /) -> float: ...


def record_event(device: torch.device) -> TimingEvent:
    """An event on the stream in use on ``device``, which need not be the thread's own device."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    recorded: TimingEvent = event
    return recorded


class DeviceStopwatch:
    """For models on a device: marks are events on the stream in use, which block nothing."""

    def __init__(self, record: Callable[[], TimingEvent]) -> None:
        """``record``: makes an event that is recorded now."""
        self._record = record
        self._last: dict[int, TimingEvent] = {}

    def mark(self) -> Mark:
        """An event in the order of the kernels."""
        event = self._record()
        self._last[threading.get_ident()] = event
        return event

    def settle(self) -> None:
        """Wait for the last event of each thread: autograd marks from threads of its own."""
        for event in self._last.values():
            event.synchronize()

    def seconds(self, start: Mark, stop: Mark) -> float:
        return float(start.elapsed_time(stop)) / 1e3


def stopwatch_for(model: torch.nn.Module, waited: Callable[[], float] = no_wait) -> Stopwatch:
    """The one for the device on which the parameters of ``model`` are."""
    devices = (param.device for param in model.parameters() if param.is_cuda)
    device = next(devices, None)
    return (
        HostStopwatch(waited) if device is None else DeviceStopwatch(partial(record_event, device))
    )


class OwnHook:
    """Calls ``hook``, of whatever kind.

    A copy of the module, or one that is read from a file, is an ordinary one: it has a hook that
    does nothing.
    """

    __slots__ = ("_hook",)

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *arguments: Any) -> Any:
        return self._hook(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return _hook_of_copies, ()


def _hook_of_copies() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    return None
