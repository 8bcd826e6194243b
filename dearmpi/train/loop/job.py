"""Job: everything that training needs, built and agreed upon by all ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

from dearmpi.comm.world import World
from dearmpi.engine.iteration.compilation import compiled_part
from dearmpi.engine.optimizer import DistributedOptimizer
from dearmpi.engine.scaling import GradScaler
from dearmpi.engine.setup.self_planning import MOST_STEPS
from dearmpi.engine.sync.batch_norm import SyncBatchNorm
from dearmpi.errors import CheckpointError, ConfigError
from dearmpi.local.codasca import Codasca
from dearmpi.local.local_optimizer import LocalOptimizer
from dearmpi.local.scaffnew import Scaffnew
from dearmpi.plan.data.layout import spec_of
from dearmpi.plan.data.plan import Plan, read_plan
from dearmpi.plan.data.plan_choice import check_plan
from dearmpi.train.checkpoint import check_model, optimizer_state_dict, parameter_names
from dearmpi.train.checkpoint.snapshot import Snapshot
from dearmpi.train.data.data import Batches, RankShares
from dearmpi.train.data.loading import BatchLoader, open_loader
from dearmpi.train.data.streaming import StreamBatches, StreamReader
from dearmpi.train.loop.blocks import prepare_blocks
from dearmpi.train.loop.evaluation import Average, BestEvaluation, Evaluator, probe_metrics
from dearmpi.train.loop.optimizers import LrCurve, OptimizerChoice, lr_curve
from dearmpi.train.metrics.metrics import check_names
from dearmpi.train.ranks.agreement import AgreedError, together
from dearmpi.train.ranks.device import check_precision, convert_model, device_of_model
from dearmpi.train.run.balance import first_weights, stored_weights
from dearmpi.train.run.resuming import continue_random_state, split_tensors
from dearmpi.train.run.saving import TrainingState
from dearmpi.train.settings.settings import OF_ROUNDS, RunSettings
from dearmpi.train.tasks.own_code import find_callbacks
from dearmpi.train.tasks.task import Task, count_samples

LEAST_STEPS_TO_PLAN = 2 * MOST_STEPS  # so that the plan is followed for half of them at least


@dataclass(frozen=True, slots=True)
class Job:
    """A run that is ready to go.

    device: where the model is.
    base_lrs: learning rate of each param group, which the curve's factor multiplies.
    start_step, total_steps: optimizer steps taken before, and at the end of the run.
    loading: loads samples. evaluator: None where the task has no held-out data.
    best: the lowest held-out loss so far. average: of the parameters, where one is kept.
    scaler: of the loss, with fp16. callbacks: the task's and the user's own.
    stream: the training data, where they have no length.
    """

    world: World
    settings: RunSettings
    task: Task
    device: torch.device
    optimizer: DistributedOptimizer | LocalOptimizer
    base_lrs: tuple[float, ...]
    curve: LrCurve
    batches: Batches | StreamBatches
    start_step: int
    total_steps: int
    loading: BatchLoader
    evaluator: Evaluator | None
    best: BestEvaluation
    average: Average | None = None
    scaler: GradScaler | None = None
    callbacks: tuple[object, ...] = ()
    stream: StreamReader | None = None

    @property
    def evaluated_model(self) -> nn.Module:
        """What evaluations measure: the average of the model where one is kept."""
        return self.task.model if self.average is None else self.average.model

    def state(self) -> TrainingState:
        """What its checkpoints are made of."""
        state = TrainingState(
            self.task.model, self.optimizer, self._meta, self.start_step, self.settings.keep
        )
        if self.average is None:
            return state
        return replace(state, extra=self.average.tensors, refresh=self.average.refresh)

    def _meta(self, step: int) -> dict[str, Any]:
        epoch, step_in_epoch = self.position(step)
        return {
            "task": self.task.name,
            "epoch": epoch,
            "step_in_epoch": step_in_epoch,
            "num_samples": self.batches.num_samples,
            "data_digest": self.task.data_digest,
            "world_size": self.world.size,
            "lr_factor": self.curve.factor(step),
            "config": self.settings.as_plain(),
            **stored_weights(self.batches.shares.weights),
            **({} if self.stream is None else {"stream": self.stream.state(epoch, step_in_epoch)}),
            **({} if self.scaler is None else {"scaler": self.scaler.state_dict()}),
            **({"best": self.best.state()} if self.best.is_watched else {}),
            **({"local": self.local.progress()} if self.local is not None else {}),
        }

    @property
    def local(self) -> LocalOptimizer | None:
        """The optimizer, where ranks train alone between exchanges."""
        return self.optimizer if isinstance(self.optimizer, LocalOptimizer) else None

    @property
    def needs_gradients(self) -> bool:
        """Whether this rank's next step has a backprop: not outside the cohort of a round."""
        return not isinstance(self.optimizer, Scaffnew) or self.optimizer.takes_part

    def shared_parameters(self) -> AbstractContextManager[None]:
        """Inside, the model has the parameters that are the same on all ranks, to evaluate it."""
        return nullcontext() if self.local is None else self.local.at_anchor()

    def close(self) -> None:
        """Detach from the model, which then has the parameters that ranks share (collective)."""
        if self.local is not None:
            self.local.show_anchor()
        self.optimizer.close()

    def position(self, step: int) -> tuple[int, int]:
        """Epoch and step within it of step number ``step``, from 0."""
        return self.batches.position(step)

    def units(self, num_samples: float) -> float:
        """What throughput counts, for that many samples."""
        return num_samples * self.task.units_per_sample


