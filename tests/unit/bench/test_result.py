"""What a benchmark's numbers become: bounds, table, JSON and picture."""

from __future__ import annotations

import json
from dataclasses import astuple, replace
from xml.etree import ElementTree

import pytest

from dearmpi.bench.collective_times import Overlap
from dearmpi.bench.output import describe_result, draw, result_json
from dearmpi.bench.result import Block, Bounds, LinkTimes, MeasuredIteration, Result, Row, quartiles
from dearmpi.config import CommDtype
from dearmpi.report.draw.shape import MARGIN, text_width
from dearmpi.report.draw.units import align

SPACE = "{http://www.w3.org/2000/svg}"


def bounds(*, ff: float, bp: float, rs: float, ag: float) -> Bounds:
    return Bounds(
        feed_forward_s=ff,
        backprop_s=bp,
        update_s=0.5,
        reduce_scatter_s=rs,
        all_gather_s=ag,
        num_buckets=3,
        payload_bytes=12_000_000,
    )


def block(*totals: float, cpu_s: float = 0.25, peak_bytes: int | None = 7_000_000) -> Block:
    iterations = tuple(MeasuredIteration(t / 4, t / 2, t / 4) for t in totals)
    return Block(iterations, cpu_s, peak_bytes)


def result() -> Result:
    alone = Row("alone", [Block((MeasuredIteration(1.0, 2.0, 0.125),), 0.125, 5_000_000)])
    good = Row("dear", [block(4.0, 4.5), block(5.0, 4.25, peak_bytes=9_000_000)])
    bad = Row("<peer>:f", [], "rank 1: OSError: no accelerator & no luck")
    return Result(
        subject="resnet50 (replay)",
        unit="img",
        batch_size=64,
        units_per_sample=1,
        world_size=4,
        hosts=2,
        alone=alone,
        rows=[good, bad],
        link=[LinkTimes(1.5, 2.5), LinkTimes(1.0, 1.5), LinkTimes(1.25, 1.25)],
        num_buckets=3,
        payload_bytes=12_000_000,
    )


@pytest.mark.parametrize(
    ("ff", "bp", "rs", "ag", "dear_s", "absolute_s"),
    [
        (1, 2, 1, 1, 3, 3),  # all hidden
        (1, 2, 3, 3, 6, 6),  # the network is busy throughout
        (1, 2, 1.5, 1.5, 3.5, 3),  # idle network in backprop that DeAR cannot use
        (1, 2, 3, 0.5, 4, 3.5),
    ],
)
def test_bounds_are_those_of_the_papers(
    ff: float, bp: float, rs: float, ag: float, dear_s: float, absolute_s: float
) -> None:
    found = bounds(ff=ff, bp=bp, rs=rs, ag=ag)
    assert (found.dear_s, found.absolute_s) == (dear_s, absolute_s)


def test_bounds_come_from_medians_and_leave_the_update_out() -> None:
    found = result().bounds
    assert found is not None
    assert (found.reduce_scatter_s, found.all_gather_s) == (1.25, 1.5)
    assert (found.compute_s, found.update_s, found.dear_s) == (3.0, 0.125, 2.0 + 1.5)


def test_there_are_no_bounds_without_computation_alone() -> None:
    unfinished = result()
    unfinished.alone.blocks.clear()
    assert unfinished.bounds is None
    assert "bound of" not in "\n".join(describe_result(unfinished))


def test_quartiles() -> None:
    assert quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == (2.0, 4.0)
    assert quartiles([3.0]) == (3.0, 3.0)


def test_the_table_holds_every_figure() -> None:
    lines = describe_result(result())
    row = next(line for line in lines if line.startswith("dear ") and "/sec" not in line)
    # median, quartiles, 64 images / median, over either bound, exposed, CPU seconds, megabytes
    assert row.split() == [
        "dear", "4.3750", "4.1875-4.6250", "14.6", "1.250", "1.458", "1.375", "0.250", "9",
    ]  # fmt: skip
    assert "<peer>:f: rank 1: OSError: no accelerator & no luck" in lines


