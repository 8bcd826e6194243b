"""A failure, or the end, reaches everybody who waits."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import pytest

from dearmpi.comm.api.collectives import Completed, Request
from dearmpi.comm.progress.lane import Work
from dearmpi.comm.progress.progress import Progress
from dearmpi.config import ProgressMode
from dearmpi.errors import CommError, ConfigError, DeviceError, StallError, WireRangeError
from tests.codes import raises
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
    with raises(CommError, "operation-failed", "RS7"):
        threaded.submit(lane, gated("RS9", Completed(), []))
    with raises(CommError, "operation-failed", "RS7"):
        threaded.close_lane(lane)


@pytest.mark.parametrize("make_work", [fail_in_start, fail_in_test, fail_in_finish])
def test_a_failure_is_raised_by_whoever_polls(make_work: Callable[[], Work]) -> None:
    progress = Progress("poll", origin="rank 3 on n7")
    lane = progress.open_lane("rs", window=1)
    progress.submit(lane, make_work())
    with raises(CommError, "operation-failed", "rank 3 on n7", "RS7", "wire cut"):
        progress.poll()
    with raises(CommError, "operation-failed", "RS7"):
        progress.wait_until(lambda: False, what="never")


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (DeviceError("no room", code="device-memory-full"), DeviceError.exit_code),
        (WireRangeError("too large", code="beyond-half-precision"), WireRangeError.exit_code),
        (SystemExit(5), 5),
        (OSError("wire cut"), CommError.exit_code),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_failure_keeps_the_exit_status_of_its_cause(
    threaded: Progress, error: BaseException, exit_code: int
) -> None:
    def finish() -> None:
        raise error

    threaded.submit(threaded.open_lane("update", window=1), Work("it", Completed, finish))
    with pytest.raises(CommError) as caught:
        threaded.wait_until(lambda: False, what="never")
    assert caught.value.exit_code == exit_code


def exit_in_finish() -> Work:
    def finish() -> None:
        sys.exit("diverged")

    return Work("update of bucket 3", Completed, finish)


def test_an_exit_on_the_thread_reaches_the_waiter(threaded: Progress) -> None:
    """As of an optimizer's own step: the thread would end by it without a word."""
    lane = threaded.open_lane("update", window=1)
    threaded.submit(lane, exit_in_finish())
    said = "rank 3 on n7: update of bucket 3 (update lane) failed: SystemExit: diverged"
    with raises(CommError, "operation-failed", said):
        threaded.wait_until(lambda: False, what="the parameters of bucket 3")


def test_an_exit_ends_whoever_polls() -> None:
    progress = Progress("poll", origin="rank 3 on n7")
    progress.submit(progress.open_lane("update", window=1), exit_in_finish())
    with pytest.raises(SystemExit, match="diverged"):
        progress.poll()


def test_errors_of_ours_keep_their_words_and_their_kind(progress: Progress) -> None:
    def start() -> Request:
        raise StallError("rank 2 is missing", code="wait-timed-out")

    lane = progress.open_lane("rs", window=1)
    progress.submit(lane, Work("RS7", start, do_nothing))
    with raises(StallError, "wait-timed-out", "rank 3 on n7", "RS7", "rank 2 is missing"):
        progress.wait_until(lambda: False, what="never")


def test_errors_of_users_keep_their_words(progress: Progress) -> None:
    def start() -> Request:
        raise ConfigError("choose 'ring'", code="dtype-not-served")

    lane = progress.open_lane("rs", window=1)
    progress.submit(lane, Work("RS7", start, do_nothing))
    with raises(CommError, "dtype-not-served", "failed: choose 'ring'"):
        progress.wait_until(lambda: False, what="never")


def test_a_wait_of_what_drives_is_an_error_and_not_for_ever(progress: Progress) -> None:
    """As where the step of an optimizer reads a parameter that is under way."""
    lane = progress.open_lane("update", window=1)

    def read() -> None:
        progress.wait_until(lambda: False, what="the parameters of bucket 2")

    progress.submit(lane, Work("update of bucket 3", Completed, read))
    waiting, awaited = "update of bucket 3", "the parameters of bucket 2"
    with raises(CommError, "wait-on-progress-thread", "rank 3 on n7", waiting, awaited):
        progress.wait_until(lambda: False, what="never")


def test_a_signal_handler_that_interrupts_who_polls_is_named() -> None:
    """It could wait for ever: what it waits for goes on only after it."""
    progress = Progress("poll", origin="rank 3 on n7")

    def handler(*_: object) -> None:
        progress.wait_until(lambda: False, what="the parameters of bucket 2")

    before = signal.signal(signal.SIGUSR2, handler)
    try:
        interrupted = lambda: signal.raise_signal(signal.SIGUSR2)  # noqa: E731
        lane = progress.open_lane("update", window=1)
        progress.submit(lane, Work("update of bucket 3", Completed, interrupted))
        with raises(CommError, "wait-in-signal-handler", "SIGUSR2", "set a flag"):
            progress.poll()
    finally:
        signal.signal(signal.SIGUSR2, before)
        progress.close()


def test_what_drives_does_not_poll_in_turn() -> None:
    """An update that polls, as by a model's hook, would begin others in its midst."""
    progress, seen = Progress("poll", origin="rank 3 on n7"), list[str]()
    lane = progress.open_lane("update", window=2)

    def update(number: int) -> None:
        seen.append(f"begin {number}")
        progress.poll()
        seen.append(f"end {number}")

    for number in range(2):
        progress.submit(lane, Work(f"update of {number}", Completed, partial(update, number)))
    progress.wait_until(lambda: len(seen) == 4, what="both")
    assert seen == ["begin 0", "end 0", "begin 1", "end 1"]
    progress.close()


def test_a_failure_beside_the_operations_reaches_the_waiter(threaded: Progress) -> None:
    """The thread that drives would end by it, and everybody wait for ever."""

    def around() -> AbstractContextManager[object]:
        raise OSError("the device is gone")

    threaded.around = around
    threaded.submit(threaded.open_lane("rs", window=1), gated("RS0", Gate(), []))
    with raises(CommError, "operation-failed", "rank 3 on n7", "the device is gone"):
        threaded.wait_until(lambda: False, what="RS0")


def test_an_operation_that_was_interrupted_while_it_began_is_named_afterwards() -> None:
    progress = Progress("poll", origin="rank 3 on n7")

    def interrupted() -> Request:
        raise KeyboardInterrupt

    progress.submit(progress.open_lane("rs", window=1), Work("RS7", interrupted, do_nothing))
    with pytest.raises(KeyboardInterrupt):
        progress.poll()
    with raises(CommError, "communication-interrupted", "RS7", "posted"):
        progress.wait_until(lambda: False, what="never")
    progress.close()


def test_an_operation_that_was_interrupted_while_it_ended_is_named_afterwards() -> None:
    progress = Progress("poll", origin="rank 3 on n7")

    def interrupted() -> None:
        raise KeyboardInterrupt

    progress.submit(progress.open_lane("rs", window=1), Work("RS7", Completed, interrupted))
    with pytest.raises(KeyboardInterrupt):
        progress.poll()
    with raises(CommError, "communication-interrupted", "RS7", "carried out"):
        progress.wait_until(lambda: False, what="never")
    progress.close()


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
    with raises(CommError, "world-closed", "rank 3 on n7", "bucket 0"):
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
