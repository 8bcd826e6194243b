"""Pictures: what svg and png draw of them, axes, legends and charts."""

from __future__ import annotations

import io
import math
import xml.etree.ElementTree as ElementTree
from itertools import combinations

import pytest

from dearmpi.errors import ConfigError
from dearmpi.plan.data.workload import read_workload
from dearmpi.plan.model.network import PRESETS
from dearmpi.plan.model.profile import profile_workload
from dearmpi.plan.rivals.methods import parse_method
from dearmpi.plan.rivals.side_by_side import compare
from dearmpi.report.draw import png, svg
from dearmpi.report.draw.charts import Bar, Series, draw_bars, draw_chart
from dearmpi.report.draw.curves import draw_comparisons
from dearmpi.report.draw.shape import (
    DARK,
    DASHES,
    LIGHT,
    Axis,
    Box,
    Key,
    Label,
    Line,
    Picture,
    axis_over,
    bucket_colour,
    draw_legend,
    text_width,
    tick_step,
    tick_text,
)
from dearmpi.report.draw.tracks import TrackGroup, draw_tracks
from dearmpi.report.read.recording import Window
from dearmpi.span import Span, Track

NASTY = "<script>alert('x')</script> & \"so\""
KEYS = [Key("computes", "plain")]
PICTURE = Picture(
    "all",
    f"Everything: {NASTY}",
    200,
    100,
    (
        Box(10, 10, 50, 20, "lost", hatched=True, hint=NASTY),
        Line(((0, 90), (200, 90)), "grid", 2, DASHES),
        Label(100, 80, NASTY, "middle", "ink", 14),
    ),
)


@pytest.mark.parametrize("draw", [svg.document, svg.element])
def test_svg_is_well_formed_and_escaped(draw: object) -> None:
    assert callable(draw)
    root = ElementTree.fromstring(draw(PICTURE))
    texts = [node.text for node in root.iter() if node.tag.endswith(("text", "title"))]
    assert texts.count(NASTY) == 2
    assert "script" not in {node.tag.rpartition("}")[2] for node in root.iter()}


def test_a_file_of_svg_has_a_margin_on_paper_all_around() -> None:
    root = ElementTree.fromstring(svg.document(PICTURE))
    assert root.get("viewBox") == "-16 -16 232 132"
    paper = next(node for node in root if node.get("class") == "fpaper")
    assert [paper.get(key) for key in ("x", "y", "width", "height")] == ["-16", "-16", "232", "132"]


def test_every_colour_has_a_light_and_a_dark_form() -> None:
    assert LIGHT.keys() == DARK.keys()
    style = svg.style()
    assert all(f".f{name}{{" in style and f"--{name}:{DARK[name]}" in style for name in DARK)


@pytest.mark.parametrize("palette", [LIGHT, DARK])
@pytest.mark.parametrize("colour", ["ink", "faint", "lost-text"])
def test_text_has_contrast(palette: dict[str, str], colour: str) -> None:
    """4.5 to 1, as WCAG 2 (1.4.3) asks."""
    assert _contrast(palette[colour], palette["paper"]) >= 4.5


@pytest.mark.parametrize("bucket", range(6))
def test_text_on_a_bucket_has_contrast(bucket: int) -> None:
    colour = bucket_colour(bucket)
    assert _contrast(LIGHT[f"on-{colour}"], LIGHT[colour]) >= 4.5


@pytest.mark.parametrize("palette", [LIGHT, DARK])
def test_every_method_of_a_comparison_looks_different(palette: dict[str, str]) -> None:
    profile = profile_workload(read_workload("equal:8:4"), feed_forward_s=0.1, backprop_s=0.2)
    names = [f"{kind}:{cap}" for cap in range(1, 14) for kind in ("ddp", "dear")]
    methods = list(map(parse_method, names))
    sizes = [compare(profile, PRESETS[0], size, methods) for size in (2, 4, 8)]
    drawn = draw_comparisons(sizes, sizes, (1.0, 2.0, 3.0))
    lines = [s for s in drawn.shapes if isinstance(s, Line) and len(s.points) == len(sizes)]
    styles = {(palette[line.colour], line.dashes) for line in lines}
    assert len(styles) == len(methods) + 1  # and the bound
    colours = {tuple(bytes.fromhex(palette[line.colour][1:])) for line in lines}
    assert not any(_near(*pair) for pair in combinations(colours, 2))
    assert all(_contrast(palette[line.colour], palette["paper"]) >= 2 for line in lines)


@pytest.mark.parametrize("width", [340.0, 920.0])
def test_a_long_host_leaves_room_for_what_is_said_of_it(width: float) -> None:
    host = "rank 11 on gpu-node-0123.cluster.of-some-institute.example.org"
    note = "waits 123 ms"
    spans = (Span(Track.COMPUTE, "B fc", 0.0, 1.0, 1),)
    for drawn in (
        draw_bars("x", "x", [Bar(host, (1.0,), note)], keys=KEYS, unit="s", width=width),
        draw_tracks("x", "x", [TrackGroup(host, spans, Window(1, 0, 1), note)], width=width),
    ):
        labels = [shape for shape in drawn.shapes if isinstance(shape, Label)]
        (label,) = [one for one in labels if one.text.startswith("rank 11 on gpu-node")]
        (said,) = [one for one in labels if one.text == note]
        if said.anchor == "end":
            assert text_width(label.text) <= said.x - text_width(said.text)
        assert host in (label.text, label.hint)
        assert f">{host}</t" in svg.element(drawn)  # as text, or as its title


