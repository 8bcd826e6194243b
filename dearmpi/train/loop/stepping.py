"""Stepping: one optimizer step, from this rank's samples to its update, and what is due then."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from dearmpi.engine.scaling import GradScaler
from dearmpi.errors import DataError, NonFiniteLossError
from dearmpi.plan.model.failures import best_interval
from dearmpi.span import Track
from dearmpi.train.data.data import MicroBatch
from dearmpi.train.data.loading import BatchRequest
from dearmpi.train.data.streaming import StreamBatch, StreamBatches
from dearmpi.train.loop.evaluation import misfit_of_loss
from dearmpi.train.loop.job import Job
from dearmpi.train.ranks.device import computing, convert_batch, send_batch


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step gave on this rank.

    loss: this rank's weighted sum; the mean of it over ranks is the mean over the step's samples.
    grad_norm: of the whole averaged gradient before clipping; None where nothing clips.
    skipped: all ranks left the parameters as they were, because a loss or the
        gradient was not finite.
    data_s: what loading data took.
    """

    loss: float
    lr: float
    grad_norm: float | None = None
    skipped: bool = False
    data_s: float = 0.0


def take_step(job: Job, step: int) -> StepResult:
    """Take step number ``step``, from 0 (collective).

    The learning rate is set first, since buckets may be updated while backprop still runs. Each
    micro-batch goes forward and back; the gradients of all but the last stay on this rank.
    """
    loader = _BatchLoader(job, step)
    return replace(_step(job, step, loader), data_s=loader.seconds)


def _step(job: Job, step: int, loader: _BatchLoader) -> StepResult:
    lr = set_lr(job, step)
    job.optimizer.zero_grad()
    *early, last = loader.shares()
    skips = job.settings.on_nan == "skip"
    buffers = _copy_buffers(job.task.model) if skips else {}
    losses = _Losses(goes_back=job.needs_gradients)
    with job.optimizer.no_sync():
        for share in early:
            losses.note(_go_forward(job, share, loader), share.weight)
            losses.go_back(job.scaler)
    losses.note(_go_forward(job, last, loader), last.weight)
    if job.average is not None:
        job.average.catch_up()
    if skips and not _all_finite(job, losses):
        job.optimizer.zero_grad()
        result = StepResult(math.nan, lr, skipped=True)
    else:
        losses.go_back(job.scaler)
        result = _update(job, step, losses, lr)
    if skips and result.skipped:
        _restore_buffers(job.task.model, buffers)
    if job.average is not None and not result.skipped:
        job.average.note_step()
    return result


def coming_batches(job: Job, start_step: int) -> Iterator[BatchRequest]:
    """All batches of this rank, in order, from step number ``start_step`` to the run's end, as the
    ranks share them now.
    """
    if isinstance(job.batches, StreamBatches):
        yield from _coming_of_stream(job, start_step)
        return
    batches = replace(job.batches)  # which may keep the order of another epoch
    for step in range(start_step, job.total_steps):
        shares = (share for share in batches.step(*job.position(step)) if share.indices)
        for number, share in enumerate(shares):
            yield _wanted(job, share, step, number)


def _coming_of_stream(job: Job, step: int) -> Iterator[BatchRequest]:
    """The same from ``step`` on, as if this pass went on to the run's end."""
    epoch, index = job.position(step)
    for ahead in range(job.total_steps - step):
        for number in range(job.batches.micro_batches):
            yield _wanted_of_stream(job, (epoch, index + ahead, number))


def _wanted_of_stream(job: Job, stream: tuple[int, int, int]) -> BatchRequest:
    seed = (job.settings.seed, job.world.rank, *stream)
    return BatchRequest((), seed=seed, stream=stream, weights=job.batches.shares.weights)


def _wanted(job: Job, share: MicroBatch, step: int, number: int) -> BatchRequest:
    """number: counts the step's micro-batches that are not empty, from 0."""
    return BatchRequest(share.indices, seed=(job.settings.seed, step, job.world.rank, number))


