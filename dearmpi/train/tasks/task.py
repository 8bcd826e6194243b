"""Task: a model, its data and its loss, as one value that the trainer can train.

A task of your own is a function that takes the task options (a mapping of strings) and returns a
``Task``; name it on the command line as ``package.module:function`` or
``path/to/file.py:function``.
The trainer seeds torch, numpy and ``random`` alike on all ranks before it calls the function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Samples(Protocol):
    """A finite, indexable set of samples, such as a ``torch.utils.data.Dataset`` with a length."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Task:
    """What to train.

    name: shown in the log.
    model: built once, on the CPU, in fp32.
    train_data, eval_data: samples; ``eval_data`` may be None.
    loss: ``loss(model, batch)`` is the mean loss over the samples of the batch, a scalar.
    metrics: ``metrics(model, batch)`` gives sums over the batch's samples by name; the trainer
        divides by the number of samples over all ranks. None: only the loss is evaluated.
    collate: list of samples to a batch; None: torch's ``default_collate``.
    unit, units_per_sample: what throughput counts, such as 128 "tokens" or 1 "images".
    loss_scale_name, loss_scale: the name and factor under which the loss is shown to people, as
        ("bits per byte", 1/ln 2).
    notes: lines to print at the start, such as a baseline that the model must beat.
    summarize: ``summarize(model)`` gives closing lines, such as a sample of generated text.
    data_digest: stands for the contents of the data: ranks that have others, and a run that is
        resumed with others, are refused. Empty: not compared.
    defaults: run settings that suit this task, such as ``lr`` and ``epochs``, each used where
        the user gives none. They hold at any world size, since ``batch_size`` counts the samples
        of a step over all ranks.
    """

    name: str
    model: nn.Module
    train_data: Samples
    loss: Callable[[nn.Module, Any], Tensor]
    eval_data: Samples | None = None
    metrics: Callable[[nn.Module, Any], Mapping[str, float]] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    unit: str = "samples"
    units_per_sample: int = 1
    loss_scale_name: str = "loss"
    loss_scale: float = 1.0
    notes: Sequence[str] = ()
    summarize: Callable[[nn.Module], Sequence[str]] | None = None
    data_digest: str = ""
    defaults: Mapping[str, object] = field(default_factory=dict)


def collate(task: Task, samples: list[Any]) -> Any:
    """Make a batch of ``samples`` with the task's ``collate``, or with torch's default."""
    if task.collate is not None:
        return task.collate(samples)
    return torch.utils.data.default_collate(samples)
