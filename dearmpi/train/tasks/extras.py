"""Libraries that only some tasks need, each an extra of this package."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from dearmpi.errors import TaskError


def import_extra(module: str, *, library: str, extra: str, needed_by: str) -> Any:
    """Import ``module``, which comes with ``library``, an extra of this package by name ``extra``.

    Raises TaskError that says how to install it, or why what is installed cannot be used.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and module.split(".")[0] == error.name.split(".")[0]:
            raise TaskError(
                f"{needed_by} needs {library}, which is not installed: "
                f"pip install 'dearmpi[{extra}]'"
            ) from error
        raise _broken(library, needed_by, error) from error
    except Exception as error:
        # Libraries with compiled operators fail at import in many ways, not only by ImportError.
        raise _broken(library, needed_by, error) from error


def _broken(library: str, needed_by: str, error: Exception) -> TaskError:
    return TaskError(
        f"{needed_by} needs {library}, which is installed but cannot be imported: "
        f"{type(error).__name__}: {error}; install a {library} that fits this Python and torch"
    )
