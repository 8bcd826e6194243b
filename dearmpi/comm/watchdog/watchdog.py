"""Watchdog: when a wait lasts too long, find out from the other ranks what they are doing.

A rank whose wait exceeds the warning limit asks all others, whose progress threads answer even
while their main threads compute, load data, or wait for something else. Those that wait too leave
it to that one, which asks again and again, to report and to judge. The report names, for every
rank, its host, how many backprops it has begun, what it waits for, and its Python stack. If the
wait can never end, because another rank has left or waits for this one in turn, it ends with a
StallError. Several threads may wait at a time; others are told of the one that trains.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from dearmpi.comm.api import safe_output
from dearmpi.comm.api.call import cure_for
from dearmpi.comm.api.stack import signal_handled, stack_of
from dearmpi.comm.messages.mail import Mail, Messenger
from dearmpi.comm.watchdog.absence import CURE
from dearmpi.comm.watchdog.waits import StallReport, Status, Wait
from dearmpi.errors import ConfigError, StallError

_TEND_S = 0.2  # how often messages are looked for
_ANSWER_S = 2.0  # how long answers may take
_TURN_S = 0.5  # in which a question reaches all ranks that wait
_GIVING_UP = (  # the status of sys.exit is not known here
    "; if the other rank has called sys.exit(), have it raise an exception or call "
    "world.abort(status), which end the job at once"
)
_AT_A_SIGNAL = (
    "let its handler set a flag, agree on the flag on every rank by "
    "world.all_reduce([flag], 'max') between steps, and act then"
)
_INTERRUPTED = (
    f", or Ctrl-C (KeyboardInterrupt) has ended them at different moments: {_AT_A_SIGNAL}"
)
_SILENT_WHERE_IT_POLLS = (
    "does not answer: with progress='poll' a rank answers only while its main thread is inside "
    "dearmpi. The main thread is elsewhere, such as in an MPI call of the script's own, and its "
    "rank has printed where if operations are in flight (or the rank was stopped, or its host); "
    f"{CURE}"
)
_SUSPENDED_S = 10.0  # without a look at a wait: this process did not run


@dataclass(frozen=True, slots=True)
class StallLimits:
    """Seconds that a wait for other ranks may last before a report, and before it is given up."""

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
    """One rank's watchdog. ``tend`` runs on the progress thread, the rest on those that wait.

    The main thread is the one that trains: it has last begun a step or a collective call.
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
        """``hosts``: the name of each rank's. ``polls``: this rank, and so as a rule each, answers
        only where its main thread is in this package.
        """
        self._hosts = hosts
        self._mail = Mail(messenger, self._complain)
        self._rank, self._size, self.limits, self._polls = rank, len(hosts), limits, polls
        self._main = threading.get_ident()
        self._backprops = self._steps = self._exchanges = 0
        self._in_iteration = False
        self._in_exchange = self._left = False  # in_exchange: the main thread
        self._waits: list[Wait] = []  # of all threads; of one thread the innermost comes last
        self._num_asked = 0
        self.tended_at = 0.0  # when messages were last looked for
        # Ranks often begin to wait together. Those that would ask later are spared by then: twice
        # as many with each turn, so that a few turns are enough for thousands.
        self._turn_s = min(_TURN_S * rank.bit_length(), limits.warning_s / 2)
        self._stack: tuple[str, ...] | None = None  # for all questions that are read together

    @property
    def has_others(self) -> bool:
        """Whether there is any other rank."""
        return self._size > 1

    def begin_backprop(self) -> None:
        """The main thread has begun a backprop with communication."""
        self._backprops += 1
        self._in_iteration = True

    def begin_step(self) -> None:
        """The calling thread, which so is the main one, has begun a step."""
        self._main = threading.get_ident()
        self._steps += 1
        self._in_iteration = False

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """The calling thread, which so is the main one, is in a collective call on the world."""
        self._main = threading.get_ident()
        self._exchanges += 1
        before, self._in_exchange = self._in_exchange, True
        try:
            yield
        finally:
            self._in_exchange = before

    def leave(self) -> None:
        """The program has come to its end: whoever waits for more from it waits in vain."""
        self._left = True

    def begin_wait(self, what: str) -> Wait:
        """The calling thread begins to wait for ``what``, perhaps in the middle of another wait."""
        now, thread = time.monotonic(), threading.get_ident()
        in_exchange = self._in_exchange and thread == self._main
        outer = self._innermost(thread)
        wait = Wait(
            thread=thread,
            what=what,
            in_exchange=in_exchange,
            since=now,
            looked_at=now,
            first_question=self._num_asked + 1,
            interrupted="" if outer is None else outer.what,
        )
        if in_exchange:  # what a handler waits for in the middle is not in the exchange
            self._in_exchange = False
        self._waits.append(wait)
        return wait

    def end_wait(self, wait: Wait | None = None) -> None:
        """``wait``, or else the calling thread's innermost, is over."""
        wait = wait or self._innermost(threading.get_ident())
        if wait is None:
            return
        self._waits.remove(wait)
        if wait.in_exchange:
            self._in_exchange = True

    def _innermost(self, thread: int) -> Wait | None:
        """What ``thread`` waits for at this moment."""
        waits = tuple(self._waits)
        return next((wait for wait in reversed(waits) if wait.thread == thread), None)

    def check_wait(self) -> None:
        """Print the report of the calling thread's wait once it is complete. Raises StallError if
        the wait is to be given up.

        Time for which a scheduler has suspended the job does not count.
        """
        now, wait = time.monotonic(), self._innermost(threading.get_ident())
        assert wait is not None, "only a thread that waits looks at its wait"
        if now - wait.looked_at > _SUSPENDED_S:
            wait.skip(now - wait.looked_at, now)
        wait.looked_at = now
        waited_s = now - wait.since
        if self._is_answered(wait):
            if not self._left:
                self._raise_if_hopeless(wait)
            if not wait.is_reported:
                wait.is_reported = True
                safe_output.write(self._report(wait))  # which a full disk must not make a failure
        # Whoever gives up ends the job, so those that know what all do come first.
        is_late = self._left or self._is_spared(wait)
        most_s = self.limits.abort_s + (2 * _ANSWER_S if is_late else 0.0)
        if waited_s > most_s and not (self._left and self._is_patient(wait)):
            raise StallError(
                f"rank {self._rank} on {self._hosts[self._rank]} gave up after waiting "
                f"{waited_s:.0f} s for {wait.subject}\n{self._explain(wait)}",
                code="wait-timed-out",
            )

    def tend(self) -> None:
        """Answer questions, collect answers, ask if it is time to. Raises nothing."""
        now = time.monotonic()
        if now - self.tended_at < _TEND_S:
            return
        tended_at, self.tended_at, self._stack = self.tended_at, now, None
        self._mail.drop_sent()
        # Of each rank no more than a few are under way.
        self._mail.read(self._handle, most=4 * self._size)
        due = [wait for wait in tuple(self._waits) if self._is_due(wait, now, tended_at)]
        if due:
            self._ask(now, due)

    def _is_due(self, wait: Wait, now: float, tended_at: float) -> bool:
        """Whether to ask the others for ``wait``, now that they have not been since."""
        if now - max(wait.since, tended_at) > _SUSPENDED_S:
            return False  # this process was suspended: check_wait() first finds out for how long
        began_s = max(wait.since + self._turn_s, wait.asked_at or 0.0)
        return not self._is_spared(wait) and now > began_s + self.limits.warning_s

    def _is_spared(self, wait: Wait) -> bool:
        """Whether another rank asks, as it does again and again, and so will report and judge."""
        return self._is_recent(wait.spared_at + self._turn_s)

    def _report(self, wait: Wait) -> str:
        """What every rank is doing, with the stacks of those that answered."""
        now = time.monotonic()
        silence = "does not answer (stopped, or its host is)"
        if wait.asked_at is None:
            silence = "was not asked"
        elif self._polls:
            silence = _SILENT_WHERE_IT_POLLS
        if self._mail.problem:
            silence = (
                f"does not answer, or was not asked, since messages failed: {self._mail.problem}"
            )
        answers = dict(wait.answers)
        silent_s = {
            rank: now - wait.answered_at[rank]
            for rank in answers
            if not self._is_recent(wait.answered_at[rank])
        }
        statuses = {**answers, self._rank: self._tell(wait, wait.thread)}
        report = StallReport(self._hosts, statuses, silence, silent_s)
        title = f"waited {now - wait.since:.0f} s for {wait.subject}; the ranks say:"
        return "\n".join([title, *report.lines()])

    def _explain(self, wait: Wait) -> str:
        """The report, or who has it: of hundreds that give up, one tells what all do."""
        if not self._is_spared(wait):
            return self._report(wait)
        judge = wait.spared_by
        return f"rank {judge} on {self._hosts[judge]} has asked all ranks, and reports what they do"

    def status(self, stack: tuple[str, ...] | None = None) -> Status:
        """This rank's own, as others are told: that of the main thread, which may yet do what they
        wait for. ``stack``: of it, if it was looked at just now.
        """
        return self._tell(self._innermost(self._main), self._main, stack)

    def _tell(self, wait: Wait | None, thread: int, stack: tuple[str, ...] | None = None) -> Status:
        """This rank's own, where ``wait`` is that of ``thread``."""
        left = self._left
        if left:
            stack = ()  # what runs then is this package
        elif stack is None:
            stack = stack_of(thread)
        # The main thread may go on meanwhile: whatever it is said to wait for, or to have left, it
        # must not seem to be further back than it was then, so the counts come last.
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
        )

    def _complain(self, problem: str) -> None:
        safe_output.write(
            f"[rank {self._rank} on {self._hosts[self._rank]}] a message between watchdogs failed: "
            f"{problem}; this rank goes on, and asks no other any more what it does. If file "
            "handles have run out, raise ulimit -n"
        )

    def _ask(self, now: float, waits: Iterable[Wait]) -> None:
        for wait in waits:
            wait.asked_at = now
        self._num_asked += 1
        for other in range(self._size):
            # After a problem it asks nobody; the rest count as silent.
            if other != self._rank and not self._mail.problem:
                self._mail.send({"ask": self._num_asked, "left": self._left}, other)

    def _handle(self, sender: int, message: Any) -> None:
        now, waits = time.monotonic(), tuple(self._waits)
        if "ask" in message:
            # One report is enough, but of one that still trains, if this rank does.
            judges = sender < self._rank or self._mail.problem
            if judges and (self._left or not message.get("left")):
                for wait in waits:
                    wait.spared_at, wait.spared_by = now, sender
            if self._stack is None:
                self._stack = stack_of(self._main)
            status = asdict(self.status(self._stack))
            self._mail.send({"status": status, "to": message["ask"]}, sender)
            return
        told = message["status"]
        said = Status(**{**told, "stack": tuple(told["stack"])})
        for wait in waits:
            wait.hear(sender, said, question=message["to"], now=now)

    def _is_answered(self, wait: Wait) -> bool:
        if wait.asked_at is None or self._is_spared(wait):
            return False
        complete = len(wait.answers) == self._size - 1
        return complete or time.monotonic() - wait.asked_at > _ANSWER_S

    def _is_patient(self, wait: Wait) -> bool:
        """Whether a rank at the end of its program goes on waiting for those that work on.

        It does as long as they answer it, or another rank, which asks and judges in its place. When
        that one has ceased to, answers to this one's own question are due.
        """
        is_spared = self._is_recent(wait.spared_at + self._turn_s + 2 * _ANSWER_S)
        # Else all must have answered the last question, or the one before.
        num_fresh = sum(map(self._is_recent, list(wait.answered_at.values())))
        return is_spared or num_fresh == self._size - 1

    def _is_recent(self, at: float) -> bool:
        """Whether what ranks do every ``warning_s`` was last done ``at`` and has not ceased."""
        return time.monotonic() - at <= self.limits.warning_s + 2 * _ANSWER_S

    def _raise_if_hopeless(self, wait: Wait) -> None:
        own = self._tell(wait, wait.thread)
        trains = wait.thread == self._main  # else the thread that does may yet do what others need
        are_gone = trains and self._have_all_left(wait)
        for rank, other in sorted(wait.answers.items()):
            in_vain = other.left or (trains and other.waits_for(own))
            if are_gone or (own.waits_for(other) and in_vain):
                raise StallError(
                    f"rank {self._rank} {own.describe()}, but rank {rank} {other.describe()}: "
                    f"{self._judge(own, other)}\n{self._report(wait)}",
                    code="ranks-out-of-step",
                )

    def _have_all_left(self, wait: Wait) -> bool:
        """Whether all others have for so long that nothing of theirs is on its way here."""
        now, left_at = time.monotonic(), list(wait.left_at.values())
        return len(left_at) == self._size - 1 and now - max(left_at) > self.limits.warning_s

    def _judge(self, own: Status, other: Status) -> str:
        """Why ``own`` can never end, and what to do."""
        steps = f"the ranks, which have taken {own.steps} and {other.steps} steps, have"
        if other.left and isinstance(sys.exc_info()[1], KeyboardInterrupt):
            return (
                f"{steps} ended at different moments, as by Ctrl-C (KeyboardInterrupt), so this "
                "rank waits in vain. It cannot save its parameters now: resume from the last "
                f"checkpoint. To save at a signal, {_AT_A_SIGNAL}"
            )
        if handled := signal_handled():
            return (
                f"{steps} not all received {handled}, or received it at different moments, and "
                f"its handler waits here for the others. Instead, {_AT_A_SIGNAL}"
            )
        interrupted = _INTERRUPTED if other.left and other.in_iteration else ""
        calls = [one.waiting for one in (own, other) if one.in_exchange]
        missed = f". For {calls[0]}: {cure_for(*calls)}" if calls else ""
        return (
            f"{steps} unequal numbers of batches, or call collective operations in different "
            f"order{interrupted}. Give every rank the same number of batches, or train inside "
            f"optimizer.join(){missed}{_GIVING_UP if other.left else ''}"
        )
