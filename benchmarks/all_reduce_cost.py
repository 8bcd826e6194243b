"""What an all-reduce of gloo costs in this job, for predictions of methods that run over it."""

from __future__ import annotations

import time
from collections import deque
from functools import partial

import torch
import torch.distributed as dist

from dearmpi.bench.torch_methods import join_group, leave_group
from dearmpi.comm.world import World
from dearmpi.plan.model.cost import LinkModel
from dearmpi.tune.calibrate import Run, climb
from dearmpi.tune.calibration import fit_sizes

NUM_IN_FLIGHT = 2  # threads that carry out a process group's collectives, unless told otherwise


def calibrate_all_reduce(world: World, *, budget_s: float = 4.0) -> LinkModel:
    """Alone and with two in flight, at sizes as large as ``budget_s`` allows (collective)."""
    join_group(world)
    (times,) = climb(world, [partial(_prepare, world)], budget_s=budget_s)
    leave_group(failed=False)
    return fit_sizes(times).link


def _prepare(world: World, numel: int, count: int) -> Run:
    # Filled, since a page without a write before is slow at first.
    buffers = [torch.empty(numel).fill_(0.0) for _ in range(count)]

    def run(num: int, window: int) -> float:
        world.barrier()
        begin = time.perf_counter()
        under_way: deque[dist.Work] = deque()
        for buffer in buffers[:num]:
            if len(under_way) == window:
                under_way.popleft().wait()
            work = dist.all_reduce(buffer, async_op=True)
            assert work is not None
            under_way.append(work)
        for work in under_way:
            work.wait()
        return time.perf_counter() - begin

    return run