def share_samples(
    settings: RunSettings, task: Task, world: World, snapshot: Snapshot | None = None
) -> Batches | StreamBatches:
    """How the ranks share the samples, at first as where ``snapshot`` was written. Raises
    ConfigError or DataError for too few of them, and for what a run over a stream cannot have.
    """
    num_samples = count_samples(task.train_data)
    shares = RankShares(
        first_weights(settings.batch_shares, world.size, snapshot.meta if snapshot else {})
    )
    if num_samples is None:
        _check_stream(settings, task)
        return StreamBatches(
            settings.batch_size,
            world.size,
            world.rank,
            settings.gradient_accumulation_steps,
            shares,
        )
    return Batches(
        num_samples,
        settings.batch_size,
        world.size,
        world.rank,
        micro_batches=settings.gradient_accumulation_steps,
        seed=settings.seed,
        shares=shares,
    )


def prepare(
    world: World,
    settings: RunSettings,
    task: Task,
    *,
    choice: OptimizerChoice,
    snapshot: Snapshot | None = None,
    kept_plan: Path | None = None,
) -> Job:
    """Put ``snapshot``, if any, into the model, and distribute its optimizer (collective).

    kept_plan: where the run's earlier part has left a plan, if it made one for itself.
    Raises AgreedError where that fails, on any rank, and MismatchError where ranks differ.
    """
    with together(world):
        batches = share_samples(settings, task, world, snapshot)
        per_epoch = batches.steps_per_epoch
        total_steps = settings.max_steps or (settings.epochs or 1) * per_epoch
        curve = lr_curve(settings, total_steps=total_steps, steps_per_epoch=per_epoch)
        task, stream = _open_data(task, batches, snapshot, total_steps=total_steps)
        average = _fill_model(task, settings, snapshot)
        prepare_blocks(task.model, settings)
        scaler = _scaler(device_of_model(task.model), settings, snapshot)
        callbacks = find_callbacks(task, settings.callback)
        loading = open_loader(task, name=settings.task, num_workers=settings.workers)
        evaluator = _evaluator(settings, task, average, batches, loading)
        inner = choice.build_for(task.model, settings.no_decay)
        base_lrs = tuple(float(group["lr"]) for group in inner.param_groups)
        state = _optimizer_state(snapshot, task, inner)
    start_step = 0 if snapshot is None else snapshot.step
    plan = _choose_plan(world, settings, task.model, total_steps - start_step, kept_plan)
    optimizer = (
        _train_alone(inner, task, world, settings, snapshot=snapshot, state=state)
        if settings.trains_alone
        else _distribute(inner, task, world, settings, plan=plan, state=state, scaler=scaler)
    )
    with together(world):
        continue_random_state(world, snapshot, settings.seed, start_step)
    return Job(
        world=world,
        settings=settings,
        task=task,
        device=device_of_model(task.model),
        optimizer=optimizer,
        base_lrs=base_lrs,
        curve=curve,
        batches=batches,
        start_step=start_step,
        total_steps=total_steps,
        loading=loading,
        evaluator=evaluator,
        best=BestEvaluation.of(settings, snapshot),
        average=average,
        scaler=scaler,
        callbacks=callbacks,
        stream=stream,
    )


