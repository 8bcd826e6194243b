"""A run on all ranks: what it computes, writes and says, and that it goes on after a stop."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dearmpi.comm.backends.alone import AloneCollectives
from dearmpi.comm.world import World
from dearmpi.train.data.data import Batches
from dearmpi.train.metrics import metrics
from dearmpi.train.metrics import step_times as tally
from dearmpi.train.ranks.random_state import seed_all
from dearmpi.train.ranks.stop import EXIT_PREEMPTED
from tests.mpi.session.points import BATCH_SIZE, NUM_SAMPLES, TASK, run, saved_model


def plain_training(
    num_steps: int,
    *,
    dtype: torch.dtype,
    batch_size: int = BATCH_SIZE,
    follow: Callable[[nn.Module], None] = lambda model: None,
) -> dict[str, Tensor]:
    """The same training without dearmpi: whole batches, one process. ``follow`` is called after
    each step.
    """
    names: dict[str, object] = {"__name__": "points"}
    exec(compile(TASK, "points.py", "exec"), names)
    seed_all(0)
    model: nn.Module = names["make_model"](0.0).to(dtype)  # type: ignore[operator]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    batches = Batches(NUM_SAMPLES, batch_size, world_size=1, rank=0)
    generator = torch.Generator().manual_seed(NUM_SAMPLES)
    inputs = torch.randn(NUM_SAMPLES, 6, generator=generator).to(dtype)
    targets = torch.stack([row.float().sum().sin().to(dtype).reshape(1) for row in inputs])
    for step in range(num_steps):
        indices = list(batches.step(*divmod(step, batches.steps_per_epoch))[0].indices)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs[indices]), targets[indices])
        torch.autograd.backward(loss)
        optimizer.step()
        follow(model)
    return model.state_dict()


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"schedule": "serial", "reduce_scatter": "native"},
        {"schedule": "wfbp", "gather": "gradients"},
        {"gradient_accumulation_steps": 2, "reduce_scatter": "exchange"},
        {"on_nan": "skip", "log_interval": 1},
        {"max_grad_norm": 1e6, "window": 1},
        {"batch_shares": "unequal"},
        {"batch_shares": "unequal", "gradient_accumulation_steps": 2, "batch_size": 30},
    ],
    ids=[
        *("dear", "serial", "wfbp", "accumulation", "skip", "clipping"),
        *("shares", "accumulated-shares"),
    ],
)
def test_any_number_of_ranks_trains_what_one_process_trains(
    world: World, folder: Path, given: dict[str, object]
) -> None:
    if "batch_shares" in given:  # the first rank has most, the last least
        shares = tuple(float(world.size - rank) for rank in range(world.size))
        given = {**given, "batch_shares": shares}
    assert run(world, folder, "a", **given) == 0
    batch_size = int(str(given.get("batch_size", BATCH_SIZE)))
    expected = plain_training(12, dtype=torch.float64, batch_size=batch_size)
    found = saved_model(folder, "a", 12)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12)


def test_rank_0_writes_and_speaks_for_all(
    world: World, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(world, folder, "a", log_interval=5) == 0
    world.barrier()
    told = capfd.readouterr().out
    assert ("the closing line" in told) == ("run folder:" in told) == world.is_root
    rows = metrics.read(folder / "runs" / "a")
    assert [row.step for row in rows] == [5, 10, 12]
    assert all(row.extra == {"ones": 1.0} for row in rows)  # each held-out sample once
    environment = json.loads((folder / "runs" / "a" / "env.json").read_text())
    assert environment["world_size"] == world.size
    log = (folder / "runs" / "a" / "logs" / f"rank-{world.rank:05d}.log").read_text()
    assert f"rank {world.rank} of {world.size}" in log


def test_a_run_stopped_on_one_rank_resumes_bit_by_bit(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tally, "LONG_STEP_S", math.inf)  # also where something holds a step up
    noisy = {"precision": "fp32", "optimizer": "AdamW", "momentum": None, "lr": 0.01}
    options = ["dropout=0.2"]
    assert run(world, folder, "whole", task_options=options, **noisy) == 0
    stopped = run(world, folder, "a", task_options=[*options, "wrong=stop"], **noisy)
    assert stopped == EXIT_PREEMPTED
    world.barrier()
    assert (folder / "runs" / "a" / "latest").read_text() == "checkpoints/step-00000004\n"
    resumed = run(world, folder, "a", task_options=[*options, "wrong=stop"], resume="auto", **noisy)
    assert resumed == 0
    world.barrier()
    whole, parts = saved_model(folder, "whole", 12), saved_model(folder, "a", 12)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_the_clock_stops_all_ranks_at_one_step_and_resume_has_time_of_its_own(
    world: World, folder: Path
) -> None:
    assert run(world, folder, "whole") == 0
    # It is up at once, which all learn with the totals of the first step, which may be a long one.
    assert run(world, folder, "a", max_time_s="1e-6s") == EXIT_PREEMPTED
    world.barrier()
    assert (folder / "runs" / "a" / "latest").read_text() == "checkpoints/step-00000001\n"
    assert run(world, folder, "a", resume="auto") == 0
    world.barrier()
    whole, parts = saved_model(folder, "whole", 12), saved_model(folder, "a", 12)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_one_process_goes_on_where_many_ranks_stopped(world: World, folder: Path) -> None:
    run(world, folder, "a", max_steps=7, momentum=0.9)
    world.barrier()
    if world.is_root:
        alone = World(AloneCollectives(), progress="poll")
        assert run(alone, folder, "a", resume="auto", max_steps=12) == 0
        alone.close()
        found = saved_model(folder, "a", 12)
        for name, tensor in plain_training(12, dtype=torch.float64).items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12)
    world.barrier()


def test_a_nan_on_one_rank_can_be_left_out_on_all(world: World, folder: Path) -> None:
    assert run(world, folder, "a", task_options=["wrong=nan"], on_nan="skip", log_interval=1) == 0
    world.barrier()
    losses = [row.loss for row in metrics.read(folder / "runs" / "a")]
    assert [step for step, loss in enumerate(losses, 1) if loss is None] == [3]
