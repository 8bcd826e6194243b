"""Works are posted in order, up to the window, on the thread that drives."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from dearmpi.comm.api.collectives import Completed, Request
from dearmpi.comm.progress.lane import Work
from dearmpi.comm.progress.progress import Progress
from tests.unit.comm.progress.works import LIMIT_S, Gate, gated, holds, in_thread, progress_threads


def test_works_are_posted_in_order_of_submission(progress: Progress) -> None:
    lane = progress.open_lane("rs", window=2)
    started: list[str] = []
    finished: list[str] = []
    for number in range(20):
        label = f"RS{number}"
        progress.submit(lane, gated(label, Completed(), started, partial(finished.append, label)))
    progress.wait_until(lambda: len(finished) == 20, what="all")
    assert started == finished == [f"RS{number}" for number in range(20)]


@pytest.mark.parametrize("window", [1, 2, 3])
def test_the_window_is_filled_and_never_exceeded(progress: Progress, window: int) -> None:
    lane = progress.open_lane("rs", window=window)
    started: list[str] = []
    gates = [Gate() for _ in range(6)]
    for number, gate in enumerate(gates):
        progress.submit(lane, gated(str(number), gate, started))
    for number, gate in enumerate(gates):
        expected = min(6, number + window)
        progress.wait_until(holds(started, expected), what="posting")
        for _ in range(10):
            progress.poll()
        assert len(lane.in_flight) <= window
        assert len(started) == expected
        gate.open = True
    progress.close_lane(lane)


def test_completion_out_of_order_does_not_change_the_order_of_posting(progress: Progress) -> None:
    lane = progress.open_lane("rs", window=2)
    started: list[str] = []
    finished: list[str] = []
    gates = [Gate(), Gate(), Gate()]
    for number, gate in enumerate(gates):
        label = str(number)
        progress.submit(lane, gated(label, gate, started, partial(finished.append, label)))
    gates[1].open = gates[2].open = True
    progress.wait_until(lambda: len(finished) == 2, what="two of them")
    gates[0].open = True
    progress.wait_until(lambda: len(finished) == 3, what="the last one")
    assert started == ["0", "1", "2"]
    assert finished == ["1", "2", "0"]


def test_lanes_do_not_wait_for_each_other(progress: Progress) -> None:
    stuck, free = progress.open_lane("stuck", window=1), progress.open_lane("free", window=1)
    gate = Gate()
    finished: list[bool] = []
    progress.submit(stuck, gated("stuck", gate, []))
    progress.submit(free, gated("free", Completed(), [], lambda: finished.append(True)))
    progress.wait_until(lambda: bool(finished), what="the free lane")
    assert stuck.busy
    gate.open = True
    progress.close_lane(stuck)


def test_finish_may_submit_to_its_own_and_to_other_lanes(progress: Progress) -> None:
    lanes = [progress.open_lane("rs", window=1), progress.open_lane("ag", window=1)]
    trail: list[int] = []

    def work(number: int) -> Work:
        def finish() -> None:
            trail.append(number)
            if number < 50:
                progress.submit(lanes[(number // 3) % 2], work(number + 1))

        return Work(str(number), Completed, finish)

    progress.submit(lanes[0], work(0))
    progress.wait_until(lambda: len(trail) == 51, what="the chain")
    assert trail == list(range(51))


def test_everything_runs_on_the_progress_thread(threaded: Progress) -> None:
    lane = threaded.open_lane("rs", window=1)
    threads: list[str] = []

    def start() -> Request:
        threads.append(threading.current_thread().name)
        return Completed()

    def finish() -> None:
        threads.append(threading.current_thread().name)

    threaded.submit(lane, Work("RS0", start, finish))
    threaded.wait_until(lambda: len(threads) == 2, what="RS0")
    assert set(threads) == {"dearmpi-progress"}


def test_poll_mode_starts_no_thread_and_moves_only_when_asked() -> None:
    before = progress_threads()
    progress = Progress("poll", origin="here")
    lane = progress.open_lane("rs", window=1)
    started: list[str] = []
    progress.submit(lane, gated("RS0", Completed(), started))
    assert progress_threads() == before and not started
    progress.poll()
    assert started == ["RS0"] and not lane.busy


def test_a_lane_is_busy_until_its_last_work_is_finished(threaded: Progress) -> None:
    lane = threaded.open_lane("rs", window=1)
    entered, leave = threading.Event(), threading.Event()
    seen: list[bool] = []

    def finish() -> None:
        entered.set()
        leave.wait(LIMIT_S)

    threaded.submit(lane, Work("RS0", Completed, finish))
    assert entered.wait(LIMIT_S)
    seen.append(lane.busy)
    closing, errors = in_thread(lambda: threaded.close_lane(lane))
    leave.set()
    closing.join(LIMIT_S)
    assert seen == [True] and not errors and not lane.busy
