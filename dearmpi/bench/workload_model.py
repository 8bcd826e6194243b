"""WorkloadModel: the work that every method does, the very same for each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from dearmpi.bench.replay import ReplayModel
from dearmpi.config import SPARSE, CommDtype
from dearmpi.engine.update.master import HALVES
from dearmpi.plan.model.profile import ModelProfile
from dearmpi.train.tasks.task import Task, collate

_LEARNING_RATE = 1e-3
_TOLERANCE = 0.02  # gradients may travel as bfloat16
# Of a gradient that is the same in all elements and steps: by its scale in bf16, or one code of 7.
# Others bring all of it, powersgd where its factors hold all.
_MOST_QUANTIZED: Mapping[str, float] = {
    "int8": 0.01,
    "int4": 0.15,
    "auto": 0.15,  # which may take int4
    **dict.fromkeys(SPARSE, 0.01),  # with a density of 1; parameters are of int8
}
_LEAST_SPARSE = 0.8  # of what sparse steps bring in the mean
_EXACT_RANKS = 8  # up to here half precision holds every sum of gradients, and of their parts
_MOST_LOST = 0.5  # in sums over however many ranks: what has not trained at all is found out
# Half of a number's last place, as a part of it.
_ROUNDED_OFF: Mapping[str, float] = {"bf16": 2.0**-8, "fp16": 2.0**-11}
_NUM_BATCHES = 4


@dataclass(frozen=True, slots=True)
class ReplayedModel:
    """A replayed workload. Each rank has gradients of its own, whose mean is known."""

    profile: ModelProfile
    batch_size: int
    rank: int
    world_size: int
    units_per_sample: int = 1

    @property
    def name(self) -> str:
        return f"{self.profile.workload.name} (replay)"

    @property
    def unit(self) -> str:
        return self.profile.workload.unit

    def build(self) -> nn.Module:
        return ReplayModel(self.profile, gradient=self._scale * (1.0 + self.rank))

    def make_optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        """Plain SGD: an accelerator would need next to no time for its update."""
        return SGD(params, lr=_LEARNING_RATE)

    def losses(self) -> Callable[[nn.Module], Tensor]:

        def loss(model: nn.Module) -> Tensor:
            outputs: Tensor = model(torch.zeros(1, requires_grad=True))
            return outputs.sum()

        return loss

    @property
    def _scale(self) -> int:
        """What gradients are multiples of: a share of them, too, is then a whole number.

        Peers divide by the ranks before they sum, this engine after it; either way bfloat16 holds
        all that is sent, on as many ranks as this. On more than those sums are rounded anyhow.
        """
        return self.world_size if self.world_size <= _EXACT_RANKS else 1

    def problem(
        self,
        model: nn.Module,
        num_steps: int,
        *,
        comm_dtype: CommDtype = "fp32",
        compress: str = "none",
        density: float = 1.0,
        progress: tuple[float, float] | None = None,
    ) -> str:
        """Compare both ends of every parameter with what averaged gradients make of them.

        Where half precision rounds sums, a step too few shows in short blocks only: what is lost
        in a step is the same in each, and so adds up.

        density: the part of a gradient that is sent in a step. Below 1 the ends tell nothing; all
        parameters together must have come as far as such steps bring them.
        progress: the steps that parameters may show, at least and at most; None: ``num_steps``.
        """
        if density < 1:
            return self._problem_of_sparse(model, num_steps, density)
        if progress is not None:
            return self._problem_of_progress(model, progress, _MOST_QUANTIZED.get(compress, 0.0))
        for name, param, gradient in self._gradients(model):
            expected = -_LEARNING_RATE * gradient * num_steps
            part = min(_TOLERANCE, 0.5 / num_steps)  # less than a step too few
            part = max(part, _MOST_QUANTIZED.get(compress, 0.0))
            most = max(part, self._lost_in_sums(comm_dtype)) * abs(expected)
            local = param.detach()
            local = local.to_local() if hasattr(local, "to_local") else local
            for value in local.flatten()[[0, -1]].tolist() if local.numel() else ():
                if abs(value - expected) <= most + _lost_on_the_wire(value):
                    continue
                if abs(value - _rounded(param.dtype, gradient, num_steps)) > most:
                    return f"{name} is {value:.6g} after {num_steps} steps, not {expected:.6g}"
        return ""

    def _gradients(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter, float]]:
        """What ``model`` trains, by name, and of each the mean over ranks of its gradient."""
        num_uses_of = Counter(name for layer in self.profile.workload.layers for name in layer.used)
        for name, param in model.named_parameters():
            if param.requires_grad:
                num_uses = num_uses_of.get(name, 1)
                yield name, param, num_uses * self._scale * (1 + self.world_size) / 2

    def _problem_of_progress(
        self, model: nn.Module, progress: tuple[float, float], part: float
    ) -> str:
        """Both ends of every parameter must lie between what the two numbers of steps make."""
        for name, param, gradient in self._gradients(model):
            most = _LEARNING_RATE * gradient * progress[1] * max(_TOLERANCE, part)
            low, high = (_LEARNING_RATE * gradient * steps for steps in progress)
            for value in param.detach().flatten()[[0, -1]].tolist() if param.numel() else ():
                if not low - most <= -value <= high + most:
                    return f"{name} is {value:.6g}, not {-high:.6g} to {-low:.6g}"
        return ""

    def _problem_of_sparse(self, model: nn.Module, num_steps: int, density: float) -> str:
        """A turn brings all that has gathered since an element's last one, or since the start."""
        num_turns = min(num_steps, math.ceil(1 / density))
        least = _LEAST_SPARSE * (1 - num_turns / num_steps * (1 - density * (num_turns + 1) / 2))
        done = whole = 0.0
        for _, param, gradient in self._gradients(model):
            done -= float(param.detach().double().sum())
            whole += _LEARNING_RATE * gradient * num_steps * param.numel()
        if least * whole <= done <= (1 + _TOLERANCE) * whole:
            return ""
        return f"parameters have come {done / whole:.3g} of their way, not {least:.3g} to 1"

    def _lost_in_sums(self, comm_dtype: CommDtype) -> float:
        """The part of a gradient that rounded sums may take or add: there is one for each rank,
        and they are half of the whole in the mean.
        """
        if self.world_size <= _EXACT_RANKS:
            return 0.0
        return min(_MOST_LOST, self.world_size / 2 * _ROUNDED_OFF.get(comm_dtype, 0.0))


