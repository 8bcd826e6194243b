"""Method: one way to train a model on all ranks, and how it is found by its name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, get_type_hints

from torch import Tensor, nn
from torch.optim import Optimizer

from dearmpi.comm.world import World
from dearmpi.config import CommDtype, EngineConfig, check_choice
from dearmpi.engine.optimizer import DistributedOptimizer
from dearmpi.engine.setup.checks import check_parameters
from dearmpi.engine.setup.settings import check_plan
from dearmpi.engine.setup.spec import optimized_parameters
from dearmpi.errors import ConfigError

ALONE = "alone"
SCHEDULES = ("serial", "wfbp", "dear")
PLANNED = "planned"
BAYES = "bayes"
OURS = (*SCHEDULES, PLANNED, BAYES)
_OF_DEVICES = ("cuda_buffers", "update_on")
_MOST_CAP_MB = 65536  # as the engine's own


class Steps(Protocol):
    """What the benchmark needs of an optimizer."""

    def step(self) -> Any: ...

    def zero_grad(self) -> Any: ...


def backpropagate(loss: Tensor) -> None:
    """Backprop in plain torch."""
    loss.backward()


def never() -> bool:
    """Of a method that has nothing to tune."""
    return False


def do_nothing() -> None:
    """Where there is nothing to do."""


def say_nothing() -> str:
    """Of a method that has nothing to tell."""
    return ""


@dataclass(frozen=True, slots=True)
class Entrant:
    """A model made ready to be trained by one method.

    An iteration is ``zero_grad``, the loss of ``model``, ``backward`` of it, ``step``.
    is_tuning: whether it still tunes itself, in iterations before those that warm up; the same on
        all ranks.
    finish: make the parameters those of the last step. close: give back what was taken.
    describe: what it has chosen for itself, in half a line.
    """

    model: nn.Module
    optimizer: Steps
    backward: Callable[[Tensor], None] = backpropagate
    is_tuning: Callable[[], bool] = never
    finish: Callable[[], None] = do_nothing
    close: Callable[[], None] = do_nothing
    describe: Callable[[], str] = say_nothing


@dataclass(frozen=True, slots=True)
class Setup:
    """What a method is given, the same on every rank but for the rank itself.

    make_optimizer: the optimizer for given parameters. options: what follows the method's name.
    """

    world: World
    model: nn.Module
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    options: Mapping[str, str] = field(default_factory=dict)


Factory = Callable[[Setup], Entrant]


def accept(setup: Setup) -> None:
    """Of a method whose options have an effect on any model and any number of ranks."""


def no_package(world: World) -> None:
    """Of a method that needs nothing besides this package and torch."""


@dataclass(frozen=True, slots=True)
class Method:
    """A method by name. label: as the user wrote it, options included.

    uses_group: ``torch.distributed`` is initialised over gloo before it enters, and taken down
        after it.
    waits_in_mpi: a rank of it that fails leaves the others waiting in this package's operations.
    tunes_itself: in iterations before those that warm up.
    check: raises ConfigError where it cannot enter; it communicates with nobody.
    find: raises, before anything is measured, where what it needs cannot be imported; all ranks
        call it, whatever the others meet.
    """

    label: str
    factory: Factory
    options: Mapping[str, str] = field(default_factory=dict)
    uses_group: bool = True
    waits_in_mpi: bool = False
    tunes_itself: bool = False
    check: Callable[[Setup], None] = accept
    find: Callable[[World], object] = no_package

    @property
    def comm_dtype(self) -> CommDtype:
        """In what it sends fp32, as far as its options say."""
        return cast(CommDtype, self.options.get("comm_dtype", "fp32"))

    def enter(self, setup: Setup) -> Entrant:
        """Make the model ready (collective)."""
        return self.factory(setup)


def alone(setup: Setup) -> Entrant:
    """Plain torch without any communication: each rank trains by itself."""
    return Entrant(setup.model, setup.make_optimizer(setup.model.parameters()))


def ours(name: str) -> Factory:
    """This package's engine with the schedule ``name``, or by a plan that it makes for itself."""

    def enter(setup: Setup) -> Entrant:
        planned = name == PLANNED
        schedule = {} if planned else {"schedule": name}
        optimizer = DistributedOptimizer(
            setup.make_optimizer(setup.model.parameters()),
            setup.model,
            world=setup.world,
            config=read_config({**schedule, "eager": "true", **setup.options}),
            plan="auto" if planned else None,
        )
        return Entrant(
            setup.model,
            optimizer,
            is_tuning=lambda: optimizer.is_planning,
            finish=optimizer.synchronize,
            close=optimizer.close,
            describe=lambda: (
                "" if optimizer.plan is None else f"{optimizer.plan.summary()} predicted"
            ),
        )

    return enter


