"""Profile: a workload with the time that each layer's computation takes on one device."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from dearmpi.errors import ConfigError
from dearmpi.plan.data.fields import check_format, errors_name, read_fields, read_text
from dearmpi.plan.data.workload import LayerSpec, Workload, layer_fields, parse_workload
from dearmpi.plan.model.cost import MOST_S
from dearmpi.version import __version__

FORMAT = 1
"""Of the file; the models' own have none, and are of the first."""


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one layer's computation, communication and waits left out."""

    feed_forward_s: float
    backprop_s: float


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """Times of all layers of ``workload``, in its order.

    device: what computed, in words. world_size: ranks that measured; times hold for each of them.
    version: of the package that measured.

    Raises ConfigError unless there is one pair of times for each layer. Each time must be a number
    from 0 to ``MOST_S``.
    """

    workload: Workload
    times: tuple[LayerTimes, ...]
    device: str = "cpu"
    world_size: int = 1
    version: str = __version__

    def __post_init__(self) -> None:
        if len(self.times) != len(self.workload.layers):
            raise ConfigError(
                f"{self.workload.name} has {len(self.workload.layers)} layers, but the profile "
                f"has times of {len(self.times)}",
                code="profile-inconsistent",
            )
        for layer, times in self.layers():
            for what, seconds in (
                ("feed_forward_s", times.feed_forward_s),
                ("backprop_s", times.backprop_s),
            ):
                if not 0 <= seconds <= MOST_S:
                    raise ConfigError(
                        f"layer {layer.name}: {what} is {seconds}; it must be from 0 to {MOST_S:g}",
                        code="out-of-range",
                    )

    def layers(self) -> Iterator[tuple[LayerSpec, LayerTimes]]:
        """Each layer with its times, in feed-forward order."""
        return zip(self.workload.layers, self.times, strict=True)

    @property
    def feed_forward_s(self) -> float:
        return math.fsum(times.feed_forward_s for times in self.times)

    @property
    def backprop_s(self) -> float:
        return math.fsum(times.backprop_s for times in self.times)

    def backprop_stops_s(self) -> list[float]:
        """When backprop is over for each layer, in seconds from the beginning of it all."""
        return [*accumulate(times.backprop_s for times in reversed(self.times))][::-1]

    def with_shorter_backprop(self, seconds: float) -> ModelProfile:
        """The same, its backprop shorter by ``seconds`` in all, but not by more than half."""
        if not self.backprop_s:
            return self
        factor = max(0.5, 1 - seconds / self.backprop_s)
        times = (replace(one, backprop_s=factor * one.backprop_s) for one in self.times)
        return replace(self, times=tuple(times))

    def to_json(self) -> str:
        """The form of ``dearmpi/workloads/*.json``, with the times of each layer."""
        workload = self.workload
        header = {
            "format": FORMAT,
            "name": workload.name,
            "source": workload.source,
            "unit": workload.unit,
            "batch_size": workload.batch_size,
            "world_size": self.world_size,
            "device": self.device,
            "version": self.version,
            "num_tensors": workload.num_tensors,
            "num_parameters": workload.num_parameters,
        }
        layers = [
            {
                **layer_fields(layer),
                "feed_forward_s": times.feed_forward_s,
                "backprop_s": times.backprop_s,
            }
            for layer, times in self.layers()
        ]
        lines = ",\n".join(f"  {json.dumps(layer)}" for layer in layers)
        return f'{json.dumps(header)[:-1]}, "layers": [\n{lines}\n]}}\n'


def profile_workload(
    workload: Workload, *, feed_forward_s: float, backprop_s: float
) -> ModelProfile:
    """``workload`` with the two times divided among its layers by their FLOPs."""
    times = tuple(
        LayerTimes(feed_forward_s * share, backprop_s * share) for share in workload.shares()
    )
    return ModelProfile(workload, times)


def parse_profile(text: str, place: str) -> ModelProfile:
    """What ``ModelProfile.to_json`` wrote; ``place`` names it in errors.

    Raises ConfigError for another format, and, naming the layer, for a time that is missing,
    negative, too long or not a number.
    """
    data = read_fields(text, place, mark="layers", cure="profile the model anew")
    version = check_format(data, place, current=FORMAT, default=FORMAT)
    with errors_name(place):
        workload, times = parse_workload(data), []
        for layer, fields in zip(workload.layers, data.each("layers"), strict=True):
            fields.place = f"{place}: layer {layer.name}"
            times.append(LayerTimes(fields.number("feed_forward_s"), fields.number("backprop_s")))
        return ModelProfile(
            workload,
            tuple(times),
            device=data.text("device", "cpu"),
            world_size=data.integer("world_size", 1, least=1),
            version=version,
        )


def read_profile(path: str | Path) -> ModelProfile:
    """The profile in the file at ``path``. Raises ConfigError if it is none."""
    return parse_profile(read_text(path, mark="layers"), str(path))
