"""Own hook: one of a model that its copies do not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class OwnHook:
    """Calls ``hook``, of whatever kind.

    A copy of the module, or one that is read from a file, is an ordinary one: it has a hook that
    does nothing.
    """

    __slots__ = ("_hook",)

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *arguments: Any) -> Any:
        return self._hook(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return _hook_of_copies, ()


def _hook_of_copies() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    return None
