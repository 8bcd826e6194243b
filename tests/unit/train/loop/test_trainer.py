"""The trainer: what it computes, when it measures and saves, how it resumes and stops."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi import SyncBatchNorm
from dearmpi.comm.world import World
from dearmpi.errors import CheckpointError
from dearmpi.report.read.pace import find_stragglers
from dearmpi.train import checkpoint
from dearmpi.train.data.data import Batches
from dearmpi.train.loop.job import check_position
from dearmpi.train.loop.trainer import Trainer
from dearmpi.train.metrics import step_times as tally
from dearmpi.train.metrics.metrics import MetricsRow
from dearmpi.train.ranks.agreement import AgreedError
from dearmpi.train.ranks.random_state import seed_all
from dearmpi.train.run import steps
from dearmpi.train.run.saving import Saver
from dearmpi.train.settings.settings import RunSettings
from dearmpi.train.tasks.task import Task
from tests.codes import raises
from tests.fakes.clock import FakeClock
from tests.fakes.ranks import run_ranks
from tests.unit.train.points import (
    SGD,
    Notes,
    Points,
    equal,
    make_job,
    make_task,
    parameters,
    squared_error,
    train,
)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_run_is_what_a_plain_loop_over_the_same_samples_computes(
    alone: World, tmp_path: Path, micro_batches: int
) -> None:
    settings = RunSettings(
        epochs=2,
        momentum=0.9,
        warmup_steps=2,
        max_grad_norm=0.5,
        precision="fp64",
        gradient_accumulation_steps=micro_batches,
        log_interval=1,
        **SGD,
    )
    job = make_job(alone, settings)
    seed_all(settings.seed)
    model = make_task().model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    _, notes = train(job, tmp_path)
    data, norms = Points(20), list[float]()
    assert isinstance(job.batches, Batches)
    for step in range(6):
        indices = [i for share in job.batches.step(*divmod(step, 3)) for i in share.indices]
        optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, (step + 1) / 2)
        optimizer.zero_grad()
        loss = squared_error(model, (data.inputs[indices].double(), data.targets[indices].double()))
        torch.autograd.backward(loss)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    for ours, theirs in zip(job.task.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    assert notes.steps == [1, 2, 3, 4, 5, 6]
    assert [row.grad_norm for row in notes.rows] == pytest.approx(norms)
    assert [row.learning_rate for row in notes.rows] == pytest.approx([0.05] + 5 * [0.1])


def test_rows_evaluations_and_checkpoints_come_when_due(alone: World, tmp_path: Path) -> None:
    settings = RunSettings(
        max_steps=8,
        log_interval=2,
        checkpoint_interval=3,
        keep=2,
        **SGD,
    )
    outcome, notes = train(make_job(alone, settings), tmp_path)
    assert [row.step for row in notes.rows] == [2, 3, 4, 6, 8]  # an epoch has three steps
    evaluated = [row for row in notes.rows if row.eval_loss is not None]
    assert [row.step for row in evaluated] == [3, 6, 8]
    assert all(row.extra == {"ones": 1.0} for row in evaluated)
    assert notes.checkpoints == ["step-00000003", "step-00000006", "step-00000008"]
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-00000006", "step-00000008"]
    assert outcome.step == 8 and not outcome.stopped
    assert outcome.first_loss == notes.rows[0].loss
    assert outcome.last_loss == notes.rows[-1].loss


@pytest.mark.parametrize(
    ("settings", "rows", "checkpoints"),
    [
        ({"checkpoint_time_s": 25.0, "log_time_s": 15.0}, [3, 6, 9, 10], [4, 8, 10]),
        ({"checkpoint_time_s": 25.0, "checkpoint_interval": 6}, [10], [4, 6, 10]),
        ({"log_interval": 4}, [4, 8, 10], [10]),
    ],
)
def test_rows_and_checkpoints_by_time(
    alone: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    rows: list[int],
    checkpoints: list[int],
) -> None:
    """A step takes ten seconds, and what rank 0's clock showed after one is known before the
    next."""
    clock = FakeClock()
    monkeypatch.setattr(steps, "time", SimpleNamespace(perf_counter=clock.now))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        clock.advance(10.0)
        return squared_error(model, batch)

    chosen = RunSettings(max_steps=10, eval_interval=0, keep=9, **settings, **SGD)
    task = make_task(loss, eval_count=0)
    _, notes = train(make_job(alone, chosen, task), tmp_path)
    assert [row.step for row in notes.rows] == rows
    assert notes.checkpoints == [f"step-{step:08d}" for step in checkpoints]


def test_checkpoints_are_as_far_apart_as_failures_make_best(
    alone: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is taken to cost 1 s, then the 50 s that it did: by Daly, with a failure each 5 hours,
    they begin 190 s and 1359 s after each other, in steps of 100 s. The last step's is not known.
    """
    clock = FakeClock()
    monkeypatch.setattr(steps, "time", SimpleNamespace(perf_counter=clock.now))
    start = Saver.start

    def slow_start(saver: Saver, step: int, *, is_best: bool = False) -> None:
        clock.advance(50.0)
        start(saver, step, is_best=is_best)

    monkeypatch.setattr(Saver, "start", slow_start)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        clock.advance(100.0)
        return squared_error(model, batch)

    settings = RunSettings(
        max_steps=20,
        checkpoint_interval="auto",
        mtbf_hours=5,
        eval_interval=0,
        keep=9,
        **SGD,
    )
    _, notes = train(make_job(alone, settings, make_task(loss, eval_count=0)), tmp_path)
    assert notes.checkpoints == [f"step-{step:08d}" for step in (3, 18, 20)]
    ((save_time_s, checkpoint_s),) = notes.intervals
    assert save_time_s == pytest.approx(1359, abs=1) and checkpoint_s == pytest.approx(50)


