"""Combination: which flags of a command are given, and that each of them has an effect."""

from __future__ import annotations

from collections.abc import Set

import click


def given_flags(context: click.Context) -> set[str]:
    """The names of what stands on the command line."""
    return {
        name
        for name in context.params
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    }


def refuse_useless(context: click.Context, useless: Set[str], reason: str) -> None:
    """Raise UsageError for the first flag of ``useless``, if there is one, with the reason."""
    for option in context.command.params:
        if option.name in useless:
            raise click.UsageError(f"{option.opts[0]} {reason}", context)
