"""Tasks by name: those built in, and a function of one's own, named as ``package.module:function``
or ``file.py:function``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from dearmpi.errors import CheckpointError, DataError, TaskError
from dearmpi.train.checkpoint.part import check_storable
from dearmpi.train.tasks.auc import build_auc
from dearmpi.train.tasks.bytes_lm import build_bytes_lm
from dearmpi.train.tasks.image_models import build_digits
from dearmpi.train.tasks.images import build_images
from dearmpi.train.tasks.own_code import (
    article,
    explained,
    find_own,
    importable,
    stay_importable,
)
from dearmpi.train.tasks.synthetic import build_synthetic
from dearmpi.train.tasks.task import AUC, SYNTHETIC, Task, check_task_name, count_samples

_BUILDERS: Mapping[str, Callable[[Mapping[str, str]], Task]] = {
    "bytes-lm": build_bytes_lm,
    "digits": build_digits,
    "images": build_images,
}


def build_task(name: str, options: Mapping[str, str]) -> Task:
    """Build the task ``name`` (one of TASK_FORMS) with ``options``.

    Raises TaskError for an unknown task or option, or a task that cannot be trained, and
    DataError for data that is missing, empty or unreadable.
    """
    kind, _, rest = name.partition(":")
    if name in _BUILDERS:
        task = _BUILDERS[name](options)
    elif kind == SYNTHETIC:
        task = build_synthetic(rest, options)
    elif kind == AUC and rest:
        task = build_auc(rest, options)
    else:
        check_task_name(name)
        task = build_custom(name, options)
    _check(task, name)
    return task


def prepare_to_load(name: str) -> None:
    """Let samples of the task ``name`` be unpickled in a process that did not build it."""
    if name not in _BUILDERS and name.partition(":")[0] not in (SYNTHETIC, AUC):
        stay_importable(name)


def _check(task: Task, name: str) -> None:
    """Raise TaskError or DataError for a task whose model or data cannot be trained."""
    if not isinstance(task.model, nn.Module):
        raise TaskError(
            f"task {name}: its model is {type(task.model).__name__}, not a torch.nn.Module",
            code="task-invalid",
        )
    if not any(parameter.requires_grad for parameter in task.model.parameters()):
        raise TaskError(
            f"task {name}: its model has no parameter that requires a gradient",
            code="nothing-to-train",
        )
    for key, value in task.model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise TaskError(
                f"task {name}: {key} in its model's state is {type(value).__name__}, and only "
                "tensors can be saved; make it a buffer, or leave it out of the state",
                code="value-not-storable",
            )
        try:
            check_storable(key, value)
        except CheckpointError as error:
            raise TaskError(f"task {name}: {error}", code=error.code) from error
    if task.units_per_sample < 1:
        raise TaskError(
            f"task {name}: units_per_sample is {task.units_per_sample}; it must be at least 1",
            code="task-invalid",
        )
    data = task.train_data
    if not hasattr(data, "__iter__") or count_samples(data) is not None:
        _check_length(data, f"task {name}: its training data")
    if task.eval_data is not None:
        _check_length(task.eval_data, f"task {name}: its evaluation data")


def _check_length(data: Any, what: str) -> None:
    if count_samples(data) is None:
        raise TaskError(
            f"{what} ({type(data).__name__}) has no length and index; give a "
            "sequence or a map-style torch.utils.data.Dataset",
            code="task-invalid",
        )
    if len(data) == 0:
        raise DataError(f"{what} is empty: 0 samples", code="data-insufficient")


class TrackedOptions(Mapping[str, str]):
    """Options that remember which of them were read."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = dict(options)
        self._unread = set(options)

    def __getitem__(self, name: str) -> str:
        self._unread.discard(name)
        return self._options[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)

    @property
    def unread(self) -> list[str]:
        """Names that were never read, sorted."""
        return sorted(self._unread)


def build_custom(name: str, options: Mapping[str, str]) -> Task:
    """Import the function that ``name`` names and call it with ``options``.

    Raises TaskError, with file and line, where the file, module or function is missing or fails.
    Raises it also for a result that is no Task, and for an option that was never read. A DearError
    of the function passes unchanged.
    """
    attribute = name.rpartition(":")[2]
    with importable(name, noun="task"):
        factory = find_own(name, noun="task", renew=True)
        tracked = TrackedOptions(options)
        with explained(f"task {name}: {attribute} failed"):
            task = factory(tracked)
    if not isinstance(task, Task):
        raise TaskError(
            f"task {name}: {attribute} returned {article(type(task).__name__)}, "
            "not a dearmpi.train.tasks.task.Task",
            code="task-invalid",
        )
    if tracked.unread:
        raise TaskError(
            f"task {name}: {attribute} did not use option {', '.join(map(repr, tracked.unread))}; "
            "check the spelling, or leave it out",
            code="unknown-task-option",
        )
    return task