def set_lr(job: Job, step: int) -> float:
    """Set the learning rate of step number ``step`` in all param groups; returns the first's."""
    factor = job.curve.factor(step)
    for group, base in zip(job.optimizer.param_groups, job.base_lrs, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(base * factor)
        else:
            group["lr"] = base * factor
    return job.base_lrs[0] * factor


@dataclass(slots=True)
class _BatchLoader:
    """Loads the micro-batches of a step, in their order. seconds: what that has taken."""

    job: Job
    step: int
    seconds: float = 0.0
    _number: int = 0
    _streamed: list[Any] = field(default_factory=list)

    def shares(self) -> tuple[MicroBatch, ...]:
        """This rank's micro-batches of the step; those of a stream are loaded to know."""
        job, begin_s = self.job, time.perf_counter()
        if not isinstance(job.batches, StreamBatches):
            return job.batches.step(*job.position(self.step))
        batches = job.batches
        with job.optimizer.spans.span(Track.DATA, "data"):
            if not self._load_stream(batches):
                self._begin_pass(batches, self.step)
                self._load_stream(batches)
        if not batches.count:
            raise DataError(
                f"task {job.task.name}: the training data has no samples in epoch {batches.epoch}, "
                f"with which step {self.step + 1} of {job.total_steps} would begin; give fewer "
                "--max-steps, or data that can be read again",
                code="data-insufficient",
            )
        if batches.count < batches.batch_size:
            self._begin_pass(batches, self.step + 1)
        self.seconds += time.perf_counter() - begin_s
        return batches.parts(batches.count)

    def _load_stream(self, batches: StreamBatches) -> int:
        """Load the step's micro-batches; how many samples it has over all ranks."""
        position = self.job.position(self.step)
        for number in range(batches.micro_batches):
            wanted = _wanted_of_stream(self.job, (*position, number))
            loaded: StreamBatch = self.job.loading.load(wanted)
            batches.count = loaded.count
            if loaded.batch is not None:
                self._streamed.append(loaded.batch)
        return batches.count

    def _begin_pass(self, batches: StreamBatches, step: int) -> None:
        batches.begin_pass(step)
        self.job.loading.expect(_coming_of_stream(self.job, step))

    def load(self, share: MicroBatch) -> Any:
        """The samples of ``share``, where they are to be computed with."""
        job, begin_s = self.job, time.perf_counter()
        wanted = _wanted(job, share, self.step, self._number)
        number, self._number = self._number, self._number + 1
        with job.optimizer.spans.span(Track.DATA, "data"):
            batch = self._streamed[number] if self._streamed else job.loading.load(wanted)
            batch = send_batch(convert_batch(batch, job.settings.precision), job.device)
        self.seconds += time.perf_counter() - begin_s
        return batch


def _go_forward(job: Job, share: MicroBatch, loader: _BatchLoader) -> Tensor | None:
    """The mean loss of a micro-batch; None for an empty one."""
    if not share.indices:
        return None
    batch = loader.load(share)
    with computing(job.device, job.settings.precision):
        loss = job.task.loss(job.task.model, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise misfit_of_loss(job.task, loss)
    return loss


class _Losses:
    """The losses of a step's micro-batches. They are read after the step's last operation is
    queued, since reading waits for the device.

    goes_back: whether they have a backprop. Their values count in metrics either way.
    """

    def __init__(self, *, goes_back: bool) -> None:
        self._goes_back = goes_back
        self._last: tuple[Tensor, float] | None = None
        self._all: list[tuple[Tensor, float]] = []

    def note(self, loss: Tensor | None, weight: float) -> None:
        """The loss of the next micro-batch, None if that was empty, and what it counts."""
        self._last = None if loss is None else (loss, weight)
        if loss is not None:
            self._all.append((loss.detach().clone(), weight))

    def go_back(self, scaler: GradScaler | None) -> None:
        """Backprop of the last one."""
        if self._last is not None:
            (loss, weight), self._last = self._last, None
            if not self._goes_back:
                return
            loss = loss * weight if weight != 1.0 else loss
            torch.autograd.backward(loss if scaler is None else scaler.scale(loss))

    def total(self) -> float:
        """Their weighted sum."""
        return sum(float(loss) * weight for loss, weight in self._all)


def _copy_buffers(model: nn.Module) -> dict[str, Tensor]:
    """What buffers hold: statistics of a feed-forward that is not finite must not outlive it."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


@torch.no_grad()
def _restore_buffers(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


def _all_finite(job: Job, losses: _Losses) -> bool:
    """Whether the losses of all ranks are finite. Nothing has been sent of this step yet, so it
    can still be left out; the price is that each rank waits for the slowest one's feed-forward.
    """
    bad = not math.isfinite(losses.total())
    return job.world.all_reduce([float(bad)], "max")[0] == 0


def _update(job: Job, step: int, losses: _Losses, lr: float) -> StepResult:
    norm: float | None = None
    if job.scaler is not None:
        job.scaler.unscale_(job.optimizer)
    if job.settings.max_grad_norm > 0 and job.needs_gradients:
        norm = float(job.optimizer.clip_grad_norm_(job.settings.max_grad_norm))
        if not math.isfinite(norm) and job.scaler is None:
            job.optimizer.zero_grad()
            if job.settings.on_nan == "skip":
                return StepResult(math.nan, lr, norm, skipped=True)
            raise NonFiniteLossError(
                f"the gradient of step {step + 1} is not finite (its norm is {norm}), and the "
                "step was not taken; lower --lr, or skip such steps with --on-nan skip",
                code="not-finite",
            )
    if job.scaler is None:
        job.optimizer.step()
        return StepResult(losses.total(), lr, norm)
    scale = job.scaler.get_scale()
    job.scaler.step(job.optimizer)
    job.scaler.update()
    skipped = job.scaler.get_scale() < scale
    return StepResult(losses.total(), lr, None if skipped else norm, skipped=skipped)


LOG_INTERVAL = 10
_GUESSED_CHECKPOINT_S = 1.0  # until one was taken


@dataclass(frozen=True, slots=True)
class Due:
    """What is due after a step. end: the run has no more. save: a checkpoint. evaluation: of the
    model. row: of metrics, as with each evaluation.
    """

    end: bool
    save: bool
    evaluation: bool
    row: bool


@dataclass(frozen=True, slots=True)
class Timetable:
    """last: the run's last step; the first is 1.

    The intervals are in steps. 0: at the end alone; None: not even there.
    log_time_s, save_time_s: seconds after which a row or a checkpoint is due too; 0: never.
    mtbf_s: mean seconds between failures of the job, by which ``save_time_s`` is chosen; None: it
    was given.
    """

    last: int
    log_interval: int
    save_interval: int
    evaluation_interval: int | None
    log_time_s: float = 0.0
    save_time_s: float = 0.0
    mtbf_s: float | None = None

    @classmethod
    def of(cls, job: Job) -> Timetable:
        """The timetable of ``job``; without an interval it evaluates once in an epoch."""
        settings, interval = job.settings, None
        if job.evaluator is not None:
            chosen = settings.eval_interval
            interval = job.batches.steps_per_epoch if chosen is None else chosen
        is_auto = settings.checkpoint_interval == "auto"
        table = cls(
            job.total_steps,
            settings.log_interval or (0 if settings.log_time_s else LOG_INTERVAL),
            0 if settings.checkpoint_interval == "auto" else settings.checkpoint_interval,
            interval,
            settings.log_time_s or 0.0,
            settings.checkpoint_time_s,
            3600 * (settings.mtbf_hours or 0.0) / job.world.size if is_auto else None,
        )
        return table.adapted(_GUESSED_CHECKPOINT_S)

    def adapted(self, checkpoint_s: float) -> Timetable:
        """With checkpoints so far apart as loses least where each stops training for
        ``checkpoint_s``; unchanged where the time between them was given.
        """
        if self.mtbf_s is None:
            return self
        period_s = best_interval(checkpoint_s, self.mtbf_s) + checkpoint_s
        return replace(self, save_time_s=period_s)

    def after(self, step: int, *, since_row_s: float = 0.0, since_save_s: float = 0.0) -> Due:
        """What is due once ``step`` is taken.

        since_row_s, since_save_s: seconds since the last row and checkpoint, alike on all ranks.
        """
        end = step >= self.last
        save, evaluation, row = (
            interval is not None and (end or (interval > 0 and step % interval == 0))
            for interval in (self.save_interval, self.evaluation_interval, self.log_interval)
        )
        save = save or 0 < self.save_time_s <= since_save_s
        row = row or evaluation or 0 < self.log_time_s <= since_row_s
        return Due(end, save, evaluation, row)
