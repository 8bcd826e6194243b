"""Plan: the buckets of a model, and the order in which they travel.

Made once, on one rank, from a profile and costs; checked everywhere against the model at hand.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, get_args

from dearmpi.config import Gather, check_choice, nearest
from dearmpi.errors import ConfigError
from dearmpi.plan.data.fields import Fields, check_format, errors_name, read_fields, read_text
from dearmpi.plan.data.layout import BucketLayout, ParamSpec, build_layout
from dearmpi.plan.data.schedule import AllGather, Conduct, Launch, Schedule, Wait
from dearmpi.version import __version__


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of an iteration, and of its parts by themselves, as simulated.

    bound_s: what no plan can be faster than.
    """

    iteration_s: float
    compute_s: float
    communication_s: float
    bound_s: float

    @staticmethod
    def from_fields(data: Fields) -> Prediction:
        """As ``dataclasses.asdict`` gives it. Raises ConfigError for what is missing or wrong."""
        return Prediction(*(data.number(field.name) for field in fields(Prediction)))

    def over(self, micro_batches: int) -> Prediction:
        """The same with gradients accumulated over ``micro_batches``, where this is of one.

        Nothing travels between the feed-forward of the first and the backprop of the last, so the
        computation of all others is added as it is.
        """
        early_s = (micro_batches - 1) * self.compute_s
        return replace(
            self,
            iteration_s=self.iteration_s + early_s,
            compute_s=self.compute_s + early_s,
            bound_s=self.bound_s + early_s,
        )


FORMAT = 1