def _check_stream(settings: RunSettings, task: Task) -> None:
    """Raise ConfigError for settings and layers that need to know how long an epoch is."""
    what = f"the training data of task {task.name} ({type(task.train_data).__name__})"
    if settings.max_steps is None:
        raise ConfigError(f"{what} has no length; give --max-steps", code="length-unknown")
    if settings.warmup_epochs is not None:
        raise ConfigError(
            f"warmup_epochs is {settings.warmup_epochs:g}, but {what} has no length; give "
            "--warmup-steps",
            code="length-unknown",
        )
    if any(isinstance(module, SyncBatchNorm) for module in task.model.modules()):
        raise ConfigError(
            f"SyncBatchNorm needs samples on all ranks in each step, but {what} has no length and "
            "may end anywhere; use data with a length, or ordinary batch normalisation",
            code="batches-uneven",
        )


def _open_data(
    task: Task, batches: Batches | StreamBatches, snapshot: Snapshot | None, *, total_steps: int
) -> tuple[Task, StreamReader | None]:
    """``task``, and what reads its samples if they are a stream: those after the ones of the run
    that wrote ``snapshot``. Raises ConfigError as ``_check_passes`` does.
    """
    if isinstance(batches, Batches):
        _check_passes(batches, task, total_steps)
        return task, None
    stream = StreamReader(task.train_data, batches)
    if snapshot is not None:
        epoch, step = snapshot.meta["epoch"], snapshot.meta["step_in_epoch"]
        batches.epoch, batches.first_step = epoch, snapshot.step - step
        if snapshot.meta["stream"] is not None:
            stream.resume(epoch, step, snapshot.meta["stream"])
    return replace(task, train_data=cast("Any", stream)), stream


def _check_passes(batches: Batches, task: Task, total_steps: int) -> None:
    """Raise ConfigError where layers of the model would wait for ranks without samples."""
    passes = batches.last_passes()
    waits = any(isinstance(module, SyncBatchNorm) for module in task.model.modules())
    if waits and total_steps >= batches.steps_per_epoch and min(passes) < max(passes):
        few, many = passes.index(min(passes)), passes.index(max(passes))
        raise ConfigError(
            f"the last batch of an epoch gives rank {few} {min(passes)} micro-batches and rank "
            f"{many} {max(passes)}, but SyncBatchNorm needs all ranks in each; choose a "
            f"--batch-size that divides {batches.num_samples} samples, or use fewer ranks",
            code="batches-uneven",
        )


def _fill_model(task: Task, settings: RunSettings, snapshot: Snapshot | None) -> Average | None:
    """Give the model the run's precision, and the snapshot's parameters and buffers. Returns the
    average of the model, if one is kept, with the snapshot's as well.
    """
    convert_model(task.model, settings.precision)
    average = None if settings.ema is None else Average(task.model, settings.ema)
    if snapshot is not None:
        own, extra = split_tensors(snapshot.model)
        check_model(replace(snapshot, model=own), task.model.state_dict())
        task.model.load_state_dict(own)
        if average is not None:
            average.load(extra)
    return average


