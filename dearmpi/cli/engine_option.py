"""Engine option: a flag for a setting of the engine, as ``EngineConfig`` declares it."""

from __future__ import annotations

from collections.abc import Callable, Container

import click
from click.decorators import FC

from dearmpi.config import engine_setting


def engine_option(setting: str, *, help: str, without: Container[str] = ()) -> Callable[[FC], FC]:
    """``--setting`` with its choices, but those in ``without``; ``help`` is the command's own."""
    own = engine_setting(setting)
    return click.option(
        f"--{setting.replace('_', '-')}",
        type=click.Choice([choice for choice in own.choices if choice not in without]),
        default=own.default,
        show_default=True,
        help=help,
    )
