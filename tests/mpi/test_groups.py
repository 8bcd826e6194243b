"""Groups of ranks over MPI: a grid of two models, and jobs in which groups are used wrongly."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import dearmpi
from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from tests.forks import forked
from tests.job import Ended, run_job

ROOT = Path(dearmpi.__file__).parents[1]

SCRIPT = """
import sys
import dearmpi
from dearmpi import StallLimits

how = sys.argv[1]
comm = None
if how == "communicator":
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2)
world = dearmpi.connect(stall_limits=StallLimits(5, 40), comm=comm)
if how == "communicator":
    told = " ".join([f"{world.rank} of", *world.all_gather_text(str(MPI.COMM_WORLD.rank))])
    told = MPI.COMM_WORLD.gather(told)  # lines of several ranks may mix
    if MPI.COMM_WORLD.rank == 0:
        print(*told, sep=chr(10), flush=True)
    sys.exit()
first, second = world.group([0, 1]), world.split(world.rank // 2)
if how == "order" and world.rank < 2:
    for group in (first, second) if world.rank else (second, first):
        group.barrier()
if how == "member" and world.rank == 1:
    raise ValueError("a wrong turn")
second.barrier()
world.barrier()
"""


def run(how: str, folder: Path) -> Ended:
    path = folder / "script.py"
    path.write_text(SCRIPT)
    return run_job(
        forked([sys.executable, path, how]),
        ranks=4,
        limit_s=90.0,
        environment={"PYTHONPATH": str(ROOT)},
    )


@pytest.mark.ranks(4)
def test_models_train_on_the_rows_and_the_columns_of_a_grid(world: World) -> None:
    groups = world.split(world.rank // 2), world.split(world.rank % 2)
    models = [nn.Linear(40, 30, bias=False).double() for _ in groups]
    optimizers = []
    for model, group in zip(models, groups, strict=True):
        assert group is not None
        nn.init.zeros_(model.weight)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizers.append(DistributedOptimizer(inner, model, world=group))
    for _ in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            (model(torch.ones(1, 40, dtype=torch.float64)).sum() * (1 + world.rank)).backward()
        for optimizer in optimizers:
            optimizer.step()
    for optimizer in optimizers:
        optimizer.close()
    means = 1.5 + 2 * (world.rank // 2), 2.0 + world.rank % 2
    for model, mean in zip(models, means, strict=True):
        expected = torch.full((30, 40), -5 * mean, dtype=torch.float64)
        assert torch.equal(model.weight, expected)


@pytest.mark.ranks(1)
def test_groups_in_another_order_on_some_ranks_end_the_job(tmp_path: Path) -> None:
    ended = run("order", tmp_path)
    assert ended.returncode == 8
    assert "ranks-out-of-step" in ended.output and "group 1 of ranks 0-1" in ended.output


@pytest.mark.ranks(1)
def test_a_member_that_fails_ends_the_whole_job(tmp_path: Path) -> None:
    ended = run("member", tmp_path)
    assert ended.returncode == 1
    assert "ValueError: a wrong turn" in ended.output


@pytest.mark.ranks(1)
def test_a_communicator_of_ones_own_is_a_world(tmp_path: Path) -> None:
    ended = run("communicator", tmp_path)
    assert ended.returncode == 0, ended.output
    found = sorted(line for line in ended.output.splitlines() if " of " in line)
    assert found == ["0 of 0 2", "0 of 1 3", "1 of 0 2", "1 of 1 3"]
