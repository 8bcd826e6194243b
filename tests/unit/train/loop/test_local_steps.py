"""A run whose ranks train alone between exchanges: saved, resumed, evaluated and refused."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dearmpi.comm.world import World
from dearmpi.engine.bucket import bucket
from dearmpi.errors import ConfigError
from dearmpi.local.local_optimizer import LocalOptimizer
from dearmpi.plan.data.local_schedule import LocalSchedule
from dearmpi.train import checkpoint
from dearmpi.train.loop.job import Job
from dearmpi.train.settings.settings import RunSettings
from dearmpi.train.tasks.auc import build_auc
from dearmpi.train.tasks.task import Task
from tests.codes import raises
from tests.fakes.ranks import run_ranks
from tests.unit.train.points import (
    Notes,
    make_job,
    make_task,
    parameters,
    squared_error,
    train,
)

LOCAL: dict[str, Any] = {
    "optimizer": "AdamW",
    "lr": 0.02,
    "batch_size": 8,
    "sync_every": 6,
    "sync_fragments": 2,
    "sync_delay": 2,
    "bucket_cap_mb": 1e-5,
    "checkpoint_interval": 4,
    "checkpoint_time_s": 0.0,
    "log_interval": 1,
    "eval_interval": 5,
}
TASK = make_task()
AVERAGE: dict[str, Any] = {
    "optimizer": "dearmpi:PrimalDual",
    "optimizer_options": {"stage_steps": 6},
    "sync_fragments": None,
    "sync_delay": None,
}
ROUNDS: dict[str, Any] = {
    "optimizer": "SGD",
    "lr": 0.05,
    "sync_every": None,
    "p": 0.3,
    "sync_fragments": None,
    "sync_delay": None,
}
SCAFFNEW, TAMUNA = ({"algorithm": name, **ROUNDS} for name in ("scaffnew", "tamuna"))
CODA, CODASCA = ({"algorithm": name, **AVERAGE} for name in ("coda", "codasca"))


def run(
    world: World,
    folder: Path,
    steps: int,
    *,
    task: Task = TASK,
    resume: Path | None = None,
    **more: Any,
) -> tuple[list[Tensor], Notes]:
    settings = RunSettings(max_steps=steps, **{**LOCAL, **more})
    snapshot = None if resume is None else checkpoint.load(resume)
    with _building:  # the random state is the process's
        task = copy.deepcopy(task)
    job = make_job(world, settings, task, snapshot)
    _, notes = train(job, folder)
    return parameters(task.model), notes


_building = threading.Lock()


@pytest.mark.parametrize(
    ("stop", "more"),
    [
        *((stop, {}) for stop in (4, 6, 7, 9)),
        *((stop, {"sync_after": 5}) for stop in (4, 5, 7)),
        (7, {"compress": "int8"}),
        (10, {"compress": "int4"}),
        (7, CODA),
        *((stop, CODASCA) for stop in (6, 7)),
        *((stop, SCAFFNEW) for stop in (4, 7)),
        (7, TAMUNA),
    ],
)
def test_a_resumed_run_goes_on_bit_for_bit(
    tmp_path: Path, stop: int, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "_LEAST_COMPRESSED", 1)
    whole = run_ranks(2, lambda world: run(world, tmp_path / "a", 15, **more))
    run_ranks(2, lambda world: run(world, tmp_path / "b", stop, **more))
    (newest,) = (tmp_path / "b" / "checkpoints").glob(f"*{stop}")
    resumed = run_ranks(2, lambda world: run(world, tmp_path / "b", 15, resume=newest, **more))
    for (expected, _), (found, _) in zip(whole, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert [row.eval_loss for row in resumed[0][1].rows][-1] == whole[0][1].rows[-1].eval_loss


def test_what_is_saved_is_what_ranks_share_and_ends_in_the_model(tmp_path: Path) -> None:
    ranks = run_ranks(2, lambda world: run(world, tmp_path, 12))
    assert all(torch.equal(a, b) for a, b in zip(ranks[0][0], ranks[1][0], strict=True))
    saved = checkpoint.load(tmp_path / "checkpoints" / "step-00000012")
    assert all(torch.equal(a, b) for a, b in zip(saved.model.values(), ranks[0][0], strict=True))
    before = checkpoint.load(tmp_path / "checkpoints" / "step-00000004")
    entries = before.optimizer["0.weight"]
    assert not torch.equal(entries["rank0.values"], entries["rank1.values"])  # type: ignore[arg-type]


def test_evaluation_is_of_what_ranks_share(tmp_path: Path) -> None:
    """Before the first exchange that is the start, however far ranks have come by themselves."""
    start = copy.deepcopy(TASK)
    with torch.no_grad():
        inputs, targets = start.eval_data.inputs, start.eval_data.targets  # type: ignore[union-attr]
        expected = float(torch.nn.functional.mse_loss(start.model(inputs), targets))
    more: dict[str, Any] = {"sync_every": 50, "sync_fragments": 1, "sync_delay": 0}
    for parameters_, notes in run_ranks(2, lambda world: run(world, tmp_path, 11, **more)):
        losses = [row.eval_loss for row in notes.rows if row.eval_loss is not None]
        assert len(losses) >= 2 and losses == pytest.approx([expected] * len(losses), rel=1e-6)
        assert all(
            torch.equal(one, other)
            for one, other in zip(parameters_, start.model.parameters(), strict=True)
        )


def test_every_setting_arrives_at_the_optimizer() -> None:
    def build(world: World) -> None:
        given = {"sync_mix": 0.25, "outer_lr": 0.6, "outer_momentum": 0.5, "sync_after": 3}
        job = make_job(world, RunSettings(max_steps=1, **{**LOCAL, **given, "compress": "int8"}))
        optimizer = job.optimizer
        assert isinstance(optimizer, LocalOptimizer)
        assert optimizer.exchanges == LocalSchedule(6, 2, 2)
        assert (optimizer.mix, optimizer.sync_after, optimizer.compress) == (0.25, 3, "int8")
        (group,) = optimizer.outer.param_groups
        assert (group["lr"], group["momentum"], group["nesterov"]) == (0.6, 0.5, True)
        optimizer.close()

    run_ranks(2, build)


def test_accumulation_changes_nothing_and_clipping_what_each_rank_learns(tmp_path: Path) -> None:
    def end(name: str, **more: Any) -> list[Tensor]:
        return run_ranks(2, lambda world: run(world, tmp_path / name, 9, **more))[0][0]

    sgd: dict[str, Any] = {"optimizer": "SGD", "lr": 0.2, "max_grad_norm": 0.1}
    once, twice, free = (
        end("once", **sgd),
        end("twice", gradient_accumulation_steps=2, **sgd),
        end("free", **{**sgd, "max_grad_norm": 0.0}),
    )
    for one, other in zip(once, twice, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert any(
        not torch.allclose(one, other, atol=1e-3) for one, other in zip(once, free, strict=True)
    )


def test_parameters_of_one_number_resume_bit_for_bit(tmp_path: Path) -> None:
    """As those of a loss for the area under the curve, with what is maximised among them."""
    pytest.importorskip("sklearn")
    options: dict[str, Any] = {**CODASCA, "lr": 0.1, "task": build_auc("digits", {"width": "2"})}
    (whole, _), _ = run_ranks(2, lambda world: run(world, tmp_path / "a", 13, **options))
    run_ranks(2, lambda world: run(world, tmp_path / "b", 7, **options))
    newest = tmp_path / "b" / "checkpoints" / "step-00000007"
    again = run_ranks(2, lambda world: run(world, tmp_path / "b", 13, resume=newest, **options))
    assert all(torch.equal(a, b) for a, b in zip(whole, again[0][0], strict=True))


@pytest.mark.parametrize(
    "more", [{}, CODASCA, SCAFFNEW, TAMUNA], ids=["diloco", "codasca", "scaffnew", "tamuna"]
)
@pytest.mark.parametrize("size", [1, 3])
def test_other_numbers_of_ranks_go_on_from_what_is_shared(
    tmp_path: Path, size: int, more: dict[str, Any]
) -> None:
    run_ranks(2, lambda world: run(world, tmp_path / "two", 7, **more))
    newest = tmp_path / "two" / "checkpoints" / "step-00000007"

    def go_on(world: World) -> tuple[list[Tensor], Notes]:
        return run(world, tmp_path / "other", 13, resume=newest, **more)

    with pytest.warns(UserWarning, match="rank 0 of 2"):
        ranks = run_ranks(size, go_on)
    assert all(torch.equal(a, b) for a, b in zip(ranks[0][0], ranks[-1][0], strict=True))


def test_ranks_outside_the_cohort_have_no_backprop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters and losses are those of ranks that compute what is then not used."""
    num_backprops: list[int] = []

    def counted(model: torch.nn.Module, batch: Any) -> Tensor:
        loss = squared_error(model, batch)
        if loss.requires_grad:
            loss.register_hook(lambda _: num_backprops.append(1))
        return loss

    options = {**TAMUNA, "cohort": 2, "max_grad_norm": 0.5, "task": make_task(counted)}
    found = run_ranks(3, lambda world: run(world, tmp_path / "a", 12, **options))
    assert len(num_backprops) == 2 * 12
    monkeypatch.setattr(Job, "needs_gradients", True)
    expected = run_ranks(3, lambda world: run(world, tmp_path / "b", 12, **options))
    assert len(num_backprops) == 2 * 12 + 3 * 12
    for (own, notes), (own_before, notes_before) in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(own, own_before, strict=True))
        assert [row.loss for row in notes.rows] == [row.loss for row in notes_before.rows]


