"""``dearmpi.Run`` on a grid of groups: all of them stop, save and resume at the same step."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import dearmpi
from tests.forks import forked
from tests.job import Ended, run_job

ROOT = Path(dearmpi.__file__).parents[1]

SCRIPT = """
import os
import signal
import sys
import torch
from torch import nn
import dearmpi

folder, num_steps, stop_at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
world = dearmpi.connect(stall_limits=dearmpi.StallLimits(5, 40))
row, column = world.split(world.rank // 2), world.split(world.rank % 2)
torch.manual_seed(world.rank % 2)
model = nn.Linear(6, 4).double()
inner = torch.optim.AdamW(model.parameters(), lr=0.05)
optimizer = dearmpi.DistributedOptimizer(inner, model, world=column)
with dearmpi.Run(folder.format(world.rank % 2), model, optimizer) as run:
    first = run.resume()
    while run.step < num_steps:
        generator = torch.Generator().manual_seed(100 * run.step + column.rank)
        inputs = torch.randn(5, 6, dtype=torch.float64, generator=generator)
        partial = model(inputs).square().mean()
        loss = partial * (1 + row.mean(partial.item()))  # of both models of a row, in each step
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss)
        if run.step == 3:
            run.save()
        if run.step == stop_at and world.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        if run.should_stop:
            break
if run.step == num_steps:  # else __exit__ has ended the program
    sums = world.all_gather_text(f"{sum(p.sum().item() for p in model.parameters()):.14e}")
    if world.is_root:
        print("from", first, "sums", *sums, flush=True)
"""


def run(folder: Path, *, to: int = 9, stop_at: int = 0, name: str = "part{}") -> Ended:
    script = folder.parent / "script.py"
    script.write_text(SCRIPT)
    command: list[str | Path] = [sys.executable, script, folder / name, str(to), str(stop_at)]
    return run_job(forked(command), ranks=4, limit_s=90.0, environment={"PYTHONPATH": str(ROOT)})


def saved(folder: Path) -> list[list[str]]:
    parts = [folder / f"part{column}" / "checkpoints" for column in range(2)]
    return [sorted(path.name for path in part.iterdir()) for part in parts]


def test_groups_stop_together_and_resume_at_a_step_that_all_have(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ended = run(whole)
    assert ended.returncode == 0 and "from 0 sums" in ended.output, ended.output
    sums = ended.output.partition("sums")[2].split()[:4]
    assert sums[:2] == sums[2:] and sums[0] != sums[1]

    stopped = run(parts, to=1_000_000, stop_at=5)  # asked of a rank of one group
    assert stopped.returncode == 75, stopped.output
    first, second = saved(parts)
    assert first == second and len(first) == 2 and first[0] == "step-00000003"

    # A job that is killed may have completed the newest checkpoint of one group alone.
    shutil.rmtree(parts / "part1" / "checkpoints" / second[1])
    resumed = run(parts)
    assert resumed.returncode == 0 and "from 3 sums" in resumed.output, resumed.output
    assert resumed.output.partition("sums")[2].split()[:4] == sums

    for name in saved(parts)[1]:
        shutil.rmtree(parts / "part1" / "checkpoints" / name)
    refused = run(parts)
    assert refused.returncode == 6 and "part1 has none" in refused.output, refused.output


def test_a_folder_that_two_groups_share_is_refused_on_all_ranks(tmp_path: Path) -> None:
    refused = run(tmp_path, name="same")
    assert refused.returncode == 2, refused.output
    assert "the folder of ranks [0, 2] and of ranks [1, 3]" in refused.output
