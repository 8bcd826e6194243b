"""A failure, or the end, reaches everybody who waits."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial

import pytest

from dearmpi.comm.api import Completed, Request
from dearmpi.comm.lane import Work
from dearmpi.comm.progress import Progress
from dearmpi.config import ProgressMode
from dearmpi.errors import CommError, ConfigError, StallError
from tests.unit.comm.progress.works import (
    LIMIT_S,
    MODES,
    Broken,
    Gate,
    do_nothing,
    gated,
    in_thread,
    progress_threads,
)


def fail_in_start() -> Work:
    def start() -> Request:
        raise OSError("wire cut")

    return Work("RS7", start, do_nothing)


def fail_in_test() -> Work:
    return Work("RS7", Broken, do_nothing)


def fail_in_finish() -> Work:
    def finish() -> None:
        raise OSError("wire cut")

    return Work("RS7", Completed, finish)


@pytest.mark.parametrize("make_work", [fail_in_start, fail_in_test, fail_in_finish])
def test_a_failure_reaches_every_waiter_with_rank_and_operation(
    threaded: Progress, make_work: Callable[[], Work]
) -> None:
    lane, other = threaded.open_lane("rs", window=2), threaded.open_lane("ag", window=1)
    waiting = threading.Semaphore(0)

    def ready() -> bool:
        waiting.release()
        return False

    waiters = [in_thread(partial(threaded.wait_until, ready, what="never")) for _ in range(3)]
    assert all(waiting.acquire(timeout=LIMIT_S) for _ in waiters)
    threaded.submit(other, gated("AG1", Gate(), []))
    threaded.submit(lane, gated("RS8", Gate(), []))
    threaded.submit(lane, make_work())
    for thread, errors in waiters:
        thread.join(LIMIT_S)
        (error,) = errors
        assert isinstance(error, CommError)
        assert "rank 3 on n7" in str(error) and "RS7" in str(error) and "wire cut" in str(error)
        assert "RS8" not in str(error) and "AG1" not in str(error)
        assert isinstance(error.__cause__, OSError)
    with pytest.raises(CommError, match="RS7"):
        threaded.submit(lane, gated("RS9", Completed(), []))
    with pytest.raises(CommError, match="RS7"):
        threaded.close_lane(lane)


@pytest.mark.parametrize("make_work", [fail_in_start, fail_in_test, fail_in_finish])
def test_a_failure_is_raised_by_whoever_polls(make_work: Callable[[], Work]) -> None:
    progress = Progress("poll", origin="rank 3 on n7")
    lane = progress.open_lane("rs", window=1)
    progress.submit(lane, make_work())
    with pytest.raises(CommError, match="rank 3 on n7: RS7 .*wire cut"):
        progress.poll()
    with pytest.raises(CommError, match="RS7"):
        progress.wait_until(lambda: False, what="never")


def exit_in_finish() -> Work:
    def finish() -> None:
        sys.exit("diverged")

    return Work("update of bucket 3", Completed, finish)


def test_an_exit_on_the_thread_reaches_the_waiter(threaded: Progress) -> None:
    """As of an optimizer's own step: the thread would end by it without a word."""
    lane = threaded.open_lane("update", window=1)
    threaded.submit(lane, exit_in_finish())
    said = r"rank 3 on n7: update of bucket 3 \(update lane\) failed: SystemExit: diverged"
    with pytest.raises(CommError, match=said):
        threaded.wait_until(lambda: False, what="the parameters of bucket 3")


def test_an_exit_ends_whoever_polls() -> None:
    progress = Progress("poll", origin="rank 3 on n7")
    progress.submit(progress.open_lane("update", window=1), exit_in_finish())
    with pytest.raises(SystemExit, match="diverged"):
        progress.poll()


def test_errors_of_ours_keep_their_words_and_their_kind(progress: Progress) -> None:
    def start() -> Request:
        raise StallError("rank 2 is missing")

    lane = progress.open_lane("rs", window=1)
    progress.submit(lane, Work("RS7", start, do_nothing))
    with pytest.raises(StallError, match="rank 3 on n7: RS7 .*: rank 2 is missing$"):
        progress.wait_until(lambda: False, what="never")


def test_errors_of_users_keep_their_words(progress: Progress) -> None:
    def start() -> Request:
        raise ConfigError("choose 'ring'")

    lane = progress.open_lane("rs", window=1)
    progress.submit(lane, Work("RS7", start, do_nothing))
    with pytest.raises(CommError, match="failed: choose 'ring'$"):
        progress.wait_until(lambda: False, what="never")


@pytest.mark.parametrize("mode", MODES)
def test_closing_ends_a_wait_with_an_error(mode: ProgressMode) -> None:
    progress = Progress(mode, origin="rank 3 on n7")
    lane = progress.open_lane("rs", window=1)
    started: list[str] = []
    progress.submit(lane, gated("RS0", Gate(), started))
    waiting = threading.Event()

    def ready() -> bool:
        waiting.set()
        return False

    thread, errors = in_thread(lambda: progress.wait_until(ready, what="bucket 0"))
    assert waiting.wait(LIMIT_S)
    progress.close()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    with pytest.raises(CommError, match="rank 3 on n7 waited for bucket 0 after"):
        raise errors[0]


def test_closing_stops_the_thread_and_may_be_repeated() -> None:
    before = progress_threads()
    progress = Progress("thread", origin="here")
    progress.submit(progress.open_lane("rs", window=1), gated("RS0", Gate(), []))
    progress.close()
    progress.close()
    assert progress_threads() == before


def test_waiting_for_what_is_so_already_returns_after_the_end(progress: Progress) -> None:
    progress.close()
    progress.wait_until(lambda: True, what="nothing")
