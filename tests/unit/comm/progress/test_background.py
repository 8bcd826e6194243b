"""Computation that takes long holds up nothing else, and fails as the operation that it is of."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial

import pytest

from dearmpi.comm.api.collectives import Completed
from dearmpi.comm.progress.lane import Work
from dearmpi.comm.progress.progress import Progress
from dearmpi.errors import CommError
from tests.codes import raises
from tests.unit.comm.progress.works import LIMIT_S, do_nothing, gated


def background_threads() -> int:
    return [thread.name for thread in threading.enumerate()].count("dearmpi-background")


def submit(
    progress: Progress, function: Callable[[], object], finish: Callable[[], None] = do_nothing
) -> None:
    lane = progress.open_lane("update", window=1)
    progress.submit(lane, Work("update of bucket 3", lambda: progress.compute(function), finish))


def test_other_lanes_go_on_during_a_computation(threaded: Progress) -> None:
    held, ended, gathered = threading.Event(), list[bool](), list[bool]()
    submit(threaded, lambda: held.wait(LIMIT_S), lambda: ended.append(True))
    gather = gated("AG1", Completed(), [], lambda: gathered.append(True))
    threaded.submit(threaded.open_lane("ag", window=1), gather)
    threaded.wait_until(lambda: bool(gathered), what="AG1")
    assert not ended
    held.set()
    threaded.wait_until(lambda: bool(ended), what="the update")


def test_computations_run_one_after_the_other_on_a_thread_that_starts_with_them() -> None:
    before, seen, ended = background_threads(), list[str](), list[bool]()
    progress = Progress("thread", origin="here")
    progress.background.begin = lambda: seen.append("begin")
    assert background_threads() == before
    for number in ("0", "1", "2"):
        submit(progress, partial(seen.append, number), lambda: ended.append(True))
    progress.wait_until(lambda: len(ended) == 3, what="all")
    assert seen == ["begin", "0", "1", "2"] and background_threads() == before + 1
    progress.close()
    assert background_threads() == before


def test_whoever_polls_computes() -> None:
    before, threads, ended = background_threads(), list[threading.Thread](), list[bool]()
    progress = Progress("poll", origin="here")
    submit(progress, lambda: threads.append(threading.current_thread()), lambda: ended.append(True))
    progress.wait_until(lambda: bool(ended), what="the update")
    assert threads == [threading.current_thread()] and background_threads() == before
    progress.close()


@pytest.mark.parametrize(
    ("act", "reason"), [(lambda: 1 // 0, "division"), (sys.exit, "SystemExit")]
)
def test_an_error_reaches_the_waiter_with_the_operation(
    threaded: Progress, act: Callable[[], object], reason: str
) -> None:
    submit(threaded, act)
    with raises(CommError, "operation-failed", "rank 3 on n7", "update of bucket 3", reason):
        threaded.wait_until(lambda: False, what="the parameters of bucket 3")


def test_a_wait_of_a_computation_is_an_error_and_not_for_ever(threaded: Progress) -> None:
    submit(threaded, lambda: threaded.wait_until(lambda: False, what="the parameters of bucket 2"))
    update, awaited = "update of bucket 3", "the parameters of bucket 2"
    with raises(CommError, "wait-on-progress-thread", "rank 3 on n7", update, awaited):
        threaded.wait_until(lambda: False, what="never")
