"""Task: a model, its data and its loss, as one value that the trainer can train.

A task of your own is a function that takes the task options (a mapping of strings) and returns a
``Task``; name it on the command line as ``package.module:function`` or
``path/to/file.py:function``.
The trainer seeds torch, numpy and ``random`` alike on all ranks before it calls the function.

Names and options of tasks, and libraries that only some tasks need, are here as well. This file
imports torch only to collate, so that commands that train nothing do without it.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, get_args, get_origin, get_type_hints

from dearmpi.config import known_names
from dearmpi.errors import TaskError
from dearmpi.plan.data.fields import regular_file

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from torch import Tensor, nn

    OptionsT = TypeVar("OptionsT", bound=DataclassInstance)
else:
    OptionsT = TypeVar("OptionsT")


CALLBACK_METHODS = (
    "on_fit_start",
    "on_step_end",
    "on_evaluation_end",
    "on_checkpoint_saved",
    "on_fit_end",
)


class Samples(Protocol):
    """A finite, indexable set of samples, such as a ``torch.utils.data.Dataset`` with a length."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Task:
    """What to train.

    name: shown in the log.
    model: built once, on the CPU, in fp32.
    train_data, eval_data: samples; ``eval_data`` may be None. ``train_data`` may be an iterable
        without a length, which gives the same samples in the same order on all ranks.
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
    callbacks: objects with some of CALLBACK_METHODS. Each takes a ``Fit``
        (``dearmpi.train.loop.callbacks``) and is called on every rank.
    """

    name: str
    model: nn.Module
    train_data: Any  # Samples, or an iterable without a length
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
    callbacks: Sequence[object] = ()


def count_samples(data: Samples | Iterable[Any]) -> int | None:
    """How many ``data`` has; None for a stream: no length and index, or an IterableDataset."""
    kinds = [kind.__name__ for kind in type(data).__mro__]  # torch's has an index that raises
    if "IterableDataset" in kinds or not (
        hasattr(data, "__len__") and hasattr(data, "__getitem__")
    ):
        return None
    samples: Any = data
    return len(samples)


def collate(task: Task, samples: list[Any]) -> Any:
    """Make a batch of ``samples`` with the task's ``collate``, or with torch's default."""
    if task.collate is not None:
        return task.collate(samples)
    from torch.utils.data import default_collate  # here: this file does without torch

    return default_collate(samples)


BUILT_IN = ("bytes-lm", "digits", "images")
SYNTHETIC = "synthetic"
SYNTHETIC_MODELS = ("bert-base", "bert-large", "resnet50")
LIBRARIES = ("torchvision", "timm", "transformers")
AUC = "auc"
AUC_TABLES = ("breast-cancer", "digits")
TASK_FORMS = (
    *BUILT_IN,
    *(f"{AUC}:{table}" for table in AUC_TABLES),
    f"{SYNTHETIC}:NAME",
    "package.module:function",
    "path/to/file.py:function",
)


def check_task_name(name: str) -> None:
    """Raise TaskError for a name that no task can have. Imports no module; a file of that name is
    read for what was meant.
    """
    kind, colon, rest = name.partition(":")
    if name in BUILT_IN:
        return
    if kind == SYNTHETIC:
        if rest not in SYNTHETIC_MODELS and rest.partition(":")[0] not in LIBRARIES:
            known = [*SYNTHETIC_MODELS, *(f"{library}:NAME" for library in LIBRARIES)]
            raise TaskError(
                f"there is no task {SYNTHETIC}:{rest}{known_names(rest, known)}",
                code="unknown-choice",
            )
    elif kind == AUC and colon:
        if rest not in AUC_TABLES:
            raise TaskError(
                f"there is no task {AUC}:{rest}{known_names(rest, AUC_TABLES)}",
                code="unknown-choice",
            )
    elif colon or name.endswith(".py"):
        place, _, attribute = name.rpartition(":")
        if not place or not attribute:
            raise TaskError(
                f"task {name!r} names no function; write {_meant(name.strip(':'))}",
                code="malformed-value",
            )
    elif os.path.isfile(f"{name}.py"):
        raise TaskError(
            f"there is no task {name!r}, but a file {name}.py; write --task {_meant(f'{name}.py')}",
            code="unknown-choice",
        )
    else:
        raise TaskError(
            f"there is no task {name!r}{known_names(name, TASK_FORMS)}", code="unknown-choice"
        )


