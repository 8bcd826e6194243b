"""Sources: where settings come from, and which wins.

Flag, environment, file, the checkpoint that is resumed, the task's recommendation, default: in
this order, setting by setting. Options given as NAME=VALUE are merged, name by name.
"""

from __future__ import annotations

import shlex
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dearmpi.config import known_names, nearest
from dearmpi.errors import ConfigError
from dearmpi.plan.data.plan_choice import DECIDED_BY_PLAN
from dearmpi.train.settings.settings import EXCLUSIVE, OF_ROUNDS, SETTINGS, RunSettings

# Not what counts otherwise there, such as a batch size per device. Names that are alike but for a
# letter or two are found without.
_OTHERS: Mapping[str, str] = {
    "data": "data_dir data_path dataset train_data",
    "workers": "num_workers dataloader_num_workers",
    "epochs": "num_epochs num_train_epochs max_epochs n_epochs",
    "max_steps": "max_iters num_iters num_steps max_train_steps total_steps",
    "batch_size": "global_batch_size train_batch_size bs",
    "gradient_accumulation_steps": "accumulate_grad_batches accumulation_steps grad_accum",
    "optimizer": "opt optim",
    "optimizer_options": "optimizer_arg optimizer_args optim_args opt_args",
    "lr": "learning_rate base_lr",
    "weight_decay": "wd",
    "max_grad_norm": "clip_grad clip_grad_norm gradient_clip_val gradient_clipping",
    "ema": "ema_decay model_ema model_ema_decay use_ema",
    "lr_schedule": "lr_scheduler lr_scheduler_type scheduler sched",
    "sync_every": "local_steps inner_steps num_inner_steps diloco_local_steps",
    "sync_fragments": "num_fragments model_fragments",
    "sync_delay": "fragment_sync_delay",
    "sync_mix": "fragment_update_alpha",
    "precision": "amp bf16 fp16 mixed_precision dtype",
    "compile": "torch_compile use_compile compile_model",
    "activation_checkpointing": "gradient_checkpointing checkpoint_activations grad_checkpointing",
    "threads": "num_threads",
    "run_folder": "output_dir out_dir save_dir",
    "name": "run_name exp_name experiment_name job_name",
    "resume": "resume_from resume_from_checkpoint",
    "checkpoint_interval": "save_interval save_steps checkpoint_every",
    "keep_best": "load_best_model_at_end save_best save_best_only",
    "patience": "early_stopping_patience early_stopping",
    "keep": "save_total_limit keep_checkpoints",
    "log_interval": "logging_steps log_every log_freq print_freq",
    "eval_interval": "eval_steps eval_every",
}
SYNONYMS = {other: ours for ours, others in _OTHERS.items() for other in others.split()}


def our_name(name: str) -> str | None:
    """Our name of the setting that another tool calls ``name``; None if that is not known."""
    return SYNONYMS.get(name.lstrip("-").replace("-", "_").lower())


PREFIX = "DEAR_TRAIN_"
CONFIG_VARIABLE = f"{PREFIX}CONFIG"

# What suits one optimizer says nothing about another.
OF_AUC = ("coda", "codasca")  # algorithms with an optimizer of their own
OF_THE_OPTIMIZER = ("optimizer_options", "lr", "momentum", "weight_decay", "no_decay")
OF_THE_STEP_SCHEDULE = ("lr_milestones", "lr_gamma")
# Of the process that trains, not of the run: MPI is asked for it before a checkpoint is looked for.
OF_THE_PROCESS = ("progress", "stall_warning_s", "stall_abort_s")
# Without devices they have no effect.
OF_DEVICES = ("cuda_buffers", "update_on")
OF_THE_PLACE = ("run_folder", "name", "resume")
# What is needed before a task can be built, which therefore has nothing to say about it.
BEFORE_THE_TASK = (
    *("task", "task_options", "data", *OF_THE_PLACE),
    *("device", "deterministic", "seed", "threads", "workers"),
    *OF_THE_PROCESS,
)
OPTIONS_WITH_SETTINGS = {
    "optimizer_options": {"lr", "momentum", "weight_decay"},
    "task_options": {"data"},
}

SourceKind = Literal["flag", "environment", "file", "checkpoint", "task"]


