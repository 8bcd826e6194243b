"""How many exchanges does CoDA take to a good area under the ROC curve?

digits, 0-4 against 5-9, of whose training samples a tenth is positive, and one hidden layer. Ranks
have samples of all digits, or each its own digits. "dense" is SGD on a cross-entropy, by averaged
gradients. CoDA with `sync_every` 1 exchanges in each step as well.

Usage: mpirun -n 4 python benchmarks/auc_rounds.py [TARGET [STEPS]]
By default an area of 0.98 on held-out samples, and 384 steps; medians over three seeds. Prints
steps, exchanges, and seconds of training until the target, and the area after all steps. The shared
values are evaluated every 8 steps, which is not timed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

import dearmpi
from dearmpi import (
    AucLoss,
    BalancedBatches,
    Codasca,
    DistributedOptimizer,
    LocalOptimizer,
    PrimalDual,
    World,
)
from dearmpi.local.area import area_under
from dearmpi.train.tasks.auc import Scorer
from dearmpi.train.tasks.logistic import read_table

SEEDS = range(3)
BATCH, EVALUATE_EVERY = 16, 8
LR, DENSE_LR = 1.0, 0.3
WAYS = (("dense", 1), ("coda", 1), ("coda", 8), ("coda", 32), ("codasca", 8), ("codasca", 32))


@dataclass(frozen=True)
class Data:
    """x, y, digits: to train with; test_x, test_y: held out."""

    x: Tensor
    y: Tensor
    digits: Tensor
    test_x: Tensor
    test_y: Tensor


@dataclass(frozen=True)
class Outcome:
    """steps, seconds: until the target, infinite if it was not reached; the area at the end."""

    steps: float
    seconds: float
    area: float


@cache
def load() -> Data:
    """A fifth is held out; of 0-4 one in nine is kept to train with."""
    x, signs, digits = read_table("digits")
    y, places = (signs > 0).long(), torch.arange(len(x))
    test = places % 5 == 0
    kept = ~test & ((y == 0) | (places % 9 == 1))
    return Data(x[kept].float(), y[kept], digits[kept], x[test].float(), y[test])


def batches_of(world: World, seed: int, *, by_digit: bool) -> Iterator[list[int]]:
    """Without end: places of samples, half of each batch positive."""
    data = load()
    if by_digit:  # 0 and 5, 1 and 6, and so on go together, so that a rank has both classes
        own = (data.digits % 5 % world.size == world.rank).nonzero()[:, 0]
        batches = BalancedBatches(data.y[own], BATCH, seed=seed)
    else:
        own = torch.arange(len(data.y))
        batches = BalancedBatches(data.y, BATCH, rank=world.rank, size=world.size, seed=seed)
    while True:
        for batch in batches:
            yield own[batch].tolist()


def optimizer_of(model: Scorer, way: str, every: int, num_steps: int, world: World) -> Any:
    if way == "dense":
        sgd = torch.optim.SGD(model.layers.parameters(), lr=DENSE_LR, momentum=0.9)
        return DistributedOptimizer(sgd, model.layers, world=world)
    inner = PrimalDual(model.parameters(), lr=LR, stage_steps=num_steps // 64 * 32)
    if way == "codasca":
        return Codasca(inner, model, sync_every=every, world=world)
    return LocalOptimizer.average(inner, model, sync_every=every, world=world)


def area_of(model: Scorer, optimizer: Any) -> float:
    """On held-out samples, of what ranks share (collective)."""
    data = load()
    with torch.no_grad():
        if isinstance(optimizer, DistributedOptimizer):
            optimizer.synchronize()
            return area_under(model.score(data.test_x), data.test_y)
        with optimizer.at_anchor():
            return area_under(model.score(data.test_x), data.test_y)


def train(
    world: World, way: str, every: int, seed: int, *, by_digit: bool, target: float, num_steps: int
) -> Outcome:
    torch.manual_seed(seed)
    data = load()
    model = Scorer(data.x.shape[1], 32, AucLoss(0.5))
    optimizer = optimizer_of(model, way, every, num_steps, world)
    batches = batches_of(world, seed, by_digit=by_digit)
    steps = seconds = float("inf")
    area = trained_s = 0.0
    for step in range(EVALUATE_EVERY, num_steps + 1, EVALUATE_EVERY):
        world.barrier()
        begun_s = time.perf_counter()
        for _ in range(EVALUATE_EVERY):
            batch = next(batches)
            optimizer.zero_grad()
            x, y = data.x[batch], data.y[batch]
            if way == "dense":
                scores = model.layers(x)[:, 0]
                torch.nn.functional.binary_cross_entropy_with_logits(scores, y.float()).backward()
            else:
                model((x, y)).backward()
            optimizer.step()
        optimizer.synchronize()
        trained_s += time.perf_counter() - begun_s
        area = area_of(model, optimizer)
        if area >= target and steps == float("inf"):
            steps, seconds = step, trained_s
    optimizer.close()
    return Outcome(steps, seconds, area)


def main() -> None:
    target = float(sys.argv[1]) if len(sys.argv) > 1 else 0.98
    num_steps = int(sys.argv[2]) if len(sys.argv) > 2 else 384
    world = dearmpi.connect()
    for by_digit in (False, True):
        if world.is_root:
            print(f"\n{world.size} ranks, " + ("each its own digits" if by_digit else "all digits"))
            print(f"| | sync_every | steps to {target} | exchanges | seconds | area at the end |")
            print("|---|---|---|---|---|---|")
        for way, every in WAYS:
            found = [
                train(
                    world, way, every, seed, by_digit=by_digit, target=target, num_steps=num_steps
                )
                for seed in SEEDS
            ]
            steps, seconds, area = (
                statistics.median(getattr(one, name) for one in found)
                for name in ("steps", "seconds", "area")
            )
            if world.is_root:
                print(
                    f"| {way} | {every} | {steps:.0f} | {steps / every:.0f} | {seconds:.2f} | "
                    f"{area:.4f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
