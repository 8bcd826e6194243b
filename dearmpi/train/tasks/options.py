"""Options of a task: strings from the command line, read into a dataclass of the task's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from dearmpi.config import known_names
from dearmpi.errors import TaskError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Options = TypeVar("Options", bound=DataclassInstance)
else:
    Options = TypeVar("Options")

_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_WANTED = {int: "a whole number", float: "a number", bool: "true or false"}


def read_options(kind: type[Options], given: Mapping[str, str], *, task: str) -> Options:
    """Make a ``kind`` of the options ``given``; what is not given keeps its default.

    Fields may be int, float, bool, str, or one of these or None. Raises TaskError for an option
    that ``kind`` does not have, for a value of the wrong type, and for a missing option.
    """
    known = [field.name for field in fields(kind) if field.init]
    for name in given:
        if name not in known:
            raise TaskError(f"task {task} has no option {name!r}{known_names(name, known)}")
    types = get_type_hints(kind)
    values = {
        name: _convert(text, types[name], f"task {task}: option {name}")
        for name, text in given.items()
    }
    try:
        return kind(**values)
    except TypeError as error:
        raise TaskError(f"task {task}: {error}; give it with --task-option NAME=VALUE") from error


def check_at_least(task: str, name: str, value: int, least: int) -> None:
    """Raise TaskError unless the option ``name`` is ``least`` or more."""
    if value < least:
        raise TaskError(f"task {task}: option {name} is {value}; it must be at least {least}")


def _convert(text: str, kind: Any, what: str) -> object:
    if get_origin(kind) is UnionType:
        kind = next(part for part in get_args(kind) if part is not NoneType)
    if kind is str:
        return text
    try:
        return _BOOLEANS[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise TaskError(f"{what} is {text!r}; it must be {_WANTED[kind]}") from None
