"""Evaluation: loss and metrics over held-out samples, also of an average over the steps, and the
outcome of a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self, SupportsFloat

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dearmpi.comm.world import World
from dearmpi.errors import TaskError
from dearmpi.report.draw.units import value_text
from dearmpi.train.checkpoint.snapshot import Snapshot
from dearmpi.train.data.data import evaluation_shares, load_batch
from dearmpi.train.data.loading import BatchLoader, BatchRequest
from dearmpi.train.ranks.device import computing, convert_batch, device_of_model, send_batch
from dearmpi.train.ranks.random_state import capture_random_state, restore_random_state
from dearmpi.train.run.resuming import PREFIX
from dearmpi.train.settings.choices import Precision
from dearmpi.train.settings.settings import RunSettings
from dearmpi.train.tasks.own_code import explained
from dearmpi.train.tasks.task import Task

_NAME = f"{PREFIX}@ema/"  # no state of a script has such a name


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Means over ``num_samples`` samples."""

    loss: float
    num_samples: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run went.

    step: optimizer steps taken in all, earlier runs included.
    stopped: a request to stop ended it before its length was reached.
    first_loss, last_loss: mean of the first and the last row; None where no step was taken.
    train_s, elapsed_s: seconds of this run's steps, and of all that it did.
    samples_per_s: over all ranks, evaluations and checkpoints aside.
    hidden_share: share of communication time, over all ranks, that computation covered; None
        where there was none.
    num_skipped: steps left out because a loss or a gradient was not finite.
    """

    step: int
    stopped: bool
    first_loss: float | None
    last_loss: float | None
    evaluation: Evaluation | None
    train_s: float
    elapsed_s: float
    samples_per_s: float
    hidden_share: float | None
    num_skipped: int


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates a task's model on its held-out samples.

    loading: loads them. batch_size: samples of one feed-forward.
    names: of the task's metrics, the same on every rank.
    """

    task: Task
    loading: BatchLoader
    precision: Precision
    batch_size: int
    names: tuple[str, ...] = ()

    def run(
        self, world: World, *, stop_requested: Callable[[], bool] = lambda: False
    ) -> Evaluation | None:
        """Evaluate (collective). The model's parameters and buffers must be the same on all.

        stop_requested: whether this rank should stop, called before each batch. If any does, the
        result is None on all ranks.
        Random states stay as they are, so an evaluation does not change training.
        """
        sums, broken = [0.0] * (2 + len(self.names)), False
        assert self.task.eval_data is not None
        shares = evaluation_shares(
            len(self.task.eval_data), self.batch_size, world_size=world.size, rank=world.rank
        )
        wanted = [BatchRequest(indices, held_out=True, seed=indices[:1]) for indices in shares]
        state = capture_random_state()
        self.loading.expect(wanted, held_out=True)
        with evaluating(self.task.model):
            for one in wanted:
                broken = stop_requested()
                if broken:
                    break
                for place, value in enumerate(self._measure(one)):
                    sums[place] += value
        self.loading.expect((), held_out=True)  # no more, also where it was broken off
        restore_random_state(state)
        num_broken, count, loss, *rest = world.all_reduce([broken, *sums], "sum")
        if num_broken:
            return None
        means = {name: value / count for name, value in zip(self.names, rest, strict=True)}
        return Evaluation(loss / count, int(count), means)

    def _measure(self, wanted: BatchRequest) -> list[float]:
        """Sums over the samples: their number, loss, and the metrics in order."""
        loss, metrics = measure_batch(self.task, self.loading.load(wanted), self.precision)
        num_samples = len(wanted.indices)
        if sorted(metrics) != sorted(self.names):
            raise TaskError(
                f"task {self.task.name} returned the metrics {sorted(metrics)} for one batch "
                f"and {sorted(self.names)} for another; return the same names for every batch",
                code="metrics-invalid",
            )
        return [num_samples, loss * num_samples, *(metrics[name] for name in self.names)]


def measure_batch(task: Task, batch: Any, precision: Precision) -> tuple[float, dict[str, float]]:
    """Mean loss and the task's metrics (sums) of one batch, in the model's present mode."""
    device = device_of_model(task.model)
    batch = send_batch(convert_batch(batch, precision), device)
    with computing(device, precision):
        loss = task.loss(task.model, batch)
        if not isinstance(loss, SupportsFloat) or isinstance(loss, Tensor) and loss.numel() != 1:
            raise misfit_of_loss(task, loss)
        metrics = {} if task.metrics is None else task.metrics(task.model, batch)
    return float(loss), _numbers(task, metrics)


def misfit_of_loss(task: Task, loss: object) -> TaskError:
    """The error for what ``task`` returned as its loss and cannot be trained with."""
    shown = type(loss).__name__
    if isinstance(loss, Tensor):
        shown = f"a tensor of shape {tuple(loss.shape)}"
        if loss.numel() == 1:
            shown += " that does not depend on the parameters"
    return TaskError(
        f"task {task.name}: its loss must be a tensor of one number that depends on the "
        f"parameters, but it is {shown}; return the mean over the batch's samples",
        code="task-invalid",
    )


