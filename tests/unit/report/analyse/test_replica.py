"""The simulated iteration beneath the measured one."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from dearmpi.config import Gather
from dearmpi.plan.data.plan import Plan, Prediction
from dearmpi.plan.data.schedule import Wait, build_schedule
from dearmpi.plan.simulate.timeline import Timeline
from dearmpi.report.analyse.figures import exposure_of, measure
from dearmpi.report.analyse.replica import Replica, conduct_of, replica_spans, replicate
from dearmpi.report.read.recording import Recording, Window, record, total, union
from dearmpi.report.read.run_files import History
from dearmpi.report.read.trace import read_traces
from dearmpi.span import Span, Track
from tests.unit.report.example_run import ExampleRun


def recorded(run: ExampleRun, path: Path) -> Recording:
    return record(read_traces(run.write(path)))


def replica(
    recording: Recording,
    *,
    plan: Plan | None = None,
    eager: bool = False,
    gather: Gather = "parameters",
) -> Timeline | None:
    """Rank 0's iteration with two operations of a kind in flight."""
    found = both(recording, plan=plan, eager=eager, gather=gather)
    return None if found is None else found.timeline


def both(
    recording: Recording,
    *,
    plan: Plan | None = None,
    eager: bool = False,
    gather: Gather = "parameters",
    most_s: float = math.inf,
) -> Replica | None:
    """The same, and over a link twice as fast."""
    conduct = conduct_of(recording, window=2, eager=eager, gather=gather, plan=plan)
    return None if conduct is None else replicate(recording, 0, conduct, most_s=most_s)


def test_an_ideal_link_leaves_only_the_first_bucket(tmp_path: Path) -> None:
    run = ExampleRun(first_s=0.02)
    timeline = replica(recorded(run, tmp_path))
    assert timeline is not None
    assert timeline.compute_s == pytest.approx(run.forward_s + run.backward_s, rel=0.01)
    assert timeline.compute_s < timeline.iteration_s < timeline.compute_s + timeline.reduce_s


def test_a_slower_link_takes_longer(tmp_path: Path) -> None:
    fast = replica(recorded(ExampleRun(), tmp_path / "fast"))
    slow = replica(recorded(ExampleRun(backlog_s=0.8), tmp_path / "slow"))
    assert fast is not None and slow is not None
    assert slow.communication_s > fast.communication_s
    assert slow.iteration_s > fast.iteration_s


@pytest.mark.parametrize("backlog_s", [0.0, 0.2, 0.8])
def test_the_simulated_iteration_is_never_slower_than_the_measured_one(
    tmp_path: Path, backlog_s: float
) -> None:
    """The measured one shows that the link can carry as much."""
    run = ExampleRun(backlog_s=backlog_s)
    recording = recorded(run, tmp_path)
    free, window = both(recording), recording.typical()
    assert free is not None and window is not None
    for most_s in (window.length_s, 0.97 * free.timeline.iteration_s):
        found = both(recording, most_s=most_s)
        assert found is not None and found.timeline.iteration_s <= most_s
        if free.timeline.iteration_s > most_s:
            assert found.timeline.iteration_s == pytest.approx(most_s, rel=0.01)
        assert found.doubled.iteration_s <= found.timeline.iteration_s
    assert both(recording, most_s=0.8 * (run.forward_s + run.backward_s)) is None


def test_a_link_twice_as_fast_halves_what_is_in_flight(tmp_path: Path) -> None:
    found = both(recorded(ExampleRun(backlog_s=0.8), tmp_path))
    assert found is not None
    halved_s = found.doubled.communication_s
    assert halved_s == pytest.approx(found.timeline.communication_s / 2, rel=0.01)


def test_waits_of_a_step_stand_at_its_end(tmp_path: Path) -> None:
    """As in what is measured, where all-reduces end before the step."""
    timeline = replica(replace(recorded(ExampleRun(), tmp_path), schedule="wfbp"))
    assert timeline is not None and timeline.exposed_s > 0
    spans, window = replica_spans(timeline, waits_in_step=True)
    first = min(s.start_s for s in spans if s.track is Track.COMPUTE and window.clip(s))
    assert first == pytest.approx(window.start_s)
    waits = union(part for s in spans if s.track is Track.WAIT and (part := window.clip(s)))
    assert total(waits) == pytest.approx(timeline.exposed_s)
    assert waits[-1][1] == pytest.approx(window.stop_s)


