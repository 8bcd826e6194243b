"""The sentence on top: what limits a run, and what to try."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dearmpi.report.analyse.figures import Figures, RankFigures
from dearmpi.report.page.limit import Change, Limit, StepGain, judge
from dearmpi.report.read.pace import WORTH

EVEN = (RankFigures(0, "n0", 1.0, 0.05), RankFigures(1, "n1", 1.0, 0.06))
FIGURES = Figures(
    step_s=1.0,
    communication_s=0.8,
    exposed_s=0.05,
    ranks=EVEN,
    first_s=0.01,
    schedule="dear",
    traced=True,
)


def _with_waits(*waits: float, data_s: float = 0.0) -> tuple[RankFigures, ...]:
    return tuple(RankFigures(r, f"n{r}", 1.0, wait_s, data_s) for r, wait_s in enumerate(waits))


@pytest.mark.parametrize(
    ("figures", "limit", "words"),
    [
        (FIGURES, Limit.COMPUTE, ["Computation", "50.0 ms", "5 %", "94 %", "more ranks"]),
        (
            replace(FIGURES, ranks=_with_waits(0.4, 0.42)),
            Limit.NETWORK,
            ["network", "400 ms of 1.00 s", "40 %", "800 ms", "--batch-size"],
        ),
        (
            replace(FIGURES, ranks=_with_waits(0.4, 0.42), first_s=0.3),
            Limit.FIRST_BUCKET,
            ["first bucket", "400 ms of 1.00 s", "trace 300 ms", "--bucket-cap-mb"],
        ),
        (  # recorded iterations may wait longer than most
            replace(FIGURES, ranks=_with_waits(0.4, 0.42), first_s=0.5),
            Limit.FIRST_BUCKET,
            ["first bucket", "400 ms of 1.00 s", "trace 500 ms"],
        ),
        (
            replace(FIGURES, ranks=_with_waits(0.5, 0.48, 0.1, 0.52)),
            Limit.STRAGGLER,
            [
                "Rank 2 on n2",
                "900 ms",
                "500 ms",
                "wait for it for 400 ms of 1.00 s per step (40 %)",
            ],
        ),
        (  # a slow host
            replace(FIGURES, ranks=_with_waits(0.5, 0.51, 0.1, 0.11)),
            Limit.STRAGGLER,
            ["Ranks 2 and 3 on n2, n3 limit", "compute for 895 ms", "the others for 495 ms"],
        ),
        (  # in half of the run only, as when others need its cores
            replace(FIGURES, ranks=_with_waits(0.5, 0.48, 0.05, 0.52), slow_shares={2: 0.5}),
            Limit.UNEVEN,
            ["late in turn", "450 ms of 1.00 s", "45 %"],
        ),
        (
            replace(FIGURES, ranks=_with_waits(0.4, 0.42), shared_wait=0.25),
            Limit.UNEVEN,
            ["late in turn", "320 ms of 1.00 s", "32 %", "--threads"],
        ),
        (
            replace(FIGURES, ranks=_with_waits(0.1, 0.1, data_s=0.3)),
            Limit.DATA,
            ["data", "300 ms of 1.00 s", "30 %", "--workers", "decode less"],
        ),
        (
            replace(FIGURES, ranks=(*_with_waits(0.4, 0.4), RankFigures(2, "n2", 1.0, 0.0, 0.4))),
            Limit.DATA,
            ["400 ms of 1.00 s", "on rank 2 on n2, and 0 s on the others", "that host's way"],
        ),
        (  # of steps alone, the network would be
            replace(FIGURES, ranks=_with_waits(0.4, 0.42), between_s=3.0),
            Limit.BETWEEN_STEPS,
            ["between steps", "3.00 s of 4.00 s", "75 %", "--checkpoint-interval"],
        ),
    ],
)
def test_the_limit_is_named_with_its_numbers(
    figures: Figures, limit: Limit, words: list[str]
) -> None:
    verdict = judge(figures)
    assert verdict.limit is limit
    assert all(word in verdict.sentence for word in words), verdict.sentence


def test_a_baseline_is_told_to_use_dear_first() -> None:
    figures = replace(FIGURES, ranks=_with_waits(0.4, 0.4), schedule="wfbp")
    assert "--schedule dear (this was wfbp)" in judge(figures).sentence


def test_nobody_is_told_to_try_what_a_plan_has_weighed() -> None:
    figures = replace(FIGURES, ranks=_with_waits(0.4, 0.4), schedule="wfbp", planned=True)
    assert "--schedule" not in judge(figures).sentence
    figures = replace(figures, first_s=0.3)
    assert judge(figures).limit is Limit.FIRST_BUCKET
    assert "--bucket-cap-mb" not in judge(figures).sentence


def test_without_a_trace_one_is_asked_for() -> None:
    figures = replace(FIGURES, ranks=_with_waits(0.4, 0.4), traced=False)
    assert "--trace" in judge(figures).sentence
    assert "--trace" not in judge(replace(figures, traced=True)).sentence


def test_waits_are_not_called_longer_than_all_that_they_are_for() -> None:
    """Main threads wait for totals too, which are no part of the buckets' communication."""
    figures = replace(FIGURES, ranks=_with_waits(0.6, 0.6), communication_s=0.4)
    sentence = judge(figures).sentence
    assert "600 ms of 1.00 s" in sentence and "in all" not in sentence
    assert "totals; the first two are under way for 400 ms" in sentence


