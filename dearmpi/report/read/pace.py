"""Pace: what a run takes between its steps, by one rule for the console and the report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Pace:
    """Adds up the time between steps, such as for checkpoints and evaluations.

    What came before the first row pays for starting, and is left out.
    """

    _last: tuple[int, float] | None = None
    _num_steps: int = 0
    _between_s: float = 0.0

    def add(self, step: int, elapsed_s: float | None, step_s: float | None) -> None:
        """Count a row of metrics: the seconds since the process began to train, and per step."""
        if elapsed_s is None or step_s is None:
            return
        last, self._last = self._last, (step, elapsed_s)
        if last is None or elapsed_s <= last[1]:  # a resumed run, whose clock began anew
            return
        num_steps = step - last[0]
        self._num_steps += num_steps
        self._between_s += max(0.0, elapsed_s - last[1] - num_steps * step_s)

    @property
    def between_s(self) -> float:
        """Seconds between two steps, by mean: most take none, and a checkpoint takes many."""
        return self._between_s / max(1, self._num_steps)
