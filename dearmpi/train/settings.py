"""Settings of a run: one frozen dataclass, from which flags, file and documentation follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from dearmpi.comm.watchdog import StallLimits
from dearmpi.config import (
    CommDtype,
    CudaBuffers,
    EngineConfig,
    Gather,
    ProgressMode,
    ReduceScatter,
    ScheduleName,
)
from dearmpi.errors import ConfigError
from dearmpi.train.setting import Setting, named, setting

Precision = Literal["fp32", "bf16", "fp64"]
DeviceSetting = Literal["auto", "cpu", "cuda"]
LrSchedule = Literal["constant", "cosine", "step"]
OnNan = Literal["stop", "skip"]

_ENGINE = EngineConfig()
_LIMITS = StallLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Everything that ``dear-train run`` can be told.

    None stands for "not chosen": the run then uses what the setting's help says.
    Raises ConfigError for settings that contradict each other or have no effect.
    """

    task: str = setting(
        "bytes-lm",
        "Task",
        "text",
        "bytes-lm, digits, images, synthetic:NAME, package.module:factory or FILE.py:factory",
        metavar="NAME",
        fixed=True,
    )
    data: str | None = setting(
        None, "Task", "text", "data of the task: files or folders", metavar="PATH"
    )
    task_options: Mapping[str, str] = setting(
        {}, "Task", "texts", "an option of the task", flag="task-option", fixed=True
    )

    epochs: int | None = setting(
        None, "Length", "integer", "passes over the data; default: the task's, else 1", least=1
    )
    max_steps: int | None = setting(
        None, "Length", "integer", "optimizer steps, instead of epochs", least=1
    )
    batch_size: int = setting(
        64,
        "Length",
        "integer",
        "samples per optimizer step, over all ranks and micro-batches; default: the task's, "
        "else 64",
        least=1,
        fixed=True,
    )
    gradient_accumulation_steps: int = setting(
        1, "Length", "integer", "micro-batches per optimizer step; default: 1", least=1
    )

    optimizer: str = setting(
        "AdamW",
        "Optimizer",
        "text",
        "optimizer by its name in torch.optim; default: the task's, else AdamW",
        metavar="NAME",
        fixed=True,
    )
    optimizer_options: Mapping[str, Any] = setting(
        {}, "Optimizer", "literals", "an option of it", flag="optimizer-option", fixed=True
    )
    lr: float | None = setting(
        None, "Optimizer", "number", "learning rate; default: the task's, else torch's", least=0
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
    max_grad_norm: float = setting(
        0.0,
        "Optimizer",
        "number",
        "clip the norm of the gradient to this; 0: never; default: the task's, else 0",
        least=0,
        fixed=True,
    )
    lr_schedule: LrSchedule = setting(
        "constant",
        "Optimizer",
        "choice",
        "how the learning rate goes on after warm-up; default: the task's, else constant",
        choices=get_args(LrSchedule),
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

    schedule: ScheduleName = setting(
        _ENGINE.schedule,
        "Communication",
        "choice",
        "dear pipelines; serial and wfbp are baselines",
        choices=get_args(ScheduleName),
    )
    gather: Gather = setting(
        _ENGINE.gather,
        "Communication",
        "choice",
        "what is gathered: parameters shards the optimizer",
        choices=get_args(Gather),
    )
    bucket_cap_mb: float | None = setting(
        None,
        "Communication",
        "number",
        "most MiB of a bucket; default: an eighth of the model, from 1 to 4",
        above=0,
    )
    reduce_scatter: ReduceScatter | Literal["auto"] = setting(
        _ENGINE.reduce_scatter,
        "Communication",
        "choice",
        "the algorithm; auto measures at start",
        choices=(*get_args(ReduceScatter), "auto"),
    )
    comm_dtype: CommDtype = setting(
        _ENGINE.comm_dtype,
        "Communication",
        "choice",
        "bf16 and fp16 send tensors of fp32 with half the bytes",
        choices=get_args(CommDtype),
    )
    cuda_buffers: CudaBuffers = setting(
        _ENGINE.cuda_buffers,
        "Communication",
        "choice",
        "staged: by pinned host memory; direct: by an MPI that was tried on device memory; auto: "
        "direct where that works",
        choices=get_args(CudaBuffers),
    )
    window: int = setting(
        _ENGINE.window, "Communication", "integer", "operations in flight of each kind", least=1
    )
    plan: str = setting(
        "none",
        "Communication",
        "text",
        "buckets, order and window: a file of `dear-train plan`, or auto to plan while training; "
        "bayes tries bucket caps",
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
        "bf16: autocast over fp32 parameters",
        choices=get_args(Precision),
        fixed=True,
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
        None, "Numerics", "integer", "torch threads of a rank; default: its share of cores", least=1
    )

    run_folder: str = setting(
        "runs", "Run", "text", "folder that holds the folders of runs", metavar="ROOT"
    )
    name: str | None = setting(
        None, "Run", "text", "folder of this run in ROOT; default: date and time", metavar="NAME"
    )
    resume: str | None = setting(
        None,
        "Run",
        "text",
        "go on from a checkpoint or run folder; auto: from the run NAME where it has one",
        metavar="auto|PATH",
    )
    max_time_s: float | None = setting(
        None,
        "Run",
        "duration",
        "save and stop after this long, with exit code 75: seconds, or 90m, 1.5h ...",
        flag="max-time",
        above=0,
    )
    checkpoint_interval: int = setting(
        0, "Run", "integer", "steps between checkpoints; 0: one, at the end", metavar="N", least=0
    )
    keep: int = setting(3, "Run", "integer", "checkpoints to keep", least=1)
    log_interval: int = setting(
        10, "Run", "integer", "steps between lines of the log and rows of metrics", least=1
    )
    eval_interval: int | None = setting(
        None,
        "Run",
        "integer",
        "steps between evaluations; 0: one, at the end; default: at each epoch's end",
        least=0,
    )
    tensorboard: bool = setting(False, "Run", "switch", "also write TensorBoard events")
    trace: tuple[int, int] | None = setting(
        None,
        "Run",
        "range",
        "iterations to record, from 1 on and without STOP, in the run's trace/",
    )

    def __post_init__(self) -> None:
        for name, about in SETTINGS.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, about.convert(value, label=name))
        for first, second in EXCLUSIVE:
            if getattr(self, first) is not None and getattr(self, second) is not None:
                raise ConfigError(
                    f"{first} is {getattr(self, first)} and {second} is {getattr(self, second)}; "
                    "give one of them"
                )
        self._check_step_schedule()
        self.stall_limits()
        self.engine()
        if self.deterministic and self.reduce_scatter == "auto":
            raise ConfigError(
                "deterministic needs a fixed reduce_scatter: with auto, timing would choose the "
                "order of summation; use ring, native or exchange"
            )
        if self.deterministic and self.plan in PLANNING:
            raise ConfigError(
                f"deterministic needs a fixed plan: with {self.plan}, timing would choose the "
                "buckets, and with them the order of summation; use none, or the file of a plan"
            )
        if self.plan == "bayes" and self.bucket_cap_mb is not None:
            raise ConfigError(
                f"bucket_cap_mb is {self.bucket_cap_mb}, but plan bayes searches for it; leave out "
                "one of the two"
            )
        if "data" in self.task_options and self.data is not None:
            raise ConfigError("data is given twice, as --data and as --task-option data=; choose")

    def _check_step_schedule(self) -> None:
        for name in ("lr_milestones", "lr_gamma"):
            if self.lr_schedule != "step" and getattr(self, name) is not None:
                raise ConfigError(
                    f"{name} has no effect with lr_schedule {self.lr_schedule!r}; "
                    "leave it out, or use lr_schedule step"
                )
        shares = self.lr_milestones or ()
        if any(not 0 < share < 1 for share in shares) or list(shares) != sorted(set(shares)):
            raise ConfigError(
                f"lr_milestones is {shares}; they are shares of the run, each above 0 and below "
                "1, in rising order"
            )

    @property
    def all_task_options(self) -> dict[str, str]:
        """The task's options, ``data`` among them."""
        return {**self.task_options, **({} if self.data is None else {"data": self.data})}

    def stall_limits(self) -> StallLimits:
        """How long a wait for other ranks may last; ConfigError where that makes no sense."""
        return StallLimits(self.stall_warning_s, self.stall_abort_s)

    def engine(self) -> EngineConfig:
        """The part that the engine reads.

        The trainer's learning rate is set before backprop, so a bucket may be updated as soon as
        it is reduced, except where the update waits for the norm of the whole gradient.
        """
        return EngineConfig(
            schedule=self.schedule,
            gather=self.gather,
            bucket_cap_mb=self.bucket_cap_mb,
            reduce_scatter=self.reduce_scatter,
            comm_dtype=self.comm_dtype,
            cuda_buffers=self.cuda_buffers,
            window=self.window,
            eager=self.max_grad_norm == 0,
        )

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


PLANNING = ("auto", "bayes")  # plans that are found while training
EXCLUSIVE = (("epochs", "max_steps"), ("warmup_steps", "warmup_epochs"))

SETTINGS: Mapping[str, Setting] = {
    f.name: named(f.metadata["setting"], f.name) for f in fields(RunSettings)
}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(part) for part in value]
    return value


def check_resumable(stored: Mapping[str, Any], settings: RunSettings) -> None:
    """Raise ConfigError, with both values, where ``settings`` differ from those of the checkpoint
    (``stored``, as ``as_plain`` gave them) in what a run must keep.
    """
    new = settings.as_plain()
    for name, about in SETTINGS.items():
        if about.fixed and stored.get(name) != new.get(name):
            raise ConfigError(
                f"{name} is {_show(new.get(name))}, but the run to resume has "
                f"{_show(stored.get(name))}; leave out --{about.flag}, or start a new run"
            )


def _show(value: Any) -> str:
    return "none" if value is None else repr(value)