def _scaler(
    device: torch.device, settings: RunSettings, snapshot: Snapshot | None
) -> GradScaler | None:
    """The scaler of fp16, as far as the run that wrote ``snapshot`` had come."""
    check_precision(device, settings.precision)
    if settings.precision != "fp16":
        return None
    scaler = GradScaler(device.type)
    scaler.scale(torch.zeros((), device=device))  # else a rank without samples would have no scale
    if snapshot is not None:
        scaler.load_state_dict(snapshot.meta["scaler"])
    return scaler


def check_position(snapshot: Snapshot, task: Task) -> None:
    """Raise CheckpointError if number or digest of the samples differ from the snapshot's."""
    stored, found = snapshot.meta.get("num_samples"), count_samples(task.train_data)
    if stored != found:
        raise CheckpointError(
            f"the checkpoint of step {snapshot.step} was written with {stored} training samples, "
            f"this run has {found}; give the same data, or start a new run",
            code="checkpoint-of-other-data",
        )
    digest = snapshot.meta.get("data_digest", "")
    if digest and task.data_digest and digest != task.data_digest:
        raise CheckpointError(
            f"the checkpoint of step {snapshot.step} was written with data of the digest {digest}, "
            f"this run's is {task.data_digest}; give the same data, or start a new run",
            code="checkpoint-of-other-data",
        )


def _choose_plan(
    world: World, settings: RunSettings, model: nn.Module, num_steps: int, kept: Path | None
) -> Plan | Literal["auto"] | None:
    """The plan to follow for ``num_steps``; rank 0 reads a file for all (collective)."""
    if settings.plan in ("none", "bayes"):
        return None
    if settings.plan is None and (
        not settings.leaves_buckets_open() or compiled_part(model) is not None
    ):
        return None
    if settings.plan in (None, "auto"):
        return _plan_while_training(world, settings, model, num_steps=num_steps, kept=kept)
    text = ""
    with together(world, root_only=True):
        if world.is_root:
            plan = read_plan(settings.plan)
            if plan.eager and not settings.updates_early:
                raise ConfigError(
                    f"the plan {settings.plan} updates buckets during backprop, but "
                    f"max_grad_norm {settings.max_grad_norm:g} with precision {settings.precision} "
                    "needs the whole gradient first; make the plan with dear-train plan "
                    "--no-eager, or give --max-grad-norm 0, and not fp16",
                    code="plan-contradicts-settings",
                )
            text = plan.to_json()
    return Plan.from_json(world.broadcast_text(text), settings.plan)


def _plan_while_training(
    world: World, settings: RunSettings, model: nn.Module, *, num_steps: int, kept: Path | None
) -> Plan | Literal["auto"] | None:
    """The plan that the run has made before, if it still fits; else ``auto`` where the run is long
    enough (collective). On several hosts ``auto`` is the default, except for a traced run, whose
    buckets must not change.
    """
    with together(world):
        check_plan("auto", settings.engine())  # also where the run is too short for a plan
        text = ""
        if kept is not None and world.is_root:
            text = _read_kept(kept, world, settings, model)
    text = world.broadcast_text(text)
    if text:
        return Plan.from_json(text, "the plan that the run has made before")
    is_default = len(set(world.hosts)) > 1 and settings.trace is None
    is_wanted = settings.plan == "auto" or is_default
    return "auto" if is_wanted and num_steps >= LEAST_STEPS_TO_PLAN else None


def _read_kept(path: Path, world: World, settings: RunSettings, model: nn.Module) -> str:
    """The plan at ``path`` as JSON. Empty if there is none, or if it is for other ranks, updates or
    trained layers, as after a run has unfrozen some.
    """
    params = dict(model.named_parameters())
    try:
        plan = read_plan(path)
        planned = set(plan.parameters)
        plan.layout([spec_of(params[name], name) for name in planned & params.keys()], world.size)
    except ConfigError:
        return ""
    is_whole = all(
        name in planned for name, param in params.items() if param.requires_grad and param.numel()
    )
    config = settings.engine()
    fits = plan.eager == config.eager and plan.gather in (None, config.gather)
    return plan.to_json() if is_whole and fits else ""


