"""Console listener: what a run looks like on the console, from its first step to its summary."""

from __future__ import annotations

import logging
import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dearmpi.cli.console import Console, bar, duration
from dearmpi.config import MIB
from dearmpi.engine.setup.self_planning import Pause
from dearmpi.report.draw.units import count_text, value_text
from dearmpi.report.read.pace import WORTH, Pace, SlowRanks, StragglerWatch
from dearmpi.train.loop.evaluation import Outcome
from dearmpi.train.loop.job import Job
from dearmpi.train.loop.planning import CapSearch, PlanFile
from dearmpi.train.metrics.metrics import MetricsLog, MetricsRow
from dearmpi.train.run.balance import describe_shares
from dearmpi.train.run.tracing import Tracing
from dearmpi.train.settings.settings import RunSettings
from dearmpi.version import describe_other_version


@dataclass(slots=True)
class ConsoleListener:
    """Listens to the trainer: writes metrics on rank 0 and tells the console.

    metrics: None on all ranks but 0.
    tracing: None unless iterations are recorded.
    plan_file: None where no plan is told of.
    cap_search: None unless bucket caps are tried.
    """

    job: Job
    console: Console
    metrics: MetricsLog | None
    tracing: Tracing | None = None
    plan_file: PlanFile | None = None
    cap_search: CapSearch | None = None
    _live: Sequence[str] = ()
    _weights: tuple[float, ...] = field(init=False)
    _step_s: float = 0.0
    _has_told_codec: bool = False
    _pace: Pace = field(default_factory=Pace)
    _watch: StragglerWatch = field(init=False)

    def __post_init__(self) -> None:
        self._weights = self.job.batches.shares.weights
        self._watch = StragglerWatch(SlowRanks(self.job.start_step), self.job.world.hosts)

    def stepped(self, step: int) -> None:
        """Move the bar; the next iteration comes."""
        self._tell_codec()
        self.tell_plan()
        self._tell_trial()
        self._tell_shares(step)
        if self.tracing is not None:
            self.tracing.begin_iteration(step + 1)
        if self.console.is_live:
            total = self.job.total_steps
            drawn = bar(step, total, width=10, encoding=self.console.encoding)
            done = f"{drawn} {step}/{total}"
            self.console.show(done, *self._rest(step), *self._live)

    def _tell_codec(self) -> None:
        """Say what compress auto takes, once that is decided."""
        if self._has_told_codec or self.job.local is not None:
            return
        if line := self.job.optimizer.codec_choice:
            self._has_told_codec = True
            self.console.say(line)

    def tell_plan(self) -> None:
        """Write and describe the plan that is followed from here on, if it is a new one."""
        plan = None if self.plan_file is None else self.plan_file.renew()
        if plan is None:
            return
        lines = [f"plan: {plan.describe()}", *describe_other_version("the plan", plan.version)]
        if self.job.optimizer.plan_pause is not None:
            lines.append(describe_pause(self.job.optimizer.plan_pause))
        self._say_and_log(*lines)

    def _say_and_log(self, *lines: str) -> None:
        self.console.say(*lines)
        for line in lines:
            logging.getLogger("dearmpi").info(line)

    def _tell_trial(self) -> None:
        """Say what became of a trial of a bucket cap, and after the last which one is kept."""
        if self.cap_search is None or (trial := self.cap_search.stepped()) is None:
            return
        lines = [f"bucket cap {trial.cap_bytes / MIB:.3g} MiB: {trial.seconds:.4g} s per step"]
        if self.cap_search.best is not None:
            lines.append(f"bucket cap from here on: {self.cap_search.best.cap_bytes / MIB:.3g} MiB")
        self._say_and_log(*lines)

    def _tell_shares(self, step: int) -> None:
        """Say how ranks share batches from here on, if that has changed."""
        batches = self.job.batches
        if batches.shares.weights == self._weights:
            return
        self._weights = batches.shares.weights
        line = f"after step {step}, {describe_shares(batches)}"
        self._say_and_log(line)

    def measured(self, row: MetricsRow) -> None:
        """Write a row; say it in a line."""
        # A run that had reached its end, and is evaluated again, may have its last row already.
        if self.metrics is not None and row.step != self.metrics.last_step:
            self.metrics.append(row)
        self._pace.add(row.step, row.elapsed_s, row.step_s)
        self._live, self._step_s = describe_live(self.job, row), row.step_s or 0.0
        if not self.console.is_live or row.eval_loss is not None:
            done = f"step {row.step}/{self.job.total_steps}"
            self.console.say("  ".join([done, *describe_row(self.job, row), *self._rest(row.step)]))
        if row.ranks and self.job.world.is_root:  # not shared where it is stopped between two rows
            own_s, wait_s = [one.own_s for one in row.ranks], [one.wait_s for one in row.ranks]
            if line := self._watch.add(row.step, own_s, wait_s):
                self.console.say(line)
                logging.getLogger("dearmpi").info("step %d: %s", row.step, line)

    def saved(self, checkpoint: Path | None) -> None:
        """Say where a checkpoint was written."""
        if checkpoint is not None:
            self.console.say(f"saved {checkpoint}")

    def chose_interval(self, save_time_s: float, checkpoint_s: float) -> None:
        """Say how far apart checkpoints are from here on, and why."""
        line = (
            f"checkpoints every {duration(save_time_s)} from here on: one stops training for "
            f"{duration(checkpoint_s)}, and {self.job.world.size} rank(s) fail every "
            f"{duration(3600 * (self.job.settings.mtbf_hours or 0) / self.job.world.size)}"
        )
        self._say_and_log(line)

    def _rest(self, step: int) -> list[str]:
        """How long it will go on, with steps as fast as since the row before, and as long between
        them as so far.
        """
        rest_s = (self.job.total_steps - step) * (self._step_s + self._pace.between_s)
        return [f"{duration(rest_s)} left"] if rest_s else []


