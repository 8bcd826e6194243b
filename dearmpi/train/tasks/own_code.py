"""Own code: functions and classes of the user's, named as ``package.module:NAME`` or
``FILE.py:NAME``, and the callbacks of a run among them.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from dearmpi.config import known_names
from dearmpi.errors import DearError, TaskError
from dearmpi.train.tasks.task import CALLBACK_METHODS, Task


@contextmanager
def importable(name: str, *, noun: str) -> Iterator[None]:
    """Inside, modules beside the file in ``name`` can be imported, as Python does for a script's
    own folder; for a module those in the working folder.
    """
    with explained(f"{noun} {name!r}: its path cannot be read"):
        path = _file_of(name.rpartition(":")[0])
    entry = str(Path.cwd() if path is None else path.parent)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        if entry in sys.path:
            sys.path.remove(entry)


def load_own(name: str, *, noun: str) -> Callable[..., Any]:
    """The function or class that ``name`` names. noun: what it serves as, for errors.

    Raises TaskError, with file and line, where file, module or attribute is missing or fails.
    """
    with importable(name, noun=noun):
        return find_own(name, noun=noun)


def find_own(name: str, *, noun: str, renew: bool = False) -> Callable[..., Any]:
    """As ``load_own``, inside ``importable``. renew: a file that has been run is run again."""
    place, _, attribute = name.rpartition(":")
    label = f"{noun} {name}"
    path = _file_of(place)
    module = _import(place, label) if path is None else _load_file(path, label, renew=renew)
    found = getattr(module, attribute, None)
    if callable(found):
        called: Callable[..., Any] = found
        return called
    if found is not None:
        raise TaskError(
            f"{label}: {attribute} in {module.__file__} is "
            f"{article(type(found).__name__)}, not a function or class",
            code="task-invalid",
        )
    own = [
        key
        for key, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
    raise TaskError(
        f"{label}: {module.__file__} has no function or class {attribute!r}"
        f"{known_names(attribute, own)}",
        code="unknown-choice",
    )


def stay_importable(name: str) -> None:
    """Make the module or file in ``name`` importable for the rest of this process, which did not
    build the task.
    """
    path = _file_of(name.rpartition(":")[0])
    sys.path.insert(0, str(Path.cwd() if path is None else path.parent))
    if path is not None:
        _load_file(path, f"task {name}", renew=True)


def _file_of(place: str) -> Path | None:
    """The file that ``place`` names; None for a module."""
    if not place.endswith(".py"):
        return None
    path = Path(place).expanduser().resolve()
    path.exists()  # raises for what cannot be a path at all
    return path


def _import(place: str, label: str) -> ModuleType:
    with explained(f"{label}: module {place} cannot be imported"):
        return importlib.import_module(place)


def _load_file(path: Path, label: str, *, renew: bool) -> ModuleType:
    """Run the file as a module under a name that no other module has."""
    if not path.is_file():
        raise TaskError(
            f"{label}: there is no file {path}; resume in the folder in which the run "
            f"began, or give --{label.partition(' ')[0]} with the path from here",
            code="file-missing",
        )
    # Two files of one name, and the user's own package of that name, must not meet.
    module_name = f"dearmpi_task_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if not renew and module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None, "a name that ends in .py has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickling look a class's module up by its name.
    sys.modules[module_name] = module
    try:
        with explained(f"{label}: {path} cannot be run"):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


@contextmanager
def explained(what: str) -> Iterator[None]:
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
    libraries = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    others = (*libraries, str(Path(__file__).parents[2]), "<frozen")
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(others)
    ]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


def article(noun: str) -> str:
    if noun == "NoneType":
        return "nothing (None)"
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def find_callbacks(task: Task, name: str | None) -> tuple[object, ...]:
    """The task's callbacks, and then the one that ``name`` makes. Raises TaskError for what is
    none.
    """
    found = list(task.callbacks)
    if name is not None:
        if not all(name.rpartition(":")):
            raise TaskError(
                f"callback {name!r} names no function; write FILE.py:NAME or package.module:NAME",
                code="malformed-value",
            )
        make = load_own(name, noun="callback")
        with explained(f"callback {name} failed"):
            found.append(make())
    for one in found:
        _check(one)
    return tuple(found)


def _check(callback: object) -> None:
    name, methods = type(callback).__name__, [one for one in dir(callback) if one[:3] == "on_"]
    for method in methods:
        if method not in CALLBACK_METHODS:
            raise TaskError(
                f"callback {name} has a method {method}, which nothing calls"
                f"{known_names(method, CALLBACK_METHODS)}",
                code="unknown-choice",
            )
    if not methods:
        raise TaskError(
            f"callback {name} has none of the methods {', '.join(CALLBACK_METHODS)}; name a class, "
            "or a function that returns an object with some of them",
            code="task-invalid",
        )
