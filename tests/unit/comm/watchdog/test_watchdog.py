"""A wait for other ranks that lasts too long says why, and ends if it is hopeless."""

from __future__ import annotations

import re
import threading
from functools import partial

import numpy as np
import pytest

from dearmpi.comm.api import safe_output
from dearmpi.comm.api.collectives import Collectives, Request
from dearmpi.comm.messages.values import HostBuffer
from dearmpi.comm.progress import progress as progress_module
from dearmpi.comm.watchdog import watchdog as module
from dearmpi.comm.watchdog.waits import Status
from dearmpi.comm.watchdog.watchdog import StallLimits, Watchdog
from dearmpi.comm.world import World
from dearmpi.config import ProgressMode
from dearmpi.errors import ConfigError, StallError
from tests.codes import raises
from tests.fakes import FakeCollectives, FakeHub
from tests.fakes.ranks import run_ranks
from tests.unit.comm.inbox import Clock
from tests.unit.engine.stage import wait_for

LIMITS = StallLimits(warning_s=0.3, abort_s=60.0)
LATE = StallLimits(warning_s=30.0, abort_s=60.0)
PATIENCE_S = 90.0  # beyond all limits; reached only by what hangs


def run_with_limits(size: int, function, limits: StallLimits = LIMITS) -> list[object]:  # type: ignore[no-untyped-def]
    """``function(world)`` on in-process ranks whose worlds have short stall limits, from when all
    are connected: a rank that is late by then is not what a test looks at.
    """
    hub, connected = FakeHub(size), threading.Barrier(size, timeout=PATIENCE_S)
    outcomes: list[object] = [None] * size

    def run(rank: int) -> None:
        world = World(FakeCollectives(hub, rank), stall_limits=LATE)
        try:
            connected.wait()
            world._watchdog.limits = limits
            outcomes[rank] = function(world)
        except Exception as error:
            outcomes[rank] = error
            hub.fail(str(error))
        finally:
            world.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    return outcomes


def first_stall(outcomes: list[object]) -> StallError:
    """Of ranks that wait for each other the one that is told first ends the job."""
    return next(outcome for outcome in outcomes if isinstance(outcome, StallError))


def test_a_rank_that_has_ended_is_named_with_both_counts() -> None:
    def train(world: World) -> None:
        for _ in range(2 + world.rank):
            world.begin_backprop()
        if world.rank == 0:
            world.leave()
        else:
            waiting = threading.Event()
            world.progress.wait_until(waiting.is_set, what="RS0")

    outcomes = run_with_limits(2, train)
    error = outcomes[1]
    assert isinstance(error, StallError)
    assert "rank 1 has begun 3 backprops" in str(error)
    assert "rank 0 has ended after 2 backprops" in str(error)
    assert "unequal numbers of batches" in str(error) and error.code == "ranks-out-of-step"
    assert "has called sys.exit(), have it raise an exception or call" in str(error)


def test_a_rank_that_has_ended_with_a_status_ends_the_job_with_it() -> None:
    def train(world: World) -> None:
        world.begin_backprop()
        if world.rank == 0:
            world.leave(exit_status=3)
        else:
            world.barrier()

    error = run_with_limits(2, train, LATE)[1]
    assert isinstance(error, StallError) and error.exit_code == 3
    assert "rank 0 has ended with exit status 3 after 1 backprops" in str(error)


@pytest.mark.parametrize("steps", [0, 1])
def test_ranks_that_ctrl_c_has_ended_at_different_moments_are_told_so(steps: int) -> None:
    """As where one saves in ``except KeyboardInterrupt``, with as many steps or one more."""

    def train(world: World) -> None:
        world.begin_backprop()
        if world.rank == 0:
            world.leave()
            return
        for _ in range(steps):
            world.begin_step()
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            world.progress.wait_until(threading.Event().is_set, what="the parameters of bucket 0")

    error = run_with_limits(2, train)[1]
    assert isinstance(error, StallError)
    assert "rank 0 has ended after 1 backprops, between a backward and its step" in str(error)
    assert "at different moments, as by Ctrl-C (KeyboardInterrupt)" in str(error)
    assert "world.all_reduce([flag], 'max')" in str(error)
    assert "unequal numbers of batches" not in str(error)


def test_an_error_on_its_way_is_told_where_a_finally_waits() -> None:
    """As where a rank's own error is not printed before it has closed its optimizer."""

    def train(world: World) -> None:
        world.begin_backprop()
        if world.rank == 0:
            world.begin_backprop()
            world.progress.wait_until(threading.Event().is_set, what="the parameters of bucket 0")
        try:
            raise ValueError("a bad\nsample " + "x" * 1000)
        finally:
            world.barrier()

    # Whichever rank finds out first ends the wait of both.
    error = next(one for one in run_with_limits(2, train) if isinstance(one, StallError))
    told = "for world.barrier() (wait for every rank) (while it handles ValueError: a bad sample x"
    assert told in str(error) and "x" * 300 not in str(error)