def _numbers(task: Task, metrics: Any) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        raise TaskError(
            f"task {task.name} returned a {type(metrics).__name__} as metrics; return a "
            "mapping of names to numbers",
            code="metrics-invalid",
        )
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TaskError(
                f"task {task.name} returned no number for the metric {name}: {error}; return "
                "the sum over the samples of the batch",
                code="metrics-invalid",
            ) from error
    return numbers


def probe_metrics(task: Task, precision: Precision) -> tuple[str, ...]:
    """Names of the task's metrics, from two held-out samples: what is wrong there shows early.

    Leaves torch's random state as it is. No names where there is nothing to evaluate on.
    """
    if task.eval_data is None:
        return ()
    with torch.random.fork_rng(devices=[]), evaluating(task.model):
        few = tuple(range(min(2, len(task.eval_data))))  # of one any metric is a number
        batch = load_batch(task, task.eval_data, few)
        with explained(f"task {task.name}: its loss or metrics failed on held-out samples"):
            _, metrics = measure_batch(task, batch, precision)
    return tuple(sorted(metrics))  # each rank's order is its own where they come from a set


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, ``model`` is in evaluation mode and nothing is recorded for gradients."""
    # Each module by itself: some models keep a part of them in evaluation mode for good.
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


@dataclass(slots=True)
class BestEvaluation:
    """The lowest held-out loss so far, and how long ago it was: the same on all ranks.

    keeps: whether the checkpoint of the best is kept. patience: evaluations without a lower loss
    after which the run is over; None: it never is.
    step, loss: of the best; None before the first evaluation. num_worse: evaluations since.
    last_step: of the last evaluation; a stop may have come before the one that was due.
    """

    keeps: bool = False
    patience: int | None = None
    step: int | None = None
    loss: float | None = None
    num_worse: int = 0
    last_step: int | None = None

    @classmethod
    def of(cls, settings: RunSettings, snapshot: Snapshot | None) -> Self:
        """What ``settings`` ask for, as far as the run that wrote ``snapshot`` had come."""
        stored: Mapping[str, Any] = {} if snapshot is None else snapshot.meta.get("best", {})
        return cls(settings.keep_best, settings.patience, **stored)

    @property
    def is_watched(self) -> bool:
        """Whether anything follows from an evaluation."""
        return self.keeps or self.patience is not None

    @property
    def is_over(self) -> bool:
        """Whether the last ``patience`` evaluations brought nothing."""
        return self.patience is not None and self.num_worse >= self.patience

    def note(self, step: int, loss: float) -> bool:
        """Whether ``loss``, after ``step``, is the lowest so far; a NaN never is."""
        self.last_step = step
        if not math.isnan(loss) and (self.loss is None or loss < self.loss):
            self.step, self.loss, self.num_worse = step, loss, 0
            return True
        self.num_worse += 1
        return False

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {
            "step": self.step,
            "loss": self.loss,
            "num_worse": self.num_worse,
            "last_step": self.last_step,
        }

    def describe(self, scale: float = 1.0) -> list[str]:
        """Lines for people on the best and on an early end. scale: for the loss that is shown."""
        if not self.is_watched or self.loss is None:
            return []
        line = f"lowest held-out loss: {value_text(self.loss * scale)} at step {self.step}"
        if self.keeps:
            line += ", kept as the checkpoint that the file best names"
        if self.is_over:
            line += f"; ended early, after {self.num_worse} evaluations without a lower one"
        return [line]


class Average:
    """The average over the steps of ``model``'s parameters, and its buffers as they are now.

    It follows a step when the parameters are current anyway: after the feed-forward of the next
    step. So it waits for no gather.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """decay: what a step keeps of the average before. Raises TaskError for a model that cannot
        be copied.
        """
        self._model, self._is_behind = model, False
        with explained("ema needs a copy of the model, which cannot be made"):
            self._averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
        self._averaged.requires_grad_(False)

    @property
    def model(self) -> nn.Module:
        """A model with the average as its parameters."""
        module: nn.Module = self._averaged.module
        return module

    def note_step(self) -> None:
        """A step was taken; its parameters are not read yet."""
        self._is_behind = True

    def catch_up(self) -> None:
        """Take the last step into the average; reads the parameters."""
        if self._is_behind:
            self._averaged.update_parameters(self._model)
            self._is_behind = False

    @torch.no_grad()
    def refresh(self) -> None:
        """Follow parameters and buffers, which are current and the same on all ranks."""
        self.catch_up()
        for own, current in zip(self.model.buffers(), self._model.buffers(), strict=True):
            own.copy_(current)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of it."""
        state = self._averaged.state_dict()
        return {_NAME + name: tensor for name, tensor in state.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from the ``tensors`` of a checkpoint."""
        state = {name.removeprefix(_NAME): tensor for name, tensor in tensors.items()}
        self._averaged.load_state_dict(state)
