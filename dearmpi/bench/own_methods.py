"""Methods of this package: one per schedule, by a plan, or with a searched bucket cap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_type_hints

from dearmpi.bench.method import (
    Entrant,
    Factory,
    Method,
    Setup,
)
from dearmpi.config import MIB, EngineConfig
from dearmpi.engine.optimizer import DistributedOptimizer
from dearmpi.engine.setup.checks import check_parameters, optimized_parameters
from dearmpi.errors import ConfigError
from dearmpi.local.local_optimizer import LocalOptimizer
from dearmpi.plan.data.local_schedule import LocalSchedule, OuterRule
from dearmpi.plan.data.plan_choice import check_plan
from dearmpi.train.loop.planning import NUM_TRIALS, CapSearch

ALONE = "alone"
SCHEDULES = ("serial", "wfbp", "dear")
PLANNED = "planned"
BAYES = "bayes"
LOCAL = "local"
OURS = (*SCHEDULES, PLANNED, BAYES, LOCAL)
_OF_DEVICES = ("cuda_buffers", "update_on")


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
            is_tuning=lambda: optimizer.is_planning or optimizer.is_choosing,
            finish=optimizer.synchronize,
            close=optimizer.close,
            describe=lambda: (
                "" if optimizer.plan is None else f"{optimizer.plan.summary()} predicted"
            ),
        )

    return enter


_LOCAL_KINDS: Mapping[str, object] = {
    "sync_every": int,
    "fragments": int,
    "delay": int,
    "mix": float,
    "outer_lr": float,
    "outer_momentum": float,
}


def read_local(options: Mapping[str, str]) -> tuple[LocalSchedule, OuterRule, EngineConfig]:
    """When ranks exchange, how shared values move, and in what settings of the engine.

    The defaults are local SGD every 8 steps. Raises ConfigError for options that do not fit.
    """
    own = {name: text for name, text in options.items() if name in _LOCAL_KINDS}
    values: dict[str, Any] = {
        name: _read_value(name, text, _LOCAL_KINDS[name]) for name, text in own.items()
    }
    schedule = LocalSchedule(
        values.get("sync_every", 8), values.get("fragments", 1), values.get("delay", 0)
    )
    rule = OuterRule(
        values.get("outer_lr", 1.0), values.get("outer_momentum", 0.0), values.get("mix", 0.0)
    )
    rest = {name: text for name, text in options.items() if name not in own}
    return schedule, rule, read_config(rest)


def local(setup: Setup) -> Entrant:
    """Ranks that train alone and exchange every so many steps."""
    schedule, rule, config = read_local(setup.options)
    optimizer = LocalOptimizer(
        setup.make_optimizer(setup.model.parameters()),
        setup.model,
        sync_every=schedule.sync_every,
        fragments=schedule.fragments,
        delay=schedule.delay,
        mix=rule.mix,
        outer_lr=rule.lr,
        outer_momentum=rule.momentum,
        compress=config.compress,
        world=setup.world,
        config=config,
    )
    return Entrant(setup.model, optimizer, finish=optimizer.show_anchor, close=optimizer.close)


def local_method(label: str, options: Mapping[str, str]) -> Method:
    """The method ``label``. Raises ConfigError for options that do not exist or fit."""
    schedule, rule, _ = read_local(options)

    def progress(num_steps: int) -> tuple[float, float]:
        found = [
            rule.progress(schedule, fragment, num_steps) for fragment in range(schedule.fragments)
        ]
        return min(found), max(found)

    return Method(
        label,
        local,
        options,
        uses_group=False,
        waits_in_mpi=True,
        period=schedule.sync_every,
        progress=progress,
    )


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
                f"the engine has no setting {given!r}; it has {', '.join(sorted(kinds))}",
                code="unknown-method-option",
            )
        if name in values:
            raise ConfigError(
                f"the bucket cap is given twice, as cap={options['cap']} and as "
                f"bucket_cap_mb={options['bucket_cap_mb']}; leave out one of the two",
                code="given-twice",
            )
        values[name] = _read_value(name, text, kinds[name])
    return EngineConfig(**values)


def refuse_settings(name: str, options: Mapping[str, str]) -> None:
    """Raise ConfigError for settings that do not exist or fit, or without effect on ``name``."""
    if "schedule" in options:
        raise ConfigError(
            f"its name says the schedule; leave schedule={options['schedule']} out, or take a "
            f"method by that name, one of {', '.join(SCHEDULES)}",
            code="settings-contradict",
        )
    config = read_config(options)
    for setting in _OF_DEVICES:
        value = getattr(config, setting)
        if value != getattr(EngineConfig(), setting):
            raise ConfigError(
                f"{setting} is {value!r}, but models are measured on the host, where it has no "
                "effect; leave it out",
                code="setting-without-effect",
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
        raise ConfigError(
            f"{name} is {text!r}; it must be {kind_text}", code="malformed-value"
        ) from None
    return text


class SearchedSteps:
    """``optimizer``, whose steps ``search`` times."""

    def __init__(self, optimizer: DistributedOptimizer, search: CapSearch) -> None:
        self._optimizer, self._search = optimizer, search

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def step(self) -> Any:
        """A step of the optimizer, after which the search may lay out other buckets."""
        result = self._optimizer.step()
        self._search.stepped()
        return result


def bayes(setup: Setup) -> Entrant:
    """DeAR's order with the best of ten caps, which are tried in iterations that do not count."""
    check_bayes(setup)
    entrant = ours("dear")(setup)
    optimizer = entrant.optimizer
    assert isinstance(optimizer, DistributedOptimizer)
    search = CapSearch(optimizer, setup.world)
    return replace(
        entrant,
        optimizer=SearchedSteps(optimizer, search),
        is_tuning=lambda: search.best is None,
        describe=lambda: _describe(search),
    )


def check_bayes(setup: Setup) -> None:
    """Raise ConfigError where nothing can be searched for."""
    check_precision(setup)
    if setup.world.size == 1:
        raise ConfigError(
            "one rank sends nothing, so that no bucket cap is better than another; start several "
            "with mpirun, or leave bayes out",
            code="one-rank-only",
        )


def refuse_cap(options: Mapping[str, str]) -> None:
    """Raise ConfigError where a bucket cap is given, which the search is to find."""
    given = [name for name in ("cap", "bucket_cap_mb") if name in options]
    if given:
        raise ConfigError(
            f"bayes searches for the bucket cap, but {options[given[0]]} MiB is given; leave it "
            f"out, or measure dear:{options[given[0]]}",
            code="settings-contradict",
        )


def _describe(search: CapSearch) -> str:
    if (best := search.best) is None:
        return ""
    return (
        f"{best.cap_bytes / MIB:.3g} MiB, the best of {NUM_TRIALS} caps, "
        f"{best.seconds:.4f} s in its trial"
    )
