"""Settings: what a script chooses, by name or as a plan, and whether all of it has an effect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from dearmpi.config import EngineConfig, nearest
from dearmpi.errors import ArgumentError, ConfigError
from dearmpi.plan.data.plan import Plan, read_plan

DECIDED_BY_PLAN = ("schedule", "bucket_cap_mb", "window")
_PLANS = "give 'auto', the path of a plan or a Plan, or leave it out"


def check_plan(plan: Plan | str | None, config: EngineConfig) -> None:
    """Raise ConfigError if ``plan`` leaves a setting without effect, or needs another."""
    if plan is None:
        return
    defaults = EngineConfig()
    for name in DECIDED_BY_PLAN:
        if getattr(config, name) != getattr(defaults, name):
            raise ConfigError(
                f"{name} is {getattr(config, name)!r}, but the plan decides on it; leave out one "
                "of the two, or where a resumed run has its plan from before, give --plan none",
                code="plan-contradicts-settings",
            )
    if isinstance(plan, Plan) and plan.eager and not config.eager:
        raise ConfigError(
            "the plan is made for eager=True (buckets are updated during backprop), but eager is "
            "False; set it, or make a plan without",
            code="plan-contradicts-settings",
        )
    if isinstance(plan, Plan) and plan.gather not in (None, config.gather):
        raise ConfigError(
            f"the plan is made for gather={plan.gather!r}, but gather is {config.gather!r}; set "
            "it, or make a plan with that",
            code="plan-contradicts-settings",
        )


def check_growth(plan: Plan | str | None) -> None:
    """Raise ConfigError if ``plan`` has no place for further parameters."""
    if isinstance(plan, Plan):
        raise ConfigError(
            f"the plan is for {len(plan.parameters)} parameters, and add_param_group adds some; "
            "add them before the plan is made, or leave plan out",
            code="plan-of-other-model",
        )


def choose_plan(
    plan: Plan | Literal["auto"] | str | Path | None, config: EngineConfig
) -> Plan | Literal["auto"] | None:
    """The plan itself where ``plan`` is the file of one. Raises ConfigError as ``check_plan``."""
    if plan is not None and not isinstance(plan, Plan | str | Path):
        raise ConfigError(f"plan is of type {type(plan).__name__}; {_PLANS}", code="wrong-type")
    chosen: Plan | Literal["auto"] | None = "auto"
    if plan != "auto":
        if isinstance(plan, str) and not Path(plan).exists():
            raise ConfigError(
                f"cannot read the plan {plan!r}: there is no such file; "
                f"{nearest(plan, ['auto'])}{_PLANS}",
                code="file-missing",
            )
        chosen = read_plan(plan) if isinstance(plan, str | Path) else plan
    check_plan(chosen, config)
    return chosen


def merge_settings(config: EngineConfig | None, settings: Mapping[str, Any]) -> EngineConfig:
    """``config``, or the default, with ``settings``. Raises ArgumentError for unknown ones."""
    known = list(EngineConfig.__dataclass_fields__)
    unknown = sorted(set(settings) - set(known))
    if unknown:
        near = [match for name in unknown for match in get_close_matches(name, known, n=1)]
        hint = f" (did you mean {', '.join(dict.fromkeys(near))}?)" if near else ""
        raise ArgumentError(
            f"unknown setting {', '.join(unknown)}{hint}; settings are {', '.join(known)}",
            code="unknown-argument",
        )
    return replace(config or EngineConfig(), **settings)
