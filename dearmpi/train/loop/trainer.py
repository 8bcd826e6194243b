"""Trainer: runs a job step by step, and when due measures, evaluates and saves.

One turn of the loop is one optimizer step, and these phases:

1. ``take_step``: feed-forward, backprop, update.
2. read what the step before, or a long one itself, gave on all ranks: its loss, whether to stop.
3. when due: begin to save a checkpoint, which is written while the next steps are taken.
4. when due: evaluate, and write a row of metrics.

At the end of the run 3 and 4 are due. A checkpoint is on the disk before an evaluation begins,
which may fail, or outlast the job's time. Where the best evaluation is watched, 4 comes before 3,
so that a checkpoint knows it, and a better one makes 3 due. After a request to stop 3 is due, and a
row; an evaluation under way is broken off, unless it is the last.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from dearmpi.errors import NonFiniteLossError
from dearmpi.train.loop.callbacks import Callbacks, Fit
from dearmpi.train.loop.evaluation import Evaluation, Outcome
from dearmpi.train.loop.job import Job
from dearmpi.train.loop.stepping import Due, StepResult, Timetable, coming_batches, take_step
from dearmpi.train.metrics.metrics import MetricsRow
from dearmpi.train.ranks.agreement import is_agreed
from dearmpi.train.run.balance import Balance
from dearmpi.train.run.saving import Saver
from dearmpi.train.run.steps import RunSteps

MOST_SKIPS = 100  # in a row: then nothing is learned any more, and somebody should look
_WORTH_TELLING = 0.1  # part by which the time between checkpoints must have changed


class Listener(Protocol):
    """Told what happens; called on every rank."""

    def stepped(self, step: int) -> None: ...

    def measured(self, row: MetricsRow) -> None: ...

    def saved(self, checkpoint: Path | None) -> None: ...

    def chose_interval(self, save_time_s: float, checkpoint_s: float) -> None: ...


class Trainer:
    """Runs ``job``. stop_requested: whether this rank was asked to stop; check_own: see Saver."""

    def __init__(
        self,
        job: Job,
        folder: Path,
        *,
        listener: Listener,
        stop_requested: Callable[[], bool] = lambda: False,
        check_own: Callable[[], None] = lambda: None,
    ) -> None:
        self._job, self._listener, self._stop_requested = job, listener, stop_requested
        self._timetable = Timetable.of(job)
        self._fit = Fit(job, folder, job.start_step)
        self._callbacks = Callbacks(job.callbacks, self._fit)
        state = job.state()
        self._steps = RunSteps(
            state,
            Saver(state, folder, saved=self._saved, check_own=check_own),
            stop_requested=stop_requested,
            skips_bad=job.settings.on_nan == "skip",
            cure="lower --lr, clip with --max-grad-norm, or skip such steps with --on-nan skip",
        )
        self._balance: Balance | None = None
        if job.settings.batch_shares == "auto" and job.world.size > 1:
            self._balance = Balance(job.world, job.batches)
        self._row_step = job.start_step
        self._last: StepResult | None = None
        self._first_loss: float | None = None
        self._last_loss: float | None = None
        self._evaluation: Evaluation | None = None
        self._broken_off = False
        self._num_skipped = self._skips_in_a_row = 0
        self._told_save_s = 0.0

    def run(self) -> Outcome:
        """Train to the end of the run, or until any rank requests a stop (collective).

        Raises what a task's code raises; NonFiniteLossError and AgreedError on all ranks alike.
        """
        self._job.loading.expect(coming_batches(self._job, self._job.start_step))
        try:
            self._callbacks.call("on_fit_start")
            if self._owes_evaluation:
                self._evaluate_again()
                self._save_best(due=False)
            while not (self._stopping or self._ended):
                self._take_turn()
            self._finish()
            outcome = self._fit.outcome = self._outcome()
            self._callbacks.call("on_fit_end")
        except Exception as error:
            self._steps.fail(error)
            if is_agreed(error):
                self._job.optimizer.close()
            raise
        finally:
            self._job.loading.close()
        self._steps.close()
        self._job.close()
        return outcome

    def _take_turn(self) -> None:
        # Before the step, while all ranks have read the same totals.
        due = self._timetable.after(
            self._step + 1,
            since_row_s=self._steps.since_row_s,
            since_save_s=self._steps.since_save_s,
        )
        self._take_step(row_due=due.row)
        evaluates_first = due.evaluation and self._job.best.is_watched
        if due.save and not evaluates_first:
            self._save()
        if due.end or due.evaluation:
            self._steps.saver.finish()
        if due.row:
            self._steps.read_all_totals()
            if not self._stopping:  # what is due then comes at the end
                self._measure(evaluate=due.evaluation)
        if evaluates_first and not self._stopping:
            self._save_best(due=due.save)

    def _save_best(self, *, due: bool) -> None:
        """Save after an evaluation that is watched, if a checkpoint is due or it is the best."""
        is_best = self._job.best.keeps and self._job.best.step == self._step
        if due or is_best:
            self._save(is_best=is_best)

    def _save(self, *, is_best: bool = False) -> None:
        """Phase 3; the next checkpoint may be due earlier or later, by what this one took."""
        self._steps.save(is_best=is_best)
        if self._timetable.mtbf_s is not None:
            (slowest_s,) = self._job.world.all_reduce([self._steps.checkpoint_s], "max")
            self._timetable = self._timetable.adapted(slowest_s)
            chosen_s = self._timetable.save_time_s
            if abs(chosen_s - self._told_save_s) > _WORTH_TELLING * self._told_save_s:
                self._told_save_s = chosen_s
                self._listener.chose_interval(chosen_s, slowest_s)

    def _take_step(self, *, row_due: bool) -> None:
        """Phases 1 and 2."""
        self._steps.begin()
        model = self._job.task.model
        if not model.training:  # else parts that the task keeps in evaluation mode stay so
            model.train()
        self._last = take_step(self._job, self._step)
        self._count_skip(self._last)
        num_samples = self._job.batches.samples_of(self._step)  # which is not counted yet
        self._steps.end(
            self._last.loss,
            num_samples=num_samples,
            data_s=self._last.data_s,
            row_due=row_due,
        )
        if self._balance is not None and self._balance.note(num_samples, self._steps.own_s):
            self._job.loading.expect(coming_batches(self._job, self._step))
        self._listener.stepped(self._step)
        fit = self._fit
        fit.step, fit.loss, fit.lr = self._step, self._last.loss, self._last.lr
        self._callbacks.call("on_step_end")

    def _saved(self, checkpoint: Path | None) -> None:
        self._listener.saved(checkpoint)
        self._fit.checkpoint = checkpoint
        self._callbacks.call("on_checkpoint_saved")

    def _count_skip(self, result: StepResult) -> None:
        self._skips_in_a_row = self._skips_in_a_row + 1 if result.skipped else 0
        self._num_skipped += result.skipped
        if self._skips_in_a_row >= MOST_SKIPS:
            raise NonFiniteLossError(
                f"{MOST_SKIPS} steps in a row were skipped, up to step {self._step + 1}, because "
                "the loss or gradient was not finite; resume from a checkpoint with a lower "
                "--lr",
                code="not-finite",
            )

    @property
    def _step(self) -> int:
        return self._steps.step

    @property
    def _stopping(self) -> bool:
        return self._steps.stopping or self._broken_off

    @property
    def _owes_evaluation(self) -> bool:
        """Whether the earlier part was stopped before an evaluation that counts."""
        best = self._job.best
        is_due = self._step > 0 and self._due.evaluation and not self._ended
        return is_due and best.is_watched and best.last_step != self._step

    @property
    def _ended(self) -> bool:
        """Whether the run has reached its length, or an early end."""
        return self._due.end or self._job.best.is_over

    @property
    def _due(self) -> Due:
        return self._timetable.after(self._step)

    def _measure(self, *, evaluate: bool) -> None:
        """Phase 4, once the totals of all steps are read."""
        evaluation = self._evaluate() if evaluate else None
        if evaluate and evaluation is None:  # broken off: the row comes once the state is saved
            return
        assert self._last is not None
        row = self._steps.make_row(
            epoch=self._job.position(self._step - 1)[0],
            learning_rate=self._last.lr,
            grad_norm=self._last.grad_norm,
            eval_loss=None if evaluation is None else evaluation.loss,
            extra=None if evaluation is None else evaluation.metrics,
        )
        if row.loss is not None:
            self._first_loss = row.loss if self._first_loss is None else self._first_loss
            self._last_loss = row.loss
        self._row_step = self._step
        self._listener.measured(row)

    def _evaluate(self) -> Evaluation | None:
        """None where a rank requested a stop meanwhile; the last evaluation is always completed."""
        assert self._job.evaluator is not None
        self._steps.catch_up()
        stop_requested = (lambda: False) if self._due.end else self._stop_requested
        with self._job.shared_parameters():
            found = self._job.evaluator.run(self._job.world, stop_requested=stop_requested)
        if found is not None:
            if self._job.best.last_step != self._step:  # else it counts already
                self._job.best.note(self._step, found.loss)
            self._fit.evaluation = found
            self._callbacks.call("on_evaluation_end")
        self._evaluation = found or self._evaluation
        self._broken_off = self._broken_off or found is None
        return found

    def _finish(self) -> None:
        """Save and evaluate as due at the end, or after a request to stop."""
        self._steps.read_all_totals()
        if self._step > self._steps.saver.started_step:
            self._steps.save()
        self._steps.saver.finish()
        if self._step > self._row_step:
            self._measure(evaluate=self._due.end and self._due.evaluation)
            return
        is_known = self._evaluation is not None or self._job.best.is_over  # by those that count
        if self._due.evaluation and not is_known and not self._stopping:
            self._evaluate_again()

    def _evaluate_again(self) -> None:
        """The run had reached its end before, perhaps without the time for an evaluation."""
        found = self._evaluate()
        if found is not None:
            epoch, _ = self._job.position(self._step - 1)
            row = MetricsRow(self._step, epoch, eval_loss=found.loss, extra=found.metrics)
            self._listener.measured(row)

    def _outcome(self) -> Outcome:
        """How it went, over all ranks (collective)."""
        steady = self._steps.meter.steady
        exposed_s, busy_s = self._job.world.all_reduce([steady.exposed_s, steady.communication_s])
        return Outcome(
            step=self._step,
            stopped=not self._ended,
            first_loss=self._first_loss,
            last_loss=self._last_loss,
            evaluation=self._evaluation,
            train_s=self._steps.meter.seconds,
            elapsed_s=self._steps.elapsed_s,
            samples_per_s=steady.samples_per_s,
            hidden_share=None if busy_s <= 0 else max(0.0, 1.0 - exposed_s / busy_s),
            num_skipped=self._num_skipped,
        )
