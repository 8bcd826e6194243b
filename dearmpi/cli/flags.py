"""Flags that several commands share, and the files that such flags name: checked before anything is
measured, written by rank 0 at the end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.decorators import FC
from click.shell_completion import CompletionItem

from dearmpi.cli.console import Console
from dearmpi.config import engine_setting, nearest
from dearmpi.errors import ConfigError
from dearmpi.train import disk
from dearmpi.train.settings.setting import Setting
from dearmpi.train.settings.settings import SETTINGS, RunSettings
from dearmpi.train.settings.sources import CONFIG_VARIABLE, our_name

if TYPE_CHECKING:
    from dearmpi.comm.world import World
    from dearmpi.report.draw.shape import Picture

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_FLAG_WIDTH = 30
_LONGEST_CHOICES = 50
_SHOWS_ALL = "dearmpi.shows_all_flags"


class SettingOption(click.Option):
    """The flag of one setting; its value stays text until all sources are known."""

    def __init__(self, name: str, about: Setting, *, hidden: bool = False) -> None:
        self.section, self.usual = about.section, about.usual
        details: dict[str, Any] = {"help": _help(name, about), "default": None, "hidden": hidden}
        if about.kind == "switch":
            flags = f"--{about.flag}/--no-{about.flag}"
        else:
            flags = f"--{about.flag}"
            details["metavar"] = about.metavar or _shown(about.choices)
            details["help"] += _listed(about.choices)
            details["multiple"] = about.is_pairs
        super().__init__([flags, name], **details)
        self._choices = about.choices

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The choices that begin like this; files where the value is a path."""
        if (self.metavar or "").endswith(("PATH", "FILE", "ROOT")):
            return [CompletionItem(incomplete, type="file")]
        begun = (choice for choice in self._choices if choice.startswith(incomplete))
        return [CompletionItem(choice) for choice in begun]


class Choice(click.Choice):  # type: ignore[type-arg]  # a class without parameters in click 8.1
    """A word of several; for another, the nearest is named."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As the base class."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            near = nearest(str(value), map(str, self.choices))
            self.fail(f"{error.message} {near}".strip(), param, ctx)


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
        """Write one list of flags for each section, in the order of the settings. Of the settings
        only the usual ones, unless all are requested.
        """
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if not (getattr(parameter, "usual", True) or ctx.meta.get(_SHOWS_ALL)):
                continue
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
        shell_complete=lambda *given: [CompletionItem(given[-1], type="file")],
        help="YAML file with settings, named as the flags are",
    )
    yield click.Option(
        ["--help-all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_show_all,
        help="Show every flag and exit.",
    )


def _show_all(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        context.meta[_SHOWS_ALL] = True
        click.echo(context.get_help(), color=context.color)
        context.exit()


def _shown(choices: Sequence[str]) -> str:
    """How choices are shown behind a flag; what is longer than a line of help has a name."""
    shown = "|".join(choices)
    return shown if len(shown) <= _LONGEST_CHOICES else "NAME"


def _listed(choices: Sequence[str]) -> str:
    """What help adds on choices that stand behind no flag."""
    return f"; NAME: {', '.join(choices)}" if _shown(choices) == "NAME" else ""


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
    choices = [choice for choice in own.choices if choice not in without]
    return click.option(
        f"--{setting.replace('_', '-')}",
        type=Choice(choices),
        metavar=_shown(choices),
        default=own.default,
        show_default=True,
        help=help + _listed(choices),
    )


def density_option() -> Callable[[FC], FC]:
    """``--density``, as a run has it."""
    return click.option(
        "--density", type=float, metavar="NUMBER", help=engine_setting("density").help
    )


def topology_option(*, help: str) -> Callable[[FC], FC]:
    """``--topology``, flat unless given."""
    return click.option(
        "--topology", default="flat", show_default=True, metavar="TOPOLOGY", help=help
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


class _File(click.Path):
    """A file's name; a folder is refused with what to give instead."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path."""
        if Path(value).is_dir():
            self.fail(f"{value or '.'} is a folder; give a file's name.", param, ctx)
        return Path(value)


OUT = _File(path_type=Path)
PATH = click.Path(path_type=Path)


def check_place(world: World, *paths: Path | None) -> None:
    """Raise ConfigError, on rank 0, for a file that cannot be written: measuring takes long."""
    for path in paths if world.is_root else ():
        check_writable(path)


def check_writable(path: Path | None) -> None:
    """Raise ConfigError for a file that cannot be written."""
    if path is None:
        return
    if os.path.exists(path):  # not Path.exists, which fails where it may not look
        if not os.access(path, os.W_OK):
            raise ConfigError(
                f"cannot write {path}: it is not yours to write; name another file",
                code="cannot-write",
            )
    elif not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise ConfigError(
            f"cannot write {path}: {path.absolute().parent} is no folder that can be written to; "
            "make it or name another",
            code="cannot-write",
        )


def check_apart(
    outputs: Mapping[str, Path | None], inputs: Mapping[str, Path | str | None] | None = None
) -> None:
    """Raise ConfigError where a file to write is another one, or one to read; both by flag."""
    known: dict[str, str] = {}
    for flag, path in (inputs or {}).items():
        if path is not None and os.path.isfile(path):
            known[os.path.realpath(path)] = f"{flag} reads"
    for flag, out in outputs.items():
        if out is None or (os.path.exists(out) and not os.path.isfile(out)):
            continue  # a device takes all
        place = os.path.realpath(out)
        if place in known:
            raise ConfigError(
                f"{flag} is {out}, which {known[place]} too; name another file",
                code="output-is-input",
            )
        known[place] = f"{flag} writes"


def write_file(path: Path, content: str | bytes) -> None:
    """Write ``content``, text as UTF-8. Raises ConfigError where that fails, as on a full disk."""
    try:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        is_full = error.errno in disk.DISK_FULL
        cure = "make room there, or name another file" if is_full else "name another file"
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; {cure}", code="cannot-write"
        ) from error


def write(world: World, console: Console, path: Path | None, text: str) -> None:
    """Have rank 0 write ``text``, if there is a ``path``, and say so (collective)."""
    from dearmpi.train.ranks.agreement import together

    if path is None:
        return
    with together(world, root_only=True):
        if world.is_root:
            write_file(path, text)
    console.say("", f"wrote {path}")


def picture_option(*, help: str) -> Callable[[FC], FC]:
    """``--picture``, which the command is given as ``picture_path``."""
    return click.option(
        "--picture", "picture_path", type=OUT, metavar="FILE.svg|FILE.png", help=help
    )


def check_picture(path: Path | None) -> None:
    """Raise ConfigError for a file that is no picture by its name, or that cannot be written or
    drawn.
    """
    if path is not None and path.suffix not in (".svg", ".png"):
        raise ConfigError(
            f"--picture is {path}; its name must end in .svg or .png", code="malformed-value"
        )
    check_writable(path)
    if path is not None and path.suffix == ".png":
        from dearmpi.report.draw import png

        png.check_pillow()


def write_picture(path: Path, picture: Picture) -> None:
    """Draw ``picture`` in the way of ``path``, which ``check_picture`` has seen."""
    from dearmpi.report.draw import png, svg

    write_file(path, png.draw(picture) if path.suffix == ".png" else svg.document(picture))