@dataclass(frozen=True, slots=True)
class TaskModel:
    """A task of ``dear-train run``, on a few batches that each rank goes round.

    model: never trained itself.
    """

    model: nn.Module
    name: str
    batch_size: int
    unit: str
    units_per_sample: int
    batches: tuple[Any, ...]
    loss: Callable[[nn.Module, Any], Tensor]

    def build(self) -> nn.Module:
        return deepcopy(self.model)

    def make_optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        return SGD(params, lr=_LEARNING_RATE, momentum=0.9)

    def losses(self) -> Callable[[nn.Module], Tensor]:
        batches = cycle(self.batches)
        return lambda model: self.loss(model, next(batches))

    def problem(
        self,
        model: nn.Module,
        num_steps: int,
        *,
        comm_dtype: CommDtype = "fp32",
        compress: str = "none",
        density: float = 1.0,
        progress: tuple[float, float] | None = None,
    ) -> str:
        for name, param in model.named_parameters():
            if not bool(param.detach().isfinite().all()):
                return f"{name} is not finite after {num_steps} steps"
        return ""


WorkloadModel = ReplayedModel | TaskModel


def task_model(task: Task, *, batch_size: int, rank: int, world_size: int) -> TaskModel:
    """The workload model of a task; each rank takes samples of its own."""
    length, batches = len(task.train_data), []
    for number in range(_NUM_BATCHES):
        first = (number * world_size + rank) * batch_size
        samples = [task.train_data[(first + i) % length] for i in range(batch_size)]
        batches.append(collate(task, samples))
    return TaskModel(
        model=task.model,
        name=task.name,
        batch_size=batch_size,
        unit=task.unit.removesuffix("s"),
        units_per_sample=task.units_per_sample,
        batches=tuple(batches),
        loss=task.loss,
    )


def _lost_on_the_wire(value: float) -> float:
    """What rounding to half precision may have taken from ``value``, if it looks like that."""
    shown = torch.tensor(value)
    for dtype, part in _ROUNDED_OFF.items():
        if float(shown.to(HALVES[dtype])) == value:
            return part * abs(value)
    return 0.0


def _rounded(dtype: torch.dtype, gradient: float, num_steps: int) -> float:
    """What plain SGD makes of a number without a master copy, which ``dtype`` rounds each time."""
    value, change = torch.zeros((), dtype=dtype), torch.tensor(gradient, dtype=dtype)
    for _ in range(num_steps):
        value.add_(change, alpha=-_LEARNING_RATE)
    return float(value)
