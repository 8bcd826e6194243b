"""Callbacks of a run, found: those of the task, and one of the user's own."""

from __future__ import annotations

from dearmpi.config import known_names
from dearmpi.errors import TaskError
from dearmpi.train.tasks.own_code import explained, load_own
from dearmpi.train.tasks.task import CALLBACK_METHODS, Task


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