def _meant(place: str) -> str:
    """The functions in the file ``place`` that may build a task, each as a task's name.

    Those that return a ``Task`` by their annotation, else those that take one argument.
    """
    try:
        with regular_file(place).open(encoding="utf-8") as file:
            body = ast.parse(file.read()).body
    except (OSError, ValueError, SyntaxError):
        body = []
    functions = [
        node
        for node in body
        if isinstance(node, ast.FunctionDef)
        and not node.name.startswith("_")
        and len(node.args.posonlyargs + node.args.args) == 1
    ]
    builders = [f for f in functions if f.returns and ast.unparse(f.returns).endswith("Task")]
    names = [f"{place}:{function.name}" for function in builders or functions]
    return " or ".join(names) or f"{place}:FUNCTION"


_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_WANTED = {int: "a whole number", float: "a number", bool: "true or false"}


def read_options(kind: type[OptionsT], given: Mapping[str, str], *, task: str) -> OptionsT:
    """Make a ``kind`` of the options ``given``; what is not given keeps its default.

    Fields may be int, float, bool, str, or one of these or None. Raises TaskError for an option
    that ``kind`` does not have, for a value of the wrong type, and for a missing option.
    """
    known = [field.name for field in fields(kind) if field.init]
    for name in given:
        if name not in known:
            raise TaskError(
                f"task {task} has no option {name!r}{known_names(name, known)}",
                code="unknown-task-option",
            )
    types = get_type_hints(kind)
    values = {
        name: _convert(text, types[name], f"task {task}: option {name}")
        for name, text in given.items()
    }
    try:
        return kind(**values)
    except TypeError as error:
        raise TaskError(
            f"task {task}: {error}; give it with --task-option NAME=VALUE",
            code="task-option-missing",
        ) from error


def check_at_least(task: str, name: str, value: int, least: int) -> None:
    """Raise TaskError unless the option ``name`` is ``least`` or more."""
    if value < least:
        raise TaskError(
            f"task {task}: option {name} is {value}; it must be at least {least}",
            code="out-of-range",
        )


def _convert(text: str, kind: Any, what: str) -> object:
    if get_origin(kind) is UnionType:
        kind = next(part for part in get_args(kind) if part is not NoneType)
    if kind is str:
        return text
    try:
        return _BOOLEANS[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise TaskError(
            f"{what} is {text!r}; it must be {_WANTED[kind]}", code="wrong-type"
        ) from None


def import_extra(module: str, *, library: str, extra: str, needed_by: str) -> Any:
    """Import ``module``, which comes with ``library``, an extra of this package by name ``extra``.

    Raises TaskError with the command that installs it, or with the reason why it cannot be
    imported.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and module.split(".")[0] == error.name.split(".")[0]:
            raise TaskError(
                f"{needed_by} needs {library}, which is not installed: "
                f"pip install 'dearmpi[{extra}]'",
                code="library-missing",
            ) from error
        raise _broken(library, needed_by, error) from error
    except Exception as error:
        # Libraries with compiled operators fail at import in many ways, not only by ImportError.
        raise _broken(library, needed_by, error) from error


def _broken(library: str, needed_by: str, error: Exception) -> TaskError:
    return TaskError(
        f"{needed_by} needs {library}, which is installed but cannot be imported: "
        f"{type(error).__name__}: {error}; install a {library} that fits this Python and torch",
        code="library-broken",
    )
