"""Wait: what a watchdog knows of one thread's wait for other ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from dearmpi.comm.api.status import Status


@dataclass(slots=True, eq=False)
class Wait:
    """What was asked and answered for it.

    thread: who waits. what: for what. in_exchange: inside a collective call on the world.
    interrupted: for what the thread waited already, where a signal handler or a finalizer of its
        own waits in the middle.
    since, looked_at: when it began, and when its thread last looked whether to go on.
    first_question: the number of the first question that can be asked for it.
    asked_at: when one last was. answered_at: when each rank has last answered any question.
    left_at: when each rank that has left first said so.
    spared_at, spared_by: when another rank, which asks for all, last did, and which.
    """

    thread: int
    what: str
    in_exchange: bool
    since: float
    looked_at: float
    first_question: int
    asked_at: float | None = None
    answers: dict[int, Status] = field(default_factory=dict)
    answered_at: dict[int, float] = field(default_factory=dict)
    is_reported: bool = False
    spared_at: float = float("-inf")
    spared_by: int = 0
    interrupted: str = ""
    left_at: dict[int, float] = field(default_factory=dict)

    @property
    def subject(self) -> str:
        """What it waits for, and in the middle of what."""
        if not self.interrupted:
            return self.what
        return f"{self.what} (in a handler that interrupted the wait for {self.interrupted})"

    def skip(self, seconds: float, now: float) -> None:
        """This process did not run for so long until ``now``, and so can say nothing of others."""
        self.since += seconds
        # The driving thread may have gone on first, and asked and heard since.
        self.spared_at = min(now, self.spared_at + seconds)
        if self.asked_at is not None:
            self.asked_at = min(now, self.asked_at + seconds)
        for rank in list(self.answered_at):  # in place: it may add some meanwhile
            self.answered_at[rank] = min(now, self.answered_at[rank] + seconds)

    def hear(self, rank: int, status: Status, *, question: int, now: float) -> None:
        """``rank`` has answered ``question``, perhaps one of an earlier wait: it is not silent, but
        what it said need no longer hold.
        """
        self.answered_at[rank] = now
        if question >= self.first_question:
            self.answers[rank] = status
            if status.left:
                self.left_at.setdefault(rank, now)
