"""What does saving checkpoints cost the steps that go on meanwhile?

Usage: mpirun -n 2 python benchmarks/saving.py [HIDDEN] [INTERVAL] [ROUNDS]

Trains a model of two layers of HIDDEN x HIDDEN with AdamW, in turns without checkpoints and with
one every INTERVAL steps, all of them on the disk of the current folder. Prints seconds per step,
and of the steps at which a checkpoint began.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dearmpi
from dearmpi.comm.world import World
from dearmpi.train import checkpoint
from dearmpi.train.loop.job import Job, prepare
from dearmpi.train.loop.optimizers import choose_optimizer
from dearmpi.train.loop.trainer import Trainer
from dearmpi.train.metrics.metrics import MetricsRow
from dearmpi.train.ranks.random_state import seed_all
from dearmpi.train.settings.settings import RunSettings
from dearmpi.train.tasks.task import Task

_NUM_INTERVALS = 2
_BATCH_SIZE = 256


class Stopwatch:
    """Listens to the trainer; the time of each step, with what came between it and the next."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def stepped(self, step: int) -> None:
        self.times_s.append(time.perf_counter())

    def measured(self, row: MetricsRow) -> None:
        pass

    def saved(self, checkpoint: Path | None) -> None:
        pass

    def chose_interval(self, save_time_s: float, checkpoint_s: float) -> None:
        pass

    @property
    def seconds(self) -> list[float]:
        """From each step's end to the next one's."""
        return [b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)]


def make_job(world: World, hidden: int, interval: int, num_steps: int) -> Job:
    """A run of ``num_steps``."""
    seed_all(0)
    sample = (torch.randn(hidden), torch.randn(1))
    layers = [nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(hidden, 1))
    settings = RunSettings(
        max_steps=num_steps,
        checkpoint_interval=interval,
        batch_size=_BATCH_SIZE,
        log_interval=num_steps,
        lr=1e-4,
    )
    task = Task("squares", model, [sample] * _BATCH_SIZE, squared_error)
    return prepare(world, settings, task, choice=choose_optimizer(settings))


def squared_error(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def main() -> None:
    hidden, interval, num_rounds = map(
        int, [*sys.argv[1:], *("1536", "20", "3")[len(sys.argv) - 1 :]]
    )
    torch.set_num_threads(1)
    world = dearmpi.connect()
    made = tempfile.mkdtemp(prefix="saving-", dir=".") if world.is_root else None
    folder = Path(world.broadcast_text(made))
    seconds: dict[int, list[float]] = {0: [], interval: []}
    num_bytes = 0
    for _ in range(num_rounds):
        for every, times in seconds.items():
            watch = Stopwatch()
            job = make_job(world, hidden, every, _NUM_INTERVALS * interval + 1)
            Trainer(job, folder, listener=watch).run()
            times += watch.seconds[interval - 1 : -1]  # from the first checkpoint on
            if world.is_root:
                latest = checkpoint.find_latest(folder)
                assert latest is not None
                num_bytes = sum(path.stat().st_size for path in latest.iterdir())
                shutil.rmtree(folder / "checkpoints")
                (folder / "latest").unlink()
            world.barrier()
    if world.is_root:
        shutil.rmtree(folder)
        without, with_saving = (statistics.fmean(times) for times in seconds.values())
        begun = seconds[interval][::interval]
        print(f"{num_bytes / 1e6:.0f} MB every {interval} steps, {world.size} ranks")
        print(f"mean step without saving {without * 1e3:.1f} ms, median "
              f"{statistics.median(seconds[0]) * 1e3:.1f}")  # fmt: skip
        print(f"mean step with saving    {with_saving * 1e3:.1f} ms, median "
              f"{statistics.median(seconds[interval]) * 1e3:.1f} "
              f"({with_saving / without - 1:+.1%} in the mean)")  # fmt: skip
        print(f"the step at which one begins: median {statistics.median(begun) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
