"""Watchdog: when a wait lasts too long, a report of what all ranks are doing.

A rank whose wait exceeds a second requests the status of all others, and again at the warning
limit. Their progress threads answer even while their main threads compute, load data or wait. The
lowest waiting rank polls the others and prints one report; if it stops polling, the next takes
over. The report names each rank's host, the number of its backprops, what it waits for, and its
Python stack. A wait that can never end, because another rank has left or waits for this one in
turn, raises StallError. Several threads may wait at a time; the status is that of the thread that
trains.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from dearmpi.comm.api import safe_output
from dearmpi.comm.api.call import stack_of
from dearmpi.comm.messages.mail import Mail, Messenger
from dearmpi.comm.watchdog.chains import find_chain
from dearmpi.comm.watchdog.waits import (
    CURE,
    LEFT_OUT,
    StallReport,
    Status,
    WatchedWait,
    describe_handled,
    explain_hopeless,
)
from dearmpi.errors import ConfigError, StallError

_TEND_S = 0.2  # how often messages are looked for
_FIRST_LOOK_S = 1.0  # of a wait, after which it is tested whether it can end
_ANSWER_S = 2.0  # the longest time that an answer takes
_TURN_S = 0.5  # in which a request reaches all ranks that wait
_SILENT_WHERE_IT_POLLS = (
    "does not answer: with progress='poll' a rank answers only while its main thread is inside "
    "dearmpi. The main thread is elsewhere, such as in an MPI call of the script's own, and its "
    "rank has printed where if operations are in flight (or the rank was stopped, or its host); "
    f"{CURE}"
)
_SUSPENDED_S = 10.0  # without a check of a wait: this process did not run
_MOST_ENDED = 32  # trainings whose counts are kept for ranks that still wait in them


@dataclass(frozen=True, slots=True)
class StallLimits:
    """Seconds after which a wait for other ranks is reported, and after which it is given up."""

    warning_s: float = 30.0
    abort_s: float = 600.0

    def __post_init__(self) -> None:
        if not 0 < self.warning_s <= self.abort_s:
            raise ConfigError(
                f"stall limits are {self.warning_s} s to warn and {self.abort_s} s to abort; the "
                "first must be above 0 and not above the second",
                code="out-of-range",
            )


class Watchdog:
    """One rank's watchdog. ``tend`` runs on the progress thread, the rest on threads that wait.

    The main thread is the thread that trains: the last to begin a step or a collective call.
    """

    def __init__(
        self,
        messenger: Messenger,
        *,
        rank: int,
        hosts: Sequence[str],
        limits: StallLimits,
        polls: bool = False,
    ) -> None:
        """``hosts``: of each rank. ``polls``: ranks answer only while their main thread is in this
        package.
        """
        self._hosts = hosts
        self._mail = Mail(messenger, self._report_problem)
        self._rank, self._size, self.limits, self._polls = rank, len(hosts), limits, polls
        self._main = threading.get_ident()
        self._backprops = self._steps = self._exchanges = 0
        self._in_iteration = self._has_read = False
        self._in_exchange = self._left = False  # in_exchange: the main thread
        self._group = ""  # of the exchange
        self._in_groups: dict[str, int] = {}
        self._is_left_out = False  # of a group that others have made
        self._trainings: dict[str, tuple[int, int]] = {}
        self._ended: deque[str] = deque()  # trainings, the last one at the end
        self._exit_status = 0
        # Of all threads; the innermost of one thread comes last.
        self._waits: list[WatchedWait] = []
        self._num_requests = 0
        self.tended_at = 0.0  # when messages were last looked for
        # Ranks often begin to wait together, and the requests of one spare the others theirs.
        # Twice as many ranks have their turn each time, so that a few turns serve thousands.
        self._turn_s = min(_TURN_S * rank.bit_length(), limits.warning_s / 2)
        self._stack: tuple[str, ...] | None = None  # for all requests that are read together

    @property
    def has_others(self) -> bool:
        return self._size > 1

    def begin_backprop(self, training: str = "") -> None:
        """The main thread has begun a backprop with communication, of ``training``."""
        self._backprops += 1
        self._count(training, 1, 0)
        self._in_iteration, self._has_read = True, False

    def begin_read(self) -> None:
        """The main thread reads gradients before the step, for which ranks bring them together."""
        self._has_read = True

    def begin_step(self, training: str = "") -> None:
        """The calling thread has begun a step, which makes it the main thread."""
        self._main = threading.get_ident()
        self._steps += 1
        self._count(training, 0, 1)
        self._in_iteration = self._has_read = False

    @contextmanager
    def exchange(self, group: str = "") -> Iterator[None]:
        """The calling thread, now the main thread, is in a collective call on the world, or on a
        ``group`` of ranks.
        """
        self._main = threading.get_ident()
        if group:
            self._in_groups = {**self._in_groups, group: self._in_groups[group] + 1}
        else:
            self._exchanges += 1
        before = self._in_exchange, self._group
        self._in_exchange, self._group = True, group
        try:
            yield
        finally:
            self._in_exchange, self._group = before

    def add_group(self, group: str) -> None:
        """This rank is a member of ``group``, whose calls are counted from now on."""
        self._in_groups = {**self._in_groups, group: 0}

    def leave_out(self) -> None:
        """This rank has helped to make a group that it is no member of."""
        self._is_left_out = True

    def add_training(self, training: str) -> None:
        """This rank takes part in ``training``, whose backprops and steps count from now on."""
        self._trainings = {**self._trainings, training: (0, 0)}

    def end_training(self, training: str) -> None:
        """This rank begins nothing more of ``training``. Others may wait for it in vain, so that
        the counts of the last few stay.
        """
        if training not in self._ended:
            self._ended.append(training)
        if len(self._ended) > _MOST_ENDED:
            oldest = self._ended.popleft()
            self._trainings = {n: c for n, c in self._trainings.items() if n != oldest}

    def _count(self, training: str, backprops: int, steps: int) -> None:
        before = self._trainings.get(training)
        if before is not None:
            now = before[0] + backprops, before[1] + steps
            self._trainings = {**self._trainings, training: now}

    def leave(self, exit_status: int = 0) -> None:
        """The program has ended with ``exit_status``: this rank joins no further operation."""
        self._left, self._exit_status = True, exit_status

    def begin_wait(self, what: str, training: str = "") -> WatchedWait:
        """The calling thread begins to wait for ``what``, of a ``training`` or of none, perhaps
        inside another wait.
        """
        now, thread = time.monotonic(), threading.get_ident()
        in_exchange = self._in_exchange and thread == self._main
        outer = self._innermost(thread)
        wait = WatchedWait(
            thread=thread,
            what=what,
            in_exchange=in_exchange,
            since=now,
            looked_at=now,
            first_request=self._num_requests + 1,
            interrupted="" if outer is None else outer.what,
            group=self._group if in_exchange else "",
            training=training,
            handled=describe_handled(),
        )
        if in_exchange:  # a signal handler's wait inside this one is outside of the exchange
            self._in_exchange = False
        self._waits.append(wait)
        return wait

    def end_wait(self, wait: WatchedWait | None = None) -> None:
        """``wait`` is over; by default the innermost of the calling thread."""
        wait = wait or self._innermost(threading.get_ident())
        if wait is None:
            return
        self._waits.remove(wait)
        if wait.in_exchange:
            self._in_exchange = True

    def _innermost(self, thread: int) -> WatchedWait | None:
        """The innermost wait of ``thread``; None if it does not wait."""
        waits = tuple(self._waits)
        return next((wait for wait in reversed(waits) if wait.thread == thread), None)

    def check_wait(self) -> None:
        """Print the report of the calling thread's wait once all ranks have answered.

        Time for which a scheduler has suspended the job does not count. Raises StallError if the
        wait can never end, or lasts longer than the limit.
        """
        now, wait = time.monotonic(), self._innermost(threading.get_ident())
        assert wait is not None, "only a thread that waits checks its wait"
        if now - wait.looked_at > _SUSPENDED_S:
            wait.skip(now - wait.looked_at, now)
        wait.looked_at = now
        waited_s = now - wait.since
        if self._is_answered(wait):
            if not self._left:
                self._raise_if_hopeless(wait)
            if self._is_long(wait) and not wait.is_reported:
                wait.is_reported = True
                safe_output.write(self._report(wait))  # even where the disk is full
        # The rank that gives up ends the job, so ranks that have a full report come first.
        is_late = self._left or self._is_deferred(wait)
        most_s = self.limits.abort_s + (2 * _ANSWER_S if is_late else 0.0)
        if waited_s > most_s and not (self._left and self._is_patient(wait)):
            raise StallError(
                f"rank {self._rank} on {self._hosts[self._rank]} gave up after waiting "
                f"{waited_s:.0f} s for {wait.subject}\n{self._explain(wait)}",
                code="wait-timed-out",
            )

    def tend(self) -> None:
        """Answer requests, collect answers, and send requests that are due. Raises nothing."""
        now = time.monotonic()
        if now - self.tended_at < _TEND_S:
            return
        tended_at, self.tended_at, self._stack = self.tended_at, now, None
        self._mail.drop_sent()
        # Each rank has only a few messages in flight.
        self._mail.read(self._handle, most=4 * self._size)
        due = [wait for wait in tuple(self._waits) if self._is_due(wait, now, tended_at)]
        if due:
            self._request_statuses(now, due)

    def _is_due(self, wait: WatchedWait, now: float, tended_at: float) -> bool:
        """Whether requests for ``wait`` are due."""
        if now - max(wait.since, tended_at) > _SUSPENDED_S:
            return False  # this process was suspended; check_wait() first measures for how long
        began, requested_at = wait.since + self._turn_s, wait.requested_at
        if requested_at is None and not self._left:  # which gives up no wait as hopeless
            due_at = began + min(_FIRST_LOOK_S, self.limits.warning_s)
        else:
            long_at = requested_at if requested_at and self._is_long(wait) else began
            due_at = long_at + self.limits.warning_s
        return now > due_at and not self._is_deferred(wait)

    def _is_long(self, wait: WatchedWait) -> bool:
        """Whether the others were polled when ``wait`` had lasted as long as is to be reported."""
        long_at = wait.since + self._turn_s + self.limits.warning_s
        return wait.requested_at is not None and wait.requested_at >= long_at

    def _is_deferred(self, wait: WatchedWait) -> bool:
        """Whether another rank polls for this wait, and so reports it."""
        return self._is_recent(wait.deferred_at + self._turn_s)

    def _report(self, wait: WatchedWait) -> str:
        """What every rank is doing, with the stacks of all that answered."""
        now = time.monotonic()
        silence = "does not answer (stopped, or its host is, or its world is closed)"
        if wait.requested_at is None:
            silence = "was not polled"
        elif self._polls:
            silence = _SILENT_WHERE_IT_POLLS
        if self._mail.problem:
            silence = (
                f"does not answer, or was not polled, since messages failed: {self._mail.problem}"
            )
        answers = dict(wait.answers)
        silent_s = {
            rank: now - wait.answered_at[rank]
            for rank in answers
            if not self._is_recent(wait.answered_at[rank])
        }
        statuses = {**answers, self._rank: self._status_of(wait, wait.thread)}
        report = StallReport(self._hosts, statuses, silence, silent_s)
        title = f"waited {now - wait.since:.0f} s for {wait.subject}; status of the ranks:"
        lines = [title, *report.lines()]
        if self._is_left_out and wait.in_exchange and not wait.group:
            lines.append(LEFT_OUT)
        return "\n".join(lines)

    def _explain(self, wait: WatchedWait) -> str:
        """The report, or the rank that has it: one of hundreds that give up prints all."""
        if not self._is_deferred(wait):
            return self._report(wait)
        judge = wait.deferred_to
        return f"rank {judge} on {self._hosts[judge]} polls all ranks and reports what they do"

    def status(self, stack: tuple[str, ...] | None = None) -> Status:
        """The status that other ranks receive: that of the main thread, which may yet complete
        what they wait for. ``stack``: of the main thread, if the caller has it already.
        """
        return self._status_of(self._innermost(self._main), self._main, stack)

    def _status_of(
        self, wait: WatchedWait | None, thread: int, stack: tuple[str, ...] | None = None
    ) -> Status:
        """The status of ``thread``, whose wait is ``wait``."""
        left = self._left
        if left:
            stack = ()  # what runs then is this package
        elif stack is None:
            stack = stack_of(thread)
        # The main thread may go on meanwhile. The counts come last, so that they are never lower
        # than at the moment of the wait.
        return Status(
            left=left,
            waiting=wait.subject if wait else "",
            waited_s=time.monotonic() - wait.since if wait else 0.0,
            in_exchange=wait is not None and wait.in_exchange,
            exchanges=self._exchanges,
            steps=self._steps,
            backprops=self._backprops,
            stack=stack,
            in_iteration=self._in_iteration,
            has_read=self._has_read,
            group=wait.group if wait is not None else "",
            in_groups=self._in_groups,
            training=wait.training if wait is not None else "",
            trainings=self._trainings,
            exit_status=self._exit_status,
        )

    def _report_problem(self, problem: str) -> None:
        safe_output.write(
            f"[rank {self._rank} on {self._hosts[self._rank]}] a message between watchdogs failed: "
            f"{problem}; this rank continues, but polls the others no more. If file handles have "
            "run out, raise ulimit -n"
        )

    def _request_statuses(self, now: float, waits: Iterable[WatchedWait]) -> None:
        for wait in waits:
            was_long = self._is_long(wait)
            wait.requested_at = now
            if self._is_long(wait) and not was_long:
                wait.answers.clear()  # the report shows what the ranks do now
        self._num_requests += 1
        for other in range(self._size):
            # After a problem it sends no more requests; the other ranks count as silent.
            if other != self._rank and not self._mail.problem:
                self._mail.send({"request": self._num_requests, "left": self._left}, other)

    def _handle(self, sender: int, message: Any) -> None:
        now, waits = time.monotonic(), tuple(self._waits)
        if "request" in message:
            # One report is enough; a rank that trains does not leave it to a rank that has ended.
            judges = sender < self._rank or self._mail.problem
            if judges and (self._left or not message.get("left")):
                for wait in waits:
                    wait.deferred_at, wait.deferred_to = now, sender
            if self._stack is None:
                self._stack = stack_of(self._main)
            answer = {"status": asdict(self.status(self._stack)), "to": message["request"]}
            self._mail.send(answer, sender)
            return
        plain = message["status"]
        status = Status(**{**plain, "stack": tuple(plain["stack"])})
        for wait in waits:
            wait.record(sender, status, request=message["to"], now=now)

    def _is_answered(self, wait: WatchedWait) -> bool:
        if wait.requested_at is None or self._is_deferred(wait):
            return False
        complete = len(wait.answers) == self._size - 1
        return complete or time.monotonic() - wait.requested_at > _ANSWER_S

    def _is_patient(self, wait: WatchedWait) -> bool:
        """Whether a rank whose program has ended goes on waiting for ranks that still work.

        It does while they answer it, or the rank that polls in its place. Once that rank stops
        polling, answers to this rank's own requests are due.
        """
        is_deferred = self._is_recent(wait.deferred_at + self._turn_s + 2 * _ANSWER_S)
        # Else all must have answered the last request, or the one before.
        num_fresh = sum(map(self._is_recent, list(wait.answered_at.values())))
        return is_deferred or num_fresh == self._size - 1

    def _is_recent(self, at: float) -> bool:
        """Whether something that ranks do every ``warning_s``, last at ``at``, still goes on."""
        return time.monotonic() - at <= self.limits.warning_s + 2 * _ANSWER_S

    def _raise_if_hopeless(self, wait: WatchedWait) -> None:
        own = self._status_of(wait, wait.thread)
        trains = wait.thread == self._main  # else the main thread may yet do what others wait for
        are_gone = trains and self.has_others and self._have_all_left(wait)
        for rank, other in sorted(wait.answers.items()):
            in_vain = other.left or (trains and other.waits_for(own))
            if are_gone or (own.waits_for(other) and in_vain):
                raise StallError(
                    f"rank {self._rank} {own.describe_place()}, but rank {rank} "
                    f"{other.describe_place()}: {explain_hopeless(own, other)}\n"
                    f"{self._report(wait)}",
                    code="ranks-out-of-step",
                    exit_code=other.exit_status or StallError.exit_code,
                )
        if trains and wait.has_news:
            self._raise_if_chained(wait, own)

    def _raise_if_chained(self, wait: WatchedWait, own: Status) -> None:
        wait.num_judged = wait.num_recorded
        statuses = {**wait.answers, self._rank: own}
        if not any(one.in_groups or len(one.trainings) > 1 for one in statuses.values()):
            return  # without groups two ranks wait for each other, or nobody does
        chain = find_chain(self._rank, statuses)
        if chain is None:
            return
        raise StallError(
            f"rank {self._rank} {own.describe_place()}, but {chain.explain(statuses)}\n"
            f"{self._report(wait)}",
            code="ranks-out-of-step",
            exit_code=statuses[chain.ranks[-1]].exit_status or StallError.exit_code,
        )

    def _have_all_left(self, wait: WatchedWait) -> bool:
        """Whether all others left so long ago that no message of theirs is in flight."""
        now, left_at = time.monotonic(), list(wait.left_at.values())
        return len(left_at) == self._size - 1 and now - max(left_at) > self.limits.warning_s
