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
import time
import torch
from torch import nn
import dearmpi

folder, num_steps, stop_at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
every_s = float(sys.argv[4]) or None
world = dearmpi.connect(stall_limits=dearmpi.StallLimits(5, 40))
row, column = world.split(world.rank // 2), world.split(world.rank % 2)
torch.manual_seed(world.rank % 2)
model = nn.Linear(6, 4).double()
inner = torch.optim.AdamW(model.parameters(), lr=0.05)
optimizer = dearmpi.DistributedOptimizer(inner, model, world=column)
settings = {"save_every_s": every_s, "keep": 1000}
with dearmpi.Run(folder.format(world.rank % 2), model, optimizer, **settings) as run:
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
        if run.step == 3 and not every_s:
            run.save()
        if every_s:
            time.sleep(every_s / 4 if world.rank == 2 else 0)
            saved = [f"{folder.format(column)}/latest" for column in range(2)]
            if stop_at and world.rank == 1 and all(map(os.path.exists, saved)):
                os.kill(os.getpid(), signal.SIGKILL)
        if run.step == stop_at and world.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        if run.should_stop:
            break
if run.step == num_steps:  # else __exit__ has ended the program
    sums = world.all_gather_text(f"{sum(p.sum().item() for p in model.parameters()):.14e}")
    if world.is_root:
        print("from", first, "sums", *sums, flush=True)
"""


def run(
    folder: Path, *, to: int = 9, stop_at: int = 0, name: str = "part{}", every_s: float = 0.0
) -> Ended:
    script = folder.parent / "script.py"
    script.write_text(SCRIPT)
    numbers = [str(number) for number in (to, stop_at, every_s)]
    command: list[str | Path] = [sys.executable, script, folder / name, *numbers]
    return run_job(forked(command), ranks=4, limit_s=90.0, environment={"PYTHONPATH": str(ROOT)})


def saved(folder: Path) -> list[list[str]]:
    parts = [folder / f"part{column}" / "checkpoints" for column in range(2)]
    return [sorted(path.name for path in part.iterdir()) for part in parts]


def complete(folder: Path) -> list[list[int]]:
    """The steps of the checkpoints of both groups, without those that were being written."""
    return [
        [int(name.removeprefix("step-")) for name in names if name.startswith("step-")]
        for names in saved(folder)
    ]


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


def test_checkpoints_by_the_clock_are_of_the_same_steps_on_all_groups(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    killed = run(parts, to=1_000_000, stop_at=1, every_s=0.1)  # after the first checkpoint
    assert killed.returncode not in (0, 124), killed.output
    newest = min(steps[-1] for steps in complete(parts))
    to = newest + 9

    resumed = run(parts, to=to, every_s=0.1)
    assert resumed.returncode == 0 and f"from {newest} sums" in resumed.output, resumed.output
    first, second = complete(parts)
    assert first == second and first[-1] == to and len(first) >= 3  # 9 steps take 0.2 s or more

    ended = run(whole, to=to)
    assert ended.returncode == 0, ended.output
    assert resumed.output.partition("sums")[2] == ended.output.partition("sums")[2]


def test_a_folder_that_two_groups_share_is_refused_on_all_ranks(tmp_path: Path) -> None:
    refused = run(tmp_path, name="same")
    assert refused.returncode == 2, refused.output
    assert "the folder of ranks [0, 2] and of ranks [1, 3]" in refused.output
