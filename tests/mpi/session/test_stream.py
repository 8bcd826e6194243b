"""Training data without a length: what ranks make of it, where it ends, and that it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dearmpi.comm.backends.alone import AloneCollectives
from dearmpi.comm.world import World
from dearmpi.train.metrics import metrics
from dearmpi.train.ranks.agreement import AgreedError
from dearmpi.train.ranks.random_state import seed_all
from dearmpi.train.ranks.stop import EXIT_PREEMPTED
from tests.codes import raises
from tests.mpi.session.points import BATCH_SIZE, NUM_SAMPLES, TASK, run, saved_model

STREAM: dict[str, object] = {"task_options": ["data=stream"]}


def plain_training(num_steps: int) -> dict[str, Tensor]:
    """The same on one process, without dearmpi: passes in order, from another first sample each."""
    names: dict[str, object] = {"__name__": "points"}
    exec(compile(TASK, "points.py", "exec"), names)
    seed_all(0)
    model: nn.Module = names["make_model"](0.0).double()  # type: ignore[operator]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    points = names["Points"](NUM_SAMPLES)  # type: ignore[operator]
    per_pass = -(-NUM_SAMPLES // BATCH_SIZE)
    for step in range(num_steps):
        first, begin = step // per_pass, step % per_pass * BATCH_SIZE
        places = range(begin, min(begin + BATCH_SIZE, NUM_SAMPLES))
        samples = [points[(first + place) % NUM_SAMPLES] for place in places]
        inputs, targets = (torch.stack(part).double() for part in zip(*samples, strict=True))
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
    return model.state_dict()


def check(folder: Path, name: str) -> None:
    found = saved_model(folder, name, 12)
    for key, tensor in plain_training(12).items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"workers": 2},
        {"schedule": "serial"},
        {"workers": 1, "batch_shares": "unequal"},
    ],
    ids=["itself", "accumulation", "workers", "serial", "shares"],
)
def test_any_number_of_ranks_trains_what_one_process_trains(
    world: World, folder: Path, given: dict[str, object]
) -> None:
    """Over two ends, of passes whose last batch holds three samples."""
    if "batch_shares" in given:
        given = {**given, "batch_shares": tuple(1.0 + rank for rank in range(world.size))}
    assert run(world, folder, "a", log_interval=1, **STREAM, **given) == 0
    world.barrier()
    check(folder, "a")
    epochs = [row.epoch for row in metrics.read(folder / "runs" / "a")]
    assert epochs == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("data", ["stream", "skipping"])
@pytest.mark.parametrize("step", [3, 5, 7])
def test_it_goes_on_on_one_process_where_many_ranks_stopped(
    world: World, folder: Path, data: str, step: int
) -> None:
    given: dict[str, object] = {"task_options": [f"data={data}"]}
    assert run(world, folder, "a", max_steps=step, **given) == 0
    world.barrier()
    if world.is_root:
        alone = World(AloneCollectives(), progress="poll")
        assert run(alone, folder, "a", resume="auto", max_steps=12) == 0
        alone.close()
        check(folder, "a")
    world.barrier()


def test_a_stopped_run_resumes_bit_by_bit(world: World, folder: Path) -> None:
    options = ["data=skipping", "dropout=0.2"]
    assert run(world, folder, "whole", task_options=options) == 0
    options.append("wrong=stop")
    assert run(world, folder, "a", task_options=options) == EXIT_PREEMPTED
    world.barrier()
    assert run(world, folder, "a", task_options=options, resume="auto") == 0
    world.barrier()
    whole, parts = saved_model(folder, "whole", 12), saved_model(folder, "a", 12)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"max_steps": None}, "--max-steps"),
        ({"max_steps": None, "epochs": 2}, "--max-steps"),
        ({"warmup_epochs": 0.5}, "--warmup-steps"),
    ],
)
def test_what_needs_a_length_is_refused(
    world: World, folder: Path, given: dict[str, object], told: str
) -> None:
    with raises(AgreedError, "length-unknown", told):
        run(world, folder, "a", **STREAM, **given)
