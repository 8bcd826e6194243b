"""The parts of a step, and what changes would make of it."""

from __future__ import annotations

import random
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from dearmpi.report.analyse.figures import Figures, RankFigures, measure
from dearmpi.report.analyse.replica import conduct_of, replicate
from dearmpi.report.page.limit import Change, Limit, gains_of, judge, part_step, typical_rank
from dearmpi.report.read.recording import record
from dearmpi.report.read.run_files import read_history
from dearmpi.report.read.trace import read_traces
from tests.unit.report.example_run import ExampleRun


def figures_of(*ranks: tuple[float, float, float], shared_wait: float = 1.0) -> Figures:
    """Ranks by (step, wait, data)."""
    return Figures(
        step_s=max(step_s for step_s, _, _ in ranks),
        communication_s=0.8,
        exposed_s=ranks[0][1],
        ranks=tuple(RankFigures(rank, f"n{rank}", *times) for rank, times in enumerate(ranks)),
        first_s=0.0,
        schedule="dear",
        traced=True,
        shared_wait=shared_wait,
    )


@pytest.mark.parametrize("seed", range(50))
def test_parts_add_up_to_the_step_exactly(seed: int) -> None:
    """Whatever ranks have measured, such as waits and data that are longer than their step."""
    numbers = random.Random(seed)
    ranks = [tuple(numbers.uniform(0.0, 1.0) for _ in range(3)) for _ in range(1 + seed % 7)]
    figures = figures_of(*((a, b, c) for a, b, c in ranks), shared_wait=numbers.random())
    figures = replace(figures, between_s=numbers.choice([0.0, 0.3]))
    parts = part_step(figures)
    assert all(seconds >= -1e-12 for seconds in astuple(parts))
    assert parts.whole_s == pytest.approx(figures.step_s + figures.between_s, rel=1e-12)


@pytest.mark.parametrize("seed", range(50))
def test_the_sentence_is_read_from_the_bar(seed: int) -> None:
    numbers = random.Random(seed)
    waits = [numbers.uniform(0.0, 0.8) for _ in range(4)]
    figures = figures_of(*((1.0, wait_s, 0.1) for wait_s in waits), shared_wait=numbers.random())
    parts, verdict = part_step(figures), judge(figures)
    most_s = max(parts.network_s, parts.late_s, parts.data_s, parts.other_s)
    part_of = {
        Limit.NETWORK: parts.network_s,
        Limit.STRAGGLER: parts.late_s,
        Limit.UNEVEN: parts.late_s,
        Limit.DATA: parts.data_s,
    }
    assert verdict.lost_s == part_of[verdict.limit] == most_s


def test_a_straggler_is_what_the_typical_rank_waits_for() -> None:
    figures = figures_of((1.0, 0.4, 0.0), (1.0, 0.0, 0.0), (1.0, 0.41, 0.0), (1.0, 0.39, 0.0))
    assert typical_rank(figures).rank == 0
    parts = part_step(figures)
    assert (parts.compute_s, parts.network_s, parts.late_s) == (0.6, 0.0, 0.4)
    (gain,) = gains_of(figures, parts, None)
    assert gain.change is Change.EVEN_RANKS and gain.step_s == pytest.approx(0.6)


def test_without_a_trace_a_faster_link_saves_half_of_the_communication_at_best() -> None:
    figures = figures_of((1.0, 0.7, 0.1), (1.0, 0.7, 0.1))
    link, data = gains_of(figures, part_step(figures), None)
    assert (link.change, link.at_best) == (Change.FASTER_LINK, True)
    assert link.step_s == pytest.approx(0.6)  # of 0.8 s of communication
    assert data.change is Change.DATA_AHEAD and data.step_s == pytest.approx(0.9)
    hosts = tuple(replace(times, host="n0") for times in figures.ranks)
    (data,) = gains_of(replace(figures, ranks=hosts), part_step(figures), None)
    assert data.change is Change.DATA_AHEAD


def test_with_a_trace_a_faster_link_is_simulated(tmp_path: Path) -> None:
    run = ExampleRun(backlog_s=0.6)
    folder = run.write(tmp_path)
    recording = record(read_traces(folder))
    history = read_history(folder / "metrics.jsonl")
    figures = measure(history, recording, hosts=("n0", "n1"), schedule="dear")
    conduct = conduct_of(recording, window=2, eager=False, gather="parameters")
    assert figures is not None and conduct is not None
    found = replicate(recording, 0, conduct, most_s=run.step_s)
    assert found is not None
    (gain,) = gains_of(figures, part_step(figures), found)
    saved_s = found.timeline.iteration_s - found.doubled.iteration_s
    assert saved_s > 0.1 and not gain.at_best
    assert gain.step_s == pytest.approx(run.step_s - saved_s)