def test_communication_is_counted_once_for_each_exchange(tmp_path: Path) -> None:
    _, notes = run_ranks(2, lambda world: run(world, tmp_path, 8))[0]
    seconds = {row.step: row.communication_s for row in notes.rows}
    assert seconds[1] == seconds[2] == seconds[4] == seconds[5] == seconds[7] == 0


REFUSED: list[dict[str, Any]] = [
    {"plan": "auto"},
    {"on_nan": "skip"},
    {"gather": "gradients"},
    {"schedule": "wfbp"},
    {"trace": "2:4"},
    {"ema": 0.9},
    {"precision": "fp16"},
    {"batch_shares": "auto"},
    {"algorithm": "coda", "outer_lr": 0.5},
    {"algorithm": "codasca", "sync_delay": 1},
    {"algorithm": "codasca", "compress": "int8"},
    {"algorithm": "coda", "p": 0.1},
    {"algorithm": "scaffnew"},
]


@pytest.mark.parametrize("more", REFUSED, ids=str)
def test_settings_that_local_steps_lack_are_refused(more: dict[str, Any]) -> None:
    with raises(ConfigError, "settings-contradict", *more):
        RunSettings(sync_every=4, **more)


@pytest.mark.parametrize(
    "more",
    [
        {"optimizer": "AdamW"},
        {"momentum": 0.9},
        {"lr_schedule": "cosine"},
        {"warmup_steps": 5},
        {"cohort": 2},
        {"outer_lr": 0.5},
        {"compress": "int8"},
        {"ema": 0.9},
    ],
    ids=str,
)
def test_settings_that_control_variates_lack_are_refused(more: dict[str, Any]) -> None:
    with raises(ConfigError, "settings-contradict", "scaffnew", *more):
        RunSettings(**{"algorithm": "scaffnew", "optimizer": "SGD", **more})


@pytest.mark.parametrize(
    "name", ["sync_after", "sync_fragments", "sync_delay", "sync_mix", "outer_lr"]
)
def test_settings_without_effect_are_refused(name: str) -> None:
    with raises(ConfigError, "setting-without-effect", name, "sync_every"):
        RunSettings(**dict[str, Any]({name: 1}))