def test_png_shows_boxes_lines_and_text_where_they_are() -> None:
    image_module = pytest.importorskip("PIL.Image")
    image = image_module.open(io.BytesIO(png.draw(PICTURE))).convert("RGB")
    assert image.size == (400 + 64, 200 + 124)
    left, top = 32, 92
    image = image.crop((left, top, left + 400, top + 200))
    lost = tuple(bytes.fromhex(LIGHT["lost"][1:]))
    inside = {image.getpixel((x, 40)) for x in range(24, 116)}
    assert any(_near(pixel, lost) for pixel in inside)
    assert not all(_near(pixel, lost) for pixel in inside), "no stripes"
    assert not any(_near(image.getpixel((x, 40)), lost) for x in range(130, 400))
    along = {image.getpixel((x, 180)) == (255, 255, 255) for x in range(4, 396)}
    assert along == {True, False}, "a dashed line has gaps"
    assert any(sum(image.getpixel((x, 155))) < 300 for x in range(400)), "no text"


@pytest.mark.parametrize("failure", [TypeError, ImportError, OSError])
def test_a_pillow_without_fonts_is_told_as_none_is(
    monkeypatch: pytest.MonkeyPatch, failure: type[Exception]
) -> None:
    fonts = pytest.importorskip("PIL.ImageFont")

    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(fonts, "load_default", fail)
    with pytest.raises(ConfigError, match="need Pillow 10.1 .* pip install"):
        png.draw(PICTURE)


def test_ticks_are_round_and_few() -> None:
    for extent in (1e-6, 0.3, 1.0, 7.7, 12345.0, 3e9):
        for most in (2, 4, 9):
            axis = Axis(0.0, extent, 0.0, 100.0)
            ticks = axis.ticks(most)
            assert 1 <= len(ticks) <= most
            mantissa = tick_step(extent, most) / 10 ** math.floor(
                math.log10(tick_step(extent, most)) + 1e-9
            )
            assert any(math.isclose(mantissa, easy) for easy in (1, 2, 5))
    assert Axis(0, 10, 0, 100).ticks(6) == (0, 2, 4, 6, 8, 10)
    assert [tick_text(tick, 0.05) for tick in (0.0, 0.05)] == ["0.00", "0.05"]
    assert tick_text(2_000, 500) == "2,000"


@pytest.mark.parametrize(
    ("low", "high", "first"),
    [
        (2.30258, 2.30277, "2.30260"),
        (0.69315, 0.69319, "0.69315"),
        (1_234_667, 1_236_467, "1,235,000"),
        (0.0, 1.5e6, "0"),
        (0.0, 3e-8, "0"),
        (4e9, 4.3e9, "4e+09"),
    ],
)
def test_no_two_ticks_of_an_axis_are_called_the_same(low: float, high: float, first: str) -> None:
    for most in range(2, 10):
        step = tick_step(high - low, most)
        ticks = Axis(low, high, 0, 100).ticks(most)
        texts = [tick_text(tick, step) for tick in ticks]
        assert len(set(texts)) == len(texts)
        assert len({"e" in text for text in texts if text != "0"}) <= 1
        if most == 5:
            assert texts[0] == first


def test_an_axis_over_one_value_has_extent() -> None:
    for value in (0.0, 3.0, -2.0):
        for from_zero in (True, False):
            axis = axis_over([value], 0, 100, from_zero=from_zero)
            assert axis.low < axis.high and 0 <= axis.place(value) <= 100


def test_a_legend_breaks_lines_before_the_edge() -> None:
    keys = [Key(f"a name of some length {i}", "first") for i in range(5)]
    shapes, bottom = draw_legend(keys, width=340, top=0)
    labels = [shape for shape in shapes if isinstance(shape, Label)]
    assert all(label.x + text_width(label.text) <= 340 for label in labels)
    assert len({label.y for label in labels}) == 5 and bottom > labels[-1].y


@pytest.mark.parametrize("width", [340.0, 920.0])
def test_a_chart_stays_within_its_frame(width: float) -> None:
    points = tuple((float(step), 1e-7 * step) for step in range(5, 1000, 7))
    series = [Series("loss", points, "first"), Series("held out", points[:1], "second")]
    chart = draw_chart("loss", "Loss", series, unit="loss", width=width)
    for shape in chart.shapes:
        if isinstance(shape, Line):
            assert all(0 <= x <= width and 0 <= y <= chart.height for x, y in shape.points)
        elif isinstance(shape, Label) and shape.anchor == "end":
            assert shape.x >= text_width(shape.text)


def test_a_long_run_is_thinned() -> None:
    points = tuple((float(i), float(i % 7)) for i in range(100_000))
    chart = draw_chart("x", "x", [Series("x", points, "first")], unit="x", width=900)
    assert len(svg.element(chart)) < 20_000


def _near(pixel: tuple[int, ...], colour: tuple[int, ...]) -> bool:
    return max(abs(a - b) for a, b in zip(pixel, colour, strict=True)) < 24


def _contrast(one: str, other: str) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = []
    for value in bytes.fromhex(colour[1:]):
        share = value / 255
        parts.append(share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4)
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def test_a_checkpoint_shows_in_an_iteration_where_it_is_not_waiting_for_others() -> None:
    spans = (
        Span(Track.CHECKPOINT, "checkpoint", 0.0, 0.6, 1),
        Span(Track.WAIT, "bucket 0", 0.0, 0.2, 1),
        Span(Track.COMPUTE, "B fc", 0.6, 1.0, 1),
    )
    drawn = draw_tracks("x", "x", [TrackGroup("rank 0", spans, Window(1, 0, 1))], width=920.0)
    hints = [shape.hint for shape in drawn.shapes if isinstance(shape, Box)]
    assert "saves a checkpoint: 400 ms" in hints
    assert "saves a checkpoint" in [s.text for s in drawn.shapes if isinstance(s, Label)]
