"""Run: what ``dear-train run`` keeps and watches, for a script with a loop of its own."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import yaml
from torch import Tensor, nn

from dearmpi.batch_shares import Shares
from dearmpi.comm.world import World
from dearmpi.engine.optimizer import DistributedOptimizer
from dearmpi.errors import ArgumentError, ConfigError, DataError, UsageError
from dearmpi.local.local_optimizer import LocalOptimizer
from dearmpi.plan.data.local_schedule import check_count
from dearmpi.report.read.pace import SlowRanks, StragglerWatch
from dearmpi.train.data.data import Batches, RankShares, StepSampler
from dearmpi.train.metrics.metrics import MetricsLog, MetricsRow, check_names
from dearmpi.train.metrics.trackers import TrackedRun, Trackers, check_trackers
from dearmpi.train.ranks.agreement import together
from dearmpi.train.ranks.stop import EXIT_PREEMPTED, StopRequest
from dearmpi.train.run.balance import (
    Balance,
    first_weights,
    stored_weights,
    warn_of_batch_norm,
)
from dearmpi.train.run.environment import describe_environment
from dearmpi.train.run.resuming import (
    Stateful,
    continue_random_state,
    find_newest,
    load_together,
    pack_state,
    restore,
)
from dearmpi.train.run.run_folder import RunFolder
from dearmpi.train.run.run_location import hold_folder
from dearmpi.train.run.saving import Saver, TrainingState
from dearmpi.train.run.steps import RunSteps
from dearmpi.train.run.tracing import Tracing, open_tracing, stop_tracing

_logger = logging.getLogger("dearmpi")


class Run:
    """A run of a script with a loop of its own: checkpoints, metrics, traces, requests to stop.

    ::

        with dearmpi.Run("runs/a", model, optimizer, states={"scheduler": scheduler}) as run:
            run.resume()
            sampler = run.sampler(len(data), batch_size=64, num_steps=1000)
            for batch in DataLoader(data, batch_sampler=sampler):
                ...  # forward, backward, optimizer.step(), scheduler.step()
                run.log(loss)
                if run.should_stop:
                    break

    All ranks make the same calls. Leaving the block saves the last step, unless an exception ends
    it. After SIGUSR1, SIGTERM or ``max_time_s`` it then raises ``SystemExit(75)``: the same command
    goes on, on any number of ranks.

    step: optimizer steps taken, those of earlier parts included.
    """

    def __init__(
        self,
        folder: str | Path,
        model: nn.Module,
        optimizer: DistributedOptimizer | LocalOptimizer | Sequence[DistributedOptimizer],
        *,
        states: Mapping[str, Stateful] = MappingProxyType({}),
        log_interval: int = 10,
        keep: int = 3,
        max_time_s: float | None = None,
        trace: tuple[int, int] | None = None,
        tracker: str | Sequence[str] = "csv",
        save_every_s: float | None = None,
        world: World | None = None,
    ) -> None:
        """folder: on a file system that all hosts share. model: holds the parameters of all
        optimizers; for two networks ``nn.ModuleDict``. optimizer: one, or several of other
        parameters. Of local steps, one alone: checkpoints show the values that ranks share, and the
        model keeps each rank's own. states: what is saved besides, by name: plain data and tensors.

        log_interval: steps per row of metrics. keep: checkpoints that stay. max_time_s: since the
        block began. trace: the first iteration to record, from 1, and the one before which it ends.
        tracker: ``"tensorboard"``, ``"wandb"``, ``"mlflow"`` or several, beside the CSV file.
        save_every_s: ``log`` also saves after so many seconds without a checkpoint, 900 being a
        good choice; it must then be the last call about a step, after ``scheduler.step()``.

        world: the ranks that take the same steps; they stop, save and resume at the same one. By
        default all ranks of the job, also where the optimizer's world is a group: each group then
        has a Run and a folder of its own. A group that trains by itself gives its own world.
        Raises ConfigError for numbers that are out of range, or none.
        """
        check_count("log_interval", log_interval, 1)
        check_count("keep", keep, 1)
        for name, seconds in (("max_time_s", max_time_s), ("save_every_s", save_every_s)):
            if seconds is not None and not seconds > 0:
                raise ConfigError(
                    f"{name} is {seconds}; give seconds above 0, or None", code="out-of-range"
                )
        if trace is not None and not (len(trace) == 2 and 1 <= trace[0] < trace[1]):
            raise ConfigError(
                f"trace is {trace}; give a first iteration, from 1, and a later one",
                code="out-of-range",
            )
        self._path, self._model = Path(folder), model
        self._optimizer, self._others = _apart(optimizer)
        self._local = self._optimizer if isinstance(self._optimizer, LocalOptimizer) else None
        if self._local is not None and trace is not None:
            raise _refused_beside_local(f"trace is {trace}")
        self._world, self._states = self._optimizer.world, states
        self._job = self._world.job if world is None else world
        self._log_interval, self._keep = log_interval, keep
        self._max_time_s, self._window = max_time_s, trace
        self._tracker_names = (tracker,) if isinstance(tracker, str) else tuple(tracker)
        self._save_every_s = save_every_s
        self._held = ExitStack()
        self._folder: RunFolder | None = None
        self._stop = StopRequest()
        self._steps: RunSteps | None = None
        self._tracing: Tracing | None = None
        self._metrics: MetricsLog | None = None
        self._watch: StragglerWatch | None = None
        self._sampler: StepSampler | None = None
        self._balance: Balance | None = None
        self._stored: Mapping[str, Any] = {}
        self._row_step = self._start_step = 0
        self._last: dict[str, float] = {}
        self._names: frozenset[str] | None = None
        self._lr = self._last_lr = 0.0

    def __enter__(self) -> Self:
        """Make the folder, and listen to requests to stop (collective)."""
        with ExitStack() as held:
            self._stop = held.enter_context(StopRequest())
            self._stop.limit(self._max_time_s)
            if self._job is not self._world:
                self._check_folders()
            with together(self._world, root_only=True):
                if self._world.is_root:
                    check_trackers(self._tracker_names)
            self._folder = held.enter_context(
                hold_folder(
                    self._world,
                    self._path.parent,
                    self._path.name,
                    resume=True,
                    prepare=self._describe,
                )
            )
            self._held = held.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        stopped = False
        try:
            if self._steps is not None:
                if error is None:
                    self._finish(self._steps)
                    stopped = self._steps.stopping
                elif isinstance(error, Exception):
                    self._steps.fail(error)
        finally:
            if self._tracing is not None:
                self._tracing.close()
            if self._metrics is not None:
                self._metrics.close()
            self._held.close()
        if stopped:
            raise SystemExit(EXIT_PREEMPTED)

    @property
    def step(self) -> int:
        """Optimizer steps taken, those of earlier parts of the run included."""
        return 0 if self._steps is None else self._steps.step

    @property
    def should_stop(self) -> bool:
        """Whether a rank was asked to stop, by a signal or by the clock: the same on all ranks."""
        return self._steps is not None and self._steps.stopping

    def resume(self) -> int:
        """Go on from the newest checkpoint in the folder, if there is one (collective).

        Loads the model, the optimizer and ``states``, and on the same number of ranks each rank's
        random numbers; on another they are drawn anew. Returns ``step``.

        Raises AgreedError for a checkpoint that is damaged or of another model.
        """
        if self._steps is not None:
            raise ConfigError("resume() must come before the first step", code="resume-unclear")
        found = self._find_newest()
        if found is not None:
            snapshot = load_together(self._world, found)
            restore(snapshot, self._model, (self._optimizer, *self._others), self._states)
            self._stored = snapshot.meta
            with together(self._world):
                continue_random_state(self._world, snapshot, snapshot.step)
        self._begin(0 if found is None else snapshot.step)
        return self.step

    def sampler(
        self,
        num_samples: int,
        *,
        batch_size: int,
        num_steps: int,
        seed: int = 0,
        shares: Shares = "even",
    ) -> StepSampler:
        """This rank's samples of the steps from here to ``num_steps``, for a DataLoader's
        ``batch_sampler`` (collective).

        batch_size: samples of a step over all ranks. Each epoch has a new order, drawn from
        ``seed``; what is left at its end is passed over. shares: a number above 0 for each rank,
        or ``auto``, by what ranks compute in a step; ``log`` moves these, and checkpoints keep
        them; groups cannot. Loaders then need the same ``num_workers`` on all ranks. Where ranks
        have unequal parts, multiply a rank's mean loss by ``sampler.weight(len(part))``.

        Raises ConfigError or DataError for too few samples, or shares that leave a rank none.
        """
        if num_samples < batch_size:
            cure = "lower batch_size" if num_samples else "is the data where it is looked for?"
            raise DataError(
                f"num_samples is {num_samples}, fewer than a batch of {batch_size}; {cure}",
                code="data-insufficient",
            )
        if self._local is not None and shares != "even":
            raise _refused_beside_local(f"shares is {shares!r}")
        world = self._world
        if shares == "auto" and world.size != self._job.size:
            raise ConfigError(
                f"shares is 'auto', but the optimizer's group has {world.size} of {self._job.size} "
                "ranks: each group would move its shares by itself, and ranks that work on the "
                "same samples would get others; give a number for each rank of the group",
                code="settings-contradict",
            )
        world.batch_share(batch_size, shares)  # the same on all ranks, and possible
        for warning in warn_of_batch_norm(shares, world, self._model, even="shares='even'"):
            warnings.warn(warning, stacklevel=2)
        divided = RankShares(first_weights(shares, world.size, self._stored))
        batches = Batches(
            num_samples, batch_size, world.size, world.rank, seed=seed, shares=divided
        )
        self._sampler = StepSampler(batches, num_steps, position=lambda: self.step)
        is_measured = shares == "auto" and world.size > 1
        self._balance = Balance(world, batches) if is_measured else None
        return self._sampler

    def log(self, loss: Tensor | float, *, num_samples: int = 0, **metrics: float) -> None:
        """Count an optimizer step; call it after each (collective).

        loss: this rank's; rows have the mean over ranks. num_samples: of the step, over all ranks;
        those of ``sampler`` are known. metrics: further columns, with rank 0's values.

        Raises NonFiniteLossError on all ranks, at most a step later, if a loss is not finite.
        Raises ArgumentError for a loss or metric that is no number.
        """
        steps = self._running()
        self._check_names(metrics)
        # A number of numpy is written otherwise in text, and a tensor may change.
        numbers = {name: _number_of(value, name) for name, value in metrics.items()}
        row_due = (steps.step + 1) % self._log_interval == 0
        save_due = self._save_every_s is not None and steps.since_save_s >= self._save_every_s
        if not num_samples and self._sampler is not None:
            num_samples = self._sampler.batches.batch_size
        steps.end(_number_of(loss, "loss"), num_samples=num_samples, row_due=row_due)
        if self._balance is not None:
            self._balance.note(self._balance.batches.batch_size, steps.own_s)
        self._last, self._last_lr = numbers, self._lr
        if row_due:
            steps.read_all_totals()
            self._write_row(steps)
        if save_due:
            steps.save()
        if self._tracing is not None:
            self._tracing.begin_iteration(steps.step + 1)
        self._begin_step(steps)

    def save(self) -> None:
        """Begin to save a checkpoint, written while the next steps are taken (collective)."""
        steps = self._running()
        if steps.step > steps.saver.started_step:
            steps.save()
            steps.begin()

    def _begin_step(self, steps: RunSteps) -> None:
        self._lr = float(self._optimizer.param_groups[0]["lr"])
        steps.begin()

    def _check_names(self, metrics: Mapping[str, float]) -> None:
        """Raise UsageError, on all ranks, for other metrics than those of the first step."""
        if self._names is None:
            check_names(tuple(metrics))
            self._names = frozenset(metrics)
        if self._names != metrics.keys():
            raise UsageError(
                f"metrics are {sorted(metrics)}, and {sorted(self._names)} in the first step; log "
                "the same in each",
                code="metrics-out-of-order",
            )

    def _running(self) -> RunSteps:
        if self._steps is None:
            if self._find_newest() is not None:
                raise ConfigError(
                    f"{self._path} holds a run; call resume() first, or use another folder",
                    code="run-folder-not-empty",
                )
            self._begin(0)
        assert self._steps is not None
        return self._steps

    def _check_folders(self) -> None:
        """Raise ConfigError, on all ranks, for a folder that two groups have."""
        own = [self._world.job_ranks, str(self._path.resolve())]
        with self._job.named_call("dearmpi.Run(), on all ranks of its world"):
            told = self._job.all_gather_text(json.dumps(own))
        groups: dict[str, list[int]] = {}
        for ranks, folder in map(json.loads, told):
            if groups.setdefault(folder, ranks) != ranks:
                raise ConfigError(
                    f"{folder} is the folder of ranks {groups[folder]} and of ranks {ranks}; give "
                    "each group a folder of its own",
                    code="run-folder-in-use",
                )

    def _find_newest(self) -> Path | None:
        with self._job.named_call("dearmpi.Run.resume(), on all ranks of its world"):
            return find_newest(self._world, self._path, self._job)

    def _begin(self, step: int) -> None:
        """``step`` steps are taken (collective)."""
        assert self._folder is not None
        folder = self._folder
        state = TrainingState(
            self._model,
            self._optimizer,
            self._meta,
            step,
            self._keep,
            self._others,
            lambda: self._packed()[1],
        )
        saver = Saver(state, folder.path, saved=lambda _: None, check_own=folder.check_own)
        # Traces of an earlier part stay where nothing is left to record.
        window = self._window if self._window is None or step + 1 < self._window[1] else None
        if isinstance(self._optimizer, DistributedOptimizer):
            if window is not None:
                stop_tracing(self._optimizer)
            self._tracing = open_tracing(self._model, self._optimizer, window, folder)
        self._watch = StragglerWatch(SlowRanks(step), self._world.hosts)
        self._row_step = self._start_step = step
        if self._tracing is not None:
            self._tracing.begin_iteration(step + 1)
        self._steps = RunSteps(
            state,
            saver,
            stop_requested=lambda: self._stop.is_due,
            cure="lower the learning rate, or clip the gradient",
            job=self._job,
        )
        self._begin_step(self._steps)

    def _finish(self, steps: RunSteps) -> None:
        """Save the last step, and write its row."""
        try:
            steps.read_all_totals()
            if steps.step > steps.saver.started_step:
                steps.save()
            steps.saver.finish()
            if steps.step > self._row_step:
                self._write_row(steps)
        except Exception as error:
            steps.fail(error)
            raise
        steps.close()

    def _write_row(self, steps: RunSteps) -> None:
        row = steps.make_row(
            epoch=0 if self._sampler is None else self._sampler.epoch(steps.step - 1),
            learning_rate=self._last_lr,
            extra=self._last,
        )
        self._row_step = steps.step
        with together(self._world, root_only=True):
            if self._world.is_root:
                self._append(row)

    def _append(self, row: MetricsRow) -> None:
        assert self._folder is not None and self._watch is not None
        if self._metrics is None:
            tracked = TrackedRun(
                self._folder.path, asdict(self._optimizer.config), self._start_step or None
            )
            self._metrics = MetricsLog(
                self._folder.path,
                extra=tuple(row.extra),
                resume_step=self._start_step,
                trackers=Trackers(self._tracker_names, tracked),
            )
        self._metrics.append(row)
        if row.ranks:
            own_s, wait_s = [one.own_s for one in row.ranks], [one.wait_s for one in row.ranks]
            if line := self._watch.add(row.step, own_s, wait_s):
                _logger.warning("step %d: %s", row.step, line)

    def _describe(self, folder: RunFolder) -> None:
        """Put into the folder what describes the run."""
        config = asdict(self._optimizer.config)
        folder.write_config(yaml.safe_dump(config, sort_keys=False))
        folder.write_environment(
            describe_environment(
                world_size=self._world.size,
                hosts=self._world.hosts,
                command=sys.argv,
                folder=Path.cwd(),
                threads_reason="as the script has set them",
            )
        )

    def _meta(self, step: int) -> dict[str, Any]:
        """What a checkpoint holds besides model and optimizer."""
        weights = () if self._sampler is None else self._sampler.batches.shares.weights
        return {
            "world_size": self._world.size,
            "states": self._packed()[0],
            **stored_weights(weights),
            **({} if self._local is None else {"local": self._local.progress()}),
        }

    def _packed(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The extra states: plain data by their names, and all of their tensors."""
        plain: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        for name, state in self._states.items():
            plain[name], found = pack_state(name, state.state_dict())
            tensors |= found
        return plain, tensors