def describe_row(job: Job, row: MetricsRow) -> list[str]:
    """Loss as the task shows it, learning rate, throughput, what communication costs."""
    parts = _describe_loss(job, row)
    if row.eval_loss is not None:
        parts.append(f"held out {value_text(row.eval_loss * job.task.loss_scale)}")
        parts += _describe_metrics(row.extra)
    if row.learning_rate is not None:
        parts.append(f"lr {row.learning_rate:.3g}")
    parts += _describe_rate(job, row)
    if job.world.size > 1 and row.exposed_s is not None and row.step_s:
        parts.append(f"exposed {min(1.0, row.exposed_s / row.step_s):.0%}")
    return parts + _describe_hidden(row)


def describe_live(job: Job, row: MetricsRow) -> list[str]:
    """The same in short, the first the last to go where a terminal has no room beside the bar."""
    return _describe_loss(job, row) + _describe_hidden(row) + _describe_rate(job, row)


def _describe_loss(job: Job, row: MetricsRow) -> list[str]:
    if row.loss is None:
        return []
    return [f"{job.task.loss_scale_name} {value_text(row.loss * job.task.loss_scale)}"]


def _describe_rate(job: Job, row: MetricsRow) -> list[str]:
    if row.samples_per_s is None:
        return []
    return [f"{job.units(row.samples_per_s):,.0f} {job.task.unit}/s"]


def _describe_hidden(row: MetricsRow) -> list[str]:
    if row.exposed_s is None or not row.communication_s:
        return []
    return [f"hidden {max(0.0, 1.0 - row.exposed_s / row.communication_s):.0%}"]


def describe_pause(pause: Pause) -> str:
    """For how long training stood still for its plan."""
    return (
        f"plan taken up in {pause.total_s:.2f} s: {pause.waiting_s:.2f} s to wait for it, "
        f"{pause.laying_out_s:.2f} s to lay out the buckets; the link was measured before the "
        f"first step, in {pause.measuring_s:.2f} s"
    )


def describe_outcome(job: Job, outcome: Outcome, folder: Path) -> list[str]:
    """The summary."""
    task = job.task
    taken = outcome.step - job.start_step
    rate = f"{job.units(outcome.samples_per_s):,.0f} {task.unit}/s"
    ending = "stopped as asked" if outcome.stopped else "done"
    lines = [f"{ending} at step {outcome.step} of {job.total_steps}"]
    if taken and outcome.samples_per_s:
        seconds = duration(outcome.train_s)
        if outcome.elapsed_s > (1 + WORTH) * outcome.train_s:
            seconds += f" ({duration(outcome.elapsed_s)} with checkpoints and evaluations)"
        lines[0] += f": {taken} steps in {seconds}, {rate}"
    if outcome.first_loss is not None and outcome.last_loss is not None:
        first, last = (loss * task.loss_scale for loss in (outcome.first_loss, outcome.last_loss))
        course = (
            f"{value_text(last)}" if first == last else f"{value_text(first)} -> {value_text(last)}"
        )
        lines.append(f"{task.loss_scale_name} in training: {course}")
    if outcome.evaluation is not None:
        parts = [f"{value_text(outcome.evaluation.loss * task.loss_scale)}"]
        parts += _describe_metrics(outcome.evaluation.metrics)
        lines.append(
            f"{task.loss_scale_name} on {outcome.evaluation.num_samples} held-out samples: "
            + ", ".join(parts)
        )
    lines += job.best.describe(task.loss_scale)
    if outcome.num_skipped:
        lines.append(
            f"left out: {count_text(outcome.num_skipped, 'step')} whose loss or gradient was not "
            "finite"
        )
    if outcome.hidden_share is not None:
        lines.append(f"communication: {outcome.hidden_share:.0%} hidden behind computation")
    return [*lines, f"run folder: {folder}"]


def describe_stop(number: signal.Signals | None, max_time_s: float | None, *, folder: Path) -> str:
    """Why the run in ``folder`` stopped before its end: a signal ``number``, or the clock."""
    cause = f"--max-time {max_time_s:.12g} s" if number is None else number.name
    place = f"--name {shlex.quote(folder.name)}"
    if folder.parent != Path(RunSettings().run_folder):
        place = f"--run-folder {shlex.quote(str(folder.parent))} {place}"
    return f"stopped by {cause}; the same command with {place} --resume auto goes on"


def _describe_metrics(metrics: Mapping[str, float]) -> list[str]:
    return [f"{name} {value_text(value)}" for name, value in metrics.items()]
