"""Groups of ranks over MPI: a grid of two models, and jobs in which groups are used wrongly."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import dearmpi
from dearmpi import DistributedOptimizer
from dearmpi.comm.backends import mpi
from dearmpi.comm.world import World
from tests.forks import forked
from tests.job import Ended, run_job

ROOT = Path(dearmpi.__file__).parents[1]

SCRIPT = """
import os
import sys
import dearmpi
from dearmpi import StallLimits

how = sys.argv[1]
comm = None
if how.startswith("comm"):
    from mpi4py import MPI

    job = MPI.COMM_WORLD
    parts = job.Split(job.rank % 2)
    if how == "comm of some":
        comm = parts
    elif how == "comm inter":
        comm = parts.Create_intercomm(0, job, 1 - job.rank % 2, 5)
    elif how == "comm freed":
        comm = job.Dup()
        if job.rank == 1:
            comm.Free()
    elif how == "comm differs":
        comm = job if job.rank == 1 else parts
    elif how == "comm on one":
        comm = parts if job.rank == 1 else None
    elif how == "comm self":
        comm = MPI.COMM_SELF
    elif how == "comm of threes":
        comm = job.Split(job.rank == 3)
    elif how == "comm twins":
        comm = [job.Dup(), job.Dup()][job.rank == 3]
    elif how in ("comm crossed", "comm, then none"):
        pairs = [pair for pair in ([0, 1], [1, 2]) if job.rank in pair]
        made = [job.Create_group(job.group.Incl(pair), pair[0]) for pair in pairs]
        comm = made[0] if made else MPI.COMM_SELF
        if job.rank > 1:
            job.recv(source=1)  # which is connected
            comm = comm if how == "comm crossed" else None
world = dearmpi.connect(stall_limits=StallLimits(5, 40), comm=comm)
if how == "comm of some":
    told = " ".join([f"{world.rank} of", *world.all_gather_text(str(MPI.COMM_WORLD.rank))])
    told = MPI.COMM_WORLD.gather(told)  # lines of several ranks may mix
    if MPI.COMM_WORLD.rank == 0:
        print(*told, sep=chr(10), flush=True)
    sys.exit()
if how in ("comm crossed", "comm, then none") and job.rank < 2:
    for rank in (2, 3) if job.rank else ():
        job.send(None, rank)
    while True:
        world.barrier()
if how.startswith("comm"):
    sys.exit()  # ranks that have a world; the others wait
if how == "made by some" and world.rank != 2:
    world.group([0, 1])
if how == "made of none":
    world.group([0, 9] if world.rank == 1 else [0, 1])
if how == "circle":
    groups = [world.group([rank, (rank + 1) % 3]) for rank in range(3)]
    if world.rank < 3:
        groups[world.rank].barrier()
    world.barrier()
if how == "optimizers":
    import torch

    groups = [world.group([rank, (rank + 1) % 3]) for rank in range(3)]
    trained = {}
    for number, group in enumerate(groups):
        if group is not None:
            model = torch.nn.Linear(4, 3)
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = dearmpi.DistributedOptimizer(inner, model, world=group)
            trained[number] = model, optimizer
    for number in sorted(trained, key=lambda number: (number - world.rank) % 3):
        model, optimizer = trained[number]
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.synchronize()
    world.barrier()
if how == "none for a group":
    import torch

    model, group = torch.nn.Linear(4, 3), world.group([0, 1])
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = dearmpi.DistributedOptimizer(inner, model, world=group)
    sys.exit()
