"""Draws a picture as PNG, by Pillow, in the light palette, at twice the size, under its title."""

from __future__ import annotations

import io
from itertools import cycle
from typing import TYPE_CHECKING

from dearmpi.errors import ConfigError
from dearmpi.report.draw.shape import LIGHT, MARGIN, Box, Label, Line, Picture

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

_SCALE = 2  # pixels of the file for one of the picture
_FINER = 2  # drawn so much finer first, since Pillow's lines have hard edges
_HEAD, _TITLE = 30.0, 15.0  # above, and the title's size


def check_pillow() -> None:
    """Raise ConfigError where Pillow is not installed, or has no font of any size."""
    try:
        from PIL import ImageFont

        ImageFont.load_default(_TITLE)
    except (ImportError, OSError, TypeError) as error:  # TypeError: sizes came with 10.1
        raise ConfigError(
            "PNG pictures need Pillow 10.1 or newer, with FreeType: pip install 'dearmpi[images]'; "
            "SVG pictures need nothing",
            code="library-missing",
        ) from error


def draw(picture: Picture) -> bytes:
    """The file's content. Raises ConfigError as ``check_pillow`` does."""
    check_pillow()
    from PIL import Image, ImageDraw, ImageFont

    size = round(picture.width * _SCALE), round(picture.height * _SCALE)
    image = Image.new("RGB", (size[0] * _FINER, size[1] * _FINER), LIGHT["paper"])
    canvas = ImageDraw.Draw(image)
    for shape in picture.shapes:
        if isinstance(shape, Box):
            _draw_box(canvas, shape)
        elif isinstance(shape, Line):
            _draw_line(canvas, shape)
        elif isinstance(shape, Label):
            _draw_label(canvas, shape)
    margin, head = round(MARGIN * _SCALE), round(_HEAD * _SCALE)
    sheet = Image.new("RGB", (size[0] + 2 * margin, size[1] + 2 * margin + head), LIGHT["paper"])
    sheet.paste(image.resize(size, Image.Resampling.LANCZOS), (margin, margin + head))
    font = ImageFont.load_default(_TITLE * _SCALE)
    place = (margin, margin + _TITLE * _SCALE)
    ImageDraw.Draw(sheet).text(place, picture.title, fill=LIGHT["ink"], font=font, anchor="ls")
    file = io.BytesIO()
    # 256 colours take a third of the space; this way those of small areas are kept as well.
    few = sheet.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(file, "PNG", optimize=True)
    return file.getvalue()


def _draw_box(canvas: ImageDraw, box: Box) -> None:
    scale = _SCALE * _FINER
    left, top = box.x * scale, box.y * scale
    # Pillow counts the last pixel in.
    right = max(left, left + box.width * scale - 1)
    bottom = max(top, top + box.height * scale - 1)
    canvas.rectangle((left, top, right, bottom), fill=LIGHT[box.colour])
    if box.hatched:
        _hatch(canvas, left, top, right, bottom)


def _hatch(canvas: ImageDraw, left: float, top: float, right: float, bottom: float) -> None:
    """Stripes at 45 degrees, cut off at the rectangle's edges."""
    scale = _SCALE * _FINER
    height = bottom - top
    offset = left - height + scale * 3
    while offset < right:
        # The stripe runs from (offset, bottom) to (offset + height, top).
        start, stop = max(offset, left), min(offset + height, right)
        if start < stop:
            ends = (start, bottom - (start - offset)), (stop, bottom - (stop - offset))
            canvas.line(ends, fill="#8b3d00", width=round(scale * 1.5))
        offset += scale * 8


def _draw_line(canvas: ImageDraw, line: Line) -> None:
    scale = _SCALE * _FINER
    points = [(x * scale, y * scale) for x, y in line.points]
    width = max(1, round(line.width * scale))
    if not line.dashes:
        canvas.line(points, fill=LIGHT[line.colour], width=width, joint="curve")
        return
    for start, stop in zip(points, points[1:], strict=False):
        _draw_dashes(canvas, (start, stop), line, width)


def _draw_dashes(
    canvas: ImageDraw,
    ends: tuple[tuple[float, float], tuple[float, float]],
    line: Line,
    width: int,
) -> None:
    """The strokes of ``line`` between two of its points."""
    start, stop = ends
    across, down = stop[0] - start[0], stop[1] - start[1]
    length = (across**2 + down**2) ** 0.5
    place, lengths = 0.0, cycle(part * _SCALE * _FINER for part in line.dashes)
    while place < length:
        shares = [part / length for part in (place, min(place + next(lengths), length))]
        canvas.line(
            [(start[0] + across * share, start[1] + down * share) for share in shares],
            fill=LIGHT[line.colour],
            width=width,
        )
        place = shares[1] * length + next(lengths)


def _draw_label(canvas: ImageDraw, label: Label) -> None:
    from PIL import ImageFont

    scale = _SCALE * _FINER
    font = ImageFont.load_default(label.size * scale)
    anchor = {"start": "ls", "middle": "ms", "end": "rs"}[label.anchor]
    place = (label.x * scale, label.y * scale)
    canvas.text(place, label.text, fill=LIGHT[label.colour], font=font, anchor=anchor)
