"""Strip: how a model's parameters lie in buckets, each as wide as it is large."""

from __future__ import annotations

from collections.abc import Sequence

from dearmpi.report.draw.palette import bucket_colour, on_bucket_colour
from dearmpi.report.draw.shape import Box, Label, Picture, Shape, text_width
from dearmpi.report.draw.unit import size_text

_HEIGHT = 34.0


def draw_strip(name: str, title: str, sizes: Sequence[int], *, width: float) -> Picture:
    """Buckets of ``sizes`` bytes (at least one), in feed-forward order from the left."""
    shapes: list[Shape] = [
        Label(0, 12, "first layers", colour="faint"),
        Label(width, 12, "last layers", "end", "faint"),
    ]
    x, all_bytes = 0.0, sum(sizes)
    for bucket, size in enumerate(sizes):
        extent = width * size / all_bytes
        hint = f"bucket {bucket}: {size_text(size)}"
        shapes.append(Box(x, 20, extent - 0.7, _HEIGHT, bucket_colour(bucket), hint=hint))
        lines = [text for text in (str(bucket), size_text(size)) if text_width(text) < extent - 4]
        for row, text in enumerate(lines):
            y = 20 + _HEIGHT / 2 + 4 + (row - (len(lines) - 1) / 2) * 14
            colour = on_bucket_colour(bucket)
            shapes.append(Label(x + extent / 2, y, text, "middle", colour))
        x += extent
    total = f"{len(sizes)} buckets, {size_text(all_bytes)} in all"
    return Picture(name, title, width, 84, (*shapes, Label(0, 76, total, colour="faint")))
