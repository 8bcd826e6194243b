"""Choices: every setting of ``dear-train run``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dearmpi.comm.watchdog.watchdog import StallLimits
from dearmpi.config import (
    CommDtype,
    Compress,
    Coordinates,
    CudaBuffers,
    Feedback,
    Gather,
    ProgressMode,
    ReduceScatter,
    ScheduleName,
    Scope,
    Shards,
    UpdateOn,
    engine_setting,
)
from dearmpi.train.settings.setting import setting

Precision = Literal["fp32", "bf16", "fp16", "fp64"]
DeviceSetting = Literal["auto", "cpu", "cuda"]
LrSchedule = Literal["constant", "cosine", "step"]
NoDecay = Literal["norms", "biases"]
TrackerName = Literal["csv", "tensorboard", "wandb", "mlflow"]
OnNan = Literal["stop", "skip"]
LocalAlgorithm = Literal["diloco", "coda", "codasca", "scaffnew", "tamuna"]
BatchSharesName = Literal["auto", "even"]

_LIMITS = StallLimits()


def _of_engine(name: str, **details: Any) -> Any:
    """The setting of the engine by that name, as ``EngineConfig`` declares it; ``details`` are
    further fields of ``Setting``.
    """
    own = engine_setting(name)
    bounds = {"least": own.least, "above": own.above}
    return setting(
        own.default, "Communication", own.kind, own.help, choices=own.choices, **bounds, **details
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunChoices:
    """The settings of a run, from which flags, environment, file and documentation follow.

    None means not chosen: the run then uses the default in the setting's help. ``RunSettings``
    checks the values.
    """

    task: str = setting(
        "bytes-lm",
        "Task",
        "text",
        "bytes-lm, digits, images, synthetic:NAME, package.module:factory or FILE.py:factory",
        metavar="NAME",
        fixed=True,
        usual=True,
    )
    data: str | None = setting(
        None, "Task", "text", "data of the task: files or folders", metavar="PATH", usual=True
    )
    task_options: Mapping[str, str] = setting(
        {}, "Task", "texts", "an option of the task", flag="task-option", fixed=True
    )

    callback: str | None = setting(
        None,
        "Task",
        "text",
        "your class or function, called without arguments, for an object whose methods the run "
        "calls: on_fit_start, on_step_end ...",
        metavar="FILE.py:NAME",
    )
    workers: int = setting(
        0,
        "Task",
        "integer",
        "processes of each rank that load samples ahead of it; 0: it loads them itself",
        least=0,
    )

    epochs: int | None = setting(
        None,
        "Length",
        "integer",
        "passes over the data; default: the task's, else 1",
        least=1,
        usual=True,
    )
    max_steps: int | None = setting(
        None, "Length", "integer", "optimizer steps, instead of epochs", least=1, usual=True
    )
    batch_size: int = setting(
        64,
        "Length",
        "integer",
        "samples per optimizer step, over all ranks and micro-batches; default: the task's, "
        "else 64",
        least=1,
        fixed=True,
        usual=True,
    )
    gradient_accumulation_steps: int = setting(
        1, "Length", "integer", "micro-batches per optimizer step; default: 1", least=1
    )
    batch_shares: BatchSharesName | tuple[float, ...] = setting(
        "even",
        "Length",
        "choice",
        "how ranks share a batch: evenly; by numbers, one for each rank, such as 2,1,1,1; or auto, "
        "by their measured speed. Results are the same but for rounding",
        choices=get_args(BatchSharesName),
        metavar="auto|even|X,X,...",
        takes_numbers=True,
    )

    optimizer: str = setting(
        "AdamW",
        "Optimizer",
        "text",
        "its name in torch.optim, package.module:Class or FILE.py:Class; default: the task's, "
        "else AdamW",
        metavar="NAME",
        fixed=True,
        usual=True,
    )
    optimizer_options: Mapping[str, Any] = setting(
        {}, "Optimizer", "literals", "an option of it", flag="optimizer-option", fixed=True
    )
    lr: float | None = setting(
        None,
        "Optimizer",
        "number",
        "learning rate; default: the task's, else torch's",
        least=0,
        usual=True,
    )
    momentum: float | None = setting(
        None, "Optimizer", "number", "momentum, for optimizers that have one", least=0, fixed=True
    )
    weight_decay: float | None = setting(
        None,
        "Optimizer",
        "number",
        "weight decay; default: the task's, else torch's",
        least=0,
        fixed=True,
    )
    no_decay: tuple[NoDecay, ...] | None = setting(
        None,
        "Optimizer",
        "several",
        "parameters without weight decay: those of normalisation layers, biases, or both",
        choices=get_args(NoDecay),
        metavar="norms,biases",
        fixed=True,
    )
    max_grad_norm: float = setting(
        0.0,
        "Optimizer",
        "number",
        "clip the norm of the gradient to this; 0: never; default: the task's, else 0",
        least=0,
        fixed=True,
    )
    ema: float | None = setting(
        None,
        "Optimizer",
        "number",
        "moving average of the parameters, of which a step keeps X (such as 0.999): evaluated, "
        "kept as best and exported in their place; one more copy of the model in each rank's "
        "memory",
        above=0,
        most=0.999999,
        fixed=True,
    )
    lr_schedule: LrSchedule | str = setting(
        "constant",
        "Optimizer",
        "choice",
        "how the learning rate goes on after warm-up, or your function(step, total_steps) that "
        "returns a factor on it; default: the task's, else constant",
        choices=get_args(LrSchedule),
        metavar="constant|cosine|step|FILE.py:function",
        takes_own=True,
    )
    warmup_steps: int | None = setting(
        None, "Optimizer", "integer", "steps over which the learning rate rises", least=0
    )
    warmup_epochs: float | None = setting(
        None, "Optimizer", "number", "the same in epochs", least=0
    )
    lr_milestones: tuple[float, ...] | None = setting(
        None,
        "Optimizer",
        "numbers",
        "with --lr-schedule step: shares of the run after which it drops; default: 0.5,0.75",
    )
    lr_gamma: float | None = setting(
        None,
        "Optimizer",
        "number",
        "with --lr-schedule step: factor of each drop; default: 0.1",
        above=0,
        most=1,
    )

    schedule: ScheduleName = _of_engine("schedule")
    gather: Gather = _of_engine("gather")
    shards: Shards | tuple[float, ...] = _of_engine(
        "shards", metavar="auto|even|whole|X,X,...", takes_numbers=True
    )
    bucket_cap_mb: float | None = _of_engine("bucket_cap_mb")
    reduce_scatter: ReduceScatter | Literal["auto"] = _of_engine("reduce_scatter")
    topology: str = _of_engine("topology")
    comm_dtype: CommDtype = _of_engine("comm_dtype")
    compress: Compress = _of_engine("compress")
    density: float | None = _of_engine("density")
    error_feedback: Feedback | None = _of_engine("error_feedback")
    scope: Scope | None = _of_engine("scope")
    coordinates: Coordinates | None = _of_engine("coordinates")
    compress_after: int = _of_engine("compress_after")
    powersgd_rank: int | None = _of_engine("powersgd_rank")
    cuda_buffers: CudaBuffers = _of_engine("cuda_buffers")
    update_on: UpdateOn = _of_engine("update_on")
    window: int = _of_engine("window")
    sync_every: int | None = setting(
        None,
        "Communication",
        "integer",
        "steps that ranks train alone between exchanges of what they learned (DiLoCo); default: "
        "gradients are averaged in each",
        least=1,
        fixed=True,
    )
    algorithm: LocalAlgorithm | None = setting(
        None,
        "Communication",
        "choice",
        "how ranks that train alone share what they learned. With --sync-every: diloco, the "
        "default; coda, the mean of parameters, by default of dearmpi:PrimalDual; codasca, which "
        "corrects for unequal data. Without: scaffnew or tamuna, gradient steps with control "
        "variates, and exchanges at random",
        choices=get_args(LocalAlgorithm),
        fixed=True,
    )
    p: float | None = setting(
        None,
        "Communication",
        "number",
        "with --algorithm scaffnew or tamuna: the chance that a step is followed by an exchange; "
        "default: 0.1",
        above=0,
        most=1,
        fixed=True,
    )
    sparsity: int | None = setting(
        None,
        "Communication",
        "integer",
        "with --algorithm tamuna: ranks whose values of a coordinate count; default: 2",
        least=1,
        fixed=True,
    )
    cohort: int | None = setting(
        None,
        "Communication",
        "integer",
        "with --algorithm tamuna: ranks that take part in a round; default: all",
        least=1,
        fixed=True,
    )
    sync_after: int = setting(
        0,
        "Communication",
        "integer",
        "with --sync-every: steps at the start whose gradients are averaged",
        least=0,
        fixed=True,
    )
    sync_fragments: int | None = setting(
        None,
        "Communication",
        "integer",
        "with --sync-every: parts of the model, exchanged in turn; default: at most 8",
        least=1,
        fixed=True,
    )
    sync_delay: int | None = setting(
        None,
        "Communication",
        "integer",
        "with --sync-every: steps that an exchange may take; default: at most 5",
        least=0,
        fixed=True,
    )
    sync_mix: float | None = setting(
        None,
        "Communication",
        "number",
        "with --sync-every: part of its own values that a rank keeps; default: 0",
        least=0,
        fixed=True,
    )
    outer_lr: float | None = setting(
        None,
        "Communication",
        "number",
        "with --sync-every: learning rate of the outer SGD; default: 0.7",
        above=0,
    )
    outer_momentum: float | None = setting(
        None,
        "Communication",
        "number",
        "with --sync-every: its Nesterov momentum; default: 0.8",
        least=0,
        fixed=True,
    )
    plan: str | None = setting(
        None,
        "Communication",
        "text",
        "buckets, order and window: a file of `dear-train plan`, or auto to plan while training; "
        "bayes tries bucket caps. Without it auto over several hosts, if nothing asks for fixed "
        "buckets, else none",
        metavar="none|auto|bayes|FILE",
    )
    progress: ProgressMode = setting(
        "thread",
        "Communication",
        "choice",
        "who drives MPI: a thread, or polls between layers",
        choices=get_args(ProgressMode),
    )
    stall_warning_s: float = setting(
        _LIMITS.warning_s,
        "Communication",
        "number",
        "seconds of waiting for other ranks after which to say what every rank does",
        above=0,
    )
    stall_abort_s: float = setting(
        _LIMITS.abort_s,
        "Communication",
        "number",
        "seconds of waiting for other ranks after which the run is given up",
        above=0,
    )

    device: DeviceSetting = setting(
        "auto",
        "Numerics",
        "choice",
        "auto: CUDA where all ranks see a device, which those of a host take in turn",
        choices=get_args(DeviceSetting),
    )
    precision: Precision = setting(
        "fp32",
        "Numerics",
        "choice",
        "bf16, fp16: autocast over fp32 parameters; with fp16 the loss is scaled, and a step whose "
        "gradient overflows is skipped",
        choices=get_args(Precision),
        fixed=True,
        usual=True,
    )
    compile: bool = setting(
        False,
        "Numerics",
        "switch",
        "torch.compile for each repeated block (such as a transformer layer) by itself",
    )
    activation_checkpointing: bool = setting(
        False,
        "Numerics",
        "switch",
        "keep the inputs of repeated blocks alone, and compute their inside again in backprop: "
        "less memory, about a third more time",
    )
    seed: int = setting(
        0, "Numerics", "integer", "of parameters, order and noise", least=0, most=2**63, fixed=True
    )
    deterministic: bool = setting(
        False, "Numerics", "switch", "only operators that repeat bit by bit"
    )
    on_nan: OnNan = setting(
        "stop",
        "Numerics",
        "choice",
        "what to do when the loss is not finite; skip costs a small all-reduce per step",
        choices=get_args(OnNan),
    )
    threads: int | None = setting(
        None,
        "Numerics",
        "integer",
        "torch threads of a rank; default: OMP_NUM_THREADS, else its share of cores",
        least=1,
    )

    run_folder: str = setting(
        "runs", "Run", "text", "folder that holds the folders of runs", metavar="ROOT"
    )
    name: str | None = setting(
        None,
        "Run",
        "text",
        "folder of this run in ROOT; default: date and time",
        metavar="NAME",
        usual=True,
    )
    resume: str | None = setting(
        None,
        "Run",
        "text",
        "go on from a checkpoint or run folder; auto: from the run NAME where it has one",
        metavar="auto|PATH",
        usual=True,
    )
    max_time_s: float | None = setting(
        None,
        "Run",
        "duration",
        "save and stop after this long, with exit code 75: seconds, or 90m, 1.5h ...",
        flag="max-time",
        above=0,
    )
    checkpoint_interval: int | Literal["auto"] = setting(
        0,
        "Run",
        "integer",
        "steps between checkpoints, beside those by time; 0: by time alone; auto: so far apart in "
        "time that failures and checkpoints cost least (Daly), by how long checkpoints stop "
        "training and --mtbf-hours",
        metavar="N|auto",
        choices=("auto",),
        least=0,
    )
    mtbf_hours: float | None = setting(
        None,
        "Run",
        "number",
        "with --checkpoint-interval auto: mean hours between failures of one rank",
        metavar="H",
        above=0,
    )
    checkpoint_time_s: float = setting(
        900.0,
        "Run",
        "duration",
        "a checkpoint after this long without one, as 15m; 0: not by time; default: 15m",
        flag="checkpoint-time",
        least=0,
    )
    keep: int = setting(3, "Run", "integer", "checkpoints to keep", least=1)
    log_interval: int | None = setting(
        None,
        "Run",
        "integer",
        "steps between lines of the log and rows of metrics; default: 10",
        least=1,
    )
    log_time_s: float | None = setting(
        None,
        "Run",
        "duration",
        "the same by time, as 30s, instead of steps",
        flag="log-time",
        above=0,
    )
    eval_interval: int | None = setting(
        None,
        "Run",
        "integer",
        "steps between evaluations; 0: one, at the end; default: at each epoch's end",
        least=0,
    )
    keep_best: bool = setting(
        False,
        "Run",
        "switch",
        "also keep the checkpoint of the lowest held-out loss, which the file best then names",
    )
    patience: int | None = setting(
        None,
        "Run",
        "integer",
        "end early after this many evaluations without a lower held-out loss",
        least=1,
    )
    tracker: tuple[TrackerName, ...] | None = setting(
        None,
        "Run",
        "several",
        "where rows go besides metrics.csv, separated by commas; each but csv is an extra",
        choices=get_args(TrackerName),
        metavar="|".join(get_args(TrackerName)),
    )
    tensorboard: bool = setting(False, "Run", "switch", "the same as --tracker tensorboard")
    trace: tuple[int, int] | None = setting(
        None,
        "Run",
        "range",
        "iterations to record, from 1 on and without STOP, in the run's trace/; dear-train report "
        "draws one of them, for which two at least are needed",
    )
