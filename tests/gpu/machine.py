"""What the parts share: the device, the time of an iteration, and lines of the table.

With DEARMPI_GPU_DRY=1 the parts run on the host and on next to nothing, to show that they do.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from dearmpi.comm.world import World

IS_DRY = os.environ.get("DEARMPI_GPU_DRY") == "1"
FOLDER = Path(os.environ.get("OUT", "gpu-results"))
_MARK = "ROW "
_AT_A_TIME = 1 if IS_DRY else 4


def device() -> torch.device:
    """The first device, which all ranks share."""
    return torch.device("cpu") if IS_DRY else torch.device("cuda", 0)


def settle() -> None:
    """Wait until the device has nothing left to do."""
    if not IS_DRY:
        torch.cuda.synchronize()


def say(world: World | None, *columns: str) -> None:
    """A row of the table, from rank 0."""
    if world is None or world.is_root:
        print(_MARK + "\t".join(columns), flush=True)


def rows_of(output: str) -> list[list[str]]:
    """The rows among what a part has printed."""
    lines = (line for line in output.splitlines() if line.startswith(_MARK))
    return [line.removeprefix(_MARK).split("\t") for line in lines]


def seconds_each(world: World, step: Callable[[], None], *, num: int) -> float:
    """The median over ``num`` iterations of the slowest rank's seconds (collective).

    The device is waited for before the first and after the last of a few at a time only: within
    them the host may run ahead, as it does in training.
    """
    times = []
    for _ in range(num):
        settle()
        world.barrier()
        start = time.perf_counter()
        for _ in range(_AT_A_TIME):
            step()
        settle()
        times.append((time.perf_counter() - start) / _AT_A_TIME)
    return statistics.median(world.all_reduce(times, "max"))
