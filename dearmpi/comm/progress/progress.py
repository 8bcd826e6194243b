"""Progress: who drives the operations under way, and when they are posted.

MPI does not progress by itself, so somebody must poll. In ``thread`` mode one thread owns all
calls into the library: other threads submit work and wait. In ``poll`` mode the submitting thread
does it, whenever it calls ``poll`` or waits.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager

from dearmpi.comm.api.collectives import Movement
from dearmpi.comm.api.stack import signal_handled
from dearmpi.comm.progress.backoff import Backoff
from dearmpi.comm.progress.lane import Lane, Work
from dearmpi.comm.watchdog.absence import Absence
from dearmpi.comm.watchdog.bell import Bell
from dearmpi.comm.watchdog.waits import Wait
from dearmpi.comm.watchdog.watchdog import Watchdog
from dearmpi.config import ProgressMode
from dearmpi.errors import CommError, DearError, StallError

_NICENESS = 5  # of the progress thread
_WAKE_S = 0.5  # a waiting main thread looks up this often, for signals and failures


def yield_to_computation() -> None:
    """Have the calling thread interrupt none that computes, whenever it wakes (Linux).

    It still gets a core soon, since it hardly uses any. Where the process has a scheduling policy
    of its own, that stays.
    """
    with contextlib.suppress(AttributeError, OSError):  # another system, or one that forbids it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            niceness = max(os.getpriority(os.PRIO_PROCESS, 0), _NICENESS)
            os.setpriority(os.PRIO_PROCESS, 0, niceness)


class Progress:
    """Drives lanes, in a thread of its own or in the threads that poll and wait.

    around: what lanes are driven in, on whichever thread.
    """

    def __init__(self, mode: ProgressMode, *, origin: str) -> None:
        """``origin`` names this process in errors, such as ``rank 3 on n7``."""
        self.mode = mode
        self._origin = origin
        self._lanes: list[Lane] = []
        # No locks: a signal handler may wait while its thread is in the middle of a submission.
        self._submitted, self._is_asleep = Bell(), False  # the thread of our own
        self._waiting: list[tuple[Callable[[], bool], Bell]] = []
        self._driving = threading.RLock()
        self._driver: int | None = None  # the thread that drives lanes at this moment
        self._failure: CommError | None = None
        self._closing = False
        self._process = os.getpid()
        self._num_submitted = 0
        self._watchdog: Watchdog | None = None
        self._absence: Absence | None = None
        self._thread: threading.Thread | None = None
        self.waited_s = 0.0  # in wait_until, since the start
        self.around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
        if mode == "thread":
            self._thread = threading.Thread(target=self._run, name="dearmpi-progress", daemon=True)
            self._thread.start()

    def watch(self, watchdog: Watchdog) -> None:
        """Have ``watchdog`` look at every wait from now on."""
        self._watchdog = watchdog
        if self.mode == "poll" and watchdog.has_others:
            self._absence = Absence(
                origin=self._origin,
                warning_s=watchdog.limits.warning_s,
                driven_at=lambda: watchdog.tended_at,
                under_way=lambda: [
                    work.label for lane in tuple(self._lanes) for work in tuple(lane.in_flight)
                ],
            )
            self._absence.start()
        self.notify()
        self._submitted.ring()

    @property
    def num_lanes(self) -> int:
        """How many lanes are open."""
        return len(self._lanes)

    def open_lane(self, name: str, window: int) -> Lane:
        """A new lane, driven until it is closed."""
        lane = Lane(name, window)
        self._lanes.append(lane)
        return lane

    def close_lane(self, lane: Lane) -> None:
        """Stop driving ``lane``, which must be empty."""
        self.wait_until(lambda: not lane.busy, what=f"the {lane.name} lane to empty")
        self._lanes.remove(lane)

    def is_driver(self) -> bool:
        """Whether the calling thread drives lanes: it is called by something of theirs."""
        return self._driver == threading.get_ident()

    def submit(self, lane: Lane, work: Work) -> None:
        """Queue ``work`` behind what ``lane`` already has."""
        self.raise_failure()
        self._refuse_fork(work.label)
        lane.queue.append(work)
        self._num_submitted += 1  # after the queue has it: see _is_idle
        if self._is_asleep:
            self._submitted.ring()

    def poll(self) -> None:
        """In ``poll`` mode, drive all lanes once; in ``thread`` mode there is nothing to do.

        Nor is there in a fork: what is under way is its parent's.
        """
        if self.mode == "poll" and os.getpid() == self._process and not self.is_driver():
            self._advance()
            self.raise_failure()

    def wait_until(self, ready: Callable[[], bool], *, what: str) -> None:
        """Block until ``ready()``.

        Raises CommError, naming ``what``, if progress has failed, and StallError if the watchdog
        gives the wait up.
        """
        if ready():
            return
        self._refuse_fork(what)
        if self.is_driver():
            raise self._refuse_deadlock(what)
        watchdog, began_s = self._watchdog, time.perf_counter()
        watched: Wait | None = None
        try:
            if watchdog is not None:
                watched = watchdog.begin_wait(what)
            wait = self._poll_once if self.mode == "poll" else self._sleep_until_changed
            backoff = Backoff()
            while not ready():
                self.raise_failure()
                if self._closing:
                    raise CommError(
                        f"{self._origin} waited for {what} after its world was closed",
                        code="world-closed",
                    )
                wait(ready, backoff)
                if watchdog is not None and not ready():
                    watchdog.check_wait()
        finally:
            if watched is None or not watched.interrupted:  # else the outer wait counts both
                self.waited_s += time.perf_counter() - began_s
            if watchdog is not None and watched is not None:
                watchdog.end_wait(watched)

    def drain(self) -> None:
        """Wait until nothing is under way in any lane, and nothing follows from what was.

        Raises what ``wait_until`` raises; a StallError names the operations that are left.
        """
        try:
            self.wait_until(self._is_idle, what="the other ranks to join its last operations")
        except StallError as error:
            left = [
                f"{work.label} ({lane.name} lane)"
                for lane in self._lanes
                for work in lane.in_flight
            ]
            raise StallError(
                f"{error}\nNot every rank has joined these operations of {self._origin}: "
                f"{', '.join(left)}",
                code=error.code,
            ) from error

    def notify(self) -> None:
        """Wake waiters if what any of them waits for has come true.

        The thread that changes things looks, and wakes no main thread to look for itself: that
        would cost it the interpreter, and a core, for every operation of a step.
        """
        for ready, bell in tuple(self._waiting):
            if ready():
                bell.ring()

    def raise_failure(self) -> None:
        """Raise what went wrong on the progress thread, if anything did."""
        if self._failure is not None:
            raise self._failure

    def close(self, *, patience_s: float = 10.0) -> None:
        """Stop the thread, and wait for it as long as that. Works still queued are dropped."""
        self._closing = True
        self._wake_all()
        if self._absence is not None:
            self._absence.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=patience_s)

    def _is_idle(self) -> bool:
        # The end of one operation may submit another, to a lane that was looked at before.
        num_submitted = self._num_submitted
        busy = any(lane.busy for lane in tuple(self._lanes))
        return not busy and num_submitted == self._num_submitted

    def _sleep_until_changed(self, ready: Callable[[], bool], _: Backoff) -> None:
        bell = Bell()
        waiting = (ready, bell)
        try:
            self._waiting.append(waiting)  # before it looks: what comes true from now on rings
            if self._is_asleep:  # a handler may wait for what its thread was about to ring for
                self._submitted.ring()
            if not (ready() or self._failure is not None or self._closing):
                bell.wait(_WAKE_S)
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)

    def _wake_all(self) -> None:
        self._submitted.ring()
        for _, bell in tuple(self._waiting):
            bell.ring()

    def _poll_once(self, _: Callable[[], bool], backoff: Backoff) -> None:
        movement = self._advance()
        backoff.note(movement)
        if movement is not Movement.OPERATION:
            time.sleep(backoff.next_sleep_s())

    def _advance(self) -> Movement:
        """Drive every lane once; a failure is kept for the threads that wait."""
        movement = Movement.NONE
        with self._driving, self.around():
            if self._failure is not None:
                return Movement.NONE
            self._driver = threading.get_ident()
            try:
                for lane in tuple(self._lanes):
                    if lane.queue or lane.in_flight or lane.current is not None:
                        movement = max(movement, self._advance_lane(lane))
                if self._watchdog is not None:
                    self._watchdog.tend()
            finally:
                self._driver = None
        return movement

    def _advance_lane(self, lane: Lane) -> Movement:
        try:
            return lane.advance()
        except BaseException as error:
            if not self._keeps(error):
                raise
            label = lane.current.label if lane.current else "an operation"
            self._fail(f"{label} ({lane.name} lane)", error)
            return Movement.NONE

    def _refuse_deadlock(self, what: str) -> CommError:
        if handled := signal_handled():
            return CommError(
                f"deadlock: on {self._origin} the handler of {handled} interrupted communication "
                f"and waits for {what}, but with progress='poll' only the interrupted thread can "
                "complete it. Let the handler set a flag, and read parameters after the step, or "
                "use progress='thread'",
                code="wait-in-signal-handler",
            )
        return CommError(
            f"deadlock: on {self._origin} the progress thread waits for {what}, which only this "
            "thread can complete. The optimizer's step runs there and must not read parameters "
            "through the model: read those of its param groups. Nor may a finalizer (__del__), "
            "which Python runs on any thread",
            code="wait-on-progress-thread",
        )

    def _refuse_fork(self, what: str) -> None:
        if os.getpid() != self._process:
            raise CommError(
                f"a process that was forked from {self._origin} waits for {what}, but a fork has "
                "no communication. Call optimizer.synchronize() before the fork, and train in "
                "processes that are started anew",
                code="wait-in-fork",
            )

    def _keeps(self, error: BaseException) -> bool:
        """Whether ``error`` is for those who wait, and not for who polls.

        A thread of our own would end by a SystemExit, as of an optimizer's step, without a word.
        """
        return isinstance(error, Exception) or self._thread is threading.current_thread()

    def _fail(self, what: str, error: BaseException) -> None:
        # Not its repr: that of MPI's is a number which no document explains.
        said = "".join(traceback.format_exception_only(error)).rstrip()
        reason = str(error) if isinstance(error, DearError) else said
        kind = type(error) if isinstance(error, CommError) else CommError
        code = error.code if isinstance(error, DearError) else "operation-failed"
        failure = kind(f"{self._origin}: {what} failed: {reason}", code=code)
        failure.__cause__ = error
        self._failure = failure
        self._wake_all()

    def _run(self) -> None:
        try:
            yield_to_computation()
            self._drive()
        except BaseException as error:  # beside the lanes: who waits would wait for ever
            self._fail("driving communication", error)

    def _drive(self) -> None:
        backoff = Backoff()
        while not self._closing and self._failure is None:
            movement = self._advance()
            backoff.note(movement)
            if movement is Movement.OPERATION:
                self.notify()
            elif any(lane.busy for lane in tuple(self._lanes)):
                # Not for the bell: waiting there costs more than the poll itself, and what is
                # submitted meanwhile is seen soon enough.
                time.sleep(backoff.next_sleep_s())
            else:
                self._await_submission()
                backoff.note(Movement.OPERATION)

    def _await_submission(self) -> None:
        self._is_asleep = True  # before it looks: what is submitted from now on rings
        try:
            if not self._closing and not any(lane.busy for lane in tuple(self._lanes)):
                self._submitted.wait(_WAKE_S if self._watchdog else None)
        finally:
            self._is_asleep = False