def test_the_table_tells_what_a_method_chose_for_itself() -> None:
    told = result()
    told.rows[0].blocks[1] = replace(
        told.rows[0].blocks[1], note="dear, 3 buckets, 4.1 s predicted"
    )
    lines = describe_result(told)
    assert "dear, round 1: dear, 3 buckets, 4.1 s predicted, 4.6250 s in the mean" in lines
    assert not any("round 0" in line for line in lines)


@pytest.mark.parametrize(
    ("sent", "of_bounds", "is_told"),
    [("bf16", "fp32", True), ("fp32", "fp32", False), ("fp16", "bf16", False)],
)
def test_rows_that_send_less_than_the_bounds_are_of_are_named(
    sent: CommDtype, of_bounds: CommDtype, is_told: bool
) -> None:
    told = replace(result(), comm_dtype=of_bounds)
    told.rows[0].comm_dtype = told.rows[1].comm_dtype = sent  # the second has not been measured
    remark = "bounds are of what is sent as fp32; below them may be dear"
    assert (remark in describe_result(told)) == is_told
    texts = [text.text for text in ElementTree.fromstring(draw(told)).iter(f"{SPACE}text")]
    assert ("bound of DeAR in fp32 3.500" if is_told else "bound of DeAR 3.500") in texts


def test_rates_have_the_form_of_the_field() -> None:
    lines = describe_result(result())
    # 64 / 4.25 and 64 / 4.625 images per second
    assert "dear         Img/sec per CPU: 14.4 +-1.2" in lines
    assert "dear         Total img/sec on 4 CPU(s): 57.8 +-4.8" in lines


def test_one_value_has_no_spread() -> None:
    """Which is unknown then, and not zero."""
    told = result()
    told.rows[0].blocks = [block(4.0)]
    lines = describe_result(told)
    assert "dear         Img/sec per CPU: 16.0" in lines
    assert "dear         Total img/sec on 4 CPU(s): 64.0" in lines
    cells = {line.split()[0]: line.split()[1:3] for line in lines if line and "/sec" not in line}
    assert (cells["alone"], cells["dear"]) == (["3.1250", "-"], ["4.0000", "-"])
    told.rows[0].blocks = [block(4.0, 4.5)]  # of one round there are quartiles all the same
    lines = describe_result(told)
    assert not any("+-" in line for line in lines)
    assert any("4.1250-4.3750" in line for line in lines)


def test_columns_are_aligned() -> None:
    assert align([("a", "bb"), ("ccc", "d")]) == ["a    bb", "ccc   d"]


def test_the_file_holds_every_iteration_and_the_bounds() -> None:
    plain = json.loads(result_json(result()))
    dear, peer = plain["rows"]
    assert [len(one["iterations"]) for one in dear["blocks"]] == [2, 2]
    assert dear["median_s"] == 4.375 and dear["ratio_to_dear_bound"] == 1.25
    assert peer["error"].startswith("rank 1") and "median_s" not in peer
    assert (plain["bounds"]["compute_s"], dear["exposed_s"]) == (3.0, 1.375)
    assert plain["bounds"]["dear_s"] == 3.5 and plain["versions"]["torch"]


def test_the_picture_is_well_formed_and_bars_are_in_proportion() -> None:
    root = ElementTree.fromstring(draw(result()))
    bars = [bar for bar in root.iter(f"{SPACE}rect") if bar.get("class") in ("fplain", "ffirst")]
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert widths[1] / widths[0] == pytest.approx(4.375 / 3.125, rel=0.01)
    texts = [text.text for text in root.iter(f"{SPACE}text")]
    assert {"alone", "dear", "<peer>:f", "failed", "bound of DeAR 3.500"} <= set(texts)
    width = float(root.attrib["width"]) - 2 * MARGIN
    points = [line.attrib["points"].split() for line in root.iter(f"{SPACE}polyline")]
    assert points
    assert all(0 <= float(point.partition(",")[0]) <= width for line in points for point in line)


