"""Tasks by name: those built in, and a function of one's own, named as ``package.module:function``
or ``file.py:function``.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from dearmpi.config import known_names
from dearmpi.errors import CheckpointError, DataError, DearError, TaskError
from dearmpi.train.checkpoint.part import check_storable
from dearmpi.train.tasks.bytes_lm import build_bytes_lm
from dearmpi.train.tasks.digits import build_digits
from dearmpi.train.tasks.images import build_images
from dearmpi.train.tasks.synthetic import build_synthetic
from dearmpi.train.tasks.task import SYNTHETIC, Task, check_task_name

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
    else:
        check_task_name(name)
        task = build_custom(name, options)
    _check(task, name)
    return task


def prepare_to_load(name: str) -> None:
    """Let samples of the task ``name`` be unpickled in a process that did not build it."""
    if name not in _BUILDERS and name.partition(":")[0] != SYNTHETIC:
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
    _check_length(task.train_data, f"task {name}: its training data")
    if task.eval_data is not None:
        _check_length(task.eval_data, f"task {name}: its evaluation data")


def _check_length(data: object, what: str) -> None:
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
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
    place, _, attribute = name.rpartition(":")
    with _explained(f"task {name!r}: its path cannot be read"):
        path = _file_of(place)
    with _importable(Path.cwd() if path is None else path.parent):
        module = _import(place, name) if path is None else _load_file(path, name)
        factory = _find(module, attribute, name)
        tracked = TrackedOptions(options)
        with _explained(f"task {name}: {attribute} failed"):
            task = factory(tracked)
    if not isinstance(task, Task):
        raise TaskError(
            f"task {name}: {attribute} returned {_article(type(task).__name__)}, "
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


def stay_importable(name: str) -> None:
    """Make the module or file in ``name`` importable for the rest of this process, which did not
    build the task.
    """
    path = _file_of(name.rpartition(":")[0])
    sys.path.insert(0, str(Path.cwd() if path is None else path.parent))
    if path is not None:
        _load_file(path, name)


def _file_of(place: str) -> Path | None:
    """The file that ``place`` names; None for a module."""
    if not place.endswith(".py"):
        return None
    path = Path(place).expanduser().resolve()
    path.exists()  # raises for what cannot be a path at all
    return path


def _find(module: ModuleType, attribute: str, name: str) -> Callable[[Mapping[str, str]], object]:
    factory = getattr(module, attribute, None)
    if callable(factory):
        found: Callable[[Mapping[str, str]], object] = factory
        return found
    if factory is not None:
        raise TaskError(
            f"task {name}: {attribute} in {module.__file__} is "
            f"{_article(type(factory).__name__)}, not a function",
            code="task-invalid",
        )
    own = [
        key
        for key, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
    raise TaskError(
        f"task {name}: {module.__file__} has no function {attribute!r}"
        f"{known_names(attribute, own)}",
        code="unknown-choice",
    )


def _import(place: str, name: str) -> ModuleType:
    with _explained(f"task {name}: module {place} cannot be imported"):
        return importlib.import_module(place)


def _load_file(path: Path, name: str) -> ModuleType:
    """Run the file as a module under a name that no other module has."""
    if not path.is_file():
        raise TaskError(
            f"task {name}: there is no file {path}; resume in the folder in which the run "
            "began, or give --task with the path from here",
            code="file-missing",
        )
    # Two files of one name, and the user's own package of that name, must not meet.
    module_name = f"dearmpi_task_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None, "a name that ends in .py has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickling look a class's module up by its name.
    sys.modules[module_name] = module
    try:
        with _explained(f"task {name}: {path} cannot be run"):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let modules in ``folder`` be imported, as Python does for a script's own folder."""
    entry = str(folder)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        if entry in sys.path:
            sys.path.remove(entry)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn what the user's code raises into a TaskError with its file and line."""
    try:
        yield
    except DearError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(
            f"{what}: {type(error).__name__}: {_message(error)}{_origin(error)}",
            code="task-code-failed",
        ) from error


def _message(error: BaseException) -> str:
    return error.msg if isinstance(error, SyntaxError) else str(error)


def _origin(error: BaseException) -> str:
    """`` (file:line)`` of the syntax error, or of the innermost frame that is the user's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and not frame.filename.startswith("<frozen")
    ]
    if not frames:
        return ""
    libraries = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    own = [frame for frame in frames if not frame.filename.startswith(libraries)]
    innermost = (own or frames)[-1]
    return f" ({innermost.filename}:{innermost.lineno})"


def _article(noun: str) -> str:
    if noun == "NoneType":
        return "nothing (None)"
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"