def test_two_ranks_that_wait_for_each_other_are_told_so() -> None:
    over = threading.Event()

    def train(world: World) -> None:
        world.begin_backprop()
        if world.rank == 0:
            try:
                world.all_reduce([1.0])
            finally:
                over.set()
        else:
            world.begin_backprop()
            world.progress.wait_until(over.is_set, what="RS0")

    error = first_stall(run_with_limits(2, train))
    assert "different order" in str(error) and "sys.exit" not in str(error)


def test_a_call_that_others_leave_out_is_found_long_before_the_warning(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As where rank 0 alone calls ``state_dict()`` while the others train on."""
    over = threading.Event()

    def train(world: World) -> None:
        world.begin_backprop()
        if world.rank == 0:
            try:
                with world.named_call("optimizer.state_dict()"):
                    world.all_gather_text("state")
            finally:
                over.set()
        else:
            world.begin_backprop()
            world.progress.wait_until(over.is_set, what="the parameters of bucket 0")

    error = first_stall(run_with_limits(3, train, LATE))
    assert not capfd.readouterr().err, "no warning"
    assert error.code == "ranks-out-of-step"
    message = str(error)
    assert "waits" in message and "for optimizer.state_dict()" in message
    assert "call state_dict() on every rank" in message
    assert message.partition(": ")[0].count(f"{__file__}:") == 2, message


def test_a_wait_that_can_end_is_looked_at_early_in_silence(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = threading.Event()
    handle = Watchdog._handle

    def note(watchdog: Watchdog, sender: int, message: object) -> None:
        handle(watchdog, sender, message)
        if watchdog._rank == 0:  # it has an answer
            looked.set()

    monkeypatch.setattr(Watchdog, "_handle", note)

    def train(world: World) -> None:
        if world.rank == 1:
            assert looked.wait(timeout=PATIENCE_S)
        world.barrier()

    assert run_with_limits(2, train, LATE) == [None, None]
    assert capfd.readouterr().err == ""


def test_a_slow_rank_is_reported_and_waited_for(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    release, say = threading.Event(), safe_output.write
    begun = threading.Barrier(2, timeout=PATIENCE_S)
    monkeypatch.setattr(module, "_ANSWER_S", PATIENCE_S)  # an answer may be late

    def report(text: str) -> None:
        say(text)
        release.set()

    monkeypatch.setattr(safe_output, "write", report)

    def train(world: World) -> float:
        world.begin_backprop()
        begun.wait()
        if world.rank == 1:
            assert release.wait(timeout=PATIENCE_S)
        return world.all_reduce([1.0])[0]

    assert run_with_limits(2, train) == [2.0, 2.0]
    told = capfd.readouterr().err
    assert "rank 0 on fakehost: has begun 1 backprops, waits" in told
    assert "rank 1 on fakehost: has begun 1 backprops, does not wait for communication" in told
    assert "test_watchdog.py" in told  # the stack of the rank that is waited for


def test_a_wait_is_given_up_at_the_limit_and_a_silent_rank_is_called_silent() -> None:
    silent = threading.Event()

    def train(world: World) -> None:
        if world.rank == 1:
            world.progress.close()  # nobody answers any more
            silent.set()
            return
        assert silent.wait(timeout=PATIENCE_S)
        world.all_reduce([1.0])

    limits = StallLimits(warning_s=0.2, abort_s=3.0)
    error = run_with_limits(2, train, limits)[0]
    assert isinstance(error, StallError)
    assert re.search("gave up after waiting ([3-9]|1[0-9]) s", str(error)), str(error)
    assert "rank 1 on fakehost: does not answer" in str(error)


def test_a_wait_for_a_transfer_that_others_also_wait_for_is_not_hopeless() -> None:
    def status(backprops: int, **changes: object) -> Status:
        values: dict[str, object] = {
            "backprops": backprops,
            "steps": backprops - 1,
            "exchanges": 1,
            "waiting": "AG0",
            "waited_s": 9.0,
            "in_exchange": False,
            "left": False,
            "stack": (),
        }
        return Status(**{**values, **changes})  # type: ignore[arg-type]

    assert status(6).waits_for(status(5))
    assert not status(5).waits_for(status(6))  # its data may still be on the wire
    assert not status(5).waits_for(status(5, left=True))
    assert status(5, steps=5).waits_for(status(5))  # which has not come to its step yet
    assert not status(5).waits_for(status(5, steps=5))  # in its own backprop, say
    assert not status(6).waits_for(status(6))


def test_limits_that_make_no_sense_are_refused() -> None:
    with raises(ConfigError, "out-of-range", 60.0, 30.0):
        StallLimits(warning_s=60.0, abort_s=30.0)


def test_an_exchange_that_a_rank_has_left_out_is_no_farewell() -> None:
    """As where rank 0 alone saves a state that all must gather, in its program's last line."""

    def save(world: World) -> list[float]:
        world.begin_backprop()
        if world.rank == 0:
            return world.all_reduce([5.0], "max")
        world.leave()
        return []

    error = run_with_limits(2, save)[0]
    assert isinstance(error, StallError)
    assert "rank 1 has ended after 1 backprops" in str(error)


def test_a_rank_at_its_end_waits_for_those_that_work_on(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For longer than the limit and two answers take. The clock stands until all have looked."""
    monkeypatch.setattr(progress_module, "_WAKE_S", 0.001)
    clock, ended = Clock(monkeypatch), threading.Barrier(3, timeout=PATIENCE_S)
    watchdogs: list[Watchdog] = []

    def have_looked() -> bool:
        waits = [wait for watchdog in watchdogs for wait in tuple(watchdog._waits)]
        looks = [*(each.tended_at for each in watchdogs), *(wait.looked_at for wait in waits)]
        return len(waits) == 2 and min(looks) == clock.now_s

    def work(world: World) -> None:
        watchdogs.append(world._watchdog)
        ended.wait()
        if world.rank == 0:
            for _ in range(40):
                clock.now_s += 0.25
                wait_for(have_looked, "a look of every rank")
        world.leave()

    others_wait = StallLimits(warning_s=0.3, abort_s=0.9)
    assert run_with_limits(3, work, others_wait) == [None, None, None]
    told = capfd.readouterr().err
    # Whoever has asked later leaves the report to the other, if its question was not on its way.
    assert told.count("for the end of the other ranks' programs; status of the ranks:") in (1, 2)
    assert "rank 0 on fakehost: has begun 0 backprops, does not wait for communication" in told


def test_a_rank_at_its_end_gives_up_those_that_are_silent() -> None:
    silent = threading.Event()

    def vanish(world: World) -> None:
        if world.rank == 0:
            world.progress.close()  # nobody answers any more
            silent.set()
            return
        assert silent.wait(timeout=PATIENCE_S)
        world.leave()

    error = run_with_limits(2, vanish, StallLimits(warning_s=0.2, abort_s=3.0))[1]
    assert isinstance(error, StallError)
    assert "rank 0 on fakehost: does not answer" in str(error)


def test_ranks_leave_together() -> None:
    arrived: set[int] = set()

    def leave(world: World) -> None:
        arrived.add(world.rank)
        world.leave()
        assert arrived == {0, 1, 2}

    run_ranks(3, leave)


def test_a_rank_that_leaves_with_an_operation_of_its_own_is_told_which() -> None:
    """Its program does not wait for it, and would end as if all were well."""

    def train(world: World) -> None:
        channel = world.open_channel("reduce-scatter", window=1)
        for step in range(2 + world.rank):
            world.begin_backprop()
            buffer = HostBuffer(np.zeros(2))
            channel.submit(f"RS{step}", partial(_start_reduce, buffer))
        world.leave()

    def _start_reduce(buffer: HostBuffer, collectives: Collectives) -> Request:
        return collectives.start_reduce_scatter(buffer, "ring")

    error = run_with_limits(2, train)[1]
    assert isinstance(error, StallError)
    assert "rank 0 has ended after 2 backprops" in str(error)
    left = "every rank has joined these operations of rank 1 on fakehost: RS2 (reduce-scatter lane)"
    assert left in str(error)


class Slow(Request):
    """A request that is complete when it has been asked for the 50th time."""

    def __init__(self) -> None:
        self.num_asked = 0

    def test(self) -> bool:
        self.num_asked += 1
        return self.num_asked >= 50


@pytest.mark.parametrize("progress", ["thread", "poll"])
def test_whoever_leaves_finishes_what_is_under_way_and_what_follows(
    progress: ProgressMode,
) -> None:
    def step(world: World) -> list[str]:
        done: list[str] = []
        gathers, reduces = (world.open_channel(name, window=1) for name in ("gather", "reduce"))

        def reduced() -> None:
            done.append("RS0")
            gathers.submit("AG0", lambda _: Slow(), lambda: done.append("AG0"))

        reduces.submit("RS0", lambda _: Slow(), reduced)
        world.leave()
        return done

    assert run_ranks(2, step, progress=progress) == [["RS0", "AG0"]] * 2