Choice = TypeVar("Choice", bound=Enum)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the engine follows.

    parameters: names of all, in feed-forward order or bucket by bucket.
    buckets: names by bucket; each bucket's parameters follow one another in ``parameters``, but
        for parameters of another dtype, device or need of gradients in between.
    schedule: over those buckets. window: most operations of a kind in flight.
    idle: buckets in which nothing is trained, so that they never travel.
    eager: made for buckets that are updated during backprop, which gathers in it need.
    fingerprint: of the model, see ``fingerprint``.
    prediction: what it was chosen for. origin: how it was made, in words.
    version: of the package that made it. gather: what it gathers, if that is known.

    Raises ConfigError unless every parameter stands in exactly one bucket.
    """

    parameters: tuple[str, ...]
    buckets: tuple[tuple[str, ...], ...]
    schedule: Schedule
    window: int
    eager: bool
    world_size: int
    fingerprint: str
    prediction: Prediction
    origin: str
    version: str = __version__
    idle: tuple[int, ...] = ()
    gather: Gather | None = None

    def __post_init__(self) -> None:
        placed = Counter(name for bucket in self.buckets for name in bucket)
        listed = Counter(self.parameters)
        if any(count > 1 for count in listed.values()):
            raise ConfigError(
                f"the plan lists parameter {listed.most_common(1)[0][0]} twice; make the plan anew",
                code="plan-inconsistent",
            )
        for name, count in (placed - listed).items():
            where = "in two buckets" if name in listed else "in a bucket, but not in its list"
            raise ConfigError(
                f"the plan's buckets hold {name} {listed[name] + count} times ({where}); each "
                f"of its {len(listed)} parameters must be in one bucket",
                code="plan-inconsistent",
            )
        for name in listed - placed:
            raise ConfigError(
                f"the plan's buckets do not hold {name}, one of its {len(listed)} parameters; "
                "make the plan anew",
                code="plan-inconsistent",
            )
        if len(self.schedule.reduce_scatters) != len(self.buckets):
            raise ConfigError(
                f"the plan has {len(self.buckets)} buckets, but its schedule has "
                f"{len(self.schedule.reduce_scatters)}; make the plan anew",
                code="plan-inconsistent",
            )
        for index in self.idle:
            if index not in range(len(self.buckets)) or self.idle.count(index) > 1:
                raise ConfigError(
                    f"the plan's idle buckets are {list(self.idle)}, with {index}; they must be "
                    f"different ones of its {len(self.buckets)} buckets",
                    code="plan-inconsistent",
                )

    def layout(self, specs: Iterable[ParamSpec], world_size: int) -> BucketLayout:
        """The buckets of the model that has ``specs``, given in any order.

        Raises ConfigError, naming both, if the plan is for another world size or model, or if a
        bucket's parameters do not follow one another.
        """
        if world_size != self.world_size:
            raise ConfigError(
                f"the plan is for world size {self.world_size}, but this job has {world_size} "
                f"ranks; make a plan for {world_size} ranks",
                code="plan-of-other-model",
            )
        by_name = {spec.name: spec for spec in specs}
        self._check_names(by_name)
        found = fingerprint(by_name.values())
        if found != self.fingerprint:
            raise ConfigError(
                "the plan is for another model: shapes or dtypes differ (fingerprint "
                f"{self.fingerprint} in the plan, {found} in the model); make a plan for this "
                "model",
                code="plan-of-other-model",
            )
        self._check_contiguous(by_name)
        groups = [[by_name[name] for name in bucket] for bucket in self.buckets]
        return build_layout(groups, world_size)

    def over(self, micro_batches: int) -> Plan:
        """The same plan where an iteration is ``micro_batches`` like the one it was made for."""
        return replace(self, prediction=self.prediction.over(micro_batches))

    @property
    def conduct(self) -> Conduct:
        """How its buckets travel; without ``gather`` in the plan, parameters are gathered."""
        return Conduct(self.schedule, self.window, self.eager, self.gather or "parameters")

    @property
    def num_early_gathers(self) -> int:
        """Gathers that do not wait for the last reduce-scatter, nor for a gather that does."""
        travelling = [index for index in self.schedule.reduce_scatters if index not in self.idle]
        gathers = [gather for gather in self.schedule.all_gathers if gather.bucket in travelling]
        late = [travelling[-1] in (gather.bucket, gather.after) for gather in gathers]
        return late.index(True) if late else 0

    def summary(self) -> str:
        """A summary of half a line, for people."""
        seconds, early = self.prediction.iteration_s, self.num_early_gathers
        buckets = self._count_buckets()
        return f"{self.schedule.name}, {buckets}, {early} early gathers, {seconds:.4f} s"

    def describe(self) -> str:
        """A description of a few lines, for people."""
        sizes = ", ".join(str(len(bucket)) for bucket in self.buckets)
        seconds = self.prediction
        return "\n".join(
            [
                f"{self.schedule.name}, {self._count_buckets()}, world size {self.world_size}, "
                f"{self.window} in flight; {self.origin}, dearmpi {self.version}",
                f"tensors per bucket: {sizes}",
                f"gathers before the last reduce-scatter: {self.num_early_gathers}",
                f"predicted iteration {seconds.iteration_s:.4f} s (computation "
                f"{seconds.compute_s:.4f} s, communication {seconds.communication_s:.4f} s, no "
                f"plan below {seconds.bound_s:.4f} s)",
                f"network: {self.schedule.sequence(without=self.idle)}",
            ]
        )

    def _count_buckets(self) -> str:
        frozen = f" and {len(self.idle)} of frozen parameters" if self.idle else ""
        return f"{len(self.buckets) - len(self.idle)} buckets{frozen}"

    def to_json(self) -> str:
        """The plan as a file."""
        schedule = self.schedule
        values = {
            "format": FORMAT,
            "version": self.version,
            "origin": self.origin,
            "world_size": self.world_size,
            "fingerprint": self.fingerprint,
            "window": self.window,
            "eager": self.eager,
            **({"gather": self.gather} if self.gather else {}),
            "prediction": asdict(self.prediction),
            "schedule": {
                "name": schedule.name,
                "launch": schedule.launch.value,
                "wait": schedule.wait.value,
                "reduce_scatters": list(schedule.reduce_scatters),
                "all_gathers": [[gather.bucket, gather.after] for gather in schedule.all_gathers],
            },
            "parameters": list(self.parameters),
            "buckets": [list(bucket) for bucket in self.buckets],
            "idle": list(self.idle),
        }
        lines = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items())
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @staticmethod
    def from_json(text: str, place: str = "plan") -> Plan:
        """What ``to_json`` wrote; ``place`` names it in errors.

        Raises ConfigError for another format, and for what is missing, wrong or contradictory.
        """
        data = read_fields(text, place, mark="buckets", cure="make the plan anew")
        version = check_format(data, place, current=FORMAT, default=None)
        with errors_name(place):
            return Plan(
                parameters=data.texts("parameters"),
                buckets=tuple(_parse_bucket(data, names) for names in data.items("buckets")),
                schedule=_parse_schedule(data.fields("schedule")),
                window=data.integer("window", least=1),
                eager=data.truth("eager"),
                world_size=data.integer("world_size", least=1),
                fingerprint=data.text("fingerprint"),
                prediction=Prediction.from_fields(data.fields("prediction")),
                origin=data.text("origin"),
                version=version,
                idle=_indices(data, "idle", data.items("idle", [])),
                gather=_parse_gather(data),
            )

    def _check_names(self, by_name: dict[str, ParamSpec]) -> None:
        unknown = [name for name in self.parameters if name not in by_name]
        missing = sorted(by_name.keys() - set(self.parameters))
        if unknown or missing:
            example = (
                f"the model has no parameter {unknown[0]}"
                if unknown
                else f"the plan has no parameter {missing[0]}"
            )
            raise ConfigError(
                f"the plan is for another model: it has {len(self.parameters)} parameters, the "
                f"model under this optimizer has {len(by_name)}, and {example}; make a plan "
                "for this model",
                code="plan-of-other-model",
            )

    def _check_contiguous(self, by_name: dict[str, ParamSpec]) -> None:
        places: dict[str, int] = {}
        counts: Counter[tuple[str, str, bool]] = Counter()
        for name in self.parameters:
            kind = by_name[name].storage_kind
            places[name] = counts[kind]
            counts[kind] += 1
        for index, bucket in enumerate(self.buckets):
            for one, other in zip(bucket, bucket[1:], strict=False):
                if places[other] != places[one] + 1:
                    raise ConfigError(
                        f"bucket {index} of the plan is not contiguous: {other} does not "
                        f"follow {one} in the plan's list of parameters; make the plan anew",
                        code="plan-inconsistent",
                    )


def read_plan(path: str | Path) -> Plan:
    """The plan in the file at ``path``. Raises ConfigError if it is none."""
    return Plan.from_json(
        read_text(path, mark="buckets", words=("auto", "none", "bayes")), str(path)
    )


def fingerprint(specs: Iterable[ParamSpec]) -> str:
    """A digest of all names, shapes and dtypes, whatever their order."""
    facts = sorted((spec.name, spec.shape, spec.dtype) for spec in specs)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _parse_bucket(data: Fields, names: object) -> tuple[str, ...]:
    return Fields({"buckets": names}, data.place).texts("buckets")


def _parse_schedule(data: Fields) -> Schedule:
    return Schedule(
        name=data.text("name"),
        reduce_scatters=_indices(data, "reduce_scatters", data.items("reduce_scatters")),
        all_gathers=tuple(
            AllGather(*_indices(data, "all_gathers", pair, length=2))
            for pair in data.items("all_gathers")
        ),
        launch=_parse_choice(data, "launch", Launch),
        wait=_parse_choice(data, "wait", Wait),
    )


def _parse_gather(data: Fields) -> Gather | None:
    gather: Gather | None = None
    if "gather" in data:
        given: Any = data.text("gather")
        check_choice("gather", given, get_args(Gather))
        gather = given
    return gather


def _indices(
    data: Fields, key: str, values: object, *, length: int | None = None
) -> tuple[int, ...]:
    if not (
        isinstance(values, Sequence)
        and all(isinstance(value, int) and not isinstance(value, bool) for value in values)
        and (length is None or len(values) == length)
    ):
        wanted = "numbers of buckets" if length is None else "pairs [bucket, after]"
        raise data.problem(key, f"holds {values!r}; it must hold {wanted}")
    return tuple(values)


def _parse_choice(data: Fields, key: str, kind: type[Choice]) -> Choice:
    value = data.text(key)
    for choice in kind:
        if choice.value == value:
            return choice
    known = [choice.value for choice in kind]
    near = nearest(value, known)
    raise data.problem(key, f"is {value!r}; {near}choose one of {', '.join(known)}")
