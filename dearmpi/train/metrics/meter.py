"""Meter: time, samples and communication, since the last row of metrics and over the run."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from dearmpi.train.metrics.rank_times import RankTimes


@dataclass(slots=True)
class Sums:
    """What some steps took together; seconds are this rank's.

    num_steps: so many were taken.
    num_samples: all ranks together trained on so many.
    seconds: from the start of each step to its end, and waits outside of steps.
    exposed_s: feed-forward, backprop or the step waited for gradients or parameters.
    communication_s: gradients or parameters were on the network, whether or not anybody waited.
    waited_s: it waited for other ranks, be it for gradients, parameters or totals.
    data_s: it loaded data.
    """

    num_steps: int = 0
    num_samples: int = 0
    seconds: float = 0.0
    exposed_s: float = 0.0
    communication_s: float = 0.0
    waited_s: float = 0.0
    data_s: float = 0.0

    def add(self, other: Sums) -> None:
        """Count what ``other`` has counted as well."""
        for part in fields(self):
            setattr(self, part.name, getattr(self, part.name) + getattr(other, part.name))

    @property
    def per_step(self) -> RankTimes:
        """This rank's means."""
        num_steps = max(1, self.num_steps)
        return RankTimes(
            self.seconds / num_steps, self.waited_s / num_steps, self.data_s / num_steps
        )

    @property
    def samples_per_s(self) -> float:
        """Samples of all ranks per second; 0 before the first step."""
        return self.num_samples / self.seconds if self.seconds > 0 else 0.0


@dataclass(slots=True)
class Meter:
    """Adds up steps.

    interval: since the last ``lap``. steady: since the start, without the first step, which pays
    for allocations and for connections made on first use. seconds: since the start, with it.
    """

    interval: Sums = field(default_factory=Sums)
    steady: Sums = field(default_factory=Sums)
    seconds: float = 0.0
    _started: bool = False
    _told_wait_s: float = 0.0
    _late_wait_s: float = 0.0

    def add(self, step: Sums) -> None:
        """Count one step."""
        self.interval.add(step)
        self.seconds += step.seconds
        if self._started:
            self.steady.add(step)
        self._started = True

    def wait(self, seconds: float) -> None:
        """Count time spent waiting for the last step's communication outside of steps."""
        self.interval.seconds += seconds
        self.seconds += seconds
        self.interval.waited_s += seconds
        if self.steady.num_steps:
            self.steady.seconds += seconds

    def tell(self) -> RankTimes:
        """This rank's means since the last lap, for the other ranks. What it waits between this and
        the lap is told with the next ones.
        """
        num_steps = max(1, self.interval.num_steps)
        late_s, self._told_wait_s = self._late_wait_s / num_steps, self.interval.waited_s
        own = self.interval.per_step
        return replace(own, step_s=own.step_s + late_s, wait_s=own.wait_s + late_s)

    def lap(self) -> Sums:
        """The sums since the last lap, which begin anew."""
        sums, self.interval = self.interval, Sums()
        self._late_wait_s, self._told_wait_s = sums.waited_s - self._told_wait_s, 0.0
        return sums