def test_the_loss_of_a_row_is_the_mean_over_its_steps(alone: World, tmp_path: Path) -> None:
    losses: list[float] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = squared_error(model, batch)
        if model.training:
            losses.append(float(value.detach()))
        return value

    settings = RunSettings(max_steps=5, log_interval=3, eval_interval=0, **SGD)
    _, notes = train(make_job(alone, settings, make_task(loss)), tmp_path)
    means = [math.fsum(losses[:3]) / 3, math.fsum(losses[3:]) / 2]
    assert [row.loss for row in notes.rows] == pytest.approx(means)


def test_the_last_batch_of_an_epoch_counts_as_what_it_is(alone: World, tmp_path: Path) -> None:
    settings = RunSettings(epochs=2, log_interval=1, eval_interval=0, **SGD)
    _, notes = train(make_job(alone, settings), tmp_path)
    samples = [(row.samples_per_s or 0.0) * (row.step_s or 0.0) for row in notes.rows]
    assert samples == pytest.approx([8, 8, 4, 8, 8, 4])  # 20 in batches of 8


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_a_stopped_run_resumes_bit_by_bit(
    alone: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    monkeypatch.setattr(tally, "LONG_STEP_S", math.inf)  # also where something holds a step up
    settings = RunSettings(
        max_steps=7, optimizer=optimizer, lr=0.05, batch_size=8, lr_schedule="cosine"
    )

    def start() -> Task:
        seed_all(settings.seed)
        return make_task(dropout=0.2)

    whole = make_job(alone, settings, start())
    train(whole, tmp_path / "whole")
    outcome, notes = train(make_job(alone, settings, start()), tmp_path / "part", stop_after=4)
    assert outcome.stopped and outcome.step == 5  # known to all ranks one step later
    assert notes.checkpoints == ["step-00000005"] and notes.rows[-1].step == 5

    latest = checkpoint.find_latest(tmp_path / "part")
    assert latest is not None
    resumed = make_job(alone, settings, start(), checkpoint.load(latest))
    outcome, notes = train(resumed, tmp_path / "part")
    assert notes.steps == [6, 7] and not outcome.stopped
    assert equal(parameters(whole.task.model), parameters(resumed.task.model))


def test_a_run_that_has_reached_its_end_is_only_evaluated(alone: World, tmp_path: Path) -> None:
    settings = RunSettings(max_steps=3, **SGD)
    first, _ = train(make_job(alone, settings), tmp_path)
    snapshot = checkpoint.load(tmp_path / "checkpoints" / "step-00000003")
    again, notes = train(make_job(alone, settings, snapshot=snapshot), tmp_path)
    assert not notes.steps and not notes.checkpoints
    assert again.evaluation == first.evaluation and not again.stopped
    (row,) = notes.rows  # for a run whose evaluation had failed
    assert row.step == 3 and again.evaluation is not None
    assert (row.loss, row.eval_loss) == (None, again.evaluation.loss)


def test_a_checkpoint_of_another_model_is_refused_before_training(
    alone: World, tmp_path: Path
) -> None:
    settings = RunSettings(max_steps=1, **SGD)
    train(make_job(alone, settings), tmp_path)
    snapshot = checkpoint.load(tmp_path / "checkpoints" / "step-00000001")
    other = Task("other", nn.Linear(4, 1), Points(20), squared_error)
    with raises(AgreedError, "checkpoint-of-other-model") as caught:
        make_job(alone, settings, other, snapshot)
    assert caught.value.exit_code == CheckpointError.exit_code


def test_ranks_together_train_the_model_that_one_trains(tmp_path: Path) -> None:
    settings = RunSettings(epochs=2, precision="fp64", eval_interval=0, **SGD)

    def initial() -> dict[str, Tensor]:
        torch.manual_seed(1)
        return make_task().model.state_dict()

    start = initial()

    def work(world: World) -> list[Tensor]:
        task = make_task()
        task.model.load_state_dict(start)
        job = make_job(world, settings, task)
        notes = Notes()
        notes.saved = lambda checkpoint: None  # type: ignore[method-assign]
        Trainer(job, tmp_path, listener=notes).run()
        return parameters(task.model)

    (expected,) = run_ranks(1, work)
    for found in run_ranks(3, work):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_groups_without_weight_decay_are_trained_as_one_process_trains_them(
    tmp_path: Path,
) -> None:
    settings = RunSettings(
        max_steps=6, precision="fp64", optimizer="AdamW", lr=0.05, weight_decay=0.5,
        no_decay=("norms", "biases"), batch_size=8, eval_interval=0,
    )  # fmt: skip

    torch.manual_seed(1)
    start = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1)).double()

    def work(world: World) -> tuple[list[Tensor], list[list[int]]]:
        model = copy.deepcopy(start)
        job = make_job(world, settings, Task("points", model, Points(20), squared_error))
        notes = Notes()
        notes.saved = lambda checkpoint: None  # type: ignore[method-assign]
        batches = job.batches
        assert isinstance(batches, Batches)
        shares = [s.indices for step in range(6) for s in batches.step(*divmod(step, 3))]
        Trainer(job, tmp_path, listener=notes).run()
        return parameters(model), [list(indices) for indices in shares]

    ranks = run_ranks(2, work)
    model, data = copy.deepcopy(start), Points(20)
    named = dict(model.named_parameters())
    decays = [named["0.weight"], named["3.weight"]]
    free = [p for p in named.values() if all(p is not other for other in decays)]
    groups: list[dict[str, Any]] = [{"params": decays}, {"params": free, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.05, weight_decay=0.5)
    for parts in zip(*(shares for _, shares in ranks), strict=True):
        indices = [index for part in parts for index in part]
        optimizer.zero_grad()
        inputs, targets = data.inputs[indices].double(), data.targets[indices].double()
        torch.autograd.backward(squared_error(model, (inputs, targets)))
        optimizer.step()
    for found, _ in ranks:
        for ours, theirs in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def tells_of_the_slower_rank(folder: Path, pause_s: float) -> bool:
    folder.mkdir()
    settings = RunSettings(max_steps=9, eval_interval=0, log_interval=1, **SGD)

    def slow_error(model: nn.Module, batch: Any) -> Tensor:
        time.sleep(pause_s)
        return squared_error(model, batch)

    def work(world: World) -> list[MetricsRow]:
        job = make_job(world, settings, make_task(slow_error if world.rank else squared_error))
        notes = Notes()
        notes.saved = lambda checkpoint: None  # type: ignore[method-assign]
        Trainer(job, folder, listener=notes).run()
        return notes.rows

    first, *rows, _ = run_ranks(2, work)[0]  # the last waits for an evaluation too
    told: list[tuple[int, ...]] = []
    for row in rows:
        busy_s, wait_s = zip(*((one.own_s, one.wait_s) for one in row.ranks), strict=True)
        slow = find_stragglers(busy_s, wait_s, step_s=row.step_s or 0.0)
        told.append(() if slow is None else slow.places)
    ends_s = [row.elapsed_s or 0.0 for row in (first, *rows)]
    lengths_s = [after - before for before, after in pairwise(ends_s)]
    is_whole = median(row.step_s or 0.0 for row in rows) > 0.7 * median(lengths_s)
    return is_whole and told.count((1,)) > len(rows) / 2


def test_rows_count_the_time_that_a_slower_rank_takes(tmp_path: Path) -> None:
    """A busy machine may hold up rank 0, but hardly for as long as the longest pause."""
    assert any(tells_of_the_slower_rank(tmp_path / str(s), s) for s in (0.05, 0.25, 1.0))


def tells_who_waits_for_data(folder: Path, pause_s: float) -> bool:
    folder.mkdir()

    class Slow(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            time.sleep(pause_s)
            return super().__getitem__(index)

    def work(world: World) -> list[MetricsRow]:
        task = make_task()
        if world.rank == 1:
            points = (task.train_data[index] for index in range(len(task.train_data)))
            task = replace(task, train_data=Slow(points))
        settings = RunSettings(max_steps=5, eval_interval=0, log_interval=1, **SGD)
        notes = Notes()
        notes.saved = lambda checkpoint: None  # type: ignore[method-assign]
        Trainer(make_job(world, settings, task), folder, listener=notes).run()
        return notes.rows

    pairs = [row.ranks for row in run_ranks(2, work)[0]]
    told = [
        slow.data_s > 5 * quick.data_s and slow.data_s > 0.5 * slow.own_s for quick, slow in pairs
    ]
    return sum(told) > len(told) / 2


def test_rows_tell_which_rank_waits_for_its_data(tmp_path: Path) -> None:
    assert any(tells_who_waits_for_data(tmp_path / str(s), s) for s in (0.02, 0.1, 0.5))


def test_what_a_task_keeps_in_evaluation_mode_stays_so(alone: World, tmp_path: Path) -> None:
    task = make_task(dropout=0.5)
    frozen = task.model.get_submodule("2")
    frozen.eval()
    seen: list[bool] = []
    frozen.register_forward_pre_hook(lambda module, _: seen.append(module.training))
    settings = RunSettings(max_steps=4, eval_interval=2, **SGD)
    train(make_job(alone, settings, task), tmp_path)
    assert task.model.training and seen and not any(seen)


def test_the_time_of_a_run_is_that_of_all_its_steps(alone: World, tmp_path: Path) -> None:
    """The first one, which pays for what is set up on first use, counts among the steps too."""
    seen = [0]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen[0] += model.training
        if seen[0] == 1:
            time.sleep(0.2)
        return squared_error(model, batch)

    settings = RunSettings(max_steps=3, **SGD)
    outcome, _ = train(make_job(alone, settings, make_task(loss)), tmp_path)
    assert outcome.train_s >= 0.2


def test_other_data_of_the_same_length_is_refused(alone: World, tmp_path: Path) -> None:
    settings = RunSettings(max_steps=1, **SGD)
    task = replace(make_task(), data_digest="aa")
    train(make_job(alone, settings, task), tmp_path)
    snapshot = checkpoint.load(tmp_path / "checkpoints" / "step-00000001")
    with raises(CheckpointError, "checkpoint-of-other-data"):
        check_position(snapshot, replace(task, data_digest="bb"))
    check_position(snapshot, replace(task, data_digest=""))


def test_layers_that_wait_for_all_ranks_need_samples_on_all(tmp_path: Path) -> None:
    def work(world: World) -> None:
        task = make_task()
        task = replace(task, model=nn.Sequential(task.model, SyncBatchNorm(1)))
        prepare_with(8, world, task)  # 20 samples leave four: two for each rank
        prepare_with(19, world, task, max_steps=1)  # the run ends before it comes to what is left
        prepare_with(19, world, task)  # and here one, which rank 1 has

    def prepare_with(batch_size: int, world: World, task: Task, max_steps: int = 9) -> None:
        settings = RunSettings(max_steps=max_steps, optimizer="SGD", lr=0.1, batch_size=batch_size)
        make_job(world, settings, task).optimizer.close()

    with raises(AgreedError, "batches-uneven", 0, "micro-batches", 1):
        run_ranks(2, work)