def test_a_process_alone_computes() -> None:
    figures = replace(FIGURES, ranks=_with_waits(0.0), communication_s=0.0, first_s=0.0)
    verdict = judge(figures)
    assert verdict.limit is Limit.COMPUTE and "nothing is communicated" in verdict.sentence


@pytest.mark.parametrize(("more", "limit"), [(-0.01, Limit.COMPUTE), (0.01, Limit.NETWORK)])
def test_what_is_not_worth_the_trouble_is_no_limit(more: float, limit: Limit) -> None:
    wait_s = WORTH + more
    assert judge(replace(FIGURES, ranks=_with_waits(wait_s, wait_s))).limit is limit


def test_waiting_for_a_slow_rank_is_not_blamed_on_the_network() -> None:
    """Rank 0 sees the same waits in both; only all ranks' waits tell them apart."""
    slow, network = _with_waits(0.5, 0.02), _with_waits(0.5, 0.5)
    assert judge(replace(FIGURES, ranks=slow)).limit is Limit.STRAGGLER
    assert judge(replace(FIGURES, ranks=network)).limit is Limit.NETWORK


def _on_one_host(*waits: float) -> Figures:
    ranks = tuple(replace(times, host="n0") for times in _with_waits(*waits))
    return replace(FIGURES, ranks=ranks, first_s=0.3, num_cores=2, num_threads=1)


def test_one_host_has_no_network_and_cores_come_first() -> None:
    waits = judge(_on_one_host(0.4, 0.42))
    assert waits.limit is Limit.CORES
    assert "400 ms of 1.00 s per step (40 %)" in waits.sentence
    said = "2 ranks compute with 1 thread each and have one more for communication; rank 0 may use"
    assert f"{said} 2 cores" in waits.sentence
    assert waits.sentence.index("cores first") < waits.sentence.index("--batch-size")
    assert "--threads" not in waits.sentence, "there is one already"
    more = replace(_on_one_host(0.4, 0.42), num_threads=2)
    assert "try fewer ranks or --threads," in judge(more).sentence
    computes = judge(_on_one_host(0.05, 0.06))
    assert computes.limit is Limit.COMPUTE
    for verdict in (waits, computes):
        assert "network" not in verdict.sentence and "link" not in verdict.sentence
    unknown = replace(FIGURES, ranks=tuple(replace(t, host="") for t in _with_waits(0.4, 0.4)))
    assert judge(unknown).limit is Limit.NETWORK


def test_the_sentence_gives_what_its_cure_would_bring() -> None:
    slow = replace(FIGURES, ranks=_with_waits(0.5, 0.48, 0.1, 0.52))
    gains = (StepGain(Change.EVEN_RANKS, 0.6), StepGain(Change.FASTER_LINK, 0.8, at_best=True))
    assert judge(slow, gains).sentence.endswith(
        "Without late ranks a step would take about 600 ms."
    )
    network = judge(replace(FIGURES, ranks=_with_waits(0.4, 0.42)), gains)
    assert "a link twice as fast, with which a step would take at best 800 ms" in network.sentence
