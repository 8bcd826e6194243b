"""Command-line options that several commands share, made from the settings of a run."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Set
from typing import Any

import click
from click.decorators import FC

from dearmpi.config import engine_setting
from dearmpi.train.settings.setting import Setting
from dearmpi.train.settings.settings import SETTINGS, RunSettings
from dearmpi.train.settings.sources import CONFIG_VARIABLE, our_name

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_FLAG_WIDTH = 30


class SettingOption(click.Option):
    """The flag of one setting; its value stays text until all sources are known."""

    def __init__(self, name: str, about: Setting, *, hidden: bool = False) -> None:
        self.section = about.section
        details: dict[str, Any] = {"help": _help(name, about), "default": None, "hidden": hidden}
        if about.kind == "switch":
            flags = f"--{about.flag}/--no-{about.flag}"
        else:
            flags = f"--{about.flag}"
            details["metavar"] = "|".join(about.choices) or about.metavar
            details["multiple"] = about.is_pairs
        super().__init__([flags, name], **details)


class RunCommand(click.Command):
    """A command whose help lists its flags by section, and that knows what others call them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As the base class, which would take the nearest name for what was meant."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            ours = our_name(error.option_name)
            if ours is None:
                raise
            told = (
                f"No such option {error.option_name!r}; it is called --{SETTINGS[ours].flag} here."
            )
            raise click.NoSuchOption(error.option_name, told, ctx=ctx) from error

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one list of flags for each section, in the order of the settings."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(parameter, "section", "Other"), []).append(record)
        for section, records in sections.items():
            # One width for all sections: click would fit each list's own.
            padded = [(flags.ljust(_FLAG_WIDTH), text) for flags, text in records]
            with formatter.section(section):
                formatter.write_dl(padded, col_max=_FLAG_WIDTH)


def setting_options(*, hidden: Container[str] = ()) -> Iterator[click.Parameter]:
    """All flags, in order; the help leaves those of the settings in ``hidden`` out."""
    for name, about in SETTINGS.items():
        yield SettingOption(name, about, hidden=name in hidden)
    yield click.Option(
        ["--config", "config"],
        metavar="FILE",
        envvar=CONFIG_VARIABLE,
        help="YAML file with settings, named as the flags are",
    )


def _help(name: str, about: Setting) -> str:
    """The setting's help, with its default unless it says one itself."""
    default = RunSettings.__dataclass_fields__[name].default
    told = "default:" in about.help or default is None or about.is_pairs
    if told or about.kind == "switch":
        return about.help
    shown = f"{default:g}" if isinstance(default, float) else str(default)
    return f"{about.help}; default: {shown}"


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
