"""Workload: a model as its layers' parameters and cost, without the model itself."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from dearmpi.config import known_names
from dearmpi.errors import ConfigError
from dearmpi.plan.data.fields import MOST_INTEGER, Fields, read_fields
from dearmpi.plan.data.layout import ParamSpec

EQUAL = "equal"
_EQUAL_LAYERS = 24
_TEXT_MODELS = "bert"
_PLAIN = ParamSpec("", ())  # what a file does not say of a parameter


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer, in feed-forward order.

    params: the parameters that it owns, under their names in the model.
    flops: of its feed-forward, per sample.
    uses: names of parameters of other layers that it computes with as well (tied weights).
    """

    name: str
    params: tuple[ParamSpec, ...]
    flops: int = 0
    uses: tuple[str, ...] = ()

    @property
    def used(self) -> tuple[str, ...]:
        """Names of all parameters that it computes with."""
        return (*(spec.name for spec in self.params), *self.uses)

    def short_name(self, spec: ParamSpec) -> str:
        """The name that the layer itself has for one of its parameters."""
        return spec.name.removeprefix(f"{self.name}.")


def float_layer(
    name: str, shapes: dict[str, tuple[int, ...]], flops: int, *, uses: tuple[str, ...] = ()
) -> LayerSpec:
    """A layer of fp32 parameters on the CPU; ``shapes`` by the layer's own names for them."""
    params = tuple(ParamSpec(full_name(name, short), shape) for short, shape in shapes.items())
    return LayerSpec(name, params, flops, uses)


def full_name(layer: str, param: str) -> str:
    """The name that the model has for ``param`` of ``layer``; the model itself is called ``""``."""
    return f"{layer}.{param}" if layer else param


@dataclass(frozen=True, slots=True)
class Workload:
    """A model to replay or to plan for. batch_size: samples per rank and iteration.

    Raises ConfigError for a layer or parameter that stands twice, for the use of a parameter that
    no layer owns, and where there are none.
    """

    name: str
    source: str
    layers: tuple[LayerSpec, ...]
    batch_size: int
    unit: str

    def __post_init__(self) -> None:
        for what, names in (
            ("layer", [layer.name for layer in self.layers]),
            ("parameter", [spec.name for spec in self.params()]),
        ):
            name, count = max(Counter(names).items(), key=lambda pair: pair[1], default=("", 1))
            if count > 1:
                raise ConfigError(
                    f"{self.name} has {what} {name} {count} times; each must be there once",
                    code="profile-inconsistent",
                )
        if not self.num_tensors:
            raise ConfigError(
                f"{self.name} has {len(self.layers)} layers and no parameter, so nothing to train; "
                "profile a model that has some",
                code="profile-inconsistent",
            )
        for spec in self.params():
            if spec.nbytes > MOST_INTEGER:
                raise ConfigError(
                    f"{self.name}: {spec.name} has the shape {list(spec.shape)}, of "
                    f"{spec.itemsize} bytes each; a parameter has {MOST_INTEGER} bytes at most",
                    code="profile-inconsistent",
                )
        owned = {spec.name for spec in self.params()}
        for layer in self.layers:
            for name in layer.uses:
                if name not in owned:
                    raise ConfigError(
                        f"{self.name}: layer {layer.name} uses {name}, which no layer owns; "
                        "add it to a layer's params",
                        code="profile-inconsistent",
                    )

    def params(self) -> Iterator[ParamSpec]:
        """All parameters, in feed-forward order of the layers that own them."""
        for layer in self.layers:
            yield from layer.params

    def cut(self, pieces: Mapping[str, Sequence[ParamSpec]]) -> Workload:
        """The same model with each parameter in pieces, given by its name."""
        layers = tuple(
            replace(
                layer,
                params=tuple(piece for spec in layer.params for piece in pieces[spec.name]),
                uses=tuple(piece.name for name in layer.uses for piece in pieces[name]),
            )
            for layer in self.layers
        )
        return replace(self, layers=layers)

    @property
    def num_parameters(self) -> int:
        return sum(spec.numel for spec in self.params())

    @property
    def num_tensors(self) -> int:
        return sum(1 for _ in self.params())

    def shares(self) -> list[float]:
        """Each layer's share of the computation; they add up to 1."""
        total = sum(layer.flops for layer in self.layers)
        if not total:
            return [1 / len(self.layers)] * len(self.layers)
        return [layer.flops / total for layer in self.layers]

    def first_users(self) -> dict[str, int]:
        """By parameter name, the place among ``layers`` of the first that computes with it."""
        places: dict[str, int] = {}
        for place, layer in enumerate(self.layers):
            for name in layer.used:
                places.setdefault(name, place)
        return places


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
        names = [*known, f"{EQUAL}:MB[:LAYERS]"]
        raise ConfigError(
            f"there is no workload {name!r}{known_names(name, names)}", code="unknown-choice"
        )
    path = resources.files("dearmpi").joinpath("workloads", f"{name}.json")
    text, place = path.read_text(encoding="utf-8"), str(path)
    return parse_workload(read_fields(text, place, mark="layers", cure="install dearmpi anew"))