@dataclass(frozen=True, slots=True)
class Source:
    """Settings as one source gives them, converted to their types.

    origin: the file or folder they were read from, if any.
    """

    kind: SourceKind
    values: Mapping[str, Any]
    origin: str = ""

    def label(self, name: str) -> str:
        """What to call the setting ``name`` in a message about this source."""
        match self.kind:
            case "flag":
                return f"--{SETTINGS[name].flag}"
            case "environment":
                return variable(name)
            case _:
                return f"{name} in {self.origin}"


def variable(name: str) -> str:
    """The environment variable of the setting ``name``."""
    return PREFIX + SETTINGS[name].flag.replace("-", "_").upper()


def make_source(kind: SourceKind, given: Mapping[str, object], *, origin: str = "") -> Source:
    """Convert what ``given`` holds; None means not given. Raises ConfigError for wrong values and
    for two settings that exclude each other.
    """
    bare = Source(kind, {}, origin)
    values = {
        name: SETTINGS[name].convert(value, label=bare.label(name))
        for name, value in given.items()
        if value is not None
    }
    for first, second in EXCLUSIVE:
        if first in values and second in values:
            raise ConfigError(
                f"{bare.label(first)} {values[first]} and {bare.label(second)} {values[second]} "
                "exclude each other; give one of them",
                code="settings-contradict",
            )
    _unpack(values, bare)
    return Source(kind, values, origin)


def without(source: Source, names: Container[str]) -> Source:
    """``source`` without the settings ``names``."""
    kept = {name: value for name, value in source.values.items() if name not in names}
    return replace(source, values=kept)


def _unpack(values: dict[str, Any], bare: Source) -> None:
    """Move options that have a setting of their own to that, so that any source above can win.

    Raises ConfigError where both are given, and differ.
    """
    for options, names in OPTIONS_WITH_SETTINGS.items():
        pairs = dict(values.get(options, {}))
        for name in names & pairs.keys():
            label = f"{bare.label(options)} {name}="
            value = SETTINGS[name].convert(pairs.pop(name), label=label)
            if values.setdefault(name, value) != value:
                raise ConfigError(
                    f"{name} is given twice, as {bare.label(name)} {values[name]} and as "
                    f"{label}{value}; give it once",
                    code="given-twice",
                )
        if options in values:
            values[options] = pairs


def read_environment(environment: Mapping[str, str]) -> Source:
    """Settings in variables called DEAR_TRAIN_FLAG; an empty one counts as not given.

    Raises ConfigError for a variable of that prefix that is no setting.
    """
    names = {variable(name): name for name in SETTINGS}
    given: dict[str, object] = {}
    for key, text in environment.items():
        if not key.startswith(PREFIX) or key == CONFIG_VARIABLE or not text:
            continue
        if key not in names:
            raise ConfigError(
                f"environment variable {key} is no setting; correct or unset it"
                f"{_known(key, names)}",
                code="unknown-setting",
            )
        given[names[key]] = text
    return make_source("environment", given)


def read_file(path: Path) -> Source:
    """Settings in the YAML file at ``path``: a mapping of setting names to values.

    Names may be written with dashes, as flags are, and values as they are given there. Raises
    ConfigError for a file that cannot be read and for keys that are no settings.
    """
    from dearmpi.train.settings.config_file import (
        read_config,  # here, so that --help need not wait for YAML
    )

    return make_source("file", _settings_of(read_config(path), path), origin=str(path))


def _settings_of(content: Mapping[Any, object], path: Path) -> dict[str, object]:
    names = {about.flag.replace("-", "_"): name for name, about in SETTINGS.items()}
    names |= {name: name for name in SETTINGS}
    given: dict[str, object] = {}
    for key, value in content.items():
        name = names.get(str(key).replace("-", "_"))
        if name is None:
            raise ConfigError(
                f"unknown setting {key!r} in {path}{_known(str(key), SETTINGS)}",
                code="unknown-setting",
            )
        if name in given:
            raise ConfigError(f"{name} is given twice in {path}; give it once", code="given-twice")
        given[name] = value
    return given


def from_checkpoint(stored: Mapping[str, object], *, origin: str) -> Source:
    """The settings of the run that wrote a checkpoint. Unknown settings, settings of the process
    and the recorded iterations are left out.
    """
    passed_over = ("trace", *OF_THE_PROCESS)
    known = {n: value for n, value in stored.items() if n in SETTINGS and n not in passed_over}
    if known.get("cuda_buffers") == "direct":  # MPI was tried as this process was asked to
        del known["cuda_buffers"]
    return make_source("checkpoint", known, origin=origin)


