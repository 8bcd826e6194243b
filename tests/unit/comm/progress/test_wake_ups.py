"""No wake-up is lost, and nothing is polled more often than it is worth."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from dearmpi.comm.api.collectives import Completed, Movement, Request
from dearmpi.comm.progress.lane import Lane, Work
from dearmpi.comm.progress.progress import Progress
from dearmpi.comm.progress.sleeping import Backoff
from tests.unit.comm.progress.works import LIMIT_S, holds, in_thread, limited


@pytest.fixture
def _frequent_switches() -> Iterator[None]:
    """Switch threads as often as possible, so that races show."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Yielding(Request):
    """A request that lets other threads run just when it turns out to be complete."""

    def test(self) -> bool:
        time.sleep(0)
        return True


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
    """Each work is started and finished once, whichever thread polls."""
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
    assert slept[-1] == pytest.approx(2e-3)
    assert sum(slept[:-1]) > 0.01
    backoff.note(Movement.NONE)
    assert backoff.next_sleep_s() == pytest.approx(2e-3)
    backoff.note(Movement.OPERATION)
    assert backoff.next_sleep_s() == 0.0


@pytest.mark.parametrize(
    ("message_s", "sleep_s"), [(0.2e-3, 0.1e-3), (10e-6, 20e-6), (4.4e-3, 2e-3)]
)
def test_sleeps_fit_into_what_messages_take(
    monkeypatch: pytest.MonkeyPatch, message_s: float, sleep_s: float
) -> None:
    """However long the operation has taken before: else a fast wire runs dry. On a slow one they
    are as long as where nothing came; and after a wait for a rank that is late, about as before.
    """
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    backoff = Backoff()

    def let_pass(seconds: float) -> float:
        """The next sleep, once nothing has come for so long."""
        now[0] += seconds
        return [backoff.next_sleep_s() for _ in range(10)][-1]

    def let_come(num: int) -> None:
        for _ in range(num):
            now[0] += message_s
            backoff.note(Movement.MESSAGE)

    let_come(1000)
    assert let_pass(0.0) == pytest.approx(sleep_s, rel=0.01)
    assert let_pass(0.1) == pytest.approx(2e-3)
    let_come(2)
    assert let_pass(0.0) <= 1.5 * sleep_s


def test_the_first_sleeps_of_an_operation_are_a_share_of_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before its first message there is nothing to find, and each poll costs a core."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    backoff = Backoff()
    for _ in range(1000):
        now[0] += 4e-3
        backoff.note(Movement.MESSAGE)
    backoff.note(Movement.OPERATION)
    slept = [backoff.next_sleep_s() for _ in range(10)]
    assert slept[-1] == pytest.approx(0.4e-3, rel=0.01)
    polls = 0
    while now[0] < 104.0 + 4e-3:
        now[0] += max(backoff.next_sleep_s(), 1e-6)
        polls += 1
    assert polls <= 12


def test_who_waits_for_the_last_of_many_is_woken_once(threaded: Progress) -> None:
    """Each time costs the main thread the interpreter, in the midst of what others compute."""
    done: list[int] = []
    looks: list[int] = []
    main = threading.get_ident()

    def all_done() -> bool:
        looks.append(threading.get_ident())
        return len(done) == 100

    class Slow(Request):
        """Complete after some polls, of which the first come once the main thread sleeps: for its
        third look it has the lock.
        """

        def __init__(self) -> None:
            self.polls_left = 10

        def test(self) -> bool:
            self.polls_left -= looks.count(main) >= 3
            return not self.polls_left

    lane = threaded.open_lane("many", window=1)
    for number in range(100):
        threaded.submit(lane, Work("one of many", Slow, partial(done.append, number)))
    threaded.wait_until(all_done, what="the last of many")
    assert looks.count(main) <= 4
    assert len(looks) > 50
