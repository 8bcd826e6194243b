"""The simulated iteration beneath the measured one."""

from __future__ import annotations

from pathlib import Path

import pytest

from dearmpi.engine.span import Lane, Span
from dearmpi.report.interval import total, union
from dearmpi.report.recording import Recording, record
from dearmpi.report.replica import replica_spans, replicate
from dearmpi.report.trace import read_traces
from tests.unit.report.example_run import ExampleRun


def recorded(run: ExampleRun, path: Path) -> Recording:
    return record(read_traces(run.write(path)))


def test_an_ideal_link_leaves_only_the_first_bucket(tmp_path: Path) -> None:
    run = ExampleRun(first_s=0.02)
    timeline = replicate(recorded(run, tmp_path), 0, window=2)
    assert timeline is not None
    assert timeline.compute_s == pytest.approx(run.forward_s + run.backward_s, rel=0.01)
    assert timeline.compute_s < timeline.iteration_s < timeline.compute_s + timeline.reduce_s


def test_a_slower_link_takes_longer(tmp_path: Path) -> None:
    fast = replicate(recorded(ExampleRun(), tmp_path / "fast"), 0, window=2)
    slow = replicate(recorded(ExampleRun(backlog_s=0.8), tmp_path / "slow"), 0, window=2)
    assert fast is not None and slow is not None
    assert slow.communication_s > fast.communication_s
    assert slow.iteration_s > fast.iteration_s


def test_spans_fill_an_iteration(tmp_path: Path) -> None:
    timeline = replicate(recorded(ExampleRun(), tmp_path), 0, window=2)
    assert timeline is not None
    spans, window = replica_spans(timeline)
    assert window.length_s == timeline.iteration_s
    for lanes, seconds in (
        ((Lane.COMPUTE, Lane.WAIT), timeline.iteration_s),
        ((Lane.WAIT,), timeline.exposed_s),
    ):
        parts = union(part for s in spans if s.lane in lanes and (part := window.clip(s)))
        assert total(parts) == pytest.approx(seconds)
    shown = {s.bucket for s in spans if s.lane is Lane.ALL_GATHER and window.clip(s)}
    assert shown == {0, 1, 2, 3}


def test_what_cannot_be_simulated_is_left_out(tmp_path: Path) -> None:
    recording = recorded(ExampleRun(), tmp_path)
    other = Recording(recording.spans, recording.hosts, recording.bucket_bytes, "of a plan")
    assert replicate(other, 0, window=2) is None
    (begin,) = [s.start_s for s in recording.spans[0] if s.name == "B layer0" and s.iteration == 3]
    again = Span(Lane.COMPUTE, "F layer0", begin - 0.01, begin, 3)
    twice = {rank: (*spans, again) for rank, spans in recording.spans.items()}
    more = Recording(twice, recording.hosts, recording.bucket_bytes, "dear")
    assert replicate(more, 0, window=2) is None
    unknown = Recording(recording.spans, recording.hosts, (), "dear")
    assert replicate(unknown, 0, window=2) is None
