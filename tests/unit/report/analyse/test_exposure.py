"""Which bucket a wait is put down to."""

from __future__ import annotations

import random

import pytest

from dearmpi.report.analyse.figures import measure_exposure, shared_wait
from dearmpi.report.read.recording import Recording, Window, spans_by_window, subtract, total, union
from dearmpi.span import Span, Track

RS, AG, WAIT = Track.REDUCE_SCATTER, Track.ALL_GATHER, Track.WAIT
WINDOW = Window(1, 0.0, 10.0)


def _network(track: Track, bucket: int, start_s: float, stop_s: float) -> Span:
    return Span(track, "", start_s, stop_s, 1, bucket)


def _wait(start_s: float, stop_s: float) -> Span:
    return Span(WAIT, "", start_s, stop_s, 1)


def test_hidden_and_exposed_add_up() -> None:
    spans = [_network(RS, 3, 0, 4), _network(AG, 3, 6, 8), _wait(3, 5)]
    exposure = measure_exposure(spans, [WINDOW])
    (bucket,) = exposure.buckets
    assert (bucket.network_s, bucket.exposed_s, bucket.hidden_s) == (6, 1, 5)
    assert exposure.idle_s == 1 and exposure.waited_s == 2 and exposure.first_s == 0


def test_operations_in_flight_at_once_share_a_wait() -> None:
    spans = [_network(RS, 1, 0, 4), _network(RS, 2, 2, 6), _wait(0, 6)]
    exposure = measure_exposure(spans, [WINDOW])
    assert [one.exposed_s for one in exposure.buckets] == [3, 3]
    assert [one.hidden_s for one in exposure.buckets] == [0, 0]
    assert sum(one.network_s for one in exposure.buckets) == exposure.communication_s == 6


def test_the_first_bucket_bears_a_wait_only_once_the_others_are_reduced() -> None:
    spans = [
        _network(RS, 1, 0, 2),
        _network(RS, 0, 1, 3),  # from 2 on alone
        _network(AG, 0, 4, 5),
        _network(AG, 1, 4, 7),  # in flight beside it, and after it
        _wait(0, 7),
    ]
    exposure = measure_exposure(spans, [WINDOW])
    assert exposure.first_s == 2
    assert exposure.idle_s == 1


def test_means_are_over_all_windows_and_nothing_outside_counts() -> None:
    spans = [_network(RS, 0, -5, 2), _wait(-5, 1), _network(AG, 0, 19, 30)]
    exposure = measure_exposure(spans, [WINDOW, Window(2, 10.0, 20.0)])
    (bucket,) = exposure.buckets
    assert (bucket.network_s, bucket.exposed_s) == (1.5, 0.5)


def test_a_wait_is_shared_while_all_ranks_wait() -> None:
    def rank(*waits: tuple[float, float]) -> tuple[Span, ...]:
        ends = [
            Span(Track.COMPUTE, "B fc", stop - 1, stop, iteration)
            for iteration, stop in ((0, 1), (1, 11), (2, 12))
        ]
        return (*ends, *(_wait(*wait) for wait in waits))

    both = {0: rank((2, 5), (6, 7)), 1: rank((1, 3), (4, 9))}
    assert shared_wait(Recording(both)) == 3 / 4
    assert shared_wait(Recording({0: rank((2, 5)), 1: rank((2, 5))})) == 1
    assert shared_wait(Recording({0: rank((2, 5)), 1: rank()})) == 1
    assert shared_wait(Recording({0: (), 1: rank((2, 5))})) == 1
    assert shared_wait(Recording()) == 1


@pytest.mark.parametrize(
    ("holes", "left"),
    [
        ([], [(0, 4), (6, 9)]),
        ([(1, 2), (3, 7)], [(0, 1), (2, 3), (7, 9)]),
        ([(-1, 10)], []),
        ([(4, 6)], [(0, 4), (6, 9)]),
    ],
)
def test_subtract(holes: list[tuple[float, float]], left: list[tuple[float, float]]) -> None:
    assert subtract([(0, 4), (6, 9)], holes) == left
    assert total(left) == sum(b - a for a, b in left)


@pytest.mark.parametrize("seed", range(20))
def test_each_iteration_has_the_spans_that_reach_into_it(seed: int) -> None:
    """Also where a damaged trace has iterations that overlap, or out of order."""
    numbers = random.Random(seed)
    starts = [numbers.randint(-3, 30) for _ in range(40)]
    spans = [_wait(start, start + numbers.randint(0, 4)) for start in starts] + [_wait(-9, 40)]
    windows = [Window(number, 5.0 * number, 5.0 * number + 5) for number in range(5)]
    if seed % 2:
        windows = [
            Window(number, start, start + 1 + 2 * number)
            for number, start in enumerate(numbers.sample(range(20), 5))
        ]
    expected = [[span for span in spans if window.clip(span)] for window in windows]
    assert spans_by_window(spans, windows) == expected


def test_union_closes_gaps_that_are_small_enough() -> None:
    assert union([(5, 6), (0, 2), (1, 3), (3.5, 4)]) == [(0, 3), (3.5, 4), (5, 6)]
    assert union([(0, 2), (2.5, 4)], gap_s=0.5) == [(0, 4)]


def test_an_iteration_begins_with_its_forward_and_ends_with_the_next() -> None:
    def rank(late_s: float) -> tuple[Span, ...]:
        passes = (
            Span(Track.COMPUTE, f"{kind} fc", start, start + 1.0, number)
            for number, begin in ((4, 0.0), (5, 3.0 + late_s), (6, 8.0), (7, 11.0))
            for kind, start in (("F", begin), ("B", begin + 1.0))
        )
        return (*passes, Span(Track.WAIT, "bucket 0", 2.5 + late_s, 3.0 + late_s, 5))

    recording = Recording({0: rank(0.0), 1: rank(0.5)})
    assert recording.windows(0) == (Window(5, 2.5, 8.0), Window(6, 8.0, 11.0))
    assert recording.typical() == Window(6, 8.0, 11.0)
    within = [span for span in recording.spans[1] if Window(5, 3.0, 8.0).clip(span)]
    assert [kind for kind, _ in Window(5, 3.0, 8.0).passes(within)] == ["F", "B"]
    assert Recording({0: rank(0.0), 1: ()}).typical() is None
    assert Recording().typical() is None


def test_of_two_recorded_iterations_the_second_counts_though_its_end_is_not_recorded() -> None:
    spans = tuple(
        Span(Track.COMPUTE, f"{kind} fc", start, start + 1.0, number)
        for number, begin in ((4, 0.0), (5, 3.0))
        for kind, start in (("F", begin), ("B", begin + 1.0))
    )
    assert Recording({0: spans}).windows(0) == (Window(5, 3.0, 5.0),)
    assert Recording({0: spans[:2]}).windows(0) == ()
