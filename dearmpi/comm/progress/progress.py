"""Progress: which thread completes operations, and when they are posted.

MPI does not progress by itself, so a thread must poll. In ``thread`` mode the progress thread makes
all calls into the library: other threads submit work and wait. In ``poll`` mode the submitting
thread polls, whenever it calls ``poll`` or waits; it is then the progress thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager

from dearmpi.comm.api.collectives import Completed, Movement, Request
from dearmpi.comm.progress.background import BackgroundThread
from dearmpi.comm.progress.lane import Lane, Operation
from dearmpi.comm.progress.sleeping import (
    Backoff,
    Bell,
    check_process,
    deadlock_of,
    yield_to_computation,
)
from dearmpi.comm.watchdog.waits import Absence, WatchedWait
from dearmpi.comm.watchdog.watchdog import Watchdog
from dearmpi.config import ProgressMode
from dearmpi.errors import CommError, DearError, StallError

_WAKE_S = 0.5  # a waiting main thread wakes this often, for signals and failures


class Progress:
    """Drives lanes, in a thread of its own or in the threads that poll and wait.

    around: makes the context in which lanes are driven, on any thread.
    """

    def __init__(self, mode: ProgressMode, *, origin: str) -> None:
        """``origin`` names this process in errors, such as ``rank 3 on n7``."""
        self.mode = mode
        self._origin = origin
        self._lanes: list[Lane] = []
        # No locks: a signal handler may wait while its thread is in the middle of a submission.
        self._submitted, self._is_asleep = Bell(), False  # of the progress thread
        self._waiting: list[tuple[Callable[[], bool], Bell]] = []
        self._driving = threading.RLock()
        self._driver: int | None = None  # the thread that drives lanes at this moment
        self._had_work = False  # some lane, at the last poll
        self._failure: CommError | None = None
        self._closing = False
        self._process = os.getpid()
        self._num_submitted = 0
        self._watchdog: Watchdog | None = None
        self._absence: Absence | None = None
        self._thread: threading.Thread | None = None
        self.background = BackgroundThread()
        self.waited_s = 0.0  # in wait_until, since the start
        nothing = contextlib.nullcontext()  # one for all polls
        self.around: Callable[[], AbstractContextManager[object]] = lambda: nothing
        if mode == "thread":
            self._thread = threading.Thread(target=self._run, name="dearmpi-progress", daemon=True)
            self._thread.start()

    def watch(self, watchdog: Watchdog) -> None:
        """Have ``watchdog`` check every wait from now on."""
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
        """Whether an operation called the calling thread, which then completes none itself."""
        return self._driver == threading.get_ident() or self.background.is_current()

    def compute(self, function: Callable[[], object]) -> Request:
        """Run ``function``, which takes long, for an operation.

        In ``thread`` mode the background thread does, while the progress thread polls.
        """
        if self.mode == "thread":
            return self.background.start(function)
        function()
        return Completed()

    def submit(self, lane: Lane, work: Operation) -> None:
        """Queue ``work`` behind all other work of ``lane``.

        Raises CommError if progress has failed, or in a fork.
        """
        self.raise_failure()
        check_process(self._process, self._origin, work.label)
        lane.queue.append(work)
        self._num_submitted += 1  # after the queue has it: see _is_idle
        if self._is_asleep:
            self._submitted.ring()

    def poll(self) -> None:
        """In ``poll`` mode, drive all lanes once; does nothing in ``thread`` mode.

        Nor does it in a fork, where operations under way belong to the parent, or after ``close``,
        since MPI may have ended.
        """
        if self.mode != "poll" or self._closing:
            return
        if os.getpid() == self._process and not self.is_driver():
            self._advance()
            self.raise_failure()

    def wait_until(self, ready: Callable[[], bool], *, what: str, training: str = "") -> None:
        """Block until ``ready()``. ``training``: of which it is a backprop's or step's.

        Raises CommError if progress has failed or the wait could never end, and StallError if the
        watchdog gives it up. Both name ``what``.
        """
        if ready():
            return
        check_process(self._process, self._origin, what)
        if self.is_driver():
            raise deadlock_of(self._origin, what)
        watchdog, began_s = self._watchdog, time.perf_counter()
        watched: WatchedWait | None = None
        try:
            if watchdog is not None:
                watched = watchdog.begin_wait(what, training)
            wait = self._poll_once if self.mode == "poll" else self._sleep_until_changed
            backoff = Backoff()
            while not ready():
                self.raise_failure()
                if self._closing:
                    raise CommError(
                        f"{self._origin} waited for {what} after its world was closed; train, and "
                        "call the world and its groups, before world.leave(), world.close() or "
                        "MPI.Finalize()",
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
        """WatchedWait until no lane has work, and completed work has submitted no more.

        Raises as ``wait_until``; a StallError names the operations that are left.
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
                exit_code=error.exit_code,
            ) from error

    def notify(self) -> None:
        """Wake every waiter whose condition has come true.

        The progress thread evaluates the conditions itself. To wake the main thread for each
        operation of a step would cost it the interpreter, and a core.
        """
        for ready, bell in tuple(self._waiting):
            if ready():
                bell.ring()

    def raise_failure(self) -> None:
        """Raise the error with which progress has failed, if it has."""
        if self._failure is not None:
            raise self._failure

    def close(self, *, patience_s: float = 10.0) -> None:
        """Stop the progress thread, and wait ``patience_s`` for its end. Drops queued work."""
        self._closing = True
        self._wake_all()
        if self._absence is not None:
            self._absence.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=patience_s)
        self.background.close(patience_s=patience_s)

    def _is_idle(self) -> bool:
        # The end of one operation may submit another, to a lane that was checked before.
        num_submitted = self._num_submitted
        busy = any(lane.busy for lane in tuple(self._lanes))
        return not busy and num_submitted == self._num_submitted

    def _sleep_until_changed(self, ready: Callable[[], bool], _: Backoff) -> None:
        bell = Bell()
        waiting = (ready, bell)
        try:
            self._waiting.append(waiting)  # before the check: what comes true from now on rings
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
        """Drive every lane once; keeps a failure for the threads that wait."""
        movement, had_work = Movement.NONE, False
        with self._driving, self.around():
            if self._failure is not None:
                return Movement.NONE
            self._driver = threading.get_ident()
            try:
                for lane in tuple(self._lanes):
                    if lane.queue or lane.in_flight or lane.current is not None:
                        had_work = True
                        movement = max(movement, self._advance_lane(lane))
                self._had_work = had_work
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

    def _keeps(self, error: BaseException) -> bool:
        """Whether ``error`` is kept for the threads that wait, rather than raised where it polls.

        A SystemExit, as of an optimizer's step, would end the progress thread silently.
        """
        return isinstance(error, Exception) or self._thread is threading.current_thread()

    def _fail(self, what: str, error: BaseException) -> None:
        # Not the repr, which for MPI's errors is a bare number.
        described = "".join(traceback.format_exception_only(error)).rstrip()
        reason = str(error) if isinstance(error, DearError) else described
        kind = type(error) if isinstance(error, CommError) else CommError
        code = error.code if isinstance(error, DearError) else "operation-failed"
        exit_code = error.exit_code if isinstance(error, DearError) else None
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            exit_code = error.code or None
        failure = kind(f"{self._origin}: {what} failed: {reason}", code=code, exit_code=exit_code)
        failure.__cause__ = error
        self._failure = failure
        self._wake_all()

    def _run(self) -> None:
        try:
            yield_to_computation()
            self._drive()
        except BaseException as error:  # outside of the lanes; waiters would wait for ever
            self._fail("driving communication", error)

    def _drive(self) -> None:
        backoff = Backoff()
        while not self._closing and self._failure is None:
            movement = self._advance()
            backoff.note(movement)
            if movement is Movement.OPERATION:
                self.notify()
            elif self._had_work:
                # Not for the bell: to wait there costs more than the poll itself, and new work is
                # seen soon enough.
                time.sleep(backoff.next_sleep_s())
            else:
                self._await_submission()
                backoff.note(Movement.OPERATION)

    def _await_submission(self) -> None:
        self._is_asleep = True  # before the check: what is submitted from now on rings
        try:
            if not self._closing and not any(lane.busy for lane in tuple(self._lanes)):
                self._submitted.wait(_WAKE_S if self._watchdog else None)
        finally:
            self._is_asleep = False