def _distribute(
    inner: torch.optim.Optimizer,
    task: Task,
    world: World,
    settings: RunSettings,
    *,
    plan: Plan | Literal["auto"] | None,
    state: dict[str, Any] | None,
    scaler: GradScaler | None,
) -> DistributedOptimizer:
    """``inner``, shared by the ranks, with the ``state`` that it has reached, if any."""
    try:
        optimizer = DistributedOptimizer(
            inner, task.model, world=world, config=settings.engine(), plan=plan
        )
    except ConfigError as error:
        # It follows from settings and model alone, which are the same on all ranks.
        raise AgreedError(str(error), exit_code=error.exit_code, code=error.code) from error
    if state is not None:
        optimizer.load_state_dict(state)
    if scaler is not None and settings.engine().keeps_unsent:
        optimizer.follow_loss_scale(scaler.get_scale)
    return optimizer


def _train_alone(
    inner: torch.optim.Optimizer,
    task: Task,
    world: World,
    settings: RunSettings,
    *,
    snapshot: Snapshot | None,
    state: dict[str, Any] | None,
) -> LocalOptimizer:
    """``inner`` on each rank, with exchanges, and with what the ranks of ``snapshot`` had."""
    try:
        optimizer = _make_local(inner, task.model, world, settings)
    except ConfigError as error:
        raise AgreedError(str(error), exit_code=error.exit_code, code=error.code) from error
    if snapshot is not None and state is not None:
        optimizer.load_local_state(state, snapshot.meta["local"])
    return optimizer


def _make_local(
    inner: torch.optim.Optimizer, model: nn.Module, world: World, settings: RunSettings
) -> LocalOptimizer:
    """By the algorithm of ``settings``."""
    common: dict[str, Any] = {"world": world, "config": replace(settings.engine(), eager=False)}
    if settings.algorithm in OF_ROUNDS:
        (group,) = inner.param_groups
        sparsity = settings.sparsity
        if settings.algorithm == "tamuna" and sparsity is None:
            sparsity = min(2, world.size)
        return Scaffnew(
            group["params"],
            model,
            lr=group["lr"],
            p=settings.p,
            sparsity=sparsity,
            cohort=settings.cohort,
            **common,
        )
    assert settings.sync_every is not None
    common["sync_every"] = settings.sync_every
    if settings.algorithm == "codasca":
        return Codasca(inner, model, **common)
    common |= {"sync_after": settings.sync_after, "compress": settings.compress}
    if settings.algorithm == "coda":
        return LocalOptimizer.average(inner, model, **common)
    given = {
        "outer_lr": settings.outer_lr,
        "outer_momentum": settings.outer_momentum,
        "fragments": settings.sync_fragments,
        "delay": settings.sync_delay,
        "mix": settings.sync_mix,
    }
    common |= {name: value for name, value in given.items() if value is not None}
    return LocalOptimizer(inner, model, **common)


def _optimizer_state(
    snapshot: Snapshot | None, task: Task, inner: torch.optim.Optimizer
) -> dict[str, Any] | None:
    if snapshot is None:
        return None
    return optimizer_state_dict(snapshot, parameter_names(task.model, inner.param_groups))


def _evaluator(
    settings: RunSettings,
    task: Task,
    average: Average | None,
    batches: Batches | StreamBatches,
    loading: BatchLoader,
) -> Evaluator | None:
    """What measures the model, or its ``average`` where one is kept, on held-out samples."""
    if task.eval_data is None:
        return None
    if average is not None:
        task = replace(task, model=average.model)
    share = batches.world_size * batches.micro_batches
    names = probe_metrics(task, settings.precision)
    check_names(names)
    return Evaluator(
        task,
        loading,
        settings.precision,
        batch_size=-(-settings.batch_size // share),
        names=names,
    )
