"""Picture file: its name tells how it is drawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.decorators import FC

from dearmpi.cli.measurement import OUT, check_writable, write_file
from dearmpi.errors import ConfigError

if TYPE_CHECKING:
    from dearmpi.report.draw.shape import Picture


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
        raise ConfigError(f"--picture is {path}; its name must end in .svg or .png")
    check_writable(path)
    if path is not None and path.suffix == ".png":
        from dearmpi.report.draw import png

        png.check_pillow()


def write_picture(path: Path, picture: Picture) -> None:
    """Draw ``picture`` in the way of ``path``, which ``check_picture`` has seen."""
    from dearmpi.report.draw import png, svg

    write_file(path, png.draw(picture) if path.suffix == ".png" else svg.document(picture))
