"""Files that a command writes: checked before it measures, written by rank 0 at its end."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.decorators import FC

from dearmpi.cli.console import Console
from dearmpi.errors import ConfigError
from dearmpi.train import disk

if TYPE_CHECKING:
    from dearmpi.comm.world import World
    from dearmpi.report.draw.shape import Picture

OUT = click.Path(dir_okay=False, readable=False, path_type=Path)


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
