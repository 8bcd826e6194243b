"""Waits: what each rank waits for, why a wait can never end, and the report of what all ranks do.

Ranks that do the same share a line of the report. In ``poll`` mode a rank answers no other while
its main thread is elsewhere, so it prints by itself where that is.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dearmpi.comm.api import safe_output
from dearmpi.comm.api.call import cure_for, name_ranks, signal_handled, stack_of

_LONGEST_ERROR = 200  # characters of another error's text
_GIVING_UP = (  # by a status of 0, as of a program that has reached its end
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

_LACKS_STEP = (
    "One of them has dropped gradients, by zero_grad() without step(), has left a step out, or "
    "steps its optimizers in another order. Agree on it on every rank before that backward, such "
    "as by world.all_reduce([flag], 'max')"
)


@dataclass(frozen=True, slots=True)
class Status:
    """What a rank reports of itself.

    backprops, steps, exchanges: how many backprops with communication, how many steps, and how
        many collective calls on the world, its main thread has begun.
    waiting: what it waits for, or empty. in_exchange: it waits inside a collective call on the
        world. left: its program has ended.
    in_iteration: it has begun a backprop, and no step since.
    has_read: it has, since then, begun to read gradients, which all ranks bring together.
    exit_status: of a program that has ended, if an exception, such as SystemExit, has ended it.
    group: the group of ranks whose collective call it waits in; empty: the job. in_groups: how many
        collective calls it has begun in each group that it is a member of.
    training: whose backprop or step it waits for, by name; empty: neither. trainings: how many
        backprops, and steps, it has begun of each.
    """

    backprops: int
    steps: int
    exchanges: int
    waiting: str
    waited_s: float
    in_exchange: bool
    left: bool
    stack: tuple[str, ...]
    in_iteration: bool = False
    has_read: bool = False
    exit_status: int = 0
    group: str = ""
    in_groups: Mapping[str, int] = field(default_factory=dict)
    training: str = ""
    trainings: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def describe(self, *, waited: str | None = None) -> str:
        """One line, without the stack. ``waited``: replaces the seconds of the wait."""
        if self.left:
            where = ", between a backward and its step" if self.in_iteration else ""
            how = f" with exit status {self.exit_status}" if self.exit_status else ""
            return f"has ended{how} after {self.backprops} backprops{where}"
        if not self.waiting:
            return f"has begun {self.backprops} backprops, does not wait for communication"
        if waited is None:
            waited = f"{self.waited_s:.0f} s"
        which = f" ({self.training})" if self.training and len(self.trainings) > 1 else ""
        return f"has begun {self.backprops} backprops, waits {waited} for {self.waiting}{which}"

    def describe_place(self) -> str:
        """The same, with the innermost line of the script."""
        place = f", at {self.stack[-1].rpartition(' ')[0]}" if self.stack else ""
        return f"{self.describe()}{place}"

    def waits_for(self, other: Status) -> bool:
        """Whether this wait certainly cannot end before ``other`` begins something more.

        Ranks run one program, so the counts of one are never both above and below another's.
        """
        if not self.waiting:
            return False
        if self.in_exchange:
            if self.group:
                return other.in_groups.get(self.group, math.inf) < self.in_groups[self.group]
            return other.exchanges < self.exchanges
        if self.training:
            return self._waits_for_training(other)
        if self.in_groups or other.in_groups:
            return False  # steps of different groups do not compare
        behind = (other.backprops, other.steps) < (self.backprops, self.steps)
        return behind or self.reads_alone(other)

    def _waits_for_training(self, other: Status) -> bool:
        """The same, inside a training. A rank that drops gradients gets ahead of the others by a
        backprop, and stays behind by a step.
        """
        own, theirs = self.trainings.get(self.training), other.trainings.get(self.training)
        if own is None or theirs is None:
            return False  # no rank of it, or one that has ended it long ago
        if theirs[0] < own[0] or theirs[1] < own[1]:
            return True
        return not (self.in_groups or other.in_groups) and self.reads_alone(other)

    def lacks_step(self, other: Status) -> bool:
        """Whether this rank has taken fewer steps than ``other``, after as many backprops or more,
        of what one of both waits for.
        """
        for training in filter(None, (self.training, other.training)):
            own, theirs = self.trainings.get(training), other.trainings.get(training)
            if own and theirs and own[0] >= theirs[0] and own[1] < theirs[1]:
                return True
        return False

    def reads_alone(self, other: Status) -> bool:
        """Whether this rank reads gradients that ``other`` does not bring before its step."""
        is_level = (other.backprops, other.steps) == (self.backprops, self.steps)
        return is_level and self.has_read and not other.has_read


def describe_handled() -> str:
    """The error that the calling thread handles, in one line; empty for none."""
    error = sys.exc_info()[1]
    if error is None:
        return ""
    line = " ".join("".join(traceback.format_exception_only(error)).split())
    return line if len(line) <= _LONGEST_ERROR else f"{line[:_LONGEST_ERROR]} ..."


def explain_hopeless(own: Status, other: Status) -> str:
    """Why the wait of ``own`` never ends, where ``other`` never joins it, and what to do.

    Call it on the thread that waits: the signal and the exception that it handles count.
    """
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
    if other.exit_status:
        return "it waits in vain, and the job ends with this status"
    calls = [one.waiting for one in (own, other) if one.in_exchange]
    if not (calls or other.left) and (own.lacks_step(other) or other.lacks_step(own)):
        return f"{steps} not each taken a step after the same backwards. {_LACKS_STEP}"
    interrupted = _INTERRUPTED if other.left and other.in_iteration else ""
    if own.reads_alone(other) or other.reads_alone(own):
        return (
            f"{steps} not both read param.grad; a rank that reads it alone waits for the others' "
            "step(). Read it on every rank, or after the last collective call before step(), such "
            "as clip_grad_norm_()"
        )
    if calls:
        return (
            f"{steps} called collective operations in different order{interrupted}. For "
            f"{calls[0]}: {cure_for(*calls)}. If they have unequal numbers of batches, train "
            f"inside optimizer.join(){_GIVING_UP if other.left else ''}"
        )
    return (
        f"{steps} unequal numbers of batches, or call collective operations in different "
        f"order{interrupted}. Give every rank the same number of batches, or train inside "
        f"optimizer.join(){_GIVING_UP if other.left else ''}"
    )


@dataclass(slots=True, eq=False)
class WatchedWait:
    """A thread's wait for other ranks, and their answers. Times are those of ``time.monotonic``.

    thread: the thread that waits. what: what it waits for. in_exchange: inside a collective call on
        the world.
    interrupted: the outer wait, where a signal handler or a finalizer waits inside another wait.
    group: the group whose collective call that is; empty: the job. training: of which it waits for
        a backprop or a step; empty: none.
    num_recorded, num_judged: answers so far, and when chains of waits were last looked for.
    since, looked_at: when it began, and when its thread last checked whether to go on.
    first_request: the number of the first request that was sent for it.
    requested_at: time of the last request. answers: of each rank. answered_at: time of each rank's
        last answer to any request. left_at: when each rank first answered that it has left.
    deferred_at, deferred_to: when another rank last polled in this one's place, and its number.
    handled: the error on its way through a ``finally`` or ``except`` that waits; empty for none.
    """

    thread: int
    what: str
    in_exchange: bool
    since: float
    looked_at: float
    first_request: int
    requested_at: float | None = None
    answers: dict[int, Status] = field(default_factory=dict)
    answered_at: dict[int, float] = field(default_factory=dict)
    is_reported: bool = False
    deferred_at: float = float("-inf")
    deferred_to: int = 0
    interrupted: str = ""
    left_at: dict[int, float] = field(default_factory=dict)
    group: str = ""
    training: str = ""
    num_recorded: int = 0
    num_judged: int = 0
    handled: str = ""

    @property
    def has_news(self) -> bool:
        """Whether answers have come since chains of waits were last looked for."""
        return self.num_recorded > self.num_judged

    @property
    def subject(self) -> str:
        """What it waits for, the wait that it interrupts, and the error that is on its way."""
        handled = f" (while it handles {self.handled})" if self.handled else ""
        if not self.interrupted:
            return f"{self.what}{handled}"
        interrupted = f" (in a handler that interrupted the wait for {self.interrupted})"
        return f"{self.what}{interrupted}{handled}"

    def skip(self, seconds: float, now: float) -> None:
        """Leave out ``seconds`` until ``now``, in which this process did not run."""
        self.since += seconds
        # The progress thread may have run first, and have sent and received since.
        self.deferred_at = min(now, self.deferred_at + seconds)
        if self.requested_at is not None:
            self.requested_at = min(now, self.requested_at + seconds)
        for rank in list(self.answered_at):  # in place: the progress thread may add some meanwhile
            self.answered_at[rank] = min(now, self.answered_at[rank] + seconds)

    def record(self, rank: int, status: Status, *, request: int, now: float) -> None:
        """Record the answer of ``rank`` to a request.

        An answer to the request of an earlier wait shows only that the rank is not silent.
        """
        self.answered_at[rank] = now
        if request >= self.first_request:
            self.answers[rank] = status
            self.num_recorded += 1
            if status.left:
                self.left_at.setdefault(rank, now)


@dataclass(frozen=True, slots=True)
class StallReport:
    """What a rank knows of all ranks.

    hosts: of each rank. statuses: the last status of each rank that has answered.
    silence: what to print of a rank without an answer. silent_s: seconds since the last answer of
        ranks that should have answered again.
    """

    hosts: Sequence[str]
    statuses: Mapping[int, Status]
    silence: str
    silent_s: Mapping[int, float] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """One line for all ranks that do the same at the same place, then the stack."""
        alike: dict[tuple[str, tuple[str, ...], bool], list[int]] = defaultdict(list)
        for rank in range(len(self.hosts)):
            status = self.statuses.get(rank)
            described = status.describe(waited="") if status else ""
            alike[described, status.stack if status else (), rank in self.silent_s].append(rank)
        lines: list[str] = []
        for (_, stack, _), ranks in alike.items():
            lines.append(f"  {self._name(ranks)}{self._describe(ranks)}")
            lines += [f"      {line}" for line in stack]
        return lines

    def _name(self, ranks: Sequence[int]) -> str:
        if len(ranks) == 1:
            return f"rank {ranks[0]} on {self.hosts[ranks[0]]}: "
        return f"{name_ranks(ranks, self.hosts)}: each "

    def _describe(self, ranks: Sequence[int]) -> str:
        """What ``ranks`` do; all do the same, perhaps for different times."""
        status = self.statuses.get(ranks[0])
        if status is None:
            return self.silence
        described = status.describe(waited=_span(self.statuses[rank].waited_s for rank in ranks))
        if ranks[0] not in self.silent_s:
            return described
        return f"{self.silence}; {_span(self.silent_s[rank] for rank in ranks)} ago it {described}"


def _span(seconds: Iterable[float]) -> str:
    """Such as ``29-31 s``."""
    ordered = sorted(seconds)
    low, high = f"{ordered[0]:.0f}", f"{ordered[-1]:.0f}"
    return f"{low} s" if low == high else f"{low}-{high} s"


LEFT_OUT = (
    "  If others train a group that this rank is not in: group() and split() have returned None "
    "here, and with world=None an optimizer waits for all ranks of the job. Make it only on ranks "
    "that have a group"
)
_LOOKS = 4  # in the time after which an absence is reported
_MOST_BETWEEN_S = 5.0
CURE = (
    "call world.barrier() in place of an MPI barrier, call optimizer.synchronize() on every rank "
    "before an MPI call of the script's own that waits for other ranks, or use progress='thread'"
)


class Absence:
    """Reports once that the main thread has been away for ``warning_s``.

    Makes no MPI call, so that it may have a thread of its own under any library.
    """

    def __init__(
        self,
        *,
        origin: str,
        warning_s: float,
        driven_at: Callable[[], float],
        under_way: Callable[[], list[str]],
    ) -> None:
        """``driven_at``: when the calling thread last polled, by ``time.monotonic``. ``under_way``:
        labels of the operations that other ranks may wait for.
        """
        self._origin, self._warning_s = origin, warning_s
        self._driven_at, self._under_way = driven_at, under_way
        self._main = threading.get_ident()
        self._seen_at = self._reported_at = float("-inf")  # driven_at() at the last look and report
        self._end, self._is_over = threading.Event(), False

    def start(self) -> None:
        """Check from now on, in a thread that ends with ``close`` or the process."""
        threading.Thread(target=self._run, name="dearmpi-absence", daemon=True).start()

    def close(self) -> None:
        if not self._is_over:  # a signal handler that interrupts set() must not wait for its lock
            self._is_over = True
            self._end.set()

    def look(self) -> None:
        """Print the report if one is due."""
        driven_at, seen_at = self._driven_at(), self._seen_at
        self._seen_at = driven_at
        away_s = time.monotonic() - driven_at
        # Two checks must agree: a suspended process first gets its turn to go on.
        if away_s < self._warning_s or driven_at != seen_at or driven_at == self._reported_at:
            return
        if operations := self._under_way():
            self._reported_at = driven_at
            safe_output.write(self._report(away_s, operations))

    def _report(self, away_s: float, operations: list[str]) -> str:
        lines = [
            f"[{self._origin}] has not polled for {away_s:.0f} s, and other ranks may wait for its "
            f"{', '.join(operations)}. With progress='poll' only calls of the model, the optimizer "
            "and the world complete operations; the main thread is elsewhere:",
            *(f"      {line}" for line in stack_of(self._main)),
            f"If it waits there for other ranks, this may never end: {CURE}",
        ]
        return "\n".join(lines)

    def _run(self) -> None:
        while not self._is_over:
            self._end.wait(min(self._warning_s / _LOOKS, _MOST_BETWEEN_S))
            self.look()