def parse_workload(data: Fields) -> Workload:
    """The workload that a file of ``dearmpi/workloads`` or a profile holds.

    Raises ConfigError, naming the place, for what is missing or wrong.
    """
    layers: list[LayerSpec] = []
    for layer in data.each("layers"):
        name = layer.text("name")
        params = tuple(_parse_param(layer, name, entry) for entry in layer.items("params"))
        uses = layer.texts("uses", [])
        if not params and "uses" not in layer and layers and layers[0].params:
            # The models' files name no ties: their only layers without parameters are decoders,
            # tied to the embedding, which comes first.
            uses = (layers[0].params[0].name,)
        flops = layer.integer("forward_flops_per_sample", 0)
        layers.append(LayerSpec(name, params, flops, uses))
    name = data.text("name")
    key = "batch_size_in_paper" if "batch_size_in_paper" in data else "batch_size"
    unit = "seq" if name.startswith(_TEXT_MODELS) else "img"
    return Workload(
        name=name,
        source=data.text("source"),
        layers=tuple(layers),
        batch_size=data.integer(key, least=1),
        unit=data.text("unit", unit),
    )


def layer_fields(layer: LayerSpec) -> dict[str, Any]:
    """What ``parse_workload`` reads of one layer."""
    return {
        "name": layer.name,
        "params": [_param_entry(layer, spec) for spec in layer.params],
        "forward_flops_per_sample": layer.flops,
        "uses": list(layer.uses),
    }


def _param_entry(layer: LayerSpec, spec: ParamSpec) -> list[Any]:
    entry: list[Any] = [layer.short_name(spec), list(spec.shape)]
    kind = {
        key: getattr(spec, key)
        for key in ("itemsize", "dtype", "device", "trained")
        if getattr(spec, key) != getattr(_PLAIN, key)
    }
    if full_name(layer.name, entry[0]) != spec.name:  # tied, and called after another layer
        kind["full_name"] = spec.name
    return [*entry, kind] if kind else entry


def _parse_param(layer: Fields, owner: str, entry: Any) -> ParamSpec:
    """``[name, shape]``, or ``[name, shape, {"dtype": "bfloat16", "itemsize": 2}]``."""
    if not (
        isinstance(entry, list)
        and len(entry) in (2, 3)
        and isinstance(entry[0], str)
        and isinstance(entry[1], list)
        and all(type(size) is int and size >= 0 for size in entry[1])  # True is no size
    ):
        raise layer.problem("params", f"holds {json.dumps(entry)}; it must be [name, shape]")
    kind = Fields(entry[2] if len(entry) == 3 else {}, f"{layer.place}: {entry[0]}")
    return ParamSpec(
        kind.text("full_name", full_name(owner, entry[0])),
        tuple(entry[1]),
        itemsize=kind.integer("itemsize", _PLAIN.itemsize, least=1),
        dtype=kind.text("dtype", _PLAIN.dtype),
        device=kind.text("device", _PLAIN.device),
        trained=kind.truth("trained", _PLAIN.trained),
    )


def _equal(name: str) -> Workload:
    _, *numbers = name.split(":")
    try:
        megabytes = float(numbers[0])
        count = int(numbers[1]) if len(numbers) > 1 else _EQUAL_LAYERS
    except (IndexError, ValueError):
        raise ConfigError(
            f"workload {name!r} is not of the form equal:MB[:LAYERS]; write it like equal:100:24",
            code="malformed-value",
        ) from None
    numel = int(megabytes * 1e6 / 4 / max(count, 1)) if math.isfinite(megabytes * 1e6) else 0
    if len(numbers) > 2 or count < 1 or numel < 1:
        raise ConfigError(
            f"workload {name!r}: {megabytes:g} MB in {count} layers; each needs 4 bytes at least",
            code="out-of-range",
        )
    layers = tuple(float_layer(f"layer{i}", {"weight": (numel,)}, 1) for i in range(count))
    return Workload(name, f"{count} equal layers", layers, batch_size=32, unit="img")
