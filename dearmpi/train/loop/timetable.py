"""Timetable: what a run does after which of its steps."""

from __future__ import annotations

from dataclasses import dataclass

from dearmpi.train.loop.job import Job


@dataclass(frozen=True, slots=True)
class Due:
    """What is due after a step. end: the run has no more. save: a checkpoint. evaluation: of the
    model. row: of metrics, as with each evaluation.
    """

    end: bool
    save: bool
    evaluation: bool
    row: bool


@dataclass(frozen=True, slots=True)
class Timetable:
    """last: the run's last step, of which the first is 1.

    The intervals are in steps. 0: at the end alone; None: not even there.
    """

    last: int
    log_interval: int
    save_interval: int
    evaluation_interval: int | None

    @classmethod
    def of(cls, job: Job) -> Timetable:
        """That of ``job``, which evaluates once in an epoch where nobody has said how often."""
        settings, interval = job.settings, None
        if job.evaluator is not None:
            asked = settings.eval_interval
            interval = job.batches.steps_per_epoch if asked is None else asked
        return cls(job.total_steps, settings.log_interval, settings.checkpoint_interval, interval)

    def after(self, step: int) -> Due:
        """What is due once ``step`` is taken."""
        end = step >= self.last
        save, evaluation, row = (
            interval is not None and (end or (interval > 0 and step % interval == 0))
            for interval in (self.save_interval, self.evaluation_interval, self.log_interval)
        )
        return Due(end, save, evaluation, row=row or evaluation)