first, second = world.group([0, 1]), world.split(world.rank // 2)
if how == "order" and world.rank < 2:
    for group in (first, second) if world.rank else (second, first):
        group.barrier()
if how == "closed":
    world.close()
for step in range(10_000):
    if world.rank == 1 and step == 20:
        if how == "raises":
            raise ValueError("a wrong turn")
        if how == "killed":
            os.kill(os.getpid(), 9)
        if how == "exits":
            os._exit(5)
        if how == "leaves":
            sys.exit(3)
    second.barrier()
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


@dataclass(frozen=True, slots=True)
class Wrong:
    """How a job of four ranks goes wrong.

    status: its exit code, to which Open MPI's launcher adds 128 where it is a signal; None: one
    that the launcher makes of several. told: what it prints.
    """

    how: str
    status: int | None
    told: tuple[str, ...]


WRONGS = [
    Wrong("order", 8, ("ranks-out-of-step", "group 1 of ranks 0-1")),
    Wrong("circle", 8, ("ranks-out-of-step", "3 ranks wait for each other", "in one order")),
    Wrong("optimizers", 8, ("ranks-out-of-step", "3 ranks wait for each other", "(training in")),
    Wrong("none for a group", 8, ("DistributedOptimizer()", "Make it only on ranks that have a")),
    Wrong("raises", 1, ("ValueError: a wrong turn",)),
    Wrong("killed", 9, ()),
    Wrong("exits", None, ()),
    Wrong("leaves", 3, ("ranks-out-of-step", "rank 1 has ended with exit status 3")),
    Wrong("closed", 8, ("world-closed", "before world.leave()")),
    Wrong("made by some", 4, ("ranks-in-different-calls", "rank 2", "world.group([0, 1])")),
    Wrong("made of none", 4, ("ranks-in-different-calls", "world.group([0, 9])")),
    Wrong("comm inter", 2, ("wrong-type", "an inter-communicator", "Split()")),
    Wrong("comm freed", 2, ("[rank 1 on", "wrong-type", "MPI.COMM_NULL", "Split()")),
    Wrong("comm differs", 4, ("MPI.COMM_WORLD, as without", "rank 3 gives it", "ranks [1, 3]")),
    Wrong("comm on one", 4, ("ranks-in-different-calls", "rank 1 gives it", "ranks [1, 3]")),
    Wrong("comm crossed", 4, ("[rank 2 on", "job's ranks [1, 2], and rank 1 gives", "[0, 1]")),
    Wrong("comm, then none", 4, ("MPI.COMM_WORLD, as without comm, and rank", "ranks [0, 1]")),
    Wrong("comm twins", 4, ("all 4 ranks have given", "ranks [0, 1, 2, 3], but not the same")),
]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("wrong", WRONGS, ids=lambda wrong: wrong.how.replace(" ", "-"))
def test_a_job_that_goes_wrong_ends_on_all_ranks_with_what_to_do(
    wrong: Wrong, tmp_path: Path
) -> None:
    """Long before the limit of a wait, where the others wait for what can never come."""
    ended = run(wrong.how, tmp_path)
    assert ended.returncode not in (0, 124), ended.output
    status = wrong.status or ended.returncode
    if wrong.how == "killed" and mpi.describe().startswith("Open MPI"):
        status += 128
    assert ended.returncode == status, ended.output
    for text in wrong.told:
        assert text in ended.output


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("how", "rank"), [("comm self", 0), ("comm of threes", 3)])
def test_a_rank_that_trains_alone_in_a_job_of_several_is_named_once(
    how: str, rank: int, tmp_path: Path
) -> None:
    ended = run(how, tmp_path)
    assert ended.returncode == 0, ended.output
    told = [line for line in ended.output.splitlines() if "comm has this rank alone" in line]
    assert len(told) == 1 and told[0].startswith(f"[rank {rank} on "), ended.output


@pytest.mark.ranks(1)
def test_a_communicator_of_ones_own_is_a_world(tmp_path: Path) -> None:
    ended = run("comm of some", tmp_path)
    assert ended.returncode == 0, ended.output
    found = sorted(line for line in ended.output.splitlines() if " of " in line)
    assert found == ["0 of 0 2", "0 of 1 3", "1 of 0 2", "1 of 1 3"]
