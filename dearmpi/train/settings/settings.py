"""Settings of a run: what was chosen, converted and free of contradictions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from dearmpi.comm.watchdog.watchdog import StallLimits
from dearmpi.config import EngineConfig
from dearmpi.errors import ConfigError
from dearmpi.plan.data.plan_choice import DECIDED_BY_PLAN
from dearmpi.train.settings.choices import RunChoices
from dearmpi.train.settings.setting import Setting, named


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings(RunChoices):
    """What a run goes by.

    Raises ConfigError for a value that a setting cannot have, and for settings that contradict
    each other or have no effect.
    """

    def __post_init__(self) -> None:
        for name, about in SETTINGS.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, about.convert(value, label=name))
        for first, second in EXCLUSIVE:
            if getattr(self, first) is not None and getattr(self, second) is not None:
                raise ConfigError(
                    f"{first} is {getattr(self, first)} and {second} is {getattr(self, second)}; "
                    "give one of them",
                    code="settings-contradict",
                )
        self._check_step_schedule()
        self._check_local()
        self._check_checkpoints()
        self.stall_limits()
        self.engine()
        self._check_deterministic()
        if self.compress == "auto":
            self._check_choice_of_codec()
        if self.plan == "bayes" and self.bucket_cap_mb is not None:
            raise ConfigError(
                f"bucket_cap_mb is {self.bucket_cap_mb}, but plan bayes searches for it; leave "
                "out one of them",
                code="settings-contradict",
            )
        if "data" in self.task_options and self.data is not None:
            raise ConfigError(
                "data is given twice, as --data and as --task-option data=; give one of them",
                code="given-twice",
            )

    def _check_deterministic(self) -> None:
        """Raise ConfigError for settings that let timing choose the order of summation."""
        if not self.deterministic:
            return
        for name, left_open, chosen, cure in (
            ("reduce_scatter", ("auto",), "", "ring, native or exchange"),
            ("topology", ("auto",), "", "flat or hosts"),
            ("plan", PLANNING, "the buckets and ", "none, or the file of a plan"),
        ):
            if (value := getattr(self, name)) in left_open:
                raise ConfigError(
                    f"deterministic needs a fixed {name}: with {value}, timing chooses {chosen}"
                    f"the order of summation; use {cure}",
                    code="settings-contradict",
                )

    def _check_checkpoints(self) -> None:
        if self.checkpoint_interval != "auto":
            if self.mtbf_hours is not None:
                raise ConfigError(
                    f"mtbf_hours is {self.mtbf_hours:g}, but checkpoint_interval is "
                    f"{self.checkpoint_interval}; leave it out, or give checkpoint_interval auto",
                    code="setting-without-effect",
                )
            return
        if self.mtbf_hours is None:
            raise ConfigError(
                "checkpoint_interval is 'auto', but mtbf_hours is missing; give the mean hours "
                "between failures of one rank",
                code="setting-missing",
            )
        usual = RunChoices.__dataclass_fields__["checkpoint_time_s"].default
        if self.checkpoint_time_s != usual:
            raise ConfigError(
                f"checkpoint_time is {self.checkpoint_time_s:g} s, but checkpoint_interval 'auto' "
                "decides on it; leave one of the two out",
                code="settings-contradict",
            )

    def _check_choice_of_codec(self) -> None:
        """Raise ConfigError for settings that leave no time to choose, or forbid it."""
        why = ""
        if self.deterministic:
            why = "deterministic is set, but with compress auto timing chooses what is sent"
        elif self.plan == "bayes":
            why = "plan is bayes, which changes buckets while compress auto measures"
        if why:
            raise ConfigError(
                f"{why}; name a codec, such as compress int8, or leave one of the two out",
                code="settings-contradict",
            )

    def _check_local(self) -> None:
        """Raise ConfigError for settings that local steps lack, or that have no effect without."""
        if not self.trains_alone:
            for name in OF_LOCAL_STEPS:
                if getattr(self, name) not in (None, 0):
                    raise ConfigError(
                        f"{name} is {getattr(self, name)}, but without sync_every gradients are "
                        "averaged in each step; leave it out, or give sync_every, or algorithm "
                        "scaffnew or tamuna",
                        code="setting-without-effect",
                    )
            return
        self._check_algorithm()
        self._refuse_beside(
            ("plan", (None, "none")),
            ("on_nan", ("stop",)),
            ("gather", ("parameters",)),
            ("schedule", ("dear",)),
            ("trace", (None,)),
            ("ema", (None,)),
            ("batch_shares", ("even",)),
            ("precision", ("fp32", "bf16", "fp64")),
        )

    def _check_algorithm(self) -> None:
        """Raise ConfigError for what an algorithm decides by itself."""
        left_out = (None, 0)
        if self.algorithm not in OF_ROUNDS:
            self._refuse_beside(*((name, left_out) for name in ("p", "sparsity", "cohort")))
        if self.algorithm == "scaffnew":
            self._refuse_beside(("sparsity", left_out), ("cohort", left_out))
        if self.algorithm not in (None, "diloco"):
            self._refuse_beside(*((name, left_out) for name in OF_DILOCO))
        if self.algorithm in ("codasca", *OF_ROUNDS):
            self._refuse_beside(("sync_after", left_out), ("compress", ("none",)))
        if self.algorithm in OF_ROUNDS:
            self._refuse_beside(
                ("sync_every", left_out),
                ("optimizer", ("SGD", "sgd")),
                ("momentum", left_out),
                ("weight_decay", left_out),
                ("no_decay", left_out),
                ("lr_schedule", ("constant",)),
                ("warmup_steps", left_out),
                ("warmup_epochs", left_out),
                ("optimizer_options", ({},)),
            )

    def _refuse_beside(self, *served: tuple[str, tuple[Any, ...]]) -> None:
        """Raise ConfigError for a setting that has none of the values that local steps serve."""
        chosen = "algorithm" if self.sync_every is None or self.algorithm else "sync_every"
        for name, values in served:
            if (value := getattr(self, name)) not in values:
                raise ConfigError(
                    f"{chosen} is {getattr(self, chosen)}, but {name} is {value!r}, which does not "
                    "go with it; leave one of the two out",
                    code="settings-contradict",
                )

    def _check_step_schedule(self) -> None:
        for name in ("lr_milestones", "lr_gamma"):
            if self.lr_schedule != "step" and getattr(self, name) is not None:
                raise ConfigError(
                    f"{name} has no effect with lr_schedule {self.lr_schedule!r}; "
                    "leave it out, or use lr_schedule step",
                    code="setting-without-effect",
                )
        shares = self.lr_milestones or ()
        if any(not 0 < share < 1 for share in shares) or list(shares) != sorted(set(shares)):
            raise ConfigError(
                f"lr_milestones is {shares}; they are shares of the run, each above 0 and below "
                "1, in rising order",
                code="out-of-range",
            )

    @property
    def all_task_options(self) -> dict[str, str]:
        """The task's options, ``data`` among them."""
        return {**self.task_options, **({} if self.data is None else {"data": self.data})}

    @property
    def trackers(self) -> tuple[str, ...]:
        """Where rows of metrics go besides the run folder."""
        return (*(self.tracker or ()), *(["tensorboard"] if self.tensorboard else []))

    def stall_limits(self) -> StallLimits:
        """How long a wait for other ranks may last; ConfigError where that makes no sense."""
        return StallLimits(self.stall_warning_s, self.stall_abort_s)

    def leaves_buckets_open(self) -> bool:
        """Whether a run may plan its buckets without ``plan="auto"``."""
        engine, default = self.engine(), EngineConfig()
        return (
            self.plan is None
            and not self.trains_alone
            and not self.deterministic
            and all(getattr(engine, name) == getattr(default, name) for name in DECIDED_BY_PLAN)
        )

    @property
    def trains_alone(self) -> bool:
        """Whether ranks take local steps between exchanges."""
        return self.sync_every is not None or self.algorithm in OF_ROUNDS

    @property
    def updates_early(self) -> bool:
        """Whether a bucket may be updated during backprop. Clipping and the scaler of fp16 wait for
        the whole gradient.
        """
        return self.max_grad_norm == 0 and self.precision != "fp16"

    def engine(self) -> EngineConfig:
        """The part that the engine reads.

        The trainer sets the learning rate before backprop, so a bucket may be updated once it is
        reduced.
        """
        chosen = {f.name: getattr(self, f.name) for f in fields(EngineConfig) if f.name in SETTINGS}
        return EngineConfig(**chosen, eager=self.updates_early)

    def as_plain(self) -> dict[str, Any]:
        """What was chosen, as plain data that a config file can hold; without the run's place and
        the time that this start of it may take.
        """
        left_out = ("name", "resume", "max_time_s")
        values = {name: getattr(self, name) for name in SETTINGS if name not in left_out}
        return {
            name: _plain(value)
            for name, value in values.items()
            if value is not None and value != {}
        }