def _number_of(value: Tensor | float, name: str) -> float:
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        mean = "this rank's mean loss of the step" if name == "loss" else "one of the step"
        raise ArgumentError(
            f"{name} is {type(value).__name__}{shape}, and no number; give run.log() {mean}",
            code="wrong-type",
        ) from None


def _apart(
    optimizer: DistributedOptimizer | LocalOptimizer | Sequence[DistributedOptimizer],
) -> tuple[DistributedOptimizer | LocalOptimizer, tuple[DistributedOptimizer, ...]]:
    """The first optimizer, and the others. Raises ConfigError for local steps beside others, and
    for what is no optimizer of dearmpi.
    """
    if isinstance(optimizer, (DistributedOptimizer, LocalOptimizer)):
        return optimizer, ()
    given = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    kinds = [type(one).__name__ for one in given if not isinstance(one, DistributedOptimizer)]
    if not given or set(kinds) - {LocalOptimizer.__name__}:
        raise ConfigError(
            f"optimizer is {' and '.join(kinds) or 'empty'}, not DistributedOptimizer; give "
            "dearmpi.DistributedOptimizer(optimizer, model), or several of these",
            code="wrong-type",
        )
    first, *others = given
    if any(isinstance(one, LocalOptimizer) for one in (first, *others)):
        raise ConfigError(
            f"one of {1 + len(others)} optimizers is a LocalOptimizer, which Run serves alone; "
            "give it by itself, made for all parameters",
            code="settings-contradict",
        )
    return first, tuple(others)


def _refused_beside_local(what: str) -> ConfigError:
    return ConfigError(
        f"{what}, but the optimizer is a LocalOptimizer, which does not go with it; leave it out",
        code="settings-contradict",
    )
