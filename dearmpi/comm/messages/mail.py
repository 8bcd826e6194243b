"""Mail: a rank's short messages to and from the others, none of which can end its run."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from dearmpi.comm.api.collectives import Request

T = TypeVar("T")

_NUM_LOOKS = 32  # one probe of MPI may only fetch what lies before a message


class Messenger(Protocol):
    """Short messages between any two ranks, outside of all collectives."""

    def start_message(self, data: bytes, destination: int) -> Request:
        """Send ``data``."""
        ...

    def receive_message(self) -> tuple[int, bytes] | None:
        """The next message that has arrived, with its sender; None if there is none."""
        ...


class Mail:
    """Sends and reads messages. The first failure is kept as ``problem`` and reported once.

    It may fail where each pair of ranks needs a file handle, and there are no more.
    """

    def __init__(self, messenger: Messenger, report_problem: Callable[[str], None]) -> None:
        self.problem = ""
        self._messenger, self._report_problem = messenger, report_problem
        self._sends: list[Request] = []

    def send(self, message: object, destination: int) -> None:
        """Begin to send ``message``, which JSON can express."""
        data = json.dumps(message).encode()
        send = self._attempt(partial(self._messenger.start_message, data, destination), None)
        if send is not None:
            self._sends.append(send)

    def drop_sent(self) -> None:
        """Release messages that have been sent."""
        self._sends = [send for send in self._sends if not self._attempt(send.test, True)]

    def read(self, handle: Callable[[int, Any], None], *, most: int) -> None:
        """Call ``handle`` with the sender and the message, for up to ``most`` messages."""
        num_misses = 0
        for _ in range(_NUM_LOOKS + most):
            letter = self._attempt(self._messenger.receive_message, None)
            if letter is not None:
                num_misses = 0
                self._attempt(partial(_open, letter, handle), None)
            else:
                num_misses += 1
            if num_misses == _NUM_LOOKS:
                return

    def _attempt(self, action: Callable[[], T], otherwise: T) -> T:
        """What ``action`` returns, or ``otherwise``."""
        try:
            return action()
        except Exception as error:
            if not self.problem:
                # Not the repr, which for MPI's errors is a bare number.
                self.problem = "".join(traceback.format_exception_only(error)).rstrip()
                self._report_problem(self.problem)
            return otherwise


def _open(letter: tuple[int, bytes], handle: Callable[[int, Any], None]) -> None:
    sender, data = letter
    handle(sender, json.loads(data))