def test_a_run_that_clips_waits_for_reduce_scatters_before_its_next_forward(tmp_path: Path) -> None:
    timeline = replica(recorded(ExampleRun(backlog_s=0.2), tmp_path))
    assert timeline is not None and timeline.exposed_s > 0
    spans, window = replica_spans(timeline, clips=True)
    reduced = [s for s in spans if s.track is Track.REDUCE_SCATTER and window.clip(s)]
    assert max(s.stop_s for s in reduced) == pytest.approx(window.stop_s)
    waits = union(part for s in spans if s.track is Track.WAIT and (part := window.clip(s)))
    assert total(waits) == pytest.approx(timeline.exposed_s)


def plan_of(num_buckets: int) -> Plan:
    """A plan that gathers all before the next feed-forward."""
    names = tuple(f"p{index}" for index in range(num_buckets))
    return Plan(
        parameters=names,
        buckets=tuple((name,) for name in names),
        schedule=replace(build_schedule("dear", num_buckets), wait=Wait.STEP),
        window=1,
        eager=False,
        world_size=2,
        fingerprint="",
        prediction=Prediction(1.0, 1.0, 1.0, 1.0),
        origin="made up",
    )


def test_a_run_by_a_plan_is_simulated_by_it(tmp_path: Path) -> None:
    recording = recorded(ExampleRun(), tmp_path)
    free = replica(recording)
    planned = replica(recording, plan=plan_of(4))
    assert free is not None and planned is not None
    assert planned.iteration_s > free.iteration_s + 0.2
    # A plan taken up after the recording says nothing about it.
    assert replica(recording, plan=plan_of(3)) == free


def test_spans_fill_an_iteration(tmp_path: Path) -> None:
    timeline = replica(recorded(ExampleRun(), tmp_path))
    assert timeline is not None
    spans, window = replica_spans(timeline)
    assert window.length_s == timeline.iteration_s
    for tracks, seconds in (
        ((Track.COMPUTE, Track.WAIT), timeline.iteration_s),
        ((Track.WAIT,), timeline.exposed_s),
    ):
        parts = union(part for s in spans if s.track in tracks and (part := window.clip(s)))
        assert total(parts) == pytest.approx(seconds)
    shown = {s.bucket for s in spans if s.track is Track.ALL_GATHER and window.clip(s)}
    assert shown == {0, 1, 2, 3}


def test_what_cannot_be_simulated_is_left_out(tmp_path: Path) -> None:
    recording = recorded(ExampleRun(), tmp_path)
    other = Recording(recording.spans, recording.hosts, recording.bucket_bytes, "of a plan")
    assert replica(other) is None
    (begin,) = [s.start_s for s in recording.spans[0] if s.name == "B layer0" and s.iteration == 3]
    again = Span(Track.COMPUTE, "F layer0", begin - 0.01, begin, 3)
    twice = {rank: (*spans, again) for rank, spans in recording.spans.items()}
    more = Recording(twice, recording.hosts, recording.bucket_bytes, "dear")
    assert replica(more) is None
    unknown = Recording(recording.spans, recording.hosts, (), "dear")
    assert replica(unknown) is None


def test_updates_during_backprop_let_wfbp_gather_there(tmp_path: Path) -> None:
    recording = replace(recorded(ExampleRun(), tmp_path), schedule="wfbp")
    late = replica(recording)
    eager = replica(recording, eager=True)
    gradients = replica(recording, gather="gradients")
    assert late is not None and eager is not None and gradients is not None
    assert eager.exposed_s < late.exposed_s and gradients.exposed_s < late.exposed_s


def looks(run: ExampleRun, path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often a span is held against an iteration while a report's figures are made."""
    recording, count, clip = recorded(run, path), 0, Window.clip

    def counting(window: Window, span: Span) -> object:
        nonlocal count
        count += 1
        return clip(window, span)

    with monkeypatch.context() as patch:
        patch.setattr(Window, "clip", counting)
        measure(History(), recording, hosts=(), schedule="dear")
        assert exposure_of(recording, 0) is not None
        assert replica(recording) is not None
    return count


def test_twice_the_iterations_are_twice_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some, more = (
        looks(ExampleRun(num_iterations=number), tmp_path / str(number), monkeypatch)
        for number in (20, 40)
    )
    assert more < 2.2 * some