def check_precision(setup: Setup) -> None:
    """Raise ConfigError for the engine's settings that have no effect on the model's parameters."""
    optimizer = setup.make_optimizer(setup.model.parameters())
    names = optimized_parameters(optimizer, setup.model)
    check_parameters(optimizer, names, config=read_config(setup.options))


def read_config(options: Mapping[str, str]) -> EngineConfig:
    """The engine's settings from text. A bare number, under the name ``cap``, is the bucket cap.

    Raises ConfigError for a setting that does not exist, or a value that it cannot have.
    """
    kinds = get_type_hints(EngineConfig)
    values: dict[str, Any] = {}
    for given, text in options.items():
        name = "bucket_cap_mb" if given == "cap" else given
        if name not in kinds:
            raise ConfigError(
                f"the engine has no setting {given!r}; it has {', '.join(sorted(kinds))}"
            )
        if name in values:
            raise ConfigError(
                f"the bucket cap is given twice, as cap={options['cap']} and as "
                f"bucket_cap_mb={options['bucket_cap_mb']}; leave out one of the two"
            )
        values[name] = _read_value(name, text, kinds[name])
    return EngineConfig(**values)


def refuse_settings(name: str, options: Mapping[str, str]) -> None:
    """Raise ConfigError for settings that do not exist or fit, or without effect on ``name``."""
    if "schedule" in options:
        raise ConfigError(
            f"its name says the schedule; leave schedule={options['schedule']} out, or take a "
            f"method by that name, one of {', '.join(SCHEDULES)}"
        )
    config = read_config(options)
    for setting in _OF_DEVICES:
        value = getattr(config, setting)
        if value != getattr(EngineConfig(), setting):
            raise ConfigError(
                f"{setting} is {value!r}, but models are measured on the host, where it has no "
                "effect; leave it out"
            )
    if name == PLANNED:
        check_plan("auto", config)


def _read_value(name: str, text: str, kind: object) -> object:
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if kind in (int, int | None):
            return int(text)
        if kind in (float, float | None):
            return float(text)
    except (KeyError, ValueError):
        words: dict[object, str] = {bool: "true or false", float | None: "a number"}
        kind_text = words.get(kind, "a whole number")
        raise ConfigError(f"{name} is {text!r}; it must be {kind_text}") from None
    return text


def asked_options(comm_dtype: CommDtype) -> dict[str, str]:
    """The options of a method that is to send ``comm_dtype``, as all are."""
    return {} if comm_dtype == "fp32" else {"comm_dtype": comm_dtype}


def read_options(parts: Iterable[str], *, label: str) -> dict[str, str]:
    """``["8", "window=3"]`` as ``{"cap": "8", "window": "3"}``. Raises ConfigError otherwise."""
    options: dict[str, str] = {}
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals:
            name, value = "cap", part
        if not name or not value or name in options:
            raise ConfigError(
                f"method {label!r}: cannot read {part!r}; write NAME[:CAP_MB][:OPTION=VALUE]"
            )
        options[name] = value
    return options


def refuse_unknown(options: Mapping[str, str], known: Sequence[str]) -> None:
    """Raise ConfigError for options that a method does not have; ``known`` are those it has."""
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(f"it has no option {', '.join(unknown)}; it has {', '.join(known)}")


def read_flag(options: Mapping[str, str], name: str, *, default: bool) -> bool:
    """Whether the option ``name`` is true. Raises ConfigError where it is not true or false."""
    text = options.get(name, str(default).lower())
    check_choice(name, text, ("true", "false"))
    return text == "true"


def read_cap(text: str) -> float:
    """A bucket cap in MiB. Raises ConfigError for what is none."""
    try:
        cap = float(text)
    except ValueError:
        cap = math.nan
    if not 0 <= cap <= _MOST_CAP_MB:
        raise ConfigError(
            f"the bucket cap is {text!r}; it must be a number of MiB, 0 or more and at most "
            f"{_MOST_CAP_MB}"
        )
    return cap