OF_DILOCO = ("sync_fragments", "sync_delay", "sync_mix", "outer_lr", "outer_momentum")
OF_LOCAL_STEPS = ("algorithm", "sync_after", "p", "sparsity", "cohort", *OF_DILOCO)
OF_ROUNDS = ("scaffnew", "tamuna")  # algorithms that exchange at random, by an SGD of their own
OF_OWN_CODE = ("task", "optimizer")  # which may name a file
PLANNING = ("auto", "bayes")  # plans that are found while training
EXCLUSIVE = (
    ("epochs", "max_steps"),
    ("warmup_steps", "warmup_epochs"),
    ("log_interval", "log_time_s"),
)

SETTINGS: Mapping[str, Setting] = {
    f.name: named(f.metadata["setting"], f.name) for f in fields(RunSettings)
}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(part) for part in value]
    return value


def check_resumable(
    stored: Mapping[str, Any], settings: RunSettings, *, names: Iterable[str] = SETTINGS
) -> None:
    """Raise ConfigError, with both values, where a fixed setting differs from the checkpoint's
    (``stored``). Only the settings ``names`` are compared.
    """
    new = settings.as_plain()
    stored = {name: _plain(value) for name, value in stored.items() if value != {}}
    for name in names:
        before, now = stored.get(name), new.get(name)
        if name in OF_OWN_CODE:  # whose file may be called from another folder, or lie there now
            before, now = _without_folder(before), _without_folder(now)
        if SETTINGS[name].fixed and before != now:
            raise ConfigError(
                f"{name} is {_show(new.get(name))}, but the run to resume has "
                f"{_show(stored.get(name))}; leave out --{SETTINGS[name].flag}, or start a new run",
                code="resumed-setting-changed",
            )


def _without_folder(name: Any) -> Any:
    return name.rpartition("/")[2] if isinstance(name, str) and ".py:" in name else name


def _show(value: Any) -> str:
    return "none" if value is None else repr(value)
