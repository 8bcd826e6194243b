"""What do sparse gradients cost in accuracy?

The grid of "Sparse Communication for Training Deep Networks" (arXiv 2009.09271): which coordinates
ranks send (shared by chance, shared by weight, each its own largest), how many, and whether what
they have not sent is kept. A second grid: the same or own coordinates, of which scope. All
parameters are one bucket, so that the scope "bucket" is the whole model.

Plain SGD and equal steps for all, with the engine's codecs, on real data. The ranks take turns in
one process, so that nothing depends on the machine. Digits are learned by a network of two layers,
bytes by a small transformer.

Usage: python benchmarks/sparsity.py [densities | axes] [DENSITY ...] [TASK:STEPS:RATE:LOSS ...]
by default 0.1 0.01 0.001 digits:2500:0.03:0.4 bytes-lm:80:0.3:3; the grid of axes is of one density
Prints loss and, for digits, accuracy on held-out data; steps until the mean loss of 20 is below
LOSS; and the MB of gradients that a rank has sent by then, with a ring.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from typing import Any, get_args

import torch
from torch import Tensor, nn

from dearmpi.comm.algorithms.registry import CollectiveAlgorithms
from dearmpi.comm.api.collectives import Request
from dearmpi.config import SPARSE, Coordinates, EngineConfig, Feedback, Scope
from dearmpi.engine.bucket import bucket
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.bucket.buffers import Arena
from dearmpi.engine.codec.choice import choose_codecs
from dearmpi.plan.data.layout import build_layout, spec_of
from dearmpi.train.tasks.bytes_lm import build_bytes_lm
from dearmpi.train.tasks.image_models import build_digits
from dearmpi.train.tasks.task import Task, collate

CHOICES = ("digits:2500:0.03:0.4", "bytes-lm:80:0.3:3")
DENSITIES = (0.1, 0.01, 0.001)
RANKS = 2
SAMPLES = 32  # of a rank in each step
EVALUATED = 256
AVERAGED = 20

Finish = Callable[[list[tuple[Tensor, ...]]], None]


class Posted(Request):
    """An operation of all ranks, complete once the last has posted it."""

    def __init__(self, finish: Finish) -> None:
        self.buffers: list[tuple[Tensor, ...]] = []
        self._finish = finish

    def post(self, *buffers: Tensor) -> None:
        """One rank's part; ranks post in order."""
        self.buffers.append(buffers)
        if len(self.buffers) == RANKS:
            self._finish(self.buffers)

    def test(self) -> bool:
        return len(self.buffers) == RANKS


class TurnCollectives:
    """One rank's. All ranks post operations in the same order, in one thread."""

    def __init__(self, rank: int, operations: list[Posted]) -> None:
        """``operations``: of all ranks."""
        self.rank, self._operations, self._num_posted = rank, operations, 0

    def reserve(self) -> Any:
        return nullcontext()

    def start_reduce_scatter(self, buffer: Tensor, *_: Any, **__: Any) -> Request:
        return self._post(_reduce_scatter, buffer)

    def start_all_gather(self, buffer: Tensor, *_: Any, **__: Any) -> Request:
        return self._post(_all_gather, buffer)

    def start_exchange(self, sent: Tensor, arrived: Tensor) -> Request:
        return self._post(_exchange, sent, arrived)

    def _post(self, finish: Finish, *buffers: Tensor) -> Request:
        if self._num_posted == len(self._operations):
            self._operations.append(Posted(finish))
        operation = self._operations[self._num_posted]
        self._num_posted += 1
        operation.post(*buffers)
        return operation


def _reduce_scatter(posted: list[tuple[Tensor, ...]]) -> None:
    total = torch.stack([buffer for (buffer,) in posted]).sum(0).view(RANKS, -1)
    for rank, (buffer,) in enumerate(posted):
        buffer.view(RANKS, -1)[rank] = total[rank]


def _all_gather(posted: list[tuple[Tensor, ...]]) -> None:
    whole = [buffer.view(RANKS, -1)[rank] for rank, (buffer,) in enumerate(posted)]
    gathered = torch.stack(whole).view(-1)
    for (buffer,) in posted:
        buffer.copy_(gathered)


def _exchange(posted: list[tuple[Tensor, ...]]) -> None:
    for rank, (_, arrived) in enumerate(posted):
        for other, (sent, _) in enumerate(posted):
            arrived.view(RANKS, -1)[other] = sent.view(RANKS, -1)[rank]


class Reducer:
    """The codecs of all ranks, for gradients of parameters with ``numels`` elements."""

    def __init__(self, numels: list[int], config: EngineConfig) -> None:
        specs = [
            spec_of(nn.Parameter(torch.zeros(num)), str(slot)) for slot, num in enumerate(numels)
        ]
        layout = build_layout([specs], RANKS)
        self._places = layout.buckets[0].placements
        params = [nn.Parameter(torch.zeros(numels[int(one.spec.name)])) for one in self._places]
        self._buckets = [
            BucketRuntime(
                layout.buckets[0],
                params,
                rank=rank,
                gradients=Arena(layout),
                parameters=Arena(layout),
            )
            for rank in range(RANKS)
        ]
        ring = CollectiveAlgorithms("ring")
        self._codecs = [choose_codecs([one], ring, config).reduce[0] for one in self._buckets]
        self._num_steps = 0
        self.sent_bytes = self._codecs[0].sent_bytes

    def mean(self, gradients: list[tuple[Tensor, ...]]) -> dict[int, Tensor]:
        """What the owners get of each parameter's ``gradients``, by rank."""
        operations: list[Posted] = []
        requests = []
        for rank, (one, codec) in enumerate(zip(self._buckets, self._codecs, strict=True)):
            for place, view in zip(self._places, one.gradients.views, strict=True):
                view.copy_(gradients[rank][int(place.spec.name)].reshape(-1))
            turns: Any = TurnCollectives(rank, operations)
            requests.append(codec.start(one, turns, self._num_steps))
        while requests:
            requests = [request for request in requests if not request.test()]
        self._num_steps += 1
        shards = [one.gradients.shard.clone() for one in self._buckets]
        for one, codec in zip(self._buckets, self._codecs, strict=True):
            codec.commit(one, is_final=True)
        whole = torch.cat(shards).div_(RANKS)
        return {int(one.spec.name): whole[one.start : one.stop] for one in self._places}


