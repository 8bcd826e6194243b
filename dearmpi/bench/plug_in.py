"""Plug-in: a method of the user's own, from a module that is imported by its name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from dearmpi.bench.method import Entrant, Factory, Method, Setup, asked_options
from dearmpi.comm.world import World
from dearmpi.config import CommDtype
from dearmpi.errors import ConfigError


def plug_in(text: str, *, comm_dtype: CommDtype = "fp32") -> Method:
    """The method of ``module:factory``, which is imported on every rank before anything is
    measured; the working folder is searched first.

    The factory takes a ``Setup`` and returns an ``Entrant``; ``torch.distributed`` is initialised.
    ``comm_dtype`` is among the setup's options, unless it is fp32.
    """
    module, colon, attribute = text.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"--method {text!r} is not of the form module:factory")

    def find(world: World) -> None:
        with _working_folder() as folder:
            _import(module, attribute, folder)

    def enter(setup: Setup) -> Entrant:
        with _working_folder() as folder:
            return _import(module, attribute, folder)(setup)

    return Method(text, enter, asked_options(comm_dtype), find=find)


@contextmanager
def _working_folder() -> Iterator[str]:
    """Let modules in it be imported, as Python does for a script's own folder."""
    entry = str(Path.cwd())
    sys.path.insert(0, entry)
    try:
        yield entry
    finally:
        sys.path.remove(entry)


def _import(module: str, attribute: str, folder: str) -> Factory:
    try:
        factory: Factory = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error}, neither installed nor in {folder}; install it, or start in its folder"
        ) from error
    return factory
