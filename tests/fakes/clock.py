"""Clock: time that a test moves on by hand."""

from __future__ import annotations


class FakeClock:
    """Time that stands still until ``advance``; ``now`` serves as a hub's clock."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now(self) -> float:
        """Seconds since the clock was made."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        self._now_s += seconds