def build(name: str) -> Task:
    """The task, small."""
    torch.manual_seed(0)
    if name == "digits":
        return build_digits({})
    return build_bytes_lm({"width": "64", "depth": "2", "heads": "2", "max_bytes": "1000000"})


def model_of(task: Task) -> nn.Module:
    """With the same numbers whenever it is made."""
    torch.manual_seed(0)
    if task.name == "digits":
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return deepcopy(task.model)


def grid(densities: Sequence[float]) -> Iterator[EngineConfig]:
    """Dense, then each way with each density, with and without error feedback."""
    yield EngineConfig()
    feedback: Feedback
    for density in densities:
        for compress in SPARSE:
            for feedback in get_args(Feedback):
                yield EngineConfig(
                    compress=compress,  # type: ignore[arg-type]
                    density=density,
                    error_feedback=feedback,
                )


def axes(densities: Sequence[float]) -> Iterator[EngineConfig]:
    """Each kind with the same and with own coordinates, of the whole model or of each parameter; of
    the density nearest to 0.01.
    """
    density = min(densities, key=lambda one: abs(one - 0.01))
    coordinates: Coordinates
    scopes: tuple[Scope, ...] = ("bucket", "parameter")
    for compress in SPARSE:
        for coordinates in get_args(Coordinates):
            for scope in scopes:
                yield EngineConfig(
                    compress=compress,  # type: ignore[arg-type]
                    density=density,
                    coordinates=coordinates,
                    scope=scope,
                )


GRIDS = {"densities": grid, "axes": axes}


def train(task: Task, num_steps: int, rate: float, goal: float, config: EngineConfig) -> str:
    """The row of one way."""
    model = model_of(task)
    params = list(model.parameters())
    numels = [param.numel() for param in params]
    reducer = Reducer(numels, config)
    losses: deque[float] = deque(maxlen=AVERAGED)
    reached = 0
    for step in range(num_steps):
        gradients = []
        for rank in range(RANKS):
            generator = torch.Generator().manual_seed(step * RANKS + rank)
            chosen = torch.randint(len(task.train_data), (SAMPLES,), generator=generator)
            batch = collate(task, [task.train_data[int(index)] for index in chosen])
            loss = task.loss(model, batch)
            gradients.append(torch.autograd.grad(loss, params))
            losses.append(float(loss.detach()))
        with torch.no_grad():
            for slot, change in reducer.mean(gradients).items():
                params[slot].sub_(change.view_as(params[slot]), alpha=rate)
        if not reached and len(losses) == AVERAGED and sum(losses) / AVERAGED < goal:
            reached = step + 1
    held_out, accuracy = evaluate(task, model)
    words = [config.compress, str(config.density or ""), config.error_feedback or ""]
    words += [config.coordinates or "", config.scope or ""]
    words += [f"{held_out:.3f}", "" if math.isnan(accuracy) else f"{accuracy:.3f}"]
    words += [f"{reached:,}", f"{reached * reducer.sent_bytes / 1e6:.2f}"] if reached else ["", ""]
    return f"| {' | '.join(words)} |"


def evaluate(task: Task, model: nn.Module) -> tuple[float, float]:
    """Mean loss and accuracy on held-out samples; NaN where there is none."""
    assert task.eval_data is not None
    num = min(EVALUATED, len(task.eval_data))
    batch = collate(task, [task.eval_data[index] for index in range(num)])
    with torch.no_grad():
        loss = float(task.loss(model, batch))
        accuracy = task.metrics(model, batch)["accuracy"] / num if task.metrics else math.nan
    return loss, accuracy


def main() -> None:
    """A table for each task."""
    torch.set_num_threads(1)
    bucket._LEAST_COMPRESSED = 1  # small networks learn fast, and are compressed all the same
    grids = [name for name in GRIDS if name in sys.argv[1:]] or list(GRIDS)
    given = [one for one in sys.argv[1:] if one not in GRIDS]
    densities = [float(one) for one in given if ":" not in one] or DENSITIES
    for choice in [one for one in given if ":" in one] or CHOICES:
        name, steps, rate, goal = choice.split(":")
        task, begin_s = build(name), time.perf_counter()
        print(f"\n{name}: {steps} steps at a rate of {rate}, loss below {goal}\n")
        print("| compress | density | rest | coordinates | scope | loss | accuracy | steps | MB |")
        print("|---|---|---|---|---|---|---|---|---|", flush=True)
        for config in (one for name in grids for one in GRIDS[name](densities)):
            print(train(task, int(steps), float(rate), float(goal), config), flush=True)
        print(f"\n{time.perf_counter() - begin_s:.0f} s")


if __name__ == "__main__":
    main()
