"""A task of a few points that goes wrong on one rank if asked, and a run of it on all ranks."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from dearmpi.cli.endings import rank_log
from dearmpi.cli.run_session import run_session
from dearmpi.comm.world import World
from dearmpi.train import checkpoint
from dearmpi.train.ranks.stop import StopRequest
from dearmpi.train.settings.sources import make_source

NUM_SAMPLES, BATCH_SIZE = 43, 10  # the last of five batches holds 3: some ranks may have none
TASK = f"""
import signal
from pathlib import Path

import torch
from torch import nn

import dearmpi
from dearmpi.train.tasks.task import Task


class Points:
    def __init__(self, count):
        generator = torch.Generator().manual_seed(count)
        self.inputs = torch.randn(count, 6, generator=generator)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.inputs[index].sum().sin().reshape(1)


class Stream(torch.utils.data.IterableDataset):
    # In order, with a state of its own if asked; each pass begins elsewhere.

    def __init__(self, count, skips):
        self.points, self.first, self.next = Points(count), 0, 0
        if skips:
            self.state_dict = lambda: {{"next": self.next}}
            self.load_state_dict = lambda state: setattr(self, "next", state["next"])

    def set_epoch(self, epoch):
        self.first, self.next = epoch, 0

    def __iter__(self):
        while self.next < len(self.points):
            self.next += 1
            yield self.points[(self.first + self.next - 1) % len(self.points)]


def make_model(dropout):
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 8), nn.Tanh(),
        nn.Linear(8, 1),
    )


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs):
        return inputs + self.dropout(self.last(self.first(inputs).tanh()))


class Blocks(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))

    def forward(self, inputs):
        inputs = self.first(inputs)
        for block in self.blocks:
            inputs = block(inputs)
        return self.last(inputs)


def make(options):
    # What goes wrong goes wrong on the last rank.
    world = dearmpi.connect()
    wrong = options.get("wrong", "")
    if world.rank != world.size - 1:
        wrong = ""
    stopped = Path(__file__).with_name("stopped")
    if wrong == "build":
        raise ValueError("this rank has no memory")
    steps, scale = [0], float(options.get("scale", "1"))

    def loss(model, batch):
        steps[0] += model.training
        value = scale * nn.functional.mse_loss(model(batch[0]), batch[1])
        if model.training and steps[0] == 3:
            if wrong == "nan":
                value = value * float("nan")
            if wrong == "overflow":  # of the gradient in fp16 alone
                value = value * 1e20
            if wrong == "stop" and not stopped.exists():
                stopped.touch()
                signal.raise_signal(signal.SIGTERM)
        return value

    data = options.get("data", "points")
    kind = Blocks if options.get("model") == "blocks" else make_model
    return Task(
        "points",
        kind(float(options.get("dropout", "0"))),
        Points({NUM_SAMPLES}) if data == "points" else Stream({NUM_SAMPLES}, data == "skipping"),
        loss,
        eval_data=Points(11),
        metrics=lambda model, batch: {{"ones": float(len(batch[0]))}},
        summarize=lambda model: ["the closing line"],
    )
"""


def run(world: World, folder: Path, name: str, **given: object) -> int:
    values = {
        "task": f"{folder / 'points.py'}:make",
        "run_folder": str(folder / "runs"),
        "name": name,
        "batch_size": BATCH_SIZE,
        "optimizer": "SGD",
        "lr": 0.2,
        "momentum": 0.9,
        "max_steps": 12,
        "precision": "fp64",
        "bucket_cap_mb": 0.0005,
        **given,
    }
    with rank_log(speaks=world.is_root) as log, StopRequest() as stop:
        layer = make_source("flag", values)
        return run_session(world, [layer], stop=stop, log=log, command=["dear-train", "run"])


def saved_model(folder: Path, name: str, step: int) -> dict[str, Tensor]:
    return checkpoint.load(folder / "runs" / name / "checkpoints" / f"step-{step:08d}").model