def from_task(defaults: Mapping[str, object], *, task: str) -> Source:
    """What the task recommends. Raises ConfigError for a recommendation that is no setting, or
    that comes too late.
    """
    origin = f"the defaults of task {task}"
    for name in defaults:
        if name not in SETTINGS:
            raise ConfigError(
                f"unknown setting {name!r} in {origin}{_known(name, SETTINGS)}",
                code="unknown-setting",
            )
        if name in BEFORE_THE_TASK:
            raise ConfigError(
                f"{name} in {origin} has no effect, because it is needed before the task is "
                f"built; remove it there, and give it as --{SETTINGS[name].flag}",
                code="setting-without-effect",
            )
    return make_source("task", defaults, origin=origin)


def from_algorithm(sources: Sequence[Source]) -> Source:
    """What the algorithm recommends that the user or the checkpoint chose, before the task does."""
    algorithm = merge(sources).get("algorithm")
    own: dict[str, object] = {}
    if algorithm in OF_AUC:
        own = {"optimizer": "dearmpi:PrimalDual", "lr": 0.1}
    elif algorithm in OF_ROUNDS:
        own = {"optimizer": "SGD", "momentum": 0.0, "weight_decay": 0.0}
        own |= {"lr_schedule": "constant", "warmup_steps": 0}
    return make_source("task", own, origin=f"the defaults of algorithm {algorithm}")


def merge(sources: Sequence[Source]) -> dict[str, Any]:
    """The winning values; ``sources`` in order of precedence.

    A setting excludes its alternatives in the sources below (epochs and max_steps). Where a
    checkpoint or task names another optimizer than a source above, its optimizer options are
    ignored. The same holds for another lr_schedule and its details. With a plan, values that the
    plan decides are ignored in checkpoint and task, and refused from a user.
    """
    merged: dict[str, Any] = {}
    for source in sources:
        above = set(merged)
        ignored = {b for a, b in EXCLUSIVE if a in above} | {a for a, b in EXCLUSIVE if b in above}
        chosen = merged.get("optimizer")
        own = source.values.get("optimizer", chosen)
        recommends = source.kind in ("checkpoint", "task")
        if recommends and chosen is not None and own.lower() != chosen.lower():
            ignored.update(OF_THE_OPTIMIZER)
        curve = merged.get("lr_schedule")
        if curve is not None and source.values.get("lr_schedule", curve) != curve:
            ignored.update(OF_THE_STEP_SCHEDULE)
        if recommends:
            ignored.update(_decided_by(merged.get("plan")))
        for name, value in source.values.items():
            if name in ignored:
                continue
            if SETTINGS[name].is_pairs:
                merged[name] = {**value, **merged.get(name, {})}
            else:
                merged.setdefault(name, value)
    return merged


def describe_overruled(sources: Sequence[Source]) -> list[str]:
    """A warning for each setting of the run's location that a flag, perhaps of a batch script,
    overrules in environment or file.
    """
    return [
        f"warning: {flags.label(name)} {flags.values[name]} overrules {source.label(name)}, which "
        f"is {source.values[name]}; to have that, end the command with {flags.label(name)} "
        f"{shlex.quote(source.values[name])}"
        for flags in sources
        for source in sources
        for name in OF_THE_PLACE
        if flags.kind == "flag" and source.kind in ("environment", "file")
        if name in flags.values and name in source.values
        if flags.values[name] != source.values[name]
    ]


def _decided_by(plan: str | None) -> tuple[str, ...]:
    """The settings that a user's ``plan`` decides on."""
    if plan in (None, "none"):
        return ()
    return ("bucket_cap_mb",) if plan == "bayes" else DECIDED_BY_PLAN


def resolve(sources: Sequence[Source]) -> RunSettings:
    """The settings of the run, from ``sources`` in order and the defaults below them."""
    return RunSettings(**merge(sources))


def before_task(sources: Sequence[Source]) -> RunSettings:
    """The settings that are needed before the task is built; a task may recommend the others."""
    chosen = merge(sources)
    return RunSettings(**{name: chosen[name] for name in BEFORE_THE_TASK if name in chosen})


def _known(name: str, names: Mapping[str, object]) -> str:
    """End of a message about an unknown ``name``, which may be what other tools call it."""
    ours = our_name(name.removeprefix(PREFIX))
    near = nearest(name, names)
    if ours is None and near:
        return f"; {near}dear-train run --help-all lists every setting"
    if ours is None:
        return known_names(name, sorted(names), most=len(names))
    return f"; it is called {variable(ours) if name.startswith(PREFIX) else ours} here"
