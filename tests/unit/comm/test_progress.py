"""Progress: order and window of posting, failures that reach everybody, no lost wake-ups."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from functools import partial

import pytest

from dearmpi.comm import progress as module
from dearmpi.comm.api import Completed, Request
from dearmpi.comm.progress import Backoff, Lane, Progress, Work
from dearmpi.config import ProgressMode
from dearmpi.errors import CommError, ConfigError, StallError

LIMIT_S = 30.0  # far beyond what any of this takes; reached only by a deadlock
MODES: list[ProgressMode] = ["thread", "poll"]


@pytest.fixture(autouse=True)
def _no_periodic_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiters look up now and then of their own; without that, a lost notification is a hang."""
    monkeypatch.setattr(module, "_WAKE_S", LIMIT_S * 10)


@pytest.fixture
def _frequent_switches() -> Iterator[None]:
    """Switch threads as often as possible, so that races show."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Gate:
    """A request that the test completes by opening it."""

    def __init__(self) -> None:
        self.open = False

    def test(self) -> bool:
        return self.open


class Yielding:
    """A request that lets other threads run just when it turns out to be complete."""

    def test(self) -> bool:
        time.sleep(0)
        return True


class Broken:
    """A request whose test fails."""

    def test(self) -> bool:
        raise OSError("wire cut")


@contextmanager
def limited(progress: Progress) -> Iterator[Progress]:
    """Close ``progress`` at the end, or at the limit, so that what hangs fails instead."""
    watch = threading.Timer(LIMIT_S, progress.close)
    watch.start()
    try:
        yield progress
        assert watch.is_alive(), f"this hung, and was ended after {LIMIT_S} s"
    finally:
        watch.cancel()
        watch.join()
        progress.close()


@pytest.fixture(params=MODES)
def progress(request: pytest.FixtureRequest) -> Iterator[Progress]:
    with limited(Progress(request.param, origin="rank 3 on n7")) as progress:
        yield progress


@pytest.fixture
def threaded() -> Iterator[Progress]:
    with limited(Progress("thread", origin="rank 3 on n7")) as progress:
        yield progress


def progress_threads() -> int:
    return [thread.name for thread in threading.enumerate()].count("dearmpi-progress")


def holds(items: Sized, number: int) -> Callable[[], bool]:
    return lambda: len(items) >= number


def do_nothing() -> None:
    pass


def gated(
    label: str, gate: Request, started: list[str], finish: Callable[[], None] = do_nothing
) -> Work:
    def start() -> Request:
        started.append(label)
        return gate

    return Work(label, start, finish)


def in_thread(function: Callable[[], None]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


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


@pytest.mark.usefixtures("_frequent_switches")
def test_no_wake_up_is_lost(threaded: Progress) -> None:
    """Many short waits from several threads."""

    def ping(lane: Lane) -> None:
        done: list[int] = []
        for number in range(400):
            threaded.submit(lane, Work("ping", Completed, partial(done.append, number)))
            threaded.wait_until(holds(done, number + 1), what="ping")

    lanes = [threaded.open_lane(str(number), window=2) for number in range(3)]
    threads = [in_thread(partial(ping, lane)) for lane in lanes]
    for thread, errors in threads:
        thread.join(LIMIT_S * 2)
        assert not errors and not thread.is_alive()


@pytest.mark.usefixtures("_frequent_switches")
def test_notify_wakes_who_waits_for_something_else(threaded: Progress) -> None:
    state: list[int] = []
    for number in range(200):
        ready = holds(state, number + 1)
        thread, errors = in_thread(partial(threaded.wait_until, ready, what="a number"))
        state.append(number)
        threaded.notify()
        thread.join(LIMIT_S * 2)
        assert not errors and not thread.is_alive()


@pytest.mark.usefixtures("_frequent_switches")
def test_two_threads_may_drive_in_poll_mode() -> None:
    """Each work is started and finished once, whoever polls."""
    driven = Progress("poll", origin="here")
    lanes = [driven.open_lane("a", window=2), driven.open_lane("b", window=2)]
    finished: list[list[int]] = [[], []]

    together = threading.Barrier(2, timeout=LIMIT_S)

    def drive(index: int) -> None:
        together.wait()
        for number in range(300):
            finish = partial(finished[index].append, number)
            driven.submit(lanes[index], Work(str(number), Yielding, finish))
            driven.wait_until(holds(finished[index], number + 1), what="one more")

    with limited(driven):
        threads = [in_thread(partial(drive, index)) for index in range(2)]
        for thread, errors in threads:
            thread.join(LIMIT_S * 2)
            assert not errors and not thread.is_alive()
    assert finished == [list(range(300))] * 2


def test_backoff_yields_first_then_sleeps_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    backoff = Backoff()
    yields = 0
    while (sleep_s := backoff.next_sleep_s()) == 0.0:
        yields += 1
        assert yields < 100
    assert yields > 0 and 0 < sleep_s < 1e-4
    slept = []
    for _ in range(200):
        now[0] += sleep_s
        sleep_s = backoff.next_sleep_s()
        slept.append(sleep_s)
    assert slept == sorted(slept)
    assert slept[-1] == pytest.approx(1e-3)
    assert sum(slept[:-1]) > 0.01
    backoff.reset()
    assert backoff.next_sleep_s() == 0.0
