"""Watchdog: when a wait lasts too long, find out from the other ranks what they are doing.

A rank whose wait exceeds the warning limit asks all others, whose driving threads answer even
while their main threads compute, load data, or wait for something else. Those that wait too leave
it to that one, which asks again and again, to report and to judge. The report names, for every
rank, its host, how many backprops it has begun, what it waits for, and its Python stack. If the
wait can never end, because another rank has left or waits for this one in turn, it ends with a
StallError.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from dearmpi.comm import last_words
from dearmpi.comm.mail import Mail, Messenger
from dearmpi.comm.stack import stack_of
from dearmpi.comm.stall_report import StallReport
from dearmpi.comm.status import Status
from dearmpi.errors import ConfigError, StallError

_TEND_S = 0.2  # how often messages are looked for
_ANSWER_S = 2.0  # how long answers may take
_TURN_S = 0.5  # in which a question reaches all ranks that wait
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
                "first must be above 0 and not above the second"
            )


class Watchdog:
    """One rank's watchdog. ``tend`` runs on the driving thread, the rest on the main thread."""

    def __init__(
        self, messenger: Messenger, *, rank: int, hosts: Sequence[str], limits: StallLimits
    ) -> None:
        """``hosts``: the name of each rank's."""
        self._hosts = hosts
        self._mail = Mail(messenger, self._complain)
        self._rank, self._size, self._limits = rank, len(hosts), limits
        self._main = threading.current_thread().ident
        self._backprops = self._steps = self._exchanges = 0
        self._in_exchange = self._left = False
        self._waiting = ""
        self._since = self._looked_at = 0.0
        self._asked_at: float | None = None
        self._num_asked = 0
        self._first_question = 1  # of this wait
        self._answers: dict[int, Status] = {}
        self._answered_at: dict[int, float] = {}
        self._reported = False
        self._spared_at, self._spared_by = float("-inf"), 0
        self._tended_at = 0.0
        # Ranks often begin to wait together. Those that would ask later are spared by then: twice
        # as many with each turn, so that a few turns are enough for thousands.
        self._turn_s = min(_TURN_S * rank.bit_length(), limits.warning_s / 2)
        self._stack: tuple[str, ...] | None = None  # for all questions that are read together

    def begin_backprop(self) -> None:
        """The main thread has begun a backprop with communication."""
        self._backprops += 1

    def begin_step(self) -> None:
        """The main thread has begun a step."""
        self._steps += 1

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """The main thread is in a collective call on the world."""
        self._exchanges += 1
        self._in_exchange = True
        try:
            yield
        finally:
            self._in_exchange = False

    def leave(self) -> None:
        """The program has come to its end: whoever waits for more from it waits in vain."""
        self._left = True

    def begin_wait(self, what: str) -> None:
        """The main thread begins to wait for ``what``."""
        self._since = self._looked_at = time.monotonic()
        self._waiting = what
        self._first_question = self._num_asked + 1
        self._asked_at, self._answers, self._reported = None, {}, False
        self._spared_at = float("-inf")

    def end_wait(self) -> None:
        """The wait is over."""
        self._waiting = ""

    def check_wait(self) -> None:
        """Print the report once it is complete. Raises StallError if the wait is to be given up.

        Time for which a scheduler has suspended the job does not count.
        """
        now = time.monotonic()
        if now - self._looked_at > _SUSPENDED_S:
            self._skip(now - self._looked_at)
        self._looked_at = now
        waited_s = now - self._since
        if self._is_answered():
            if not self._left:
                self._raise_if_hopeless()
            if not self._reported:
                self._reported = True
                last_words.say(self.report())  # which a full disk must not turn into a failure
        # Whoever gives up ends the job, so those that know what all do come first.
        most_s = self._limits.abort_s + (2 * _ANSWER_S if self._left or self._spared else 0.0)
        if waited_s > most_s and not (self._left and self._is_patient()):
            raise StallError(
                f"rank {self._rank} on {self._hosts[self._rank]} gave up after waiting "
                f"{waited_s:.0f} s for {self._waiting}\n{self._explain()}"
            )

    def tend(self) -> None:
        """Answer questions, collect answers, ask if it is time to. Raises nothing."""
        now = time.monotonic()
        if now - self._tended_at < _TEND_S:
            return
        was_suspended = now - max(self._since, self._tended_at) > _SUSPENDED_S
        self._tended_at, self._stack = now, None
        self._mail.drop_sent()
        # Of each rank no more than a few are under way.
        self._mail.read(self._handle, most=4 * self._size)
        if was_suspended:
            return  # whether there is a wait worth a question, check_wait() finds first
        due_s = max(self._since + self._turn_s, self._asked_at or 0.0) + self._limits.warning_s
        if self._waiting and not self._spared and now > due_s:
            self._ask(now)

    @property
    def _spared(self) -> bool:
        """Whether another rank asks, as it does again and again, and so will report and judge."""
        return self._is_recent(self._spared_at + self._turn_s)

    def _skip(self, seconds: float) -> None:
        """This process did not run for so long, and so can say nothing of others."""
        now = time.monotonic()
        self._since += seconds
        # The driving thread may have gone on first, and asked and heard since.
        self._spared_at = min(now, self._spared_at + seconds)
        if self._asked_at is not None:
            self._asked_at = min(now, self._asked_at + seconds)
        for rank in list(self._answered_at):  # in place: it may add some meanwhile
            self._answered_at[rank] = min(now, self._answered_at[rank] + seconds)

    def report(self) -> str:
        """What every rank is doing, with the stacks of those that answered."""
        now = time.monotonic()
        silence = "does not answer (stopped, or its host is)"
        if self._asked_at is None:
            silence = "was not asked"
        if self._mail.problem:
            silence = (
                f"does not answer, or was not asked, since messages failed: {self._mail.problem}"
            )
        answers = dict(self._answers)
        silent_s = {
            rank: now - self._answered_at[rank] for rank in answers if not self._is_fresh(rank)
        }
        report = StallReport(self._hosts, {**answers, self._rank: self.status()}, silence, silent_s)
        title = f"waited {now - self._since:.0f} s for {self._waiting}; the ranks say:"
        return "\n".join([title, *report.lines()])

    def _explain(self) -> str:
        """The report, or who has it: of hundreds that give up, one tells what all do."""
        if not self._spared:
            return self.report()
        judge = self._spared_by
        return f"rank {judge} on {self._hosts[judge]} has asked all ranks, and reports what they do"

    def status(self, stack: tuple[str, ...] | None = None) -> Status:
        """This rank's own. ``stack``: the main thread's, if it was looked at just now."""
        left = self._left
        if left:
            stack = ()  # what runs then is this package
        elif stack is None:
            stack = stack_of(self._main or 0)
        waited_s = time.monotonic() - self._since if self._waiting else 0.0
        # The main thread may go on meanwhile: whatever it is said to wait for, or to have left, it
        # must not seem to be further back than it was then, so the counts come last.
        return Status(
            left=left,
            waiting=self._waiting,
            waited_s=waited_s,
            in_exchange=self._in_exchange,
            exchanges=self._exchanges,
            steps=self._steps,
            backprops=self._backprops,
            stack=stack,
        )

    def _complain(self, problem: str) -> None:
        last_words.say(
            f"[rank {self._rank} on {self._hosts[self._rank]}] a message between watchdogs failed: "
            f"{problem}; this rank goes on, and asks no other any more what it does. If file "
            "handles have run out, raise ulimit -n"
        )

    def _ask(self, now: float) -> None:
        self._asked_at = now
        self._num_asked += 1
        for other in range(self._size):
            # After a problem it asks nobody; the rest count as silent.
            if other != self._rank and not self._mail.problem:
                self._mail.send({"ask": self._num_asked, "left": self._left}, other)

    def _handle(self, sender: int, message: Any) -> None:
        if "ask" in message:
            # One report is enough, but of one that still trains, if this rank does.
            judges = sender < self._rank or self._mail.problem
            if judges and (self._left or not message.get("left")):
                self._spared_by, self._spared_at = sender, time.monotonic()
            if self._stack is None:
                self._stack = stack_of(self._main or 0)
            status = asdict(self.status(self._stack))
            self._mail.send({"status": status, "to": message["ask"]}, sender)
            return
        self._answered_at[sender] = time.monotonic()
        if message["to"] >= self._first_question:  # else what was so in an earlier wait
            status = message["status"]
            self._answers[sender] = Status(**{**status, "stack": tuple(status["stack"])})

    def _is_answered(self) -> bool:
        if self._asked_at is None or self._spared:
            return False
        complete = len(self._answers) == self._size - 1
        return complete or time.monotonic() - self._asked_at > _ANSWER_S

    def _is_patient(self) -> bool:
        """Whether a rank at the end of its program goes on waiting for those that work on.

        It does as long as they answer it, or another rank, which asks and judges in its place. When
        that one has ceased to, answers to this one's own question are due.
        """
        return self._is_recent(self._spared_at + self._turn_s + 2 * _ANSWER_S) or self._all_answer()

    def _all_answer(self) -> bool:
        """Whether all other ranks have answered the last question, or the one before."""
        return sum(map(self._is_fresh, list(self._answered_at))) == self._size - 1

    def _is_fresh(self, rank: int) -> bool:
        """Whether ``rank`` has."""
        return self._is_recent(self._answered_at[rank])

    def _is_recent(self, at: float) -> bool:
        """Whether what ranks do every ``warning_s`` was last done ``at`` and has not ceased."""
        return time.monotonic() - at <= self._limits.warning_s + 2 * _ANSWER_S

    def _raise_if_hopeless(self) -> None:
        own = self.status()
        for rank, other in sorted(self._answers.items()):
            mutual = other.left or other.waits_for(own)
            if own.waits_for(other) and mutual:
                raise StallError(
                    f"rank {self._rank} {own.describe()}, but rank {rank} {other.describe()}: "
                    f"the ranks, which have taken {own.steps} and {other.steps} steps, have "
                    "unequal numbers of batches, or call collective operations in different "
                    "order. Give every rank as many batches, or train inside "
                    f"optimizer.join()\n{self.report()}"
                )
