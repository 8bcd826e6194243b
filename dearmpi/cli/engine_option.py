"""Engine option: a flag for a setting of the engine, with its choices and its default."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import click
from click.decorators import FC

from dearmpi.config import EngineConfig


def engine_option(setting: str, choices: object, *, help: str) -> Callable[[FC], FC]:
    """``--setting``, of a literal type's ``choices``."""
    return click.option(
        f"--{setting.replace('_', '-')}",
        type=click.Choice(get_args(choices)),
        default=getattr(EngineConfig(), setting),
        show_default=True,
        help=help,
    )
