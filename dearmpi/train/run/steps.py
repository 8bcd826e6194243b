"""Steps: what each step of a run gives on all ranks, and the checkpoints in between.

The trainer and a script's own ``Run`` both count their steps here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from dearmpi.comm.world import World
from dearmpi.errors import NonFiniteLossError
from dearmpi.span import Track
from dearmpi.train.metrics.metrics import MetricsRow
from dearmpi.train.metrics.step_times import Meter, StepTotal, StepTotals, Sums, TimesExchange
from dearmpi.train.ranks.agreement import AgreedError, is_agreed
from dearmpi.train.run.saving import Saver, TrainingState


class RunSteps:
    """Counts steps, and shares among all ranks what each of them gave (collective).

    A turn is ``begin``, the step itself, ``end``. The totals of a step are read one step later, so
    that no rank waits for them; those of a long step are read at once.

    step: optimizer steps taken. stopping: whether a rank requested a stop. skips_bad: a loss that
    is not finite is left out of the rows; else it is a NonFiniteLossError on all ranks, which
    recommends ``cure``. job: the ranks that take the same steps, if they are more than those that
    share a model; stops, losses that are not finite and the clock are theirs. own_s: what the last
    step took this rank, without waits. checkpoint_s: for how long the last checkpoint stopped
    training on this rank. since_row_s, since_save_s: seconds by rank 0's clock, as the last totals
    that were read show it: the same on all ranks.
    """

    def __init__(
        self,
        state: TrainingState,
        saver: Saver,
        *,
        stop_requested: Callable[[], bool],
        skips_bad: bool = False,
        cure: str,
        job: World | None = None,
    ) -> None:
        self._optimizer, self._world = state.optimizer, state.world
        self._state, self.saver, self._stop_requested = state, saver, stop_requested
        self._skips_bad, self._cure = skips_bad, cure
        self.step, self.stopping, self.meter = state.start_step, False, Meter()
        self._job = state.world if job is None else job
        # Of those that share a model, then of all that take the same steps.
        self._totals = [StepTotals(one) for one in dict.fromkeys((state.world, self._job))]
        self._times = TimesExchange(state.world)
        self._losses: list[float] = []
        self._began_s = time.perf_counter()
        self._clock_s = self._row_s = self._save_s = self.own_s = self.checkpoint_s = 0.0
        self.begin()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first step could begin."""
        return time.perf_counter() - self._began_s

    @property
    def since_row_s(self) -> float:
        """Seconds since the last row, or since the beginning."""
        return self._clock_s - self._row_s

    @property
    def since_save_s(self) -> float:
        """Seconds since the last checkpoint was begun, or since the beginning."""
        return self._clock_s - self._save_s

    def begin(self) -> None:
        """The next step begins now."""
        self._begin_s, self._waited_s = time.perf_counter(), self._world.progress.waited_s

    def end(
        self, loss: float, *, num_samples: int = 0, data_s: float = 0.0, row_due: bool = False
    ) -> None:
        """The step is taken.

        loss: this rank's; the mean over ranks counts. num_samples: of the step, over all ranks.
        data_s: of the step, loading took so long. row_due: ``make_row`` comes before the next step.
        """
        self.step += 1
        for totals in self._totals:
            totals.post(
                self.step,
                loss=loss,
                stop=self._stop_requested(),
                num_saved=self.saver.num_done,
                step_s=time.perf_counter() - self._begin_s,
                clock_s=self.elapsed_s,
            )
        self._read_totals(pending=self._totals[-1].delay)
        seconds = time.perf_counter() - self._begin_s
        times = [optimizer.times for optimizer in self._state.optimizers]
        waited_s = self._world.progress.waited_s - self._waited_s
        self.own_s = max(0.0, seconds - waited_s)
        self.meter.add(
            Sums(
                1,
                num_samples,
                seconds,
                sum(one.exposed_s for one in times),
                sum(one.communication_s for one in times),
                waited_s,
                data_s,
            )
        )
        if row_due:
            self._times.share(self.meter.means())

    def read_all_totals(self) -> None:
        """Read the totals of every step taken."""
        begin_s = time.perf_counter()
        self._read_totals(pending=0)
        self.meter.wait(time.perf_counter() - begin_s)  # a slower rank's time is the run's

    def _read_totals(self, *, pending: int) -> None:
        with self._optimizer.spans.span(Track.WAIT, "the totals of all ranks"):
            read = [totals.read(pending=pending) for totals in self._totals]
        for total, whole in zip(read[0], read[-1], strict=True):
            self._clock_s = whole.clock_s
            self.stopping = self.stopping or whole.num_stops > 0
            if not total.num_bad:
                self._losses.append(total.loss)
            if whole.num_bad and not self._skips_bad:
                raise NonFiniteLossError(self._explain_loss(whole), code="not-finite")
            self.saver.advance(total.num_saved)

    def _explain_loss(self, total: StepTotal) -> str:
        self.saver.finish()
        kept = "no checkpoint was written"
        if self.saver.saved_step:
            kept = f"the last checkpoint is that of step {self.saver.saved_step}"
        return (
            f"the loss of step {total.step} is not finite on "
            f"{total.describe_bad(self._job.hosts)}; {kept}: {self._cure}"
        )

    def make_row(
        self,
        *,
        epoch: int,
        learning_rate: float,
        grad_norm: float | None = None,
        eval_loss: float | None = None,
        extra: Mapping[str, float] | None = None,
    ) -> MetricsRow:
        """What was measured since the row before, once all totals are read."""
        self._row_s = self._clock_s
        sums = self.meter.lap()
        losses, self._losses = self._losses, []
        num_steps = max(1, sums.num_steps)
        sent_mb, owed_share, fallbacks = self._state.traffic()
        return MetricsRow(
            step=self.step,
            epoch=epoch,
            elapsed_s=self.elapsed_s,
            loss=math.fsum(losses) / len(losses) if losses else None,
            learning_rate=learning_rate,
            grad_norm=grad_norm,
            samples_per_s=sums.samples_per_s if sums.num_samples else None,
            step_s=sums.per_step.step_s,
            exposed_s=sums.exposed_s / num_steps,
            communication_s=sums.communication_s / num_steps,
            sent_mb=sent_mb,
            owed_share=owed_share,
            fallbacks=fallbacks,
            eval_loss=eval_loss,
            extra=extra or {},
            ranks=self._times.read(),
        )

    def catch_up(self) -> None:
        """Make parameters and buffers current and the same on all ranks."""
        begin_s = time.perf_counter()
        self._state.synchronize()
        self.meter.wait(time.perf_counter() - begin_s)

    def save(self, *, is_best: bool = False) -> None:
        """Begin to save a checkpoint, which is written while the next steps are taken.

        is_best: it stays until another is the best.
        """
        begin_s = time.perf_counter()
        self.read_all_totals()
        with self._optimizer.spans.span(Track.CHECKPOINT, "checkpoint"):
            self.catch_up()
            self.saver.start(self.step, is_best=is_best)
        self._save_s = self._clock_s
        self.checkpoint_s = time.perf_counter() - begin_s

    def fail(self, error: Exception) -> None:
        """End after ``error``: one of all ranks does not keep a checkpoint under way from being
        completed.
        """
        if is_agreed(error) or self._world.size == 1:  # else others would have to take part
            try:
                self.saver.finish()
            except AgreedError as other:
                error.add_note(f"and the checkpoint under way was not written: {other}")
        if is_agreed(error):
            self.close()

    def close(self) -> None:
        """Give the channels back; every rank is here."""
        for optimizer in self._state.optimizers:
            optimizer.synchronize()
        self.saver.close()
        for totals in self._totals:
            totals.close()
        self._times.close()
