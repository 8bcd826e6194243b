"""Traces: what is written loads, whole, torn or full, and is read as what it is."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dearmpi.cli.main import main
from dearmpi.errors import ConfigError
from dearmpi.report.read.trace import merge, read_trace, read_traces, trace_path
from dearmpi.report.read.trace_writer import TraceHeader, TraceWriter
from dearmpi.span import Span, Track

HEADER = TraceHeader(
    run='a "run"',
    run_id="1234",
    rank=0,
    world_size=2,
    host="n0",
    iterations=(5, 7),
    schedule="dear",
    bucket_bytes=(64, 128),
    origin_s=100.0,
)


def compute(start_s: float, stop_s: float) -> Span:
    return Span(Track.COMPUTE, "F layer", start_s, stop_s, 5)


def reduce(bucket: int, start_s: float, stop_s: float) -> Span:
    return Span(
        Track.REDUCE_SCATTER, f"RS{bucket}", start_s, stop_s, 5, bucket, 64, start_s - 1, start_s
    )


def write(folder: Path, header: TraceHeader, *spans: Span, close: bool = True) -> Path:
    path = trace_path(folder, header.rank)
    writer = TraceWriter(path)
    writer.begin(header)
    for span in spans:
        writer.add(span)
    writer.flush()
    if close:
        writer.close()
    return path


def spans_of(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == "X"]


def test_spans_that_touch_do_not_overlap_by_a_nanosecond(tmp_path: Path) -> None:
    """Perfetto drops the second of two that do."""
    ends = [100.0 + 1.2345678e-3 * number for number in range(100)]
    path = write(tmp_path, HEADER, *map(compute, ends, ends[1:]))
    begun = [(round(event["ts"] * 1e3), round(event["dur"] * 1e3)) for event in spans_of(path)]
    assert all(a + length == b for (a, length), (b, _) in zip(begun, begun[1:], strict=False))


def test_a_span_is_written_with_its_track_times_and_bucket(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER, compute(100.0, 100.5), reduce(1, 101.0, 101.25))
    layer, operation = spans_of(path)
    assert layer == {
        "ph": "X",
        "pid": 0,
        "tid": 1,
        "name": "F layer",
        "cat": "compute",
        "ts": 0.0,
        "dur": 5e5,
        "args": {"iteration": 5},
    }
    assert (operation["tid"], operation["cat"], operation["ts"]) == (3, "reduce-scatter", 1e6)
    assert operation["args"] == {
        "iteration": 5,
        "bucket": 1,
        "bytes": 64,
        "queued_us": 1e6,
        "first_progress_us": 0.0,
    }


def test_a_trace_says_what_it_is_of(tmp_path: Path) -> None:
    path = write(tmp_path, replace(HEADER, rank=1, offset_s=1e-3, uncertainty_s=5e-5))
    facts = {event["name"]: event["args"] for event in json.loads(path.read_text())}
    assert facts["process_name"] == {"name": "rank 1 on n0"}
    assert "+1000.0 us to rank 0, within 50.0 us" in facts["process_labels"]["labels"]
    assert facts["plan"] == {"schedule": "dear", "bucket_bytes": [64, 128]}
    trace = read_trace(path)
    assert trace is not None and not trace.torn
    assert (trace.rank, trace.world_size, trace.run) == (1, 2, 'a "run"')
    assert (trace.offset_us, trace.uncertainty_us) == (1000.0, 50.0)


def test_the_file_is_whole_json_after_every_write(tmp_path: Path) -> None:
    path = trace_path(tmp_path, 0)
    writer = TraceWriter(path)
    assert json.loads(path.read_text()) == []
    writer.begin(HEADER)
    for number in range(3):
        writer.add(compute(number, number + 0.5))
        writer.flush()
        writer.flush()  # waits for the one before
        assert len(spans_of(path)) == number + 1
    writer.close()
    writer.close()
    assert len(spans_of(path)) == 3


def test_a_file_cut_off_anywhere_gives_what_stands_before_the_cut(tmp_path: Path) -> None:
    whole = write(tmp_path, HEADER, compute(100, 101), compute(101, 102)).read_text()
    path = tmp_path / "cut.json"
    lines = [line.rstrip(",") for line in whole.split("\n")[1:-2]]
    ends = [whole.index(line) + len(line) for line in lines]
    for length in range(len(whole) - 3):
        path.write_text(whole[:length])
        trace = read_trace(path)
        num_whole = sum(end <= length for end in ends)
        if num_whole < 5:  # the clock is the fifth
            assert trace is None
        else:
            assert trace is not None and trace.torn and len(trace.events) == num_whole


def test_spans_that_overlap_get_tracks_of_their_own(tmp_path: Path) -> None:
    """Viewers drop a span that overlaps another one of its track."""
    path = write(
        tmp_path,
        HEADER,
        reduce(2, 100.0, 103.0),
        reduce(1, 101.0, 104.0),
        reduce(0, 102.0, 105.0),
        reduce(2, 104.0, 106.0),
    )
    by_track = defaultdict(list)
    for event in spans_of(path):
        by_track[event["tid"]].append(event["name"])
    assert by_track == {3: ["RS2", "RS2"], 13: ["RS1"], 23: ["RS0"]}
    names = {
        event["tid"]: event["args"]["name"]
        for event in json.loads(path.read_text())
        if event["name"] == "thread_name"
    }
    assert (names[3], names[13]) == ("reduce-scatter", "reduce-scatter (2)")


def test_a_trace_is_bounded_and_says_what_it_left_out(tmp_path: Path) -> None:
    path = trace_path(tmp_path, 0)
    writer = TraceWriter(path, most_spans=2)
    writer.begin(HEADER)
    for number in range(5):
        writer.add(compute(number, number + 0.5))
    writer.close()
    assert len(spans_of(path)) == 2
    text = "trace full: 3 more than the 2 spans that are kept"
    assert json.loads(path.read_text())[-1]["args"]["text"] == text
    assert f"rank 0: {text}" in read_traces(tmp_path).notes


def test_a_full_disk_ends_the_trace_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = trace_path(tmp_path, 0)
    writer = TraceWriter(path)
    writer.begin(HEADER)

    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", fail)
    writer.add(compute(0, 1))
    writer.flush()
    writer.add(compute(1, 2))
    writer.flush()
    writer.close()
    (record,) = caplog.records
    assert "No space left" in record.message and str(path) in record.message


def test_merging_aligns_the_clocks(tmp_path: Path) -> None:
    folder = tmp_path / HEADER.run
    write(folder, HEADER, compute(100.0, 101.0))
    late = replace(HEADER, rank=1, offset_s=0.25, uncertainty_s=1e-4)
    write(folder, late, compute(100.0, 101.0))
    merged = merge(folder)
    assert merged.path == folder / "trace" / "merged.json"
    assert (merged.num_ranks, merged.notes) == (2, ())
    assert merged.uncertainty_us == pytest.approx(100.0)
    assert [(e["pid"], e["ts"]) for e in spans_of(merged.path)] == [(0, 0.0), (1, 250000.0)]
    assert merge(folder).num_events == merged.num_events  # the merged file is not a rank's


def test_traces_that_were_copied_from_another_run_are_told(tmp_path: Path) -> None:
    write(tmp_path / "b", replace(HEADER, run="a", world_size=1), compute(100.0, 101.0))
    assert merge(tmp_path / "b").notes == (
        "the traces are of run a; unless b was called so, remove them",
    )


def test_merging_goes_without_ranks_that_left_nothing_and_names_them(tmp_path: Path) -> None:
    header = replace(HEADER, world_size=5)
    write(tmp_path, header, compute(100, 101))
    torn = write(tmp_path, replace(header, rank=2), compute(100, 101), compute(101, 102))
    torn.write_text(torn.read_text()[:-30])
    TraceWriter(trace_path(tmp_path, 3)).close()
    trace_path(tmp_path, 4).write_text("")
    merged = merge(tmp_path, tmp_path / "out.json")
    assert merged.num_ranks == 2 and len(spans_of(tmp_path / "out.json")) == 2
    notes = " | ".join(merged.notes)
    assert "rank 2: rank-00002.json ends in the middle" in notes
    assert "rank 3: rank-00003.json holds nothing" in notes
    assert "rank 4: rank-00004.json holds nothing" in notes
    assert notes.endswith("no trace of rank 1")


def test_traces_of_two_runs_do_not_go_together(tmp_path: Path) -> None:
    write(tmp_path, HEADER)
    write(tmp_path, replace(HEADER, rank=1, run="b", run_id="5678"))
    with pytest.raises(ConfigError, match=r"rank-00001.json is of run b \(5678\).*\(1234\)"):
        read_traces(tmp_path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"traceEvents": []}', "does not hold an array of events"),
        ("[1, 2]", "does not hold an array of events"),
        ("step,loss\n", "does not hold an array of events"),
        ('[{"ph": "X", "name": "other", "ts": 0}]', "does not say its run"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = trace_path(tmp_path, 0)
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_traces(tmp_path)


def test_a_folder_without_traces_is_refused_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder"):
        merge(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="has no traces; .* dear-train run --trace START:STOP"):
        merge(tmp_path)
    TraceWriter(trace_path(tmp_path, 0)).close()
    with pytest.raises(ConfigError, match="nothing is in them; .* --trace START:STOP"):
        merge(tmp_path)


@pytest.mark.parametrize("name", ["file/out.json", "nowhere/out.json"])
def test_a_place_that_cannot_be_written_is_told_with_the_option(tmp_path: Path, name: str) -> None:
    write(tmp_path, HEADER, compute(100, 101))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"cannot write .*{name}: .*; see --out"):
        merge(tmp_path, tmp_path / name)


def test_a_trace_is_not_replaced_by_the_merged_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, HEADER, compute(100, 101))
    empty = trace_path(tmp_path, 1)
    empty.write_text("[]")
    link = tmp_path / "link.json"
    link.symlink_to(path)
    before = path.read_bytes()
    for out in (path, empty, link):
        assert main(["trace", "merge", str(tmp_path), "--out", str(out)]) == 2
        assert f"{out} is a trace that is to be merged" in capsys.readouterr().err
    assert path.read_bytes() == before and empty.read_text() == "[]"