def short(scale: float) -> Result:
    """``result()`` with all times multiplied."""
    told = result()
    for row in (told.alone, *told.rows):
        row.blocks = [
            replace(
                one,
                iterations=tuple(
                    MeasuredIteration(*(scale * s for s in astuple(i))) for i in one.iterations
                ),
                cpu_s=scale * one.cpu_s,
            )
            for one in row.blocks
        ]
    link = [LinkTimes(scale * t.reduce_scatter_s, scale * t.all_gather_s) for t in told.link]
    return replace(told, link=link)


@pytest.mark.parametrize(("scale", "unit"), [(1e-3, "ms"), (1e-6, "us")])
def test_short_times_stand_in_a_smaller_unit(scale: float, unit: str) -> None:
    whole, small = describe_result(result()), describe_result(short(scale))
    (header,) = [line for line in small if line.startswith("method ")]
    assert f"median {unit}" in header and f"exposed {unit}" in header and f"CPU {unit}" in header
    # All figures are those of a thousand or a million times as long, in their seconds.
    for start in ("compute alone", "communication alone", "bound of DeAR", "bound of any"):
        (line,) = [line for line in whole if line.startswith(start)]
        assert line.replace(" s", f" {unit}", 1) in small
    cells = [
        next(line.split() for line in lines if line.startswith("dear ") and "/sec" not in line)
        for lines in (whole, small)
    ]
    assert cells[0][:3] + cells[0][4:] == cells[1][:3] + cells[1][4:]
    root = ElementTree.fromstring(draw(short(scale)))
    texts = [text.text for text in root.iter(f"{SPACE}text")]
    assert "bound of DeAR 3.500" in texts and "4.375" in texts
    name = {"ms": "milliseconds", "us": "microseconds"}[unit]
    assert any(f": {name} per iteration" in str(text) for text in texts)


def test_one_slow_iteration_flattens_no_bar() -> None:
    slow = result()
    slow.rows[0].blocks.append(block(4.4, 400.0))
    root = ElementTree.fromstring(draw(slow))
    bars = [bar for bar in root.iter(f"{SPACE}rect") if bar.get("class") == "ffirst"]
    assert float(bars[0].attrib["width"]) > 300


@pytest.mark.parametrize("compute_s", [1e-3, 100.0])
def test_what_is_said_of_a_bound_stays_within_the_picture(compute_s: float) -> None:
    told = result()
    told.alone.blocks = [Block((MeasuredIteration(compute_s, compute_s, 0.1),), 0.1, None)]
    told.link = [LinkTimes(1e-3, 1e-3)]
    told.rows = told.rows[:1]
    root = ElementTree.fromstring(draw(told))
    width = float(root.attrib["width"]) - 2 * MARGIN
    labels = [text for text in root.iter(f"{SPACE}text") if str(text.text).startswith("bound")]
    assert len(labels) == 2
    for text in labels:
        half = text_width(str(text.text)) / 2
        assert half - 0.1 <= float(text.attrib["x"]) <= width - half + 0.1


def test_a_long_method_stands_whole_beside_its_bar() -> None:
    finished = result()
    finished.rows[0].label = label = "dear:2:window=3:reduce_scatter=native:comm_dtype=bf16"
    root = ElementTree.fromstring(draw(finished))
    found = next(text for text in root.iter(f"{SPACE}text") if text.text == label)
    assert found.get("text-anchor") == "end"
    assert float(found.attrib["x"]) >= round(text_width(label), 1)


@pytest.mark.parametrize(
    ("pure_s", "compute_s", "together_s", "imb", "osu"),
    [
        (1.0, 1.0, 1.0, 1.0, 1.0),  # one hides the other
        (1.0, 1.0, 2.0, 0.0, 0.0),  # one after the other
        (1.0, 1.0, 1.5, 0.5, 0.5),
        (1.0, 2.0, 2.5, 0.5, 0.5),
        (2.0, 1.0, 2.5, 0.5, 0.25),  # half of the shorter one, a quarter of communication
        (1.0, 1.0, 3.0, 0.0, 0.0),  # slower than one after the other
    ],
)
def test_overlap_is_as_the_two_benchmarks_define_it(
    pure_s: float, compute_s: float, together_s: float, imb: float, osu: float
) -> None:
    overlap = Overlap(pure_s, compute_s, together_s)
    assert (overlap.imb, overlap.osu) == (imb, osu)
