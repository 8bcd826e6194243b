"""What a watchdog in a test has of the others: messages, and the time that goes by."""

from __future__ import annotations

import pytest

from dearmpi.comm.api.collectives import Completed, Request

HOSTS = tuple(f"n{rank}" for rank in range(1000))
"""Of each rank; as many of them as a test has."""


class Inbox:
    """Messages to read, and the receivers of messages sent."""

    def __init__(self, *messages: tuple[int, bytes]) -> None:
        self.messages = list(messages)
        self.sent: list[int] = []

    def receive_message(self) -> tuple[int, bytes] | None:
        return self.messages.pop(0) if self.messages else None

    def start_message(self, data: bytes, destination: int) -> Request:
        self.sent.append(destination)
        return Completed()


class Clock:
    """Seconds as a test has them go by."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr("dearmpi.comm.watchdog.watchdog.time.monotonic", lambda: self.now_s)
