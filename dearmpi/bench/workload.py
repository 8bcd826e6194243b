"""Workload: a model as its layers' parameter shapes and cost, without the model itself."""

from __future__ import annotations

import json
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import resources
from math import prod
from typing import Any

from dearmpi.errors import ConfigError

EQUAL = "equal"
_EQUAL_LAYERS = 24
_TEXT_MODELS = "bert"


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer, in feed-forward order.

    params: name and shape of each parameter that it owns.
    tied_to: the layer whose parameters it computes with instead of its own.
    flops: of its feed-forward, per sample; in proportion to its share of the time.
    """

    name: str
    params: tuple[tuple[str, tuple[int, ...]], ...]
    flops: int
    tied_to: str | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """A model to replay. batch_size: samples per rank and iteration, as in the paper."""

    name: str
    source: str
    layers: tuple[LayerSpec, ...]
    batch_size: int
    unit: str

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(prod(shape) for layer in self.layers for _, shape in layer.params)

    @property
    def num_tensors(self) -> int:
        """Number of parameters."""
        return sum(len(layer.params) for layer in self.layers)

    def shares(self) -> list[float]:
        """Each layer's share of the computation; they add up to 1."""
        total = sum(layer.flops for layer in self.layers)
        return [layer.flops / total for layer in self.layers]

    def tied_parameters(self) -> set[str]:
        """Names of parameters that two layers compute with."""
        owners = {layer.tied_to for layer in self.layers}
        return {f"{one.name}.{one.params[0][0]}" for one in self.layers if one.name in owners}


def workload_names() -> list[str]:
    """The models that come with the package."""
    folder = resources.files("dearmpi").joinpath("workloads")
    names = (entry.name for entry in folder.iterdir())
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))


def is_workload(name: str) -> bool:
    """Whether ``name`` is one that ``read_workload`` knows, if only by its kind."""
    return name in workload_names() or name.partition(":")[0] == EQUAL


def read_workload(name: str) -> Workload:
    """The workload ``name``: one of ``workload_names()``, or ``equal:MB[:LAYERS]``.

    ``equal:100:24`` has 24 layers of one parameter each, 100 million bytes in all. Raises
    ConfigError for any other name.
    """
    if name.partition(":")[0] == EQUAL:
        return _equal(name)
    known = workload_names()
    if name not in known:
        close = get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(
            f"there is no workload {name!r}{hint} Choose one of {', '.join(known)}, or "
            "equal:MB[:LAYERS]"
        )
    path = resources.files("dearmpi").joinpath("workloads", f"{name}.json")
    return _parse(json.loads(path.read_text(encoding="utf-8")))


def _parse(data: dict[str, Any]) -> Workload:
    first = data["layers"][0]["name"]
    layers = tuple(
        LayerSpec(
            layer["name"],
            tuple((name, tuple(shape)) for name, shape in layer["params"]),
            layer["forward_flops_per_sample"],
            # The only layers without parameters are decoders, tied to the embedding.
            tied_to=None if layer["params"] else first,
        )
        for layer in data["layers"]
    )
    return Workload(
        name=data["name"],
        source=data["source"],
        layers=layers,
        batch_size=data["batch_size_in_paper"],
        unit="seq" if data["name"].startswith(_TEXT_MODELS) else "img",
    )


def _equal(name: str) -> Workload:
    _, *numbers = name.split(":")
    try:
        megabytes = float(numbers[0])
        count = int(numbers[1]) if len(numbers) > 1 else _EQUAL_LAYERS
    except (IndexError, ValueError):
        raise ConfigError(f"workload {name!r} is not of the form equal:MB[:LAYERS]") from None
    numel = int(megabytes * 1e6 / 4 / max(count, 1))
    if len(numbers) > 2 or count < 1 or numel < 1:
        raise ConfigError(
            f"workload {name!r}: {megabytes:g} MB in {count} layers; each needs 4 bytes at least"
        )
    layers = tuple(LayerSpec(f"layer{i}", (("weight", (numel,)),), 1) for i in range(count))
    return Workload(name, f"{count} equal layers", layers, batch_size=32, unit="img")
