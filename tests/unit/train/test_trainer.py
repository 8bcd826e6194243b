"""The trainer: what it computes, when it measures and saves, how it resumes and stops."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi.comm.alone import AloneCollectives
from dearmpi.comm.ranks import run_ranks
from dearmpi.comm.world import World
from dearmpi.errors import CheckpointError, NonFiniteLossError, TaskError
from dearmpi.report.straggler import find_straggler
from dearmpi.train import checkpoint
from dearmpi.train.agreement import AgreedError
from dearmpi.train.checkpoint.snapshot import Snapshot
from dearmpi.train.evaluation import Evaluator
from dearmpi.train.job import Job, prepare
from dearmpi.train.metrics import MetricsRow
from dearmpi.train.optimizers import choose_optimizer
from dearmpi.train.seeding import seed_all
from dearmpi.train.settings import RunSettings
from dearmpi.train.task import Task
from dearmpi.train.trainer import MOST_SKIPS, Outcome, Trainer

Loss = Callable[[nn.Module, Any], Tensor]


class Points:
    """Points and their targets, drawn once."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(count)
        self.inputs = torch.randn(count, 4, generator=generator)
        self.targets = self.inputs.sum(1, keepdim=True).sin()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def squared_error(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def count_of_samples(model: nn.Module, batch: Any) -> Mapping[str, float]:
    return {"ones": float(len(batch[0]))}


def make_task(loss: Loss = squared_error, *, dropout: float = 0.0, eval_count: int = 7) -> Task:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))
    return Task(
        "points",
        model,
        Points(20),
        loss,
        eval_data=Points(eval_count) if eval_count else None,
        metrics=count_of_samples,
    )


def make_job(
    world: World, settings: RunSettings, task: Task | None = None, snapshot: Snapshot | None = None
) -> Job:
    if task is None:
        seed_all(settings.seed)
        task = make_task()
    return prepare(world, settings, task, choice=choose_optimizer(settings), snapshot=snapshot)


@dataclass
class Notes:
    """A listener that remembers."""

    steps: list[int] = field(default_factory=list)
    rows: list[MetricsRow] = field(default_factory=list)
    checkpoints: list[str] = field(default_factory=list)

    def stepped(self, step: int) -> None:
        self.steps.append(step)

    def measured(self, row: MetricsRow) -> None:
        self.rows.append(row)

    def saved(self, checkpoint: Path | None) -> None:
        assert checkpoint is not None
        self.checkpoints.append(checkpoint.name)


def train(job: Job, folder: Path, *, stop_after: int | None = None) -> tuple[Outcome, Notes]:
    notes = Notes()
    trainer = Trainer(
        job,
        folder,
        listener=notes,
        stop_asked=lambda: stop_after is not None and len(notes.steps) + 1 >= stop_after,
    )
    return trainer.run(), notes


@pytest.fixture
def alone() -> Iterator[World]:
    world = World(AloneCollectives(), progress="poll")
    yield world
    world.close()


def parameters(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


SGD: dict[str, Any] = {"optimizer": "SGD", "lr": 0.1, "batch_size": 8}


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
        **SGD,
    )
    job = make_job(alone, settings)
    seed_all(settings.seed)
    model = make_task().model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    _, notes = train(job, tmp_path)
    data = Points(20)
    for step in range(6):
        indices = [i for share in job.plan.step(*divmod(step, 3)) for i in share.indices]
        optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, (step + 1) / 2)
        optimizer.zero_grad()
        loss = squared_error(model, (data.inputs[indices].double(), data.targets[indices].double()))
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    for ours, theirs in zip(job.task.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    assert notes.steps == [1, 2, 3, 4, 5, 6]


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


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_a_stopped_run_resumes_bit_by_bit(alone: World, tmp_path: Path, optimizer: str) -> None:
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
    assert notes == Notes()
    assert again.evaluation == first.evaluation and not again.stopped


def test_a_checkpoint_of_another_model_is_refused_before_training(
    alone: World, tmp_path: Path
) -> None:
    settings = RunSettings(max_steps=1, **SGD)
    train(make_job(alone, settings), tmp_path)
    snapshot = checkpoint.load(tmp_path / "checkpoints" / "step-00000001")
    other = Task("other", nn.Linear(4, 1), Points(20), squared_error)
    with pytest.raises(AgreedError, match="belongs to another model") as caught:
        make_job(alone, settings, other, snapshot)
    assert caught.value.exit_code == CheckpointError.exit_code


def infinite_slope(model: nn.Module, batch: Any) -> Tensor:
    """A loss of zero whose gradient is NaN."""
    output: Tensor = model(batch[0])
    return (0.0 * output.square().sum()).sqrt()


def spoil(at: tuple[int, ...]) -> Loss:
    """A loss that is NaN at some steps, counted from 1."""
    seen = [0]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen[0] += model.training
        value = squared_error(model, batch)
        return value * math.nan if model.training and seen[0] in at else value

    return loss


def test_a_bad_loss_ends_the_run_and_the_last_checkpoint_is_sound(
    alone: World, tmp_path: Path
) -> None:
    settings = RunSettings(max_steps=9, checkpoint_interval=1, keep=9, **SGD)
    with pytest.raises(NonFiniteLossError, match="step 4 .* last checkpoint is that of step 3"):
        train(make_job(alone, settings, make_task(spoil((4,)))), tmp_path)
    latest = checkpoint.find_latest(tmp_path)
    assert latest is not None and latest.name == "step-00000003"
    assert all(tensor.isfinite().all() for tensor in checkpoint.load(latest).model.values())


def test_bad_parameters_are_not_saved_even_if_the_loss_is_finite(
    alone: World, tmp_path: Path
) -> None:
    settings = RunSettings(max_steps=1, **SGD)
    with pytest.raises(AgreedError, match="not finite after step 1") as caught:
        train(make_job(alone, settings, make_task(infinite_slope, eval_count=0)), tmp_path)
    assert caught.value.exit_code == NonFiniteLossError.exit_code
    assert checkpoint.find_latest(tmp_path) is None


def test_clipping_sees_a_bad_gradient_before_it_reaches_the_model(
    alone: World, tmp_path: Path
) -> None:
    settings = RunSettings(max_steps=1, max_grad_norm=1.0, **SGD)
    job = make_job(alone, settings, make_task(infinite_slope, eval_count=0))
    before = parameters(job.task.model)
    with pytest.raises(NonFiniteLossError, match="the gradient of step 1 is not finite"):
        train(job, tmp_path)
    assert equal(before, parameters(job.task.model))


def test_skipping_leaves_out_bad_steps_and_only_those(alone: World, tmp_path: Path) -> None:
    settings = RunSettings(max_steps=5, on_nan="skip", log_interval=1, **SGD)
    seen: list[list[Tensor]] = []
    job = make_job(alone, settings, make_task(spoil((2, 4))))
    notes = Notes()
    notes.stepped = lambda step: seen.append(parameters(job.task.model))  # type: ignore[method-assign]
    outcome = Trainer(job, tmp_path, listener=notes).run()
    assert outcome.num_skipped == 2
    assert [equal(a, b) for a, b in zip(seen, seen[1:], strict=False)] == [True, False, True, False]
    assert [row.loss is None for row in notes.rows] == [False, True, False, True, False]


def test_skipping_gives_up_when_nothing_else_is_left(alone: World, tmp_path: Path) -> None:
    settings = RunSettings(max_steps=500, on_nan="skip", eval_interval=0, **SGD)
    task = make_task(spoil(tuple(range(3, 500))))
    with pytest.raises(NonFiniteLossError, match=f"{MOST_SKIPS} steps in a row"):
        train(make_job(alone, settings, task), tmp_path)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda model, batch: 1.0, "it gave float"),
        (lambda model, batch: model(batch[0]), r"it gave a tensor of shape \(8, 1\)"),
        (lambda model, batch: model(batch[0]).detach().sum(), "does not depend on the parameters"),
    ],
)
def test_a_loss_that_is_none_is_explained(
    alone: World, tmp_path: Path, loss: Loss, message: str
) -> None:
    settings = RunSettings(max_steps=1, **SGD)
    job = make_job(alone, settings, make_task(loss, eval_count=0))
    with pytest.raises(TaskError, match=message):
        train(job, tmp_path)


def test_evaluation_counts_each_sample_once_at_any_number_of_ranks() -> None:
    torch.manual_seed(0)
    task = make_task(eval_count=7)
    assert task.eval_data is not None
    data = Points(7)
    with torch.no_grad():
        expected = float(squared_error(task.model, (data.inputs, data.targets)))

    def work(world: World) -> tuple[float, int, Mapping[str, float]]:
        assert task.eval_data is not None
        found = Evaluator(task, task.eval_data, "fp32", batch_size=3, names=("ones",)).run(world)
        return found.loss, found.num_samples, found.metrics

    for size in (1, 3, 8):
        for loss, num_samples, metrics in run_ranks(size, work):
            assert loss == pytest.approx(expected)
            assert (num_samples, metrics) == (7, {"ones": 1.0})


def test_evaluation_leaves_modes_and_gradients_as_they_were(alone: World) -> None:
    task = make_task()
    task.model[0].eval()  # type: ignore[index]
    assert task.eval_data is not None
    Evaluator(task, task.eval_data, "fp32", batch_size=3, names=("ones",)).run(alone)
    assert [module.training for module in task.model.modules()] == [True, False, True, True, True]
    assert torch.is_grad_enabled()


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
        Trainer(job, tmp_path / str(world.size), listener=notes).run()
        return parameters(task.model)

    (expected,) = run_ranks(1, work)
    for found in run_ranks(3, work):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_rows_count_the_time_that_a_slower_rank_takes(tmp_path: Path) -> None:
    settings = RunSettings(max_steps=4, eval_interval=0, log_interval=1, **SGD)

    def slow_error(model: nn.Module, batch: Any) -> Tensor:
        time.sleep(0.05)
        return squared_error(model, batch)

    def work(world: World) -> list[MetricsRow]:
        job = make_job(world, settings, make_task(slow_error if world.rank else squared_error))
        notes = Notes()
        notes.saved = lambda checkpoint: None  # type: ignore[method-assign]
        Trainer(job, tmp_path, listener=notes).run()
        return notes.rows

    first, *rows, _ = run_ranks(2, work)[0]  # the last waits for an evaluation too
    assert first.elapsed_s is not None and rows[-1].elapsed_s is not None
    for row in rows:
        busy_s, wait_s = zip(*((one.own_s, one.wait_s) for one in row.ranks), strict=True)
        slow = find_straggler(busy_s, wait_s, step_s=row.step_s or 0.0)
        assert slow is not None and slow.place == 1
    shown_s = sum(row.step_s or 0.0 for row in rows)
    assert shown_s > 0.7 * (rows[-1].elapsed_s - first.elapsed_s)
